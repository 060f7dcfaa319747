//! No node gets an entry or a snapshot that its release cannot read.

use consensus::{SupportedLevels, UnsupportedLevel};
use ledger::{Ledger, LedgerEntry};

use crate::ensure;
use crate::property::PropertyResult;

const READABLE: &str = "no node is given what its release cannot read";

pub(crate) fn check_entry(node: u64, levels: SupportedLevels, entry: &LedgerEntry) -> PropertyResult {
    let read = levels.check(entry);
    ensure!(read.is_ok(), READABLE, "node {node}: {read:?}")
}

/// Returns the violation of a node that got something unreadable and stopped.
pub(crate) fn unreadable_violation(node: u64, level_error: UnsupportedLevel) -> PropertyResult {
    ensure!(false, READABLE, "node {node}: {level_error}")
}

pub(crate) fn check_state(node: u64, levels: SupportedLevels, ledger: &Ledger) -> PropertyResult {
    ensure!(
        levels.contains(ledger.level()),
        READABLE,
        "node {node} of {levels}: a snapshot of level {}",
        ledger.level()
    )
}

#[cfg(test)]
mod tests {
    use ledger::{Command, Submission};
    use vocabulary::{ClientId, ClientSerial, LedgerTime};

    use super::*;

    #[test]
    fn an_entry_or_snapshot_of_a_newer_release_is_a_violation() {
        let (old, new) = (SupportedLevels { lowest: 1, highest: 1 }, SupportedLevels { lowest: 1, highest: 2 });
        let command = Command::RaiseLevel(2);
        let submissions = vec![Submission { client: ClientId(1), serial: ClientSerial(1), command }];
        let entry = LedgerEntry { time: LedgerTime(0), submissions };
        assert_eq!(check_entry(1, new, &entry), Ok(()));
        assert!(check_entry(1, old, &entry).is_err());
        let mut ledger = Ledger::default();
        assert_eq!(check_state(1, old, &ledger), Ok(()));
        let open = Submission {
            client: ClientId(1),
            serial: ClientSerial(0),
            command: Command::OpenClient(vocabulary::NodeId(1)),
        };
        let submissions = [vec![open], entry.submissions].concat();
        ledger.apply(1, &LedgerEntry { time: LedgerTime(0), submissions });
        assert!(check_state(1, old, &ledger).is_err() && check_state(1, new, &ledger).is_ok());
    }
}
