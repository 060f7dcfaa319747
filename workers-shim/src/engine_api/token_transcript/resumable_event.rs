//! The fields of an event whose answer may be continued elsewhere, with their positions for rewriting.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::engine_api::answer::TokenUsage;
use crate::engine_api::json_string::JsonString;

/// An event of a chat or a completion.
pub(in crate::engine_api) struct AnswerEventFields<'a> {
    pub(in crate::engine_api) id: Option<&'a RawValue>,
    pub(in crate::engine_api) created: Option<&'a RawValue>,
    pub(in crate::engine_api) model: Option<&'a RawValue>,
    /// Only answers with one choice are continued.
    pub(in crate::engine_api) choice: Option<AnswerChoiceFields<'a>>,
    pub(in crate::engine_api) prompt_token_ids: Option<&'a RawValue>,
    pub(in crate::engine_api) usage: Option<TokenUsage>,
}

#[derive(Deserialize)]
pub(in crate::engine_api) struct AnswerChoiceFields<'a> {
    #[serde(borrow)]
    text: Option<JsonString<'a>>,
    delta: Option<AnswerDeltaFields<'a>>,
    pub(in crate::engine_api) finish_reason: Option<JsonString<'a>>,
    pub(super) stop_reason: Option<&'a RawValue>,
    pub(super) token_ids: Option<&'a RawValue>,
    pub(super) prompt_token_ids: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct AnswerDeltaFields<'a> {
    #[serde(borrow)]
    content: Option<JsonString<'a>>,
    reasoning: Option<JsonString<'a>>,
    reasoning_content: Option<JsonString<'a>>,
    tool_calls: Option<&'a RawValue>,
}

impl AnswerDeltaFields<'_> {
    fn has_tool_calls(&self) -> bool {
        let inside = self.tool_calls.map(|raw| raw.get().strip_prefix('[').and_then(|list| list.strip_suffix(']')));
        inside.is_some_and(|list| list.is_none_or(|list| !list.trim().is_empty()))
    }
}

impl AnswerChoiceFields<'_> {
    pub(super) fn text(&self) -> &str {
        let content = self.delta.as_ref().and_then(|delta| delta.content.as_deref());
        self.text.as_deref().or(content).unwrap_or_default()
    }

    /// Returns the length of all its text in bytes, reasoning included.
    pub(in crate::engine_api) fn text_length(&self) -> usize {
        let of_delta = self.delta.as_ref().map(|delta| [&delta.content, &delta.reasoning, &delta.reasoning_content]);
        of_delta.into_iter().flatten().chain([&self.text]).flatten().map(|text| text.len()).sum()
    }

    pub(in crate::engine_api) fn has_output(&self) -> bool {
        self.text_length() > 0 || self.delta.as_ref().is_some_and(AnswerDeltaFields::has_tool_calls)
    }

    /// Returns whether the engine has parsed the text, so that a completion could not go on with it.
    pub(super) fn is_parsed(&self) -> bool {
        let Some(delta) = &self.delta else { return false };
        delta.reasoning.is_some() || delta.reasoning_content.is_some() || delta.has_tool_calls()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_of_tool_calls_is_no_output() {
        let outputs = |delta: &str| {
            let choice = format!(r#"{{"delta":{delta}}}"#);
            let choice: AnswerChoiceFields<'_> = serde_json::from_str(&choice).unwrap();
            (choice.has_output(), choice.is_parsed())
        };
        for nothing in ["{}", r#"{"tool_calls":[]}"#, r#"{"tool_calls":[ ]}"#, r#"{"tool_calls":null}"#] {
            assert_eq!(outputs(nothing), (false, false), "{nothing}");
        }
        assert_eq!(outputs(r#"{"tool_calls":[{"index":0}]}"#), (true, true));
        assert_eq!(outputs(r#"{"reasoning":""}"#), (false, true));
        assert_eq!(outputs(r#"{"content":"word"}"#), (true, false));
    }
}
