//! Discrete-event simulation of the fleet and its traffic in virtual time, until no event is left,
//! replication ahead of a step included.

mod delayed_residency;
mod dispatch;
mod memory_sampler;
mod replication_tracker;
mod reuse;
mod session_scheduler;
mod stage_times;
mod step_job;
mod tally;
mod utilization;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use engine_model::runs::{
    IdealSharedCache, OutgoingTransfer, RunEngine, RunRequestEvent, RunRequestId, Seconds, SharedEngineState,
};
use vocabulary::Tokens;

use self::replication_tracker::{AwaitedReplication, ReplicationState, ReplicationTracker, ReplicationTransfer};
use crate::hardware_profile::{HardwareProfile, LinkSpeed};
use crate::kv_model::KvModel;
use crate::policies::{PolicyKind, ReplicationOrder, RoutingPolicy, StepRef, Stopwatch};
use crate::report::RunStats;
use crate::tier_policy::TierPolicy;
use crate::trace::{ArrivalProcess, MAX_SECONDS, Trace};
use delayed_residency::DelayedResidency;
use session_scheduler::SessionScheduler;
use step_job::StepJob;
use tally::RunTally;

/// Parameters of a simulation besides the trace and the policy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SimulationSetup {
    /// Number of workers.
    pub workers: usize,
    /// Hardware profile of every worker.
    pub spec: HardwareProfile,
    /// Traffic load: concurrent sessions, or a factor on the recorded rate.
    pub load: f64,
    /// Random seed of the policy.
    pub seed: u64,
}

/// Why a simulation cannot run.
#[derive(Clone, PartialEq, thiserror::Error, Debug)]
pub enum SetupError {
    /// Fewer workers than the policy needs, or more than are supported.
    #[error("{policy} is given {workers} workers; accepted: {least} to 1024")]
    Workers {
        /// Name of the policy.
        policy: &'static str,
        /// Number of workers given.
        workers: usize,
        /// Smallest accepted number.
        least: usize,
    },
    /// The load is not accepted: more sessions than the trace has, or an invalid rate.
    #[error("the load is {load}; accepted: {accepted}")]
    Load {
        /// Load given.
        load: f64,
        /// Accepted loads.
        accepted: String,
    },
    /// The rate is so low that the replay would take too long.
    #[error(
        "at a load of {load} the last request comes after {seconds:.0} s; accepted: up to {MAX_SECONDS} s (ten years), that \
         is a load from {least:.3} on"
    )]
    Span {
        /// Load given.
        load: f64,
        /// Arrival time of the last request, in seconds.
        seconds: f64,
        /// Smallest accepted load.
        least: f64,
    },
    /// The trace has steps that no worker's memory can hold.
    #[error(
        "the trace has steps of {longest} tokens and a worker holds {memory}; leave out longer ones with a smaller context"
    )]
    TooLong {
        /// Tokens of the longest step.
        longest: Tokens,
        /// Tokens of a worker's device memory.
        memory: Tokens,
    },
    /// The trace is empty.
    #[error("the trace has no steps within its limits")]
    Empty,
}

/// Seconds between the starts of the first sessions.
pub const SESSION_START_INTERVAL: f64 = 2.0;
/// Seconds between the end of a session and the start of the next one.
pub const NEXT_SESSION_DELAY: f64 = 1.0;

/// One run: a trace, a fleet and a policy.
pub struct Simulation<'a> {
    trace: &'a Trace,
    setup: SimulationSetup,
    kind: PolicyKind,
    driver: PolicyDriver<'a>,
    engines: Vec<ScheduledEngine>,
    shared_cache: Option<IdealSharedCache>,
    links: LinkSchedule,
    events: EventQueue,
    scheduler: SessionScheduler,
    jobs: Vec<Option<StepJob>>,
    tally: RunTally,
    now: Seconds,
}

/// The policy, and what it is shown.
struct PolicyDriver<'a> {
    policy: Box<dyn RoutingPolicy>,
    /// Stopwatch for its decisions, if any.
    watch: Option<&'a dyn Stopwatch>,
    /// Residency as shown with a delay, if the policy is an ablation that needs it.
    delayed_residency: Option<DelayedResidency>,
    /// KV model of the served model, if known.
    model: Option<Arc<KvModel>>,
    /// Tier policy, if one was requested.
    tier_policy: Option<TierPolicy>,
}

/// An engine, with the sequence number of its last announced event: earlier ones are void.
struct ScheduledEngine {
    engine: RunEngine,
    event_sequence: u64,
}

impl<'a> Simulation<'a> {
    /// Creates a run with an empty fleet; traffic starts at time zero.
    pub fn new(trace: &'a Trace, kind: PolicyKind, setup: SimulationSetup) -> Result<Self, SetupError> {
        setup.check(trace, kind)?;
        let (runs, spec) = (trace.runs.len(), setup.spec);
        let all = spec.sizes.device * setup.workers as u64;
        let shared = kind.shared_cache_capacity(all).map(|capacity| IdealSharedCache::new(capacity, runs));
        // Workers of a bound share one memory, so their own needs no bookkeeping.
        let sizes = if shared.is_some() { spec.sizes.device_only() } else { spec.sizes };
        let own = if shared.is_some() { 0 } else { runs };
        let delayed = kind.residency_delay().map(|by| DelayedResidency::new(by, setup.workers, runs));
        let is_late = delayed.is_some();
        let worker = |_| {
            let engine = RunEngine::new(spec.timing, sizes, own);
            ScheduledEngine { engine: if is_late { engine.with_change_recording() } else { engine }, event_sequence: 0 }
        };
        Ok(Self {
            trace,
            setup,
            kind,
            driver: PolicyDriver {
                policy: kind.build(setup.seed),
                watch: None,
                delayed_residency: delayed,
                model: None,
                tier_policy: None,
            },
            engines: (0..setup.workers).map(worker).collect(),
            shared_cache: shared,
            links: LinkSchedule::new(setup.workers, spec.link),
            events: EventQueue::default(),
            scheduler: SessionScheduler::new(trace),
            jobs: Vec::new(),
            tally: RunTally::new(trace),
            now: Seconds::ZERO,
        })
    }

    /// Returns the run with a stopwatch for the policy's decisions.
    pub fn with_stopwatch(self, watch: &'a dyn Stopwatch) -> Self {
        Self { driver: PolicyDriver { watch: Some(watch), ..self.driver }, ..self }
    }

    /// Returns the run labelled with its tier policy.
    pub fn with_tier_policy(self, tier_policy: Option<TierPolicy>) -> Self {
        Self { driver: PolicyDriver { tier_policy, ..self.driver }, ..self }
    }

    /// Returns the run with workers that serve this model. Trace and hardware profile must already be scaled to the
    /// model.
    pub fn with_model(mut self, model: &Arc<KvModel>) -> Self {
        let engine = |ScheduledEngine { engine, event_sequence: announced }| ScheduledEngine {
            engine: engine.with_restore_rule(model.rule()),
            event_sequence: announced,
        };
        self.engines = self.engines.into_iter().map(engine).collect();
        self.driver.model = Some(model.clone());
        self
    }

    /// Runs until no event is left. `progress` is called now and then with the finished steps and the total.
    pub fn run(mut self, progress: &mut dyn FnMut(usize, usize)) -> RunStats {
        const PROGRESS_EVERY: usize = 512;
        self.schedule_initial_events();
        let (all, mut told) = (self.trace.steps().count(), 0);
        while let Some((at, event)) = self.events.next() {
            self.advance_to(at);
            self.handle_event(event);
            self.record_residency_changes();
            let over = self.tally.finished_steps;
            if over >= told + PROGRESS_EVERY {
                told = over;
                progress(over, all);
            }
        }
        progress(self.tally.finished_steps, all);
        self.figures()
    }

    fn schedule_initial_events(&mut self) {
        match self.trace.arrivals {
            ArrivalProcess::Recorded => {
                for (session, recorded) in self.trace.sessions.iter().enumerate() {
                    for (step, recorded) in recorded.steps.iter().enumerate() {
                        let at = Seconds(Seconds::from(recorded.at).0 / self.setup.load);
                        self.events.add(at, WorldEvent::Arrives(StepRef { session, step }));
                    }
                }
            }
            ArrivalProcess::AfterDependencies => {
                (0..self.setup.load as usize).for_each(|n| {
                    self.events.add(Seconds(n as f64 * SESSION_START_INTERVAL), WorldEvent::SessionStarts)
                });
            }
        }
        if let Some(period) = self.driver.policy.poll_interval() {
            self.events.add(period, WorldEvent::PollPolicy);
        }
        if let Some(period) = self.driver.policy.replication_interval() {
            self.events.add(period, WorldEvent::PollReplication);
        }
    }

    fn advance_to(&mut self, until: Seconds) {
        self.tally.utilization.pass(until - self.now);
        self.now = until;
        self.driver.delayed_residency.iter_mut().for_each(|delayed| delayed.pass(until));
    }

    fn record_residency_changes(&mut self) {
        let Some(delayed) = &mut self.driver.delayed_residency else { return };
        for (place, worker) in self.engines.iter_mut().enumerate() {
            delayed.changed(place, self.now, worker.engine.take_changes());
        }
    }

    fn handle_event(&mut self, event: WorldEvent) {
        match event {
            WorldEvent::SessionStarts => self.start_session(),
            WorldEvent::Arrives(at) => {
                self.tally.utilization.step_arrived(at.session);
                self.step_arrived(at, self.now);
            }
            WorldEvent::Engine { worker, sequence: announced } => {
                if self.engines[worker].event_sequence == announced {
                    self.run_engine_event(worker);
                }
            }
            WorldEvent::FetchArrived(ticket) => self.fetch_arrived(ticket),
            WorldEvent::ShipmentArrived(ticket) => self.shipment_arrived(ticket),
            WorldEvent::PollPolicy => self.poll_policy(),
            WorldEvent::PollReplication => {
                self.driver.policy.replication_interval().into_iter().for_each(|period| self.start_replications(period))
            }
            WorldEvent::ReplicationArrived(number) => self.replication_arrived(number),
        }
    }

    fn start_session(&mut self) {
        match self.scheduler.next_session() {
            Some(session) => {
                self.tally.utilization.opened(session);
                for step in self.scheduler.start_session(session, &self.trace.sessions[session]) {
                    self.tally.utilization.step_arrived(session);
                    self.step_arrived(StepRef { session, step }, self.now);
                }
            }
            // From here on, fewer sessions run than were requested.
            None => self.tally.is_window_closed = true,
        }
    }

    fn poll_policy(&mut self) {
        let due = self.ask_policy(|policy, fleet| policy.due_steps(fleet));
        for at in due {
            let since = self.scheduler.release_held_step(at).unwrap_or(self.now);
            self.step_arrived(at, since);
        }
        if let Some(period) = self.driver.policy.poll_interval().filter(|_| !self.events.is_empty()) {
            self.events.add(self.now + period, WorldEvent::PollPolicy);
        }
    }

    /// Handles the due work of an engine.
    fn run_engine_event(&mut self, worker: usize) {
        self.drive_engine(worker, RunEngine::handle_due_work);
    }

    /// Something arrived at an engine from outside: a prefill may be able to start.
    fn wake_engine(&mut self, worker: usize) {
        self.drive_engine(worker, RunEngine::begin_next_prefill);
    }

    fn drive_engine(
        &mut self,
        worker: usize,
        on: impl FnOnce(&mut RunEngine, &mut SharedEngineState<'_>, &mut Vec<RunRequestEvent>),
    ) {
        let mut out = Vec::new();
        let mut around = SharedEngineState { runs: &self.trace.runs, shared: self.shared_cache.as_mut() };
        let engine = &mut self.engines[worker].engine;
        engine.advance_clock(self.now, &around);
        on(engine, &mut around, &mut out);
        self.handle_engine_events(worker, out);
        self.schedule_engine_event(worker);
    }

    fn schedule_engine_event(&mut self, worker: usize) {
        let around = SharedEngineState { runs: &self.trace.runs, shared: self.shared_cache.as_mut() };
        let ScheduledEngine { engine, event_sequence: announced } = &mut self.engines[worker];
        *announced += 1;
        let next = engine.next_event(&around);
        self.tally.utilization.set_next_event(worker, next);
        if let Some(at) = next {
            self.events.add(at, WorldEvent::Engine { worker, sequence: *announced });
        }
    }

    fn job(&mut self, request: RunRequestId) -> &mut StepJob {
        self.jobs[request.0 as usize].as_mut().expect("a ticket is alive until its answer is whole")
    }
}

impl SimulationSetup {
    /// Checks whether this can be simulated.
    pub fn check(&self, trace: &Trace, kind: PolicyKind) -> Result<(), SetupError> {
        let least = if kind.is_colocated() { 1 } else { 2 };
        if !(least..=1_024).contains(&self.workers) {
            return Err(SetupError::Workers { policy: kind.as_str(), workers: self.workers, least });
        }
        let Some(longest) = trace.steps().map(|step| trace.kv_footprint(step)).max() else {
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
            ArrivalProcess::AfterDependencies => {
                let sessions = trace.sessions.len();
                if load.fract() == 0.0 && (1.0..=sessions as f64).contains(&load) {
                    return Ok(());
                }
                let accepted = format!("a whole number of sessions at once, 1 to the {sessions} that the trace has");
                Err(SetupError::Load { load, accepted })
            }
            ArrivalProcess::Recorded => {
                if !(0.001..=1e6).contains(&load) {
                    let accepted = "a factor on the recorded rate, 0.001 to 1000000".to_owned();
                    return Err(SetupError::Load { load, accepted });
                }
                let last = trace.steps().map(|step| Seconds::from(step.at)).max().unwrap_or_default().0;
                let seconds = last / load;
                if seconds <= MAX_SECONDS {
                    Ok(())
                } else {
                    Err(SetupError::Span { load, seconds, least: last / MAX_SECONDS })
                }
            }
        }
    }
}

/// A future event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum WorldEvent {
    SessionStarts,
    Arrives(StepRef),
    /// Announced by an engine; void once the engine has announced another one.
    Engine {
        worker: usize,
        sequence: u64,
    },
    FetchArrived(RunRequestId),
    ShipmentArrived(RunRequestId),
    PollPolicy,
    PollReplication,
    /// A replicated prefix has arrived; the number identifies the transfer.
    ReplicationArrived(usize),
}

#[derive(Default)]
struct EventQueue {
    heap: BinaryHeap<Reverse<(Seconds, u64, WorldEvent)>>,
    added: u64,
}

impl EventQueue {
    fn add(&mut self, at: Seconds, event: WorldEvent) {
        self.added += 1;
        self.heap.push(Reverse((at, self.added, event)));
    }

    fn next(&mut self) -> Option<(Seconds, WorldEvent)> {
        self.heap.pop().map(|Reverse((at, _, event))| (at, event))
    }

    fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}

/// Times at which each worker's link is free again, for sending and receiving.
struct LinkSchedule {
    speed: LinkSpeed,
    free_to_send_at: Vec<Seconds>,
    free_to_receive_at: Vec<Seconds>,
    /// Tokens of KV sent so far.
    moved_tokens: Tokens,
    /// Prefixes sent before a step asks for them.
    replication: ReplicationTracker,
}

impl LinkSchedule {
    fn new(workers: usize, speed: LinkSpeed) -> Self {
        let free = vec![Seconds::ZERO; workers];
        Self {
            speed,
            free_to_send_at: free.clone(),
            free_to_receive_at: free,
            moved_tokens: Tokens::ZERO,
            replication: ReplicationTracker::default(),
        }
    }

    /// Returns the seconds that a transfer of `tokens` takes on a free link.
    fn transfer_seconds(&self, tokens: Tokens) -> f64 {
        tokens.0 as f64 / self.speed.tokens_per_second + self.speed.fixed
    }

    /// Sends tokens of KV as soon as both ends are free; returns the arrival time.
    fn send(&mut self, now: Seconds, (from, to): (usize, usize), tokens: Tokens) -> Seconds {
        let begin = now.max(self.free_to_send_at[from]).max(self.free_to_receive_at[to]);
        let arrived = begin + Seconds(self.transfer_seconds(tokens));
        (self.free_to_send_at[from], self.free_to_receive_at[to]) = (arrived, arrived);
        self.moved_tokens += tokens;
        arrived
    }
}

/// Most replications in flight at once.
const MAX_CONCURRENT_REPLICATIONS: usize = 4;

impl Simulation<'_> {
    /// Asks the policy for replications, as long as more events will follow.
    fn start_replications(&mut self, period: Seconds) {
        let most = MAX_CONCURRENT_REPLICATIONS.saturating_sub(self.links.replication.in_flight.len());
        if most > 0 {
            let moves = self.ask_policy(|policy, fleet| policy.replications(most, fleet));
            moves.into_iter().for_each(|chosen| self.start_replication(chosen));
        }
        if !self.events.is_empty() {
            self.events.add(self.now + period, WorldEvent::PollReplication);
        }
    }

    fn start_replication(&mut self, ReplicationOrder { after, path, from, to, until }: ReplicationOrder) {
        let runs = &self.trace.runs;
        let (source, target) = (&self.engines[from].engine, &self.engines[to].engine);
        let until = until.min(source.cached_depths(runs, &path).with_disk);
        let needed = path.iter().take_while(|run| runs.depth(**run) <= until);
        let missing: Vec<_> = needed.copied().filter(|run| !target.has(*run)).collect();
        if missing.is_empty() {
            return;
        }
        let tokens: Tokens = missing.iter().map(|run| runs.device_size(*run)).sum();
        let OutgoingTransfer { pinned: kept, load_seconds: loads } =
            self.engines[from].engine.pin_for_transfer(runs, &missing);
        let arrives = self.links.send(self.now + Seconds(loads), (from, to), tokens);
        let for_whom = (after.session, self.trace.sessions[after.session].steps[after.step].agent);
        let number = self.links.replication.figures.moves;
        self.links.replication.figures.moves += 1;
        self.links.replication.figures.tokens += tokens.0;
        self.links
            .replication
            .expected
            .insert(for_whom, AwaitedReplication { number, to, state: ReplicationState::InFlight });
        self.links
            .replication
            .in_flight
            .insert(number, ReplicationTransfer { from, to, agent: for_whom, runs: missing, pinned_runs: kept });
        self.events.add(arrives, WorldEvent::ReplicationArrived(number));
    }

    fn replication_arrived(&mut self, number: usize) {
        let Some(ReplicationTransfer { from, to, agent: for_whom, runs: sent, pinned_runs: lent }) =
            self.links.replication.in_flight.remove(&number)
        else {
            return;
        };
        let runs = &self.trace.runs;
        self.engines[from].engine.transfer_sent(runs, &lent);
        let state = if self.engines[to].engine.cache_received(runs, &sent) {
            ReplicationState::Arrived
        } else {
            ReplicationState::Dropped
        };
        if let Some(awaited) =
            self.links.replication.expected.get_mut(&for_whom).filter(|awaited| awaited.number == number)
        {
            awaited.state = state;
        }
        self.wake_engine(from);
        self.wake_engine(to);
    }
}

#[cfg(test)]
mod tests;
