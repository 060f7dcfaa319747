//! Section `[ahead]`: what is sent to other workers between two steps.

use serde::Deserialize;
use smart_default::SmartDefault;

use crate::config::units::ByteCount;

/// Whether prefixes move while nobody asks for them, and how much.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixReplicationConfig {
    /// Whether any does.
    pub enabled: bool,
    /// Most KV that is sent a second, on the average.
    #[default(ByteCount::mebibytes(256))]
    pub bandwidth: ByteCount,
}

impl PrefixReplicationConfig {
    /// Returns the setting that is out of range, and what is accepted.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        (!self.bandwidth.is_bandwidth()).then_some(("ahead.bandwidth", ByteCount::ACCEPTED_BANDWIDTH))
    }
}
