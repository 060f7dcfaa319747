//! Token counts of an answer in the format of each API.

use serde_json::{Value, json};

use super::choice::ChoiceEnd;

/// Counts over all choices of a request.
#[derive(Clone, Copy, Default)]
pub(crate) struct UsageTotals {
    pub(crate) prompt: u32,
    pub(crate) cached: u32,
    pub(crate) created: u32,
    pub(crate) generated: u32,
    /// The producer's cached tokens, which its consumer reports instead of its own.
    remote_cached: Option<u32>,
}

impl UsageTotals {
    pub(crate) fn new(remote_cached: Option<u32>) -> Self {
        Self { remote_cached, ..Self::default() }
    }

    /// Adds a choice. Choices of one prompt count the prompt once.
    pub(crate) fn add(&mut self, choice: u32, end: &ChoiceEnd) {
        if choice == 0 {
            self.prompt += end.finish.prompt;
            self.cached += self.remote_cached.unwrap_or(end.finish.cached);
            self.created += end.finish.created;
        }
        self.generated += end.finish.generated;
    }

    pub(crate) fn openai(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.generated,
            "completion_tokens": self.generated,
            "prompt_tokens_details": {
                "cached_tokens": self.cached,
                "created_cache_tokens": self.created,
                "multimodal_tokens": null,
            },
            "completion_tokens_details": null,
        })
    }

    pub(crate) fn responses(&self) -> Value {
        json!({
            "input_tokens": self.prompt,
            "input_tokens_details": {
                "cached_tokens": self.cached,
                "cache_write_tokens": self.created,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": self.generated,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": self.prompt + self.generated,
        })
    }

    pub(crate) fn anthropic(&self) -> Value {
        json!({
            "input_tokens": self.prompt.saturating_sub(self.cached + self.created),
            "output_tokens": self.generated,
            "cache_creation_input_tokens": self.created,
            "cache_read_input_tokens": self.cached,
        })
    }
}
