//! Feature levels: what a release can read, and what of it the cluster uses. Pure.
//!
//! A command above the cluster's level never enters the log, and the level rises only once every member's release can
//! read what it brings. So releases can be mixed until then, and taken back.

use ledger::{Command, Entry, Ledger, Refusal};
use serde::{Deserialize, Serialize};
use vocabulary::NodeId;

/// The feature levels that a release can work at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, derive_more::Display)]
#[display("{lowest} to {highest}")]
pub struct Levels {
    /// The oldest.
    pub lowest: u32,
    /// The newest.
    pub highest: u32,
}

impl Levels {
    /// Whether it can work at `level`.
    pub fn contains(self, level: u32) -> bool {
        (self.lowest..=self.highest).contains(&level)
    }

    /// Refuses an entry that the release cannot read. It must stop there and not skip it.
    pub fn check(self, entry: &Entry) -> Result<(), Unreadable> {
        self.check_level(entry.known_from())
    }

    /// Refuses what a newer release wrote at `level`.
    pub fn check_level(self, level: u32) -> Result<(), Unreadable> {
        if level > self.highest { Err(Unreadable { level, levels: self }) } else { Ok(()) }
    }
}

/// An entry or a snapshot that a newer release wrote.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the ledger is at feature level {level}, and this binary reads {levels}: install the newer release")]
pub struct Unreadable {
    /// The entry's.
    pub level: u32,
    /// The release's.
    pub levels: Levels,
}

/// Refuses a command that the cluster's level does not have yet, before it is in the log, which an older release could
/// not read then.
pub fn check_gate(ledger: &Ledger, command: &Command) -> Result<(), Refusal> {
    let (needed, current) = (command.level(), ledger.level());
    if needed > current { Err(Refusal::Level { needed, current }) } else { Ok(()) }
}

/// What a leader knows of a member's release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Release {
    /// It does not answer now: it may come back as another one.
    Silent,
    /// It said so lately.
    Reads(Levels),
}

/// Why the level cannot rise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotRaised {
    /// Nobody knows what it will come back as.
    Silent(NodeId),
    /// Its release is too old, or too new.
    CannotRead(NodeId, Levels),
}

/// Whether the cluster may work at `level` from now on: every member must be able to.
pub fn check_raise(level: u32, members: impl IntoIterator<Item = (NodeId, Release)>) -> Result<(), NotRaised> {
    members.into_iter().try_for_each(|(node, release)| match release {
        Release::Silent => Err(NotRaised::Silent(node)),
        Release::Reads(levels) if !levels.contains(level) => Err(NotRaised::CannotRead(node, levels)),
        Release::Reads(_) => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use ledger::Submission;
    use vocabulary::{ClientId, ClientSerial, LedgerTime};

    use super::*;

    const OLD: Levels = Levels { lowest: 1, highest: 1 };
    const NEW: Levels = Levels { lowest: 1, highest: 2 };

    fn entry(command: Command) -> Entry {
        let submissions = vec![Submission { client: ClientId(1), serial: ClientSerial(1), command }];
        Entry { time: LedgerTime(0), submissions }
    }

    #[test]
    fn the_level_rises_once_every_member_answers_and_can_work_at_it() {
        let members = |second| [(NodeId(1), Release::Reads(NEW)), (NodeId(2), second)];
        assert_eq!(check_raise(2, members(Release::Reads(NEW))), Ok(()));
        assert_eq!(check_raise(2, members(Release::Silent)), Err(NotRaised::Silent(NodeId(2))));
        assert_eq!(check_raise(2, members(Release::Reads(OLD))), Err(NotRaised::CannotRead(NodeId(2), OLD)));
        assert_eq!(check_raise(1, members(Release::Reads(OLD))), Ok(()));
    }

    #[test]
    fn what_the_level_does_not_have_enters_no_log_and_what_a_release_cannot_read_is_not_skipped() {
        let (ledger, retire) = (Ledger::default(), Command::RetireNode(NodeId(9)));
        assert_eq!(check_gate(&ledger, &retire), Err(Refusal::Level { needed: 2, current: 1 }));
        assert_eq!(check_gate(&ledger, &Command::RaiseLevel(2)), Ok(()));
        assert_eq!(NEW.check(&entry(retire.clone())), Ok(()));
        let unreadable = OLD.check(&entry(retire)).unwrap_err();
        assert!(unreadable.to_string().contains("level 2, and this binary reads 1 to 1: install"), "{unreadable}");
        assert_eq!(OLD.check(&entry(Command::OpenClient(NodeId(1)))), Ok(()));
    }
}
