//! Rendering only what is new: a short conversation that ends as the long one does, cut after a mark that stands for the
//! content of the last message known from before.
//!
//! Whether a template allows this is not guessed: over synthetic conversations, at load, what is put together this way
//! has to equal the whole (see `probe`).

mod placeholders;
mod probe;

use std::sync::{Arc, OnceLock};

use minijinja::Value;

use crate::chat::{CallFieldOrder, TemplateVariables};
use crate::json_value::object;
use crate::message_scan::{MessageRole, QuestionState, ScannedMessage};
use crate::model_text::RenderedPrompt;
use crate::tokenizer::TextTokenizer;
use crate::{ChatBody, ModelText, PrefixError, TemplateKind, WallTime};

use placeholders::Placeholder;
pub(crate) use placeholders::PlaceholderMessages;

/// Stands for the content of the message after which a prompt is cut. No client's text may hold it.
pub(crate) const SENTINEL: &str = "QmCutAfterThis7f3a9c51";
/// Bytes after the mark within which the cut must come.
const MAX_GAP_BYTES: usize = 2048;
/// Directives of a time finer than a day.
const SUBDAY_DIRECTIVES: [&str; 14] =
    ["%H", "%I", "%M", "%S", "%f", "%p", "%c", "%X", "%T", "%R", "%-H", "%-I", "%-M", "%-S"];

pub(crate) const SECONDS_PER_DAY: i64 = 86_400;
/// To other times of a day, of which hour, minute, second and half are others.
const PROBE_TIME_OFFSETS: [i64; 2] = [13 * 3600 + 61, 19 * 3600 + 32 * 60 + 17];

/// What the template is shown of what stands before the messages: system prompt and tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SystemVisibility {
    Placeholder,
    /// All of it: it may come again further down.
    Full,
}

/// Whether a user speaks in the new messages. Templates may treat what came before differently then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TurnChange {
    /// No, nor is anyone answered.
    Same,
    /// No, but an answer without calls ends the turn: templates may drop its thoughts.
    Answered,
    Next,
}

impl TurnChange {
    /// By the messages after a cut.
    pub(crate) fn of(after: &[ScannedMessage]) -> Self {
        let answers = |message: &ScannedMessage| message.role == MessageRole::Assistant && !message.calls_tools;
        match after.iter().any(|message| message.role == MessageRole::User) {
            true => Self::Next,
            false if after.iter().any(answers) => Self::Answered,
            false => Self::Same,
        }
    }
}

/// What follows a cut, as far as templates treat it differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CutSuccessor {
    /// The answer to the user's message after which the cut is, or nothing.
    Answer,
    /// More of the same turn.
    SameTurn,
    /// A user's message.
    Question,
}

impl CutSuccessor {
    const ALL: [Self; 3] = [Self::Answer, Self::SameTurn, Self::Question];

    fn of(turn: TurnChange, before: &HistorySummary) -> Self {
        match turn {
            TurnChange::Next => Self::Question,
            _ if before.last_role == MessageRole::User => Self::Answer,
            _ => Self::SameTurn,
        }
    }
}

/// How a template's prompts can be put together from an old part and a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IncrementalRendering {
    pub(crate) kind: TemplateKind,
    proven: [Option<SystemVisibility>; CutSuccessor::ALL.len()],
    /// Whether the day stands in the prompt.
    pub(crate) prints_date: bool,
    /// Whether that holds with system messages among the others too, which some templates gather in front.
    pub(crate) supports_late_system: bool,
    /// Whether it holds for calls as they are shown of `/v1/responses`.
    pub(crate) supports_name_first: bool,
}

impl IncrementalRendering {
    /// What must be shown; none where the whole must be.
    pub(crate) fn system_visibility(&self, turn: TurnChange, before: &HistorySummary) -> Option<SystemVisibility> {
        // Tools may be written with the first question.
        self.proven[CutSuccessor::of(turn, before) as usize].map(|heads| {
            if before.question != QuestionState::Never || before.last_role == MessageRole::User {
                heads
            } else {
                SystemVisibility::Full
            }
        })
    }

    /// Whether it is known of calls whose fields are shown in this order.
    pub(crate) fn supports_call_order(&self, order: CallFieldOrder) -> bool {
        order == CallFieldOrder::Declared || self.supports_name_first
    }

    /// Whether the text before a cut holds for a longer conversation. `cut_in` says whether, when it was made, a user
    /// spoke after it.
    pub(crate) fn is_cut_valid(&self, cut_in: TurnChange, turn: TurnChange) -> bool {
        self.kind == TemplateKind::AppendOnly || cut_in == turn && turn != TurnChange::Answered
    }
}

/// The messages before a cut, as far as a template is shown them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HistorySummary {
    /// The system messages that open the conversation, without `last`.
    pub(crate) leading_roles: Box<[MessageRole]>,
    /// What happened between them and `last`.
    pub(crate) question: QuestionState,
    /// The message after which the cut is.
    pub(crate) last_role: MessageRole,
}

/// The parts of a body around the messages that are left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyEnvelope<'a> {
    /// From the start to the end of the leading messages.
    pub(crate) head: &'a [u8],
    /// From the end of the list of messages on.
    pub(crate) suffix: &'a [u8],
    /// In which the fields of calls are shown.
    pub(crate) call_order: CallFieldOrder,
}

/// What a template renders around a cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RenderedCut {
    /// Between the content and the cut.
    pub(crate) gap: Arc<str>,
    /// Which special token begins at the cut.
    pub(crate) cut_token: usize,
    pub(crate) rest: String,
    /// What it took of the template engine's steps to see it.
    pub(crate) template_steps: u64,
    /// The tokens of `rest`, once they were asked for.
    ids: OnceLock<Box<[u32]>>,
}

impl RenderedCut {
    /// The tokens of all that follows.
    pub(crate) fn token_ids(&self, tokenizer: &TextTokenizer) -> Result<&[u32], PrefixError> {
        if let Some(ids) = self.ids.get() {
            return Ok(ids);
        }
        let ids = tokenizer.encode_part(&self.rest)?;
        Ok(self.ids.get_or_init(|| ids.into()))
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.gap.len() + self.rest.len() + size_of_val(self.ids.get().map_or(&[][..], |ids| ids))
    }
}

impl HistorySummary {
    /// The conversation in which only `new` and what is around the messages are real, written as JSON. The last lead is
    /// the cut's own message where nothing else is.
    fn elided_body(&self, around: BodyEnvelope<'_>, new: &[u8]) -> Vec<u8> {
        let text = self.placeholders().map(Placeholder::json).collect::<Vec<_>>().join(",");
        let mut json = Vec::with_capacity(around.head.len() + text.len() + new.len() + around.suffix.len() + 2);
        json.extend_from_slice(around.head);
        if !around.head.trim_ascii_end().ends_with(b"[") {
            json.push(b',');
        }
        json.extend_from_slice(text.as_bytes());
        json.extend_from_slice(new);
        json.push(b']');
        json.extend_from_slice(around.suffix);
        json
    }
}

/// A body's variables with its tools replaced by one that is short; none where they hold more that could be long.
pub(crate) fn shorten_variables(mut variables: TemplateVariables) -> Option<TemplateVariables> {
    for (name, value) in &mut variables {
        match name.as_str() {
            Some("tools") if value.len().is_some_and(|tools| tools > 0) => *value = placeholder_tools(),
            Some("documents") if !value.is_none() => return None,
            _ => {}
        }
    }
    Some(variables)
}

fn placeholder_tools() -> Value {
    let text = |text: &'static str| Value::from(text);
    let of = |fields: &[(&'static str, Value)]| {
        object(fields.iter().map(|(name, value)| (Value::from(*name), value.clone())).collect())
    };
    let parameters = of(&[("type", text("object")), ("properties", of(&[]))]);
    let function = of(&[("name", text("f")), ("description", text("f")), ("parameters", parameters)]);
    Value::from(vec![of(&[("type", text("function")), ("function", function)])])
}

impl ModelText {
    /// What follows the cut after `before` when `new` messages follow; each of these begins with a comma. None where
    /// the template shows no cut.
    pub(crate) fn render_cut(
        &self,
        (before, new): (&HistorySummary, &[u8]),
        shown: (SystemVisibility, &TemplateVariables, BodyEnvelope<'_>),
        now: WallTime,
    ) -> Result<Option<RenderedCut>, PrefixError> {
        let (heads, variables, around) = shown;
        let chat = |body: Vec<u8>| Ok::<_, PrefixError>(ChatBody::parse(&body)?.with_call_order(around.call_order));
        let RenderedPrompt { mut text, steps } = match heads {
            SystemVisibility::Placeholder => self.render_appended(
                (before, around.call_order),
                (&chat(placeholders::messages_body(new))?, variables),
                now,
            )?,
            SystemVisibility::Full => self.render_prompt(&chat(before.elided_body(around, new))?, now)?,
        };
        let Some(end) = text.find(SENTINEL).map(|at| at + SENTINEL.len()) else { return Ok(None) };
        let after = &text[end..];
        let cut = self.tokenizer().first_cut(after, MAX_GAP_BYTES).filter(|_| !after.contains(SENTINEL));
        let Some((gap, token)) = cut.map(|(at, token)| (Arc::<str>::from(&after[..at]), token)) else {
            return Ok(None);
        };
        // A text of its own: this one has the room of the whole prompt, and what is kept may be kept for long.
        let rest = text.split_off(end + gap.len());
        Ok(Some(RenderedCut { gap, cut_token: token, rest, template_steps: steps, ids: OnceLock::new() }))
    }

    /// Whether a template that prints the time asks for no more of it than the day, as far as its text shows.
    fn prints_at_most_dates(&self) -> bool {
        !SUBDAY_DIRECTIVES.iter().any(|directive| self.template_mentions(directive))
    }

    /// Whether a conversation's prompt is the same at another time of the day. What a template asks for may be put
    /// together, or come with the request.
    pub(crate) fn is_stable_within_day(&self, chat: &ChatBody, (now, prompt): (WallTime, &str)) -> bool {
        let start = now.unix_seconds.div_euclid(SECONDS_PER_DAY).saturating_mul(SECONDS_PER_DAY);
        let other =
            |shift| start.saturating_add((now.unix_seconds.rem_euclid(SECONDS_PER_DAY) + shift) % SECONDS_PER_DAY);
        PROBE_TIME_OFFSETS.iter().all(|shift| {
            let then = WallTime { unix_seconds: other(*shift) };
            self.render(chat, then).is_ok_and(|then| then == prompt)
        })
    }
}
