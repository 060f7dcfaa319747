//! Parses and writes `kv_transfer_params` as vLLM's NIXL connector does, including its pitfalls.

use std::net::SocketAddr;
use std::sync::Arc;

use engine_model::{HandoffOffer, HoldPurpose, RemoteBlocks, TransferRole};
use serde_json::{Map, Value, json};
use vocabulary::Tokens;

/// What this worker reports about its side channel.
#[derive(Clone, Debug)]
pub(crate) struct SideChannelIdentity {
    /// Its engine id, which is new in every process.
    pub(crate) engine: Arc<str>,
    pub(crate) side_channel: SocketAddr,
}

/// Converts the parameters to the engine's transfer role.
pub(crate) fn transfer_of(params: Option<&Map<String, Value>>) -> TransferRole {
    let Some(params) = params else { return TransferRole::None };
    let is = |name: &str| params.get(name).and_then(Value::as_bool).unwrap_or(false);
    let has = |name: &str| params.get(name).is_some_and(|value| !value.is_null());
    match (is("do_remote_prefill"), is("do_remote_decode")) {
        // A partial pull, which needs the bidirectional mode.
        (_, true) if has("remote_block_ids") => TransferRole::Hang,
        (_, true) => TransferRole::Produce,
        (true, false) if has("remote_block_ids") && !has("remote_request_id") => TransferRole::Hang,
        (true, false) => source_of(params).map_or(TransferRole::None, TransferRole::Consume),
        (false, false) => TransferRole::None,
    }
}

/// Converts the parameters in bidirectional mode: a prefill leg may pull the KV that the last turn's decode leg keeps.
pub(crate) fn bidirectional_transfer_of(params: Option<&Map<String, Value>>) -> TransferRole {
    let Some(fields) = params else { return TransferRole::None };
    let is = |name: &str| fields.get(name).and_then(Value::as_bool).unwrap_or(false);
    let tokens = fields.get("remote_num_tokens").and_then(Value::as_u64).unwrap_or_default();
    match (is("do_remote_decode"), transfer_of(params)) {
        (true, _) => {
            source_of(fields).map_or(TransferRole::Produce, |source| TransferRole::ReversePull(source, Tokens(tokens)))
        }
        (false, TransferRole::Consume(source)) => TransferRole::Exchange(source),
        (false, transfer) => transfer,
    }
}

/// Returns how many tokens the producer found in its cache, which the consumer reports as its own.
pub(crate) fn producer_cached(params: Option<&Map<String, Value>>) -> Option<u32> {
    let cached = params?.get("remote_prefill_cached_tokens")?.as_u64()?;
    u32::try_from(cached).ok()
}

fn source_of(params: &Map<String, Value>) -> Option<RemoteBlocks> {
    let text = |name: &str| params.get(name).and_then(Value::as_str).map(Arc::from);
    let groups = params.get("remote_block_ids")?.as_array()?;
    let first = groups.first().and_then(Value::as_array).unwrap_or(groups);
    let blocks: Option<Vec<u32>> = first.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
    Some(RemoteBlocks {
        engine: text("remote_engine_id")?,
        request: text("remote_request_id")?,
        blocks: blocks.filter(|blocks| !blocks.is_empty())?,
        host: text("remote_host")?,
        port: params.get("remote_port")?.as_u64().and_then(|port| u16::try_from(port).ok())?,
    })
}

/// Returns the parameters in the answer of a producer, or of a consumer for the next turn.
pub(crate) fn params_of(handoff: &HandoffOffer, own: &SideChannelIdentity) -> Value {
    let mut params = json!({
        "do_remote_prefill": handoff.target == HoldPurpose::Consumer,
        "do_remote_decode": handoff.target != HoldPurpose::Consumer,
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
    match handoff.target {
        HoldPurpose::Consumer => params["remote_prefill_cached_tokens"] = json!(handoff.cached),
        HoldPurpose::NextTurn(until) => params["remote_blocks_expiry_time"] = json!(until.0 as f64 / 1e6),
    }
    params
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> TransferRole {
        transfer_of(value.as_object())
    }

    #[test]
    fn consumer_reads_the_producers_params() {
        let own = SideChannelIdentity { engine: "e".into(), side_channel: ([127, 0, 0, 1], 5600).into() };
        let handoff = HandoffOffer {
            request: "r".into(),
            blocks: vec![3, 4],
            tokens: 20,
            cached: 16,
            target: HoldPurpose::Consumer,
        };
        let params = params_of(&handoff, &own);
        assert_eq!(producer_cached(params.as_object()), Some(16));
        let TransferRole::Consume(source) = read(params) else { panic!("to be pulled") };
        assert_eq!((source.blocks, source.port, &*source.host), (vec![3, 4], 5600, "127.0.0.1"));
    }

    #[test]
    fn malformed_params_hang_the_request() {
        let own = SideChannelIdentity { engine: "e".into(), side_channel: ([127, 0, 0, 1], 5600).into() };
        let handoff =
            HandoffOffer { request: "r".into(), blocks: vec![3], tokens: 20, cached: 0, target: HoldPurpose::Consumer };
        let mut params = params_of(&handoff, &own);
        params["remote_request_id"] = Value::Null;
        assert_eq!(read(params), TransferRole::Hang);
        let mut partial = params_of(&handoff, &own);
        partial["do_remote_decode"] = true.into();
        assert_eq!(read(partial), TransferRole::Hang);
    }

    #[test]
    fn absent_or_useless_params_mean_recompute() {
        assert_eq!(transfer_of(None), TransferRole::None);
        assert_eq!(read(json!({"do_remote_prefill": true})), TransferRole::None);
        assert_eq!(read(json!({"do_remote_prefill": "yes", "do_remote_decode": 1})), TransferRole::None);
        assert_eq!(read(json!({"do_remote_prefill": false, "do_remote_decode": true})), TransferRole::Produce);
    }
}
