//! The parsed fields of a stream event: all that the facts and the transcript use. An event without escapes is parsed
//! without a copy.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::engine_api::answer::UsageFields;
use crate::engine_api::json_string::JsonString;
use crate::engine_api::token_transcript::AnswerChoiceFields;

/// An event of any of the four APIs.
#[derive(Deserialize)]
pub(super) struct StreamChunk<'a> {
    /// Only in `/v1/messages` and `/v1/responses`.
    #[serde(borrow)]
    pub(super) r#type: Option<JsonString<'a>>,
    pub(super) id: Option<&'a RawValue>,
    pub(super) created: Option<&'a RawValue>,
    pub(super) model: Option<&'a RawValue>,
    pub(super) prompt_token_ids: Option<&'a RawValue>,
    pub(super) choices: Option<EventChoices<'a>>,
    pub(super) usage: Option<UsageFields>,
    pub(super) error: Option<EngineError>,
    pub(super) delta: Option<DeltaLength>,
    /// The answer so far in `/v1/responses`. `message` below is the head of an answer in `/v1/messages`, or an error's
    /// text.
    pub(super) response: Option<&'a RawValue>,
    pub(super) message: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
pub(super) struct NestedAnswer {
    pub(super) id: Option<String>,
    pub(super) usage: Option<UsageFields>,
    pub(super) error: Option<EngineError>,
}

#[derive(Deserialize, Default)]
pub(super) struct EngineError {
    pub(super) message: Option<String>,
    /// An HTTP status at vLLM; a word or missing at other engines.
    pub(super) code: Option<serde_json::Value>,
}

/// The choices of an event of a chat or a completion.
#[derive(Default)]
pub(super) struct EventChoices<'a> {
    /// Number of choices.
    pub(super) count: usize,
    /// Whether any has output.
    pub(super) has_output: bool,
    /// Bytes of generated text.
    pub(super) text: usize,
    /// The last finish reason.
    pub(super) finish: Option<String>,
    /// The first choice.
    pub(super) first: Option<AnswerChoiceFields<'a>>,
}

impl<'de: 'a, 'a> Deserialize<'de> for EventChoices<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Choices;
        impl<'de> Visitor<'de> for Choices {
            type Value = EventChoices<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<EventChoices<'de>, A::Error> {
                let mut choices = EventChoices::default();
                while let Some(choice) = list.next_element::<AnswerChoiceFields<'de>>()? {
                    choices.count += 1;
                    choices.has_output |= choice.has_output();
                    choices.text += choice.text_length();
                    choices.finish = choice.finish_reason.as_deref().map(str::to_owned).or(choices.finish);
                    choices.first = choices.first.or(Some(choice));
                }
                Ok(choices)
            }
        }
        deserializer.deserialize_seq(Choices)
    }
}

/// Bytes of text in the delta of an event of `/v1/responses` (a string) or `/v1/messages` (an object); 0 for any other
/// value.
#[derive(Default)]
pub(super) struct DeltaLength(pub(super) usize);

impl<'de> Deserialize<'de> for DeltaLength {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        TextMeasure::OfDelta.deserialize(deserializer).map(Self)
    }
}

/// Measures the text of any value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TextMeasure {
    /// Of a string, or of the text fields of an object.
    OfDelta,
    /// Of a string.
    OfField,
}

impl<'de> DeserializeSeed<'de> for TextMeasure {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<usize, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TextMeasure {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<usize, E> {
        Ok(text.len())
    }

    fn visit_unit<E: Error>(self) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<usize, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<usize, A::Error> {
        let mut length = 0;
        while let Some(name) = fields.next_key::<JsonString<'_>>()? {
            if self == Self::OfDelta && matches!(&*name, "text" | "thinking" | "partial_json") {
                length += fields.next_value_seed(Self::OfField)?;
            } else {
                fields.next_value::<IgnoredAny>()?;
            }
        }
        Ok(length)
    }
}
