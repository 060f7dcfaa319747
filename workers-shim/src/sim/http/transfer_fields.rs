//! `kv_transfer_params` both ways, as the NIXL connector reads and writes them, traps included.

use std::net::SocketAddr;
use std::sync::Arc;

use engine_model::{Handoff, Source, Taker, Transfer};
use serde_json::{Map, Value, json};
use vocabulary::Tokens;

/// What this worker says of its side channel.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// Its engine id, new with every life.
    pub(crate) engine: Arc<str>,
    pub(crate) side_channel: SocketAddr,
}

/// What the parameters mean to the engine.
pub(crate) fn transfer_of(params: Option<&Map<String, Value>>) -> Transfer {
    let Some(params) = params else { return Transfer::None };
    let is = |name: &str| params.get(name).and_then(Value::as_bool).unwrap_or(false);
    let has = |name: &str| params.get(name).is_some_and(|value| !value.is_null());
    match (is("do_remote_prefill"), is("do_remote_decode")) {
        // A partial pull without the bidirectional mode.
        (_, true) if has("remote_block_ids") => Transfer::Hang,
        (_, true) => Transfer::Produce,
        (true, false) if has("remote_block_ids") && !has("remote_request_id") => Transfer::Hang,
        (true, false) => source_of(params).map_or(Transfer::None, Transfer::Consume),
        (false, false) => Transfer::None,
    }
}

/// The same in the bidirectional mode: a prefill leg may pull what the last turn's decode leg keeps.
pub(crate) fn two_way_transfer_of(params: Option<&Map<String, Value>>) -> Transfer {
    let Some(given) = params else { return Transfer::None };
    let is = |name: &str| given.get(name).and_then(Value::as_bool).unwrap_or(false);
    let tokens = given.get("remote_num_tokens").and_then(Value::as_u64).unwrap_or_default();
    match (is("do_remote_decode"), transfer_of(params)) {
        (true, _) => source_of(given).map_or(Transfer::Produce, |source| Transfer::ReadBack(source, Tokens(tokens))),
        (false, Transfer::Consume(source)) => Transfer::Exchange(source),
        (false, transfer) => transfer,
    }
}

/// How many tokens the producer found in its cache: what a consumer reports as its own.
pub(crate) fn producer_cached(params: Option<&Map<String, Value>>) -> Option<u32> {
    let cached = params?.get("remote_prefill_cached_tokens")?.as_u64()?;
    u32::try_from(cached).ok()
}

fn source_of(params: &Map<String, Value>) -> Option<Source> {
    let text = |name: &str| params.get(name).and_then(Value::as_str).map(Arc::from);
    let groups = params.get("remote_block_ids")?.as_array()?;
    let first = groups.first().and_then(Value::as_array).unwrap_or(groups);
    let blocks: Option<Vec<u32>> = first.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
    Some(Source {
        engine: text("remote_engine_id")?,
        request: text("remote_request_id")?,
        blocks: blocks.filter(|blocks| !blocks.is_empty())?,
        host: text("remote_host")?,
        port: params.get("remote_port")?.as_u64().and_then(|port| u16::try_from(port).ok())?,
    })
}

/// What the answer of a producer carries, or of a consumer for the next turn.
pub(crate) fn params_of(handoff: &Handoff, own: &Identity) -> Value {
    let mut params = json!({
        "do_remote_prefill": handoff.taker == Taker::Consumer,
        "do_remote_decode": handoff.taker != Taker::Consumer,
        "remote_block_ids": [handoff.blocks],
        "remote_engine_id": own.engine,
        "remote_request_id": handoff.request,
        "remote_host": own.side_channel.ip().to_string(),
        "remote_port": own.side_channel.port(),
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": handoff.tokens,
        "remote_blocks_expiry_time": null,
        "transfer_mode": "pull",
    });
    match handoff.taker {
        Taker::Consumer => params["remote_prefill_cached_tokens"] = json!(handoff.cached),
        Taker::NextTurn(until) => params["remote_blocks_expiry_time"] = json!(until.0 as f64 / 1e6),
    }
    params
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Transfer {
        transfer_of(value.as_object())
    }

    #[test]
    fn what_a_producer_writes_a_consumer_reads() {
        let own = Identity { engine: "e".into(), side_channel: ([127, 0, 0, 1], 5600).into() };
        let handoff =
            Handoff { request: "r".into(), blocks: vec![3, 4], tokens: 20, cached: 16, taker: Taker::Consumer };
        let params = params_of(&handoff, &own);
        assert_eq!(producer_cached(params.as_object()), Some(16));
        let Transfer::Consume(source) = read(params) else { panic!("to be pulled") };
        assert_eq!((source.blocks, source.port, &*source.host), (vec![3, 4], 5600, "127.0.0.1"));
    }

    #[test]
    fn parameters_that_no_engine_survives_hang() {
        let own = Identity { engine: "e".into(), side_channel: ([127, 0, 0, 1], 5600).into() };
        let handoff = Handoff { request: "r".into(), blocks: vec![3], tokens: 20, cached: 0, taker: Taker::Consumer };
        let mut params = params_of(&handoff, &own);
        params["remote_request_id"] = Value::Null;
        assert_eq!(read(params), Transfer::Hang);
        let mut partial = params_of(&handoff, &own);
        partial["do_remote_decode"] = true.into();
        assert_eq!(read(partial), Transfer::Hang);
    }

    #[test]
    fn absent_or_useless_parameters_mean_recompute() {
        assert_eq!(transfer_of(None), Transfer::None);
        assert_eq!(read(json!({"do_remote_prefill": true})), Transfer::None);
        assert_eq!(read(json!({"do_remote_prefill": "yes", "do_remote_decode": 1})), Transfer::None);
        assert_eq!(read(json!({"do_remote_prefill": false, "do_remote_decode": true})), Transfer::Produce);
    }
}
