//! Conversion from floating point to time. Floats are intermediate values only: comparisons use whole microseconds.

use vocabulary::{Micros, Tokens};

/// Rounds down to whole microseconds. Negative values become zero; overflow and NaN become the maximum, so that they
/// never win.
pub fn micros(span: f64) -> Micros {
    if span.is_nan() { Micros(u64::MAX) } else { Micros(span as u64) }
}

/// Sanitizes a weight or rate: negative or non-finite values become zero.
pub fn valid_or_zero(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
}

/// Time that a worker takes to compute prompt tokens, by their position.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PrefillTimeModel {
    /// Microseconds for the first token.
    first_token: f64,
    /// 1 / (2 x the context length at which a token costs twice the first), or 0.
    quadratic: f64,
}

impl PrefillTimeModel {
    /// Creates a model with `token` microseconds for the first token and twice that at position `doubles_at`; 0 makes
    /// every token cost the same.
    pub fn new(token: f64, doubles_at: Tokens) -> Self {
        Self {
            first_token: valid_or_zero(token),
            quadratic: if doubles_at == Tokens::ZERO { 0.0 } else { 0.5 / doubles_at.0 as f64 },
        }
    }

    /// Returns the time for tokens `from..to`: the token at position p costs `first_token * (1 + p / doubles_at)`.
    pub fn span(&self, from: Tokens, to: Tokens) -> Micros {
        if from >= to {
            return Micros::ZERO;
        }
        let (from, to) = (from.0 as f64, to.0 as f64);
        micros(self.first_token * ((to - from) + (to * to - from * from) * self.quadratic))
    }

    /// Returns the time for the first `to` tokens, equal to `span` and in whole microseconds. Takes a fifth of its
    /// instructions, since a plan calls this for every victim of every worker.
    pub(crate) fn first(&self, to: Tokens) -> f64 {
        const MAX_EXACT: u64 = i64::MAX as u64;
        let to = to.0.min(MAX_EXACT) as i64 as f64;
        let span = self.first_token * (to + to * to * self.quadratic);
        if span < MAX_EXACT as f64 { span as i64 as f64 } else { micros(span).0 as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_converts_to_the_highest_cost() {
        assert_eq!(micros(f64::NAN), Micros(u64::MAX));
        assert_eq!(micros(f64::INFINITY), Micros(u64::MAX));
        assert_eq!(micros(1e300), Micros(u64::MAX));
        assert_eq!(micros(-1.0), Micros(0));
        assert_eq!(micros(12.9), Micros(12));
    }

    #[test]
    fn later_tokens_cost_more_as_context_grows() {
        let flat = PrefillTimeModel::new(100.0, Tokens::ZERO);
        assert_eq!(flat.span(Tokens(0), Tokens(1_000)), Micros(100_000));
        assert_eq!(flat.span(Tokens(1_000), Tokens(1_000)), Micros::ZERO);
        assert_eq!(flat.span(Tokens(2_000), Tokens(1_000)), Micros::ZERO);
        let curved = PrefillTimeModel::new(100.0, Tokens(1_000));
        // On average, the first thousand tokens cost 1.5 times the first token, the second thousand 2.5 times.
        assert_eq!(curved.span(Tokens(0), Tokens(1_000)), Micros(150_000));
        assert_eq!(curved.span(Tokens(1_000), Tokens(2_000)), Micros(250_000));
        assert_eq!(PrefillTimeModel::new(f64::NAN, Tokens::ZERO).span(Tokens(0), Tokens(9)), Micros::ZERO);
    }

    #[test]
    fn first_tokens_cost_equals_the_span_from_zero() {
        for doubles in [0, 1, 7, 1_000, 1 << 40] {
            for token in [0.0, 1e-9, 0.3, 90.909, 100.0, 1e9, 1e300, f64::NAN] {
                let rate = PrefillTimeModel::new(token, Tokens(doubles));
                for to in [0, 1, 2, 3, 1_074, 99_999, 1 << 20, 1 << 53, (1 << 53) + 1, 1 << 62, i64::MAX as u64] {
                    let span = rate.span(Tokens::ZERO, Tokens(to)).0 as f64;
                    assert_eq!(rate.first(Tokens(to)), span, "{doubles} {token} {to}");
                }
            }
        }
    }

    #[test]
    fn invalid_weight_counts_as_zero() {
        for broken in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0] {
            assert_eq!(valid_or_zero(broken), 0.0);
        }
        assert_eq!(valid_or_zero(0.5), 0.5);
    }
}
