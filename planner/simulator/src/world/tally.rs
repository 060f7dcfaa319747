//! What is counted while the simulation runs, and the figures at its end.

use std::collections::{BTreeMap, HashMap, HashSet};

use engine_model::runs::{RunEngine, Runs, Seconds, Started};
use vocabulary::Tokens;

use super::World;
use crate::policies::{Action, StepRef};
use crate::report::{Figures, Memory, Reuse, Service, Times, Traffic};
use crate::trace::{Arrivals, Step, Trace};

/// Copies are counted whenever so many more steps are over.
const LOOK_EVERY: usize = 400;
/// At most so many new tokens make a step a small one.
const SMALL: Tokens = Tokens(1_024);

/// The counts.
pub(super) struct Tally {
    /// Which steps are small: they go on from others, and their own session had nearly all of them before.
    small: HashSet<StepRef>,
    alone: bool,
    /// Times are no longer counted: the traffic is thinning out.
    cut: bool,
    over: usize,
    /// When the last answer was whole.
    ended: Seconds,
    /// The sum of its steps' times so far, of each session.
    under_way: HashMap<usize, f64>,
    times: Waits,
    tokens: TokenSums,
    owner: (usize, usize),
    copies: Vec<f64>,
    actions: BTreeMap<Action, usize>,
}

#[derive(Default)]
struct Waits {
    first: Vec<f64>,
    small: Vec<f64>,
    step: Vec<f64>,
    session: Vec<f64>,
    token: Vec<f64>,
}

#[derive(Default)]
struct TokenSums {
    prompt: Tokens,
    computed: Tokens,
    local: Tokens,
    fetched: Tokens,
    restored: Tokens,
}

impl Tally {
    pub(super) fn new(trace: &Trace) -> Self {
        Self {
            small: small_steps(trace),
            alone: trace.arrivals == Arrivals::Recorded,
            cut: false,
            over: 0,
            ended: Seconds::ZERO,
            under_way: HashMap::new(),
            times: Waits::default(),
            tokens: TokenSums::default(),
            owner: (0, 0),
            copies: Vec::new(),
            actions: BTreeMap::new(),
        }
    }

    pub(super) fn over(&self) -> usize {
        self.over
    }

    pub(super) fn cut(&mut self) {
        self.cut = true;
    }

    pub(super) fn session_over(&mut self, session: usize) {
        let took = self.under_way.remove(&session).unwrap_or_default();
        self.times.session.push(took);
    }

    pub(super) fn action(&mut self, action: Action) {
        *self.actions.entry(action).or_default() += 1;
    }

    pub(super) fn started(&mut self, step: &Step, started: &Started, best: Tokens) {
        self.tokens.prompt += step.prompt;
        self.tokens.computed += started.computed;
        self.tokens.local += started.local;
        self.tokens.fetched += started.fetched;
        self.tokens.restored += started.restored;
        if self.alone || !step.after.is_empty() {
            self.owner.1 += 1;
            self.owner.0 += usize::from(started.local.0 as f64 >= 0.95 * best.0 as f64 - 64.0);
        }
    }

    pub(super) fn first_token(&mut self, at: StepRef, waited: Seconds) {
        if !self.cut {
            self.times.first.push(waited.0);
            if self.small.contains(&at) {
                self.times.small.push(waited.0);
            }
        }
    }

    pub(super) fn finished(
        &mut self,
        (at, step): (StepRef, &Step),
        now: Seconds,
        (since, first_token): (Seconds, Seconds),
    ) {
        let (took, answering) = (now - since, now - first_token);
        self.over += 1;
        self.ended = now;
        *self.under_way.entry(at.session).or_default() += took.0;
        if !self.cut {
            self.times.step.push(took.0);
            self.times.token.push(answering.0 / step.answer.0.max(1) as f64);
        }
    }

    pub(super) fn is_time_to_look(&self) -> bool {
        self.over.is_multiple_of(LOOK_EVERY)
    }

    /// How often the average cached token lies in the fleet.
    pub(super) fn look(&mut self, engines: &[&RunEngine], runs: &Runs) {
        let (mut all, mut distinct) = (0, 0);
        for run in (0..runs.len() as u32).map(engine_model::runs::RunId) {
            let copies = engines.iter().filter(|engine| engine.has(run)).count() as u64;
            all += copies * runs.tokens(run).0;
            distinct += u64::from(copies > 0) * runs.tokens(run).0;
        }
        if distinct > 0 {
            self.copies.push(all as f64 / distinct as f64);
        }
    }
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
        let tally = self.tally;
        let sessions_over = tally.times.session.len();
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let usage = |of: fn(engine_model::runs::Usage) -> f64| -> f64 {
            self.engines.iter().map(|worker| of(worker.engine.usage())).sum()
        };
        let (span, workers) = (tally.ended.0, self.setup.workers as f64);
        let tokens = &tally.tokens;
        let prompt = tokens.prompt.0 as f64;
        let mean_prompt =
            share(self.trace.steps().map(|step| step.prompt.0 as f64).sum(), self.trace.steps().count() as f64);
        let in_sessions = self.trace.arrivals == Arrivals::AfterOthers;
        let capacity = workers * self.setup.spec.sizes.device.0 as f64;
        let hours = span * workers * f64::from(self.setup.spec.gpus) / 3_600.0;
        Figures {
            policy: self.kind.as_str(),
            traffic: Traffic { load: self.setup.load, seed: self.setup.seed },
            steps: tally.over,
            unserved: self.trace.steps().count() - tally.over,
            first_token: Times::of(tally.times.first),
            small_first_token: Times::of(tally.times.small),
            step: Times::of(tally.times.step),
            session: Times::of(tally.times.session),
            token: Times::of(tally.times.token),
            reuse: Reuse {
                prefill_tokens: tokens.computed.0,
                saved_tokens: (tokens.prompt - tokens.computed).0,
                hit_rate: share(tokens.local.0 as f64, prompt),
                owner_hit_rate: share(tally.owner.0 as f64, tally.owner.1 as f64),
                fetched_rate: share(tokens.fetched.0 as f64, prompt),
                restored_tokens: tokens.restored.0,
            },
            memory: Memory {
                duplicate_factor: share(tally.copies.iter().sum(), tally.copies.len() as f64),
                kv_bytes_moved: self.links.moved().0 * self.setup.spec.kv_bytes,
                evicted_tokens: self.engines.iter().map(|worker| worker.engine.evicted().0).sum(),
                occupancy: if in_sessions { self.setup.load * mean_prompt / capacity } else { 0.0 },
            },
            service: Service {
                seconds: span,
                sessions_over,
                sessions_per_gpu_hour: share(sessions_over as f64, hours),
                decode_stall: share(usage(|usage| usage.stalled), usage(|usage| usage.decoding)),
                prefill_use: share(usage(|usage| usage.prefilling), span * workers),
                unplanned: self.policy.unplanned(),
                actions: tally.actions.into_iter().map(|(action, count)| (action.as_str(), count)).collect(),
            },
        }
    }
}
