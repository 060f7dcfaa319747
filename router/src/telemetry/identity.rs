//! Metrics of knowing prompts: by what each was recognised, and what the looks at them found.

use prefix::{Difference, Rung};
use prometheus::{IntCounterVec, IntGauge};

use super::families::{families, words};

/// How an answer's count stands to ours; not compared where one of both is not certain.
const COMPARED: [&str; 3] = ["agrees", "disagrees", "not_compared"];

fn looks() -> Vec<&'static str> {
    Difference::all().map(Difference::label).chain(["same", "left_out"]).collect()
}

families! {
    /// Counted where it happens, gauges when scraped; clones share their values.
    #[derive(Clone, Debug)]
    pub struct IdentityMetrics {
        steps: IntCounterVec = "identified_steps_total" {rung = words::<Rung>()},
            "Chat prompts by what they were recognised by: session, leading bytes, segment, checkpoint, or cold.";
        looks: IntCounterVec = "identity_looks_total" {outcome = looks()},
            "Prompts known from an earlier step that were encoded again as a whole: same, what differed, or why not.";
        counted_prompts: IntCounterVec = "identity_counted_prompts_total" {result = COMPARED},
            "Answers whose count of prompt tokens agrees with ours, disagrees with it, or could not be compared.";
        found_prompts: IntCounterVec = "identity_found_prompts_total" {result = COMPARED},
            "Answers whose cached prompt tokens agree with what the worker's events told, are more, or could not be compared.";
        conversations: IntGauge = "identity_conversations", "Conversations whose next step is known in advance.";
        memory_bytes: IntGauge = "identity_memory_bytes", "Memory that these take.";
        distrusted: IntGauge = "identity_distrusted_models",
            "Models whose prompts are computed as a whole because a look found a difference.";
        doubted: IntGauge = "identity_doubted_models",
            "Models of which most workers that answered count other prompt tokens than were computed here, or find more of them cached than they told.";
    }
}
