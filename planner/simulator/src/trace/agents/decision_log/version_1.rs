//! Records of version 1 of the decision log.

use serde::Deserialize;
use vocabulary::Micros;

/// The version that this module reads.
pub(super) const VERSION: u32 = 1;

pub(super) const LINE: &str = r#"{"receipt": {"at_unix_ms", "known": {"session", "prompt", "deepest_overlap"}, "seen": {"ending", "total", "answered"}, ...}, "case": {"facts": {"reused"}, ...}} on each line of version 1"#;

#[derive(Deserialize)]
pub(super) struct OldDecisionLine {
    receipt: OldReceipt,
    case: Option<OldInputs>,
}

#[derive(Deserialize)]
struct OldReceipt {
    at_unix_ms: u64,
    known: OldLookup,
    seen: Option<OldOutcome>,
}

#[derive(Deserialize)]
struct OldLookup {
    session: String,
    prompt: u64,
    deepest_overlap: u64,
}

#[derive(Deserialize)]
struct OldOutcome {
    ending: String,
    total: Micros,
    cached: Option<u64>,
    answered: Option<u64>,
}

#[derive(Deserialize)]
struct OldInputs {
    facts: OldFacts,
}

#[derive(Deserialize)]
struct OldFacts {
    reused: u64,
}

impl From<OldDecisionLine> for super::DecisionLine {
    fn from(OldDecisionLine { receipt: OldReceipt { at_unix_ms, known, seen }, case }: OldDecisionLine) -> Self {
        let OldLookup { session: session_id, prompt: prompt_tokens, deepest_overlap: max_overlap_tokens } = known;
        let observed = seen.map(|seen| super::LoggedOutcome {
            outcome: seen.ending,
            duration: seen.total,
            cached_tokens: seen.cached,
            output_tokens: seen.answered,
        });
        Self {
            receipt: super::LoggedReceipt {
                arrived_at: Micros(at_unix_ms.saturating_mul(1_000)),
                lookup: super::LoggedLookup { session_id, prompt_tokens, max_overlap_tokens },
                observed,
            },
            planning_inputs: case
                .map(|case| super::LoggedInputs { step: super::LoggedStepFacts { reused_tokens: case.facts.reused } }),
        }
    }
}
