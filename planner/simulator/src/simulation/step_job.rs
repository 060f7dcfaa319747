//! Lifecycle of a dispatched step.

use engine_model::runs::{
    PrefillHandoff, PrefillStart, RunId, RunRequestEvent, RunRequestId, Seconds, SharedEngineState,
};
use vocabulary::Tokens;

use super::stage_times::StageTimestamps;
use super::{NEXT_SESSION_DELAY, Simulation, WorldEvent};
use crate::policies::{Dispatch, HandoffPayload, StepRef};

/// Time between two tries to hand over to a decode worker without memory, and number of tries before the prefill worker
/// answers.
const RETRY_INTERVAL: Seconds = Seconds(0.05);
const MAX_TRIES: u32 = 100;

/// A step being served.
pub(super) struct StepJob {
    at: StepRef,
    stages: StageTimestamps,
    /// Longest prefix that any worker held when the step was placed.
    longest_prefix: Tokens,
    pub(super) dispatch: Dispatch,
    /// Runs that the source keeps until they are sent.
    pub(super) pinned_runs: Vec<RunId>,
    prefilled: Option<PrefillHandoff>,
    tries: u32,
}

impl StepJob {
    pub(super) fn new(
        (at, stages): (StepRef, StageTimestamps),
        dispatch: Dispatch,
        (pinned_runs, longest_prefix): (Vec<RunId>, Tokens),
    ) -> Self {
        Self { at, stages, longest_prefix, dispatch, pinned_runs, prefilled: None, tries: 0 }
    }
}

impl Simulation<'_> {
    pub(super) fn handle_engine_events(&mut self, worker: usize, happenings: Vec<RunRequestEvent>) {
        for happening in happenings {
            match happening {
                RunRequestEvent::Started(started) => self.started(&started),
                RunRequestEvent::Prefilled(prefilled) => self.start_shipping(worker, prefilled),
                RunRequestEvent::FirstToken(ticket) => {
                    self.job(ticket).stages.computed = self.now;
                    self.first_token(ticket);
                }
                RunRequestEvent::Finished(ticket) => self.finished(ticket),
            }
        }
    }

    fn started(&mut self, started: &PrefillStart) {
        let (trace, now) = (self.trace, self.now);
        let job = self.job(started.ticket);
        let (at, best) = (job.at, job.longest_prefix);
        let step = &trace.sessions[at.session].steps[at.step];
        let again = self.tally.started(&trace.runs, (at, step), (started, best));
        self.job(started.ticket).stages.prompt_started(now, started, again);
    }

    fn first_token(&mut self, request: RunRequestId) {
        let now = self.now;
        let job = self.job(request);
        job.stages.first_token = now;
        let (at, stages, prediction) = (job.at, job.stages, job.dispatch.prediction);
        self.tally.record_first_token(at, &stages);
        prediction.iter().for_each(|prediction| self.tally.record_prediction(prediction, now - stages.placed));
    }

    /// Starts to send the prompt's KV to the decode worker.
    fn start_shipping(&mut self, worker: usize, prefilled: PrefillHandoff) {
        let (now, runs) = (self.now, &self.trace.runs);
        let ticket = prefilled.prompt.ticket;
        self.job(ticket).stages.computed = now;
        let Dispatch { decode, ship, .. } = self.job(ticket).dispatch;
        let there = match ship {
            HandoffPayload::Whole => Tokens::ZERO,
            HandoffPayload::Missing => self.engines[decode].engine.cached_depths(runs, &prefilled.prompt.path).device,
        };
        let arrived = self.links.send(now, (worker, decode), prefilled.prompt.tokens - there + runs.window_size());
        self.job(ticket).prefilled = Some(prefilled);
        self.events.add(arrived, WorldEvent::ShipmentArrived(ticket));
    }

    /// The KV has arrived; if the decode worker has no memory, the step waits.
    pub(super) fn shipment_arrived(&mut self, request: RunRequestId) {
        let (now, runs) = (self.now, &self.trace.runs);
        let job = self.job(request);
        let (Dispatch { prefill, decode, .. }, tries) = (job.dispatch, job.tries);
        let Some(prefilled) = job.prefilled.take() else { return };
        let around = SharedEngineState { runs, shared: self.shared_cache.as_mut() };
        let target = &mut self.engines[decode].engine;
        // The batch of the target is about to change.
        target.advance_clock(now, &around);
        if target.receive_prefilled(runs, prefilled.prompt.clone()).is_err() {
            if tries >= MAX_TRIES && self.kind.is_colocated() {
                self.answer_at_source((prefill, decode), prefilled);
                return;
            }
            let job = self.job(request);
            (job.tries, job.prefilled) = (tries + 1, Some(prefilled));
            self.events.add(now + RETRY_INTERVAL, WorldEvent::ShipmentArrived(request));
            return;
        }
        self.first_token(request);
        self.engines[prefill].engine.release_prefilled(runs, &prefilled);
        self.wake_engine(decode);
        self.wake_engine(prefill);
    }

    /// Generates the answer at the prefill worker: two workers that wait for each other's memory would deadlock.
    fn answer_at_source(&mut self, (prefill, decode): (usize, usize), prefilled: PrefillHandoff) {
        let ticket = prefilled.prompt.ticket;
        self.engines[decode].engine.cancel_expected(prefilled.prompt.tokens);
        let around = SharedEngineState { runs: &self.trace.runs, shared: self.shared_cache.as_mut() };
        let engine = &mut self.engines[prefill].engine;
        engine.advance_clock(self.now, &around);
        engine.decode_locally(prefilled);
        self.first_token(ticket);
        self.wake_engine(prefill);
    }

    fn finished(&mut self, request: RunRequestId) {
        let trace = self.trace;
        let Some(job) = self.jobs[request.0 as usize].take() else { return };
        let step = &trace.sessions[job.at.session].steps[job.at.step];
        self.tally.step_finished((job.at, step), self.now, &job.stages);
        self.driver.policy.step_finished(job.at, step, self.now);
        if self.shared_cache.is_none() && self.tally.is_sample_due() {
            let engines: Vec<_> = self.engines.iter().map(|worker| &worker.engine).collect();
            self.tally.memory_samples.sample(&engines, &trace.runs);
        }
        let Some(followed) = self.scheduler.finish_step(job.at) else { return };
        for step in followed.steps {
            let think = Seconds::from(trace.sessions[job.at.session].steps[step].pause);
            self.events.add(self.now + think, WorldEvent::Arrives(StepRef { step, ..job.at }));
        }
        if followed.is_session_over {
            self.driver.policy.session_finished(job.at.session);
            self.tally.session_finished(job.at.session);
            self.events.add(self.now + Seconds(NEXT_SESSION_DELAY), WorldEvent::SessionStarts);
        }
    }
}
