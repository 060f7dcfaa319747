//! The parsed fields of an event whose answer may be continued elsewhere, with their positions for rewriting.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::engine_api::answer::UsageFields;
use crate::engine_api::json_string::JsonString;

/// An event of a chat or a completion.
#[derive(Deserialize)]
pub(in crate::engine_api) struct AnswerEventFields<'a> {
    #[serde(borrow)]
    pub(super) id: Option<&'a RawValue>,
    pub(super) created: Option<&'a RawValue>,
    pub(super) model: Option<&'a RawValue>,
    #[serde(default)]
    pub(super) choices: Vec<AnswerChoiceFields<'a>>,
    pub(super) prompt_token_ids: Option<&'a RawValue>,
    pub(super) usage: Option<UsageFields>,
}

#[derive(Deserialize)]
pub(super) struct AnswerChoiceFields<'a> {
    #[serde(borrow)]
    text: Option<JsonString<'a>>,
    delta: Option<AnswerDeltaFields<'a>>,
    pub(super) finish_reason: Option<&'a RawValue>,
    pub(super) stop_reason: Option<&'a RawValue>,
    pub(super) token_ids: Option<&'a RawValue>,
    pub(super) prompt_token_ids: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct AnswerDeltaFields<'a> {
    #[serde(borrow)]
    content: Option<JsonString<'a>>,
    reasoning: Option<&'a RawValue>,
    reasoning_content: Option<&'a RawValue>,
    tool_calls: Option<&'a RawValue>,
}

impl AnswerChoiceFields<'_> {
    pub(super) fn text(&self) -> &str {
        let content = self.delta.as_ref().and_then(|delta| delta.content.as_deref());
        self.text.as_deref().or(content).unwrap_or_default()
    }

    pub(super) fn is_parsed(&self) -> bool {
        let Some(delta) = &self.delta else { return false };
        [delta.reasoning, delta.reasoning_content, delta.tool_calls].into_iter().flatten().any(|raw| raw.get() != "[]")
    }
}
