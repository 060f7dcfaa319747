//! The parsed fields of a stream event.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::engine_api::answer::UsageFields;

/// An event of any of the four APIs.
#[derive(Deserialize)]
pub(super) struct StreamChunk<'a> {
    /// Only in `/v1/messages` and `/v1/responses`.
    #[serde(borrow)]
    pub(super) r#type: Option<Cow<'a, str>>,
    pub(super) id: Option<String>,
    pub(super) choices: Option<Vec<StreamChoice>>,
    pub(super) usage: Option<UsageFields>,
    pub(super) error: Option<EngineError>,
    pub(super) delta: Option<EventDelta>,
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

#[derive(Deserialize)]
pub(super) struct StreamChoice {
    pub(super) finish_reason: Option<String>,
    text: Option<String>,
    delta: Option<ChoiceDelta>,
}

/// The delta in an event of `/v1/responses` or `/v1/messages`.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum EventDelta {
    Text(String),
    Parts { text: Option<String>, thinking: Option<String>, partial_json: Option<String> },
    Other(IgnoredAny),
}

impl EventDelta {
    /// Returns its length in bytes.
    pub(super) fn text(self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Parts { text, thinking, partial_json } => {
                [text, thinking, partial_json].iter().flatten().map(String::len).sum()
            }
            Self::Other(_) => 0,
        }
    }
}

#[derive(Deserialize)]
struct ChoiceDelta {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<IgnoredAny>>,
}

impl StreamChoice {
    /// Returns the length of its text in bytes.
    pub(super) fn text(&self) -> usize {
        let of_delta = self.delta.as_ref().map(|delta| [&delta.content, &delta.reasoning, &delta.reasoning_content]);
        let all = of_delta.into_iter().flatten().chain([&self.text]);
        all.flatten().map(String::len).sum()
    }

    pub(super) fn has_output(&self) -> bool {
        let text = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let delta = self.delta.as_ref().is_some_and(|delta| {
            let called = delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
            called || text(&delta.content) || text(&delta.reasoning) || text(&delta.reasoning_content)
        });
        text(&self.text) || delta
    }
}
