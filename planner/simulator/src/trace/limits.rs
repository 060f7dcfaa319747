//! Which part of a trace is replayed, and in which order.

use std::collections::{HashMap, HashSet};

use smart_default::SmartDefault;
use vocabulary::{Micros, Tokens};

use super::{Arrivals, Step, Trace};

/// What of each session is replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct Limits {
    /// Steps whose prompt and answer exceed it are left out, and those that wait for them.
    #[default(Tokens(128_000))]
    pub context: Tokens,
    /// At most so many steps of a session.
    #[default(150)]
    pub steps: usize,
    /// Sessions with fewer steps left are left out.
    #[default(3)]
    pub shortest: usize,
    /// Pauses are at most so long.
    #[default(Micros(300_000_000))]
    pub longest_pause: Micros,
}

/// What is wrong with a list of sessions.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
pub enum ListError {
    /// It names one that the trace does not have.
    #[error(
        "line {line} of the list names the session `{id}`, which the trace does not have (or not after its limits)"
    )]
    Unknown {
        /// From 1.
        line: usize,
        /// What it says.
        id: String,
    },
    /// It names one again.
    #[error("line {line} of the list names the session `{id}` again; accepted: each session once")]
    Twice {
        /// From 1.
        line: usize,
        /// What it says.
        id: String,
    },
    /// It names none.
    #[error("the list names no session; accepted: one id of the trace on each line")]
    Empty,
}

impl Trace {
    /// The part of it that fits. Requests at recorded times are only held against the context.
    pub fn within(mut self, limits: &Limits) -> Self {
        let alone = self.arrivals == Arrivals::Recorded;
        let most = if alone { usize::MAX } else { limits.steps };
        for session in &mut self.sessions {
            session.steps = fitting(&session.steps, limits, most);
            session.steps.iter_mut().for_each(|step| step.think = step.think.min(limits.longest_pause));
        }
        let shortest = if alone { 1 } else { limits.shortest.max(1) };
        self.sessions.retain(|session| session.steps.len() >= shortest);
        self
    }

    /// Only these sessions, in this order; blank lines do not count.
    pub fn in_order(mut self, ids: &str) -> Result<Self, ListError> {
        let mut known: HashMap<_, _> = self.sessions.drain(..).map(|session| (session.id.clone(), session)).collect();
        let mut named = HashSet::new();
        for (id, line) in ids.lines().map(str::trim).zip(1..).filter(|(id, _)| !id.is_empty()) {
            if !named.insert(id) {
                return Err(ListError::Twice { line, id: id.to_owned() });
            }
            let session = known.remove(id).ok_or_else(|| ListError::Unknown { line, id: id.to_owned() })?;
            self.sessions.push(session);
        }
        if named.is_empty() { Err(ListError::Empty) } else { Ok(self) }
    }

    /// The same traffic by another chance: sessions in an order of this seed; requests at recorded times in their own
    /// order, with the gaps between them in one of this seed.
    pub fn shuffled(mut self, seed: u64) -> Self {
        let mut chance = crate::Chance::new(seed);
        match self.arrivals {
            Arrivals::AfterOthers => shuffle(&mut self.sessions, &mut chance),
            Arrivals::Recorded => {
                self.sessions.iter_mut().for_each(|session| shuffle_gaps(&mut session.steps, &mut chance));
            }
        }
        self
    }
}

fn shuffle<T>(all: &mut [T], chance: &mut crate::Chance) {
    for last in (1..all.len()).rev() {
        all.swap(last, chance.below(last as u64 + 1) as usize);
    }
}

fn shuffle_gaps(steps: &mut [Step], chance: &mut crate::Chance) {
    let mut gaps: Vec<Micros> = steps.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    shuffle(&mut gaps, chance);
    for (next, gap) in (1..).zip(gaps) {
        steps[next].at = steps[next - 1].at + gap;
    }
}

fn fitting(steps: &[Step], limits: &Limits, most: usize) -> Vec<Step> {
    let mut numbers: Vec<Option<usize>> = Vec::with_capacity(steps.len());
    let mut kept: Vec<Step> = Vec::new();
    for step in steps {
        let after: Option<Vec<usize>> = step.after.iter().map(|before| numbers[*before]).collect();
        let fits = step.prompt + step.answer <= limits.context && kept.len() < most;
        numbers.push(after.filter(|_| fits).map(|after| {
            kept.push(Step { after, ..step.clone() });
            kept.len() - 1
        }));
    }
    kept
}
