//! Whose KV lies where: the planner's account, kept by what this router sends. A step holds its tenure at the worker that
//! serves it, from its plan to its end, whatever the end.
//!
//! The account is an estimate in memory. What other routers send is not in it; nothing waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use planner::{Admission, Claim, Plan, Stay, Tenancy};
use vocabulary::{Blocks, DpRank, Knowledge, Micros, Owner, SessionId, Tier, Tokens, WorkerView};
use workers_shim::dialect::Usage;
use workers_shim::fleet::Fleet;

use super::commit::server_of;
use super::plan::Classified;
use super::turns::Turns;

/// How often what workers were seen to hold is held against the account.
const COMPARED_EVERY: Duration = Duration::from_secs(1);

/// The account, its clock, and who waits because of it. Clones share them.
#[derive(Clone, Debug)]
pub struct Account {
    kept: Arc<Mutex<Kept>>,
    since: Instant,
}

#[derive(Debug)]
struct Kept {
    tenancy: Tenancy,
    turns: Turns,
    compared: Instant,
}

/// The account at one moment. Hold it briefly, never across an await.
pub struct Now<'a> {
    kept: MutexGuard<'a, Kept>,
    /// The time on the account's clock.
    pub now: Micros,
}

impl Now<'_> {
    /// Whose KV lies where.
    pub fn tenancy(&self) -> &Tenancy {
        &self.kept.tenancy
    }

    pub(super) fn turns(&mut self) -> &mut Turns {
        &mut self.kept.turns
    }
}

impl Account {
    /// Nothing lies anywhere, and nobody waits.
    pub fn new(admission: Admission) -> Self {
        let since = Instant::now();
        let kept = Kept { tenancy: Tenancy::default(), turns: Turns::new(admission), compared: since };
        Self { kept: Arc::new(Mutex::new(kept)), since }
    }

    /// As it stands now.
    pub fn now(&self) -> Now<'_> {
        let kept = self.kept.lock();
        Now { kept, now: Micros::of(self.since.elapsed()) }
    }

    /// How long the session's next answer is expected to be, where the client allows at most so much.
    pub fn expected_answer(&self, session: SessionId, most: Option<Tokens>) -> Tokens {
        let expected = self.now().tenancy().expected_answer(session);
        most.map_or(expected, |most| most.min(expected))
    }

    /// What a session that is new is expected to add after its first step.
    pub fn expected_growth(&self) -> Tokens {
        self.now().tenancy().expected_growth()
    }

    /// Drops what workers have cleared, as far as their events tell. Looks once a second at most.
    pub fn compare(&self, fleet: &Fleet) {
        let mut at = self.now();
        if at.kept.compared.elapsed() < COMPARED_EVERY {
            return;
        }
        at.kept.compared = Instant::now();
        let knows = |view: &&WorkerView| view.knowledge == Knowledge::Exact && view.capacity.block > Tokens::ZERO;
        for view in fleet.snapshot().iter().filter(knows) {
            let Some(seen) = fleet.events(view.id) else { continue };
            // Of all its ranks together: more than any of them holds.
            let tokens = view.capacity.block * seen.blocks;
            for rank in 0..view.ranks.max(1) {
                let place = Owner { worker: view.id, incarnation: view.incarnation, rank: DpRank(rank) };
                at.kept.tenancy.seen_to_hold(place, tokens);
            }
        }
    }

    /// A copy of what a session has elsewhere came to a rank while no step of it is under way.
    pub fn copied(&self, at: Owner, session: SessionId, stay: Stay) {
        let mut account = self.now();
        let now = account.now;
        account.kept.tenancy.copied(at, session, stay, now);
    }

    /// How many steps wait.
    pub fn waiting(&self) -> usize {
        self.now().turns().len()
    }

    /// Notes, at the moment for which it was planned, where a step is going to be served; none when its worker left the
    /// fleet meanwhile.
    pub fn begin(&self, mut account: Now<'_>, step: &Classified, plan: &Plan) -> Option<Tenure> {
        let located = &step.located;
        let at = server_of(located, plan)?;
        let session = located.session.id;
        let view_of = |worker| located.workers.iter().find(|view| view.id == worker);
        let capacity = view_of(at.worker)?.capacity.kv;
        let is_there =
            |found: &&vocabulary::Overlap| (found.worker, found.rank, found.tier) == (at.worker, at.rank, Tier::Hbm);
        let found = located.overlaps.iter().find(is_there).map_or(Blocks::ZERO, |found| found.blocks);
        let tokens = step.ask.prompt + step.ask.answer;
        let left = match plan.claim {
            Claim::Move { from, .. } => Some(from).filter(|from| *from != at),
            Claim::Keep | Claim::Open | Claim::Borrow => None,
        };
        let found = found.tokens(step.ask.block);
        // What an owner holds that the account does not know of is the session's own: it was there before this router.
        let is_own = located.session.owner == Some(at) && !account.kept.tenancy.has(at, session);
        let stay = Stay { tokens, found: if is_own { Tokens::ZERO } else { found }, capacity };
        let now = account.now;
        account.kept.tenancy.begins(at, session, stay, now);
        if let Some(view) = view_of(plan.prefill.worker) {
            let (worker, rank) = (view.id, plan.prefill.rank);
            let computing = Owner { worker, incarnation: view.incarnation, rank };
            account.kept.tenancy.computes(computing, plan.because.terms.compute, now);
        }
        drop(account);
        Some(Tenure { account: self.clone(), at, session, found, left, end: End::Idle(tokens) })
    }
}

/// A step's stay at the worker that serves it. It ends when this is dropped.
#[derive(Debug)]
pub struct Tenure {
    account: Account,
    at: Owner,
    session: SessionId,
    /// What of the prompt was there before.
    found: Tokens,
    /// Where the session lives no more once this is over.
    left: Option<Owner>,
    end: End,
}

#[derive(Clone, Copy, Debug)]
enum End {
    /// The session keeps so many tokens there.
    Idle(Tokens),
    /// All of them, and its old place is given up. The answer's length where the engine told it.
    Served { tokens: Tokens, answer: Option<Tokens> },
    /// Nothing came of it.
    Failed,
}

impl Tenure {
    /// The answer is whole. `usage` is what the engine counted, where it did.
    pub fn served(mut self, usage: Option<Usage>) {
        let End::Idle(expected) = self.end else { return };
        let tokens = usage.map_or(expected, |usage| usage.prompt + usage.completion);
        self.end = End::Served { tokens, answer: usage.map(|usage| usage.completion) };
    }

    /// The worker took it for wrong, and computed nothing: what was there before is there still.
    pub fn refused(mut self) {
        self.end = End::Idle(self.found);
    }

    /// The worker did not serve it.
    pub fn failed(mut self) {
        self.end = End::Failed;
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        let mut account = self.account.now();
        let now = account.now;
        let tenancy = &mut account.kept.tenancy;
        match self.end {
            End::Failed => tenancy.fails(self.at, self.session, now),
            End::Idle(tokens) => tenancy.ends(self.at, self.session, tokens, now),
            End::Served { tokens, answer } => {
                tenancy.ends(self.at, self.session, tokens, now);
                tenancy.served(self.session, tokens);
                answer.into_iter().for_each(|answer| tenancy.answered(self.session, answer));
                if let Some(left) = self.left {
                    tenancy.leaves(left, self.session);
                }
            }
        }
        account.turns().stir(now);
    }
}

#[cfg(test)]
mod tests;
