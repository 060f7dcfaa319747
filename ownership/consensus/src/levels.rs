//! Feature levels: which log entries a release can read, and which of them the cluster uses. Pure.
//!
//! A command above the cluster's level never enters the log. The level rises only once every member's release can read
//! what the new level adds. Until then releases can be mixed, and an upgrade can be rolled back.

use ledger::{Command, Ledger, LedgerEntry, Refusal};
use serde::{Deserialize, Serialize};
use vocabulary::NodeId;

/// Range of feature levels that a release supports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, derive_more::Display)]
#[display("{lowest} to {highest}")]
pub struct SupportedLevels {
    /// Lowest supported level.
    pub lowest: u32,
    /// Highest supported level.
    pub highest: u32,
}

impl SupportedLevels {
    /// Returns whether the release supports `level`.
    pub fn contains(self, level: u32) -> bool {
        (self.lowest..=self.highest).contains(&level)
    }

    /// Refuses an entry that this release cannot read. The node must then stop, and must not skip the entry.
    pub fn check(self, entry: &LedgerEntry) -> Result<(), UnsupportedLevel> {
        self.check_level(entry.required_level())
    }

    /// Refuses what a newer release wrote at `level`.
    pub fn check_level(self, level: u32) -> Result<(), UnsupportedLevel> {
        if level > self.highest { Err(UnsupportedLevel { level, levels: self }) } else { Ok(()) }
    }
}

/// Error: a newer release wrote the entry or the snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the ledger is at feature level {level}, and this binary reads {levels}: install the newer release")]
pub struct UnsupportedLevel {
    /// Level of the entry or the snapshot.
    pub level: u32,
    /// Levels that this release supports.
    pub levels: SupportedLevels,
}

/// Refuses a command that is above the cluster's level before it enters the log, where an older release could not read
/// it.
pub fn check_command_level(ledger: &Ledger, command: &Command) -> Result<(), Refusal> {
    let (needed, current) = (command.level(), ledger.level());
    if needed > current { Err(Refusal::FeatureLevelTooLow { needed, current }) } else { Ok(()) }
}

/// What a leader knows of the feature levels that a member supports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemberLevelSupport {
    /// The member does not answer, and may come back with another release.
    Unreachable,
    /// The member reported these levels recently.
    Supports(SupportedLevels),
}

/// Why the level cannot rise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RaiseLevelError {
    /// This member does not answer, so its release is unknown.
    Unreachable(NodeId),
    /// This member's release does not support the level.
    Unsupported(NodeId, SupportedLevels),
}

/// Checks whether the cluster may raise its level to `level`: every member must support it.
pub fn check_raise(
    level: u32,
    members: impl IntoIterator<Item = (NodeId, MemberLevelSupport)>,
) -> Result<(), RaiseLevelError> {
    members.into_iter().try_for_each(|(node, release)| match release {
        MemberLevelSupport::Unreachable => Err(RaiseLevelError::Unreachable(node)),
        MemberLevelSupport::Supports(levels) if !levels.contains(level) => {
            Err(RaiseLevelError::Unsupported(node, levels))
        }
        MemberLevelSupport::Supports(_) => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use ledger::Submission;
    use vocabulary::{ClientId, ClientSerial, LedgerTime};

    use super::*;

    const OLD: SupportedLevels = SupportedLevels { lowest: 1, highest: 1 };
    const NEW: SupportedLevels = SupportedLevels { lowest: 1, highest: 2 };

    fn entry(command: Command) -> LedgerEntry {
        let submissions = vec![Submission { client: ClientId(1), serial: ClientSerial(1), command }];
        LedgerEntry { time: LedgerTime(0), submissions }
    }

    #[test]
    fn the_level_rises_once_every_member_answers_and_supports_it() {
        let members = |second| [(NodeId(1), MemberLevelSupport::Supports(NEW)), (NodeId(2), second)];
        assert_eq!(check_raise(2, members(MemberLevelSupport::Supports(NEW))), Ok(()));
        assert_eq!(
            check_raise(2, members(MemberLevelSupport::Unreachable)),
            Err(RaiseLevelError::Unreachable(NodeId(2)))
        );
        assert_eq!(
            check_raise(2, members(MemberLevelSupport::Supports(OLD))),
            Err(RaiseLevelError::Unsupported(NodeId(2), OLD))
        );
        assert_eq!(check_raise(1, members(MemberLevelSupport::Supports(OLD))), Ok(()));
    }

    #[test]
    fn commands_above_the_level_are_refused_and_unreadable_entries_fail() {
        let (ledger, retire) = (Ledger::default(), Command::RetireNode(NodeId(9)));
        assert_eq!(check_command_level(&ledger, &retire), Err(Refusal::FeatureLevelTooLow { needed: 2, current: 1 }));
        assert_eq!(check_command_level(&ledger, &Command::RaiseLevel(2)), Ok(()));
        assert_eq!(NEW.check(&entry(retire.clone())), Ok(()));
        let unreadable = OLD.check(&entry(retire)).unwrap_err();
        assert!(unreadable.to_string().contains("level 2, and this binary reads 1 to 1: install"), "{unreadable}");
        assert_eq!(OLD.check(&entry(Command::OpenClient(NodeId(1)))), Ok(()));
    }
}
