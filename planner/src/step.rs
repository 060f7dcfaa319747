//! Kind of a request's step. A label for people, metrics and the planner; it decides nothing by itself.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use strum::VariantArray as _;
use vocabulary::{Blocks, Micros, Tokens};

/// The six kinds of agent step.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    Debug,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum StepKind {
    /// Many new tokens; less than half of the prompt is reused
    /// (`ClassificationThresholds::tool_output_min_reused_percent`).
    NewLongPrefix,
    /// Many new tokens; at least half of the prompt is reused.
    LongToolOutput,
    /// Few new tokens.
    SmallIncrement,
    /// Nothing beyond the session's head is new: an exact retry, or the continuation of an answer.
    DecodeContinuation,
    /// The prompt leaves a known path before its end.
    ForkedRollout,
    /// A known session returns after a long pause.
    ColdResume,
}

impl StepKind {
    /// Every kind, in declaration order.
    pub const ALL: [Self; 6] = *Self::VARIANTS.first_chunk().expect("six kinds");

    /// Returns the kind's name for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Relation of a prompt to the longest known path that it shares.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum HeadRelation {
    /// No head is known, or the prompt shares nothing with it.
    #[default]
    Unknown,
    /// The prompt ends on the head's path: it adds nothing.
    Equals,
    /// The prompt starts with the whole head and continues.
    Extends,
    /// The prompt shares part of the head's path and then differs from it.
    Diverges,
}

impl HeadRelation {
    /// Returns the relation of a prompt of `prompt` whole blocks to a head of `head` blocks when the first `shared` are
    /// equal.
    ///
    /// Only whole blocks can be compared: a prompt that adds less than one block to its head reads as `Equals`.
    pub fn of(prompt: Blocks, head: Blocks, shared: Blocks) -> Self {
        if head == Blocks::ZERO || shared == Blocks::ZERO {
            Self::Unknown
        } else if shared >= prompt {
            Self::Equals
        } else if shared >= head {
            Self::Extends
        } else {
            Self::Diverges
        }
    }
}

/// Facts that determine the kind of a step.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
pub struct ClassificationInputs {
    /// Tokens of the whole prompt.
    pub prompt_tokens: Tokens,
    /// Leading tokens known from before: the longest overlap of any worker, or the shared part of the session's head.
    pub reused_tokens: Tokens,
    /// Relation of the prompt to the session's head.
    pub relation: HeadRelation,
    /// Time since the session's last step; none for a session without one.
    #[serde(with = "vocabulary::optional_micros_with_unit")]
    pub idle: Option<Micros>,
}

impl ClassificationInputs {
    /// Returns the tokens that nobody has computed yet.
    pub fn new_tokens(&self) -> Tokens {
        self.prompt_tokens - self.reused_tokens
    }
}

/// Thresholds between the kinds of step.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct ClassificationThresholds {
    /// A step with more new tokens than this is long.
    #[default(Tokens(4_096))]
    pub long_step_tokens: Tokens,
    /// Percent of the prompt that must be reused for a long step to be a tool output and not a new prefix.
    #[default(50)]
    pub tool_output_min_reused_percent: u8,
    /// A longer pause makes the step a cold resume.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(60_000_000))]
    pub cold_resume_after: Micros,
}

/// Returns the kind of a step. The most specific wins: continuation, then fork, then cold resume, then by size.
pub fn classify(facts: &ClassificationInputs, thresholds: &ClassificationThresholds) -> StepKind {
    match facts.relation {
        HeadRelation::Equals => return StepKind::DecodeContinuation,
        HeadRelation::Diverges => return StepKind::ForkedRollout,
        HeadRelation::Unknown | HeadRelation::Extends => {}
    }
    if facts.idle.is_some_and(|idle| idle > thresholds.cold_resume_after) {
        return StepKind::ColdResume;
    }
    if facts.new_tokens() <= thresholds.long_step_tokens {
        return StepKind::SmallIncrement;
    }
    let reused = u128::from(facts.reused_tokens.0) * 100;
    let min_reused = u128::from(facts.prompt_tokens.0) * u128::from(thresholds.tool_output_min_reused_percent);
    if reused < min_reused { StepKind::NewLongPrefix } else { StepKind::LongToolOutput }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(prompt: u64, reused: u64) -> StepKind {
        let facts = ClassificationInputs {
            prompt_tokens: Tokens(prompt),
            reused_tokens: Tokens(reused),
            ..ClassificationInputs::default()
        };
        classify(&facts, &ClassificationThresholds::default())
    }

    #[test]
    fn size_and_reuse_distinguish_the_three_ordinary_step_kinds() {
        assert_eq!(kind(4_096, 0), StepKind::SmallIncrement);
        assert_eq!(kind(4_097, 0), StepKind::NewLongPrefix);
        assert_eq!(kind(10_000, 4_999), StepKind::NewLongPrefix);
        assert_eq!(kind(10_000, 5_000), StepKind::LongToolOutput);
        assert_eq!(kind(100_000, 95_904), StepKind::SmallIncrement);
        assert_eq!(kind(0, 0), StepKind::SmallIncrement);
    }

    #[test]
    fn reuse_beyond_the_prompt_counts_as_zero_new_tokens() {
        assert_eq!(kind(100, u64::MAX), StepKind::SmallIncrement);
        assert_eq!(kind(u64::MAX, 0), StepKind::NewLongPrefix);
    }

    #[test]
    fn pause_beyond_the_threshold_makes_a_cold_resume() {
        let at = |idle| {
            let facts = ClassificationInputs {
                prompt_tokens: Tokens(9_000),
                reused_tokens: Tokens(8_000),
                relation: HeadRelation::Extends,
                idle: Some(Micros(idle)),
            };
            classify(&facts, &ClassificationThresholds::default())
        };
        assert_eq!(at(60_000_000), StepKind::SmallIncrement);
        assert_eq!(at(60_000_001), StepKind::ColdResume);
    }

    #[test]
    fn head_relation_outranks_pause_and_size() {
        let of = |relation| {
            let facts = ClassificationInputs {
                prompt_tokens: Tokens(9_000),
                reused_tokens: Tokens(0),
                relation,
                idle: Some(Micros(u64::MAX)),
            };
            classify(&facts, &ClassificationThresholds::default())
        };
        assert_eq!(of(HeadRelation::Equals), StepKind::DecodeContinuation);
        assert_eq!(of(HeadRelation::Diverges), StepKind::ForkedRollout);
        assert_eq!(of(HeadRelation::Extends), StepKind::ColdResume);
    }

    #[test]
    fn step_kind_thresholds_are_configurable() {
        let facts = ClassificationInputs {
            prompt_tokens: Tokens(100),
            reused_tokens: Tokens(30),
            ..ClassificationInputs::default()
        };
        let mut thresholds = ClassificationThresholds {
            long_step_tokens: Tokens(10),
            tool_output_min_reused_percent: 31,
            ..ClassificationThresholds::default()
        };
        assert_eq!(classify(&facts, &thresholds), StepKind::NewLongPrefix);
        thresholds.tool_output_min_reused_percent = 30;
        assert_eq!(classify(&facts, &thresholds), StepKind::LongToolOutput);
    }

    #[test]
    fn head_relation_compares_whole_blocks() {
        let of = |prompt, head, shared| HeadRelation::of(Blocks(prompt), Blocks(head), Blocks(shared));
        assert_eq!(of(10, 10, 10), HeadRelation::Equals);
        assert_eq!(of(8, 10, 8), HeadRelation::Equals, "a retry ends before the answer that followed it");
        assert_eq!(of(12, 10, 10), HeadRelation::Extends);
        assert_eq!(of(12, 10, 4), HeadRelation::Diverges);
        assert_eq!(of(12, 0, 0), HeadRelation::Unknown);
        assert_eq!(of(0, 10, 0), HeadRelation::Unknown);
        assert_eq!(of(12, 10, 0), HeadRelation::Unknown, "nothing shared is another conversation, not a fork");
    }

    #[test]
    fn step_kind_names_agree_in_code_and_json() {
        for kind in StepKind::ALL {
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{}\"", kind.as_str()));
        }
    }
}
