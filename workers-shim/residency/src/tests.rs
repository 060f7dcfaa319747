//! Helpers shared by the tests of several modules: recorded messages, and small builders.

mod reference;

use vocabulary::{BlockHash, HashSeed, ModelNamespace, PrefixId, RequestNamespace, Tier, Tokens};

use crate::{
    BlockMappingRules, BlockRemoved, BlockStored, DecodeLimits, EngineHash, KvCacheSpecKind, KvEventBatch, decode,
};

pub(crate) const SEED: HashSeed = HashSeed(11);

pub(crate) fn namespace() -> ModelNamespace {
    ModelNamespace { model: "tiny".into(), revision: "".into(), tokenizer: "t".into() }
}

pub(crate) fn root(keys: RequestNamespace<'_>) -> PrefixId {
    namespace().root(SEED, keys)
}

pub(crate) fn rules(block: u64) -> BlockMappingRules {
    BlockMappingRules::new(Tokens(block), SEED, namespace())
}

/// Returns the chain blocks of a text prompt without salt or adapter.
pub(crate) fn chain(block: u64, tokens: &[u32]) -> Vec<BlockHash> {
    chain_from(root(RequestNamespace::default()), block, tokens)
}

pub(crate) fn chain_from(root: PrefixId, block: u64, tokens: &[u32]) -> Vec<BlockHash> {
    let chain = vocabulary::PrefixChain::over_tokens(root, SEED, Tokens(block), tokens);
    chain.ids.iter().map(|id| id.block_hash()).collect()
}

/// Returns an event that stores blocks of four tokens each, with the given hashes.
pub(crate) fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> BlockStored {
    BlockStored {
        hashes: hashes.iter().copied().map(EngineHash).collect(),
        parent: parent.map(EngineHash),
        tokens: tokens.to_vec(),
        block_size: 4,
        tier: Tier::Hbm,
        group: 0,
        kind: KvCacheSpecKind::Full,
        adapter: None,
        salt: None,
        extra: Vec::new(),
    }
}

pub(crate) fn removed(hashes: &[u64]) -> BlockRemoved {
    let hashes = hashes.iter().copied().map(EngineHash).collect();
    BlockRemoved { hashes, tier: Tier::Hbm, group: 0, remaining: Vec::new() }
}

/// Returns the messages of a recording: sequence numbers and batches.
pub(crate) fn recording(text: &str) -> Vec<(u64, KvEventBatch)> {
    payloads(text)
        .into_iter()
        .map(|(sequence, bytes)| (sequence, decode(&bytes, &DecodeLimits::default()).unwrap()))
        .collect()
}

pub(crate) fn payloads(text: &str) -> Vec<(u64, Vec<u8>)> {
    let line = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let hex = line["payload"].as_str().unwrap();
        let bytes = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        (line["sequence"].as_u64().unwrap(), bytes)
    };
    text.lines().map(line).collect()
}

pub(crate) const VLLM_INTEGERS: &str = include_str!("../testdata/vllm_integer_hashes.jsonl");
pub(crate) const VLLM_DIGESTS: &str = include_str!("../testdata/vllm_digest_hashes.jsonl");
pub(crate) const SGLANG: &str = include_str!("../testdata/sglang.jsonl");
