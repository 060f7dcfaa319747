//! An answer that another engine makes again from its beginning: what the client has of it is compared with that and left
//! out, and the rest comes in the first engine's names and numbers.
//!
//! Compared are texts and lists of tokens, place by place and not event by event: engines cut one answer into events as
//! their load has it. It must never deliver what follows on something else than the client has.

mod buffer;
mod choices;
mod named_events;

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use super::request::Api;
use super::token_transcript::{EventRewrite, NotResumable, TokenIdVisibility};
use buffer::ReplayBuffer;

/// How alike the answers to one request are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AnswerDeterminism {
    /// It is greedy or has a seed.
    Always,
    /// It is drawn: only what comes before its first word is the same.
    UntilFirstOutput,
}

/// Whose events come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReplayPhase {
    First,
    Replay,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum EventRemainder {
    New,
    Known,
}

/// One answer as far as the client has it.
#[derive(Debug)]
pub struct ReplayVerifier {
    api: Api,
    shown: TokenIdVisibility,
    determinism: AnswerDeterminism,
    phase: ReplayPhase,
    buffer: ReplayBuffer,
    /// Fields that all events share, as the first engine wrote them.
    head: Map<String, Value>,
    /// The first engine's ids by place, and those of the one that tells now that stand for them.
    ids: BTreeMap<String, String>,
    renamed_ids: HashMap<String, String>,
    /// The number of the next event, where events have one.
    next_number: u64,
    failure: Option<NotResumable>,
}

impl ReplayVerifier {
    /// Nothing yet. Ids that are not shown were asked for here.
    pub fn new(api: Api, shown: TokenIdVisibility, determinism: AnswerDeterminism) -> Self {
        Self {
            api,
            shown,
            determinism,
            phase: ReplayPhase::First,
            buffer: ReplayBuffer::default(),
            head: Map::new(),
            ids: BTreeMap::new(),
            renamed_ids: HashMap::new(),
            next_number: 0,
            failure: None,
        }
    }

    /// Whether it can be made again.
    pub(super) fn check_replayable(&self) -> Result<(), NotResumable> {
        if let Some(lost) = self.failure {
            Err(lost)
        } else if self.buffer.is_full() {
            Err(NotResumable::TooLong)
        } else if self.determinism == AnswerDeterminism::UntilFirstOutput && self.buffer.has_output() {
            Err(NotResumable::Sampled)
        } else {
            Ok(())
        }
    }

    /// What comes next is another engine's answer to the same request.
    pub(super) fn switch_engine(&mut self) {
        self.buffer.rewind();
        self.renamed_ids.clear();
        if !self.buffer.is_empty() {
            self.phase = ReplayPhase::Replay;
        }
    }

    /// Whether what comes was told before, or may have been.
    pub(super) fn is_replaying(&self) -> bool {
        self.phase == ReplayPhase::Replay
    }

    /// Events are lost that nobody could read.
    pub(super) fn record_unreadable(&mut self) {
        self.stop_verifying(if self.phase == ReplayPhase::First {
            NotResumable::TooLong
        } else {
            NotResumable::Diverged
        });
    }

    /// The stream is over. What the client has must have come again.
    pub(super) fn finish_stream(&mut self) -> Result<(), NotResumable> {
        if self.phase == ReplayPhase::Replay && self.failure.is_some() {
            return Err(NotResumable::Diverged);
        }
        self.buffer.check_complete("").inspect_err(|lost| self.stop_verifying(*lost))
    }

    /// Notes what an event tells, and says what becomes of it.
    pub(super) fn rewrite_event(&mut self, payload: &[u8]) -> EventRewrite {
        if self.failure.is_some() {
            return if self.phase == ReplayPhase::First { EventRewrite::Unchanged } else { EventRewrite::Hidden };
        }
        let Ok(Value::Object(mut event)) = serde_json::from_slice(payload) else {
            self.record_unreadable();
            return if self.phase == ReplayPhase::First { EventRewrite::Unchanged } else { EventRewrite::Hidden };
        };
        let left = match self.api {
            Api::Chat | Api::Completions => self.choices(&mut event),
            Api::Messages => self.message(&mut event),
            Api::Responses => self.response(&mut event),
        };
        match (self.phase, left) {
            (ReplayPhase::First, left) => {
                self.record_first_attempt(left.map(drop));
                EventRewrite::Unchanged
            }
            (ReplayPhase::Replay, Ok(EventRemainder::New)) => EventRewrite::Replaced(self.serialize_event(event)),
            (ReplayPhase::Replay, Ok(EventRemainder::Known)) => EventRewrite::Hidden,
            (ReplayPhase::Replay, Err(_)) => {
                self.stop_verifying(NotResumable::Diverged);
                EventRewrite::Hidden
            }
        }
    }

    /// Whether what the first engine has told so far is to be kept.
    fn record_first_attempt(&mut self, understood: Result<(), NotResumable>) {
        if understood.is_err() {
            self.stop_verifying(NotResumable::Unreadable);
        } else if let Err(lost) = self.check_replayable() {
            self.stop_verifying(lost);
        }
    }

    /// Nothing is compared any more.
    fn stop_verifying(&mut self, lost: NotResumable) {
        self.failure = self.failure.or(Some(lost));
        self.buffer = ReplayBuffer::default();
    }

    fn serialize_event(&mut self, mut event: Map<String, Value>) -> Vec<u8> {
        if let Some(number) = event.get_mut("sequence_number") {
            *number = self.next_number.into();
            self.next_number += 1;
        }
        let name = match (self.api, event.get("type").and_then(Value::as_str)) {
            (Api::Messages | Api::Responses, Some(kind)) => format!("event: {kind}\n"),
            _ => String::new(),
        };
        format!("{name}data: {}\n\n", Value::Object(event)).into_bytes()
    }
}

#[cfg(test)]
mod tests;
