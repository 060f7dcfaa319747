//! vLLM's Mooncake connector: both legs carry the id of the transfer, and the target leg also the source's transfer
//! endpoint. The router relays no parameters between the legs. Observed with vLLM 0.32 over TCP.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json as value;

use super::{ConnectorProtocol, DpRank, LegFields, HandoffParams, TransferHandshake, LegOrder, TransferEndpoint, WorkerRole, ConnectorUnavailable, json};

/// vLLM's default for `VLLM_MOONCAKE_BOOTSTRAP_PORT`.
const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;
const PATH: &str = "/query";

pub(super) struct MooncakeConnector;

fn transfer_id(handshake: &TransferHandshake) -> String {
    format!("xfer-{:016x}", handshake.room)
}

impl ConnectorProtocol for MooncakeConnector {
    fn leg_order(&self) -> Option<LegOrder> {
        Some(LegOrder::Concurrent)
    }

    fn reserved_fields(&self) -> &'static [&'static str] {
        &["kv_transfer_params"]
    }

    fn source_fields(&self, handshake: &TransferHandshake) -> LegFields {
        let parameters = value!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer_id(handshake)});
        vec![("kv_transfer_params", json(parameters))]
    }

    fn target_fields(&self, handshake: &TransferHandshake, _: Option<HandoffParams>) -> LegFields {
        let engines = &handshake.endpoint.engines;
        let engine = engines.iter().find(|(rank, _)| *rank == handshake.rank).map(|(_, engine)| engine);
        let parameters = value!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_bootstrap_addr": handshake.endpoint.address,
            "remote_engine_id": engine,
            "transfer_id": transfer_id(handshake),
        });
        vec![("kv_transfer_params", json(parameters))]
    }

    /// A consumer runs no bootstrap server.
    fn needs_endpoint(&self, role: WorkerRole) -> bool {
        role != WorkerRole::Decode
    }

    fn discovery_url(&self, endpoint: &str, configured: Option<&str>) -> Option<String> {
        let usual = || {
            let host = crate::events::host_of(endpoint);
            format!("http://{host}:{DEFAULT_BOOTSTRAP_PORT}")
        };
        let address = configured.map_or_else(usual, |address| address.trim_end_matches('/').to_owned());
        Some(format!("{address}{PATH}"))
    }

    fn parse_endpoint(&self, queried_url: &str, answer: &str) -> Result<TransferEndpoint, ConnectorUnavailable> {
        let ranks: BTreeMap<u16, BootstrapRank> = serde_json::from_str(answer).map_err(|_| ConnectorUnavailable::NoRanks)?;
        if ranks.is_empty() {
            return Err(ConnectorUnavailable::NoEngines);
        }
        let address = queried_url.strip_suffix(PATH).unwrap_or(queried_url).to_owned();
        let engines = ranks.into_iter().map(|(rank, entry)| (DpRank(rank), entry.engine_id)).collect();
        Ok(TransferEndpoint { address, engines, ..TransferEndpoint::default() })
    }
}

#[derive(Deserialize)]
struct BootstrapRank {
    engine_id: String,
}
