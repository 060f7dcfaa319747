//! What is counted while the simulation runs, and the figures at its end.

use std::collections::{BTreeMap, HashMap, HashSet};

use engine_model::runs::{DiskUse, Runs, Seconds, Started};
use vocabulary::Tokens;

use super::World;
use super::gaps::Gaps;
use super::looks::Looks;
use super::reuse::Reused;
use super::stages::Stages;
use crate::policies::{Action, Foretold, StepRef};
use crate::report::{Disk, Figures, Foretellings, Memory, Restores, Reuse, Service, Spent, Times, Traffic};
use crate::trace::{Arrivals, Step, Trace};

/// Copies are counted whenever so many more steps are over.
const LOOK_EVERY: usize = 400;
/// At most so many new tokens make a step a small one.
const SMALL: Tokens = Tokens(1_024);

#[derive(Default)]
pub(super) struct Tally {
    /// Which steps are small: they go on from others, and their own session had nearly all of them before.
    small: HashSet<StepRef>,
    alone: bool,
    /// Times are no longer counted: the traffic is thinning out.
    pub(super) cut: bool,
    pub(super) over: usize,
    /// When the last answer was whole.
    ended: Seconds,
    /// The sum of its steps' times so far, of each session.
    under_way: HashMap<usize, f64>,
    times: Waits,
    reused: Reused,
    pub(super) looks: Looks,
    pub(super) gaps: Gaps,
    actions: BTreeMap<Action, usize>,
}

#[derive(Default)]
struct Waits {
    first: Vec<f64>,
    small: Vec<f64>,
    step: Vec<f64>,
    session: Vec<f64>,
    token: Vec<f64>,
    spent: Spent,
    restores: Restores,
    foretold: Foretellings,
}

impl Tally {
    pub(super) fn new(trace: &Trace) -> Self {
        let (small, alone) = (small_steps(trace), trace.arrivals == Arrivals::Recorded);
        Self { small, alone, reused: Reused::new(trace.runs.len()), ..Self::default() }
    }

    pub(super) fn session_over(&mut self, session: usize) {
        let took = self.under_way.remove(&session).unwrap_or_default();
        self.times.session.push(took);
        self.looks.session_over(session);
        self.gaps.closed(session);
    }

    pub(super) fn action(&mut self, action: Action) {
        *self.actions.entry(action).or_default() += 1;
    }

    /// A prompt begins, of which some worker held as much as `best` when it was placed. Gives how many of its tokens were
    /// computed before and are again.
    pub(super) fn started(
        &mut self,
        runs: &Runs,
        (at, step): (StepRef, &Step),
        (started, best): (&Started, Tokens),
    ) -> Tokens {
        if !self.alone {
            self.looks.began(at, step);
        }
        let goes_on = self.alone || !step.after.is_empty();
        self.reused.started(runs, (step, started), goes_on.then_some(best))
    }

    /// The first token is there, as its stages say.
    pub(super) fn first_token(&mut self, at: StepRef, stages: &Stages) {
        if self.cut {
            return;
        }
        let waited = (stages.first_token - stages.arrived).0;
        self.times.first.push(waited);
        if self.small.contains(&at) {
            self.times.small.push(waited);
        }
        stages.restore().iter().for_each(|restore| self.times.restores.add(restore));
    }

    /// A first token that came after so long was foretold.
    pub(super) fn foretold(&mut self, foretold: &Foretold, took: Seconds) {
        if !self.cut {
            self.times.foretold.add(foretold.action, (foretold.first_token, took));
        }
    }

    pub(super) fn finished(&mut self, (at, step): (StepRef, &Step), now: Seconds, stages: &Stages) {
        let (took, answering) = (now - stages.arrived, now - stages.first_token);
        self.over += 1;
        self.ended = now;
        *self.under_way.entry(at.session).or_default() += took.0;
        self.reused.computes(step.resent.as_deref().unwrap_or_default());
        self.gaps.left(at.session);
        if !self.cut {
            self.times.step.push(took.0);
            self.times.token.push(answering.0 / step.answer.0.max(1) as f64);
            self.times.spent.add(&stages.spent(now));
        }
    }

    pub(super) fn is_time_to_look(&self) -> bool {
        self.over.is_multiple_of(LOOK_EVERY)
    }
}

/// A part of a whole; zero of nothing.
pub(super) fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// Steps that add little to what their session had.
fn small_steps(trace: &Trace) -> HashSet<StepRef> {
    let mut small = HashSet::new();
    if trace.arrivals == Arrivals::Recorded {
        return small;
    }
    for (session, recorded) in trace.sessions.iter().enumerate() {
        let mut had = HashSet::new();
        for (index, step) in recorded.steps.iter().enumerate() {
            let known = step.path.iter().take_while(|run| had.contains(*run)).count();
            let new = step.prompt - trace.runs.end(&step.path[..known]);
            had.extend(step.path.iter().copied());
            if !step.after.is_empty() && new <= SMALL {
                small.insert(StepRef { session, step: index });
            }
        }
    }
    small
}

impl World<'_> {
    /// The figures of a run that is over.
    pub(super) fn figures(self) -> Figures {
        let all = self.trace.steps().count();
        let (memory, service) = (self.memory(), self.service());
        let tally = self.tally;
        Figures {
            policy: self.kind.as_str(),
            traffic: Traffic { load: self.setup.load, seed: self.setup.seed, cache: self.seat.cache },
            steps: tally.over,
            unserved: all - tally.over,
            first_token: Times::of(tally.times.first),
            small_first_token: Times::of(tally.times.small),
            step: Times::of(tally.times.step),
            session: Times::of(tally.times.session),
            token: Times::of(tally.times.token),
            reuse: Reuse { restores: tally.times.restores.mean(), ..tally.reused.figures() },
            memory,
            service,
        }
    }

    fn memory(&self) -> Memory {
        let prompts: u64 = self.trace.steps().map(|step| step.prompt.0).sum();
        let mean_prompt = share(prompts as f64, self.trace.steps().count() as f64);
        let in_sessions = self.trace.arrivals == Arrivals::AfterOthers;
        let capacity = self.setup.workers as f64 * self.setup.spec.sizes.device.0 as f64;
        let (looks, duplicate_factor, session) = self.tally.looks.seen();
        Memory {
            looks,
            duplicate_factor,
            session_bytes: session * self.setup.spec.kv_bytes as f64,
            sessions_fit: share(capacity, session),
            kv_bytes_moved: self.links.moved.0 * self.setup.spec.kv_bytes,
            evicted_tokens: self.engines.iter().map(|worker| worker.engine.evicted().0).sum(),
            disk: self.disk(),
            occupancy: if in_sessions { self.setup.load * mean_prompt / capacity } else { 0.0 },
        }
    }

    fn disk(&self) -> Disk {
        let bytes = |of: fn(DiskUse) -> Tokens| -> u64 {
            let tokens: Tokens = self.engines.iter().map(|worker| of(worker.engine.disk_use())).sum();
            tokens.0 * self.setup.spec.kv_bytes
        };
        Disk {
            written_bytes: bytes(|disk| disk.written),
            read_bytes: bytes(|disk| disk.read),
            useful_bytes: bytes(|disk| disk.useful),
            dropped_bytes: bytes(|disk| disk.dropped),
        }
    }

    fn service(&self) -> Service {
        let tally = &self.tally;
        let usage = |of: fn(engine_model::runs::Usage) -> f64| -> f64 {
            self.engines.iter().map(|worker| of(worker.engine.usage())).sum()
        };
        let (span, workers) = (tally.ended.0, self.setup.workers as f64);
        let sessions_over = tally.times.session.len();
        let hours = span * workers * f64::from(self.setup.spec.gpus) / 3_600.0;
        Service {
            seconds: span,
            sessions_over,
            sessions_per_gpu_hour: share(sessions_over as f64, hours),
            decode_stall: share(usage(|usage| usage.stalled), usage(|usage| usage.decoding)),
            prefill_use: share(usage(|usage| usage.prefilling), span * workers),
            busy: share(tally.gaps.worked, span * workers),
            gap_use: tally.gaps.use_in_gaps(workers),
            spent: tally.times.spent.by(tally.times.step.len()),
            ahead: self.links.ahead.figures,
            unplanned: self.seat.policy.unplanned(),
            actions: tally.actions.iter().map(|(action, count)| (action.as_str(), *count)).collect(),
            foretold: tally.times.foretold.figures(),
        }
    }
}
