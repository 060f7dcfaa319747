//! Section `[prefix_replication]`: replication of prefixes to other workers between two steps.

use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::ByteCount;

/// Whether prefixes are replicated between steps, and at which rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixReplicationConfig {
    /// Enables replication.
    pub enabled: bool,
    /// Maximum average rate of replicated KV, per second.
    #[default(ByteCount::mebibytes(256))]
    pub bandwidth: ByteCount,
}

impl PrefixReplicationConfig {
    /// Returns the setting that is out of range, and what is accepted.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        (!self.bandwidth.is_bandwidth()).then_some(("prefix_replication.bandwidth", ByteCount::ACCEPTED_BANDWIDTH))
    }
}
