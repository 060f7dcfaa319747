//! The fencing token.

use serde::{Deserialize, Serialize};

/// When an ownership was granted: (restore generation, log index of the grant, position in the entry).
///
/// It only grows, over restarts, snapshots and restores; a write that carries an older one is refused.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default, derive_more::Display,
)]
#[display("{generation}.{index}.{position}")]
pub struct Epoch {
    /// When the ledger was restored from a backup, in seconds since 1970 at least; 0 where it never was.
    pub generation: u32,
    /// Raft log index of the entry that granted it.
    pub index: u64,
    /// Position of the command inside that entry.
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
