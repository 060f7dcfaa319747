//! Plan of one run: everything that the seed decides before it starts.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::rng::Rng;

/// How long a lease is held after a liveness report.
pub(crate) const LEASE: Duration = Duration::from_secs(15);

/// Parameters of a run.
#[derive(Clone, Debug)]
pub(crate) struct SimPlan {
    pub(crate) seed: u64,
    /// Initial voters; nodes are numbered from 1.
    pub(crate) voters: BTreeSet<u64>,
    pub(crate) learners: BTreeSet<u64>,
    /// How long faults are injected.
    pub(crate) fault_duration: Duration,
    pub(crate) clients: u64,
    /// Minimum and maximum pause of a client between two operations, in milliseconds.
    pub(crate) think_millis: (u64, u64),
    pub(crate) workers: u64,
    /// Maximum drift of a node's clock, in parts per million.
    pub(crate) drift: u64,
    pub(crate) retention: RetentionSettings,
    /// Raft's heartbeat interval, and its minimum and maximum election timeout.
    pub(crate) timers: (Duration, (Duration, Duration)),
    /// Minimum and maximum time until the next fault, in milliseconds.
    pub(crate) calm_millis: (u64, u64),
    /// Whether processes temporarily lack file descriptors, memory or threads.
    pub(crate) has_shortages: bool,
    /// Intentional changes during the run.
    pub(crate) changes: OperatorChangeKinds,
}

/// How much history a node keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetentionSettings {
    pub(crate) between_snapshots: u64,
    /// Number of entries that stay in the log behind a snapshot.
    pub(crate) behind_snapshot: u64,
    pub(crate) changes: usize,
}

/// What operators change while faults are injected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperatorChangeKinds {
    pub(crate) members: bool,
    /// Releases of the nodes; the run starts with an older one.
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
            // Every sixth seed; the others stay as they were before shortages were added.
            has_shortages: matches!(seed % 12, 0 | 9),
            changes: OperatorChangeKinds { members: rng.chance(600), releases: rng.chance(500) },
        }
    }
}
