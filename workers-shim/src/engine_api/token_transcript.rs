//! Token ids of one answer, so that another engine can continue it, and the rewriting of that engine's events to match
//! the first one's.
//!
//! Text and token ids do not arrive together: an engine holds back an incomplete character, or the possible beginning
//! of a stop string, while it already reports the id. So ids count as *settled* only as far as their text is known to
//! be delivered. The continuation starts after the settled ids; text delivered beyond them is generated again, compared
//! byte for byte and left out. The continued prompt must not end within a character: vLLM would then emit the whole
//! prompt as text.

mod prompt_ids;
mod resumable_event;

use std::io::Write as _;
use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;
use serde_json::value::RawValue;
use vocabulary::Tokens;

use super::answer::TokenUsage;
use super::request::Api;
use super::{ClientTokenIdVisibility, ClientUsageVisibility};
use prompt_ids::ExtractedPromptIds;
pub(super) use resumable_event::{AnswerChoiceFields, AnswerEventFields};

/// Maximum number of token ids kept for one answer, prompt included; 4 bytes each.
const MAX_TOKEN_IDS: usize = 1 << 20;
/// Maximum number of bytes of text to generate again.
const MAX_UNSETTLED_BYTES: usize = 64 << 10;
/// Maximum number of end positions to try with a tokenizer.
const MAX_SETTLE_ATTEMPTS: usize = 64;

/// When an engine delivers text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TextTiming {
    /// As soon as its characters are complete.
    WithIds,
    /// Later: the possible beginning of a stop string is held back.
    AfterIds,
}

/// Why another engine cannot continue an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ContinuationBlocker {
    /// The engine reports no token ids.
    NoIds,
    /// The engine parses reasoning or tool calls from the text.
    ParsedOutput,
    /// There are more ids or more text than is kept.
    TooLong,
    /// The second engine's output differs.
    Diverged,
    /// Sampling without a seed has begun, so another engine would sample differently.
    Sampled,
    /// The engine's events are inconsistent.
    Unreadable,
}

impl ContinuationBlocker {
    /// Returns the reason as text that follows "because".
    pub fn reason(self) -> &'static str {
        match self {
            ContinuationBlocker::NoIds => "its engine told no token ids",
            ContinuationBlocker::ParsedOutput => "it holds, or may begin with, thoughts or tool calls",
            ContinuationBlocker::TooLong => "it is too long to be kept",
            ContinuationBlocker::Diverged => "another worker went on differently",
            ContinuationBlocker::Sampled => "it is drawn without a seed",
            ContinuationBlocker::Unreadable => "its events do not go together",
        }
    }
}

/// How an event is forwarded to the client.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum EventRewrite {
    Unchanged,
    /// Not at all.
    Hidden,
    /// As this event.
    Replaced(Vec<u8>),
}

/// Fields that are equal in all events of an answer, with the first engine's values.
#[derive(Debug)]
struct SharedEventFields {
    id: Box<RawValue>,
    created: Box<RawValue>,
    model: Box<RawValue>,
}

/// Which engine's events are read now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AnsweringEngine {
    /// The one that got the client's own request.
    First,
    /// One that continues after this many ids of the answer, as a completion.
    Continuation { after: usize },
}

/// Token ids of a prompt, and those of its answer after which it can be continued.
pub type ResumableTokenIds<'a> = (&'a [u32], &'a [u32]);

/// The token ids of one answer so far.
#[derive(Debug)]
pub struct TokenTranscript {
    api: Api,
    visible_ids: ClientTokenIdVisibility,
    text_delivery: TextTiming,
    source: AnsweringEngine,
    head: Option<SharedEventFields>,
    prompt: Vec<u32>,
    ids: Vec<u32>,
    /// How many of `ids` have their text delivered.
    settled: usize,
    /// Text delivered after the settled ids.
    unsettled_text: String,
    /// Text and ids that were delivered and have to be generated again.
    to_regenerate: (String, Vec<u32>),
    failure: Option<ContinuationBlocker>,
}

impl TokenTranscript {
    /// Creates an empty transcript of an answer with one choice.
    pub fn new(api: Api, visible_ids: ClientTokenIdVisibility, text_delivery: TextTiming) -> Self {
        Self {
            api,
            visible_ids,
            text_delivery,
            source: AnsweringEngine::First,
            head: None,
            prompt: Vec::new(),
            ids: Vec::new(),
            settled: 0,
            unsettled_text: String::new(),
            to_regenerate: Default::default(),
            failure: None,
        }
    }

    /// Returns the prompt's token ids and the settled ids of the answer. None if nothing was received and the request
    /// can be repeated as it is.
    pub fn resume_ids(&self) -> Result<Option<ResumableTokenIds<'_>>, ContinuationBlocker> {
        match (self.failure, &self.head) {
            (Some(defect), _) => Err(defect),
            (None, None) => Ok(None),
            (None, Some(_)) if self.prompt.is_empty() => Err(ContinuationBlocker::NoIds),
            // The next output may be reasoning, which a completion does not separate from the text.
            (None, Some(_)) if self.api == Api::Chat && self.settled == 0 && self.unsettled_text.is_empty() => {
                Err(ContinuationBlocker::ParsedOutput)
            }
            (None, Some(_)) => Ok(Some((&self.prompt, &self.ids[..self.settled]))),
        }
    }

    /// Returns the tokens of prompt and answer; None if they are not known.
    pub fn usage(&self) -> Option<TokenUsage> {
        let is_known = !self.prompt.is_empty() && matches!(self.failure, None | Some(ContinuationBlocker::Diverged));
        let tokens = |ids: &[u32]| Tokens(ids.len() as u64);
        is_known.then(|| TokenUsage { prompt: tokens(&self.prompt), completion: tokens(&self.ids), cached: None })
    }

    /// Uses a tokenizer to settle ids whose text was delivered. `text_of` decodes token ids.
    pub(super) fn settle_text(&mut self, text_of: impl Fn(&[u32]) -> Option<String>) {
        let is_open = self.failure.is_none() && self.to_regenerate.0.is_empty() && !self.unsettled_text.is_empty();
        let all = self.ids.len();
        let longest_first = (self.settled + 1..=all).rev().take(MAX_SETTLE_ATTEMPTS).filter(|_| is_open);
        let found = longest_first.filter_map(|end| Some((end, text_of(&self.ids[self.settled..end])?)));
        let is_whole = |text: &str| !text.is_empty() && !text.ends_with(char::REPLACEMENT_CHARACTER);
        let delivered =
            found.into_iter().find(|(_, text)| is_whole(text) && self.unsettled_text.starts_with(text.as_str()));
        if let Some((end, text)) = delivered {
            self.settled = end;
            self.unsettled_text.drain(..text.len());
        }
    }

    /// Continues with another engine's stream: a completion of [`Self::resume_ids`], or the same request.
    pub(super) fn switch_engine(&mut self) {
        if self.head.is_some() {
            let mut unsettled = self.ids.split_off(self.settled);
            unsettled.append(&mut self.to_regenerate.1);
            if self.visible_ids == ClientTokenIdVisibility::None {
                unsettled.clear();
            }
            self.to_regenerate = (self.unsettled_text.clone(), unsettled);
            self.source = AnsweringEngine::Continuation { after: self.settled };
        }
    }

    /// Converts an engine's usage to that of the whole answer.
    pub(super) fn whole_answer_usage(&self, usage: TokenUsage) -> TokenUsage {
        let AnsweringEngine::Continuation { after } = self.source else { return usage };
        let prompt = Tokens(self.prompt.len() as u64);
        let completion = usage.completion + Tokens(after as u64);
        TokenUsage { prompt, completion, cached: usage.cached.map(|cached| cached.min(prompt)) }
    }

    /// Records that an event could not be read.
    pub(super) fn record_unreadable(&mut self) {
        self.failure = self.failure.or(Some(ContinuationBlocker::TooLong));
    }

    /// Returns the closing events of an answer whose finish reason was received but whose stream broke off: usage,
    /// where it is shown, and `[DONE]`.
    pub(super) fn closing_events(&self, usage: ClientUsageVisibility) -> Vec<u8> {
        let mut out = Vec::new();
        if let (Some(usage), ClientUsageVisibility::Shown, Some(head)) = (self.usage(), usage, &self.head) {
            out = self.write_event_head(head);
            out.extend_from_slice(b"[]");
            write_event_end(&mut out, Some(usage));
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        out
    }

    /// Stores the prompt's token ids if the event contains them, and returns the event without them.
    pub(super) fn extract_prompt_ids(&mut self, event: &[u8]) -> Option<Bytes> {
        let is_awaited = self.source == AnsweringEngine::First && self.prompt.is_empty() && self.failure.is_none();
        let ExtractedPromptIds { event, ids } = is_awaited.then(|| ExtractedPromptIds::of(event)).flatten()?;
        if ids.len() > MAX_TOKEN_IDS {
            self.failure = Some(ContinuationBlocker::TooLong);
        } else {
            self.prompt = ids;
        }
        Some(event)
    }

    /// Returns whether nothing of an event is needed any more: the answer cannot be continued, and the event has nothing
    /// to hide.
    pub(super) fn passes_unread(&self, payload: &[u8]) -> bool {
        // Made once: a search of a short event takes less time than making it.
        static NAME: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("token_ids"));
        self.failure.is_some()
            && self.source == AnsweringEngine::First
            && (self.visible_ids == ClientTokenIdVisibility::All || NAME.find(payload).is_none())
    }

    /// Returns whether the client sees token ids.
    pub(super) fn visible_ids(&self) -> ClientTokenIdVisibility {
        self.visible_ids
    }

    /// Records an event and returns how to forward it. The prompt's token ids were already extracted. `event_fields`
    /// borrows from `event`.
    pub(super) fn rewrite_event(&mut self, event: &[u8], event_fields: AnswerEventFields<'_>) -> EventRewrite {
        if self.head.is_none()
            && let (Some(id), Some(created), Some(model)) = (event_fields.id, event_fields.created, event_fields.model)
        {
            self.head =
                Some(SharedEventFields { id: id.to_owned(), created: created.to_owned(), model: model.to_owned() });
        }
        match self.source {
            AnsweringEngine::First => self.rewrite_first_attempt(event, &event_fields),
            AnsweringEngine::Continuation { .. } => self.rewrite_continuation(event_fields),
        }
    }

    fn rewrite_first_attempt(&mut self, event: &[u8], event_fields: &AnswerEventFields<'_>) -> EventRewrite {
        let choice = event_fields.choice.as_ref();
        if let Some(choice) = choice {
            let ids = choice.token_ids.and_then(parse_ids);
            if choice.is_parsed() {
                self.failure = self.failure.or(Some(ContinuationBlocker::ParsedOutput));
            } else if ids.is_none() && !choice.text().is_empty() {
                self.failure = self.failure.or(Some(ContinuationBlocker::NoIds));
            }
            self.append(choice.text(), &ids.unwrap_or_default());
        }
        match self.visible_ids {
            ClientTokenIdVisibility::All => EventRewrite::Unchanged,
            ClientTokenIdVisibility::None => {
                // Engines may repeat them.
                let prompt = event_fields.prompt_token_ids.or(choice.and_then(|choice| choice.prompt_token_ids));
                hide_fields(event, prompt.into_iter().chain(choice.and_then(|choice| choice.token_ids)))
            }
        }
    }

    /// Appends text and ids. Ids that are generated again are already in `to_regenerate`.
    fn append(&mut self, text: &str, ids: &[u32]) {
        if self.failure.is_some() {
            return;
        }
        self.ids.extend_from_slice(ids);
        let (repeated_text, new) = text.split_at(text.len() - self.new_text(text).len());
        debug_assert!(self.to_regenerate.0.starts_with(repeated_text));
        self.to_regenerate.0.drain(..repeated_text.len());
        self.unsettled_text.push_str(new);
        // Only an id that came alone certainly ends with a complete character.
        if self.text_delivery == TextTiming::WithIds && ids.len() == 1 && !text.is_empty() {
            self.settled = self.ids.len();
            self.unsettled_text.clone_from(&self.to_regenerate.0);
        }
        if self.ids.len() + self.prompt.len() > MAX_TOKEN_IDS || self.unsettled_text.len() > MAX_UNSETTLED_BYTES {
            self.failure = Some(ContinuationBlocker::TooLong);
            (self.prompt, self.ids, self.settled) = Default::default();
        }
    }

    /// Returns the new part of a text that may begin with text generated again.
    fn new_text<'t>(&self, text: &'t str) -> &'t str {
        let repeated_text = &self.to_regenerate.0;
        if repeated_text.starts_with(text) { "" } else { text.strip_prefix(repeated_text.as_str()).unwrap_or(text) }
    }

    fn rewrite_continuation(&mut self, event_fields: AnswerEventFields<'_>) -> EventRewrite {
        let Some(head) = &self.head else { return EventRewrite::Unchanged };
        let usage = event_fields.usage.map(|usage| self.whole_answer_usage(usage));
        let mut out = self.write_event_head(head);
        let Some(choice) = &event_fields.choice else {
            out.extend_from_slice(b"[]");
            write_event_end(&mut out, usage);
            return EventRewrite::Replaced(out);
        };
        let ids = choice.token_ids.and_then(parse_ids).unwrap_or_default();
        let (text, repeated_text) = (choice.text(), &self.to_regenerate.0);
        let repeated = ids.len().min(self.to_regenerate.1.len());
        let repeats = repeated_text.starts_with(text) || text.starts_with(repeated_text.as_str());
        if !repeats || self.to_regenerate.1[..repeated] != ids[..repeated] {
            self.failure = Some(ContinuationBlocker::Diverged);
            return EventRewrite::Hidden;
        }
        let (new, new_ids) = (self.new_text(text), &ids[repeated..]);
        let shown = (self.visible_ids == ClientTokenIdVisibility::All).then_some(new_ids);
        self.write_choice(&mut out, choice, (new, shown));
        write_event_end(&mut out, usage);
        let is_nothing = new.is_empty() && shown.is_none_or(<[u32]>::is_empty) && choice.finish_reason.is_none();
        self.to_regenerate.1.drain(..repeated);
        self.append(text, &ids);
        if is_nothing { EventRewrite::Hidden } else { EventRewrite::Replaced(out) }
    }

    /// Writes an event up to its choices.
    fn write_event_head(&self, head: &SharedEventFields) -> Vec<u8> {
        let object = if self.api == Api::Chat { "chat.completion.chunk" } else { "text_completion" };
        let SharedEventFields { id, created, model } = head;
        format!(r#"data: {{"id":{id},"object":"{object}","created":{created},"model":{model},"choices":"#).into_bytes()
    }

    /// Writes a list of one choice, in vLLM 0.32's format.
    fn write_choice(&self, out: &mut Vec<u8>, choice: &AnswerChoiceFields<'_>, (text, ids): (&str, Option<&[u32]>)) {
        let raw = |raw: Option<&RawValue>| raw.map_or("null", RawValue::get).to_owned();
        let text = serde_json::to_string(text).expect("a text is always JSON");
        let ids = serde_json::to_string(&ids).expect("numbers are always JSON");
        let finish = serde_json::to_string(&choice.finish_reason.as_deref()).expect("a text is always JSON");
        let stop = raw(choice.stop_reason);
        let written = if self.api == Api::Chat {
            let stop = if choice.finish_reason.is_some() { format!(r#""stop_reason":{stop},"#) } else { String::new() };
            write!(
                out,
                r#"[{{"index":0,"delta":{{"content":{text}}},"logprobs":null,"finish_reason":{finish},{stop}"token_ids":{ids}}}]"#
            )
        } else {
            write!(
                out,
                r#"[{{"index":0,"text":{text},"logprobs":null,"finish_reason":{finish},"stop_reason":{stop},"prompt_token_ids":null,"token_ids":{ids}}}]"#
            )
        };
        written.expect("writing to memory cannot fail");
    }
}

/// Writes the end of an event after its choices.
fn write_event_end(out: &mut Vec<u8>, usage: Option<TokenUsage>) {
    if let Some(TokenUsage { prompt, completion, cached }) = usage {
        let total = prompt + completion;
        let details = cached
            .map_or_else(String::new, |cached| format!(r#","prompt_tokens_details":{{"cached_tokens":{cached}}}"#));
        write!(
            out,
            r#","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}{details}}}"#
        )
        .expect("writing to memory cannot fail");
    }
    out.extend_from_slice(b"}\n\n");
}

/// Parses token ids; None if it is not a list of them.
fn parse_ids(raw: &RawValue) -> Option<Vec<u32>> {
    serde_json::from_str(raw.get()).ok()
}

/// Replaces these values by `null`, as if they had not been requested.
fn hide_fields<'a>(event: &[u8], places: impl Iterator<Item = &'a RawValue>) -> EventRewrite {
    let start = event.as_ptr() as usize;
    let range = |raw: &RawValue| {
        let at = raw.get().as_ptr() as usize - start;
        at..at + raw.get().len()
    };
    let mut cut: Vec<_> = places.map(range).collect();
    cut.sort_unstable_by_key(|range| range.start);
    if cut.is_empty() {
        return EventRewrite::Unchanged;
    }
    let (mut out, mut from) = (Vec::with_capacity(event.len()), 0);
    for range in cut {
        out.extend_from_slice(&event[from..range.start]);
        out.extend_from_slice(b"null");
        from = range.end;
    }
    out.extend_from_slice(&event[from..]);
    EventRewrite::Replaced(out)
}

#[cfg(test)]
mod tests;
