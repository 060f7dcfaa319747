//! What is read of any event of a stream.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::dialect::answer::UsageFields;

/// An event of any of the four APIs.
#[derive(Deserialize)]
pub(super) struct Chunk<'a> {
    /// Of `/v1/messages` and `/v1/responses`.
    #[serde(borrow, default)]
    pub(super) r#type: Option<Cow<'a, str>>,
    #[serde(default)]
    pub(super) id: Option<String>,
    #[serde(default)]
    pub(super) choices: Option<Vec<Choice>>,
    #[serde(default)]
    pub(super) usage: Option<UsageFields>,
    #[serde(default)]
    pub(super) error: Option<EngineError>,
    /// The answer so far of `/v1/responses`, and the head of one of `/v1/messages`; errors have a text of that name.
    #[serde(borrow, default)]
    pub(super) response: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) message: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
pub(super) struct Inner {
    #[serde(default)]
    pub(super) id: Option<String>,
    #[serde(default)]
    pub(super) usage: Option<UsageFields>,
    #[serde(default)]
    pub(super) error: Option<EngineError>,
}

#[derive(Deserialize, Default)]
pub(super) struct EngineError {
    #[serde(default)]
    pub(super) message: Option<String>,
    /// A status at vLLM; a word or nothing at others.
    #[serde(default)]
    pub(super) code: Option<serde_json::Value>,
}

#[derive(Deserialize)]
pub(super) struct Choice {
    #[serde(default)]
    pub(super) finish_reason: Option<String>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    delta: Option<Delta>,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
}

impl Choice {
    pub(super) fn has_output(&self) -> bool {
        let text = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let delta = self.delta.as_ref().is_some_and(|delta| {
            let called = delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
            called || text(&delta.content) || text(&delta.reasoning) || text(&delta.reasoning_content)
        });
        text(&self.text) || delta
    }
}
