//! What an engine has said of one answer, by its token ids, so that another engine can go on with it; and that engine's
//! events in the words of the first one's.
//!
//! Text and ids do not come together: half a character, or what may be the beginning of a stop text, is held back while its
//! id is told. So ids count as *settled* only as far as their text is known to be delivered. An answer goes on after the
//! settled ones; text that was delivered beyond them is made again, compared byte for byte and left out. No prompt
//! may end within a character: vLLM would tell the whole prompt as text.

mod event;
mod prompt_ids;

use std::io::Write as _;

use bytes::Bytes;
use serde_json::value::RawValue;
use vocabulary::Tokens;

use super::answer::TokenUsage;
use super::request::Api;
use super::sse::UsageEventVisibility;
use event::ResumableChoice;
pub(super) use event::ResumableEvent;
use prompt_ids::ExtractedPromptIds;

/// Token ids of prompt and answer that are kept of one answer; 4 bytes each.
const MAX_TOKEN_IDS: usize = 1 << 20;
/// Bytes of text that are made again at most.
const MAX_UNSETTLED_BYTES: usize = 64 << 10;
/// Ends of the text that are looked at with a tokenizer.
const MAX_SETTLE_ATTEMPTS: usize = 64;

/// Whether the client is to see token ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenIdVisibility {
    /// It asked for them.
    All,
    /// We did.
    None,
}

/// How an engine tells text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TextDelivery {
    /// As soon as its characters are whole.
    WithIds,
    /// Later: what may begin a stop text is held back.
    AfterIds,
}

/// Why an answer cannot go on at another engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotResumable {
    /// The engine tells no token ids.
    NoIds,
    /// The engine makes thoughts or tool calls of the text.
    ParsedOutput,
    /// There are more ids or text than is kept.
    TooLong,
    /// What was to be made again came out differently.
    Diverged,
    /// It has words that were drawn, and without a seed others would be drawn.
    Sampled,
    /// The engine's events do not go together.
    Unreadable,
}

impl NotResumable {
    /// In words, after "because".
    pub fn reason(self) -> &'static str {
        match self {
            NotResumable::NoIds => "its engine told no token ids",
            NotResumable::ParsedOutput => "it holds, or may begin with, thoughts or tool calls",
            NotResumable::TooLong => "it is too long to be kept",
            NotResumable::Diverged => "another worker went on differently",
            NotResumable::Sampled => "it is drawn without a seed",
            NotResumable::Unreadable => "its events do not go together",
        }
    }
}

/// What becomes of an event on its way to the client.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum EventRewrite {
    Unchanged,
    /// It is left out.
    Hidden,
    /// This comes in its place.
    Replaced(Vec<u8>),
}

/// Fields that all events of an answer share, as the first engine wrote them.
#[derive(Debug)]
struct SharedEventFields {
    id: Box<RawValue>,
    created: Box<RawValue>,
    model: Box<RawValue>,
}

/// Whose events come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AnswerSource {
    /// The one that was asked by the client's own request.
    First,
    /// One that goes on after so many ids, as a completion.
    Continuation { after: usize },
}

/// Token ids of a prompt, and those of its answer after which it can go on.
pub type ResumableTokenIds<'a> = (&'a [u32], &'a [u32]);

/// One answer so far.
#[derive(Debug)]
pub struct TokenTranscript {
    api: Api,
    visible_ids: TokenIdVisibility,
    text_delivery: TextDelivery,
    source: AnswerSource,
    head: Option<SharedEventFields>,
    prompt: Vec<u32>,
    ids: Vec<u32>,
    /// Of them, those whose text is delivered.
    settled: usize,
    /// Text that was delivered after theirs.
    unsettled_text: String,
    /// Text and ids that were delivered and are to be made again.
    to_regenerate: (String, Vec<u32>),
    failure: Option<NotResumable>,
}

impl TokenTranscript {
    /// Nothing yet, of an answer with one choice.
    pub fn new(api: Api, visible_ids: TokenIdVisibility, text_delivery: TextDelivery) -> Self {
        Self {
            api,
            visible_ids,
            text_delivery,
            source: AnswerSource::First,
            head: None,
            prompt: Vec::new(),
            ids: Vec::new(),
            settled: 0,
            unsettled_text: String::new(),
            to_regenerate: Default::default(),
            failure: None,
        }
    }

    /// The prompt's token ids and the settled ones of the answer. None where nothing was said, and all can be asked for anew.
    pub fn resume_ids(&self) -> Result<Option<ResumableTokenIds<'_>>, NotResumable> {
        match (self.failure, &self.head) {
            (Some(lost), _) => Err(lost),
            (None, None) => Ok(None),
            (None, Some(_)) if self.prompt.is_empty() => Err(NotResumable::NoIds),
            // What comes next may be a thought, and no completion tells thoughts apart.
            (None, Some(_)) if self.api == Api::Chat && self.settled == 0 && self.unsettled_text.is_empty() => {
                Err(NotResumable::ParsedOutput)
            }
            (None, Some(_)) => Ok(Some((&self.prompt, &self.ids[..self.settled]))),
        }
    }

    /// Tokens of the prompt and of the answer; none where they are not known.
    pub fn usage(&self) -> Option<TokenUsage> {
        let is_known = !self.prompt.is_empty() && matches!(self.failure, None | Some(NotResumable::Diverged));
        let tokens = |ids: &[u32]| Tokens(ids.len() as u64);
        is_known.then(|| TokenUsage { prompt: tokens(&self.prompt), completion: tokens(&self.ids), cached: None })
    }

    /// Settles what a tokenizer shows to be delivered. `text_of` gives the text of token ids.
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

    /// What comes next is another engine's: that of a completion of [`Self::resume_ids`], or of the same request.
    pub(super) fn switch_engine(&mut self) {
        if self.head.is_some() {
            let mut unsettled = self.ids.split_off(self.settled);
            unsettled.append(&mut self.to_regenerate.1);
            if self.visible_ids == TokenIdVisibility::None {
                unsettled.clear();
            }
            self.to_regenerate = (self.unsettled_text.clone(), unsettled);
            self.source = AnswerSource::Continuation { after: self.settled };
        }
    }

    /// What an engine counted, as of the whole answer.
    pub(super) fn whole_answer_usage(&self, usage: TokenUsage) -> TokenUsage {
        let AnswerSource::Continuation { after } = self.source else { return usage };
        let prompt = Tokens(self.prompt.len() as u64);
        let completion = usage.completion + Tokens(after as u64);
        TokenUsage { prompt, completion, cached: usage.cached.map(|cached| cached.min(prompt)) }
    }

    /// Events are lost that nobody could read.
    pub(super) fn record_unreadable(&mut self) {
        self.failure = self.failure.or(Some(NotResumable::TooLong));
    }

    /// The end of an answer whose last word was said, where the engine did not tell it: its usage, where that is shown.
    pub(super) fn closing_events(&self, usage: UsageEventVisibility) -> Vec<u8> {
        let mut out = Vec::new();
        if let (Some(usage), UsageEventVisibility::Shown, Some(head)) = (self.usage(), usage, &self.head) {
            out = self.write_event_head(head);
            out.extend_from_slice(b"[]");
            write_event_end(&mut out, Some(usage));
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        out
    }

    /// Notes the prompt's token ids where an event tells them; what is left of it then.
    pub(super) fn extract_prompt_ids(&mut self, event: &[u8]) -> Option<Bytes> {
        let is_awaited = self.source == AnswerSource::First && self.prompt.is_empty() && self.failure.is_none();
        let ExtractedPromptIds { event, ids } = is_awaited.then(|| ExtractedPromptIds::of(event)).flatten()?;
        if ids.len() > MAX_TOKEN_IDS {
            self.failure = Some(NotResumable::TooLong);
        } else {
            self.prompt = ids;
        }
        Some(event)
    }

    /// Whether the client is to see token ids.
    pub(super) fn visible_ids(&self) -> TokenIdVisibility {
        self.visible_ids
    }

    /// Notes what an event tells, and says what becomes of it; the prompt's token ids were lifted. `event` holds all of `told`.
    pub(super) fn rewrite_event(&mut self, event: &[u8], told: ResumableEvent<'_>) -> EventRewrite {
        if self.head.is_none()
            && let (Some(id), Some(created), Some(model)) = (told.id, told.created, told.model)
        {
            self.head =
                Some(SharedEventFields { id: id.to_owned(), created: created.to_owned(), model: model.to_owned() });
        }
        match self.source {
            AnswerSource::First => self.rewrite_first_attempt(event, &told),
            AnswerSource::Continuation { .. } => self.rewrite_continuation(told),
        }
    }

    fn rewrite_first_attempt(&mut self, event: &[u8], told: &ResumableEvent<'_>) -> EventRewrite {
        let choice = told.choices.first();
        if let Some(choice) = choice {
            let said = choice.token_ids.and_then(parse_ids);
            if choice.is_parsed() {
                self.failure = self.failure.or(Some(NotResumable::ParsedOutput));
            } else if said.is_none() && !choice.text().is_empty() {
                self.failure = self.failure.or(Some(NotResumable::NoIds));
            }
            self.append(choice.text(), &said.unwrap_or_default());
        }
        match self.visible_ids {
            TokenIdVisibility::All => EventRewrite::Unchanged,
            TokenIdVisibility::None => {
                // Told once more, where they are.
                let prompt = told.prompt_token_ids.or(choice.and_then(|choice| choice.prompt_token_ids));
                hide_fields(event, prompt.into_iter().chain(choice.and_then(|choice| choice.token_ids)))
            }
        }
    }

    /// Notes new text and ids. What is made again is in `ahead` already.
    fn append(&mut self, text: &str, ids: &[u32]) {
        if self.failure.is_some() {
            return;
        }
        self.ids.extend_from_slice(ids);
        let (again, new) = text.split_at(text.len() - self.new_text(text).len());
        debug_assert!(self.to_regenerate.0.starts_with(again));
        self.to_regenerate.0.drain(..again.len());
        self.unsettled_text.push_str(new);
        // Only of one that came alone it is certain that its last character is whole.
        if self.text_delivery == TextDelivery::WithIds && ids.len() == 1 && !text.is_empty() {
            self.settled = self.ids.len();
            self.unsettled_text.clone_from(&self.to_regenerate.0);
        }
        if self.ids.len() + self.prompt.len() > MAX_TOKEN_IDS || self.unsettled_text.len() > MAX_UNSETTLED_BYTES {
            self.failure = Some(NotResumable::TooLong);
            (self.prompt, self.ids, self.settled) = Default::default();
        }
    }

    /// What is new in a text that may begin with what is made again.
    fn new_text<'t>(&self, text: &'t str) -> &'t str {
        let again = &self.to_regenerate.0;
        if again.starts_with(text) { "" } else { text.strip_prefix(again.as_str()).unwrap_or(text) }
    }

    fn rewrite_continuation(&mut self, told: ResumableEvent<'_>) -> EventRewrite {
        let Some(head) = &self.head else { return EventRewrite::Unchanged };
        let usage = told.usage.map(|usage| self.whole_answer_usage(usage.usage()));
        let mut out = self.write_event_head(head);
        let Some(choice) = told.choices.first() else {
            out.extend_from_slice(b"[]");
            write_event_end(&mut out, usage);
            return EventRewrite::Replaced(out);
        };
        let said = choice.token_ids.and_then(parse_ids).unwrap_or_default();
        let (text, again) = (choice.text(), &self.to_regenerate.0);
        let repeated = said.len().min(self.to_regenerate.1.len());
        let goes_along = again.starts_with(text) || text.starts_with(again.as_str());
        if !goes_along || self.to_regenerate.1[..repeated] != said[..repeated] {
            self.failure = Some(NotResumable::Diverged);
            return EventRewrite::Hidden;
        }
        let (new, fresh) = (self.new_text(text), &said[repeated..]);
        let shown = (self.visible_ids == TokenIdVisibility::All).then_some(fresh);
        self.write_choice(&mut out, choice, (new, shown));
        write_event_end(&mut out, usage);
        let is_nothing = new.is_empty() && shown.is_none_or(<[u32]>::is_empty) && choice.finish_reason.is_none();
        self.to_regenerate.1.drain(..repeated);
        self.append(text, &said);
        if is_nothing { EventRewrite::Hidden } else { EventRewrite::Replaced(out) }
    }

    /// An event up to its choices.
    fn write_event_head(&self, head: &SharedEventFields) -> Vec<u8> {
        let object = if self.api == Api::Chat { "chat.completion.chunk" } else { "text_completion" };
        let SharedEventFields { id, created, model } = head;
        format!(r#"data: {{"id":{id},"object":"{object}","created":{created},"model":{model},"choices":"#).into_bytes()
    }

    /// A list of one choice, as vLLM 0.32 writes it.
    fn write_choice(&self, out: &mut Vec<u8>, choice: &ResumableChoice<'_>, (text, ids): (&str, Option<&[u32]>)) {
        let raw = |raw: Option<&RawValue>| raw.map_or("null", RawValue::get).to_owned();
        let text = serde_json::to_string(text).expect("a text is always JSON");
        let ids = serde_json::to_string(&ids).expect("numbers are always JSON");
        let (finish, stop) = (raw(choice.finish_reason), raw(choice.stop_reason));
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

/// The end of an event after its choices.
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

/// Token ids; none where there is no list of them.
fn parse_ids(raw: &RawValue) -> Option<Vec<u32>> {
    serde_json::from_str(raw.get()).ok()
}

/// The event with `null` in these places, as if they had not been asked for.
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
