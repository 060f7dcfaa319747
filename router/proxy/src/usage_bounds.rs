//! Bounds for the token counts that an engine is believed to report.

use vocabulary::Tokens;

/// Factor over the expected count up to which an engine's count is believed.
const MAX_PLAUSIBLE_RATIO: u64 = 16;
/// Count that is always believed: images that a prompt only names, templates, the answer to a request without a limit.
const ALWAYS_PLAUSIBLE_TOKENS: Tokens = Tokens(65_536);

/// Returns the largest answer that an engine is believed to report, of which `delivered` tokens were seen. `asked` is the
/// request's limit; `None` where it sets none, or where it applies to each of several choices.
pub(crate) fn max_plausible_answer(asked: Option<Tokens>, delivered: Tokens) -> Tokens {
    match asked {
        Some(asked) => Tokens(asked.max(delivered).max(Tokens(1)).0.saturating_mul(MAX_PLAUSIBLE_RATIO)),
        None => max_plausible(delivered).max(UNBOUNDED_ANSWER),
    }
}

/// Returns the largest count that an engine is believed to report where `expected` tokens were expected.
pub(crate) fn max_plausible(expected: Tokens) -> Tokens {
    Tokens(expected.0.saturating_mul(MAX_PLAUSIBLE_RATIO)).max(ALWAYS_PLAUSIBLE_TOKENS)
}

/// The same limit for an answer whose request sets none.
pub(crate) const UNBOUNDED_ANSWER: Tokens = Tokens(MAX_PLAUSIBLE_RATIO * ALWAYS_PLAUSIBLE_TOKENS.0);
