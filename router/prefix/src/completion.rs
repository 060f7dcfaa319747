//! The `prompt` of a completion request: text, token ids, or a batch of either.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::{FallbackReason, PrefixError};

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CompletionPrompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Fields of a completion request that determine its prompts.
#[derive(Debug, Deserialize)]
pub(crate) struct CompletionBody<'a> {
    #[serde(borrow)]
    prompt: &'a RawValue,
    add_special_tokens: Option<bool>,
    truncate_prompt_tokens: Option<IgnoredAny>,
    prompt_embeds: Option<IgnoredAny>,
}

impl<'a> CompletionBody<'a> {
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, PrefixError> {
        let body: Self = serde_json::from_slice(body)?;
        if body.prompt_embeds.is_some() {
            return Err(PrefixError::unresolvable(FallbackReason::Multimodal, "prompt_embeds"));
        }
        if body.truncate_prompt_tokens.is_some() {
            return Err(PrefixError::unresolvable(FallbackReason::UnsupportedOption, "truncate_prompt_tokens"));
        }
        Ok(body)
    }

    /// Returns whether special tokens are added. Default: yes, as engines add begin-of-text to plain prompts.
    pub(crate) fn adds_special_tokens(&self) -> bool {
        self.add_special_tokens.unwrap_or(true)
    }

    /// Returns the prompts: at least one, at most `limit`.
    pub(crate) fn prompts(&self, limit: usize) -> Result<Vec<CompletionPrompt>, PrefixError> {
        let raw = self.prompt.get();
        let mut start = raw.bytes().filter(|byte| !byte.is_ascii_whitespace());
        let prompts: Vec<CompletionPrompt> = match (start.next(), start.next()) {
            (Some(b'"'), _) => vec![CompletionPrompt::Text(serde_json::from_str(raw)?)],
            (Some(b'['), Some(b'"')) => {
                serde_json::from_str::<Vec<String>>(raw)?.into_iter().map(CompletionPrompt::Text).collect()
            }
            (Some(b'['), Some(b'[')) => {
                serde_json::from_str::<Vec<Vec<u32>>>(raw)?.into_iter().map(CompletionPrompt::Ids).collect()
            }
            (Some(b'['), Some(b'0'..=b'9')) => vec![CompletionPrompt::Ids(serde_json::from_str(raw)?)],
            _ => return Err(PrefixError::unresolvable(FallbackReason::Malformed, "prompt is neither text nor ids")),
        };
        match prompts.len() > limit {
            true => Err(PrefixError::unresolvable(FallbackReason::TooLarge, "too many prompts in one request")),
            false => Ok(prompts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(prompt: &str) -> Result<Vec<CompletionPrompt>, PrefixError> {
        let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        CompletionBody::parse(body.as_bytes())?.prompts(4)
    }

    fn text(text: &str) -> CompletionPrompt {
        CompletionPrompt::Text(text.into())
    }

    #[test]
    fn all_four_prompt_forms_are_parsed() {
        assert_eq!(prompts(r#""a\u00e9""#).unwrap(), [text("aé")]);
        assert_eq!(prompts(r#" [ "a", "b"]"#).unwrap(), [text("a"), text("b")]);
        assert_eq!(prompts("[1, 2 ,3]").unwrap(), [CompletionPrompt::Ids(vec![1, 2, 3])]);
        assert_eq!(
            prompts("[ [1],[2,3]]").unwrap(),
            [CompletionPrompt::Ids(vec![1]), CompletionPrompt::Ids(vec![2, 3])]
        );
    }

    #[test]
    fn other_prompt_types_are_malformed() {
        for prompt in ["null", "1", "{}", "[]", "[\"a\",1]", "[1,\"a\"]", "[-1]", "[1.5]", "[4294967296]", "true"] {
            assert_eq!(prompts(prompt).unwrap_err().reason(), FallbackReason::Malformed, "{prompt}");
        }
        assert_eq!(CompletionBody::parse(b"{}").unwrap_err().reason(), FallbackReason::Malformed);
    }

    #[test]
    fn a_batch_over_the_limit_is_too_large() {
        assert_eq!(prompts(r#"["1","2","3","4"]"#).unwrap().len(), 4);
        assert_eq!(prompts(r#"["1","2","3","4","5"]"#).unwrap_err().reason(), FallbackReason::TooLarge);
    }

    #[test]
    fn engine_only_options_are_unsupported() {
        let reason = |body: &str| CompletionBody::parse(body.as_bytes()).unwrap_err().reason();
        assert_eq!(reason(r#"{"prompt":"a","truncate_prompt_tokens":5}"#), FallbackReason::UnsupportedOption);
        assert_eq!(reason(r#"{"prompt":"a","prompt_embeds":"x"}"#), FallbackReason::Multimodal);
        assert!(CompletionBody::parse(br#"{"prompt":"a","truncate_prompt_tokens":null}"#).is_ok());
    }

    #[test]
    fn special_tokens_are_added_unless_the_request_declines() {
        let adds = |body: &str| CompletionBody::parse(body.as_bytes()).unwrap().adds_special_tokens();
        assert!(adds(r#"{"prompt":"a"}"#));
        assert!(!adds(r#"{"prompt":"a","add_special_tokens":false}"#));
    }
}
