//! One trial of a nemesis: load before it, the fault, recovery, and all checks.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::NemesisError;
use crate::check::{self, GuaranteeViolation, HistoryVerdict};
use crate::faults::{Nemesis, NemesisRecord};
use crate::history::RunInstant;
use crate::registers;
use crate::testbed::{MAX_FAIL_OVER, RunLength, TICK, TrialEnvironment};
use crate::throughput::{AttemptTally, longest_silence, per_second};

/// Acknowledged writes required in each window without faults, before and after one; with fewer a trial does not
/// count. A busy machine takes longer for them.
pub(crate) const MIN_CALM_WRITES: u64 = 1_000;
/// Maximum wait for them.
const MAX_CALM: Duration = Duration::from_secs(20);
/// Maximum lag of a watch.
const MAX_WATCH_LAG: Duration = Duration::from_secs(10);

/// Outcome of one nemesis.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrialOutcome {
    /// Name of the nemesis.
    pub(crate) nemesis: &'static str,
    /// Injected faults.
    pub(crate) faults: u32,
    /// Operations by outcome, from the calm period before to the one after.
    pub(crate) tally: AttemptTally,
    /// Average acknowledged writes per second outside of the fault.
    pub(crate) load: f64,
    /// Acknowledged writes in the calm period before or after the fault, whichever had fewer.
    pub(crate) calm_writes: u64,
    /// Acknowledged writes in the worst second outside of the fault.
    pub(crate) least_load: u64,
    /// Seconds without an acknowledged write, per lost leader.
    pub(crate) fail_overs: Vec<f64>,
    /// Seconds from the end of the fault to full recovery.
    pub(crate) recovery: f64,
    /// Violated guarantees.
    pub(crate) broken: Vec<String>,
    /// Note for the reader.
    pub(crate) note: String,
}

impl TrialOutcome {
    /// Returns whether there was enough load to prove anything.
    pub(crate) fn is_conclusive(&self) -> bool {
        self.calm_writes >= MIN_CALM_WRITES
    }

    /// Returns whether all guarantees held.
    pub(crate) fn holds(&self) -> bool {
        self.broken.is_empty()
    }

    /// Outcome of a nemesis that could not be executed.
    pub(crate) fn failed(nemesis: Nemesis, error: &NemesisError) -> TrialOutcome {
        TrialOutcome {
            nemesis: nemesis.name(),
            faults: 0,
            tally: AttemptTally::default(),
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
pub(crate) async fn run(nemesis: Nemesis, environment: &mut TrialEnvironment) -> Result<TrialOutcome, NemesisError> {
    environment.load.check()?;
    let began = environment.history.now();
    let first = environment.history.read(|kept| kept.operations.len());
    environment.await_recovery(began).await?;
    let calm = environment.history.now();
    let before = await_calm_writes(environment).await;
    let fault = nemesis.run(environment).await?;
    let recovered = environment.await_recovery(fault.healed).await?;
    let after = await_calm_writes(environment).await;
    let over = environment.history.now();
    let mut broken = fault.broken.clone();
    broken.extend(check_recovery_time(environment, &fault, recovered));
    let HistoryVerdict { broken: found, undecided } = check_settled(environment).await?;
    broken.extend(found);
    environment.load.check()?;
    let undecided = (undecided > 0).then(|| format!("the order of {undecided} sessions or registers is undecided"));
    let note = [Some(fault.note.clone()), undecided].into_iter().flatten().filter(|part| !part.is_empty());
    let note = note.collect::<Vec<_>>().join("; ");
    let windows = [(calm, fault.began), (recovered, over)];
    let outcome = environment.history.read(|kept| {
        let operations = &kept.operations[first..];
        let seconds: Vec<u64> = windows.iter().flat_map(|window| per_second(operations, *window)).collect();
        let gaps = fault.leader_lost.iter().enumerate().map(|(at, lost)| {
            let next = fault.leader_lost.get(at + 1).copied().unwrap_or(over);
            longest_silence(operations, (*lost, next))
        });
        TrialOutcome {
            nemesis: nemesis.name(),
            faults: fault.faults,
            tally: AttemptTally::of(operations),
            load: seconds.iter().sum::<u64>() as f64 / seconds.len().max(1) as f64,
            calm_writes: before.min(after),
            least_load: seconds.iter().copied().min().unwrap_or(0),
            fail_overs: gaps.collect(),
            recovery: recovered.since(fault.healed),
            broken: broken.iter().map(ToString::to_string).collect(),
            note,
        }
    });
    Ok(outcome)
}

/// Lets the load run without a fault until there are enough writes. Returns the writes acknowledged meanwhile.
async fn await_calm_writes(environment: &TrialEnvironment) -> u64 {
    let (began, mut seen) = (Instant::now(), environment.history.read(|kept| kept.operations.len()));
    let mut writes = 0;
    loop {
        tokio::time::sleep(environment.pace.min_calm() / 4).await;
        environment.history.read(|kept| {
            writes += kept.operations[seen..].iter().filter(|one| one.is_acknowledged()).count() as u64;
            seen = kept.operations.len();
        });
        let took = began.elapsed();
        if took >= MAX_CALM || (writes >= MIN_CALM_WRITES && took >= environment.pace.min_calm()) {
            return writes;
        }
    }
}

/// Checks that recovery took at most one lease, one fail-over and one tick.
fn check_recovery_time(
    environment: &TrialEnvironment,
    fault: &NemesisRecord,
    recovered: RunInstant,
) -> Option<GuaranteeViolation> {
    let bound = (environment.lease + MAX_FAIL_OVER + TICK).as_secs_f64();
    let took = recovered.since(fault.healed);
    let detail = format!("{took:.1} s after the fault was over, {bound:.1} s allowed");
    (took > bound).then_some(GuaranteeViolation { guarantee: "recovery within lease, fail-over and tick", detail })
}

/// Checks everything that needs paused clients: final states, state hashes, watches, streams.
async fn check_settled(environment: &mut TrialEnvironment) -> Result<HistoryVerdict, NemesisError> {
    let pause = environment.load.pause().await;
    record_leases(environment).await?;
    let finals = environment.final_owners().await?;
    let seats = environment.cluster.running_slots();
    let nodes = (environment.cluster.addresses(), &*seats);
    registers::read_all(environment.load.registers(), nodes, &environment.history).await?;
    let mut broken = environment.equal_states().await?;
    let history = environment.history.clone();
    let judged = check::run_blocking(move || history.read(|kept| check::check_history(kept, &finals))).await?;
    broken.extend(judged.broken);
    broken.extend(environment.watchers.check(&environment.history, MAX_WATCH_LAG).await?);
    broken.extend(environment.streams.check());
    broken.extend(check_invariants(environment).await?);
    drop(pause);
    Ok(HistoryVerdict { broken, undecided: judged.undecided })
}

/// Checks the ledger's own invariants in every node's snapshot; in a quick run only in one node's, chosen at random.
/// Snapshots shorten the logs that restarts should replay, and equal states were just compared.
async fn check_invariants(environment: &mut TrialEnvironment) -> Result<Vec<GuaranteeViolation>, NemesisError> {
    let mut seats = environment.cluster.running_slots();
    if environment.pace == RunLength::Quick {
        seats = environment.rng.pick(&seats).copied().into_iter().collect();
    }
    let mut broken = Vec::new();
    for seat in seats {
        broken.extend(crate::snapshot::check(environment, seat).await?);
    }
    Ok(broken)
}

/// Records leases as every node reports them: they explain changes of owners.
async fn record_leases(environment: &TrialEnvironment) -> Result<(), NemesisError> {
    for seat in environment.cluster.running_slots() {
        for sighting in environment.cluster.addresses().leases(seat).await? {
            environment.history.record_lease(sighting);
        }
    }
    Ok(())
}
