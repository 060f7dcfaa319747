//! How sessions are moved away from workers that drain.

use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::ByteCount;

/// Section `[drain]`.
#[derive(Clone, Copy, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct DrainConfig {
    /// Most KV that is moved a second when sessions are moved away from a worker, on the average.
    #[default(ByteCount::mebibytes(1024))]
    pub bandwidth: ByteCount,
}

impl DrainConfig {
    /// What is out of bounds, and what is accepted.
    pub(super) fn problem(&self) -> Option<(&'static str, &'static str)> {
        (!self.bandwidth.is_bandwidth()).then_some(("drain.bandwidth", ByteCount::ACCEPTED_BANDWIDTH))
    }
}
