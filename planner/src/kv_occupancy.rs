//! Whose KV lies at which rank of the fleet, as far as what was sent there tells: an account of sessions.
//!
//! Pure: times are passed in, on one clock of the caller's that only goes forward. It is an estimate that nobody waits for:
//! what it does not know costs a worse plan.

mod answer_lengths;
mod eviction_order;
mod prefill_load;
mod rank_headroom;
mod rank_memory;
mod rank_occupancy;
mod session_growth;

use std::collections::{BTreeMap, HashMap, VecDeque};

use vocabulary::{DpRank, Incarnation, Micros, Owner, SessionId, Tokens, WorkerId};

use crate::return_model::{self, ReturnModel, ReturnPattern};
use answer_lengths::AnswerLengths;
pub use prefill_load::PrefillLoad;
use prefill_load::PrefillLoadAverage;
pub use rank_headroom::Victim;
pub(crate) use rank_headroom::{RankHeadroom, SessionLookup};
pub use rank_memory::RankMemory;
use rank_occupancy::{RankOccupancy, RankUpdate, ResidentSessions};
use session_growth::SessionGrowth;

/// A session that nobody has heard of for so long is counted among those that never come back.
const SESSION_RETENTION: Micros = Micros(600_000_000);
/// So many ends of steps are looked at for each step that begins.
const MAX_FORGOTTEN_PER_STEP: usize = 4;
/// So many ends of steps are remembered.
const MAX_STEP_ENDS: usize = 131_072;
/// So many victims are looked at one by one; those after them count as these do on average.
const MAX_VICTIMS: usize = 16;

/// The account of all ranks, how sessions came back and grew so far, and how long answers were.
#[derive(Clone, Debug, Default)]
pub struct OccupancyModel {
    workers: BTreeMap<WorkerId, WorkerOccupancy>,
    residents: ResidentSessions,
    returns: ReturnModel,
    answers: AnswerLengths,
    growth: SessionGrowth,
    sessions: HashMap<SessionId, SessionHistory>,
    /// When steps ended, oldest first. One whose session has stepped since is void.
    step_ends: VecDeque<(Micros, SessionId)>,
    /// In place of all that, what was said at another time.
    recorded: Option<Vec<RankMemory>>,
}

#[derive(Clone, Debug)]
struct WorkerOccupancy {
    incarnation: Incarnation,
    ranks: Vec<(DpRank, RankOccupancy)>,
    /// Prompts that it was given to compute.
    prefill_load: PrefillLoadAverage,
}

/// How a session steps.
#[derive(Clone, Copy, Debug, Default)]
struct SessionHistory {
    habit: ReturnPattern,
    answers: AnswerLengths,
    /// The most that it had after a step.
    max_tokens: Tokens,
    /// When its last step ended; none while one is under way.
    idle_since: Option<Micros>,
}

/// What a step is going to have at a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footprint {
    /// Prompt and expected answer.
    pub tokens: Tokens,
    /// Of these, leading ones that lie there already.
    pub found: Tokens,
    /// What the rank can hold of all sessions; 0 when unknown: then nothing is noted.
    pub capacity: Tokens,
}

impl OccupancyModel {
    /// A step of a session is sent to a rank.
    pub fn step_started(&mut self, at: Owner, session: SessionId, stay: Footprint, now: Micros) {
        self.forget_idle_sessions(now);
        if let Some(seen) = self.sessions.get_mut(&session)
            && let Some(since) = seen.idle_since.take()
        {
            let gap = now - since;
            self.returns.record_return(seen.habit, gap);
            seen.habit = seen.habit.after_gap(gap);
        }
        if stay.capacity > Tokens::ZERO {
            self.place(at).step_started(session, stay, now);
        }
    }

    /// A worker is given a prompt, or a part of one, that takes it so long to compute.
    pub fn prefill_started(&mut self, at: Owner, work: Micros, now: Micros) {
        let Self { workers, residents: tenants, .. } = self;
        current_incarnation(workers, tenants, at).prefill_load.add(work, now);
    }

    /// The step is over; the session keeps so many tokens there.
    pub fn step_ended(&mut self, at: Owner, session: SessionId, tokens: Tokens, now: Micros) {
        let seen = self.sessions.entry(session).or_default();
        seen.idle_since = Some(now);
        let habit = seen.habit;
        self.step_ends.push_back((now, session));
        if let Some(mut place) = self.known(at) {
            place.step_ended(session, (tokens, habit), now);
        }
    }

    /// A step was served, and with it the session has so many tokens. One that is refused tells nothing of sessions.
    pub fn step_served(&mut self, session: SessionId, tokens: Tokens) {
        let seen = self.sessions.entry(session).or_default();
        match seen.max_tokens {
            Tokens::ZERO => self.growth.record_session(),
            most => self.growth.record_growth(tokens - most),
        }
        seen.max_tokens = seen.max_tokens.max(tokens);
    }

    /// An answer was whole; its step is over.
    pub fn answer_completed(&mut self, session: SessionId, answer: Tokens) {
        self.answers.record(answer);
        if let Some(seen) = self.sessions.get_mut(&session) {
            seen.answers.record_own(answer);
        }
    }

    /// How long the session's next answer is expected to be.
    pub fn expected_answer(&self, session: SessionId) -> Tokens {
        let own = self.sessions.get(&session).map_or_else(AnswerLengths::default, |seen| seen.answers);
        self.answers.expected(&own)
    }

    /// What a session that is new is expected to add after its first step.
    pub fn expected_growth(&self) -> Tokens {
        self.growth.expected()
    }

    /// The chance, 0 to 1, that a session that is between two steps comes back within 15 s; none where a step of it is under
    /// way, or nothing is known of it.
    pub fn short_term_return_probability(&self, session: SessionId, now: Micros) -> Option<f64> {
        let seen = self.sessions.get(&session)?;
        let idle = return_model::IdleClass::MAX.at_most(now - seen.idle_since?);
        Some(self.returns.short_term_return_probability(seen.habit, idle))
    }

    /// A copy of what a session has elsewhere came to a rank while no step of it is under way.
    pub fn prefix_replicated(&mut self, at: Owner, session: SessionId, stay: Footprint, now: Micros) {
        let habit = self.sessions.get(&session).map(|seen| seen.habit).unwrap_or_default();
        if stay.capacity > Tokens::ZERO {
            let mut place = self.place(at);
            place.step_started(session, stay, now);
            place.step_ended(session, (stay.tokens, habit), now);
        }
    }

    /// The step came to nothing: what it left there is not counted on.
    pub fn step_failed(&mut self, at: Owner, session: SessionId, now: Micros) {
        if let Some(seen) = self.sessions.get_mut(&session) {
            seen.idle_since = Some(now);
            self.step_ends.push_back((now, session));
        }
        if let Some(mut place) = self.known(at) {
            place.step_failed(session);
        }
    }

    /// The session lives elsewhere from now on. Its KV stays in the way until it is evicted, and is worth nothing.
    pub fn session_moved(&mut self, at: Owner, session: SessionId) {
        if let Some(mut place) = self.known(at) {
            place.session_moved(session);
        }
    }

    /// Whether a session has something at a rank.
    pub fn is_resident(&self, at: Owner, session: SessionId) -> bool {
        self.residents.of(session).iter().any(|(place, _)| *place == at)
    }

    /// A rank was seen to hold so many tokens, of all sessions. Where that is less than half of what idle ones have in the
    /// account, it was cleared; smaller differences are events that are on their way.
    pub fn observe_held_tokens(&mut self, at: Owner, tokens: Tokens) {
        if let Some(mut place) = self.known(at) {
            place.observe_held_tokens(tokens);
        }
    }

    /// How many sessions are remembered.
    #[cfg(test)]
    pub(crate) fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// As a step of a session finds it.
    pub(crate) fn session_lookup(&self, session: SessionId, now: Micros) -> SessionLookup<'_> {
        SessionLookup { occupancy: self, session, now, own: self.residents.of(session) }
    }

    fn place(&mut self, at: Owner) -> RankUpdate<'_> {
        let Self { workers, residents: tenants, .. } = self;
        let worker = current_incarnation(workers, tenants, at);
        let place = worker.ranks.iter().position(|(rank, _)| *rank == at.rank).unwrap_or_else(|| {
            worker.ranks.push((at.rank, RankOccupancy::default()));
            worker.ranks.len() - 1
        });
        RankUpdate { at, rank: &mut worker.ranks[place].1, tenants }
    }

    fn known(&mut self, at: Owner) -> Option<RankUpdate<'_>> {
        let worker = self.workers.get_mut(&at.worker).filter(|worker| worker.incarnation == at.incarnation)?;
        let (_, rank) = worker.ranks.iter_mut().find(|(rank, _)| *rank == at.rank)?;
        Some(RankUpdate { at, rank, tenants: &mut self.residents })
    }

    fn known_worker(&self, at: Owner) -> Option<&WorkerOccupancy> {
        self.workers.get(&at.worker).filter(|worker| worker.incarnation == at.incarnation)
    }

    /// A few of the oldest ends: their sessions have come back, or are given up.
    fn forget_idle_sessions(&mut self, now: Micros) {
        for _ in 0..MAX_FORGOTTEN_PER_STEP {
            let Some(&(end, session)) = self.step_ends.front() else { return };
            if now - end < SESSION_RETENTION && self.step_ends.len() <= MAX_STEP_ENDS {
                return;
            }
            self.step_ends.pop_front();
            if let Some(seen) = self.sessions.get(&session).filter(|seen| seen.idle_since == Some(end)) {
                // One that only made room may well come back.
                if now - end >= SESSION_RETENTION {
                    self.returns.record_abandoned(seen.habit);
                }
                self.sessions.remove(&session);
            }
        }
    }
}

/// The account of a worker; that of another life of it is void.
fn current_incarnation<'a>(
    workers: &'a mut BTreeMap<WorkerId, WorkerOccupancy>,
    tenants: &mut ResidentSessions,
    at: Owner,
) -> &'a mut WorkerOccupancy {
    let fresh = || WorkerOccupancy {
        incarnation: at.incarnation,
        ranks: Vec::new(),
        prefill_load: PrefillLoadAverage::default(),
    };
    let worker = workers.entry(at.worker).or_insert_with(fresh);
    if worker.incarnation != at.incarnation {
        *worker = fresh();
        tenants.forget(at.worker);
    }
    worker
}

#[cfg(test)]
mod tests;
