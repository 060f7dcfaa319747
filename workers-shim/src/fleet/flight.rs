//! Our own requests at a worker: counted when they leave, moved when their first token comes, gone when dropped.
//!
//! A scrape tells how things stood when it was sent, at t. So for requests in all
//!
//! ```text
//! load = scrape(t) + own dispatched since its answer - own finished since t, and at least own in flight
//! ```
//!
//! where *own* means all routers' together, those of the others as they last told them (see [`super::overlay`]);
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
use vocabulary::{DpRank, Load, Micros, Speeds, Tokens, WorkerId};

use super::estimate::Confidence;
use super::overlay::{Flow, Others};
use super::speeds::{Observation, SpeedEstimate};
use crate::dialect::Usage;
use crate::scrape::Scrape;

/// Tokens by which a good plan may miss: engines reuse whole blocks only.
const BLOCKS: u64 = 64;

/// Requests and tokens since start; only ever growing, so that differences need no lock.
#[derive(Default, Debug)]
pub(super) struct Counters {
    dispatched: AtomicU64,
    finished: AtomicU64,
    /// Requests that have their first token, or ended without one.
    begun: AtomicU64,
    /// Prompt tokens that are not known to be computed.
    pending: AtomicU64,
    /// The other routers' requests.
    others: ArcSwap<Others>,
}

/// What the counters said when a scrape was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Mark {
    dispatched: u64,
    finished: u64,
    begun: u64,
    others: Others,
    /// Own requests that left between that and the scrape's answer: it may count them or not.
    between: u64,
    /// Own requests that ended then: of those that left then, or of older ones.
    ended: u64,
}

impl Counters {
    pub(super) fn mark(&self) -> Mark {
        // Ends are read before starts, so that no request seems to have ended before it began.
        let (finished, begun) = (self.finished.load(Relaxed), self.begun.load(Relaxed));
        let (dispatched, others) = (self.dispatched.load(Relaxed), **self.others.load());
        Mark { finished, begun, dispatched, others, between: 0, ended: 0 }
    }

    /// The other routers said something else than before; whether it is something else.
    pub(super) fn overlay(&self, others: Others) -> bool {
        let news = **self.others.load() != others;
        if news {
            self.others.store(Arc::new(others));
        }
        news
    }

    /// The load now: the scrape, plus what we dispatched and less what we saw finished since it was sent.
    pub(super) fn load(&self, scrape: &Scrape, at: Mark, usual_prompt: Tokens) -> Load {
        let now = self.mark();
        let scraped = u64::from(scrape.running) + u64::from(scrape.waiting);
        let (came, went) = now.others.since(&at.others);
        let total = (scraped + now.dispatched.saturating_sub(at.dispatched))
            // One that ended as well is taken off below.
            .saturating_sub(at.between.saturating_sub(at.ended))
            .saturating_add(came)
            .saturating_sub(now.finished.saturating_sub(at.finished))
            .saturating_sub(went)
            .max(now.in_flight());
        let foreign = u64::from(scrape.waiting).saturating_sub(at.prefilling().saturating_add(at.between));
        let waiting = now.prefilling().saturating_add(foreign).min(total);
        let strangers = scrape.usual_work().unwrap_or(usual_prompt) * foreign;
        Load {
            running: u32::try_from(total - waiting).unwrap_or(u32::MAX),
            waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
            backlog: Tokens(self.pending.load(Relaxed)) + now.others.pending + strangers,
            kv_usage: scrape.kv_usage,
        }
    }

    /// Whether no router's request waits for its prompt.
    fn is_idle(&self) -> bool {
        self.pending.load(Relaxed) == 0 && self.others.load().pending == Tokens::ZERO
    }
}

impl Mark {
    /// The same for a scrape whose answer came when the counters said that.
    pub(super) fn until(self, answered: Mark) -> Self {
        let between = answered.dispatched.saturating_sub(self.dispatched);
        Self { between, ended: answered.finished.saturating_sub(self.finished), ..self }
    }

    /// All routers' requests that are not over.
    fn in_flight(&self) -> u64 {
        self.dispatched.saturating_sub(self.finished).saturating_add(self.others.in_flight())
    }

    /// Of those, the ones without a first token.
    fn prefilling(&self) -> u64 {
        self.dispatched.saturating_sub(self.begun).saturating_add(self.others.prefilling())
    }

    /// Of those, the ones with one.
    fn decoding(&self) -> u64 {
        self.begun.saturating_sub(self.finished).saturating_add(self.others.decoding())
    }
}

/// What a request changes at its worker.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) counters: Counters,
    /// The same by rank, as the other routers are told.
    flows: Mutex<Vec<Flow>>,
    estimate: Mutex<SpeedEstimate>,
    /// Requests that waited there at the last scrape.
    pub(super) scraped_waiting: AtomicU64,
    /// Grows with every change, so that views know when they are old. Shared by the whole fleet.
    revision: Arc<AtomicU64>,
}

impl Desk {
    pub(super) fn new(speeds: Speeds, revision: Arc<AtomicU64>) -> Self {
        Self {
            counters: Counters::default(),
            flows: Mutex::default(),
            estimate: Mutex::new(SpeedEstimate::new(speeds)),
            scraped_waiting: AtomicU64::new(0),
            revision,
        }
    }

    /// How fast the worker is believed to be.
    pub(super) fn speeds(&self) -> Speeds {
        self.estimate.lock().speeds()
    }

    /// How sure its prefill rate and its decode step are.
    pub(super) fn confidence(&self) -> (Confidence, Confidence) {
        self.estimate.lock().confidence()
    }

    /// What this router has in flight there, by rank.
    pub(super) fn flows(&self) -> Vec<Flow> {
        self.flows.lock().clone()
    }

    fn flow(&self, rank: DpRank, change: impl FnOnce(&mut Flow)) {
        let mut flows = self.flows.lock();
        let known = flows.iter().position(|flow| flow.rank == rank);
        let at = known.unwrap_or_else(|| {
            // Which worker it is, is for the fleet to say.
            let none = Flow { worker: WorkerId(0), rank, dispatched: 0, begun: 0, finished: 0, pending: Tokens::ZERO };
            flows.push(none);
            flows.len() - 1
        });
        change(&mut flows[at]);
    }

    pub(super) fn changed(&self) {
        // What was changed must be seen by whoever sees the new revision.
        self.revision.fetch_add(1, Release);
    }
}

#[cfg(test)]
impl Default for Desk {
    fn default() -> Self {
        Self::new(super::WorkerProfile::default().speeds(), Arc::default())
    }
}

/// One of our requests at a worker. Dropping it is its end, whatever the end was.
#[derive(Debug)]
#[must_use = "a request that is dropped at once counts as finished"]
pub struct InFlight {
    /// None for a worker that left the fleet.
    desk: Option<Arc<Desk>>,
    rank: DpRank,
    tokens: Tokens,
    sent: Instant,
    /// Nothing else stood before it.
    alone: Alone,
    /// When the first token came, and how many requests ran there then.
    first: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Alone {
    Yes,
    No,
}

impl InFlight {
    pub(super) fn new(desk: Option<Arc<Desk>>, rank: DpRank, tokens: Tokens) -> Self {
        let mut alone = Alone::No;
        if let Some(desk) = &desk {
            if desk.counters.is_idle() && desk.scraped_waiting.load(Relaxed) == 0 {
                alone = Alone::Yes;
            }
            desk.counters.pending.fetch_add(tokens.0, Relaxed);
            desk.counters.dispatched.fetch_add(1, Relaxed);
            desk.flow(rank, |flow| {
                flow.dispatched += 1;
                flow.pending += tokens;
            });
            desk.changed();
        }
        Self { desk, rank, tokens, sent: Instant::now(), alone, first: None }
    }

    /// It leaves only now: what came before (another leg, a transfer) says nothing of this worker's speed.
    pub fn sent(&mut self) {
        self.sent = Instant::now();
    }

    /// The first token came: the prompt is computed. Repeated calls change nothing.
    pub fn first_token(&mut self) {
        if self.first.is_none() {
            self.first = Some(Instant::now());
            self.begun();
        }
    }

    /// The answer is complete; what it cost teaches how fast the worker is.
    pub fn complete(&mut self, usage: &Usage) {
        let (Some(desk), Some(first)) = (&self.desk, self.first) else { return };
        let told = usage.cached.map_or(self.tokens, |cached| usage.prompt - cached);
        // Much more than was planned: either it came from elsewhere, which usage does not tell, or a prefix was lost.
        let computed = if told.0 <= self.tokens.0 + self.tokens.0 / 4 + BLOCKS { told } else { Tokens::ZERO };
        let batch = desk.counters.mark().decoding().max(1);
        desk.estimate.lock().observe(&Observation {
            computed: if self.alone == Alone::Yes { computed } else { Tokens::ZERO },
            first_token: Micros::of(first - self.sent),
            batch: u32::try_from(batch).unwrap_or(u32::MAX),
            decoded: usage.completion - Tokens(1),
            decoding: Micros::of(first.elapsed()),
        });
        desk.changed();
    }

    fn begun(&self) {
        if let Some(desk) = &self.desk {
            desk.counters.pending.fetch_sub(self.tokens.0, Relaxed);
            desk.counters.begun.fetch_add(1, Relaxed);
            desk.flow(self.rank, |flow| {
                flow.begun += 1;
                flow.pending -= self.tokens;
            });
            desk.changed();
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.first.is_none() {
            self.begun();
        }
        if let Some(desk) = &self.desk {
            desk.counters.finished.fetch_add(1, Relaxed);
            desk.flow(self.rank, |flow| flow.finished += 1);
            desk.changed();
        }
    }
}

#[cfg(test)]
mod tests;
