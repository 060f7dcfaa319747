"""vLLM's own MooncakeConnector where there is no accelerator: it asks which one is in use, and the answer is the first.

An engine loads this with `"kv_connector_module_path": "mooncake_on_cpu"` and this folder on PYTHONPATH.
"""

import torch

torch.accelerator.current_device_index = lambda: 0

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector  # noqa: E402, F401
