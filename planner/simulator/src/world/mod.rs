//! The fleet and its traffic in virtual time: what happens next, until nothing does.

mod ahead;
mod deal;
mod events;
mod gaps;
mod late;
mod links;
mod looks;
mod reuse;
mod script;
mod serve;
mod stages;
mod tally;

use std::sync::Arc;

use engine_model::runs::{Around, Happening, RunEngine, Seconds, SharedPool, Ticket};
use vocabulary::Tokens;

use crate::cache::Cache;
use crate::kv::KvModel;
use crate::policies::{Policy, PolicyKind, StepRef, Stopwatch};
use crate::report::Figures;
use crate::spec::Spec;
use crate::trace::{Arrivals, LATEST, Trace};
use events::{Event, Events};
use late::Late;
use links::Links;
use script::Script;
use serve::Job;
use tally::Tally;

/// What is simulated besides the trace and the policy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Setup {
    /// How many workers there are.
    pub workers: usize,
    /// What each of them is.
    pub spec: Spec,
    /// How much traffic there is: sessions at once, or a factor on the recorded rate.
    pub load: f64,
    /// Seed of what a policy leaves to chance.
    pub seed: u64,
}

/// Why nothing can be simulated.
#[derive(Clone, PartialEq, thiserror::Error, Debug)]
pub enum SetupError {
    /// Fewer workers than a policy needs.
    #[error("{policy} is given {workers} workers; accepted: {least} to 1024")]
    Workers {
        /// Which policy.
        policy: &'static str,
        /// How many it is given.
        workers: usize,
        /// How many it needs.
        least: usize,
    },
    /// Another number of sessions than there are, or a rate that nobody has.
    #[error("the load is {load}; accepted: {accepted}")]
    Load {
        /// What it is.
        load: f64,
        /// What it may be.
        accepted: String,
    },
    /// A rate at which the trace never ends.
    #[error(
        "at a load of {load} the last request comes after {seconds:.0} s; accepted: up to {LATEST} s (ten years), that \
         is a load from {least:.3} on"
    )]
    Span {
        /// What the load is.
        load: f64,
        /// When the last request comes.
        seconds: f64,
        /// What the load may be.
        least: f64,
    },
    /// Steps of which a worker could never hold one.
    #[error(
        "the trace has steps of {longest} tokens and a worker holds {memory}; leave out longer ones with a smaller context"
    )]
    TooLong {
        /// Of the longest step.
        longest: Tokens,
        /// Of one worker.
        memory: Tokens,
    },
    /// Nothing to replay.
    #[error("the trace has no steps within its limits")]
    Empty,
}

/// Seconds between the starts of the first sessions, and between a session's end and the next one's start.
pub const START_GAP: f64 = 2.0;
/// See `START_GAP`.
pub const NEXT_SESSION: f64 = 1.0;

/// One run: a trace, a fleet and a policy.
pub struct World<'a> {
    trace: &'a Trace,
    setup: Setup,
    kind: PolicyKind,
    seat: Seat<'a>,
    engines: Vec<Worker>,
    shared: Option<SharedPool>,
    links: Links,
    events: Events,
    script: Script,
    jobs: Vec<Option<Job>>,
    tally: Tally,
    now: Seconds,
}

/// Who decides, and what it is shown.
struct Seat<'a> {
    policy: Box<dyn Policy>,
    /// Who takes the time of its decisions.
    watch: Option<&'a dyn Stopwatch>,
    /// What workers hold, where that is shown late.
    late: Option<Late>,
    /// What its model's layers keep, where that is known.
    model: Option<Arc<KvModel>>,
    /// How slower tiers are kept, where that was asked for.
    cache: Option<Cache>,
}

/// An engine, and which of its announced events is the last: those before it are void.
struct Worker {
    engine: RunEngine,
    announced: u64,
}

impl<'a> World<'a> {
    /// A fleet that has seen nothing, and traffic that begins at zero.
    pub fn new(trace: &'a Trace, kind: PolicyKind, setup: Setup) -> Result<Self, SetupError> {
        setup.check(trace, kind)?;
        let (runs, spec) = (trace.runs.len(), setup.spec);
        let all = spec.sizes.device * setup.workers as u64;
        let shared = kind.shared(all).map(|capacity| SharedPool::new(capacity, runs));
        // A bound's workers have no memory of their own, and so need not keep books of it.
        let sizes = if shared.is_some() { spec.sizes.device_only() } else { spec.sizes };
        let own = if shared.is_some() { 0 } else { runs };
        let late = kind.lateness().map(|by| Late::new(by, setup.workers, runs));
        let is_late = late.is_some();
        let worker = |_| {
            let engine = RunEngine::new(spec.timing, sizes, own);
            Worker { engine: if is_late { engine.telling() } else { engine }, announced: 0 }
        };
        Ok(Self {
            trace,
            setup,
            kind,
            seat: Seat { policy: kind.make(setup.seed), watch: None, late, model: None, cache: None },
            engines: (0..setup.workers).map(worker).collect(),
            shared,
            links: Links::new(setup.workers, spec.link),
            events: Events::default(),
            script: Script::new(trace),
            jobs: Vec::new(),
            tally: Tally::new(trace),
            now: Seconds::ZERO,
        })
    }

    /// The same, with somebody who takes the time of its policy's decisions.
    pub fn watched(self, watch: &'a dyn Stopwatch) -> Self {
        Self { seat: Seat { watch: Some(watch), ..self.seat }, ..self }
    }

    /// The same, named after how its slower tiers are kept.
    pub fn keeping(self, cache: Option<Cache>) -> Self {
        Self { seat: Seat { cache, ..self.seat }, ..self }
    }

    /// The same with workers that serve such a model; the trace is weighed for it, and the worker is the model's.
    pub fn serving(mut self, model: &Arc<KvModel>) -> Self {
        let engine = |Worker { engine, announced }| Worker { engine: engine.restoring(model.rule()), announced };
        self.engines = self.engines.into_iter().map(engine).collect();
        self.seat.model = Some(model.clone());
        self
    }

    /// Runs until nothing happens any more. `progress` is told now and then how many steps are over, and of how many.
    pub fn run(mut self, progress: &mut dyn FnMut(usize, usize)) -> Figures {
        const TOLD_EVERY: usize = 512;
        self.open();
        let (all, mut told) = (self.trace.steps().count(), 0);
        while let Some((at, event)) = self.events.next() {
            self.pass(at);
            self.happen(event);
            self.tell_late();
            let over = self.tally.over;
            if over >= told + TOLD_EVERY {
                told = over;
                progress(over, all);
            }
        }
        progress(self.tally.over, all);
        self.figures()
    }

    fn open(&mut self) {
        match self.trace.arrivals {
            Arrivals::Recorded => {
                for (session, recorded) in self.trace.sessions.iter().enumerate() {
                    for (step, recorded) in recorded.steps.iter().enumerate() {
                        let at = Seconds(Seconds::from(recorded.at).0 / self.setup.load);
                        self.events.add(at, Event::Arrives(StepRef { session, step }));
                    }
                }
            }
            Arrivals::AfterOthers => {
                (0..self.setup.load as usize)
                    .for_each(|n| self.events.add(Seconds(n as f64 * START_GAP), Event::SessionStarts));
            }
        }
        if let Some(period) = self.seat.policy.period() {
            self.events.add(period, Event::PolicyClock);
        }
        if let Some(period) = self.seat.policy.looks_ahead() {
            self.events.add(period, Event::AheadClock);
        }
    }

    fn pass(&mut self, until: Seconds) {
        self.tally.gaps.pass(until - self.now);
        self.now = until;
        self.seat.late.iter_mut().for_each(|late| late.pass(until));
    }

    fn tell_late(&mut self) {
        let Some(late) = &mut self.seat.late else { return };
        for (place, worker) in self.engines.iter_mut().enumerate() {
            late.changed(place, self.now, worker.engine.changes());
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::SessionStarts => self.start_session(),
            Event::Arrives(at) => {
                self.tally.gaps.arrived(at.session);
                self.arrive(at, self.now);
            }
            Event::Engine { worker, announced } => {
                if self.engines[worker].announced == announced {
                    self.advance(worker);
                }
            }
            Event::Fetched(ticket) => self.fetched(ticket),
            Event::Shipped(ticket) => self.shipped(ticket),
            Event::PolicyClock => self.policy_clock(),
            Event::AheadClock => self.seat.policy.looks_ahead().into_iter().for_each(|period| self.look_ahead(period)),
            Event::Brought(number) => self.brought(number),
        }
    }

    fn start_session(&mut self) {
        match self.script.next_session() {
            Some(session) => {
                self.tally.gaps.opened(session);
                for step in self.script.begin(session, &self.trace.sessions[session]) {
                    self.tally.gaps.arrived(session);
                    self.arrive(StepRef { session, step }, self.now);
                }
            }
            // From here on fewer sessions run than were asked for.
            None => self.tally.cut = true,
        }
    }

    fn policy_clock(&mut self) {
        let due = self.deal(|policy, fleet| policy.due(fleet));
        for at in due {
            let since = self.script.waited_since(at).unwrap_or(self.now);
            self.arrive(at, since);
        }
        if let Some(period) = self.seat.policy.period().filter(|_| !self.events.is_empty()) {
            self.events.add(self.now + period, Event::PolicyClock);
        }
    }

    /// What is due in an engine happens.
    fn advance(&mut self, worker: usize) {
        self.go_on(worker, RunEngine::happen);
    }

    /// Something came to an engine from outside: perhaps a prompt can begin.
    fn wake(&mut self, worker: usize) {
        self.go_on(worker, RunEngine::begin);
    }

    fn go_on(&mut self, worker: usize, on: impl FnOnce(&mut RunEngine, &mut Around<'_>, &mut Vec<Happening>)) {
        let mut out = Vec::new();
        let mut around = Around { runs: &self.trace.runs, shared: self.shared.as_mut() };
        let engine = &mut self.engines[worker].engine;
        engine.settle(self.now, &around);
        on(engine, &mut around, &mut out);
        self.record(worker, out);
        self.announce(worker);
    }

    fn announce(&mut self, worker: usize) {
        let around = Around { runs: &self.trace.runs, shared: self.shared.as_mut() };
        let Worker { engine, announced } = &mut self.engines[worker];
        *announced += 1;
        let next = engine.next_event(&around);
        self.tally.gaps.announced(worker, next);
        if let Some(at) = next {
            self.events.add(at, Event::Engine { worker, announced: *announced });
        }
    }

    fn job(&mut self, ticket: Ticket) -> &mut Job {
        self.jobs[ticket.0 as usize].as_mut().expect("a ticket is alive until its answer is whole")
    }
}

impl Setup {
    /// Whether this can be simulated.
    pub fn check(&self, trace: &Trace, kind: PolicyKind) -> Result<(), SetupError> {
        let least = if kind.mixes() { 1 } else { 2 };
        if !(least..=1_024).contains(&self.workers) {
            return Err(SetupError::Workers { policy: kind.as_str(), workers: self.workers, least });
        }
        let Some(longest) = trace.steps().map(|step| trace.room(step)).max() else {
            return Err(SetupError::Empty);
        };
        let memory = self.spec.sizes.device;
        if longest > memory {
            return Err(SetupError::TooLong { longest, memory });
        }
        self.check_load(trace)
    }

    fn check_load(&self, trace: &Trace) -> Result<(), SetupError> {
        let load = self.load;
        match trace.arrivals {
            Arrivals::AfterOthers => {
                let sessions = trace.sessions.len();
                if load.fract() == 0.0 && (1.0..=sessions as f64).contains(&load) {
                    return Ok(());
                }
                let accepted = format!("a whole number of sessions at once, 1 to the {sessions} that the trace has");
                Err(SetupError::Load { load, accepted })
            }
            Arrivals::Recorded => {
                if !(0.001..=1e6).contains(&load) {
                    let accepted = "a factor on the recorded rate, 0.001 to 1000000".to_owned();
                    return Err(SetupError::Load { load, accepted });
                }
                let last = trace.steps().map(|step| Seconds::from(step.at)).max().unwrap_or_default().0;
                let seconds = last / load;
                if seconds <= LATEST { Ok(()) } else { Err(SetupError::Span { load, seconds, least: last / LATEST }) }
            }
        }
    }
}

#[cfg(test)]
mod tests;
