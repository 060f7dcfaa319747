//! Asks a policy to place a step, and translates its answer into work for each worker.

use engine_model::runs::{
    DecodeLocation, OutgoingTransfer, PromptTierDepths, RunEngine, RunId, RunRequest, RunRequestId, Seconds,
};
use planner::ReplicateSendTiming;
use vocabulary::Tokens;

use super::delayed_residency::DelayedResidency;
use super::stage_times::StageTimestamps;
use super::{Simulation, StepJob, WorldEvent};
use crate::hardware_profile::HardwareProfile;
use crate::kv_model::KvModel;
use crate::policies::{Dispatch, FetchOrder, FleetView, PlacementRequest, RoutingPolicy, StepAdmission, StepRef};
use crate::trace::{ArrivalProcess, TraceStep};

/// KV on its way to a worker.
#[derive(Default)]
pub(super) struct PendingFetch {
    runs: Vec<RunId>,
    /// Runs that the source keeps in device memory until they are sent.
    pinned_runs: Vec<RunId>,
    pub(super) ready: Seconds,
}

impl Simulation<'_> {
    /// Calls the policy with a view of the fleet.
    pub(super) fn ask_policy<T>(&mut self, ask: impl FnOnce(&mut dyn RoutingPolicy, &FleetView<'_>) -> T) -> T {
        let engines: Vec<&RunEngine> = self.engines.iter().map(|worker| &worker.engine).collect();
        let fleet = FleetView {
            now: self.now,
            workers: &engines,
            spec: &self.setup.spec,
            runs: &self.trace.runs,
            block: self.trace.block,
            attention: self.driver.model.as_deref().map(KvModel::planned),
        };
        ask(&mut *self.driver.policy, &fleet)
    }

    /// A step arrives; it has been waiting since `since`.
    pub(super) fn step_arrived(&mut self, at: StepRef, since: Seconds) {
        let trace = self.trace;
        let step = &trace.sessions[at.session].steps[at.step];
        let alone = trace.arrivals == ArrivalProcess::Recorded;
        let resident = self.resident_memory(step);
        let delayed =
            self.driver.delayed_residency.as_ref().map(|delayed| self.visible_memory(delayed, step, &resident));
        let watch = self.driver.watch;
        let dealt = self.ask_policy(|policy, fleet| {
            let ask = PlacementRequest {
                at,
                step,
                is_independent: alone,
                memory_by_worker: delayed.as_ref().unwrap_or(&resident),
            };
            (policy.admit(&ask, fleet) == StepAdmission::Now).then(|| {
                watch.iter().for_each(|watch| watch.start());
                let dispatch = policy.place(&ask, fleet);
                watch.iter().for_each(|watch| watch.stop());
                dispatch
            })
        });
        let Some(dispatch) = dealt else {
            self.scheduler.hold_step(at, since);
            if let Some(after) = self.driver.policy.poll_after() {
                self.events.add(self.now + after, WorldEvent::PollPolicy);
            }
            return;
        };
        self.dispatch((at, step), since, (&dispatch, &resident));
    }

    /// Returns the seconds to load what is in slower tiers, except for the leading tokens that were sent.
    pub(super) fn restoring(&self, depths: &PromptTierDepths, fetched_tokens: Tokens) -> f64 {
        let sizes = &self.setup.spec.sizes;
        let PromptTierDepths { device, with_host, with_disk } = *depths;
        let above_host = device.max(fetched_tokens);
        let host = (with_host - above_host).0 as f64 / sizes.host_tokens_per_second;
        host + (with_disk - with_host.max(fetched_tokens)).0 as f64 / sizes.disk_speed.read
    }

    fn resident_memory(&self, step: &TraceStep) -> Vec<PromptTierDepths> {
        let runs = &self.trace.runs;
        if let Some(shared) = &self.shared_cache {
            let matched = shared.matched(runs, &step.path);
            return vec![PromptTierDepths::on_device(matched); self.engines.len()];
        }
        self.engines.iter().map(|worker| worker.engine.cached_depths(runs, &step.path)).collect()
    }

    /// Returns the residency as the policy sees it.
    fn visible_memory(
        &self,
        delayed: &DelayedResidency,
        step: &TraceStep,
        resident: &[PromptTierDepths],
    ) -> Vec<PromptTierDepths> {
        let visible = |(worker, memory): (usize, &PromptTierDepths)| {
            let device = delayed.matched_tokens(worker, &self.trace.runs, &step.path);
            let sizes = &self.setup.spec.sizes;
            let below = |size: Tokens, now: Tokens, visible: Tokens| {
                if size > Tokens::ZERO { now.max(visible) } else { visible }
            };
            let with_host = below(sizes.host, memory.with_host, device);
            PromptTierDepths { device, with_host, with_disk: below(sizes.disk, memory.with_disk, with_host) }
        };
        resident.iter().enumerate().map(visible).collect()
    }

    fn dispatch(
        &mut self,
        (at, step): (StepRef, &TraceStep),
        since: Seconds,
        (dispatch, resident): (&Dispatch, &[PromptTierDepths]),
    ) {
        self.links.replication.step_dispatched((at, step), dispatch.prefill);
        let ticket = RunRequestId(u32::try_from(self.jobs.len()).expect("a trace has fewer steps"));
        let (prefill, decode) = (dispatch.prefill, dispatch.decode);
        let PendingFetch { runs: fetched, pinned_runs: pinned, ready } =
            dispatch.fetch.map_or_else(PendingFetch::default, |fetch| self.fetch(ticket, step, (fetch, prefill)));
        let resident_tokens = resident[prefill].with_disk;
        let fetched_tokens = dispatch.fetch.filter(|_| !fetched.is_empty()).map_or(Tokens::ZERO, |fetch| fetch.until);
        let cached = resident_tokens.max(fetched_tokens);
        let expected = (step.prompt - cached).max(Tokens(1));
        let answered = if prefill == decode { DecodeLocation::Local } else { DecodeLocation::Remote };
        let prompt = RunRequest {
            ticket,
            path: step.path.clone(),
            tokens: step.prompt,
            answer: step.answer,
            expected_history: step.resent_path.clone(),
            decode_location: answered,
            fetched_runs: fetched,
            ready_at: ready,
            expected,
            expected_work: self.setup.spec.timing.prefill_time(expected, cached)
                + self.restoring(&resident[prefill], fetched_tokens),
        };
        let best = if self.shared_cache.is_some() { Tokens::ZERO } else { deepest(resident) };
        dispatch.prediction.iter().for_each(|prediction| self.tally.action(prediction.action));
        let stages = StageTimestamps::at_placement((since, self.now), ready);
        self.jobs.push(Some(StepJob::new((at, stages), *dispatch, (pinned, best))));
        if answered == DecodeLocation::Remote {
            self.engines[decode].engine.expect_arrival();
        }
        self.engines[decode].engine.expect_answer(step.prompt);
        self.engines[prefill].engine.submit(prompt);
        self.wake_engine(prefill);
    }

    /// Sends the missing runs, and pins them at the source until they are sent.
    pub(super) fn fetch(
        &mut self,
        request: RunRequestId,
        step: &TraceStep,
        (fetch, to): (FetchOrder, usize),
    ) -> PendingFetch {
        let runs = &self.trace.runs;
        let (source, target) = (&self.engines[fetch.from].engine, &self.engines[to].engine);
        let until = fetch.until.min(source.cached_depths(runs, &step.path).with_disk);
        let needed = step.path.iter().take_while(|run| runs.depth(**run) <= until);
        let fetched: Vec<_> = needed.copied().filter(|run| !target.has(*run)).collect();
        if fetched.is_empty() {
            return PendingFetch::default();
        }
        let tokens = fetched.iter().map(|run| runs.device_size(*run)).sum();
        let turn = self.source_wait_seconds(fetch.from);
        let OutgoingTransfer { pinned: kept, load_seconds: loads } =
            self.engines[fetch.from].engine.pin_for_transfer(runs, &fetched);
        let loaded_at = self.now + Seconds(loads);
        // A request that queues at the source does not occupy the link.
        let ready = self
            .links
            .send(loaded_at, (fetch.from, to), tokens)
            .max(loaded_at + Seconds(turn + self.links.transfer_seconds(tokens)));
        self.events.add(ready, WorldEvent::FetchArrived(request));
        PendingFetch { runs: fetched, pinned_runs: kept, ready }
    }

    /// Returns the seconds until a worker sends KV that is requested now: after its queued prompts, and after the one
    /// token that ends such a request.
    fn source_wait_seconds(&self, from: usize) -> f64 {
        let HardwareProfile { link, timing, .. } = &self.setup.spec;
        match link.sources {
            ReplicateSendTiming::Immediate => 0.0,
            ReplicateSendTiming::Queued => self.engines[from].engine.prefill_left(self.now) + timing.decode_step,
        }
    }

    /// The KV that a prompt was waiting for has arrived.
    pub(super) fn fetch_arrived(&mut self, request: RunRequestId) {
        let runs = &self.trace.runs;
        let job = self.job(request);
        let (dispatch, pinned) = (job.dispatch, std::mem::take(&mut job.pinned_runs));
        if let Some(FetchOrder { from, .. }) = dispatch.fetch {
            self.engines[from].engine.transfer_sent(runs, &pinned);
            self.wake_engine(dispatch.prefill);
            self.wake_engine(from);
        }
    }
}

fn deepest(resident: &[PromptTierDepths]) -> Tokens {
    resident.iter().map(|memory| memory.device).max().unwrap_or_default()
}
