//! Selects the part of a trace that is replayed, and its order.

use std::collections::{HashMap, HashSet};

use smart_default::SmartDefault;
use vocabulary::{Micros, Tokens};

use super::{ArrivalProcess, Trace, TraceStep};

/// Limits on the part of each session that is replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct ReplayLimits {
    /// Steps whose prompt and answer exceed this are left out, with the steps that depend on them.
    #[default(Tokens(128_000))]
    pub max_context: Tokens,
    /// Most steps per session.
    #[default(150)]
    pub max_steps: usize,
    /// Sessions with fewer remaining steps are left out.
    #[default(3)]
    pub min_steps: usize,
    /// Longest pause; longer ones are shortened to it.
    #[default(Micros(300_000_000))]
    pub max_pause: Micros,
}

/// What is wrong with a list of sessions.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
pub enum SessionListError {
    /// The list names a session that the trace does not have.
    #[error(
        "line {line} of the list names the session `{id}`, which the trace does not have (or not after its limits)"
    )]
    Unknown {
        /// Line number, from 1.
        line: usize,
        /// Session id in the list.
        id: String,
    },
    /// The list names a session twice.
    #[error("line {line} of the list names the session `{id}` again; accepted: each session once")]
    Twice {
        /// Line number, from 1.
        line: usize,
        /// Session id in the list.
        id: String,
    },
    /// The list is empty.
    #[error("the list names no session; accepted: one id of the trace on each line")]
    Empty,
}

impl Trace {
    /// Returns the part of the trace within the limits. Requests at recorded times are limited by context only.
    pub fn apply_limits(mut self, limits: &ReplayLimits) -> Self {
        let alone = self.arrivals == ArrivalProcess::Recorded;
        let most = if alone { usize::MAX } else { limits.max_steps };
        for session in &mut self.sessions {
            session.steps = fitting(&session.steps, limits, most);
            session.steps.iter_mut().for_each(|step| step.pause = step.pause.min(limits.max_pause));
        }
        let shortest = if alone { 1 } else { limits.min_steps.max(1) };
        self.sessions.retain(|session| session.steps.len() >= shortest);
        self
    }

    /// Returns only these sessions, in this order; blank lines are ignored.
    pub fn in_order(mut self, ids: &str) -> Result<Self, SessionListError> {
        let mut known: HashMap<_, _> = self.sessions.drain(..).map(|session| (session.id.clone(), session)).collect();
        let mut named = HashSet::new();
        for (id, line) in ids.lines().map(str::trim).zip(1..).filter(|(id, _)| !id.is_empty()) {
            if !named.insert(id) {
                return Err(SessionListError::Twice { line, id: id.to_owned() });
            }
            let session = known.remove(id).ok_or_else(|| SessionListError::Unknown { line, id: id.to_owned() })?;
            self.sessions.push(session);
        }
        if named.is_empty() { Err(SessionListError::Empty) } else { Ok(self) }
    }

    /// Returns the same traffic with a different random order: sessions are shuffled; for requests at recorded times,
    /// the order stays and the gaps between them are shuffled.
    pub fn shuffled(mut self, seed: u64) -> Self {
        let mut chance = crate::SeededRng::new(seed);
        match self.arrivals {
            ArrivalProcess::AfterDependencies => shuffle(&mut self.sessions, &mut chance),
            ArrivalProcess::Recorded => {
                self.sessions.iter_mut().for_each(|session| shuffle_gaps(&mut session.steps, &mut chance));
            }
        }
        self
    }
}

fn shuffle<T>(all: &mut [T], chance: &mut crate::SeededRng) {
    for last in (1..all.len()).rev() {
        all.swap(last, chance.below(last as u64 + 1) as usize);
    }
}

fn shuffle_gaps(steps: &mut [TraceStep], chance: &mut crate::SeededRng) {
    let mut gaps: Vec<Micros> = steps.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    shuffle(&mut gaps, chance);
    for (next, gap) in (1..).zip(gaps) {
        steps[next].at = steps[next - 1].at + gap;
    }
}

fn fitting(steps: &[TraceStep], limits: &ReplayLimits, most: usize) -> Vec<TraceStep> {
    let mut numbers: Vec<Option<usize>> = Vec::with_capacity(steps.len());
    let mut steps_within: Vec<TraceStep> = Vec::new();
    for step in steps {
        let after: Option<Vec<usize>> = step.after.iter().map(|before| numbers[*before]).collect();
        let fits = step.prompt + step.answer <= limits.max_context && steps_within.len() < most;
        numbers.push(after.filter(|_| fits).map(|after| {
            steps_within.push(TraceStep { after, ..step.clone() });
            steps_within.len() - 1
        }));
    }
    steps_within
}
