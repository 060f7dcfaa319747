//! Engines' KV cache events, in one form for all encodings and engines.

use vocabulary::{DpRank, HashSeed, PrefixId, Tier};

/// An engine's own hash of a block. Opaque, and meaningful only within the process that sent it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EngineHash(pub u64);

impl EngineHash {
    /// Converts a signed integer (SGLang) by its bits.
    pub fn signed(value: i64) -> Self {
        Self(value as u64)
    }

    /// Hashes a digest to 64 bits, without assumptions about which of its bytes are random.
    pub fn digest(bytes: &[u8]) -> Self {
        Self(PrefixId(0).extend_bytes(HashSeed(0), bytes).block_hash().0)
    }
}

/// The contents of one message of an engine.
#[derive(Clone, PartialEq, Debug)]
pub struct KvEventBatch {
    /// The engine's wall-clock time in seconds since the epoch. Used only to measure lag.
    pub timestamp: f64,
    /// The events, in order of occurrence.
    pub events: Vec<KvCacheEvent>,
    /// The sending rank, if the message contains it.
    pub rank: Option<DpRank>,
}

/// One change of an engine's cache.
#[derive(Clone, PartialEq, Debug)]
pub enum KvCacheEvent {
    /// Copies of blocks were added.
    Stored(BlockStored),
    /// Copies of blocks were removed.
    Removed(BlockRemoved),
    /// The cache was emptied.
    Cleared,
    /// An unknown kind of event, which is assumed not to affect residency.
    Other,
}

impl KvCacheEvent {
    /// Returns the tier and the number of stored copies.
    pub fn stored_copies(&self) -> Option<(Tier, u64)> {
        match self {
            KvCacheEvent::Stored(stored) => Some((stored.tier, stored.hashes.len() as u64)),
            KvCacheEvent::Removed(_) | KvCacheEvent::Cleared | KvCacheEvent::Other => None,
        }
    }
}

/// Consecutive blocks of one prompt, of each of which the engine now has one more copy.
#[derive(Clone, PartialEq, Debug)]
pub struct BlockStored {
    /// Hashes of the blocks, first block first.
    pub hashes: Vec<EngineHash>,
    /// The block before the first one; None at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// `block_size` tokens per block; may be empty for tiers below device memory.
    pub tokens: Vec<u32>,
    /// Tokens per block.
    pub block_size: u32,
    /// Where they are stored.
    pub tier: Tier,
    /// KV cache group.
    pub group: u32,
    /// The kind of attention of the group.
    pub kind: KvCacheSpecKind,
    /// LoRA adapter name, or `#id` from engines that only report its number.
    pub adapter: Option<Box<str>>,
    /// Cache salt, if the engine has a separate field for it (SGLang).
    pub salt: Option<Box<str>>,
    /// Further inputs of each block's hash; either empty or one entry per block.
    pub extra: Vec<Vec<ExtraKey>>,
}

/// Removed copies.
#[derive(Clone, PartialEq, Debug)]
pub struct BlockRemoved {
    /// One entry per copy.
    pub hashes: Vec<EngineHash>,
    /// Where they were stored.
    pub tier: Tier,
    /// KV cache group.
    pub group: u32,
    /// Remaining copies of each block, from engines that count them; otherwise empty.
    pub remaining: Vec<u32>,
}

/// An input of a block's KV other than its tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExtraKey {
    /// A salt, an adapter name, or the digest of an image.
    Text(Box<str>),
    /// Anything else, still encoded.
    Raw(Box<[u8]>),
}

/// Kind of attention of a KV cache group, as far as it matters for prefix reuse.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KvCacheSpecKind {
    /// All earlier blocks are needed: a leading run of these is a reusable prefix.
    Full,
    /// Only a window or a running state is kept, which says nothing about the prefix.
    Window,
}

impl KvCacheSpecKind {
    /// Parses `kv_cache_spec_kind`; engines without this field have only full attention.
    pub fn from_name(name: Option<&str>) -> Self {
        match name {
            None => KvCacheSpecKind::Full,
            Some(name) if name.contains("full") || name.contains("mla") => KvCacheSpecKind::Full,
            Some(_) => KvCacheSpecKind::Window,
        }
    }
}

/// Parses an event's `medium`; engines without this field mean device memory.
pub(crate) fn tier_of(medium: Option<&str>) -> Tier {
    let is = |names: &[&str]| medium.is_some_and(|m| names.iter().any(|name| m.eq_ignore_ascii_case(name)));
    match medium {
        None => Tier::Hbm,
        Some(_) if is(&["gpu", "device", "hbm", "npu", "xpu", "tpu"]) => Tier::Hbm,
        Some(_) if is(&["cpu", "cpu_pinned", "cpu_tier1", "host", "dram"]) => Tier::Host,
        Some(_) => Tier::Disk,
    }
}
