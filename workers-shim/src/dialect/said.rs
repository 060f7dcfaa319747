//! What an engine has said of one answer, by its token ids, so that another engine can go on with it; and that engine's
//! events in the words of the first one's.
//!
//! Text and ids do not come together: half a character, or what may be the beginning of a stop text, is held back while its
//! id is told. So ids count as *settled* only as far as their text is known to be delivered. An answer goes on after the
//! settled ones; text that was delivered beyond them is made again, compared byte for byte and left out. No prompt
//! may end within a character: vLLM would tell the whole prompt as text.

mod event;
mod lifted;

use std::io::Write as _;

use bytes::Bytes;
use serde_json::value::RawValue;
use vocabulary::Tokens;

use super::answer::Usage;
use super::request::Api;
use super::sse::UsageEvents;
use event::Choice;
pub(super) use event::Event;
use lifted::Lifted;

/// Token ids of prompt and answer that are kept of one answer; 4 bytes each.
const MOST_IDS: usize = 1 << 20;
/// Bytes of text that are made again at most.
const MOST_AHEAD: usize = 64 << 10;
/// Ends of the text that are looked at with a tokenizer.
const MOST_LOOKS: usize = 64;

/// Whether the client is to see token ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShownIds {
    /// It asked for them.
    All,
    /// We did.
    None,
}

/// How an engine tells text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Telling {
    /// As soon as its characters are whole.
    AtOnce,
    /// Later: what may begin a stop text is held back.
    Late,
}

/// Why an answer cannot go on at another engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lost {
    /// The engine tells no token ids.
    NoIds,
    /// The engine makes thoughts or tool calls of the text.
    Parsed,
    /// There are more ids or text than is kept.
    TooLong,
    /// What was to be made again came out differently.
    Differs,
    /// It has words that were drawn, and without a seed others would be drawn.
    Drawn,
    /// The engine's events do not go together.
    Strange,
}

impl Lost {
    /// In words, after "because".
    pub fn why(self) -> &'static str {
        match self {
            Lost::NoIds => "its engine told no token ids",
            Lost::Parsed => "it holds, or may begin with, thoughts or tool calls",
            Lost::TooLong => "it is too long to be kept",
            Lost::Differs => "another worker went on differently",
            Lost::Drawn => "it is drawn without a seed",
            Lost::Strange => "its events do not go together",
        }
    }
}

/// What becomes of an event on its way to the client.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Passage {
    Same,
    /// It is left out.
    Hidden,
    /// This comes in its place.
    As(Vec<u8>),
}

/// Fields that all events of an answer share, as the first engine wrote them.
#[derive(Debug)]
struct Head {
    id: Box<RawValue>,
    created: Box<RawValue>,
    model: Box<RawValue>,
}

/// Whose events come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Engine {
    /// The one that was asked by the client's own request.
    First,
    /// One that goes on after so many ids, as a completion.
    Next { after: usize },
}

/// Token ids of a prompt, and those of its answer after which it can go on.
pub type Kept<'a> = (&'a [u32], &'a [u32]);

/// One answer so far.
#[derive(Debug)]
pub struct Said {
    api: Api,
    shown: ShownIds,
    telling: Telling,
    engine: Engine,
    head: Option<Head>,
    prompt: Vec<u32>,
    ids: Vec<u32>,
    /// Of them, those whose text is delivered.
    settled: usize,
    /// Text that was delivered after theirs.
    ahead: String,
    /// Text and ids that were delivered and are to be made again.
    again: (String, Vec<u32>),
    lost: Option<Lost>,
}

impl Said {
    /// Nothing yet, of an answer with one choice.
    pub fn new(api: Api, shown: ShownIds, telling: Telling) -> Self {
        Self {
            api,
            shown,
            telling,
            engine: Engine::First,
            head: None,
            prompt: Vec::new(),
            ids: Vec::new(),
            settled: 0,
            ahead: String::new(),
            again: Default::default(),
            lost: None,
        }
    }

    /// The prompt's token ids and the settled ones of the answer. None where nothing was said, and all can be asked for anew.
    pub fn so_far(&self) -> Result<Option<Kept<'_>>, Lost> {
        match (self.lost, &self.head) {
            (Some(lost), _) => Err(lost),
            (None, None) => Ok(None),
            (None, Some(_)) if self.prompt.is_empty() => Err(Lost::NoIds),
            // What comes next may be a thought, and no completion tells thoughts apart.
            (None, Some(_)) if self.api == Api::Chat && self.settled == 0 && self.ahead.is_empty() => Err(Lost::Parsed),
            (None, Some(_)) => Ok(Some((&self.prompt, &self.ids[..self.settled]))),
        }
    }

    /// Tokens of the prompt and of the answer; none where they are not known.
    pub fn usage(&self) -> Option<Usage> {
        let is_known = !self.prompt.is_empty() && matches!(self.lost, None | Some(Lost::Differs));
        let tokens = |ids: &[u32]| Tokens(ids.len() as u64);
        is_known.then(|| Usage { prompt: tokens(&self.prompt), completion: tokens(&self.ids), cached: None })
    }

    /// Settles what a tokenizer shows to be delivered. `text_of` gives the text of token ids.
    pub(super) fn settle(&mut self, text_of: impl Fn(&[u32]) -> Option<String>) {
        let is_open = self.lost.is_none() && self.again.0.is_empty() && !self.ahead.is_empty();
        let all = self.ids.len();
        let longest_first = (self.settled + 1..=all).rev().take(MOST_LOOKS).filter(|_| is_open);
        let found = longest_first.filter_map(|end| Some((end, text_of(&self.ids[self.settled..end])?)));
        let is_whole = |text: &str| !text.is_empty() && !text.ends_with(char::REPLACEMENT_CHARACTER);
        let delivered = found.into_iter().find(|(_, text)| is_whole(text) && self.ahead.starts_with(text.as_str()));
        if let Some((end, text)) = delivered {
            self.settled = end;
            self.ahead.drain(..text.len());
        }
    }

    /// What comes next is another engine's: that of a completion of [`Self::so_far`], or of the same request.
    pub(super) fn go_on(&mut self) {
        if self.head.is_some() {
            let mut unsettled = self.ids.split_off(self.settled);
            unsettled.append(&mut self.again.1);
            if self.shown == ShownIds::None {
                unsettled.clear();
            }
            self.again = (self.ahead.clone(), unsettled);
            self.engine = Engine::Next { after: self.settled };
        }
    }

    /// What an engine counted, as of the whole answer.
    pub(super) fn counted(&self, usage: Usage) -> Usage {
        let Engine::Next { after } = self.engine else { return usage };
        let prompt = Tokens(self.prompt.len() as u64);
        let completion = usage.completion + Tokens(after as u64);
        Usage { prompt, completion, cached: usage.cached.map(|cached| cached.min(prompt)) }
    }

    /// Events are lost that nobody could read.
    pub(super) fn unread(&mut self) {
        self.lost = self.lost.or(Some(Lost::TooLong));
    }

    /// The end of an answer whose last word was said, where the engine did not tell it: its usage, where that is shown.
    pub(super) fn closing(&self, usage: UsageEvents) -> Vec<u8> {
        let mut out = Vec::new();
        if let (Some(usage), UsageEvents::Shown, Some(head)) = (self.usage(), usage, &self.head) {
            out = self.begin(head);
            out.extend_from_slice(b"[]");
            end(&mut out, Some(usage));
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        out
    }

    /// Notes the prompt's token ids where an event tells them; what is left of it then.
    pub(super) fn lift(&mut self, event: &[u8]) -> Option<Bytes> {
        let is_awaited = self.engine == Engine::First && self.prompt.is_empty() && self.lost.is_none();
        let Lifted { event, ids } = is_awaited.then(|| Lifted::of(event)).flatten()?;
        if ids.len() > MOST_IDS {
            self.lost = Some(Lost::TooLong);
        } else {
            self.prompt = ids;
        }
        Some(event)
    }

    /// Whether the client is to see token ids.
    pub(super) fn shown(&self) -> ShownIds {
        self.shown
    }

    /// Notes what an event tells, and says what becomes of it; the prompt's token ids were lifted. `event` holds all of `told`.
    pub(super) fn take(&mut self, event: &[u8], told: Event<'_>) -> Passage {
        if self.head.is_none()
            && let (Some(id), Some(created), Some(model)) = (told.id, told.created, told.model)
        {
            self.head = Some(Head { id: id.to_owned(), created: created.to_owned(), model: model.to_owned() });
        }
        match self.engine {
            Engine::First => self.first(event, &told),
            Engine::Next { .. } => self.next(told),
        }
    }

    fn first(&mut self, event: &[u8], told: &Event<'_>) -> Passage {
        let choice = told.choices.first();
        if let Some(choice) = choice {
            let said = choice.token_ids.and_then(ids);
            if choice.is_parsed() {
                self.lost = self.lost.or(Some(Lost::Parsed));
            } else if said.is_none() && !choice.text().is_empty() {
                self.lost = self.lost.or(Some(Lost::NoIds));
            }
            self.note(choice.text(), &said.unwrap_or_default());
        }
        match self.shown {
            ShownIds::All => Passage::Same,
            ShownIds::None => {
                // Told once more, where they are.
                let prompt = told.prompt_token_ids.or(choice.and_then(|choice| choice.prompt_token_ids));
                without(event, prompt.into_iter().chain(choice.and_then(|choice| choice.token_ids)))
            }
        }
    }

    /// Notes new text and ids. What is made again is in `ahead` already.
    fn note(&mut self, text: &str, ids: &[u32]) {
        if self.lost.is_some() {
            return;
        }
        self.ids.extend_from_slice(ids);
        let (again, new) = text.split_at(text.len() - self.left_of(text).len());
        debug_assert!(self.again.0.starts_with(again));
        self.again.0.drain(..again.len());
        self.ahead.push_str(new);
        // Only of one that came alone it is certain that its last character is whole.
        if self.telling == Telling::AtOnce && ids.len() == 1 && !text.is_empty() {
            self.settled = self.ids.len();
            self.ahead.clone_from(&self.again.0);
        }
        if self.ids.len() + self.prompt.len() > MOST_IDS || self.ahead.len() > MOST_AHEAD {
            self.lost = Some(Lost::TooLong);
            (self.prompt, self.ids, self.settled) = Default::default();
        }
    }

    /// What is new in a text that may begin with what is made again.
    fn left_of<'t>(&self, text: &'t str) -> &'t str {
        let again = &self.again.0;
        if again.starts_with(text) { "" } else { text.strip_prefix(again.as_str()).unwrap_or(text) }
    }

    fn next(&mut self, told: Event<'_>) -> Passage {
        let Some(head) = &self.head else { return Passage::Same };
        let usage = told.usage.map(|usage| self.counted(usage.usage()));
        let mut out = self.begin(head);
        let Some(choice) = told.choices.first() else {
            out.extend_from_slice(b"[]");
            end(&mut out, usage);
            return Passage::As(out);
        };
        let said = choice.token_ids.and_then(ids).unwrap_or_default();
        let (text, again) = (choice.text(), &self.again.0);
        let repeated = said.len().min(self.again.1.len());
        let goes_along = again.starts_with(text) || text.starts_with(again.as_str());
        if !goes_along || self.again.1[..repeated] != said[..repeated] {
            self.lost = Some(Lost::Differs);
            return Passage::Hidden;
        }
        let (new, fresh) = (self.left_of(text), &said[repeated..]);
        let shown = (self.shown == ShownIds::All).then_some(fresh);
        self.choice(&mut out, choice, (new, shown));
        end(&mut out, usage);
        let is_nothing = new.is_empty() && shown.is_none_or(<[u32]>::is_empty) && choice.finish_reason.is_none();
        self.again.1.drain(..repeated);
        self.note(text, &said);
        if is_nothing { Passage::Hidden } else { Passage::As(out) }
    }

    /// An event up to its choices.
    fn begin(&self, head: &Head) -> Vec<u8> {
        let object = if self.api == Api::Chat { "chat.completion.chunk" } else { "text_completion" };
        let Head { id, created, model } = head;
        format!(r#"data: {{"id":{id},"object":"{object}","created":{created},"model":{model},"choices":"#).into_bytes()
    }

    /// A list of one choice, as vLLM 0.32 writes it.
    fn choice(&self, out: &mut Vec<u8>, choice: &Choice<'_>, (text, ids): (&str, Option<&[u32]>)) {
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
fn end(out: &mut Vec<u8>, usage: Option<Usage>) {
    if let Some(Usage { prompt, completion, cached }) = usage {
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
fn ids(raw: &RawValue) -> Option<Vec<u32>> {
    serde_json::from_str(raw.get()).ok()
}

/// The event with `null` in these places, as if they had not been asked for.
fn without<'a>(event: &[u8], places: impl Iterator<Item = &'a RawValue>) -> Passage {
    let start = event.as_ptr() as usize;
    let range = |raw: &RawValue| {
        let at = raw.get().as_ptr() as usize - start;
        at..at + raw.get().len()
    };
    let mut cut: Vec<_> = places.map(range).collect();
    cut.sort_unstable_by_key(|range| range.start);
    if cut.is_empty() {
        return Passage::Same;
    }
    let (mut out, mut from) = (Vec::with_capacity(event.len()), 0);
    for range in cut {
        out.extend_from_slice(&event[from..range.start]);
        out.extend_from_slice(b"null");
        from = range.end;
    }
    out.extend_from_slice(&event[from..]);
    Passage::As(out)
}

#[cfg(test)]
mod tests;
