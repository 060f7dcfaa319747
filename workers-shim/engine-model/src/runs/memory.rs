//! Sizes and usage of an engine's memory tiers.

use vocabulary::Tokens;

/// Sizes of the memory tiers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MemorySizes {
    /// Tokens of KV in device memory.
    pub device: Tokens,
    /// Tokens of KV in the host tier; 0 for none.
    pub host: Tokens,
    /// Tokens per second read from the host tier.
    pub host_tokens_per_second: f64,
    /// Tokens of KV on disk; 0 for none.
    pub disk: Tokens,
    /// Speed of the disk.
    pub disk_speed: DiskSpeed,
}

/// Speed of one disk in tokens per second. It reads one thing at a time and writes between reads.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DiskSpeed {
    /// Reading.
    pub read: f64,
    /// Writing.
    pub write: f64,
}

impl MemorySizes {
    /// Returns the same sizes without slower tiers.
    pub fn device_only(self) -> Self {
        Self { host: Tokens::ZERO, disk: Tokens::ZERO, ..self }
    }
}

/// Which leading part of a prompt is stored in which tiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PromptTierDepths {
    /// Leading tokens in device memory.
    pub device: Tokens,
    /// Leading tokens in device memory or the host tier.
    pub with_host: Tokens,
    /// Leading tokens in any tier, which need not be computed.
    pub with_disk: Tokens,
}

impl PromptTierDepths {
    /// Returns depths with `tokens` leading tokens in device memory and no more in slower tiers.
    pub fn on_device(tokens: Tokens) -> Self {
        Self { device: tokens, with_host: tokens, with_disk: tokens }
    }
}

/// Traffic of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskTraffic {
    /// Tokens of KV that were written.
    pub written: Tokens,
    /// Tokens of KV that were read.
    pub read: Tokens,
    /// Tokens of KV that were read, each counted only once.
    pub useful: Tokens,
    /// Tokens of KV that were dropped because the disk was too busy to write them.
    pub dropped: Tokens,
}
