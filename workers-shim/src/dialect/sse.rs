//! A streamed answer, read while it passes: nothing is copied but events that are cut by a chunk's end.

use std::borrow::Cow;

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::answer::{Usage, UsageFields};

/// Longest event that is looked into; longer ones pass unread.
const LONGEST_EVENT: usize = 1 << 20;

/// The engine's error where it gives none.
const UNSPECIFIED: &str = "unspecified";

/// What is known of a stream so far.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StreamFacts {
    /// The engine's name for the answer.
    pub id: Option<String>,
    /// Events with output so far; engines send one a token or a few.
    pub outputs: u64,
    /// Why it ended; of several choices the last one's.
    pub finish: Option<String>,
    /// What it cost, once told.
    pub usage: Option<Usage>,
    /// The engine's own error event.
    pub error: Option<String>,
    /// `[DONE]` was seen, or the event that stands for it.
    pub done: bool,
    /// Events that could not be read.
    pub unread: u64,
}

impl StreamFacts {
    /// Whether the client can know that the answer is complete, or that it failed.
    pub fn ended(&self) -> bool {
        self.done || self.error.is_some()
    }
}

/// Whether the client is to see usage events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum UsageEvents {
    Shown,
    Hidden,
}

/// Reads a stream of server-sent events, chunk by chunk.
#[derive(Debug)]
pub struct SseScanner {
    facts: StreamFacts,
    usage: UsageEvents,
    /// An event whose end is not here yet, and how much of it was searched for that end.
    tail: BytesMut,
    searched: usize,
    /// Inside an event that is too long to keep.
    overlong: bool,
    /// Whether that one ends the answer, by its name.
    last: Option<Last>,
}

impl SseScanner {
    /// Forwards everything.
    pub fn new() -> Self {
        Self::with(UsageEvents::Shown)
    }

    /// Leaves out the event that tells nothing but usage, for clients that did not ask for it.
    pub fn hiding_usage() -> Self {
        Self::with(UsageEvents::Hidden)
    }

    fn with(usage: UsageEvents) -> Self {
        Self { facts: StreamFacts::default(), usage, tail: BytesMut::new(), searched: 0, overlong: false, last: None }
    }

    /// What is known so far.
    pub fn facts(&self) -> &StreamFacts {
        &self.facts
    }

    /// Whether the last event is complete, so that another one can follow.
    pub fn at_boundary(&self) -> bool {
        self.tail.is_empty() && !self.overlong
    }

    /// Reads a chunk, and appends to `out` what is to be forwarded: the chunk itself, or slices of it.
    pub fn push(&mut self, chunk: Bytes, out: &mut Vec<Bytes>) {
        if self.usage == UsageEvents::Shown {
            out.push(chunk.clone());
            self.take(chunk, &mut |_| {});
        } else {
            self.take(chunk, &mut |passes| out.push(passes));
        }
    }

    /// The stream is over: what is left of an incomplete event.
    pub fn finish(&mut self, out: &mut Vec<Bytes>) {
        let tail = std::mem::take(&mut self.tail).freeze();
        if self.usage == UsageEvents::Hidden && !tail.is_empty() {
            out.push(tail);
        }
    }

    fn take(&mut self, chunk: Bytes, pass: &mut dyn FnMut(Bytes)) {
        let bytes = if self.tail.is_empty() {
            chunk
        } else {
            self.tail.extend_from_slice(&chunk);
            // An end may be cut in the middle: three bytes back finds it.
            if event_end(&self.tail[self.searched.saturating_sub(3)..]).is_none() {
                return self.keep_tail(pass);
            }
            std::mem::take(&mut self.tail).freeze()
        };
        // Neighbouring events that pass are forwarded as one slice.
        let (mut unpassed, mut at) = (0, 0);
        while let Some(length) = event_end(&bytes[at..]) {
            let event = at..at + length;
            let overlong = std::mem::take(&mut self.overlong);
            if let Some(last) = self.last.take() {
                self.end(last);
            }
            let only_usage = !overlong && self.event(&bytes[event.clone()]);
            if only_usage && self.usage == UsageEvents::Hidden {
                if unpassed < at {
                    pass(bytes.slice(unpassed..at));
                }
                unpassed = event.end;
            }
            at = event.end;
        }
        if unpassed < at {
            pass(bytes.slice(unpassed..at));
        }
        self.tail = BytesMut::from(&bytes[at..]);
        self.keep_tail(pass);
    }

    /// Bounds what is kept: an event that grows too long passes unread.
    fn keep_tail(&mut self, pass: &mut dyn FnMut(Bytes)) {
        self.searched = self.tail.len();
        if self.overlong || self.tail.len() > LONGEST_EVENT {
            if !self.overlong {
                self.facts.unread += 1;
                self.last = ends_answer(name_of(&self.tail));
            }
            self.overlong = true;
            // The last bytes may be the first of the event's end.
            let kept = self.tail.split_off(self.tail.len().saturating_sub(3));
            let passes = std::mem::replace(&mut self.tail, kept).freeze();
            self.searched = 0;
            if !passes.is_empty() {
                pass(passes);
            }
        }
    }

    /// Reads one event; true if it tells nothing but usage.
    fn event(&mut self, event: &[u8]) -> bool {
        let mut only_usage = false;
        for line in event.split(|byte| *byte == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let Some(payload) = line.strip_prefix(b"data:") else { continue };
            let payload = payload.trim_ascii();
            if payload == b"[DONE]" {
                self.facts.done = true;
            } else {
                only_usage = self.payload(payload);
            }
        }
        only_usage
    }

    fn end(&mut self, last: Last) {
        self.facts.done = true;
        if last == Last::Failed {
            self.facts.error.get_or_insert_with(|| UNSPECIFIED.into());
        }
    }

    fn payload(&mut self, payload: &[u8]) -> bool {
        let Ok(chunk) = serde_json::from_slice::<Chunk>(payload) else {
            self.facts.unread += 1;
            return false;
        };
        let kind = chunk.r#type.as_deref().unwrap_or_default();
        let inner = chunk.response.or(chunk.message).and_then(|raw| serde_json::from_str::<Inner>(raw.get()).ok());
        let inner = inner.unwrap_or_default();
        if self.facts.id.is_none() {
            self.facts.id = chunk.id.or(inner.id);
        }
        if let Some(error) = chunk.error.or(inner.error).or_else(|| (kind == "error").then(EngineError::default)) {
            self.facts.error = Some(error.message.unwrap_or_else(|| UNSPECIFIED.into()));
        }
        if let Some(last) = ends_answer(kind.as_bytes()) {
            self.end(last);
        }
        let before = self.facts.usage.unwrap_or_default();
        let usage = chunk.usage.or(inner.usage).map(|usage| usage.after(before));
        let choices = chunk.choices.unwrap_or_default();
        self.facts.outputs += u64::from(kind.ends_with("delta") && kind != "message_delta");
        self.facts.outputs += u64::from(choices.iter().any(Choice::has_output));
        if let Some(finish) = choices.iter().rev().find_map(|choice| choice.finish_reason.clone()) {
            self.facts.finish = Some(finish);
        }
        let only_usage = usage.is_some() && choices.is_empty();
        self.facts.usage = usage.or(self.facts.usage);
        only_usage
    }
}

impl Default for SseScanner {
    fn default() -> Self {
        Self::new()
    }
}

/// The name in an event's first line, where it stands there.
fn name_of(event: &[u8]) -> &[u8] {
    let line = event.split(|byte| *byte == b'\n').next().unwrap_or_default();
    line.strip_prefix(b"event:").unwrap_or_default().trim_ascii()
}

/// What the last event of an answer says of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Last {
    Complete,
    Failed,
}

/// What an event of this name says of the answer that it ends, as `[DONE]` does elsewhere; none where it ends none.
fn ends_answer(name: &[u8]) -> Option<Last> {
    match name {
        b"message_stop" | b"response.completed" | b"response.incomplete" => Some(Last::Complete),
        b"response.failed" => Some(Last::Failed),
        _ => None,
    }
}

/// Where the first event ends: after its blank line.
fn event_end(bytes: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(found) = bytes[from..].iter().position(|byte| *byte == b'\n') {
        let after = from + found + 1;
        match (bytes.get(after), bytes.get(after + 1)) {
            (Some(b'\n'), _) => return Some(after + 1),
            (Some(b'\r'), Some(b'\n')) => return Some(after + 2),
            _ => from = after,
        }
    }
    None
}

/// An event of any of the four APIs.
#[derive(Deserialize)]
struct Chunk<'a> {
    /// Of `/v1/messages` and `/v1/responses`.
    #[serde(borrow, default)]
    r#type: Option<Cow<'a, str>>,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    #[serde(default)]
    usage: Option<UsageFields>,
    #[serde(default)]
    error: Option<EngineError>,
    /// The answer so far of `/v1/responses`, and the head of one of `/v1/messages`; errors have a text of that name.
    #[serde(borrow, default)]
    response: Option<&'a RawValue>,
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
struct Inner {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    usage: Option<UsageFields>,
    #[serde(default)]
    error: Option<EngineError>,
}

#[derive(Deserialize, Default)]
struct EngineError {
    #[serde(default)]
    message: Option<String>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    delta: Option<Delta>,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
}

impl Choice {
    fn has_output(&self) -> bool {
        let text = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let delta = self.delta.as_ref().is_some_and(|delta| {
            let called = delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
            called || text(&delta.content) || text(&delta.reasoning) || text(&delta.reasoning_content)
        });
        text(&self.text) || delta
    }
}

#[cfg(test)]
mod tests;
