//! Rendering only what is new: a short conversation that ends as the long one does, cut after a mark that stands for the
//! content of the last message known from before.
//!
//! Whether a template allows this is not guessed: over synthetic conversations, at load, what is put together this way
//! has to equal the whole (see `probe`).

mod elided;
mod probe;

use std::sync::{Arc, OnceLock};

use minijinja::Value;

use crate::chat::{CallOrder, Variables};
use crate::json_value::object;
use crate::model_text::Rendered;
use crate::scan::{Asked, Place, Role};
use crate::tokenizer::TextTokenizer;
use crate::{ChatBody, ModelText, PrefixError, TemplateKind, WallTime};

pub(crate) use elided::Elided;
use elided::StandIn;

/// Stands for the content of the message after which a prompt is cut. No client's text may hold it.
pub(crate) const MARK: &str = "QmCutAfterThis7f3a9c51";
/// Bytes after the mark within which the cut must come.
const LONGEST_GAP: usize = 2048;
/// Directives of a time finer than a day.
const FINER_THAN_A_DAY: [&str; 14] =
    ["%H", "%I", "%M", "%S", "%f", "%p", "%c", "%X", "%T", "%R", "%-H", "%-I", "%-M", "%-S"];

pub(crate) const SECONDS_A_DAY: i64 = 86_400;
/// To other times of a day, of which hour, minute, second and half are others.
const OTHER_TIMES: [i64; 2] = [13 * 3600 + 61, 19 * 3600 + 32 * 60 + 17];

/// What the template is shown of what stands before the messages: system prompt and tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heads {
    Elided,
    /// All of it: it may come again further down.
    Real,
}

/// Whether a user speaks in the new messages. Templates may treat what came before differently then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// No, nor is anyone answered.
    Same,
    /// No, but an answer without calls ends the turn: templates may drop its thoughts.
    Answered,
    Next,
}

impl Turn {
    /// By the messages after a cut.
    pub(crate) fn of(after: &[Place]) -> Self {
        let answers = |message: &Place| message.role == Role::Assistant && !message.calls;
        match after.iter().any(|message| message.role == Role::User) {
            true => Self::Next,
            false if after.iter().any(answers) => Self::Answered,
            false => Self::Same,
        }
    }
}

/// What follows a cut, as far as templates treat it differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Follows {
    /// The answer to the user's message after which the cut is, or nothing.
    Answer,
    /// More of the same turn.
    More,
    /// A user's message.
    Question,
}

impl Follows {
    const ALL: [Self; 3] = [Self::Answer, Self::More, Self::Question];

    fn of(turn: Turn, before: &Before) -> Self {
        match turn {
            Turn::Next => Self::Question,
            _ if before.last == Role::User => Self::Answer,
            _ => Self::More,
        }
    }
}

/// How a template's prompts can be put together from an old part and a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Windowing {
    pub(crate) kind: TemplateKind,
    proven: [Option<Heads>; Follows::ALL.len()],
    /// Whether the day stands in the prompt.
    pub(crate) dated: bool,
    /// Whether that holds with system messages among the others too, which some templates gather in front.
    pub(crate) late_system: bool,
    /// Whether it holds for calls as they are shown of `/v1/responses`.
    pub(crate) name_first: bool,
}

impl Windowing {
    /// What must be shown; none where the whole must be.
    pub(crate) fn heads(&self, turn: Turn, before: &Before) -> Option<Heads> {
        // Tools may be written with the first question.
        self.proven[Follows::of(turn, before) as usize]
            .map(|heads| if before.asked != Asked::Never || before.last == Role::User { heads } else { Heads::Real })
    }

    /// Whether it is known of calls whose fields are shown in this order.
    pub(crate) fn shows(&self, order: CallOrder) -> bool {
        order == CallOrder::Declared || self.name_first
    }

    /// Whether the text before a cut holds for a longer conversation. `cut_in` says whether, when it was made, a user
    /// spoke after it.
    pub(crate) fn holds(&self, cut_in: Turn, turn: Turn) -> bool {
        self.kind == TemplateKind::AppendOnly || cut_in == turn && turn != Turn::Answered
    }
}

/// The messages before a cut, as far as a template is shown them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Before {
    /// The system messages that open the conversation, without `last`.
    pub(crate) leads: Box<[Role]>,
    /// What happened between them and `last`.
    pub(crate) asked: Asked,
    /// The message after which the cut is.
    pub(crate) last: Role,
}

/// The parts of a body around the messages that are left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Around<'a> {
    /// From the start to the end of the leading messages.
    pub(crate) head: &'a [u8],
    /// From the end of the list of messages on.
    pub(crate) suffix: &'a [u8],
    /// In which the fields of calls are shown.
    pub(crate) order: CallOrder,
}

/// What a template renders around a cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Between the content and the cut.
    pub(crate) gap: Arc<str>,
    /// Which special token begins at the cut.
    pub(crate) token: usize,
    pub(crate) rest: String,
    /// What it took of the template engine's steps to see it.
    pub(crate) steps: u64,
    /// The tokens of `rest`, once they were asked for.
    ids: OnceLock<Box<[u32]>>,
}

impl Cut {
    /// The tokens of all that follows.
    pub(crate) fn ids(&self, tokenizer: &TextTokenizer) -> Result<&[u32], PrefixError> {
        if let Some(ids) = self.ids.get() {
            return Ok(ids);
        }
        let ids = tokenizer.encode_part(&self.rest)?;
        Ok(self.ids.get_or_init(|| ids.into()))
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>() + self.gap.len() + self.rest.len() + size_of_val(self.ids.get().map_or(&[][..], |ids| ids))
    }
}

impl Before {
    /// The conversation in which only `new` and what is around the messages are real, written as JSON. The last lead is
    /// the cut's own message where nothing else is.
    fn real(&self, around: Around<'_>, new: &[u8]) -> Vec<u8> {
        let text = self.stand_ins().map(StandIn::json).collect::<Vec<_>>().join(",");
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
pub(crate) fn short(mut variables: Variables) -> Option<Variables> {
    for (name, value) in &mut variables {
        match name.as_str() {
            Some("tools") if value.len().is_some_and(|tools| tools > 0) => *value = short_tools(),
            Some("documents") if !value.is_none() => return None,
            _ => {}
        }
    }
    Some(variables)
}

fn short_tools() -> Value {
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
    pub(crate) fn cut(
        &self,
        (before, new): (&Before, &[u8]),
        shown: (Heads, &Variables, Around<'_>),
        now: WallTime,
    ) -> Result<Option<Cut>, PrefixError> {
        let (heads, variables, around) = shown;
        let chat = |body: Vec<u8>| Ok::<_, PrefixError>(ChatBody::parse(&body)?.with_call_order(around.order));
        let Rendered { mut text, steps } = match heads {
            Heads::Elided => {
                self.rendered_after((before, around.order), (&chat(elided::only(new))?, variables), now)?
            }
            Heads::Real => self.rendered(&chat(before.real(around, new))?, now)?,
        };
        let Some(end) = text.find(MARK).map(|at| at + MARK.len()) else { return Ok(None) };
        let after = &text[end..];
        let cut = self.tokenizer().first_cut(after, LONGEST_GAP).filter(|_| !after.contains(MARK));
        let Some((gap, token)) = cut.map(|(at, token)| (Arc::<str>::from(&after[..at]), token)) else {
            return Ok(None);
        };
        // A text of its own: this one has the room of the whole prompt, and what is kept may be kept for long.
        let rest = text.split_off(end + gap.len());
        Ok(Some(Cut { gap, token, rest, steps, ids: OnceLock::new() }))
    }

    /// Whether a template that prints the time asks for no more of it than the day, as far as its text shows.
    fn is_at_most_dated(&self) -> bool {
        !FINER_THAN_A_DAY.iter().any(|directive| self.template_mentions(directive))
    }

    /// Whether a conversation's prompt is the same at another time of the day. What a template asks for may be put
    /// together, or come with the request.
    pub(crate) fn is_of_the_day(&self, chat: &ChatBody, (now, prompt): (WallTime, &str)) -> bool {
        let start = now.unix_seconds.div_euclid(SECONDS_A_DAY).saturating_mul(SECONDS_A_DAY);
        let other = |shift| start.saturating_add((now.unix_seconds.rem_euclid(SECONDS_A_DAY) + shift) % SECONDS_A_DAY);
        OTHER_TIMES.iter().all(|shift| {
            let then = WallTime { unix_seconds: other(*shift) };
            self.render(chat, then).is_ok_and(|then| then == prompt)
        })
    }
}
