//! Renders only the new part of a prompt: the template gets a short conversation that ends like the long one, and the
//! result is cut after a sentinel that stands for the content of the last known message.
//!
//! Whether a template allows this is not guessed. At load, the joined prompts of synthetic conversations must equal
//! the full ones (see `probe`).

mod placeholders;
mod probe;

use std::sync::{Arc, OnceLock};

use minijinja::Value;

use crate::chat::{CallFieldOrder, TemplateVariables};
use crate::message_scan::{MessageRole, QuestionState, ScannedMessage};
use crate::model_tokenizer::RenderedPrompt;
use crate::template_value::object;
use crate::tokenizer::TextTokenizer;
use crate::{ChatBody, ModelTokenizer, PrefixError, PrefixStability, WallTime};

use placeholders::PlaceholderMessage;
pub(crate) use placeholders::PlaceholderMessages;

/// Replaces the content of the message after which a prompt is cut. No client's text may contain it.
pub(crate) const SENTINEL: &str = "QmCutAfterThis7f3a9c51";
/// Maximum distance in bytes between the sentinel and the cut.
const MAX_GAP_BYTES: usize = 2048;
/// `strftime` directives finer than a day.
const SUBDAY_DIRECTIVES: [&str; 14] =
    ["%H", "%I", "%M", "%S", "%f", "%p", "%c", "%X", "%T", "%R", "%-H", "%-I", "%-M", "%-S"];

pub(crate) const SECONDS_PER_DAY: i64 = 86_400;
/// Offsets in seconds to times of day that differ in hour, minute, second and AM/PM.
const PROBE_TIME_OFFSETS: [i64; 2] = [13 * 3600 + 61, 19 * 3600 + 32 * 60 + 17];

/// Form in which the template must see what precedes the messages (system prompt and tools).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SystemPromptForm {
    Placeholder,
    /// All of it, because the template may repeat it further down.
    Full,
}

/// Whether the new messages start a new turn. Templates may then render earlier messages differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TurnContinuation {
    /// The same turn continues.
    Same,
    /// The same turn, but an assistant message without tool calls ends it: templates may drop its reasoning.
    Answered,
    Next,
}

impl TurnContinuation {
    /// Classifies the messages after a cut.
    pub(crate) fn of(after: &[ScannedMessage]) -> Self {
        let answers = |message: &ScannedMessage| message.role == MessageRole::Assistant && !message.calls_tools;
        match after.iter().any(|message| message.role == MessageRole::User) {
            true => Self::Next,
            false if after.iter().any(answers) => Self::Answered,
            false => Self::Same,
        }
    }
}

/// What follows a cut, as far as templates distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CutSuccessor {
    /// The assistant's response to the user message before the cut, or nothing.
    Answer,
    /// More of the same turn.
    SameTurn,
    /// A user message.
    Question,
}

impl CutSuccessor {
    const ALL: [Self; 3] = [Self::Answer, Self::SameTurn, Self::Question];

    fn of(turn: TurnContinuation, before: &HistorySummary) -> Self {
        match turn {
            TurnContinuation::Next => Self::Question,
            _ if before.last_role == MessageRole::User => Self::Answer,
            _ => Self::SameTurn,
        }
    }
}

/// How a template's prompts can be joined from a known part and a new one, as proven at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TemplateCapabilities {
    pub(crate) kind: PrefixStability,
    proven: [Option<SystemPromptForm>; CutSuccessor::ALL.len()],
    /// Whether the prompt contains the date.
    pub(crate) prints_date: bool,
    /// Whether joining also works with system messages among the others, which some templates move to the front.
    pub(crate) supports_late_system: bool,
    /// Whether joining also works with tool calls in the field order of `/v1/responses`.
    pub(crate) supports_name_first: bool,
}

impl TemplateCapabilities {
    /// Returns the form of the system prompt that the template must see; `None` if it must see the whole conversation.
    pub(crate) fn system_prompt_form(
        &self,
        turn: TurnContinuation,
        before: &HistorySummary,
    ) -> Option<SystemPromptForm> {
        // Some templates render the tools with the first user message.
        self.proven[CutSuccessor::of(turn, before) as usize].map(|heads| {
            if before.question != QuestionState::Never || before.last_role == MessageRole::User {
                heads
            } else {
                SystemPromptForm::Full
            }
        })
    }

    /// Returns whether joining is proven for tool calls with this field order.
    pub(crate) fn supports_call_order(&self, order: CallFieldOrder) -> bool {
        order == CallFieldOrder::Declared || self.supports_name_first
    }

    /// Returns whether the text before a cut is valid in a longer conversation. `cut_in` is the continuation that
    /// followed the cut when it was made, `turn` the one that follows now.
    pub(crate) fn is_cut_valid(&self, cut_in: TurnContinuation, turn: TurnContinuation) -> bool {
        self.kind == PrefixStability::AppendOnly || cut_in == turn && turn != TurnContinuation::Answered
    }
}

/// Summary of the messages before a cut, as far as a template sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HistorySummary {
    /// Roles of the system messages that open the conversation, without the last message before the cut.
    pub(crate) leading_roles: Box<[MessageRole]>,
    /// What happened between them and that last message.
    pub(crate) question: QuestionState,
    /// Role of the last message before the cut.
    pub(crate) last_role: MessageRole,
}

/// Parts of a body around the omitted messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyEnvelope<'a> {
    /// From the start of the body to the end of the leading messages.
    pub(crate) head: &'a [u8],
    /// From the end of the message list on.
    pub(crate) suffix: &'a [u8],
    /// Order of the fields of tool calls.
    pub(crate) call_order: CallFieldOrder,
}

/// Text that a template renders after the last known message's content, split at a cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RenderedTail {
    /// Text between the message's content and the cut.
    pub(crate) gap: Arc<str>,
    /// Index of the special token that begins at the cut.
    pub(crate) cut_token: usize,
    pub(crate) rest: String,
    /// Template engine steps of this rendering.
    pub(crate) template_steps: u64,
    /// Token ids of `rest`, computed on first use.
    ids: OnceLock<Box<[u32]>>,
}

impl RenderedTail {
    /// Returns the token ids of `rest`.
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
    /// Writes the conversation as JSON with placeholders for all messages between the leading ones and `new`. The
    /// last placeholder is the message before the cut.
    fn elided_body(&self, around: BodyEnvelope<'_>, new: &[u8]) -> Vec<u8> {
        let text = self.placeholders().map(PlaceholderMessage::json).collect::<Vec<_>>().join(",");
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

/// Replaces the tools by one short tool. Returns `None` if the variables hold anything else that may be long.
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

impl ModelTokenizer {
    /// Renders the cut after the history `before` and the text that follows it. Each message in `new` is preceded by
    /// a comma. Returns `None` if the rendering shows no cut.
    pub(crate) fn render_cut(
        &self,
        (before, new): (&HistorySummary, &[u8]),
        shown: (SystemPromptForm, &TemplateVariables, BodyEnvelope<'_>),
        now: WallTime,
    ) -> Result<Option<RenderedTail>, PrefixError> {
        let (heads, variables, around) = shown;
        let chat = |body: Vec<u8>| Ok::<_, PrefixError>(ChatBody::parse(&body)?.with_call_order(around.call_order));
        let RenderedPrompt { mut text, steps } = match heads {
            SystemPromptForm::Placeholder => self.render_appended(
                (before, around.call_order),
                (&chat(placeholders::messages_body(new))?, variables),
                now,
            )?,
            SystemPromptForm::Full => self.render_prompt(&chat(before.elided_body(around, new))?, now)?,
        };
        let Some(end) = text.find(SENTINEL).map(|at| at + SENTINEL.len()) else { return Ok(None) };
        let after = &text[end..];
        let cut = self.tokenizer().first_cut(after, MAX_GAP_BYTES).filter(|_| !after.contains(SENTINEL));
        let Some((gap, token)) = cut.map(|(at, token)| (Arc::<str>::from(&after[..at]), token)) else {
            return Ok(None);
        };
        // `rest` is split off because `text` has the capacity of the whole prompt and the result may be cached for
        // long.
        let rest = text.split_off(end + gap.len());
        Ok(Some(RenderedTail { gap, cut_token: token, rest, template_steps: steps, ids: OnceLock::new() }))
    }

    /// Returns whether the template's text contains no time directive finer than a day.
    fn prints_at_most_dates(&self) -> bool {
        !SUBDAY_DIRECTIVES.iter().any(|directive| self.template_mentions(directive))
    }

    /// Returns whether the prompt is the same at other times of the day. The template's text cannot tell: time
    /// formats may be concatenated or come with the request.
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
