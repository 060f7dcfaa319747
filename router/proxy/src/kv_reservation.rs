//! KV reservations: the planner's occupancy model, updated by what this router sends. A step holds a reservation at the
//! worker that serves it, from its plan to its end, however it ends.
//!
//! The model is an in-memory estimate. It does not include what other routers send, and nothing waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use planner::{AdmissionLimits, OccupancyModel, OwnershipEffect, Plan, StepFootprint};
use vocabulary::{Blocks, DpRank, KvIndexState, Micros, Owner, SessionId, Tier, Tokens, WorkerView};
use workers_shim::engine_api::TokenUsage;
use workers_shim::fleet::Fleet;

use crate::admission_queue::AdmissionQueue;
use crate::request_states::{ClassifiedStep, serving_owner};

/// How often the model is reconciled with what workers report to hold.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(1);

/// The occupancy model, its clock, and the admission queue. Clones share them.
#[derive(Clone, Debug)]
pub struct OccupancyTracker {
    state: Arc<Mutex<OccupancyState>>,
    start: Instant,
}

#[derive(Debug)]
struct OccupancyState {
    occupancy: OccupancyModel,
    admission_queue: AdmissionQueue,
    reconciled_at: Instant,
}

/// The locked occupancy model at one moment. Hold it briefly, never across an await.
pub struct LockedOccupancy<'a> {
    state: MutexGuard<'a, OccupancyState>,
    /// The time on the model's clock.
    pub now: Micros,
}

impl LockedOccupancy<'_> {
    /// Returns the occupancy model: whose KV fills which worker.
    pub fn occupancy(&self) -> &OccupancyModel {
        &self.state.occupancy
    }

    pub(crate) fn admission_queue(&mut self) -> &mut AdmissionQueue {
        &mut self.state.admission_queue
    }
}

impl OccupancyTracker {
    /// Returns a tracker with an empty model and an empty queue.
    pub fn new(admission: AdmissionLimits) -> Self {
        let since = Instant::now();
        let state = OccupancyState {
            occupancy: OccupancyModel::default(),
            admission_queue: AdmissionQueue::new(admission),
            reconciled_at: since,
        };
        Self { state: Arc::new(Mutex::new(state)), start: since }
    }

    /// Locks the model and reads its clock.
    pub fn lock(&self) -> LockedOccupancy<'_> {
        let state = self.state.lock();
        LockedOccupancy { state, now: Micros::of(self.start.elapsed()) }
    }

    /// Returns the expected length of the session's next answer, capped at the client's limit `most`.
    pub fn expected_answer(&self, session: SessionId, most: Option<Tokens>) -> Tokens {
        let expected = self.lock().occupancy().expected_answer(session);
        most.map_or(expected, |most| most.min(expected))
    }

    /// Returns the tokens that a new session is expected to add after its first step.
    pub fn expected_growth(&self) -> Tokens {
        self.lock().occupancy().expected_growth()
    }

    /// Drops what workers have evicted, according to their KV events. Runs at most once a second.
    pub fn reconcile(&self, fleet: &Fleet) {
        let mut at = self.lock();
        if at.state.reconciled_at.elapsed() < RECONCILE_INTERVAL {
            return;
        }
        at.state.reconciled_at = Instant::now();
        let is_exact =
            |view: &&WorkerView| view.kv_index_state == KvIndexState::Exact && view.capacity.block > Tokens::ZERO;
        for view in fleet.snapshot().iter().filter(is_exact) {
            let Some(counts) = fleet.events(view.id) else { continue };
            // Sum over all ranks of the worker, so an upper bound for each of them.
            let tokens = view.capacity.block * counts.blocks;
            for rank in 0..view.ranks.max(1) {
                let owner = Owner { worker: view.id, incarnation: view.incarnation, rank: DpRank(rank) };
                at.state.occupancy.observe_held_tokens(owner, tokens);
            }
        }
    }

    /// Records a replica of the session's KV that arrived at a rank while no step of the session is running there.
    pub fn record_copy(&self, at: Owner, session: SessionId, footprint: StepFootprint) {
        let mut account = self.lock();
        let now = account.now;
        account.state.occupancy.prefix_replicated(at, session, footprint, now);
    }

    /// Number of steps waiting for admission.
    pub fn queue_len(&self) -> usize {
        self.lock().admission_queue().len()
    }

    /// Reserves KV memory for a step, under the same lock under which it was planned; `None` when its worker has left
    /// the fleet.
    pub fn reserve(
        &self,
        mut account: LockedOccupancy<'_>,
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
        let tokens = step.request.prompt_tokens + step.request.expected_output_tokens;
        let left = match plan.ownership {
            OwnershipEffect::Move { previous_owner, .. } => Some(previous_owner).filter(|owner| *owner != at),
            OwnershipEffect::Keep | OwnershipEffect::Claim | OwnershipEffect::ReadReplica => None,
        };
        let found = found.tokens(step.request.block_size);
        // What an owner holds without the model knowing it is the session's own KV, older than this router.
        let is_own = located.session.owner == Some(at) && !account.state.occupancy.is_resident(at, session);
        let footprint = StepFootprint { tokens, cached: if is_own { Tokens::ZERO } else { found }, capacity };
        let now = account.now;
        account.state.occupancy.step_started(at, session, footprint, now);
        let prompt_leg = plan.prompt_leg();
        if let Some(view) = view_of(prompt_leg.worker) {
            let (worker, rank) = (view.id, prompt_leg.rank);
            let computing = Owner { worker, incarnation: view.incarnation, rank };
            account.state.occupancy.prefill_started(computing, plan.rationale.cost_terms.compute, now);
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

/// A step's KV reservation at the worker that serves it. Dropping it ends the reservation.
#[derive(Debug)]
pub struct KvReservation {
    tracker: OccupancyTracker,
    owner: Owner,
    session: SessionId,
    /// Prompt tokens that were resident before the step.
    resident_tokens: Tokens,
    /// Rank that no longer holds the session once this is over.
    vacated: Option<Owner>,
    end: ReservationEnd,
}

#[derive(Clone, Copy, Debug)]
enum ReservationEnd {
    /// The session keeps this many tokens there.
    Idle(Tokens),
    /// The session keeps these tokens, and its KV at its previous owner is given up. `answer` is the answer's length
    /// where the engine reports it.
    Served { tokens: Tokens, answer: Option<Tokens> },
    /// The step failed.
    Failed,
}

impl KvReservation {
    /// Marks the answer as complete. `usage` is what the engine counted, where it reports it.
    pub fn mark_served(mut self, usage: Option<TokenUsage>) {
        let ReservationEnd::Idle(expected) = self.end else { return };
        let tokens = usage.map_or(expected, |usage| usage.prompt + usage.completion);
        self.end = ReservationEnd::Served { tokens, answer: usage.map(|usage| usage.completion) };
    }

    /// Marks the step as refused: the worker computed nothing, and what was resident before still is.
    pub fn mark_refused(mut self) {
        self.end = ReservationEnd::Idle(self.resident_tokens);
    }

    /// Marks the step as failed at the worker.
    pub fn mark_failed(mut self) {
        self.end = ReservationEnd::Failed;
    }
}

impl Drop for KvReservation {
    fn drop(&mut self) {
        let mut account = self.tracker.lock();
        let now = account.now;
        let occupancy = &mut account.state.occupancy;
        match self.end {
            ReservationEnd::Failed => occupancy.step_failed(self.owner, self.session, now),
            ReservationEnd::Idle(tokens) => occupancy.step_ended(self.owner, self.session, tokens, now),
            ReservationEnd::Served { tokens, answer } => {
                occupancy.step_ended(self.owner, self.session, tokens, now);
                occupancy.step_served(self.session, tokens);
                answer.into_iter().for_each(|answer| occupancy.answer_completed(self.session, answer));
                if let Some(left) = self.vacated {
                    occupancy.session_moved(left, self.session);
                }
            }
        }
        account.admission_queue().notify_completion(now);
    }
}

#[cfg(test)]
mod tests;
