//! The nemeses. Each strikes, holds, and takes everything back; what recovers by itself is left to recover.

mod changes;
mod disks;
mod leases;
mod links;
mod many;
mod processes;
mod routers;
mod versions;

use crate::NemesisError;
use crate::arena::Arena;
use crate::check::Broken;
use crate::history::At;

/// What a nemesis did.
#[derive(Clone, Debug)]
pub(crate) struct Strike {
    /// Faults that were injected.
    pub(crate) faults: u32,
    /// When the first began.
    pub(crate) began: At,
    /// When the last was taken back.
    pub(crate) healed: At,
    /// When the leader was lost, if it was.
    pub(crate) leader_lost: Vec<At>,
    /// What did not hold, beside what is checked after every nemesis.
    pub(crate) broken: Vec<Broken>,
    /// Worth a line in the table.
    pub(crate) note: String,
}

impl Strike {
    /// Begins now.
    fn begin(arena: &Arena) -> Strike {
        let now = arena.history.now();
        Strike { faults: 0, began: now, healed: now, leader_lost: Vec::new(), broken: Vec::new(), note: String::new() }
    }

    /// Counts a fault.
    fn fault(&mut self) {
        self.faults += 1;
    }

    /// Counts a fault that takes the leader away.
    fn takes_leader(&mut self, arena: &Arena) {
        self.faults += 1;
        self.leader_lost.push(arena.history.now());
    }

    /// Ends now.
    fn end(mut self, arena: &Arena) -> Strike {
        self.healed = arena.history.now();
        self
    }
}

/// A way to go wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Nemesis {
    /// Older and newer binaries.
    MixedVersions,
    /// The leader and all others do not hear each other.
    SymmetricPartition,
    /// One side hears, the other does not.
    OneWayPartition,
    /// Cut and mended, again and again.
    FlappingPartition,
    /// kill -9 of the leader.
    KillLeader,
    /// kill -9 of a voter that follows.
    KillFollower,
    /// kill -9 of a learner.
    KillLearner,
    /// SIGSTOP, SIGCONT.
    Pause,
    /// Late bytes.
    SlowLinks,
    /// Retransmissions and resets.
    LossyLinks,
    /// No room for the log, and room again.
    FullDisk,
    /// A log whose end is gone.
    TornLog,
    /// A log with one bit flipped.
    FlippedLog,
    /// kill -9 and start again while leases run, with a partition; and a worker that is really dead.
    RestartInsideLease,
    /// Every node is restarted in turn.
    RollingRestart,
    /// The lead is handed on.
    LeaderTransfer,
    /// Voters change while one of them cannot be reached.
    MembershipUnderFault,
    /// A router dies while it streams an answer.
    RouterKilled,
    /// Slow links, a killed follower and a stopped leader together.
    ThreeAtOnce,
}

impl Nemesis {
    /// All, in the order of a run.
    pub(crate) const ALL: [Nemesis; 19] = [
        Nemesis::MixedVersions,
        Nemesis::SymmetricPartition,
        Nemesis::OneWayPartition,
        Nemesis::FlappingPartition,
        Nemesis::KillLeader,
        Nemesis::KillFollower,
        Nemesis::KillLearner,
        Nemesis::Pause,
        Nemesis::SlowLinks,
        Nemesis::LossyLinks,
        Nemesis::FullDisk,
        Nemesis::TornLog,
        Nemesis::FlippedLog,
        Nemesis::RestartInsideLease,
        Nemesis::RollingRestart,
        Nemesis::LeaderTransfer,
        Nemesis::MembershipUnderFault,
        Nemesis::RouterKilled,
        Nemesis::ThreeAtOnce,
    ];

    /// Its name on the command line and in the table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Nemesis::MixedVersions => "mixed-versions",
            Nemesis::SymmetricPartition => "symmetric-partition",
            Nemesis::OneWayPartition => "one-way-partition",
            Nemesis::FlappingPartition => "flapping-partition",
            Nemesis::KillLeader => "kill-leader",
            Nemesis::KillFollower => "kill-follower",
            Nemesis::KillLearner => "kill-learner",
            Nemesis::Pause => "pause",
            Nemesis::SlowLinks => "slow-links",
            Nemesis::LossyLinks => "lossy-links",
            Nemesis::FullDisk => "full-disk",
            Nemesis::TornLog => "torn-log",
            Nemesis::FlippedLog => "flipped-log",
            Nemesis::RestartInsideLease => "restart-inside-lease",
            Nemesis::RollingRestart => "rolling-restart",
            Nemesis::LeaderTransfer => "leader-transfer",
            Nemesis::MembershipUnderFault => "membership-under-fault",
            Nemesis::RouterKilled => "router-killed",
            Nemesis::ThreeAtOnce => "three-at-once",
        }
    }

    /// The one of that name.
    pub(crate) fn of_name(name: &str) -> Option<Nemesis> {
        Nemesis::ALL.into_iter().find(|nemesis| nemesis.name() == name)
    }

    /// Strikes.
    pub(crate) async fn strike(self, arena: &mut Arena) -> Result<Strike, NemesisError> {
        match self {
            Nemesis::MixedVersions => versions::mixed(arena).await,
            Nemesis::SymmetricPartition => links::symmetric(arena).await,
            Nemesis::OneWayPartition => links::one_way(arena).await,
            Nemesis::FlappingPartition => links::flapping(arena).await,
            Nemesis::KillLeader => processes::kill_leader(arena).await,
            Nemesis::KillFollower => processes::kill_follower(arena).await,
            Nemesis::KillLearner => processes::kill_learner(arena).await,
            Nemesis::Pause => processes::pause(arena).await,
            Nemesis::SlowLinks => links::slow(arena).await,
            Nemesis::LossyLinks => links::lossy(arena).await,
            Nemesis::FullDisk => disks::full(arena).await,
            Nemesis::TornLog => disks::torn(arena).await,
            Nemesis::FlippedLog => disks::flipped(arena).await,
            Nemesis::RestartInsideLease => leases::restart_inside(arena).await,
            Nemesis::RollingRestart => processes::rolling_restart(arena).await,
            Nemesis::LeaderTransfer => changes::transfer(arena).await,
            Nemesis::MembershipUnderFault => changes::under_fault(arena).await,
            Nemesis::RouterKilled => routers::killed(arena).await,
            Nemesis::ThreeAtOnce => many::three(arena).await,
        }
    }
}
