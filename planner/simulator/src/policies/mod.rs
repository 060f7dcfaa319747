//! Who serves a step. Every policy sees the same fleet, exactly and at once; none of them has state in the world.

mod ablation;
mod bound;
mod cost;
mod disaggregated;
mod kind;
mod own;
mod plain;
mod scored;
mod thunder;

use std::cmp::Ordering;
use std::sync::Arc;

use engine_model::runs::{Memory, RunEngine, RunId, Runs, Seconds};
use ledger::Ledger;
pub(crate) use planner::Action;
use planner::AttentionSpec;
use vocabulary::Tokens;

use crate::spec::Spec;
use crate::trace::Step;

pub use ablation::Ablation;
pub(crate) use kind::every;
pub use kind::{PolicyKind, UnknownPolicy};

/// A step of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct StepRef {
    /// Which session.
    pub session: usize,
    /// Which step of it.
    pub step: usize,
}

/// A step that wants to be served.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Which.
    pub at: StepRef,
    /// What it is.
    pub step: &'a Step,
    /// Whether it is on its own: its session says nothing of it.
    pub alone: bool,
    /// What of its prompt lies at each worker.
    pub held: &'a [Memory],
}

impl Ask<'_> {
    /// Prompt tokens that a worker would compute.
    pub(crate) fn missing(&self, worker: usize) -> Tokens {
        self.step.prompt - self.held[worker].with_disk
    }
}

/// The fleet as a policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct Fleet<'a> {
    /// When.
    pub now: Seconds,
    /// The workers.
    pub workers: &'a [&'a RunEngine],
    /// What each of them is.
    pub spec: &'a Spec,
    /// What prompts are made of.
    pub runs: &'a Runs,
    /// Tokens in a block of them.
    pub block: Tokens,
    /// What their model's layers keep, where that is known.
    pub attention: Option<&'a AttentionSpec>,
}

impl Fleet<'_> {
    pub(crate) fn all(&self) -> std::ops::Range<usize> {
        0..self.workers.len()
    }

    pub(crate) fn requests(&self, worker: usize) -> u64 {
        self.workers[worker].load().requests
    }
}

/// How a step is served.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dispatch {
    /// Who computes the prompt.
    pub prefill: usize,
    /// Who generates the answer.
    pub decode: usize,
    /// What is sent to the prefill worker first.
    pub fetch: Option<Fetch>,
    /// What is sent to the decode worker where it is another.
    pub ship: Ship,
    /// What the policy calls it and expects of it, where it has words for that.
    pub foretold: Option<Foretold>,
}

/// What a policy expects of a step that it placed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Foretold {
    /// What it calls the way of serving.
    pub action: Action,
    /// From being placed to the first token.
    pub first_token: Seconds,
}

impl Dispatch {
    /// One leg at one worker.
    pub fn at(worker: usize) -> Self {
        Self { prefill: worker, decode: worker, fetch: None, ship: Ship::Missing, foretold: None }
    }
}

/// Leading tokens that are sent before the prompt begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// By whom.
    pub from: usize,
    /// How many of the prompt; what is there already does not move.
    pub until: Tokens,
}

/// What a prefill worker sends to a decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ship {
    /// What lacks there.
    Missing,
    /// The whole prompt, every time.
    Whole,
}

/// What is sent before a step asks for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ahead {
    /// The last step of the session's agent.
    pub after: StepRef,
    /// Whole blocks that the next one begins with.
    pub path: Arc<[RunId]>,
    /// By whom.
    pub from: usize,
    /// To whom.
    pub to: usize,
    /// How many leading tokens; what is there already does not move.
    pub until: Tokens,
}

/// Whether a step is placed now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// Now.
    Now,
    /// When the policy's clock says so; it remembers the step.
    Later,
}

/// Is told when a policy begins to place a step and when it has. Which clock it looks at is not known here.
pub trait Stopwatch {
    /// A step is being placed from now on.
    fn start(&self);
    /// It is.
    fn stop(&self);
}

/// Where every step goes. Deterministic: chance comes from the seed it was made with.
pub trait Policy {
    /// Whether a step may go on now.
    fn admit(&mut self, _ask: &Ask<'_>, _fleet: &Fleet<'_>) -> Admission {
        Admission::Now
    }

    /// Who serves it.
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch;

    /// A step is over.
    fn finished(&mut self, _at: StepRef, _step: &Step, _now: Seconds) {}

    /// A session is over.
    fn session_over(&mut self, _session: usize) {}

    /// Steps that it had no plan of its own for.
    fn unplanned(&self) -> usize {
        0
    }

    /// The ledger that it keeps, where it keeps one.
    fn ledger(&self) -> Option<&Ledger> {
        None
    }

    /// How often `due` is asked.
    fn period(&self) -> Option<Seconds> {
        None
    }

    /// In how long `due` is to be asked once more, after a step was told to wait; none when that was said before.
    fn look_again(&mut self) -> Option<Seconds> {
        None
    }

    /// How often `ahead` is asked.
    fn looks_ahead(&self) -> Option<Seconds> {
        None
    }

    /// What is to be sent now, at most so much at once.
    fn ahead(&mut self, _most: usize, _fleet: &Fleet<'_>) -> Vec<Ahead> {
        Vec::new()
    }

    /// Steps that were to wait and may now go on.
    fn due(&mut self, _fleet: &Fleet<'_>) -> Vec<StepRef> {
        Vec::new()
    }
}

/// The first of the smallest.
pub(crate) fn least<K: PartialOrd>(workers: impl IntoIterator<Item = usize>, key: impl Fn(usize) -> K) -> usize {
    let keyed = workers.into_iter().map(|worker| (worker, key(worker)));
    let least = keyed.min_by(|(_, a), (_, b)| a.partial_cmp(b).unwrap_or(Ordering::Equal));
    least.map_or(0, |(worker, _)| worker)
}
