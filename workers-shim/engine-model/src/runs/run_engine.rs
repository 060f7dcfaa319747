//! One engine in continuous virtual time: a queue of prompts, one prefill at a time, and a batch of answers.
//!
//! Prompts start in order of arrival, each once its memory is available; a prompt that does not fit blocks those behind
//! it. A chunk and the batch share each step, so prefills slow down answers, and answers slow down prefills.

mod lifecycle;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use vocabulary::Tokens;

use super::run_pool::RunPool;
use super::{
    DiskTraffic, EngineTiming, FullRestore, MemorySizes, PrefillHandoff, PromptTierDepths, RestoreRule, RestoreTime,
    RunId, RunRequest, RunRequestId, RunTree, Seconds, SharedEngineState,
};

/// A simulated engine.
#[derive(Debug)]
pub struct RunEngine {
    timing: EngineTiming,
    pool: RunPool,
    rule: Arc<dyn RestoreRule>,
    queue: VecDeque<RunRequest>,
    prefilling: Option<ActivePrefill>,
    batch: DecodeBatch,
    clock: Seconds,
    load: OutstandingRequests,
    usage: EngineBusyTime,
}

/// The prompt that is being computed.
#[derive(Debug)]
struct ActivePrefill {
    prompt: RunRequest,
    computed: Tokens,
    /// Seconds of work, in total and remaining.
    total_work: f64,
    work_left: f64,
    /// Runs that it computes or received from elsewhere.
    missing: Vec<RunId>,
    reserved: Tokens,
}

/// Answers that are being generated. All progress at the same rate, so one number describes the progress of all.
#[derive(Debug, Default)]
struct DecodeBatch {
    /// Tokens that a request would have generated had it been here since the start.
    progress: f64,
    context: u64,
    /// Requests and their reserved memory, ordered by the progress at which they end, then by number. The progress is
    /// stored as bits, whose order is the same for non-negative floats.
    answers: BTreeMap<(u64, u64), (RunRequest, Tokens)>,
    started: u64,
}

/// Requests sent to an engine and not finished, as counted by the senders without asking the engine.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct OutstandingRequests {
    /// Requests with a leg at this engine.
    pub requests: u64,
    /// Prompt tokens to compute.
    pub prompt: Tokens,
    /// Seconds of work for these.
    pub work: f64,
    /// Prompt tokens of requests that are or will be answered here.
    pub context: Tokens,
}

/// How an engine spent its time, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct EngineBusyTime {
    /// Computing a prompt.
    pub prefilling: f64,
    /// Generating answers, summed over all answers.
    pub decoding: f64,
    /// The part of `decoding` in which answers waited for a prompt's chunk in the same step.
    pub stalled: f64,
}

/// Describes a prefill at its start.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PrefillStart {
    /// The request.
    pub ticket: RunRequestId,
    /// Leading tokens that were cached in device memory.
    pub local: Tokens,
    /// Tokens after these that were sent here for this request.
    pub fetched: Tokens,
    /// Tokens after these that came from slower tiers.
    pub restored: Tokens,
    /// Tokens to compute.
    pub computed: Tokens,
    /// Seconds of work until the prompt is computed, if nothing else runs.
    pub work: f64,
    /// The part of `work` spent waiting for and loading from slower tiers.
    pub restoring: RestoreTime,
}

/// Something that happened in an engine.
#[derive(Clone, PartialEq, Debug)]
pub enum RunRequestEvent {
    /// A prefill started.
    Started(PrefillStart),
    /// A prompt is computed and waits for the engine that generates the answer.
    Prefilled(super::PrefillHandoff),
    /// A prompt is computed at the engine that generates the answer.
    FirstToken(RunRequestId),
    /// An answer is complete.
    Finished(RunRequestId),
}

impl RunEngine {
    /// Creates an idle engine at time zero, for runs with ids below `runs`.
    pub fn new(timing: EngineTiming, sizes: MemorySizes, runs: usize) -> Self {
        Self {
            timing,
            pool: RunPool::new(sizes, runs),
            rule: Arc::new(FullRestore),
            queue: VecDeque::new(),
            prefilling: None,
            batch: DecodeBatch::default(),
            clock: Seconds::ZERO,
            load: OutstandingRequests::default(),
            usage: EngineBusyTime::default(),
        }
    }

    /// Sets the rule by which stored prefixes are restored.
    pub fn with_restore_rule(self, rule: Arc<dyn RestoreRule>) -> Self {
        Self { rule, ..self }
    }

    /// Records changes of the cache; see [`Self::take_changes`].
    pub fn with_change_recording(mut self) -> Self {
        self.pool.enable_change_recording();
        self
    }

    /// Returns the runs added to the cache (true) and evicted from it (false) since the last call, in order. Empty
    /// unless recording is enabled.
    pub fn take_changes(&mut self) -> Vec<(RunId, bool)> {
        self.pool.take_changes()
    }

    /// Returns the load as its senders know it.
    pub fn load(&self) -> &OutstandingRequests {
        &self.load
    }

    /// Returns how it spent its time.
    pub fn usage(&self) -> EngineBusyTime {
        self.usage
    }

    /// Returns the number of answers being generated, and the tokens of their context.
    pub fn batch(&self) -> (usize, u64) {
        (self.batch.answers.len(), self.batch.context)
    }

    /// Returns the number of waiting prompts.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Returns whether a prompt is being computed.
    pub fn is_prefilling(&self) -> bool {
        self.prefilling.is_some()
    }

    /// Returns the seconds from `now` until all its prompts are computed, at the current rate.
    pub fn prefill_left(&self, now: Seconds) -> f64 {
        let since = (now - self.clock).0.max(0.0);
        let pace = self.local_progress_rates().prefill;
        let seconds_left = self.prefilling.as_ref().map_or(0.0, |prompt| (prompt.work_left / pace - since).max(0.0));
        let queued: f64 = self.queue.iter().map(|prompt| prompt.expected_work).sum();
        seconds_left + queued / pace
    }

    /// Returns how much of a prompt is stored here and need not be computed.
    pub fn cached_depths(&self, runs: &RunTree, path: &[RunId]) -> PromptTierDepths {
        let device = self.pool.matched(runs, path);
        let below = self.pool.matched_in_lower_tiers(runs, path, device);
        let usable = |until| match until > device {
            true => self.pool.restore_choice(&*self.rule, (runs, path), (device, until)).compute_from,
            false => device,
        };
        let [with_host, with_disk] = below.map(usable);
        PromptTierDepths { device, with_host, with_disk }
    }

    /// Returns whether a run is cached in device memory.
    pub fn has(&self, run: RunId) -> bool {
        self.pool.has(run)
    }

    /// Returns the tokens of memory in use, cached ones included.
    pub fn memory_used(&self) -> Tokens {
        self.pool.used()
    }

    /// Returns the tokens of memory that cannot be evicted now.
    pub fn memory_in_use(&self) -> Tokens {
        self.pool.in_use()
    }

    /// Returns the traffic of its disk.
    pub fn disk_use(&self) -> DiskTraffic {
        self.pool.lower.disk_use()
    }

    /// Returns the tokens evicted so far.
    pub fn evicted(&self) -> Tokens {
        self.pool.evicted()
    }

    /// Counts a request that is answered here; its prompt may be computed elsewhere.
    pub fn expect_answer(&mut self, context: Tokens) {
        self.load.context += context;
    }

    /// Counts a request whose prompt is computed elsewhere.
    pub fn expect_arrival(&mut self) {
        self.load.requests += 1;
    }

    /// Submits a prompt.
    pub fn submit(&mut self, prompt: RunRequest) {
        self.load.requests += 1;
        self.load.prompt += prompt.expected;
        self.load.work += prompt.expected_work;
        self.queue.push_back(prompt);
    }

    /// Returns when something will happen next without further calls; None if nothing will. Call `advance_clock` first.
    pub fn next_event(&self, environment: &SharedEngineState<'_>) -> Option<Seconds> {
        let pace = self.progress_rates(environment);
        let answer = self.batch.answers.keys().next().map(|(ends, _)| f64::from_bits(*ends) - self.batch.progress);
        let answer = answer.map(|tokens| (tokens * pace.token).max(0.0));
        let prompt = self.prefilling.as_ref().map(|now| now.work_left.max(0.0) / pace.prefill);
        let soonest = [prompt, answer].into_iter().flatten().min_by(f64::total_cmp)?;
        Some(self.clock + Seconds(soonest))
    }

    /// Returns the current rates.
    fn progress_rates(&self, environment: &SharedEngineState<'_>) -> ProgressRates {
        let own = self.local_progress_rates();
        match environment.shared {
            Some(_) => ProgressRates { prefill: 1.0, token: own.token_alone, ..own },
            None => own,
        }
    }

    /// Returns the current rates of an engine with its own memory.
    fn local_progress_rates(&self) -> ProgressRates {
        let requests = self.batch.answers.len();
        let batch = self.timing.batch_time(requests, self.batch.context);
        let alone = self.timing.decode_step + batch;
        let Some(now) = &self.prefilling else {
            return ProgressRates { prefill: 1.0, token: alone, token_alone: alone };
        };
        let tokens = now.computed.max(Tokens(1));
        let chunk = now.total_work / tokens.0 as f64 * self.timing.chunk_tokens.min(tokens).0 as f64;
        let overhead = if requests > 0 { self.timing.step_beside_chunk } else { 0.0 };
        let step_time = chunk + batch + overhead;
        let prefill = if step_time > 0.0 { chunk / step_time } else { 1.0 };
        ProgressRates { prefill, token: step_time, token_alone: alone }
    }

    /// Advances the time to `now`.
    pub fn advance_clock(&mut self, now: Seconds, environment: &SharedEngineState<'_>) {
        let span = (now - self.clock).0;
        self.clock = now;
        self.pool.lower.advance_clock(now);
        if span <= 0.0 {
            return;
        }
        let pace = self.progress_rates(environment);
        let answers = self.batch.answers.len() as f64;
        if let Some(prefilling) = &mut self.prefilling {
            prefilling.work_left -= span * pace.prefill;
            self.usage.prefilling += span;
            if environment.shared.is_none() {
                self.usage.stalled += answers * span * (1.0 - pace.token_alone / pace.token).max(0.0);
            }
        }
        if answers > 0.0 {
            self.batch.progress += span / pace.token;
            self.usage.decoding += answers * span;
        }
    }
}

/// Rates at one moment.
struct ProgressRates {
    /// Seconds of prefill work done per second.
    prefill: f64,
    /// Seconds per token of each answer.
    token: f64,
    /// The same without a prefill.
    token_alone: f64,
}

/// An outgoing transfer. The links model its duration.
#[derive(Clone, PartialEq, Debug)]
pub struct OutgoingTransfer {
    /// Runs that are pinned in device memory until it is sent.
    pub pinned: Vec<RunId>,
    /// Seconds until the other runs are read from slower tiers.
    pub load_seconds: f64,
}

impl RunEngine {
    /// Pins runs until they are sent; runs in slower tiers are read first.
    pub fn pin_for_transfer(&mut self, runs: &RunTree, path: &[RunId]) -> OutgoingTransfer {
        let (on_device, lower): (Vec<RunId>, Vec<RunId>) = path.iter().partition(|run| self.pool.has(**run));
        self.pool.pin(runs, &on_device);
        OutgoingTransfer { pinned: on_device, load_seconds: self.pool.read_for_transfer(runs, &lower) }
    }

    /// Unpins runs that were sent.
    pub fn transfer_sent(&mut self, runs: &RunTree, path: &[RunId]) {
        self.pool.unpin(runs, path);
    }

    /// Caches received KV that no request waits for, if it fits; it can be evicted like all other runs. Returns whether
    /// it fitted.
    pub fn cache_received(&mut self, runs: &RunTree, path: &[RunId]) -> bool {
        self.cache_path(runs, path)
    }

    /// Starts the answer of a prompt that was computed elsewhere and whose KV has arrived. Returns the request if there
    /// is no room.
    pub fn receive_prefilled(&mut self, runs: &RunTree, mut prompt: RunRequest) -> Result<(), RunRequest> {
        let (present, missing): (Vec<RunId>, Vec<RunId>) = prompt.path.iter().partition(|run| self.pool.has(**run));
        let sum: Tokens = missing.iter().map(|run| runs.device_size(*run)).sum();
        let reserved = prompt.tokens - runs.end_depth(&prompt.path) + prompt.answer + runs.window_size();
        self.pool.pin(runs, &present);
        if !self.pool.reserve(runs, sum + reserved) {
            self.pool.unpin(runs, &present);
            return Err(prompt);
        }
        missing.iter().for_each(|run| _ = self.pool.fill(runs, *run));
        self.pool.pin(runs, &missing);
        self.pool.touch(&prompt.path);
        prompt.decode_location = crate::runs::DecodeLocation::Local;
        self.join_batch(prompt, reserved);
        Ok(())
    }

    /// Releases a prompt that was computed here and is answered elsewhere: its memory is free again, its runs stay
    /// cached.
    pub fn release_prefilled(&mut self, runs: &RunTree, prefilled: &PrefillHandoff) {
        self.pool.unpin(runs, &prefilled.prompt.path);
        self.pool.unreserve(prefilled.reserved);
        self.load.requests -= 1;
    }

    /// Answers a prompt here that should have been answered elsewhere.
    pub fn decode_locally(&mut self, mut prefilled: PrefillHandoff) {
        prefilled.prompt.decode_location = crate::runs::DecodeLocation::Local;
        self.load.context += prefilled.prompt.tokens;
        self.join_batch(prefilled.prompt, prefilled.reserved);
    }

    /// Removes a request from the load that was expected here and is answered elsewhere.
    pub fn cancel_expected(&mut self, context: Tokens) {
        self.load.requests -= 1;
        self.load.context -= context;
    }
}
