//! Groups requests into conversations, and measures the pauses between them.

use std::collections::{HashMap, HashSet};

use engine_model::runs::RunId;
use vocabulary::{Micros, Tokens};

use crate::trace::{ArrivalProcess, Trace, TraceStep};

/// Shortest prompt that a later request can continue.
const MIN_LINK_TOKENS: Tokens = Tokens(1_024);

/// Position of one request.
pub(super) struct ConversationStep {
    pub(super) conversation: usize,
    pub(super) first: bool,
    /// Whether the request continues one that another request continued before. Known for recorded times only.
    pub(super) forked: bool,
    /// Seconds since the previous step.
    pub(super) gap: Option<f64>,
}

#[derive(Default)]
pub(super) struct ConversationTracker {
    pub(super) steps: Vec<f64>,
    pub(super) gaps: Vec<f64>,
    /// For recorded times: conversation and time by the run where a prompt ended.
    ends: HashMap<RunId, (usize, Micros)>,
    continued: HashSet<RunId>,
}

impl ConversationTracker {
    pub(super) fn next_session(&mut self) {
        self.steps.push(0.0);
        self.ends.clear();
        self.continued.clear();
    }

    pub(super) fn place(&mut self, trace: &Trace, step: &TraceStep) -> ConversationStep {
        let place = match trace.arrivals {
            ArrivalProcess::AfterDependencies => {
                let gap = (!step.after.is_empty()).then_some(step.pause.0 as f64 / 1e6);
                ConversationStep {
                    conversation: self.steps.len() - 1,
                    first: step.after.is_empty(),
                    forked: false,
                    gap,
                }
            }
            ArrivalProcess::Recorded => self.chained(trace, step),
        };
        self.steps[place.conversation] += 1.0;
        self.gaps.extend(place.gap);
        place
    }

    fn chained(&mut self, trace: &Trace, step: &TraceStep) -> ConversationStep {
        let long = |run: &&RunId| trace.runs.depth(**run) >= MIN_LINK_TOKENS;
        let before = step.path.iter().rev().take_while(long).find_map(|run| Some((*run, *self.ends.get(run)?)));
        let place = match before {
            Some((run, (conversation, at))) => {
                let (forked, gap) = (!self.continued.insert(run), Some((step.at - at).0 as f64 / 1e6));
                ConversationStep {
                    conversation: if forked { self.start_conversation() } else { conversation },
                    first: false,
                    forked,
                    gap,
                }
            }
            None => ConversationStep { conversation: self.start_conversation(), first: true, forked: false, gap: None },
        };
        if let Some(last) = step.path.last() {
            self.ends.insert(*last, (place.conversation, step.at));
            self.continued.remove(last);
        }
        place
    }

    /// Starts a conversation; the first one of a file reuses the entry created for the file.
    fn start_conversation(&mut self) -> usize {
        if self.steps.last().is_some_and(|steps| *steps > 0.0) {
            self.steps.push(0.0);
        }
        self.steps.len() - 1
    }
}
