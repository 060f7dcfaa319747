//! Our own requests at a worker: counted when they leave, moved when their first token comes, gone when dropped.
//!
//! A scrape tells how things stood when it was sent, at t. So for requests in all
//!
//! ```text
//! load = scrape(t) + own dispatched since its answer - own finished since t, and at least own in flight
//! ```
//!
//! where *own* means all routers' together, those of the others as they last told them (see [`super::set_peer_in_flight`]);
//! (one that is in flight may not have reached the engine's queue by t). Those of them that have no first token
//! yet wait, the others run. What leaves while a scrape is on its way may be counted in it: were it taken for somebody else's,
//! its worker would seem to have a queue until the next one. Engines do not tell how many prompt tokens they still have to compute, so the backlog is
//! our own, exactly, and an estimate for others:
//!
//! ```text
//! backlog = own prompts without a first token
//!         + (waiting(t) - own such prompts at t or dispatched until the answer) x what a prompt usually computes there
//! ```

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Instant;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use vocabulary::{DpRank, EngineSpeed, Micros, Tokens, WorkerId, WorkerLoad};

use super::estimate::Confidence;
use super::peer_in_flight::{InFlightEntry, PeerInFlight};
use super::speeds::{SpeedEstimate, SpeedSample};
use crate::engine_api::TokenUsage;
use crate::scrape::Scrape;

/// Tokens by which a good plan may miss: engines reuse whole blocks only.
const PLAN_TOLERANCE: u64 = 64;

/// Requests and tokens since start; only ever growing, so that differences need no lock.
#[derive(Default, Debug)]
pub(super) struct InFlightCounters {
    dispatched: AtomicU64,
    finished: AtomicU64,
    /// Requests that have their first token, or ended without one.
    begun: AtomicU64,
    /// Prompt tokens that are not known to be computed.
    pending_tokens: AtomicU64,
    /// The other routers' requests.
    peers: ArcSwap<PeerInFlight>,
}

/// What the counters said when a scrape was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct CounterSnapshot {
    dispatched: u64,
    finished: u64,
    begun: u64,
    peers: PeerInFlight,
    /// Own requests that left between that and the scrape's answer: it may count them or not.
    dispatched_during: u64,
    /// Own requests that ended then: of those that left then, or of older ones.
    finished_during: u64,
}

impl InFlightCounters {
    pub(super) fn snapshot(&self) -> CounterSnapshot {
        // Ends are read before starts, so that no request seems to have ended before it began.
        let (finished, begun) = (self.finished.load(Relaxed), self.begun.load(Relaxed));
        let (dispatched, others) = (self.dispatched.load(Relaxed), **self.peers.load());
        CounterSnapshot { finished, begun, dispatched, peers: others, dispatched_during: 0, finished_during: 0 }
    }

    /// The other routers said something else than before; whether it is something else.
    pub(super) fn set_peer_in_flight(&self, others: PeerInFlight) -> bool {
        let news = **self.peers.load() != others;
        if news {
            self.peers.store(Arc::new(others));
        }
        news
    }

    /// The load now: the scrape, plus what we dispatched and less what we saw finished since it was sent.
    pub(super) fn load(&self, scrape: &Scrape, at: CounterSnapshot, usual_prompt: Tokens) -> WorkerLoad {
        let now = self.snapshot();
        let scraped = u64::from(scrape.running) + u64::from(scrape.waiting);
        let (came, went) = now.peers.change_since(&at.peers);
        let total = (scraped + now.dispatched.saturating_sub(at.dispatched))
            // One that ended as well is taken off below.
            .saturating_sub(at.dispatched_during.saturating_sub(at.finished_during))
            .saturating_add(came)
            .saturating_sub(now.finished.saturating_sub(at.finished))
            .saturating_sub(went)
            .max(now.in_flight());
        let foreign = u64::from(scrape.waiting).saturating_sub(at.prefilling().saturating_add(at.dispatched_during));
        let waiting = now.prefilling().saturating_add(foreign).min(total);
        let strangers = scrape.mean_prefill_tokens().unwrap_or(usual_prompt) * foreign;
        WorkerLoad {
            running: u32::try_from(total - waiting).unwrap_or(u32::MAX),
            waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
            backlog: Tokens(self.pending_tokens.load(Relaxed)) + now.peers.pending + strangers,
            kv_usage: scrape.kv_usage,
        }
    }

    /// Whether no router's request waits for its prompt.
    fn is_idle(&self) -> bool {
        self.pending_tokens.load(Relaxed) == 0 && self.peers.load().pending == Tokens::ZERO
    }
}

impl CounterSnapshot {
    /// The same for a scrape whose answer came when the counters said that.
    pub(super) fn with_response(self, answered: CounterSnapshot) -> Self {
        let between = answered.dispatched.saturating_sub(self.dispatched);
        Self { dispatched_during: between, finished_during: answered.finished.saturating_sub(self.finished), ..self }
    }

    /// All routers' requests that are not over.
    fn in_flight(&self) -> u64 {
        self.dispatched.saturating_sub(self.finished).saturating_add(self.peers.in_flight())
    }

    /// Of those, the ones without a first token.
    fn prefilling(&self) -> u64 {
        self.dispatched.saturating_sub(self.begun).saturating_add(self.peers.prefilling())
    }

    /// Of those, the ones with one.
    fn decoding(&self) -> u64 {
        self.begun.saturating_sub(self.finished).saturating_add(self.peers.decoding())
    }
}

/// What a request changes at its worker.
#[derive(Debug)]
pub(super) struct InFlightTracker {
    pub(super) counters: InFlightCounters,
    /// The same by rank, as the other routers are told.
    entries: Mutex<Vec<InFlightEntry>>,
    estimate: Mutex<SpeedEstimate>,
    /// Requests that waited there at the last scrape.
    pub(super) scraped_waiting: AtomicU64,
    /// Grows with every change, so that views know when they are old. Shared by the whole fleet.
    revision: Arc<AtomicU64>,
}

impl InFlightTracker {
    pub(super) fn new(speeds: EngineSpeed, revision: Arc<AtomicU64>) -> Self {
        Self {
            counters: InFlightCounters::default(),
            entries: Mutex::default(),
            estimate: Mutex::new(SpeedEstimate::new(speeds)),
            scraped_waiting: AtomicU64::new(0),
            revision,
        }
    }

    /// How fast the worker is believed to be.
    pub(super) fn speeds(&self) -> EngineSpeed {
        self.estimate.lock().speeds()
    }

    /// How sure its prefill rate and its decode step are.
    pub(super) fn confidence(&self) -> (Confidence, Confidence) {
        self.estimate.lock().confidence()
    }

    /// What this router has in flight there, by rank.
    pub(super) fn entries(&self) -> Vec<InFlightEntry> {
        self.entries.lock().clone()
    }

    fn update_entry(&self, rank: DpRank, change: impl FnOnce(&mut InFlightEntry)) {
        let mut flows = self.entries.lock();
        let known = flows.iter().position(|flow| flow.rank == rank);
        let at = known.unwrap_or_else(|| {
            // Which worker it is, is for the fleet to say.
            let none = InFlightEntry {
                worker: WorkerId(0),
                rank,
                dispatched: 0,
                begun: 0,
                finished: 0,
                pending: Tokens::ZERO,
            };
            flows.push(none);
            flows.len() - 1
        });
        change(&mut flows[at]);
    }

    pub(super) fn invalidate_views(&self) {
        // What was changed must be seen by whoever sees the new revision.
        self.revision.fetch_add(1, Release);
    }
}

#[cfg(test)]
impl Default for InFlightTracker {
    fn default() -> Self {
        Self::new(super::WorkerProfile::default().speeds(), Arc::default())
    }
}

/// One of our requests at a worker. Dropping it is its end, whatever the end was.
#[derive(Debug)]
#[must_use = "a request that is dropped at once counts as finished"]
pub struct InFlightRequest {
    /// None for a worker that left the fleet.
    tracker: Option<Arc<InFlightTracker>>,
    rank: DpRank,
    tokens: Tokens,
    sent: Instant,
    /// Nothing else stood before it.
    idle_start: IdleStart,
    /// When the first token came, and how many requests ran there then.
    first_token_at: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum IdleStart {
    Yes,
    No,
}

impl InFlightRequest {
    pub(super) fn new(tracker: Option<Arc<InFlightTracker>>, rank: DpRank, tokens: Tokens) -> Self {
        let mut idle_start = IdleStart::No;
        if let Some(desk) = &tracker {
            if desk.counters.is_idle() && desk.scraped_waiting.load(Relaxed) == 0 {
                idle_start = IdleStart::Yes;
            }
            desk.counters.pending_tokens.fetch_add(tokens.0, Relaxed);
            desk.counters.dispatched.fetch_add(1, Relaxed);
            desk.update_entry(rank, |flow| {
                flow.dispatched += 1;
                flow.pending += tokens;
            });
            desk.invalidate_views();
        }
        Self { tracker, rank, tokens, sent: Instant::now(), idle_start, first_token_at: None }
    }

    /// It leaves only now: what came before (another leg, a transfer) says nothing of this worker's speed.
    pub fn mark_sent(&mut self) {
        self.sent = Instant::now();
    }

    /// The first token came: the prompt is computed. Repeated calls change nothing.
    pub fn record_first_token(&mut self) {
        if self.first_token_at.is_none() {
            self.first_token_at = Some(Instant::now());
            self.record_prefilled();
        }
    }

    /// The answer is complete; what it cost teaches how fast the worker is.
    pub fn complete(&mut self, usage: &TokenUsage) {
        let (Some(desk), Some(first)) = (&self.tracker, self.first_token_at) else { return };
        let told = usage.cached.map_or(self.tokens, |cached| usage.prompt - cached);
        // Much more than was planned: either it came from elsewhere, which usage does not tell, or a prefix was lost.
        let computed = if told.0 <= self.tokens.0 + self.tokens.0 / 4 + PLAN_TOLERANCE { told } else { Tokens::ZERO };
        let batch = desk.counters.snapshot().decoding().max(1);
        desk.estimate.lock().observe(&SpeedSample {
            computed: if self.idle_start == IdleStart::Yes { computed } else { Tokens::ZERO },
            first_token: Micros::of(first - self.sent),
            batch: u32::try_from(batch).unwrap_or(u32::MAX),
            decoded: usage.completion - Tokens(1),
            decoding: Micros::of(first.elapsed()),
        });
        desk.invalidate_views();
    }

    fn record_prefilled(&self) {
        if let Some(desk) = &self.tracker {
            desk.counters.pending_tokens.fetch_sub(self.tokens.0, Relaxed);
            desk.counters.begun.fetch_add(1, Relaxed);
            desk.update_entry(self.rank, |flow| {
                flow.begun += 1;
                flow.pending -= self.tokens;
            });
            desk.invalidate_views();
        }
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        if self.first_token_at.is_none() {
            self.record_prefilled();
        }
        if let Some(desk) = &self.tracker {
            desk.counters.finished.fetch_add(1, Relaxed);
            desk.update_entry(self.rank, |flow| flow.finished += 1);
            desk.invalidate_views();
        }
    }
}

#[cfg(test)]
mod tests;
