//! Whose KV lies where: the planner's account, kept by what this router sends. A step holds its tenure at the worker that
//! serves it, from its plan to its end, whatever the end.
//!
//! The account is an estimate in memory. What other routers send is not in it; nothing waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use planner::{AdmissionLimits, Footprint, OccupancyModel, OwnershipClaim, Plan};
use vocabulary::{Blocks, DpRank, KvIndexState, Micros, Owner, SessionId, Tier, Tokens, WorkerView};
use workers_shim::engine_api::TokenUsage;
use workers_shim::fleet::Fleet;

use super::admission_queue::AdmissionQueue;
use super::commit::serving_owner;
use super::plan::ClassifiedStep;

/// How often what workers were seen to hold is held against the account.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(1);

/// The account, its clock, and who waits because of it. Clones share them.
#[derive(Clone, Debug)]
pub struct OccupancyTracker {
    state: Arc<Mutex<OccupancyState>>,
    since: Instant,
}

#[derive(Debug)]
struct OccupancyState {
    occupancy: OccupancyModel,
    admission_queue: AdmissionQueue,
    reconciled_at: Instant,
}

/// The account at one moment. Hold it briefly, never across an await.
pub struct OccupancyGuard<'a> {
    state: MutexGuard<'a, OccupancyState>,
    /// The time on the account's clock.
    pub now: Micros,
}

impl OccupancyGuard<'_> {
    /// Whose KV lies where.
    pub fn occupancy(&self) -> &OccupancyModel {
        &self.state.occupancy
    }

    pub(super) fn admission_queue(&mut self) -> &mut AdmissionQueue {
        &mut self.state.admission_queue
    }
}

impl OccupancyTracker {
    /// Nothing lies anywhere, and nobody waits.
    pub fn new(admission: AdmissionLimits) -> Self {
        let since = Instant::now();
        let kept = OccupancyState {
            occupancy: OccupancyModel::default(),
            admission_queue: AdmissionQueue::new(admission),
            reconciled_at: since,
        };
        Self { state: Arc::new(Mutex::new(kept)), since }
    }

    /// As it stands now.
    pub fn lock(&self) -> OccupancyGuard<'_> {
        let kept = self.state.lock();
        OccupancyGuard { state: kept, now: Micros::of(self.since.elapsed()) }
    }

    /// How long the session's next answer is expected to be, where the client allows at most so much.
    pub fn expected_answer(&self, session: SessionId, most: Option<Tokens>) -> Tokens {
        let expected = self.lock().occupancy().expected_answer(session);
        most.map_or(expected, |most| most.min(expected))
    }

    /// What a session that is new is expected to add after its first step.
    pub fn expected_growth(&self) -> Tokens {
        self.lock().occupancy().expected_growth()
    }

    /// Drops what workers have cleared, as far as their events tell. Looks once a second at most.
    pub fn reconcile(&self, fleet: &Fleet) {
        let mut at = self.lock();
        if at.state.reconciled_at.elapsed() < RECONCILE_INTERVAL {
            return;
        }
        at.state.reconciled_at = Instant::now();
        let knows = |view: &&WorkerView| view.knowledge == KvIndexState::Exact && view.capacity.block > Tokens::ZERO;
        for view in fleet.snapshot().iter().filter(knows) {
            let Some(seen) = fleet.events(view.id) else { continue };
            // Of all its ranks together: more than any of them holds.
            let tokens = view.capacity.block * seen.blocks;
            for rank in 0..view.ranks.max(1) {
                let place = Owner { worker: view.id, incarnation: view.incarnation, rank: DpRank(rank) };
                at.state.occupancy.observe_held_tokens(place, tokens);
            }
        }
    }

    /// A copy of what a session has elsewhere came to a rank while no step of it is under way.
    pub fn record_copy(&self, at: Owner, session: SessionId, stay: Footprint) {
        let mut account = self.lock();
        let now = account.now;
        account.state.occupancy.prefix_replicated(at, session, stay, now);
    }

    /// How many steps wait.
    pub fn queue_len(&self) -> usize {
        self.lock().admission_queue().len()
    }

    /// Notes, at the moment for which it was planned, where a step is going to be served; none when its worker left the
    /// fleet meanwhile.
    pub fn reserve(
        &self,
        mut account: OccupancyGuard<'_>,
        step: &ClassifiedStep,
        plan: &Plan,
    ) -> Option<KvReservation> {
        let located = &step.located;
        let at = serving_owner(located, plan)?;
        let session = located.session.id;
        let view_of = |worker| located.workers.iter().find(|view| view.id == worker);
        let capacity = view_of(at.worker)?.capacity.kv;
        let is_there =
            |found: &&vocabulary::Overlap| (found.worker, found.rank, found.tier) == (at.worker, at.rank, Tier::Hbm);
        let found = located.overlaps.iter().find(is_there).map_or(Blocks::ZERO, |found| found.blocks);
        let tokens = step.ask.prompt + step.ask.answer;
        let left = match plan.claim {
            OwnershipClaim::Move { from, .. } => Some(from).filter(|from| *from != at),
            OwnershipClaim::Keep | OwnershipClaim::Open | OwnershipClaim::Borrow => None,
        };
        let found = found.tokens(step.ask.block);
        // What an owner holds that the account does not know of is the session's own: it was there before this router.
        let is_own = located.session.owner == Some(at) && !account.state.occupancy.is_resident(at, session);
        let stay = Footprint { tokens, found: if is_own { Tokens::ZERO } else { found }, capacity };
        let now = account.now;
        account.state.occupancy.step_started(at, session, stay, now);
        if let Some(view) = view_of(plan.prefill.worker) {
            let (worker, rank) = (view.id, plan.prefill.rank);
            let computing = Owner { worker, incarnation: view.incarnation, rank };
            account.state.occupancy.prefill_started(computing, plan.because.terms.compute, now);
        }
        drop(account);
        Some(KvReservation {
            tracker: self.clone(),
            owner: at,
            session,
            resident_tokens: found,
            vacated: left,
            end: ReservationEnd::Idle(tokens),
        })
    }
}

/// A step's stay at the worker that serves it. It ends when this is dropped.
#[derive(Debug)]
pub struct KvReservation {
    tracker: OccupancyTracker,
    owner: Owner,
    session: SessionId,
    /// What of the prompt was there before.
    resident_tokens: Tokens,
    /// Where the session lives no more once this is over.
    vacated: Option<Owner>,
    end: ReservationEnd,
}

#[derive(Clone, Copy, Debug)]
enum ReservationEnd {
    /// The session keeps so many tokens there.
    Idle(Tokens),
    /// All of them, and its old place is given up. The answer's length where the engine told it.
    Served { tokens: Tokens, answer: Option<Tokens> },
    /// Nothing came of it.
    Failed,
}

impl KvReservation {
    /// The answer is whole. `usage` is what the engine counted, where it did.
    pub fn mark_served(mut self, usage: Option<TokenUsage>) {
        let ReservationEnd::Idle(expected) = self.end else { return };
        let tokens = usage.map_or(expected, |usage| usage.prompt + usage.completion);
        self.end = ReservationEnd::Served { tokens, answer: usage.map(|usage| usage.completion) };
    }

    /// The worker took it for wrong, and computed nothing: what was there before is there still.
    pub fn mark_refused(mut self) {
        self.end = ReservationEnd::Idle(self.resident_tokens);
    }

    /// The worker did not serve it.
    pub fn mark_failed(mut self) {
        self.end = ReservationEnd::Failed;
    }
}

impl Drop for KvReservation {
    fn drop(&mut self) {
        let mut account = self.tracker.lock();
        let now = account.now;
        let tenancy = &mut account.state.occupancy;
        match self.end {
            ReservationEnd::Failed => tenancy.step_failed(self.owner, self.session, now),
            ReservationEnd::Idle(tokens) => tenancy.step_ended(self.owner, self.session, tokens, now),
            ReservationEnd::Served { tokens, answer } => {
                tenancy.step_ended(self.owner, self.session, tokens, now);
                tenancy.step_served(self.session, tokens);
                answer.into_iter().for_each(|answer| tenancy.answer_completed(self.session, answer));
                if let Some(left) = self.vacated {
                    tenancy.session_moved(left, self.session);
                }
            }
        }
        account.admission_queue().notify_completion(now);
    }
}

#[cfg(test)]
mod tests;
