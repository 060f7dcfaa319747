//! Encodes KV events as vLLM 0.32 does: msgpack, a batch is `[time, [event...], rank]`, an event a map tagged by
//! `type`.

use std::sync::Arc;

use engine_model::{PrefixCacheChange, StoredBlocks};
use serde::Serialize;

#[derive(Serialize)]
#[serde(tag = "type")]
enum WireKvEvent<'a> {
    BlockStored(WireBlockStored<'a>),
    BlockRemoved { block_hashes: [u64; 1], medium: &'static str, group_idx: u32 },
    AllBlocksCleared {},
}

#[derive(Serialize)]
struct WireBlockStored<'a> {
    block_hashes: &'a [u64],
    parent_block_hash: Option<u64>,
    token_ids: &'a [u32],
    block_size: u32,
    lora_id: Option<u32>,
    medium: &'static str,
    lora_name: Option<&'a str>,
    extra_keys: Vec<Option<Vec<&'a str>>>,
    group_idx: u32,
    kv_cache_spec_kind: &'static str,
}

/// Encodes one batch; `time` in seconds since the epoch.
pub(crate) fn encode(time: f64, events: &[PrefixCacheChange], block_tokens: u32) -> Vec<u8> {
    let events: Vec<WireKvEvent<'_>> = events.iter().map(|event| wire(event, block_tokens)).collect();
    rmp_serde::to_vec_named(&(time, events, 0u32)).expect("plain numbers and strings always encode")
}

fn wire(event: &PrefixCacheChange, block_tokens: u32) -> WireKvEvent<'_> {
    match event {
        PrefixCacheChange::Stored(stored) => WireKvEvent::BlockStored(stored_wire(stored, block_tokens)),
        PrefixCacheChange::Removed(hash) => {
            WireKvEvent::BlockRemoved { block_hashes: [*hash], medium: "GPU", group_idx: 0 }
        }
        PrefixCacheChange::Cleared => WireKvEvent::AllBlocksCleared {},
    }
}

fn stored_wire(stored: &StoredBlocks, block_tokens: u32) -> WireBlockStored<'_> {
    let keys = |at: usize| {
        let salt = stored.salt.as_deref().filter(|_| at == 0);
        let keys: Vec<&str> = stored.adapter.as_deref().into_iter().chain(salt).collect();
        (!keys.is_empty()).then_some(keys)
    };
    WireBlockStored {
        block_hashes: &stored.hashes,
        parent_block_hash: stored.parent,
        token_ids: &stored.tokens,
        block_size: block_tokens,
        lora_id: stored.adapter.as_deref().map(adapter_number),
        medium: "GPU",
        lora_name: stored.adapter.as_deref(),
        extra_keys: (0..stored.hashes.len()).map(keys).collect(),
        group_idx: 0,
        kv_cache_spec_kind: "full_attention",
    }
}

/// Returns a number for an adapter. vLLM numbers adapters; any stable number will do.
fn adapter_number(name: &str) -> u32 {
    name.bytes().fold(1, |number: u32, byte| number.wrapping_mul(31).wrapping_add(u32::from(byte))) >> 1
}

/// Returns the first frame of every message, in vLLM's default format.
pub(crate) fn default_topic(address: std::net::SocketAddr, model: &str) -> Arc<str> {
    Arc::from(format!("kv@{address}@{model}"))
}
