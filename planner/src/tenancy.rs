//! Whose KV lies at which rank of the fleet, as far as what was sent there tells: an account of sessions.
//!
//! Pure: times are passed in, on one clock of the caller's that only goes forward. It is an estimate that nobody waits for:
//! what it does not know costs a worse plan.

mod answers;
mod growth;
mod inflow;
mod line;
mod rank;
mod room;
mod told;

use std::collections::{BTreeMap, HashMap, VecDeque};

use vocabulary::{DpRank, Incarnation, Micros, Owner, SessionId, Tokens, WorkerId};

use crate::returns::{self, Habit, Returns};
use answers::Answers;
use growth::Growth;
pub use inflow::Inflow;
use inflow::Lately;
use rank::{Place, Rank, Tenants};
pub use room::Victim;
pub(crate) use room::{Room, Visit};
pub use told::RankMemory;

/// A session that nobody has heard of for so long is counted among those that never come back.
const GIVEN_UP: Micros = Micros(600_000_000);
/// So many ends of steps are looked at for each step that begins.
const GIVEN_UP_AT_ONCE: usize = 4;
/// So many ends of steps are remembered.
const MOST_ENDS: usize = 131_072;
/// So many victims are looked at one by one; those after them count as these do on average.
const MOST_VICTIMS: usize = 16;

/// The account of all ranks, how sessions came back and grew so far, and how long answers were.
#[derive(Clone, Debug, Default)]
pub struct Tenancy {
    workers: BTreeMap<WorkerId, Worker>,
    tenants: Tenants,
    returns: Returns,
    answers: Answers,
    growth: Growth,
    sessions: HashMap<SessionId, Seen>,
    /// When steps ended, oldest first. One whose session has stepped since is void.
    ends: VecDeque<(Micros, SessionId)>,
    /// In place of all that, what was said at another time.
    told: Option<Vec<RankMemory>>,
}

#[derive(Clone, Debug)]
struct Worker {
    incarnation: Incarnation,
    ranks: Vec<(DpRank, Rank)>,
    /// Prompts that it was given to compute.
    lately: Lately,
}

/// How a session steps.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    habit: Habit,
    answers: Answers,
    /// The most that it had after a step.
    most: Tokens,
    /// When its last step ended; none while one is under way.
    away_since: Option<Micros>,
}

/// What a step is going to have at a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stay {
    /// Prompt and expected answer.
    pub tokens: Tokens,
    /// Of these, leading ones that lie there already.
    pub found: Tokens,
    /// What the rank can hold of all sessions; 0 when unknown: then nothing is noted.
    pub capacity: Tokens,
}

impl Tenancy {
    /// A step of a session is sent to a rank.
    pub fn begins(&mut self, at: Owner, session: SessionId, stay: Stay, now: Micros) {
        self.give_up(now);
        if let Some(seen) = self.sessions.get_mut(&session)
            && let Some(since) = seen.away_since.take()
        {
            let gap = now - since;
            self.returns.came_back(seen.habit, gap);
            seen.habit = seen.habit.after(gap);
        }
        if stay.capacity > Tokens::ZERO {
            self.place(at).begins(session, stay, now);
        }
    }

    /// A worker is given a prompt, or a part of one, that takes it so long to compute.
    pub fn computes(&mut self, at: Owner, work: Micros, now: Micros) {
        let Self { workers, tenants, .. } = self;
        living(workers, tenants, at).lately.add(work, now);
    }

    /// The step is over; the session keeps so many tokens there.
    pub fn ends(&mut self, at: Owner, session: SessionId, tokens: Tokens, now: Micros) {
        let seen = self.sessions.entry(session).or_default();
        seen.away_since = Some(now);
        let habit = seen.habit;
        self.ends.push_back((now, session));
        if let Some(mut place) = self.known(at) {
            place.ends(session, (tokens, habit), now);
        }
    }

    /// A step was served, and with it the session has so many tokens. One that is refused tells nothing of sessions.
    pub fn served(&mut self, session: SessionId, tokens: Tokens) {
        let seen = self.sessions.entry(session).or_default();
        match seen.most {
            Tokens::ZERO => self.growth.came(),
            most => self.growth.grew(tokens - most),
        }
        seen.most = seen.most.max(tokens);
    }

    /// An answer was whole; its step is over.
    pub fn answered(&mut self, session: SessionId, answer: Tokens) {
        self.answers.saw(answer);
        if let Some(seen) = self.sessions.get_mut(&session) {
            seen.answers.saw_own(answer);
        }
    }

    /// How long the session's next answer is expected to be.
    pub fn expected_answer(&self, session: SessionId) -> Tokens {
        let own = self.sessions.get(&session).map_or_else(Answers::default, |seen| seen.answers);
        self.answers.next(&own)
    }

    /// What a session that is new is expected to add after its first step.
    pub fn expected_growth(&self) -> Tokens {
        self.growth.expected()
    }

    /// The chance, 0 to 1, that a session that is between two steps comes back within 15 s; none where a step of it is under
    /// way, or nothing is known of it.
    pub fn returns_shortly(&self, session: SessionId, now: Micros) -> Option<f64> {
        let seen = self.sessions.get(&session)?;
        let idle = returns::Idle::LONGEST.at_most(now - seen.away_since?);
        Some(self.returns.chance_shortly(seen.habit, idle))
    }

    /// A copy of what a session has elsewhere came to a rank while no step of it is under way.
    pub fn copied(&mut self, at: Owner, session: SessionId, stay: Stay, now: Micros) {
        let habit = self.sessions.get(&session).map(|seen| seen.habit).unwrap_or_default();
        if stay.capacity > Tokens::ZERO {
            let mut place = self.place(at);
            place.begins(session, stay, now);
            place.ends(session, (stay.tokens, habit), now);
        }
    }

    /// The step came to nothing: what it left there is not counted on.
    pub fn fails(&mut self, at: Owner, session: SessionId, now: Micros) {
        if let Some(seen) = self.sessions.get_mut(&session) {
            seen.away_since = Some(now);
            self.ends.push_back((now, session));
        }
        if let Some(mut place) = self.known(at) {
            place.fails(session);
        }
    }

    /// The session lives elsewhere from now on. Its KV stays in the way until it is evicted, and is worth nothing.
    pub fn leaves(&mut self, at: Owner, session: SessionId) {
        if let Some(mut place) = self.known(at) {
            place.leaves(session);
        }
    }

    /// Whether a session has something at a rank.
    pub fn has(&self, at: Owner, session: SessionId) -> bool {
        self.tenants.of(session).iter().any(|(place, _)| *place == at)
    }

    /// A rank was seen to hold so many tokens, of all sessions. Where that is less than half of what idle ones have in the
    /// account, it was cleared; smaller differences are events that are on their way.
    pub fn seen_to_hold(&mut self, at: Owner, tokens: Tokens) {
        if let Some(mut place) = self.known(at) {
            place.seen_to_hold(tokens);
        }
    }

    /// How many sessions are remembered.
    #[cfg(test)]
    pub(crate) fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// As a step of a session finds it.
    pub(crate) fn visit(&self, session: SessionId, now: Micros) -> Visit<'_> {
        Visit { tenancy: self, session, now, own: self.tenants.of(session) }
    }

    fn place(&mut self, at: Owner) -> Place<'_> {
        let Self { workers, tenants, .. } = self;
        let worker = living(workers, tenants, at);
        let place = worker.ranks.iter().position(|(rank, _)| *rank == at.rank).unwrap_or_else(|| {
            worker.ranks.push((at.rank, Rank::default()));
            worker.ranks.len() - 1
        });
        Place { at, rank: &mut worker.ranks[place].1, tenants }
    }

    fn known(&mut self, at: Owner) -> Option<Place<'_>> {
        let worker = self.workers.get_mut(&at.worker).filter(|worker| worker.incarnation == at.incarnation)?;
        let (_, rank) = worker.ranks.iter_mut().find(|(rank, _)| *rank == at.rank)?;
        Some(Place { at, rank, tenants: &mut self.tenants })
    }

    fn known_worker(&self, at: Owner) -> Option<&Worker> {
        self.workers.get(&at.worker).filter(|worker| worker.incarnation == at.incarnation)
    }

    /// A few of the oldest ends: their sessions have come back, or are given up.
    fn give_up(&mut self, now: Micros) {
        for _ in 0..GIVEN_UP_AT_ONCE {
            let Some(&(end, session)) = self.ends.front() else { return };
            if now - end < GIVEN_UP && self.ends.len() <= MOST_ENDS {
                return;
            }
            self.ends.pop_front();
            if let Some(seen) = self.sessions.get(&session).filter(|seen| seen.away_since == Some(end)) {
                // One that only made room may well come back.
                if now - end >= GIVEN_UP {
                    self.returns.stayed_away(seen.habit);
                }
                self.sessions.remove(&session);
            }
        }
    }
}

/// The account of a worker; that of another life of it is void.
fn living<'a>(workers: &'a mut BTreeMap<WorkerId, Worker>, tenants: &mut Tenants, at: Owner) -> &'a mut Worker {
    let fresh = || Worker { incarnation: at.incarnation, ranks: Vec::new(), lately: Lately::default() };
    let worker = workers.entry(at.worker).or_insert_with(fresh);
    if worker.incarnation != at.incarnation {
        *worker = fresh();
        tenants.forget(at.worker);
    }
    worker
}

#[cfg(test)]
mod tests;
