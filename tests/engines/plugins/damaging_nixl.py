"""As `patient_nixl`, and a link that can be broken: while the file DAMAGED_WHILE exists, what comes from the engine whose side
channel has the port DAMAGED_FROM is wiped once it is here, as bad memory or a bad cable would do it. Nobody is told.
"""

import os
from pathlib import Path

from patient_nixl import NixlConnector  # noqa: F401
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlBaseConnectorWorker

PORT, WHILE = int(os.environ["DAMAGED_FROM"]), Path(os.environ["DAMAGED_WHILE"])
sound = NixlBaseConnectorWorker.get_transfer_results


def get_transfer_results(self):
    coming = {name: meta for name, meta in self._recving_metadata.items() if meta.remote and meta.remote.port == PORT}
    results = sound(self)
    if WHILE.exists():
        for name in (results.finished_recving - results.failed_recving) & coming.keys():
            (blocks,) = coming[name].local_physical_block_ids
            self._zero_region_blocks([list(blocks)] * len(self.region_names))
    return results


NixlBaseConnectorWorker.get_transfer_results = get_transfer_results
