//! Metrics of the prefix cache: how each prompt was recognised, and the results of spot checks.

use prefix::{LookupTier, PromptMismatch};
use prometheus::{IntCounterVec, IntGauge};

use super::families::{families, label_values};

/// How an answer's count stands to ours; not compared where one of both is not certain.
const COMPARISON_RESULTS: [&str; 3] = ["agrees", "disagrees", "not_compared"];

fn verification_outcomes() -> Vec<&'static str> {
    PromptMismatch::all().map(PromptMismatch::label).chain(["same", "left_out"]).collect()
}

families! {
    /// Counters are updated when something happens, gauges when scraped; clones share their values.
    #[derive(Clone, Debug)]
    pub struct PrefixCacheMetrics {
        steps: IntCounterVec = "identified_steps_total" {rung = label_values::<LookupTier>()},
            "Chat prompts by what they were recognised by: session, leading bytes, segment, checkpoint, or cold.";
        verifications: IntCounterVec = "identity_looks_total" {outcome = verification_outcomes()},
            "Prompts known from an earlier step that were encoded again as a whole: same, what differed, or why not.";
        token_count_checks: IntCounterVec = "identity_counted_prompts_total" {result = COMPARISON_RESULTS},
            "Answers whose count of prompt tokens agrees with ours, disagrees with it, or could not be compared.";
        cache_hit_checks: IntCounterVec = "identity_found_prompts_total" {result = COMPARISON_RESULTS},
            "Answers whose cached prompt tokens agree with what the worker's events told, are more, or could not be compared.";
        conversations: IntGauge = "identity_conversations", "Conversations whose next step is known in advance.";
        memory_bytes: IntGauge = "identity_memory_bytes", "Memory that these take.";
        disabled_models: IntGauge = "identity_distrusted_models",
            "Models whose prompts are computed as a whole because a look found a difference.";
        suspected_models: IntGauge = "identity_doubted_models",
            "Models of which most workers that answered count other prompt tokens than were computed here, or find more of them cached than they told.";
    }
}
