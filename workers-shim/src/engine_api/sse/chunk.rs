//! The parsed fields of a stream event. Texts are only measured: an event without escapes is parsed without a copy.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::engine_api::answer::UsageFields;
use crate::engine_api::json_string::{JsonString, StringLength};

/// An event of any of the four APIs.
#[derive(Deserialize)]
pub(super) struct StreamChunk<'a> {
    /// Only in `/v1/messages` and `/v1/responses`.
    #[serde(borrow)]
    pub(super) r#type: Option<JsonString<'a>>,
    pub(super) id: Option<JsonString<'a>>,
    pub(super) choices: Option<ChoicesSummary>,
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

/// What the choices of an event of a chat or a completion say together.
#[derive(Default)]
pub(super) struct ChoicesSummary {
    /// Number of choices.
    pub(super) count: usize,
    /// Whether any has output.
    pub(super) has_output: bool,
    /// Bytes of generated text.
    pub(super) text: usize,
    /// The last finish reason.
    pub(super) finish: Option<String>,
}

impl<'de> Deserialize<'de> for ChoicesSummary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Choices;
        impl<'de> Visitor<'de> for Choices {
            type Value = ChoicesSummary;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ChoicesSummary, A::Error> {
                let mut summary = ChoicesSummary::default();
                while let Some(choice) = list.next_element::<StreamChoice>()? {
                    summary.count += 1;
                    summary.has_output |= choice.has_output();
                    summary.text += choice.text();
                    summary.finish = choice.finish_reason.or(summary.finish);
                }
                Ok(summary)
            }
        }
        deserializer.deserialize_seq(Choices)
    }
}

#[derive(Deserialize)]
struct StreamChoice {
    finish_reason: Option<String>,
    text: Option<StringLength>,
    delta: Option<ChoiceDelta>,
}

#[derive(Deserialize)]
struct ChoiceDelta {
    content: Option<StringLength>,
    reasoning: Option<StringLength>,
    reasoning_content: Option<StringLength>,
    tool_calls: Option<Vec<IgnoredAny>>,
}

impl StreamChoice {
    /// Returns the length of its text in bytes.
    fn text(&self) -> usize {
        let of_delta = self.delta.as_ref().map(|delta| [delta.content, delta.reasoning, delta.reasoning_content]);
        of_delta.into_iter().flatten().chain([self.text]).flatten().map(|text| text.0).sum()
    }

    fn has_output(&self) -> bool {
        let tool_calls = self.delta.as_ref().and_then(|delta| delta.tool_calls.as_ref());
        self.text() > 0 || tool_calls.is_some_and(|calls| !calls.is_empty())
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
