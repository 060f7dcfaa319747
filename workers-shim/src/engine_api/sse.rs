//! Reads a streamed answer while forwarding it. Only events that a chunk boundary splits are copied.

mod budget;
mod chunk;

use bytes::{Bytes, BytesMut};

use super::answer::{TokenUsage, UsageFields};
use super::replay_verifier::ReplayVerifier;
use super::reverse_pull::redact_event;
use super::token_transcript::{
    AnswerEventFields, ContinuationBlocker, EventRewrite, ResumableTokenIds, TokenTranscript,
};
use super::{ClientTokenIdVisibility, ClientUsageVisibility};
pub use budget::{EventBufferBudget, EventBufferShare};
use chunk::{EngineError, NestedAnswer, StreamChunk};

/// Longest incomplete event that is kept, in bytes. The longest events of engines hold the token ids of a prompt, or the
/// whole response again.
const MAX_EVENT_BYTES: usize = 16 << 20;
/// Error codes from here on are the engine's fault, lower ones the client's.
const MIN_ENGINE_ERROR_CODE: u64 = 500;

/// The error text where the engine gives none.
const UNSPECIFIED_ERROR: &str = "unspecified";

/// Why an event is refused. Nothing of it is forwarded, and the stream ends before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, strum::AsRefStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum EventRefusal {
    /// The engine sends an event that is too long, or never ends one.
    #[error("an event of its answer is longer than {} MiB", MAX_EVENT_BYTES >> 20)]
    TooLong,
    /// The incomplete events of all streams take all the memory that they may.
    #[error("no memory is left for an incomplete event; see upstream.stream_buffer_limit")]
    NoMemory,
}

/// What is known about a stream so far.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StreamFacts {
    /// The engine's id of the answer.
    pub id: Option<String>,
    /// Events with output; engines send one for each token or for a few.
    pub outputs: u64,
    /// Bytes of generated text.
    pub text: u64,
    /// The finish reason; of several choices the last one's.
    pub finish: Option<String>,
    /// Token usage, once reported.
    pub usage: Option<TokenUsage>,
    /// The error that the engine reported in the stream.
    pub error: Option<String>,
    /// Whether `[DONE]` was seen, or the event that takes its place.
    pub done: bool,
    /// Events that could not be read.
    pub unread_events: u64,
}

impl StreamFacts {
    /// Returns whether the client can tell that the answer is complete or failed.
    pub fn ended(&self) -> bool {
        self.done || self.error.is_some()
    }
}

/// Filter of a stream of server-sent events: reads it chunk by chunk, and forwards what the client may see.
#[derive(Debug, Default)]
pub struct SseFilter {
    facts: StreamFacts,
    usage: ClientUsageVisibility,
    /// An incomplete event, and how many of its bytes were searched for its end.
    tail: BytesMut,
    searched: usize,
    /// The tail's share of the memory for all streams.
    budget: EventBufferShare,
    /// Why the current event was refused.
    refusal: Option<EventRefusal>,
    /// The token transcript, where another engine may continue the answer.
    transcript: Option<Box<TokenTranscript>>,
    /// The replay verifier, where another engine may generate the whole answer again.
    replay_verifier: Option<Box<ReplayVerifier>>,
    /// The engine's error event, not forwarded.
    withheld_error: Option<Bytes>,
}

impl SseFilter {
    /// Creates a filter that forwards everything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a filter that hides the usage event, for clients that did not request it.
    pub fn hiding_usage() -> Self {
        Self { usage: ClientUsageVisibility::Hidden, ..Self::default() }
    }

    /// Records token ids, so that another engine can continue. Events that report an engine's failure are then
    /// withheld.
    pub fn with_transcript(self, transcript: TokenTranscript) -> Self {
        Self { transcript: Some(Box::new(transcript)), ..self }
    }

    /// Records the answer, so that another engine can generate it again and continue.
    pub fn with_replay_verifier(self, verifier: ReplayVerifier) -> Self {
        Self { replay_verifier: Some(Box::new(verifier)), ..self }
    }

    /// Limits the memory for an incomplete event to `budget`; an event that does not fit is refused.
    pub fn with_budget(self, budget: EventBufferBudget) -> Self {
        Self { budget: EventBufferShare::of(budget), ..self }
    }

    fn is_resumable(&self) -> bool {
        self.transcript.is_some() || self.replay_verifier.is_some()
    }

    /// Returns the token ids after which another engine can continue; None where it has to generate the whole answer.
    pub fn resume_ids(&self) -> Result<Option<ResumableTokenIds<'_>>, ContinuationBlocker> {
        let resume_ids =
            self.transcript.as_ref().map_or(Err(ContinuationBlocker::NoIds), |transcript| transcript.resume_ids());
        match (resume_ids, &self.replay_verifier) {
            (Err(ContinuationBlocker::Diverged), _) | (_, None) | (Ok(_), _) => resume_ids,
            (Err(_), Some(verifier)) => verifier.check_replayable().map(|()| None),
        }
    }

    /// Returns whether the continuing engine's output differs from what the client has.
    pub fn has_diverged(&self) -> bool {
        self.is_resumable() && self.resume_ids() == Err(ContinuationBlocker::Diverged)
    }

    /// Returns the token transcript, where one is recorded.
    pub fn transcript(&self) -> Option<&TokenTranscript> {
        self.transcript.as_deref()
    }

    /// Returns the engine's error event, if one was withheld.
    pub fn failure(&self) -> Option<&Bytes> {
        self.withheld_error.as_ref()
    }

    /// Uses a tokenizer to settle delivered text (see [`TokenTranscript`]), so that less has to be generated again.
    pub fn settle_text(&mut self, text_of: impl Fn(&[u32]) -> Option<String>) {
        if let Some(transcript) = &mut self.transcript {
            transcript.settle_text(text_of);
        }
    }

    /// Continues with the stream of another engine.
    pub fn switch_engine(&mut self) {
        (self.tail, self.searched, self.refusal, self.withheld_error) = Default::default();
        self.budget.reserve(0);
        (self.facts.error, self.facts.done) = (None, false);
        // It continues either after the token ids or from the beginning.
        self.transcript = self.transcript.take().filter(|transcript| transcript.resume_ids().is_ok());
        match (&mut self.transcript, &mut self.replay_verifier) {
            (Some(transcript), _) => {
                transcript.switch_engine();
                self.replay_verifier = None;
            }
            (None, Some(verifier)) => verifier.switch_engine(),
            (None, None) => {}
        }
    }

    /// Returns the events that complete an answer whose finish reason was received before the engine's stream broke
    /// off.
    pub fn closing_events(&self) -> Option<Bytes> {
        let is_open = self.facts.error.is_none() || self.withheld_error.is_some();
        let is_answer_complete = self.facts.finish.is_some() && !self.facts.done && is_open;
        let transcript = self
            .transcript
            .as_ref()
            .filter(|transcript| is_answer_complete && transcript.resume_ids() != Err(ContinuationBlocker::Diverged))?;
        let is_usage_done = self.facts.usage.is_some() || self.usage == ClientUsageVisibility::Hidden;
        Some(
            transcript
                .closing_events(if is_usage_done {
                    ClientUsageVisibility::Hidden
                } else {
                    ClientUsageVisibility::Shown
                })
                .into(),
        )
    }

    /// Returns what is known so far.
    pub fn facts(&self) -> &StreamFacts {
        &self.facts
    }

    /// Reads a chunk and appends what is to be forwarded to `out`: whole events, as slices of the chunk where possible.
    /// After a refusal, the stream is read no further.
    pub fn push(&mut self, chunk: Bytes, out: &mut impl Extend<Bytes>) -> Result<(), EventRefusal> {
        self.refusal.map_or(Ok(()), Err)?;
        self.scan_chunk(chunk, out).inspect_err(|refusal| {
            (self.tail, self.searched, self.refusal) = (BytesMut::new(), 0, Some(*refusal));
            self.budget.reserve(0);
        })
    }

    /// Returns why an event was refused, if one was.
    pub fn refusal(&self) -> Option<EventRefusal> {
        self.refusal
    }

    /// Ends the stream. Returns the incomplete last event, if it is to be forwarded.
    pub fn finish(&mut self) -> Option<Bytes> {
        let tail = std::mem::take(&mut self.tail).freeze();
        (!self.is_resumable() && !tail.is_empty()).then(|| redact_event(&tail).unwrap_or(tail))
    }

    fn scan_chunk(&mut self, chunk: Bytes, out: &mut impl Extend<Bytes>) -> Result<(), EventRefusal> {
        let bytes = if self.tail.is_empty() {
            chunk
        } else {
            self.tail.extend_from_slice(&chunk);
            // The end marker may be split: searching from three bytes back finds it.
            if event_end(&self.tail[self.searched.saturating_sub(3)..]).is_none() {
                return self.bound_tail();
            }
            std::mem::take(&mut self.tail).freeze()
        };
        // Adjacent unchanged events are forwarded as one slice.
        let (mut unpassed, mut at) = (0, 0);
        while let Some(length) = event_end(&bytes[at..]) {
            let event = at..at + length;
            let passage = self.rewrite_event(bytes.slice(event.clone()));
            if passage != EventRewrite::Unchanged {
                if unpassed < at {
                    out.extend([bytes.slice(unpassed..at)]);
                }
                unpassed = event.end;
            }
            if let EventRewrite::Replaced(other) = passage {
                out.extend([Bytes::from(other)]);
            }
            at = event.end;
        }
        if unpassed < at {
            out.extend([bytes.slice(unpassed..at)]);
        }
        self.tail = BytesMut::from(&bytes[at..]);
        self.bound_tail()
    }

    /// Returns whether an answer is being replayed, so that unreadable events must not be forwarded.
    fn is_replaying(&self) -> bool {
        self.replay_verifier.as_ref().is_some_and(|verifier| verifier.is_replaying())
    }

    /// Refuses an incomplete event that grows too long.
    fn bound_tail(&mut self) -> Result<(), EventRefusal> {
        self.searched = self.tail.len();
        if self.tail.len() > MAX_EVENT_BYTES {
            return Err(EventRefusal::TooLong);
        }
        if self.budget.reserve(self.tail.len()) { Ok(()) } else { Err(EventRefusal::NoMemory) }
    }

    /// Reads one event, after removing the prompt's token ids and what no client may see.
    fn rewrite_event(&mut self, event: Bytes) -> EventRewrite {
        let shown = redact_event(&event);
        let whole = shown.as_ref().unwrap_or(&event);
        let short = self.transcript.as_mut().and_then(|transcript| transcript.extract_prompt_ids(whole));
        let passage = self.read_event(short.as_ref().unwrap_or(whole).clone());
        let hides_ids = self
            .transcript
            .as_ref()
            .is_some_and(|transcript| transcript.visible_ids() == ClientTokenIdVisibility::None);
        match (passage, short.filter(|_| hides_ids).or(shown)) {
            (EventRewrite::Unchanged, Some(other)) => EventRewrite::Replaced(other.into()),
            (passage, _) => passage,
        }
    }

    fn read_event(&mut self, event: Bytes) -> EventRewrite {
        // What follows an engine's error event is hidden, too.
        let mut passage = if self.withheld_error.is_some() { EventRewrite::Hidden } else { EventRewrite::Unchanged };
        for line in lines(&event) {
            let Some(payload) = line.strip_prefix(b"data:") else { continue };
            let payload = payload.trim_ascii();
            if payload == b"[DONE]" {
                let is_all = self.replay_verifier.as_mut().is_none_or(|verifier| verifier.finish_stream().is_ok());
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
        if let Some(transcript) = &mut self.transcript {
            transcript.record_unreadable();
        }
        if let Some(verifier) = &mut self.replay_verifier {
            verifier.record_unreadable();
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
            self.facts.id = chunk.id.and_then(|id| serde_json::from_str(id.get()).ok()).or(inner.id);
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
        if let Some(last) = final_event(kind) {
            self.record_end(last);
        }
        let before = self.facts.usage.unwrap_or_default();
        let usage = chunk.usage.or(inner.usage).map(|usage| usage.merged_after(before));
        let usage = usage
            .map(|usage| self.transcript.as_ref().map_or(usage, |transcript| transcript.whole_answer_usage(usage)));
        let choices = chunk.choices.unwrap_or_default();
        self.facts.outputs += u64::from(kind.ends_with("delta") && kind != "message_delta");
        self.facts.outputs += u64::from(choices.has_output);
        let text = choices.text + chunk.delta.unwrap_or_default().0;
        self.facts.text = self.facts.text.saturating_add(text as u64);
        let only_usage = usage.is_some() && choices.count == 0;
        self.facts.finish = choices.finish.or(self.facts.finish.take());
        self.facts.usage = usage.or(self.facts.usage);
        let fields = AnswerEventFields {
            id: chunk.id,
            created: chunk.created,
            model: chunk.model,
            choice: choices.first,
            prompt_token_ids: chunk.prompt_token_ids,
            usage: chunk.usage.map(UsageFields::usage),
        };
        let passage = self.rewrite_payload(payload, event, fields, text > 0 || choices.has_output);
        if only_usage && self.usage == ClientUsageVisibility::Hidden { EventRewrite::Hidden } else { passage }
    }

    /// Passes the event to the transcript or the replay verifier, where there is one.
    fn rewrite_payload(
        &mut self,
        payload: &[u8],
        event: &Bytes,
        fields: AnswerEventFields<'_>,
        has_output: bool,
    ) -> EventRewrite {
        let verifier = self.replay_verifier.as_mut();
        let rewrite = verifier.map_or(EventRewrite::Unchanged, |verifier| verifier.rewrite_event(payload, has_output));
        match &mut self.transcript {
            Some(transcript) if transcript.passes_unread(payload) => EventRewrite::Unchanged,
            Some(transcript) => transcript.rewrite_event(event, fields),
            None => rewrite,
        }
    }
}

/// Returns the lines of an event without their ends.
fn lines(event: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(event);
    std::iter::from_fn(move || {
        let text = rest?;
        let (line, after) = match memchr::memchr(b'\n', text) {
            Some(at) => (&text[..at], Some(&text[at + 1..])),
            None => (text, None),
        };
        rest = after;
        Some(line.strip_suffix(b"\r").unwrap_or(line))
    })
}

/// How an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FinalEvent {
    Complete,
    Failed,
}

/// Returns how an event of this name ends the answer (the equivalent of `[DONE]`); None if it does not end it.
fn final_event(name: &str) -> Option<FinalEvent> {
    match name {
        "message_stop" | "response.completed" | "response.incomplete" => Some(FinalEvent::Complete),
        "response.failed" => Some(FinalEvent::Failed),
        _ => None,
    }
}

/// Returns the offset after the blank line that ends the first event.
fn event_end(bytes: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(found) = memchr::memchr(b'\n', &bytes[from..]) {
        let after = from + found + 1;
        match (bytes.get(after), bytes.get(after + 1)) {
            (Some(b'\n'), _) => return Some(after + 1),
            (Some(b'\r'), Some(b'\n')) => return Some(after + 2),
            _ => from = after,
        }
    }
    None
}

#[cfg(test)]
mod tests;
