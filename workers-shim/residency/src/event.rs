//! What engines say about their blocks, in one shape for all encodings and dialects.

use vocabulary::{DpRank, HashSeed, PrefixId, Tier};

/// An engine's own name for a block. Opaque; means something only together with the process that said it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EngineHash(pub u64);

impl EngineHash {
    /// From a signed integer (SGLang): the same bits.
    pub fn signed(value: i64) -> Self {
        Self(value as u64)
    }

    /// From a digest: hashed down, so that nothing depends on which of its bytes are random.
    pub fn digest(bytes: &[u8]) -> Self {
        Self(PrefixId(0).extend_bytes(HashSeed(0), bytes).block_hash().0)
    }
}

/// One message of an engine.
#[derive(Clone, PartialEq, Debug)]
pub struct KvEventBatch {
    /// The engine's wall clock, seconds since the epoch. For lag only.
    pub timestamp: f64,
    /// In the order in which they happened.
    pub events: Vec<KvCacheEvent>,
    /// The rank that speaks, where it says so.
    pub rank: Option<DpRank>,
}

/// One change of an engine's cache.
#[derive(Clone, PartialEq, Debug)]
pub enum KvCacheEvent {
    /// Blocks were added.
    Stored(BlockStored),
    /// Copies of blocks are gone.
    Removed(BlockRemoved),
    /// Nothing is left.
    Cleared,
    /// A kind that is not known here, and does not change residency as far as is known.
    Other,
}

impl KvCacheEvent {
    /// Copies that were stored, and where.
    pub fn stored_copies(&self) -> Option<(Tier, u64)> {
        match self {
            KvCacheEvent::Stored(stored) => Some((stored.tier, stored.hashes.len() as u64)),
            KvCacheEvent::Removed(_) | KvCacheEvent::Cleared | KvCacheEvent::Other => None,
        }
    }
}

/// Consecutive blocks of one prompt that an engine now holds one more copy of.
#[derive(Clone, PartialEq, Debug)]
pub struct BlockStored {
    /// First block first.
    pub hashes: Vec<EngineHash>,
    /// The block before the first one; none at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// `block_size` for each block; may be empty for tiers below device memory.
    pub tokens: Vec<u32>,
    /// Tokens a block.
    pub block_size: u32,
    /// Where they lie.
    pub tier: Tier,
    /// KV cache group.
    pub group: u32,
    /// What kind of attention the group serves.
    pub kind: KvCacheSpecKind,
    /// LoRA adapter name (or `#id` from engines that only tell the number).
    pub adapter: Option<Box<str>>,
    /// Cache salt, where it is a field of its own (SGLang).
    pub salt: Option<Box<str>>,
    /// What else went into each block's hash; empty or one entry a block.
    pub extra: Vec<Vec<ExtraKey>>,
}

/// Copies that are gone.
#[derive(Clone, PartialEq, Debug)]
pub struct BlockRemoved {
    /// One entry a copy.
    pub hashes: Vec<EngineHash>,
    /// Where they lay.
    pub tier: Tier,
    /// KV cache group.
    pub group: u32,
    /// How many copies are left of each, from engines that count; empty otherwise.
    pub remaining: Vec<u32>,
}

/// What else a block's KV depends on, besides tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExtraKey {
    /// A salt, an adapter, the digest of an image.
    Text(Box<str>),
    /// Anything else, as it was encoded.
    Raw(Box<[u8]>),
}

/// The attention that a KV cache group serves, as far as it matters for prefix reuse.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KvCacheSpecKind {
    /// All earlier blocks are needed: a leading run of these is a reusable prefix.
    Full,
    /// Only a window or a running state is kept: says nothing about the prefix.
    Window,
}

impl KvCacheSpecKind {
    /// From `kv_cache_spec_kind`; engines that do not tell have one kind, full attention.
    pub fn from_name(name: Option<&str>) -> Self {
        match name {
            None => KvCacheSpecKind::Full,
            Some(name) if name.contains("full") || name.contains("mla") => KvCacheSpecKind::Full,
            Some(_) => KvCacheSpecKind::Window,
        }
    }
}

/// The memory that an event's `medium` names; engines that do not tell mean device memory.
pub(crate) fn tier_of(medium: Option<&str>) -> Tier {
    let is = |names: &[&str]| medium.is_some_and(|m| names.iter().any(|name| m.eq_ignore_ascii_case(name)));
    match medium {
        None => Tier::Hbm,
        Some(_) if is(&["gpu", "device", "hbm", "npu", "xpu", "tpu"]) => Tier::Hbm,
        Some(_) if is(&["cpu", "cpu_pinned", "cpu_tier1", "host", "dram"]) => Tier::Host,
        Some(_) => Tier::Disk,
    }
}
