//! Metrics of knowing prompts: by what each was recognised, and what the looks at them found.

use prefix::{Difference, Rung};
use prometheus::{IntCounterVec, IntGauge};
use strum::VariantArray as _;

use super::families::Families;

/// Counted where it happens; clones share their values.
#[derive(Clone, Debug)]
pub struct IdentityMetrics {
    /// `identified_steps_total{rung}`: by what each chat prompt was recognised.
    pub steps: IntCounterVec,
    /// `identity_looks_total{outcome}`: steps that were encoded again as a whole: `same`, what differed (`length`, `tokens`, or why
    /// the whole one is known by its bytes only), or `left_out`.
    pub looks: IntCounterVec,
    /// `identity_counted_prompts_total{result}`: answers whose usage was held against the prompt's tokens here: `agrees`,
    /// `disagrees`, or `not_compared` where one of both is not certain.
    pub counted_prompts: IntCounterVec,
    /// `identity_found_prompts_total{result}`: answers whose cached tokens were held against what the worker's events had told
    /// of the prompt: `agrees`, `disagrees`, or `not_compared` where one of both is not certain, or nothing follows from it.
    pub found_prompts: IntCounterVec,
    /// `identity_conversations`, refreshed when scraped.
    pub conversations: IntGauge,
    /// `identity_memory_bytes`, refreshed when scraped.
    pub memory_bytes: IntGauge,
    /// `identity_distrusted_models`, refreshed when scraped.
    pub distrusted: IntGauge,
    /// `identity_doubted_models`, refreshed when scraped.
    pub doubted: IntGauge,
}

impl IdentityMetrics {
    pub(super) fn new(f: &Families<'_>) -> Self {
        let metrics = Self {
            steps: f.counters(
                "identified_steps_total",
                "Chat prompts by what they were recognised by: session, leading bytes, segment, checkpoint, or cold.",
                &["rung"],
            ),
            looks: f.counters(
                "identity_looks_total",
                "Prompts known from an earlier step that were encoded again as a whole: same, what differed, or why not.",
                &["outcome"],
            ),
            counted_prompts: f.counters(
                "identity_counted_prompts_total",
                "Answers whose count of prompt tokens agrees with ours, disagrees with it, or could not be compared.",
                &["result"],
            ),
            found_prompts: f.counters(
                "identity_found_prompts_total",
                "Answers whose cached prompt tokens agree with what the worker's events told, are more, or could not be compared.",
                &["result"],
            ),
            conversations: f.gauge("identity_conversations", "Conversations whose next step is known in advance."),
            memory_bytes: f.gauge("identity_memory_bytes", "Memory that these take."),
            distrusted: f.gauge(
                "identity_distrusted_models",
                "Models whose prompts are computed as a whole because a look found a difference.",
            ),
            doubted: f.gauge(
                "identity_doubted_models",
                "Models of which most workers that answered count other prompt tokens than were computed here, or find more of them cached than they told.",
            ),
        };
        Rung::VARIANTS.iter().for_each(|rung| drop(metrics.steps.with_label_values(&[rung.as_ref()])));
        let outcomes = Difference::all().map(Difference::label).chain(["same", "left_out"]);
        outcomes.for_each(|outcome| drop(metrics.looks.with_label_values(&[outcome])));
        let results = ["agrees", "disagrees", "not_compared"];
        for counter in [&metrics.counted_prompts, &metrics.found_prompts] {
            results.iter().for_each(|result| drop(counter.with_label_values(&[result])));
        }
        metrics
    }
}
