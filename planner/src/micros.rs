//! From floating point to time. Floats are only ever intermediate: what is compared is whole microseconds.

use vocabulary::{Micros, Tokens};

/// Whole microseconds: negative is zero, too much is the most, and what is not a number is the most as well, so that
/// it never wins.
pub(crate) fn micros(span: f64) -> Micros {
    if span.is_nan() { Micros(u64::MAX) } else { Micros(span as u64) }
}

/// A weight or a rate's factor: negative or not finite counts as zero.
pub(crate) fn weight(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
}

/// How fast a worker computes prompt tokens.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ComputeRate {
    /// Microseconds of the first token.
    token: f64,
    /// 1 / (2 x the context at which a token costs twice the first), or 0.
    curve: f64,
}

impl ComputeRate {
    /// `token` microseconds for the first token, twice that for the one at `doubles_at`; 0 takes every token as equal.
    pub fn new(token: f64, doubles_at: Tokens) -> Self {
        Self { token: weight(token), curve: if doubles_at == Tokens::ZERO { 0.0 } else { 0.5 / doubles_at.0 as f64 } }
    }

    /// For tokens `from..to`: the one at position p costs `token * (1 + p / doubles_at)`.
    pub fn span(&self, from: Tokens, to: Tokens) -> Micros {
        if from >= to {
            return Micros::ZERO;
        }
        let (from, to) = (from.0 as f64, to.0 as f64);
        micros(self.token * ((to - from) + (to * to - from * from) * self.curve))
    }

    /// The first `to` tokens, as `span` has them: whole microseconds. In a fifth of its instructions, since a plan asks this
    /// of every victim of every worker.
    pub(crate) fn first(&self, to: Tokens) -> f64 {
        const MOST: u64 = i64::MAX as u64;
        let to = to.0.min(MOST) as i64 as f64;
        let span = self.token * (to + to * to * self.curve);
        if span < MOST as f64 { span as i64 as f64 } else { micros(span).0 as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_number_is_the_most_expensive() {
        assert_eq!(micros(f64::NAN), Micros(u64::MAX));
        assert_eq!(micros(f64::INFINITY), Micros(u64::MAX));
        assert_eq!(micros(1e300), Micros(u64::MAX));
        assert_eq!(micros(-1.0), Micros(0));
        assert_eq!(micros(12.9), Micros(12));
    }

    #[test]
    fn a_later_token_costs_more_as_the_context_grows() {
        let flat = ComputeRate::new(100.0, Tokens::ZERO);
        assert_eq!(flat.span(Tokens(0), Tokens(1_000)), Micros(100_000));
        assert_eq!(flat.span(Tokens(1_000), Tokens(1_000)), Micros::ZERO);
        assert_eq!(flat.span(Tokens(2_000), Tokens(1_000)), Micros::ZERO);
        let curved = ComputeRate::new(100.0, Tokens(1_000));
        // The mean of the first thousand costs half more, that of the second one and a half times more.
        assert_eq!(curved.span(Tokens(0), Tokens(1_000)), Micros(150_000));
        assert_eq!(curved.span(Tokens(1_000), Tokens(2_000)), Micros(250_000));
        assert_eq!(ComputeRate::new(f64::NAN, Tokens::ZERO).span(Tokens(0), Tokens(9)), Micros::ZERO);
    }

    #[test]
    fn the_first_tokens_cost_what_the_span_from_nothing_does() {
        for doubles in [0, 1, 7, 1_000, 1 << 40] {
            for token in [0.0, 1e-9, 0.3, 90.909, 100.0, 1e9, 1e300, f64::NAN] {
                let rate = ComputeRate::new(token, Tokens(doubles));
                for to in [0, 1, 2, 3, 1_074, 99_999, 1 << 20, 1 << 53, (1 << 53) + 1, 1 << 62, i64::MAX as u64] {
                    let span = rate.span(Tokens::ZERO, Tokens(to)).0 as f64;
                    assert_eq!(rate.first(Tokens(to)), span, "{doubles} {token} {to}");
                }
            }
        }
    }

    #[test]
    fn a_broken_weight_is_none() {
        for broken in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0] {
            assert_eq!(weight(broken), 0.0);
        }
        assert_eq!(weight(0.5), 0.5);
    }
}
