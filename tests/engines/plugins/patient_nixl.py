"""vLLM's own NixlConnector, whose progress thread sleeps between looks instead of spinning.

NIXL's Python API sets that thread's delay to 0 microseconds, one busy core an engine: too much for two engines on two cores.
An engine loads this with `"kv_connector_module_path": "patient_nixl"` and this folder on PYTHONPATH.
"""

import os
import sys

os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")

import nixl._api  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector  # noqa: E402, F401

PAUSE_US = 1000


def slow_down() -> None:
    # The wheel for CUDA and the one without hide the agent in different modules.
    homes = [nixl._api, sys.modules.get(nixl._api.nixl_agent.__module__)]
    bindings = next(home.nixlBind for home in homes if hasattr(home, "nixlBind"))
    make = bindings.nixlAgent

    def agent(name, config):
        config.pthrDelay = PAUSE_US
        return make(name, config)

    bindings.nixlAgent = agent


slow_down()
