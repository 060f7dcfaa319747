//! From floating point to time. Floats are only ever intermediate: what is compared is whole microseconds.

use vocabulary::Micros;

/// Whole microseconds: negative is zero, too much is the most, and what is not a number is the most as well, so that
/// it never wins.
pub(crate) fn micros(span: f64) -> Micros {
    if span.is_nan() { Micros(u64::MAX) } else { Micros(span as u64) }
}

/// A weight or a rate's factor: negative or not finite counts as zero.
pub(crate) fn weight(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
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
    fn a_broken_weight_is_none() {
        for broken in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0] {
            assert_eq!(weight(broken), 0.0);
        }
        assert_eq!(weight(0.5), 0.5);
    }
}
