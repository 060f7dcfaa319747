//! A streamed answer, read while it passes: nothing is copied but events that are cut by a chunk's end.

mod budget;
mod chunk;
mod framing;

use bytes::{Bytes, BytesMut};

use super::answer::TokenUsage;
use super::replay_verifier::ReplayVerifier;
use super::reverse_pull::redact_event;
use super::token_transcript::{
    EventRewrite, NotResumable, ResumableEvent, ResumableTokenIds, TokenIdVisibility, TokenTranscript,
};
use budget::BudgetShare;
pub use budget::EventBudget;
use chunk::{EngineError, NestedAnswer, StreamChoice, StreamChunk, TypedDelta};
use framing::{FinalEvent, event_end, event_name, final_event};

/// Longest event that is looked into; longer ones pass unread.
const MAX_EVENT_BYTES: usize = 1 << 20;
/// The same where it is kept, and may hold the token ids of a prompt.
const MAX_EVENT_BYTES_WITH_IDS: usize = 16 << 20;
/// Codes from which on an error is the engine's and not the client's.
const MIN_ENGINE_ERROR_CODE: u64 = 500;

/// The engine's error where it gives none.
const UNSPECIFIED_ERROR: &str = "unspecified";

/// What is known of a stream so far.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StreamFacts {
    /// The engine's name for the answer.
    pub id: Option<String>,
    /// Events with output so far; engines send one a token or a few.
    pub outputs: u64,
    /// Bytes of the text in them.
    pub text: u64,
    /// Why it ended; of several choices the last one's.
    pub finish: Option<String>,
    /// What it cost, once told.
    pub usage: Option<TokenUsage>,
    /// The engine's own error event.
    pub error: Option<String>,
    /// `[DONE]` was seen, or the event that stands for it.
    pub done: bool,
    /// Events that could not be read.
    pub unread_events: u64,
}

impl StreamFacts {
    /// Whether the client can know that the answer is complete, or that it failed.
    pub fn ended(&self) -> bool {
        self.done || self.error.is_some()
    }
}

/// Whether the client is to see usage events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum UsageEventVisibility {
    #[default]
    Shown,
    Hidden,
}

/// Reads a stream of server-sent events, chunk by chunk.
#[derive(Debug, Default)]
pub struct SseScanner {
    facts: StreamFacts,
    usage: UsageEventVisibility,
    /// An event whose end is not here yet, and how much of it was searched for that end.
    tail: BytesMut,
    searched: usize,
    /// What the tail takes of the memory for all streams.
    budget: BudgetShare,
    /// Inside an event that is too long to keep.
    overlong: bool,
    /// Whether that one ends the answer, by its name.
    final_event: Option<FinalEvent>,
    /// What was said, where the answer may go on at another engine.
    transcript: Option<Box<TokenTranscript>>,
    /// The same, where another engine may make all of it again.
    replay_verifier: Option<Box<ReplayVerifier>>,
    /// The event by which the engine told that it failed, kept back.
    withheld_error: Option<Bytes>,
}

impl SseScanner {
    /// Forwards everything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Leaves out the event that tells nothing but usage, for clients that did not ask for it.
    pub fn hiding_usage() -> Self {
        Self { usage: UsageEventVisibility::Hidden, ..Self::default() }
    }

    /// Keeps what is said, so that another engine can go on. No event is forwarded then by which the engine says that it
    /// failed.
    pub fn with_transcript(self, said: TokenTranscript) -> Self {
        Self { transcript: Some(Box::new(said)), ..self }
    }

    /// Keeps what is told, so that another engine can make it again and go on.
    pub fn with_replay_verifier(self, retold: ReplayVerifier) -> Self {
        Self { replay_verifier: Some(Box::new(retold)), ..self }
    }

    /// Keeps no more of an unfinished event than `budget` has room for: one that does not fit passes unread.
    pub fn with_budget(self, budget: EventBudget) -> Self {
        Self { budget: BudgetShare::of(budget), ..self }
    }

    fn is_resumable(&self) -> bool {
        self.transcript.is_some() || self.replay_verifier.is_some()
    }

    /// After which token ids another engine can go on; none where it is to be asked for all of it.
    pub fn resume_ids(&self) -> Result<Option<ResumableTokenIds<'_>>, NotResumable> {
        let said = self.transcript.as_ref().map_or(Err(NotResumable::NoIds), |said| said.resume_ids());
        match (said, &self.replay_verifier) {
            (Err(NotResumable::Diverged), _) | (_, None) | (Ok(_), _) => said,
            (Err(_), Some(retold)) => retold.check_replayable().map(|()| None),
        }
    }

    /// Whether the engine that goes on says something else than the one before.
    pub fn has_diverged(&self) -> bool {
        self.is_resumable() && self.resume_ids() == Err(NotResumable::Diverged)
    }

    /// What was said, where that is kept.
    pub fn transcript(&self) -> Option<&TokenTranscript> {
        self.transcript.as_deref()
    }

    /// The event by which the engine told that it failed, where it was kept back.
    pub fn failure(&self) -> Option<&Bytes> {
        self.withheld_error.as_ref()
    }

    /// Settles what a tokenizer shows to be delivered, so that little is made again.
    pub fn settle_text(&mut self, text_of: impl Fn(&[u32]) -> Option<String>) {
        if let Some(said) = &mut self.transcript {
            said.settle_text(text_of);
        }
    }

    /// What comes next is from another engine, which goes on.
    pub fn switch_engine(&mut self) {
        (self.tail, self.searched, self.overlong, self.final_event, self.withheld_error) = Default::default();
        self.budget.reserve(0);
        (self.facts.error, self.facts.done) = (None, false);
        // Either by ids or all over again.
        self.transcript = self.transcript.take().filter(|said| said.resume_ids().is_ok());
        match (&mut self.transcript, &mut self.replay_verifier) {
            (Some(said), _) => {
                said.switch_engine();
                self.replay_verifier = None;
            }
            (None, Some(retold)) => retold.switch_engine(),
            (None, None) => {}
        }
    }

    /// What ends an answer whose last word was said, where its engine broke off before it told the rest.
    pub fn closing_events(&self) -> Option<Bytes> {
        let is_open = self.facts.error.is_none() || self.withheld_error.is_some();
        let is_said = self.facts.finish.is_some() && !self.facts.done && is_open;
        let said =
            self.transcript.as_ref().filter(|said| is_said && said.resume_ids() != Err(NotResumable::Diverged))?;
        let is_told = self.facts.usage.is_some() || self.usage == UsageEventVisibility::Hidden;
        Some(
            said.closing_events(if is_told { UsageEventVisibility::Hidden } else { UsageEventVisibility::Shown })
                .into(),
        )
    }

    /// What is known so far.
    pub fn facts(&self) -> &StreamFacts {
        &self.facts
    }

    /// Reads a chunk, and appends to `out` what is to be forwarded: whole events, as slices of it where they can be. Of one
    /// that is too long to keep, what is there.
    pub fn push(&mut self, chunk: Bytes, out: &mut Vec<Bytes>) {
        self.scan_chunk(chunk, &mut |passes| out.push(passes));
    }

    /// The stream is over: what is left of an incomplete event, which nothing can follow.
    pub fn finish(&mut self) -> Option<Bytes> {
        let tail = std::mem::take(&mut self.tail).freeze();
        (!self.is_resumable() && !tail.is_empty()).then_some(tail)
    }

    fn scan_chunk(&mut self, chunk: Bytes, pass: &mut dyn FnMut(Bytes)) {
        let bytes = if self.tail.is_empty() {
            chunk
        } else {
            self.tail.extend_from_slice(&chunk);
            // An end may be cut in the middle: three bytes back finds it.
            if event_end(&self.tail[self.searched.saturating_sub(3)..]).is_none() {
                return self.bound_tail(pass);
            }
            std::mem::take(&mut self.tail).freeze()
        };
        // Neighbouring events that pass are forwarded as one slice.
        let (mut unpassed, mut at) = (0, 0);
        while let Some(length) = event_end(&bytes[at..]) {
            let event = at..at + length;
            let overlong = std::mem::take(&mut self.overlong);
            if let Some(last) = self.final_event.take() {
                self.record_end(last);
            }
            let passage =
                if overlong { EventRewrite::Unchanged } else { self.rewrite_event(bytes.slice(event.clone())) };
            if passage != EventRewrite::Unchanged {
                if unpassed < at {
                    pass(bytes.slice(unpassed..at));
                }
                unpassed = event.end;
            }
            if let EventRewrite::Replaced(other) = passage {
                pass(other.into());
            }
            at = event.end;
        }
        if unpassed < at {
            pass(bytes.slice(unpassed..at));
        }
        self.tail = BytesMut::from(&bytes[at..]);
        self.bound_tail(pass);
    }

    /// Whether an answer is made again, so that nobody knows how much was told of what cannot be read.
    fn is_replaying(&self) -> bool {
        self.replay_verifier.as_ref().is_some_and(|retold| retold.is_replaying())
    }

    /// Bounds what is kept: an event that grows too long passes unread.
    fn bound_tail(&mut self, pass: &mut dyn FnMut(Bytes)) {
        self.searched = self.tail.len();
        let longest = if self.is_resumable() { MAX_EVENT_BYTES_WITH_IDS } else { MAX_EVENT_BYTES };
        if self.overlong || self.tail.len() > longest || !self.budget.reserve(self.tail.len()) {
            self.budget.reserve(0);
            if !self.overlong {
                self.record_unreadable();
                self.final_event = final_event(event_name(&self.tail));
            }
            self.overlong = true;
            // The last bytes may be the first of the event's end.
            let kept = self.tail.split_off(self.tail.len().saturating_sub(3));
            let passes = std::mem::replace(&mut self.tail, kept).freeze();
            self.searched = 0;
            if !passes.is_empty() && !self.is_replaying() {
                pass(passes);
            }
        }
    }

    /// Reads one event, without what no client may see of it, and without its prompt's token ids.
    fn rewrite_event(&mut self, event: Bytes) -> EventRewrite {
        let shown = redact_event(&event);
        let whole = shown.as_ref().unwrap_or(&event);
        let short = self.transcript.as_mut().and_then(|said| said.extract_prompt_ids(whole));
        let passage = self.read_event(short.as_ref().unwrap_or(whole).clone());
        let hides_ids = self.transcript.as_ref().is_some_and(|said| said.visible_ids() == TokenIdVisibility::None);
        match (passage, short.filter(|_| hides_ids).or(shown)) {
            (EventRewrite::Unchanged, Some(other)) => EventRewrite::Replaced(other.into()),
            (passage, _) => passage,
        }
    }

    fn read_event(&mut self, event: Bytes) -> EventRewrite {
        // The rest of an engine's answer that told that it failed.
        let mut passage = if self.withheld_error.is_some() { EventRewrite::Hidden } else { EventRewrite::Unchanged };
        for line in event.split(|byte| *byte == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let Some(payload) = line.strip_prefix(b"data:") else { continue };
            let payload = payload.trim_ascii();
            if payload == b"[DONE]" {
                let is_all = self.replay_verifier.as_mut().is_none_or(|retold| retold.finish_stream().is_ok());
                self.facts.done = self.withheld_error.is_none() && is_all;
                if !is_all {
                    passage = EventRewrite::Hidden;
                }
            } else if self.withheld_error.is_none() {
                passage = self.read_payload(payload, &event);
            }
        }
        passage
    }

    fn record_unreadable(&mut self) {
        self.facts.unread_events += 1;
        if let Some(said) = &mut self.transcript {
            said.record_unreadable();
        }
        if let Some(retold) = &mut self.replay_verifier {
            retold.record_unreadable();
        }
    }

    fn record_end(&mut self, last: FinalEvent) {
        self.facts.done = true;
        if last == FinalEvent::Failed {
            self.facts.error.get_or_insert_with(|| UNSPECIFIED_ERROR.into());
        }
    }

    fn read_payload(&mut self, payload: &[u8], event: &Bytes) -> EventRewrite {
        let Ok(chunk) = serde_json::from_slice::<StreamChunk>(payload) else {
            self.record_unreadable();
            return if self.is_replaying() { EventRewrite::Hidden } else { EventRewrite::Unchanged };
        };
        let kind = chunk.r#type.as_deref().unwrap_or_default();
        let inner =
            chunk.response.or(chunk.message).and_then(|raw| serde_json::from_str::<NestedAnswer>(raw.get()).ok());
        let inner = inner.unwrap_or_default();
        if self.facts.id.is_none() {
            self.facts.id = chunk.id.or(inner.id);
        }
        if let Some(error) = chunk.error.or(inner.error).or_else(|| (kind == "error").then(EngineError::default)) {
            let is_the_engines = error
                .code
                .as_ref()
                .and_then(serde_json::Value::as_u64)
                .is_none_or(|code| code >= MIN_ENGINE_ERROR_CODE);
            self.facts.error = Some(error.message.unwrap_or_else(|| UNSPECIFIED_ERROR.into()));
            if self.is_resumable() && is_the_engines {
                self.withheld_error = Some(event.clone());
                return EventRewrite::Hidden;
            }
            if self.is_resumable() {
                return EventRewrite::Unchanged;
            }
        }
        if let Some(last) = final_event(kind.as_bytes()) {
            self.record_end(last);
        }
        let before = self.facts.usage.unwrap_or_default();
        let usage = chunk.usage.or(inner.usage).map(|usage| usage.merged_after(before));
        let usage = usage.map(|usage| self.transcript.as_ref().map_or(usage, |said| said.whole_answer_usage(usage)));
        let choices = chunk.choices.unwrap_or_default();
        self.facts.outputs += u64::from(kind.ends_with("delta") && kind != "message_delta");
        self.facts.outputs += u64::from(choices.iter().any(StreamChoice::has_output));
        let text = choices.iter().map(StreamChoice::text).sum::<usize>() + chunk.delta.map_or(0, TypedDelta::text);
        self.facts.text = self.facts.text.saturating_add(text as u64);
        if let Some(finish) = choices.iter().rev().find_map(|choice| choice.finish_reason.clone()) {
            self.facts.finish = Some(finish);
        }
        let only_usage = usage.is_some() && choices.is_empty();
        self.facts.usage = usage.or(self.facts.usage);
        let passage = self.rewrite_payload(payload, event);
        if only_usage && self.usage == UsageEventVisibility::Hidden { EventRewrite::Hidden } else { passage }
    }

    /// Keeps what the event says, where that is kept.
    fn rewrite_payload(&mut self, payload: &[u8], event: &Bytes) -> EventRewrite {
        let retold =
            self.replay_verifier.as_mut().map_or(EventRewrite::Unchanged, |retold| retold.rewrite_event(payload));
        let Some(said) = &mut self.transcript else { return retold };
        match serde_json::from_slice::<ResumableEvent<'_>>(payload) {
            Ok(told) => said.rewrite_event(event, told),
            Err(_) => {
                said.record_unreadable();
                EventRewrite::Unchanged
            }
        }
    }
}

#[cfg(test)]
mod tests;
