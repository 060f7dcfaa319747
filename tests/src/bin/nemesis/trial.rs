//! One nemesis from calm to calm: load before it, the strike, recovery, and every check.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::NemesisError;
use crate::arena::{Arena, Pace};
use crate::check::{self, Broken, Judged};
use crate::faults::{Nemesis, Strike};
use crate::history::At;
use crate::throughput::{Tally, longest_silence, per_second};

/// Longest time from the loss of a leader to the next one's first commit: the longest election time-out and some.
pub(crate) const FAIL_OVER: Duration = Duration::from_secs(4);
/// How often leases are renewed and ended.
pub(crate) const TICK: Duration = Duration::from_secs(1);
/// Acknowledged writes in each window without faults, before and after one; with fewer a trial does not count. A busy machine takes
/// longer for them.
pub(crate) const CALM_WRITES: u64 = 1_000;
/// The longest wait for them.
const LONGEST_CALM: Duration = Duration::from_secs(20);
/// Longest time that a watch may be behind.
const CATCH_UP: Duration = Duration::from_secs(10);

/// What came of one nemesis.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    /// Its name.
    pub(crate) nemesis: &'static str,
    /// Faults injected.
    pub(crate) faults: u32,
    /// Attempts by what came of them, from the calm before to the calm after.
    pub(crate) tally: Tally,
    /// Acknowledged writes a second outside of the fault, on average.
    pub(crate) load: f64,
    /// Acknowledged writes in the calm before the fault or after it, whichever had fewer.
    pub(crate) calm_writes: u64,
    /// And in the worst second.
    pub(crate) least_load: u64,
    /// Time without an acknowledged write, for every leader that was lost.
    pub(crate) fail_overs: Vec<f64>,
    /// From the end of the fault until all was well.
    pub(crate) recovery: f64,
    /// What did not hold.
    pub(crate) broken: Vec<String>,
    /// Worth reading.
    pub(crate) note: String,
}

impl Outcome {
    /// Whether the load was there; without it nothing is shown.
    pub(crate) fn counts(&self) -> bool {
        self.calm_writes >= CALM_WRITES
    }

    /// Whether everything held.
    pub(crate) fn holds(&self) -> bool {
        self.broken.is_empty()
    }

    /// A nemesis that could not be carried out.
    pub(crate) fn failed(nemesis: Nemesis, error: &NemesisError) -> Outcome {
        Outcome {
            nemesis: nemesis.name(),
            faults: 0,
            tally: Tally::default(),
            load: 0.0,
            calm_writes: 0,
            least_load: 0,
            fail_overs: Vec::new(),
            recovery: 0.0,
            broken: vec![error.to_string()],
            note: String::new(),
        }
    }
}

/// Runs one nemesis.
pub(crate) async fn run(nemesis: Nemesis, arena: &mut Arena) -> Result<Outcome, NemesisError> {
    arena.load.check()?;
    let began = arena.history.now();
    let first = arena.history.look(|kept| kept.operations.len());
    arena.recovered(began).await?;
    let calm = arena.history.now();
    let before = calm_writes(arena).await;
    let strike = nemesis.strike(arena).await?;
    let recovered = arena.recovered(strike.healed).await?;
    let after = calm_writes(arena).await;
    let over = arena.history.now();
    let mut broken = strike.broken.clone();
    broken.extend(in_time(arena, &strike, recovered));
    let Judged { broken: found, undecided } = settled(arena).await?;
    broken.extend(found);
    arena.load.check()?;
    let undecided = (undecided > 0).then(|| format!("the order of {undecided} sessions is undecided"));
    let note = [Some(strike.note.clone()), undecided].into_iter().flatten().filter(|part| !part.is_empty());
    let note = note.collect::<Vec<_>>().join("; ");
    let windows = [(calm, strike.began), (recovered, over)];
    let outcome = arena.history.look(|kept| {
        let operations = &kept.operations[first..];
        let seconds: Vec<u64> = windows.iter().flat_map(|window| per_second(operations, *window)).collect();
        let gaps = strike.leader_lost.iter().enumerate().map(|(at, lost)| {
            let next = strike.leader_lost.get(at + 1).copied().unwrap_or(over);
            longest_silence(operations, (*lost, next))
        });
        Outcome {
            nemesis: nemesis.name(),
            faults: strike.faults,
            tally: Tally::of(operations),
            load: seconds.iter().sum::<u64>() as f64 / seconds.len().max(1) as f64,
            calm_writes: before.min(after),
            least_load: seconds.iter().copied().min().unwrap_or(0),
            fail_overs: gaps.collect(),
            recovery: recovered.since(strike.healed),
            broken: broken.iter().map(ToString::to_string).collect(),
            note,
        }
    });
    Ok(outcome)
}

/// Lets the load go on without a fault, until it has shown enough. Returns the writes that were acknowledged meanwhile.
async fn calm_writes(arena: &Arena) -> u64 {
    let (began, mut seen) = (Instant::now(), arena.history.look(|kept| kept.operations.len()));
    let mut writes = 0;
    loop {
        tokio::time::sleep(arena.pace.shortest_calm() / 4).await;
        arena.history.look(|kept| {
            writes += kept.operations[seen..].iter().filter(|one| one.is_acknowledged()).count() as u64;
            seen = kept.operations.len();
        });
        let took = began.elapsed();
        if took >= LONGEST_CALM || (writes >= CALM_WRITES && took >= arena.pace.shortest_calm()) {
            return writes;
        }
    }
}

/// Recovery within one lease, one fail-over and one tick.
fn in_time(arena: &Arena, strike: &Strike, recovered: At) -> Option<Broken> {
    let bound = (arena.lease + FAIL_OVER + TICK).as_secs_f64();
    let took = recovered.since(strike.healed);
    let detail = format!("{took:.1} s after the fault was over, {bound:.1} s allowed");
    (took > bound).then_some(Broken { promise: "recovery within lease, fail-over and tick", detail })
}

/// Everything that can be checked once clients hold still: last states, state hashes, watches, streams.
async fn settled(arena: &mut Arena) -> Result<Judged, NemesisError> {
    let held = arena.load.pause().await;
    sight_leases(arena).await?;
    let finals = arena.finals().await?;
    let mut broken = arena.equal_states().await?;
    let history = arena.history.clone();
    let judged = check::aside(move || history.look(|kept| check::history(kept, &finals))).await?;
    broken.extend(judged.broken);
    broken.extend(arena.watchers.check(&arena.history, CATCH_UP).await?);
    broken.extend(arena.streams.check());
    broken.extend(invariants(arena).await?);
    drop(held);
    Ok(Judged { broken, undecided: judged.undecided })
}

/// The ledger's own invariants, in every node's snapshot. In a quick run in one node's, drawn by chance: snapshots shorten
/// the logs that restarts are to read, and equal states were just compared.
async fn invariants(arena: &mut Arena) -> Result<Vec<Broken>, NemesisError> {
    let mut seats = arena.cluster.awake();
    if arena.pace == Pace::Quick {
        seats = arena.dice.pick(&seats).copied().into_iter().collect();
    }
    let mut broken = Vec::new();
    for seat in seats {
        broken.extend(crate::snapshot::check(arena, seat).await?);
    }
    Ok(broken)
}

/// Leases as every node shows them: what explains a change of owners.
async fn sight_leases(arena: &Arena) -> Result<(), NemesisError> {
    for seat in arena.cluster.awake() {
        for sighting in arena.cluster.doors().leases(seat).await? {
            arena.history.sight(sighting);
        }
    }
    Ok(())
}
