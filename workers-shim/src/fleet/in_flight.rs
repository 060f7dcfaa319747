//! This router's own requests in flight at a worker: counted from dispatch until the guard is dropped, as waiting
//! before the first token and as running after it.
//!
//! A scrape shows the load at the time t when it was sent. So the total number of requests is
//!
//! ```text
//! load = scrape(t) + own dispatched since its answer - own finished since t, and at least own in flight
//! ```
//!
//! where *own* means those of all routers together; the others report theirs (see
//! [`InFlightCounters::set_peer_in_flight`]). The lower bound is needed because a request in flight may not have
//! reached the engine's queue by t. Own requests without a first token are waiting, the others running. Requests
//! dispatched while a scrape is on its way may be included in it: counting those as somebody else's would make the
//! worker appear to have a queue until the next scrape. Engines do not report how many prompt tokens they still have to
//! compute, so the backlog is exact for own requests and estimated for others:
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
use super::peer_in_flight::{PeerInFlight, RankInFlightCounts};
use super::speeds::{SpeedEstimate, SpeedSample};
use crate::engine_api::TokenUsage;
use crate::scrape::Scrape;

/// Acceptable error in tokens of a good plan: engines reuse whole blocks only.
const PLAN_TOLERANCE: u64 = 64;

/// Counters of requests since start, and pending tokens. The counters only increase, so differences need no lock.
#[derive(Default, Debug)]
pub(super) struct InFlightCounters {
    dispatched: AtomicU64,
    finished: AtomicU64,
    /// Requests that got their first token, or ended without one.
    begun: AtomicU64,
    /// Prompt tokens that are not known to be computed.
    pending_tokens: AtomicU64,
    /// The requests of the other routers.
    peers: ArcSwap<PeerInFlight>,
}

/// Values of the counters when a scrape was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct CounterSnapshot {
    dispatched: u64,
    finished: u64,
    begun: u64,
    peers: PeerInFlight,
    /// Own requests dispatched between sending the scrape and its answer, which may or may not include them.
    dispatched_during: u64,
    /// Own requests that ended in that time, whenever they were dispatched.
    finished_during: u64,
}

impl InFlightCounters {
    pub(super) fn snapshot(&self) -> CounterSnapshot {
        // Ends are read before starts, so that no request appears to have ended before it began.
        let (finished, begun) = (self.finished.load(Relaxed), self.begun.load(Relaxed));
        let (dispatched, peers) = (self.dispatched.load(Relaxed), **self.peers.load());
        CounterSnapshot { finished, begun, dispatched, peers, dispatched_during: 0, finished_during: 0 }
    }

    /// Replaces the other routers' sums; returns whether they changed.
    pub(super) fn set_peer_in_flight(&self, peers: PeerInFlight) -> bool {
        let is_changed = **self.peers.load() != peers;
        if is_changed {
            self.peers.store(Arc::new(peers));
        }
        is_changed
    }

    /// Returns the current load: the scrape, plus requests dispatched and minus those finished since it was sent.
    pub(super) fn load(&self, scrape: &Scrape, at: CounterSnapshot, usual_prompt: Tokens) -> WorkerLoad {
        let now = self.snapshot();
        let scraped = u64::from(scrape.running) + u64::from(scrape.waiting);
        let (peers_dispatched, peers_finished) = now.peers.change_since(&at.peers);
        let total = (scraped + now.dispatched.saturating_sub(at.dispatched))
            // Those that have already ended are subtracted below.
            .saturating_sub(at.dispatched_during.saturating_sub(at.finished_during))
            .saturating_add(peers_dispatched)
            .saturating_sub(now.finished.saturating_sub(at.finished))
            .saturating_sub(peers_finished)
            .max(now.in_flight());
        let foreign_waiting =
            u64::from(scrape.waiting).saturating_sub(at.prefilling().saturating_add(at.dispatched_during));
        let waiting = now.prefilling().saturating_add(foreign_waiting).min(total);
        let foreign_backlog = scrape.mean_prefill_tokens().unwrap_or(usual_prompt) * foreign_waiting;
        WorkerLoad {
            running: u32::try_from(total - waiting).unwrap_or(u32::MAX),
            waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
            backlog: Tokens(self.pending_tokens.load(Relaxed)) + now.peers.pending + foreign_backlog,
            kv_usage: scrape.kv_usage,
        }
    }

    /// Returns whether no router has a request waiting for its prefill.
    fn is_idle(&self) -> bool {
        self.pending_tokens.load(Relaxed) == 0 && self.peers.load().pending == Tokens::ZERO
    }
}

impl CounterSnapshot {
    /// Adds the changes until the scrape's answer, at which the counters had these values.
    pub(super) fn with_response(self, at_response: CounterSnapshot) -> Self {
        let dispatched_during = at_response.dispatched.saturating_sub(self.dispatched);
        let finished_during = at_response.finished.saturating_sub(self.finished);
        Self { dispatched_during, finished_during, ..self }
    }

    /// Returns the unfinished requests of all routers.
    fn in_flight(&self) -> u64 {
        self.dispatched.saturating_sub(self.finished).saturating_add(self.peers.in_flight())
    }

    /// Returns those without a first token.
    fn prefilling(&self) -> u64 {
        self.dispatched.saturating_sub(self.begun).saturating_add(self.peers.prefilling())
    }

    /// Returns those with a first token.
    fn decoding(&self) -> u64 {
        self.begun.saturating_sub(self.finished).saturating_add(self.peers.decoding())
    }
}

/// State of a worker that this router's requests update.
#[derive(Debug)]
pub(super) struct InFlightTracker {
    pub(super) counters: InFlightCounters,
    /// The counters by rank, as reported to the other routers.
    entries: Mutex<Vec<RankInFlightCounts>>,
    estimate: Mutex<SpeedEstimate>,
    /// Waiting requests in the last scrape.
    pub(super) scraped_waiting: AtomicU64,
    /// Incremented with every change, which invalidates cached views. Shared by the whole fleet.
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

    /// Returns the worker's estimated speeds.
    pub(super) fn speeds(&self) -> EngineSpeed {
        self.estimate.lock().speeds()
    }

    /// Returns the confidence in its prefill rate and its decode step.
    pub(super) fn confidence(&self) -> (Confidence, Confidence) {
        self.estimate.lock().confidence()
    }

    /// Returns this router's counters, by rank.
    pub(super) fn entries(&self) -> Vec<RankInFlightCounts> {
        self.entries.lock().clone()
    }

    fn update_entry(&self, rank: DpRank, change: impl FnOnce(&mut RankInFlightCounts)) {
        let mut entries = self.entries.lock();
        let known = entries.iter().position(|entry| entry.rank == rank);
        let index = known.unwrap_or_else(|| {
            // The fleet fills in the worker.
            let empty = RankInFlightCounts {
                worker: WorkerId(0),
                rank,
                dispatched: 0,
                begun: 0,
                finished: 0,
                pending: Tokens::ZERO,
            };
            entries.push(empty);
            entries.len() - 1
        });
        change(&mut entries[index]);
    }

    pub(super) fn invalidate_views(&self) {
        // Release ordering: whoever sees the new revision must also see the change.
        self.revision.fetch_add(1, Release);
    }
}

#[cfg(test)]
impl Default for InFlightTracker {
    fn default() -> Self {
        Self::new(super::WorkerProfile::default().speeds(), Arc::default())
    }
}

/// Guard of one of this router's requests at a worker. Dropping it ends the request, whatever the outcome.
#[derive(Debug)]
#[must_use = "a request that is dropped at once counts as finished"]
pub struct InFlightGuard {
    /// None for a worker that left the fleet.
    tracker: Option<Arc<InFlightTracker>>,
    rank: DpRank,
    tokens: Tokens,
    sent_at: Instant,
    /// Whether other requests waited at the worker at dispatch.
    idle_start: QueueAtDispatch,
    /// When the first token arrived.
    first_token_at: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum QueueAtDispatch {
    Empty,
    Occupied,
}

impl InFlightGuard {
    pub(super) fn new(tracker: Option<Arc<InFlightTracker>>, rank: DpRank, tokens: Tokens) -> Self {
        let mut idle_start = QueueAtDispatch::Occupied;
        if let Some(tracker) = &tracker {
            if tracker.counters.is_idle() && tracker.scraped_waiting.load(Relaxed) == 0 {
                idle_start = QueueAtDispatch::Empty;
            }
            tracker.counters.pending_tokens.fetch_add(tokens.0, Relaxed);
            tracker.counters.dispatched.fetch_add(1, Relaxed);
            tracker.update_entry(rank, |entry| {
                entry.dispatched += 1;
                entry.pending += tokens;
            });
            tracker.invalidate_views();
        }
        Self { tracker, rank, tokens, sent_at: Instant::now(), idle_start, first_token_at: None }
    }

    /// Restarts the clock: what came before (another leg, a transfer) does not measure this worker's speed.
    pub fn mark_sent(&mut self) {
        self.sent_at = Instant::now();
    }

    /// Records the first token: the prompt is computed. Further calls have no effect.
    pub fn record_first_token(&mut self) {
        if self.first_token_at.is_none() {
            self.first_token_at = Some(Instant::now());
            self.record_prefilled();
        }
    }

    /// Records the complete answer, which updates the worker's estimated speeds.
    pub fn complete(&mut self, usage: &TokenUsage) {
        let (Some(tracker), Some(first_token_at)) = (&self.tracker, self.first_token_at) else { return };
        let prompt = usage.cached.map_or(self.tokens, |cached| usage.prompt - cached);
        // If much more was computed than planned, then either the KV came from elsewhere, which usage does not show, or
        // a prefix was lost.
        let computed =
            if prompt.0 <= self.tokens.0 + self.tokens.0 / 4 + PLAN_TOLERANCE { prompt } else { Tokens::ZERO };
        let batch = tracker.counters.snapshot().decoding().max(1);
        tracker.estimate.lock().observe(&SpeedSample {
            computed: if self.idle_start == QueueAtDispatch::Empty { computed } else { Tokens::ZERO },
            first_token: Micros::of(first_token_at - self.sent_at),
            batch: u32::try_from(batch).unwrap_or(u32::MAX),
            decoded: usage.completion - Tokens(1),
            decoding: Micros::of(first_token_at.elapsed()),
        });
        tracker.invalidate_views();
    }

    fn record_prefilled(&self) {
        if let Some(tracker) = &self.tracker {
            tracker.counters.pending_tokens.fetch_sub(self.tokens.0, Relaxed);
            tracker.counters.begun.fetch_add(1, Relaxed);
            tracker.update_entry(self.rank, |entry| {
                entry.begun += 1;
                entry.pending -= self.tokens;
            });
            tracker.invalidate_views();
        }
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if self.first_token_at.is_none() {
            self.record_prefilled();
        }
        if let Some(tracker) = &self.tracker {
            tracker.counters.finished.fetch_add(1, Relaxed);
            tracker.update_entry(self.rank, |entry| entry.finished += 1);
            tracker.invalidate_views();
        }
    }
}

#[cfg(test)]
mod tests;
