//! Nemeses: each injects a fault, holds it, and heals it. What recovers by itself is left to recover.

mod backups;
mod clocks;
mod combined;
mod disks;
mod failing_disks;
mod leases;
mod links;
mod membership;
mod processes;
mod record;
mod routers;
mod shortages;
mod versions;

use crate::NemesisError;
use crate::testbed::{RunLength, TrialEnvironment};
pub(crate) use record::NemesisRecord;

/// Kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Nemesis {
    /// Older and newer binaries on the same data.
    MixedVersions,
    /// The leader and all others cannot reach each other.
    SymmetricPartition,
    /// Traffic is dropped in one direction only.
    OneWayPartition,
    /// A partition that comes and goes.
    FlappingPartition,
    /// kill -9 of the leader.
    KillLeader,
    /// kill -9 of a follower.
    KillFollower,
    /// kill -9 of a learner.
    KillLearner,
    /// SIGSTOP and SIGCONT.
    Pause,
    /// Delayed traffic.
    SlowLinks,
    /// Retransmissions and resets.
    LossyLinks,
    /// No space for the log, then space again.
    FullDisk,
    /// A log whose end is missing.
    TornLog,
    /// A log with one bit flipped.
    FlippedLog,
    /// kill -9 and restart within a lease, with a partition; then a worker that is really dead.
    RestartInsideLease,
    /// Every node is restarted in turn.
    RollingRestart,
    /// Leadership transfer.
    LeaderTransfer,
    /// Voters change while one of them is unreachable.
    MembershipUnderFault,
    /// A router is killed while it streams a response.
    RouterKilled,
    /// Slow links, a killed follower and a stopped leader together.
    ThreeAtOnce,
    /// Two of five voters are cut off, the leader among them.
    MinorityPartition,
    /// kill -9 of two of five voters, the leader among them.
    KillTwo,
    /// Every fdatasync is slow.
    SlowDisk,
    /// Every fdatasync fails.
    FailingDisk,
    /// Wall and monotonic clocks jump.
    ClockJumps,
    /// Monotonic clocks run a fifth too fast or too slow.
    ClockDrift,
    /// A log whose last bytes are missing.
    CutTail,
    /// A snapshot whose last bytes are missing.
    CutSnapshot,
    /// A backup saved under load and restored as another cluster, twice.
    Backup,
    /// A shortage of descriptors, memory or threads.
    Shortages,
}

impl Nemesis {
    /// All nemeses, in the order of a run.
    pub(crate) const ALL: [Nemesis; 29] = [
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
        Nemesis::MinorityPartition,
        Nemesis::KillTwo,
        Nemesis::SlowDisk,
        Nemesis::FailingDisk,
        Nemesis::ClockJumps,
        Nemesis::ClockDrift,
        Nemesis::CutTail,
        Nemesis::CutSnapshot,
        Nemesis::Backup,
        Nemesis::Shortages,
    ];

    /// Name on the command line and in the table.
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
            Nemesis::MinorityPartition => "minority-partition",
            Nemesis::KillTwo => "kill-two",
            Nemesis::SlowDisk => "slow-disk",
            Nemesis::FailingDisk => "failing-disk",
            Nemesis::ClockJumps => "clock-jumps",
            Nemesis::ClockDrift => "clock-drift",
            Nemesis::CutTail => "cut-log-tail",
            Nemesis::CutSnapshot => "cut-snapshot",
            Nemesis::Backup => "backup-restore",
            Nemesis::Shortages => "shortages",
        }
    }

    /// Returns whether a run of this length and number of voters includes it by default.
    pub(crate) fn applies_to(self, pace: RunLength, voters: u8) -> bool {
        match self {
            Nemesis::MinorityPartition | Nemesis::KillTwo => voters >= 5,
            // Too similar to a torn log for a quick run.
            Nemesis::CutTail => pace == RunLength::Long,
            _ => true,
        }
    }

    /// Returns the nemesis of this name.
    pub(crate) fn of_name(name: &str) -> Option<Nemesis> {
        Nemesis::ALL.into_iter().find(|nemesis| nemesis.name() == name)
    }

    /// Executes the nemesis.
    pub(crate) async fn run(self, environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
        match self {
            Nemesis::MixedVersions => versions::mixed_releases(environment).await,
            Nemesis::SymmetricPartition => links::symmetric(environment).await,
            Nemesis::OneWayPartition => links::one_way(environment).await,
            Nemesis::FlappingPartition => links::flapping(environment).await,
            Nemesis::KillLeader => processes::kill_leader(environment).await,
            Nemesis::KillFollower => processes::kill_follower(environment).await,
            Nemesis::KillLearner => processes::kill_learner(environment).await,
            Nemesis::Pause => processes::pause(environment).await,
            Nemesis::SlowLinks => links::slow(environment).await,
            Nemesis::LossyLinks => links::lossy(environment).await,
            Nemesis::FullDisk => disks::full(environment).await,
            Nemesis::TornLog => disks::torn(environment).await,
            Nemesis::FlippedLog => disks::flipped(environment).await,
            Nemesis::RestartInsideLease => leases::restart_leader_within_lease(environment).await,
            Nemesis::RollingRestart => processes::rolling_restart(environment).await,
            Nemesis::LeaderTransfer => membership::transfer(environment).await,
            Nemesis::MembershipUnderFault => membership::change_under_fault(environment).await,
            Nemesis::RouterKilled => routers::kill_mid_stream(environment).await,
            Nemesis::ThreeAtOnce => combined::three_faults(environment).await,
            Nemesis::MinorityPartition => links::minority(environment).await,
            Nemesis::KillTwo => processes::kill_two(environment).await,
            Nemesis::SlowDisk => failing_disks::slow(environment).await,
            Nemesis::FailingDisk => failing_disks::failing(environment).await,
            Nemesis::ClockJumps => clocks::jumps(environment).await,
            Nemesis::ClockDrift => clocks::drift(environment).await,
            Nemesis::CutTail => disks::tail(environment).await,
            Nemesis::CutSnapshot => disks::snapshot(environment).await,
            Nemesis::Backup => backups::backup(environment).await,
            Nemesis::Shortages => shortages::shortages(environment).await,
        }
    }
}
