//! One engine in continuous virtual time: a queue of prompts, one of them being computed, and a batch of answers.
//!
//! Prompts begin in the order in which they came, each once its memory is there; one that does not fit holds up those
//! behind it. A chunk and the batch share each step, so that prompts slow answers down and answers slow prompts down.

mod lifecycle;
mod transfer;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use vocabulary::Tokens;

pub use transfer::OutboundTransfer;

use super::pool::RunPool;
use super::restore::FullRestore;
use super::{
    DiskTraffic, EngineEnvironment, EngineTiming, MemorySizes, RestoreRule, RestoreTime, RunId, RunRequest,
    RunRequestId, RunTree, Seconds, TierDepths,
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
    load: OutstandingLoad,
    usage: EngineBusyTime,
}

/// A prompt that is being computed.
#[derive(Debug)]
struct ActivePrefill {
    prompt: RunRequest,
    computed: Tokens,
    /// Seconds of work, in all and left.
    total_work: f64,
    work_left: f64,
    /// Runs that it computes or was sent.
    missing: Vec<RunId>,
    reserved: Tokens,
}

/// Answers that are being generated. All advance alike, so that one number says how far each is.
#[derive(Debug, Default)]
struct DecodeBatch {
    /// Tokens that a request would have had it been here since the beginning.
    progress: f64,
    context: u64,
    /// Prompts and what is reserved, by the progress at which they are over, as bits: of numbers from zero on these have their
    /// order; and by their number, for those that end together.
    answers: BTreeMap<(u64, u64), (RunRequest, Tokens)>,
    started: u64,
}

/// What was sent to an engine and is not over: its senders' own count, known without asking.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct OutstandingLoad {
    /// Requests with a leg here.
    pub requests: u64,
    /// Prompt tokens to be computed.
    pub prompt: Tokens,
    /// Seconds of work in them.
    pub work: f64,
    /// Tokens of the prompts that are or will be answered here.
    pub context: Tokens,
}

/// Where an engine's time went, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct EngineBusyTime {
    /// It computed a prompt.
    pub prefilling: f64,
    /// Answers were generated, each counted.
    pub decoding: f64,
    /// Of that, answers waited for a prompt's chunk beside them.
    pub stalled: f64,
}

/// A prompt has begun.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PrefillStart {
    /// Which.
    pub ticket: RunRequestId,
    /// Leading tokens that were cached here.
    pub local: Tokens,
    /// Tokens after these that had been sent here for it.
    pub fetched: Tokens,
    /// Tokens after these that came from slower tiers.
    pub restored: Tokens,
    /// Tokens that are computed.
    pub computed: Tokens,
    /// Seconds of work until the prompt is there, beside nothing else.
    pub work: f64,
    /// Of that, waiting for and loading what comes from slower tiers.
    pub restoring: RestoreTime,
}

/// Something that happened in an engine.
#[derive(Clone, PartialEq, Debug)]
pub enum RunEngineEvent {
    /// A prompt has begun.
    Started(PrefillStart),
    /// A prompt is computed and waits for the engine that answers it.
    Prefilled(super::PrefilledRequest),
    /// A prompt is computed where it is answered.
    FirstToken(RunRequestId),
    /// An answer is whole.
    Finished(RunRequestId),
}

impl RunEngine {
    /// An idle engine at time zero, for runs below `runs`.
    pub fn new(timing: EngineTiming, sizes: MemorySizes, runs: usize) -> Self {
        Self {
            timing,
            pool: RunPool::new(sizes, runs),
            rule: Arc::new(FullRestore),
            queue: VecDeque::new(),
            prefilling: None,
            batch: DecodeBatch::default(),
            clock: Seconds::ZERO,
            load: OutstandingLoad::default(),
            usage: EngineBusyTime::default(),
        }
    }

    /// The same, for a model whose prefixes come back as a rule says.
    pub fn with_restore_rule(self, rule: Arc<dyn RestoreRule>) -> Self {
        Self { rule, ..self }
    }

    /// The same, remembering what comes into its cache and goes.
    pub fn with_change_recording(mut self) -> Self {
        self.pool.enable_change_recording();
        self
    }

    /// The runs that came into the cache (true) and went, in order, since the last call; none unless it is telling.
    pub fn take_changes(&mut self) -> Vec<(RunId, bool)> {
        self.pool.take_changes()
    }

    /// What its senders know of its load.
    pub fn load(&self) -> &OutstandingLoad {
        &self.load
    }

    /// Where its time went.
    pub fn usage(&self) -> EngineBusyTime {
        self.usage
    }

    /// Answers that are being generated, and the tokens of their context.
    pub fn batch(&self) -> (usize, u64) {
        (self.batch.answers.len(), self.batch.context)
    }

    /// Prompts that wait.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Whether it computes a prompt.
    pub fn is_prefilling(&self) -> bool {
        self.prefilling.is_some()
    }

    /// Seconds from `now` until it has computed the prompts that it has, at the pace that it has now.
    pub fn prefill_left(&self, now: Seconds) -> f64 {
        let since = (now - self.clock).0.max(0.0);
        let pace = self.local_progress_rates().prefill;
        let left = self.prefilling.as_ref().map_or(0.0, |prompt| (prompt.work_left / pace - since).max(0.0));
        let queued: f64 = self.queue.iter().map(|prompt| prompt.expected_work).sum();
        left + queued / pace
    }

    /// What of a prompt lies here and need not be computed.
    pub fn cached_depths(&self, runs: &RunTree, path: &[RunId]) -> TierDepths {
        let device = self.pool.matched(runs, path);
        let below = self.pool.matched_in_lower_tiers(runs, path, device);
        let usable = |until| match until > device {
            true => self.pool.restore_choice(&*self.rule, (runs, path), (device, until)).compute_from,
            false => device,
        };
        let [with_host, with_disk] = below.map(usable);
        TierDepths { device, with_host, with_disk }
    }

    /// Whether a run is cached here.
    pub fn has(&self, run: RunId) -> bool {
        self.pool.has(run)
    }

    /// Tokens of memory that are taken, cached ones included.
    pub fn memory_used(&self) -> Tokens {
        self.pool.used()
    }

    /// Tokens of memory that cannot be evicted now.
    pub fn memory_in_use(&self) -> Tokens {
        self.pool.in_use()
    }

    /// What went to its disk and came from it.
    pub fn disk_use(&self) -> DiskTraffic {
        self.pool.lower.disk_use()
    }

    /// Tokens that were evicted so far.
    pub fn evicted(&self) -> Tokens {
        self.pool.evicted()
    }

    /// Counts a request that is answered here; it may be computed elsewhere.
    pub fn expect_answer(&mut self, context: Tokens) {
        self.load.context += context;
    }

    /// Counts a request whose prompt is computed elsewhere.
    pub fn expect_arrival(&mut self) {
        self.load.requests += 1;
    }

    /// Takes a prompt.
    pub fn submit(&mut self, prompt: RunRequest) {
        self.load.requests += 1;
        self.load.prompt += prompt.expected;
        self.load.work += prompt.expected_work;
        self.queue.push_back(prompt);
    }

    /// When something will happen next if nobody calls before; none when nothing will. `settle` comes first.
    pub fn next_event(&self, around: &EngineEnvironment<'_>) -> Option<Seconds> {
        let pace = self.progress_rates(around);
        let answer = self.batch.answers.keys().next().map(|(ends, _)| f64::from_bits(*ends) - self.batch.progress);
        let answer = answer.map(|tokens| (tokens * pace.token).max(0.0));
        let prompt = self.prefilling.as_ref().map(|now| now.work_left.max(0.0) / pace.prefill);
        let soonest = [prompt, answer].into_iter().flatten().min_by(f64::total_cmp)?;
        Some(self.clock + Seconds(soonest))
    }

    /// How fast things go now.
    fn progress_rates(&self, around: &EngineEnvironment<'_>) -> ProgressRates {
        let own = self.local_progress_rates();
        match around.shared {
            Some(_) => ProgressRates { prefill: 1.0, token: own.token_alone, ..own },
            None => own,
        }
    }

    /// The same where memory is each engine's own.
    fn local_progress_rates(&self) -> ProgressRates {
        let requests = self.batch.answers.len();
        let batch = self.timing.batch_time(requests, self.batch.context);
        let alone = self.timing.decode_step + batch;
        let Some(now) = &self.prefilling else {
            return ProgressRates { prefill: 1.0, token: alone, token_alone: alone };
        };
        let tokens = now.computed.max(Tokens(1));
        let chunk = now.total_work / tokens.0 as f64 * self.timing.chunk_tokens.min(tokens).0 as f64;
        let beside = if requests > 0 { self.timing.step_beside_chunk } else { 0.0 };
        let both = chunk + batch + beside;
        let prefill = if both > 0.0 { chunk / both } else { 1.0 };
        ProgressRates { prefill, token: both, token_alone: alone }
    }

    /// Lets time pass until `now`.
    pub fn advance_clock(&mut self, now: Seconds, around: &EngineEnvironment<'_>) {
        let span = (now - self.clock).0;
        self.clock = now;
        self.pool.lower.advance_clock(now);
        if span <= 0.0 {
            return;
        }
        let pace = self.progress_rates(around);
        let answers = self.batch.answers.len() as f64;
        if let Some(prefilling) = &mut self.prefilling {
            prefilling.work_left -= span * pace.prefill;
            self.usage.prefilling += span;
            if around.shared.is_none() {
                self.usage.stalled += answers * span * (1.0 - pace.token_alone / pace.token).max(0.0);
            }
        }
        if answers > 0.0 {
            self.batch.progress += span / pace.token;
            self.usage.decoding += answers * span;
        }
    }
}

/// Rates of one moment.
struct ProgressRates {
    /// Of the prompt's work, per second.
    prefill: f64,
    /// Seconds of a token of every answer.
    token: f64,
    /// What that would be without a prompt.
    token_alone: f64,
}
