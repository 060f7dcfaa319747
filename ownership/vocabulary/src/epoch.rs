//! The fencing token of ownership.

use serde::{Deserialize, Serialize};

/// Fencing token: when an ownership was granted, as (restore generation, log index of the grant, position in the
/// entry).
///
/// Epochs only increase, across restarts, snapshots and restores. A write that carries an older epoch is refused.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default, derive_more::Display,
)]
#[display("{generation}.{index}.{position}")]
pub struct Epoch {
    /// When the ledger was restored from a backup, at least in seconds since 1970; 0 if it never was.
    pub generation: u32,
    /// Raft log index of the entry that granted the ownership.
    pub index: u64,
    /// Position of the granting command inside that entry.
    pub position: u32,
}

#[cfg(test)]
mod tests {
    use super::Epoch;

    #[test]
    fn a_restored_generation_outranks_every_earlier_index() {
        let old = Epoch { generation: 0, index: u64::MAX, position: u32::MAX };
        assert!(Epoch { generation: 1, index: 0, position: 0 } > old);
    }
}
