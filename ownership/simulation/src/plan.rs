//! How one run goes: everything that the seed decides before it starts.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::rng::Rng;

/// A run's size and temper.
#[derive(Clone, Debug)]
pub(crate) struct SimPlan {
    pub(crate) seed: u64,
    /// Voters at the beginning; nodes are numbered from 1.
    pub(crate) voters: BTreeSet<u64>,
    pub(crate) learners: BTreeSet<u64>,
    /// How long faults go on.
    pub(crate) fault_duration: Duration,
    pub(crate) clients: u64,
    /// How long a client thinks between two operations, in milliseconds.
    pub(crate) think_millis: (u64, u64),
    pub(crate) workers: u64,
    /// How far a node's clock may drift, in parts per million.
    pub(crate) drift: u64,
    pub(crate) retention: RetentionSettings,
    /// Raft's heartbeat, and its shortest and longest wait before an election.
    pub(crate) timers: (Duration, (Duration, Duration)),
    /// How long until the next fault, in milliseconds.
    pub(crate) calm_millis: (u64, u64),
    /// Whether processes lack file handles, memory or threads for a while.
    pub(crate) has_shortages: bool,
    /// What is changed on purpose meanwhile.
    pub(crate) changes: OperatorChanges,
}

/// What a node keeps of what is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetentionSettings {
    pub(crate) between_snapshots: u64,
    /// Entries that stay in the log behind one.
    pub(crate) behind_snapshot: u64,
    pub(crate) changes: usize,
}

/// What operators change while faults go on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperatorChanges {
    pub(crate) members: bool,
    /// The nodes' release, from an older one on.
    pub(crate) releases: bool,
}

impl RetentionSettings {
    fn draw(seed: u64, rng: &mut Rng) -> Self {
        let (between_snapshots, behind_snapshot) = *rng.pick(&[(20, 0), (40, 10), (90, 30)]).unwrap_or(&(40, 10));
        let changes = *Rng::stream(seed, "kept changes").pick(&[12, 60, 400]).unwrap_or(&60);
        Self { between_snapshots, behind_snapshot, changes }
    }
}

impl SimPlan {
    pub(crate) fn of(seed: u64) -> Self {
        let mut rng = Rng::stream(seed, "plan");
        let voters = *rng.pick(&[3, 3, 3, 5]).unwrap_or(&3);
        let learners = rng.below(3);
        let timers = |heartbeat, least, most| {
            let millis = Duration::from_millis;
            (millis(heartbeat), (millis(least), millis(most)))
        };
        Self {
            seed,
            timers: if rng.chance(500) { timers(250, 500, 1_000) } else { timers(500, 1_500, 3_500) },
            voters: (1..=voters).collect(),
            learners: (voters + 1..=voters + learners).collect(),
            fault_duration: rng.millis(40_000, 110_000),
            clients: rng.within(3, 5),
            think_millis: *rng.pick(&[(100, 600), (200, 1_500), (600, 3_000)]).unwrap_or(&(200, 1_500)),
            workers: rng.within(2, 4),
            drift: *rng.pick(&[0, 500, 20_000]).unwrap_or(&0),
            retention: RetentionSettings::draw(seed, &mut rng),
            calm_millis: *rng.pick(&[(1_000, 6_000), (3_000, 12_000), (6_000, 30_000)]).unwrap_or(&(3_000, 12_000)),
            // Every sixth seed; the others are what they were before there were shortages.
            has_shortages: matches!(seed % 12, 0 | 9),
            changes: OperatorChanges { members: rng.chance(600), releases: rng.chance(500) },
        }
    }
}
