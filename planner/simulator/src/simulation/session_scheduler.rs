//! Order of steps within sessions, and of sessions.

use std::collections::HashMap;

use engine_model::runs::Seconds;

use crate::policies::StepRef;
use crate::trace::{Trace, TraceSession};

/// Progress of the sessions.
pub(super) struct SessionScheduler {
    sessions: usize,
    next: usize,
    open: HashMap<usize, SessionStepGraph>,
    /// Steps held by the policy, with the time since when.
    waiting: HashMap<StepRef, Seconds>,
}

/// A running session.
struct SessionStepGraph {
    remaining: usize,
    /// Number of unfinished predecessors of each step.
    open_dependencies: Vec<usize>,
    followers: Vec<Vec<usize>>,
}

/// Consequences of a finished step.
pub(super) struct UnblockedSteps {
    /// Steps that have no unfinished predecessor any more.
    pub(super) steps: Vec<usize>,
    /// Whether the session is over.
    pub(super) is_session_over: bool,
}

impl SessionScheduler {
    pub(super) fn new(trace: &Trace) -> Self {
        Self { sessions: trace.sessions.len(), next: 0, open: HashMap::new(), waiting: HashMap::new() }
    }

    pub(super) fn next_session(&mut self) -> Option<usize> {
        let session = self.next;
        self.next += 1;
        (session < self.sessions).then_some(session)
    }

    pub(super) fn start_session(&mut self, number: usize, session: &TraceSession) -> Vec<usize> {
        let mut followers = vec![Vec::new(); session.steps.len()];
        for (index, step) in session.steps.iter().enumerate() {
            step.after.iter().for_each(|before| followers[*before].push(index));
        }
        let before: Vec<usize> = session.steps.iter().map(|step| step.after.len()).collect();
        let first = (0..before.len()).filter(|step| before[*step] == 0).collect();
        self.open
            .insert(number, SessionStepGraph { remaining: session.steps.len(), open_dependencies: before, followers });
        first
    }

    /// Records the end of a step; returns none for independent requests.
    pub(super) fn finish_step(&mut self, at: StepRef) -> Option<UnblockedSteps> {
        let open = self.open.get_mut(&at.session)?;
        open.remaining -= 1;
        let mut steps = Vec::new();
        for follower in std::mem::take(&mut open.followers[at.step]) {
            open.open_dependencies[follower] -= 1;
            if open.open_dependencies[follower] == 0 {
                steps.push(follower);
            }
        }
        let over = open.remaining == 0;
        if over {
            self.open.remove(&at.session);
        }
        Some(UnblockedSteps { steps, is_session_over: over })
    }

    pub(super) fn hold_step(&mut self, at: StepRef, since: Seconds) {
        self.waiting.insert(at, since);
    }

    pub(super) fn release_held_step(&mut self, at: StepRef) -> Option<Seconds> {
        self.waiting.remove(&at)
    }
}
