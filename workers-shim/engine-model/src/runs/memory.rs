//! What an engine can be told of its memory from outside.

use vocabulary::Tokens;

/// How much fits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MemorySizes {
    /// Tokens of KV in device memory.
    pub device: Tokens,
    /// Tokens of KV in the host tier; 0 for none.
    pub host: Tokens,
    /// Tokens a second that come back from the host tier.
    pub host_tokens_per_second: f64,
    /// Tokens of KV on disk; 0 for none.
    pub disk: Tokens,
    /// How fast the disk is.
    pub disk_speed: DiskSpeed,
}

/// Tokens a second of one disk, which reads one thing at a time and writes between its reads.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DiskSpeed {
    /// Read.
    pub read: f64,
    /// Written.
    pub write: f64,
}

impl MemorySizes {
    /// The same without slower tiers.
    pub fn device_only(self) -> Self {
        Self { host: Tokens::ZERO, disk: Tokens::ZERO, ..self }
    }
}

/// What of a prompt lies where, when it is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierDepths {
    /// Leading tokens in device memory.
    pub device: Tokens,
    /// Leading tokens in device memory or the host tier.
    pub with_host: Tokens,
    /// Leading tokens in any tier: those that need not be computed.
    pub with_disk: Tokens,
}

impl TierDepths {
    /// So many leading tokens in device memory, and no more in slower tiers.
    pub fn on_device(tokens: Tokens) -> Self {
        Self { device: tokens, with_host: tokens, with_disk: tokens }
    }
}

/// What went to a disk and came from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskTraffic {
    /// Tokens of KV that were written.
    pub written: Tokens,
    /// Tokens of KV that were read.
    pub read: Tokens,
    /// Of those, each counted once however often it was read.
    pub useful: Tokens,
    /// Tokens of KV that were dropped because the disk was too busy to write them.
    pub dropped: Tokens,
}
