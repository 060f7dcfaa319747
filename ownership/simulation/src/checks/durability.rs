//! Acknowledged entries are on disk on a quorum: checked at the moment of the acknowledgement, on the disks themselves.

use std::collections::{BTreeMap, BTreeSet};

use crate::ensure;
use crate::property::PropertyResult;

const ACKNOWLEDGED: &str = "acknowledged means on disk on a quorum";

/// Whether each node has an entry durably.
pub(crate) type EntryDurability = BTreeMap<u64, bool>;

/// Checks that a quorum of each set of voters keeps entry `index`.
pub(crate) fn check(index: u64, voters: &[BTreeSet<u64>], keepers: &EntryDurability) -> PropertyResult {
    let has_quorum = |set: &BTreeSet<u64>| {
        let copies = set.iter().filter(|node| keepers.get(node).copied().unwrap_or(false)).count();
        copies * 2 > set.len()
    };
    ensure!(voters.iter().all(has_quorum), ACKNOWLEDGED, "entry {index}: voters {voters:?}, kept by {keepers:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_of_every_voter_set_must_have_the_entry() {
        let keepers = BTreeMap::from([(1, true), (2, true), (3, false), (4, false)]);
        assert_eq!(check(1, &[BTreeSet::from([1, 2, 3])], &keepers), Ok(()));
        assert!(check(1, &[BTreeSet::from([1, 3, 4])], &keepers).is_err());
        assert!(check(1, &[BTreeSet::from([1, 2])], &keepers).is_ok());
        assert!(check(1, &[BTreeSet::from([1, 3])], &keepers).is_err());
        assert!(check(1, &[BTreeSet::from([1, 2, 3]), BTreeSet::from([3, 4, 5])], &keepers).is_err());
    }
}
