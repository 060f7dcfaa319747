//! Metrics of the prefix cache: how each prompt was recognised, and the results of spot checks.

use prefix::{IncrementalPromptMismatch, LookupTier};
use prometheus::{IntCounterVec, IntGauge};

use super::families::{families, label_values};

/// How an answer's count stands to ours; not comparable where one of both is not certain.
const COMPARISON_RESULTS: [&str; 3] = ["match", "mismatch", "not_comparable"];

fn verification_outcomes() -> Vec<&'static str> {
    IncrementalPromptMismatch::all().map(IncrementalPromptMismatch::label).chain(["match", "skipped"]).collect()
}

families! {
    /// Counters are updated when something happens, gauges when scraped; clones share their values.
    #[derive(Clone, Debug)]
    pub struct PrefixCacheMetrics {
        steps: IntCounterVec = "prefix_lookups_total" {tier = label_values::<LookupTier>()},
            "Chat prompts by what they were recognised by: session, leading bytes, segment, checkpoint, or cold.";
        verifications: IntCounterVec = "prefix_verifications_total" {outcome = verification_outcomes()},
            "Prompts known from an earlier step that were encoded again as a whole: match, what differed, why not, or skipped.";
        token_count_checks: IntCounterVec = "prompt_token_count_checks_total" {outcome = COMPARISON_RESULTS},
            "Answers whose count of prompt tokens agrees with ours, disagrees with it, or could not be compared.";
        cache_hit_checks: IntCounterVec = "cache_hit_checks_total" {outcome = COMPARISON_RESULTS},
            "Answers whose cached prompt tokens agree with what the worker's events told, are more, or could not be compared.";
        conversations: IntGauge = "prefix_cache_conversations", "Conversations whose next step is known in advance.";
        memory_bytes: IntGauge = "prefix_cache_memory_bytes", "Memory that these take.";
        body_memory_bytes: IntGauge = "prefix_cache_body_memory_bytes",
            "Memory of sessions' last bodies, by which only what is new in the next ones is read.";
        disabled_models: IntGauge = "prefix_cache_disabled_models",
            "Models whose prompts are computed as a whole because a verification found a difference.";
        suspected_models: IntGauge = "tokenizer_drift_models",
            "Models of which most workers that answered count other prompt tokens than were computed here, or find more of them cached than they told.";
    }
}
