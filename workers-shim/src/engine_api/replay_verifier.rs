//! Verifies an answer that a second engine generates again from the beginning: the part that the client already has is
//! compared and left out, and the rest is forwarded with the ids and sequence numbers of the first engine.
//!
//! Texts and token lists are compared field by field, not event by event, because engines split one answer into events
//! depending on their load. It must never forward a continuation of anything but the text that the client has.

mod buffer;
mod choices;
mod named_events;

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use super::ClientTokenIdVisibility;
use super::request::Api;
use super::token_transcript::{ContinuationBlocker, EventRewrite};
use buffer::ReplayBuffer;

/// Whether repeated answers to one request are equal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AnswerDeterminism {
    /// Always: greedy sampling, or a seed.
    Always,
    /// Only up to the first generated output: sampling without a seed.
    UntilFirstOutput,
}

/// Which engine's events are read now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AnswerPass {
    First,
    Replay,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum EventNovelty {
    New,
    Known,
}

/// The part of one answer that the client has, and the state of its verification.
#[derive(Debug)]
pub struct ReplayVerifier {
    api: Api,
    visible_ids: ClientTokenIdVisibility,
    determinism: AnswerDeterminism,
    phase: AnswerPass,
    buffer: ReplayBuffer,
    /// Fields that are equal in all events, with the first engine's values.
    head: Map<String, Value>,
    /// The first engine's ids by field path; `renamed_ids` maps the current engine's ids to them.
    ids: BTreeMap<String, String>,
    renamed_ids: HashMap<String, String>,
    /// The next event's `sequence_number`, for APIs that have one.
    next_number: u64,
    failure: Option<ContinuationBlocker>,
}

impl ReplayVerifier {
    /// Creates an empty verifier. `visibility`: whether the client sees token ids, or only the router requested them.
    pub fn new(api: Api, visibility: ClientTokenIdVisibility, determinism: AnswerDeterminism) -> Self {
        Self {
            api,
            visible_ids: visibility,
            determinism,
            phase: AnswerPass::First,
            buffer: ReplayBuffer::default(),
            head: Map::new(),
            ids: BTreeMap::new(),
            renamed_ids: HashMap::new(),
            next_number: 0,
            failure: None,
        }
    }

    /// Returns why the answer cannot be replayed at another engine, if it cannot.
    pub(super) fn check_replayable(&self) -> Result<(), ContinuationBlocker> {
        if let Some(defect) = self.failure {
            Err(defect)
        } else if self.buffer.is_full() {
            Err(ContinuationBlocker::TooLong)
        } else if self.determinism == AnswerDeterminism::UntilFirstOutput && self.buffer.has_output() {
            Err(ContinuationBlocker::Sampled)
        } else {
            Ok(())
        }
    }

    /// Starts to verify: the events that follow are another engine's answer to the same request.
    pub(super) fn switch_engine(&mut self) {
        self.buffer.rewind();
        self.renamed_ids.clear();
        if !self.buffer.is_empty() {
            self.phase = AnswerPass::Replay;
        }
    }

    /// Returns whether the events may repeat what the client already has.
    pub(super) fn is_replaying(&self) -> bool {
        self.phase == AnswerPass::Replay
    }

    /// Records that an event could not be read.
    pub(super) fn record_unreadable(&mut self) {
        self.stop_verifying(if self.phase == AnswerPass::First {
            ContinuationBlocker::TooLong
        } else {
            ContinuationBlocker::Diverged
        });
    }

    /// Ends the stream. Fails unless everything that the client has was repeated.
    pub(super) fn finish_stream(&mut self) -> Result<(), ContinuationBlocker> {
        if self.phase == AnswerPass::Replay && self.failure.is_some() {
            return Err(ContinuationBlocker::Diverged);
        }
        self.buffer.check_complete("").inspect_err(|defect| self.stop_verifying(*defect))
    }

    /// Records or verifies an event, and returns how to forward it. `has_output`: whether it contains generated text or
    /// tool calls.
    pub(super) fn rewrite_event(&mut self, payload: &[u8], has_output: bool) -> EventRewrite {
        let is_sampled = self.phase == AnswerPass::First && self.determinism == AnswerDeterminism::UntilFirstOutput;
        if has_output && is_sampled && self.failure.is_none() {
            // Known without reading the event.
            self.stop_verifying(ContinuationBlocker::Sampled);
        }
        if self.failure.is_some() {
            return if self.phase == AnswerPass::First { EventRewrite::Unchanged } else { EventRewrite::Hidden };
        }
        let Ok(Value::Object(mut event)) = serde_json::from_slice(payload) else {
            self.record_unreadable();
            return if self.phase == AnswerPass::First { EventRewrite::Unchanged } else { EventRewrite::Hidden };
        };
        let remainder = match self.api {
            Api::Chat | Api::Completions => self.choices(&mut event),
            Api::Messages => self.message(&mut event),
            Api::Responses => self.response(&mut event),
        };
        match (self.phase, remainder) {
            (AnswerPass::First, remainder) => {
                self.record_first_attempt(remainder.map(drop));
                EventRewrite::Unchanged
            }
            (AnswerPass::Replay, Ok(EventNovelty::New)) => EventRewrite::Replaced(self.serialize_event(event)),
            (AnswerPass::Replay, Ok(EventNovelty::Known)) => EventRewrite::Hidden,
            (AnswerPass::Replay, Err(_)) => {
                self.stop_verifying(ContinuationBlocker::Diverged);
                EventRewrite::Hidden
            }
        }
    }

    /// Records the result of reading an event of the first engine; stops recording where the answer cannot be replayed.
    fn record_first_attempt(&mut self, understood: Result<(), ContinuationBlocker>) {
        if understood.is_err() {
            self.stop_verifying(ContinuationBlocker::Unreadable);
        } else if let Err(defect) = self.check_replayable() {
            self.stop_verifying(defect);
        }
    }

    /// Drops the buffer and stops verifying.
    fn stop_verifying(&mut self, defect: ContinuationBlocker) {
        self.failure = self.failure.or(Some(defect));
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
