//! vLLM's Mooncake connector: both legs carry the transfer's name, the target also where the source's engine is met.
//! Nothing is relayed. Seen with vLLM 0.32 over TCP.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json as value;

use super::{Dialect, DpRank, Fields, Handoff, Meeting, Order, Place, Role, Unmet, json};

/// `VLLM_MOONCAKE_BOOTSTRAP_PORT` where nobody set it.
const PORT: u16 = 8998;
const PATH: &str = "/query";

pub(super) struct Speaker;

fn name(meeting: &Meeting) -> String {
    format!("xfer-{:016x}", meeting.room)
}

impl Dialect for Speaker {
    fn order(&self) -> Option<Order> {
        Some(Order::Together)
    }

    fn reserved(&self) -> &'static [&'static str] {
        &["kv_transfer_params"]
    }

    fn at_source(&self, meeting: &Meeting) -> Fields {
        let parameters = value!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": name(meeting)});
        vec![("kv_transfer_params", json(parameters))]
    }

    fn at_target(&self, meeting: &Meeting, _: Option<Handoff>) -> Fields {
        let engines = &meeting.place.engines;
        let engine = engines.iter().find(|(rank, _)| *rank == meeting.rank).map(|(_, engine)| engine);
        let parameters = value!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_bootstrap_addr": meeting.place.address,
            "remote_engine_id": engine,
            "transfer_id": name(meeting),
        });
        vec![("kv_transfer_params", json(parameters))]
    }

    /// A consumer starts no bootstrap server.
    fn is_met(&self, role: Role) -> bool {
        role != Role::Decode
    }

    fn asks(&self, endpoint: &str, configured: Option<&str>) -> Option<String> {
        let usual = || {
            let host = crate::events::host_of(endpoint);
            format!("http://{host}:{PORT}")
        };
        let address = configured.map_or_else(usual, |address| address.trim_end_matches('/').to_owned());
        Some(format!("{address}{PATH}"))
    }

    fn place(&self, asked: &str, answer: &str) -> Result<Place, Unmet> {
        let ranks: BTreeMap<u16, Rank> = serde_json::from_str(answer).map_err(|_| Unmet::NoRanks)?;
        if ranks.is_empty() {
            return Err(Unmet::Nobody);
        }
        let address = asked.strip_suffix(PATH).unwrap_or(asked).to_owned();
        let engines = ranks.into_iter().map(|(rank, entry)| (DpRank(rank), entry.engine_id)).collect();
        Ok(Place { address, engines, ..Place::default() })
    }
}

#[derive(Deserialize)]
struct Rank {
    engine_id: String,
}
