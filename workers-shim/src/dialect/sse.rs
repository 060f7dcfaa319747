//! A streamed answer, read while it passes: nothing is copied but events that are cut by a chunk's end.

mod budget;
mod chunk;
mod framing;

use bytes::{Bytes, BytesMut};

use super::answer::Usage;
use super::readback::event_for_client;
use super::retold::Retold;
use super::said::{Event, Kept, Lost, Passage, Said, ShownIds};
pub use budget::EventBudget;
use budget::Share;
use chunk::{Choice, Chunk, EngineError, Inner, TypedDelta};
use framing::{Last, ends_answer, event_end, name_of};

/// Longest event that is looked into; longer ones pass unread.
const LONGEST_EVENT: usize = 1 << 20;
/// The same where it is kept, and may hold the token ids of a prompt.
const LONGEST_WITH_IDS: usize = 16 << 20;
/// Codes from which on an error is the engine's and not the client's.
const ENGINES_FAULT: u64 = 500;

/// The engine's error where it gives none.
const UNSPECIFIED: &str = "unspecified";

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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum UsageEvents {
    #[default]
    Shown,
    Hidden,
}

/// Reads a stream of server-sent events, chunk by chunk.
#[derive(Debug, Default)]
pub struct SseScanner {
    facts: StreamFacts,
    usage: UsageEvents,
    /// An event whose end is not here yet, and how much of it was searched for that end.
    tail: BytesMut,
    searched: usize,
    /// What the tail takes of the memory for all streams.
    share: Share,
    /// Inside an event that is too long to keep.
    overlong: bool,
    /// Whether that one ends the answer, by its name.
    last: Option<Last>,
    /// What was said, where the answer may go on at another engine.
    said: Option<Box<Said>>,
    /// The same, where another engine may make all of it again.
    retold: Option<Box<Retold>>,
    /// The event by which the engine told that it failed, kept back.
    failure: Option<Bytes>,
}

impl SseScanner {
    /// Forwards everything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Leaves out the event that tells nothing but usage, for clients that did not ask for it.
    pub fn hiding_usage() -> Self {
        Self { usage: UsageEvents::Hidden, ..Self::default() }
    }

    /// Keeps what is said, so that another engine can go on. No event is forwarded then by which the engine says that it
    /// failed.
    pub fn keeping(self, said: Said) -> Self {
        Self { said: Some(Box::new(said)), ..self }
    }

    /// Keeps what is told, so that another engine can make it again and go on.
    pub fn retelling(self, retold: Retold) -> Self {
        Self { retold: Some(Box::new(retold)), ..self }
    }

    /// Keeps no more of an unfinished event than `budget` has room for: one that does not fit passes unread.
    pub fn within(self, budget: EventBudget) -> Self {
        Self { share: Share::of(budget), ..self }
    }

    fn is_kept(&self) -> bool {
        self.said.is_some() || self.retold.is_some()
    }

    /// After which token ids another engine can go on; none where it is to be asked for all of it.
    pub fn so_far(&self) -> Result<Option<Kept<'_>>, Lost> {
        let said = self.said.as_ref().map_or(Err(Lost::NoIds), |said| said.so_far());
        match (said, &self.retold) {
            (Err(Lost::Differs), _) | (_, None) | (Ok(_), _) => said,
            (Err(_), Some(retold)) => retold.repeatable().map(|()| None),
        }
    }

    /// Whether the engine that goes on says something else than the one before.
    pub fn differs(&self) -> bool {
        self.is_kept() && self.so_far() == Err(Lost::Differs)
    }

    /// What was said, where that is kept.
    pub fn said(&self) -> Option<&Said> {
        self.said.as_deref()
    }

    /// The event by which the engine told that it failed, where it was kept back.
    pub fn failure(&self) -> Option<&Bytes> {
        self.failure.as_ref()
    }

    /// Settles what a tokenizer shows to be delivered, so that little is made again.
    pub fn settle(&mut self, text_of: impl Fn(&[u32]) -> Option<String>) {
        if let Some(said) = &mut self.said {
            said.settle(text_of);
        }
    }

    /// What comes next is from another engine, which goes on.
    pub fn go_on(&mut self) {
        (self.tail, self.searched, self.overlong, self.last, self.failure) = Default::default();
        self.share.hold(0);
        (self.facts.error, self.facts.done) = (None, false);
        // Either by ids or all over again.
        self.said = self.said.take().filter(|said| said.so_far().is_ok());
        match (&mut self.said, &mut self.retold) {
            (Some(said), _) => {
                said.go_on();
                self.retold = None;
            }
            (None, Some(retold)) => retold.go_on(),
            (None, None) => {}
        }
    }

    /// What ends an answer whose last word was said, where its engine broke off before it told the rest.
    pub fn closing(&self) -> Option<Bytes> {
        let is_open = self.facts.error.is_none() || self.failure.is_some();
        let is_said = self.facts.finish.is_some() && !self.facts.done && is_open;
        let said = self.said.as_ref().filter(|said| is_said && said.so_far() != Err(Lost::Differs))?;
        let is_told = self.facts.usage.is_some() || self.usage == UsageEvents::Hidden;
        Some(said.closing(if is_told { UsageEvents::Hidden } else { UsageEvents::Shown }).into())
    }

    /// What is known so far.
    pub fn facts(&self) -> &StreamFacts {
        &self.facts
    }

    /// Reads a chunk, and appends to `out` what is to be forwarded: whole events, as slices of it where they can be. Of one
    /// that is too long to keep, what is there.
    pub fn push(&mut self, chunk: Bytes, out: &mut Vec<Bytes>) {
        self.take(chunk, &mut |passes| out.push(passes));
    }

    /// The stream is over: what is left of an incomplete event, which nothing can follow.
    pub fn finish(&mut self) -> Option<Bytes> {
        let tail = std::mem::take(&mut self.tail).freeze();
        (!self.is_kept() && !tail.is_empty()).then_some(tail)
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
            let passage = if overlong { Passage::Same } else { self.told(bytes.slice(event.clone())) };
            if passage != Passage::Same {
                if unpassed < at {
                    pass(bytes.slice(unpassed..at));
                }
                unpassed = event.end;
            }
            if let Passage::As(other) = passage {
                pass(other.into());
            }
            at = event.end;
        }
        if unpassed < at {
            pass(bytes.slice(unpassed..at));
        }
        self.tail = BytesMut::from(&bytes[at..]);
        self.keep_tail(pass);
    }

    /// Whether an answer is made again, so that nobody knows how much was told of what cannot be read.
    fn is_again(&self) -> bool {
        self.retold.as_ref().is_some_and(|retold| retold.is_again())
    }

    /// Bounds what is kept: an event that grows too long passes unread.
    fn keep_tail(&mut self, pass: &mut dyn FnMut(Bytes)) {
        self.searched = self.tail.len();
        let longest = if self.is_kept() { LONGEST_WITH_IDS } else { LONGEST_EVENT };
        if self.overlong || self.tail.len() > longest || !self.share.hold(self.tail.len()) {
            self.share.hold(0);
            if !self.overlong {
                self.unread();
                self.last = ends_answer(name_of(&self.tail));
            }
            self.overlong = true;
            // The last bytes may be the first of the event's end.
            let kept = self.tail.split_off(self.tail.len().saturating_sub(3));
            let passes = std::mem::replace(&mut self.tail, kept).freeze();
            self.searched = 0;
            if !passes.is_empty() && !self.is_again() {
                pass(passes);
            }
        }
    }

    /// Reads one event, without what no client may see of it, and without its prompt's token ids.
    fn told(&mut self, event: Bytes) -> Passage {
        let shown = event_for_client(&event);
        let whole = shown.as_ref().unwrap_or(&event);
        let short = self.said.as_mut().and_then(|said| said.lift(whole));
        let passage = self.event(short.as_ref().unwrap_or(whole).clone());
        let hides_ids = self.said.as_ref().is_some_and(|said| said.shown() == ShownIds::None);
        match (passage, short.filter(|_| hides_ids).or(shown)) {
            (Passage::Same, Some(other)) => Passage::As(other.into()),
            (passage, _) => passage,
        }
    }

    fn event(&mut self, event: Bytes) -> Passage {
        // The rest of an engine's answer that told that it failed.
        let mut passage = if self.failure.is_some() { Passage::Hidden } else { Passage::Same };
        for line in event.split(|byte| *byte == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let Some(payload) = line.strip_prefix(b"data:") else { continue };
            let payload = payload.trim_ascii();
            if payload == b"[DONE]" {
                let is_all = self.retold.as_mut().is_none_or(|retold| retold.over().is_ok());
                self.facts.done = self.failure.is_none() && is_all;
                if !is_all {
                    passage = Passage::Hidden;
                }
            } else if self.failure.is_none() {
                passage = self.payload(payload, &event);
            }
        }
        passage
    }

    fn unread(&mut self) {
        self.facts.unread += 1;
        if let Some(said) = &mut self.said {
            said.unread();
        }
        if let Some(retold) = &mut self.retold {
            retold.unread();
        }
    }

    fn end(&mut self, last: Last) {
        self.facts.done = true;
        if last == Last::Failed {
            self.facts.error.get_or_insert_with(|| UNSPECIFIED.into());
        }
    }

    fn payload(&mut self, payload: &[u8], event: &Bytes) -> Passage {
        let Ok(chunk) = serde_json::from_slice::<Chunk>(payload) else {
            self.unread();
            return if self.is_again() { Passage::Hidden } else { Passage::Same };
        };
        let kind = chunk.r#type.as_deref().unwrap_or_default();
        let inner = chunk.response.or(chunk.message).and_then(|raw| serde_json::from_str::<Inner>(raw.get()).ok());
        let inner = inner.unwrap_or_default();
        if self.facts.id.is_none() {
            self.facts.id = chunk.id.or(inner.id);
        }
        if let Some(error) = chunk.error.or(inner.error).or_else(|| (kind == "error").then(EngineError::default)) {
            let is_the_engines =
                error.code.as_ref().and_then(serde_json::Value::as_u64).is_none_or(|code| code >= ENGINES_FAULT);
            self.facts.error = Some(error.message.unwrap_or_else(|| UNSPECIFIED.into()));
            if self.is_kept() && is_the_engines {
                self.failure = Some(event.clone());
                return Passage::Hidden;
            }
            if self.is_kept() {
                return Passage::Same;
            }
        }
        if let Some(last) = ends_answer(kind.as_bytes()) {
            self.end(last);
        }
        let before = self.facts.usage.unwrap_or_default();
        let usage = chunk.usage.or(inner.usage).map(|usage| usage.after(before));
        let usage = usage.map(|usage| self.said.as_ref().map_or(usage, |said| said.counted(usage)));
        let choices = chunk.choices.unwrap_or_default();
        self.facts.outputs += u64::from(kind.ends_with("delta") && kind != "message_delta");
        self.facts.outputs += u64::from(choices.iter().any(Choice::has_output));
        let text = choices.iter().map(Choice::text).sum::<usize>() + chunk.delta.map_or(0, TypedDelta::text);
        self.facts.text = self.facts.text.saturating_add(text as u64);
        if let Some(finish) = choices.iter().rev().find_map(|choice| choice.finish_reason.clone()) {
            self.facts.finish = Some(finish);
        }
        let only_usage = usage.is_some() && choices.is_empty();
        self.facts.usage = usage.or(self.facts.usage);
        let passage = self.noted(payload, event);
        if only_usage && self.usage == UsageEvents::Hidden { Passage::Hidden } else { passage }
    }

    /// Keeps what the event says, where that is kept.
    fn noted(&mut self, payload: &[u8], event: &Bytes) -> Passage {
        let retold = self.retold.as_mut().map_or(Passage::Same, |retold| retold.take(payload));
        let Some(said) = &mut self.said else { return retold };
        match serde_json::from_slice::<Event<'_>>(payload) {
            Ok(told) => said.take(event, told),
            Err(_) => {
                said.unread();
                Passage::Same
            }
        }
    }
}

#[cfg(test)]
mod tests;
