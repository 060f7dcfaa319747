//! Model of KV occupancy: which sessions' KV fills the memory of each rank, estimated from the steps sent there.
//!
//! Pure: the caller passes in times of one monotonic clock. An estimate that nothing waits for: a wrong entry costs a
//! worse plan, never correctness.

mod answer_lengths;
mod eviction_order;
mod prefill_load;
mod rank_headroom;
mod rank_occupancy;
mod session_growth;

use std::collections::{BTreeMap, HashMap, VecDeque};

use serde::{Deserialize, Serialize};
use vocabulary::{DpRank, Incarnation, Micros, Owner, SessionId, Tokens, WorkerId};

use crate::return_model::{self, ReturnModel, ReturnPattern};
use answer_lengths::AnswerLengths;
use prefill_load::PrefillLoadAverage;
pub use prefill_load::RecentPrefillLoad;
pub use rank_headroom::EvictionVictim;
pub(crate) use rank_headroom::{RankHeadroom, SessionLookup};
use rank_occupancy::{RankOccupancy, RankOccupancyMut, ResidentSessions};
use session_growth::SessionGrowth;

/// Idle time after which a session is forgotten and counts as abandoned.
const SESSION_RETENTION: Micros = Micros(600_000_000);
/// Most step ends examined for expiry when a step starts.
const MAX_FORGOTTEN_PER_STEP: usize = 4;
/// Most step ends remembered.
const MAX_STEP_ENDS: usize = 131_072;

/// Estimated occupancy of all ranks, with statistics on how sessions return, how they grow and how long answers are.
#[derive(Clone, Debug, Default)]
pub struct OccupancyModel {
    workers: BTreeMap<WorkerId, WorkerOccupancy>,
    residents: ResidentSessions,
    returns: ReturnModel,
    answers: AnswerLengths,
    growth: SessionGrowth,
    sessions: HashMap<SessionId, SessionHistory>,
    /// Times at which steps ended, oldest first. An entry is void if its session has had a step since.
    step_ends: VecDeque<(Micros, SessionId)>,
    /// Recorded occupancy, used instead of everything above when replaying a decision.
    recorded: Option<Vec<RankMemorySnapshot>>,
}

#[derive(Clone, Debug)]
struct WorkerOccupancy {
    incarnation: Incarnation,
    ranks: Vec<(DpRank, RankOccupancy)>,
    /// Recent prefill work given to the worker.
    prefill_load: PrefillLoadAverage,
}

/// Step history of one session.
#[derive(Clone, Copy, Debug, Default)]
struct SessionHistory {
    return_pattern: ReturnPattern,
    answers: AnswerLengths,
    /// Most tokens that the session had after a step.
    max_tokens: Tokens,
    /// End of its last step; none while a step is running.
    idle_since: Option<Micros>,
}

/// KV that a step will occupy at a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepFootprint {
    /// Tokens of the prompt and the expected answer.
    pub tokens: Tokens,
    /// Leading tokens of these that are already cached there.
    pub cached: Tokens,
    /// KV capacity of the rank for all sessions; 0 when unknown, and then nothing is recorded.
    pub capacity: Tokens,
}

impl OccupancyModel {
    /// Records that a step of a session is sent to a rank.
    pub fn step_started(&mut self, at: Owner, session: SessionId, footprint: StepFootprint, now: Micros) {
        self.forget_idle_sessions(now);
        if let Some(history) = self.sessions.get_mut(&session)
            && let Some(since) = history.idle_since.take()
        {
            let gap = now - since;
            self.returns.record_return(history.return_pattern, gap);
            history.return_pattern = history.return_pattern.after_gap(gap);
        }
        if footprint.capacity > Tokens::ZERO {
            self.rank_update(at).step_started(session, footprint, now);
        }
    }

    /// Records that a worker is given a prompt, or part of one, that takes `work` microseconds to compute.
    pub fn prefill_started(&mut self, at: Owner, work: Micros, now: Micros) {
        let Self { workers, residents, .. } = self;
        current_incarnation(workers, residents, at).prefill_load.add(work, now);
    }

    /// Records that a step has ended; the session keeps `tokens` at the rank.
    pub fn step_ended(&mut self, at: Owner, session: SessionId, tokens: Tokens, now: Micros) {
        let history = self.sessions.entry(session).or_default();
        history.idle_since = Some(now);
        let pattern = history.return_pattern;
        self.step_ends.push_back((now, session));
        if let Some(mut rank) = self.known_rank(at) {
            rank.step_ended(session, (tokens, pattern), now);
        }
    }

    /// Records that a step was served, after which the session has `tokens`. Not for failed steps: those tell nothing
    /// about sessions.
    pub fn step_served(&mut self, session: SessionId, tokens: Tokens) {
        let history = self.sessions.entry(session).or_default();
        match history.max_tokens {
            Tokens::ZERO => self.growth.record_session(),
            most => self.growth.record_growth(tokens - most),
        }
        history.max_tokens = history.max_tokens.max(tokens);
    }

    /// Records the length of a complete answer.
    pub fn answer_completed(&mut self, session: SessionId, answer: Tokens) {
        self.answers.record(answer);
        if let Some(history) = self.sessions.get_mut(&session) {
            history.answers.record_own(answer);
        }
    }

    /// Returns the expected length of the session's next answer.
    pub fn expected_answer(&self, session: SessionId) -> Tokens {
        let own = self.sessions.get(&session).map_or_else(AnswerLengths::default, |history| history.answers);
        self.answers.expected(&own)
    }

    /// Returns how many tokens a new session is expected to add after its first step.
    pub fn expected_growth(&self) -> Tokens {
        self.growth.expected()
    }

    /// Returns the chance, 0 to 1, that an idle session comes back within 15 s; none while a step of it is running, or
    /// for an unknown session.
    pub fn short_term_return_probability(&self, session: SessionId, now: Micros) -> Option<f64> {
        let history = self.sessions.get(&session)?;
        let idle = return_model::GapBucket::MAX.at_most(now - history.idle_since?);
        Some(self.returns.short_term_return_probability(history.return_pattern, idle))
    }

    /// Records that a session's prefix was replicated to a rank while no step of it is running.
    pub fn prefix_replicated(&mut self, at: Owner, session: SessionId, footprint: StepFootprint, now: Micros) {
        let pattern = self.sessions.get(&session).map(|history| history.return_pattern).unwrap_or_default();
        if footprint.capacity > Tokens::ZERO {
            let mut rank = self.rank_update(at);
            rank.step_started(session, footprint, now);
            rank.step_ended(session, (footprint.tokens, pattern), now);
        }
    }

    /// Records that a step failed: the KV it left at the rank is not counted.
    pub fn step_failed(&mut self, at: Owner, session: SessionId, now: Micros) {
        if let Some(history) = self.sessions.get_mut(&session) {
            history.idle_since = Some(now);
            self.step_ends.push_back((now, session));
        }
        if let Some(mut rank) = self.known_rank(at) {
            rank.step_failed(session);
        }
    }

    /// Records that the session now lives elsewhere. Its old KV still takes memory until it is evicted, but has no
    /// value.
    pub fn session_moved(&mut self, at: Owner, session: SessionId) {
        if let Some(mut rank) = self.known_rank(at) {
            rank.session_moved(session);
        }
    }

    /// Returns whether a session has KV at a rank.
    pub fn is_resident(&self, at: Owner, session: SessionId) -> bool {
        self.residents.of(session).iter().any(|(owner, _)| *owner == at)
    }

    /// Records how many tokens, of all sessions, a rank was observed to hold. Less than half of the modelled idle
    /// tokens means that the cache was cleared; smaller differences are KV events still in flight.
    pub fn observe_held_tokens(&mut self, at: Owner, tokens: Tokens) {
        if let Some(mut rank) = self.known_rank(at) {
            rank.observe_held_tokens(tokens);
        }
    }

    /// Number of remembered sessions.
    #[cfg(test)]
    pub(crate) fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Returns the model as a step of one session sees it.
    pub(crate) fn session_lookup(&self, session: SessionId, now: Micros) -> SessionLookup<'_> {
        SessionLookup { occupancy: self, session, now, sessions: self.residents.of(session) }
    }

    fn rank_update(&mut self, at: Owner) -> RankOccupancyMut<'_> {
        let Self { workers, residents, .. } = self;
        let worker = current_incarnation(workers, residents, at);
        let position = worker.ranks.iter().position(|(rank, _)| *rank == at.rank).unwrap_or_else(|| {
            worker.ranks.push((at.rank, RankOccupancy::default()));
            worker.ranks.len() - 1
        });
        RankOccupancyMut { at, rank: &mut worker.ranks[position].1, residents }
    }

    fn known_rank(&mut self, at: Owner) -> Option<RankOccupancyMut<'_>> {
        let worker = self.workers.get_mut(&at.worker).filter(|worker| worker.incarnation == at.incarnation)?;
        let (_, rank) = worker.ranks.iter_mut().find(|(rank, _)| *rank == at.rank)?;
        Some(RankOccupancyMut { at, rank, residents: &mut self.residents })
    }

    fn known_worker(&self, at: Owner) -> Option<&WorkerOccupancy> {
        self.workers.get(&at.worker).filter(|worker| worker.incarnation == at.incarnation)
    }

    /// Expires a few of the oldest step ends: each session has either returned since, or is forgotten.
    fn forget_idle_sessions(&mut self, now: Micros) {
        for _ in 0..MAX_FORGOTTEN_PER_STEP {
            let Some(&(end, session)) = self.step_ends.front() else { return };
            if now - end < SESSION_RETENTION && self.step_ends.len() <= MAX_STEP_ENDS {
                return;
            }
            self.step_ends.pop_front();
            if let Some(history) = self.sessions.get(&session).filter(|history| history.idle_since == Some(end)) {
                // A session dropped only because the list was full may still come back.
                if now - end >= SESSION_RETENTION {
                    self.returns.record_abandoned(history.return_pattern);
                }
                self.sessions.remove(&session);
            }
        }
    }
}

/// Returns the occupancy of a worker, and resets it if it belongs to another incarnation.
fn current_incarnation<'a>(
    workers: &'a mut BTreeMap<WorkerId, WorkerOccupancy>,
    residents: &mut ResidentSessions,
    at: Owner,
) -> &'a mut WorkerOccupancy {
    let empty = || WorkerOccupancy {
        incarnation: at.incarnation,
        ranks: Vec::new(),
        prefill_load: PrefillLoadAverage::default(),
    };
    let worker = workers.entry(at.worker).or_insert_with(empty);
    if worker.incarnation != at.incarnation {
        *worker = empty();
        residents.forget(at.worker);
    }
    worker
}

/// Memory of one rank at planning time: enough for a decision log to plan the step again.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct RankMemorySnapshot {
    /// Worker of the rank.
    pub worker: WorkerId,
    /// Rank within the worker.
    #[serde(default)]
    pub rank: DpRank,
    /// Free tokens.
    pub free_tokens: Tokens,
    /// Tokens that the step's session has there.
    pub session_tokens: Tokens,
    /// Evictable tokens: those of other, idle sessions, and stale ones of the step's session.
    pub idle_tokens: Tokens,
    /// Other sessions that are being served or had a step recently.
    pub active_sessions: u32,
    /// Prefill load of the rank's worker.
    #[serde(default, skip_serializing_if = "RecentPrefillLoad::is_none")]
    pub prefill_load: RecentPrefillLoad,
    /// Sessions that would be evicted first, as far as the step could reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eviction_candidates: Vec<EvictionVictim>,
}

impl RankMemorySnapshot {
    fn headroom(&self) -> RankHeadroom<'_> {
        let Self {
            free_tokens: free,
            session_tokens: own,
            idle_tokens: idle,
            active_sessions: active,
            prefill_load: inflow,
            ..
        } = *self;
        RankHeadroom {
            session_tokens: own,
            others_idle: idle,
            active,
            inflow,
            recorded_victims: &self.eviction_candidates,
            ..RankHeadroom::unknown(free)
        }
    }
}

impl OccupancyModel {
    /// Builds a read-only model that returns recorded occupancy.
    pub fn from_recorded(memory: &[RankMemorySnapshot]) -> Self {
        Self { recorded: Some(memory.to_vec()), ..Self::default() }
    }

    pub(crate) fn knows(&self, at: Owner) -> bool {
        match &self.recorded {
            Some(recorded) => recorded.iter().any(|recorded| (recorded.worker, recorded.rank) == (at.worker, at.rank)),
            None => self.known_worker(at).is_some(),
        }
    }
}

#[cfg(test)]
mod tests;
