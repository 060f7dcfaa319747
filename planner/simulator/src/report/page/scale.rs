//! Axis scales: mapping of values to positions, and ticks.

/// How positions depend on values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ScaleKind {
    Linear,
    /// Logarithmic; positive values only.
    Logarithmic,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct AxisScale {
    from: f64,
    to: f64,
    kind: ScaleKind,
}

impl AxisScale {
    /// Returns a scale that covers all values, extended to round numbers; 0 to 1 without values.
    pub(super) fn covering(values: impl Iterator<Item = f64>, steps: ScaleKind) -> Self {
        let usable = |value: &f64| value.is_finite() && (steps == ScaleKind::Linear || *value > 0.0);
        let (low, high) =
            values.filter(usable).fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return Self { from: 0.0, to: 1.0, kind: ScaleKind::Linear };
        }
        match steps {
            ScaleKind::Linear => {
                let step = round_step((high - low).max(high.abs() * 1e-3).max(1e-9));
                let (from, to) = ((low / step).floor() * step, (high / step).ceil() * step);
                Self { from, to: if to > from { to } else { from + step }, kind: steps }
            }
            ScaleKind::Logarithmic => {
                let (from, to) = (nearest_ticks(low).0, nearest_ticks(high).1);
                Self { from, to: if to > from { to } else { from * 10.0 }, kind: steps }
            }
        }
    }

    /// Returns a linear scale that covers the values with a margin on both ends.
    pub(super) fn through(values: &[f64]) -> Self {
        let (low, high) =
            values.iter().fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(*value), high.max(*value)));
        let margin = 0.05 * (high - low);
        let margin = if margin > 0.0 { margin } else { 0.5 * high.abs().max(1.0) };
        Self { from: low - margin, to: high + margin, kind: ScaleKind::Linear }
    }

    /// Returns a scale from zero to above the largest value.
    pub(super) fn from_zero(values: impl Iterator<Item = f64>) -> Self {
        Self::covering(values.chain([0.0]), ScaleKind::Linear)
    }

    /// Returns the position of a value: 0 at the start of the scale, 1 at its end; values outside are clamped.
    pub(super) fn position(&self, value: f64) -> f64 {
        let place = match self.kind {
            ScaleKind::Linear => (value - self.from) / (self.to - self.from),
            ScaleKind::Logarithmic => (value.max(self.from) / self.from).ln() / (self.to / self.from).ln(),
        };
        place.clamp(0.0, 1.0)
    }

    /// Returns about eight round values for ticks.
    pub(super) fn ticks(&self) -> Vec<f64> {
        match self.kind {
            ScaleKind::Linear => {
                let step = round_step(self.to - self.from);
                let count = ((self.to - self.from) / step).round() as usize;
                (0..=count).map(|n| self.from + step * n as f64).collect()
            }
            ScaleKind::Logarithmic => {
                let (first, last) = (self.from.log10().floor() as i32, self.to.log10().ceil() as i32);
                let digits: &[f64] = if last - first > 3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let all = (first..=last).flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powi(power)));
                all.filter(|mark| *mark >= self.from * 0.999 && *mark <= self.to * 1.001).collect()
            }
        }
    }
}

/// Returns 1, 2 or 5 times a power of ten such that the span holds at most six steps.
fn round_step(span: f64) -> f64 {
    let power = 10f64.powf((span / 5.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|digit| digit * power).find(|step| span / step <= 6.0).unwrap_or(power)
}

/// Returns the nearest values of 1, 2 and 5 times a power of ten: at or below, and at or above.
fn nearest_ticks(value: f64) -> (f64, f64) {
    let power = 10f64.powf(value.log10().floor());
    let marks = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    let below = marks.into_iter().rev().find(|mark| *mark <= value * 1.000_001).unwrap_or(power);
    let above = marks.into_iter().find(|mark| *mark >= value * 0.999_999).unwrap_or(10.0 * power);
    (below, above)
}

/// Formats a value with three significant digits.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    let digits = match size {
        _ if size == 0.0 || size >= 99.95 => 0,
        _ if size >= 9.995 => 1,
        _ if size >= 0.9995 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_scale_starts_and_ends_at_round_numbers_with_ticks() {
        let scale = AxisScale::from_zero([3.2, 17.0].into_iter());
        assert_eq!(scale.ticks(), [0.0, 5.0, 10.0, 15.0, 20.0]);
        assert_eq!((scale.position(0.0), scale.position(10.0), scale.position(99.0)), (0.0, 0.5, 1.0));
        assert_eq!(
            AxisScale::covering([24.0, 32.0, 40.0].into_iter(), ScaleKind::Linear).ticks(),
            [20.0, 25.0, 30.0, 35.0, 40.0]
        );
    }

    #[test]
    fn given_values_lie_within_their_scale() {
        let scale = AxisScale::through(&[24.0, 32.0, 40.0]);
        assert_eq!([24.0, 32.0, 40.0].map(|value| (22.0 * scale.position(value)).round()), [1.0, 11.0, 21.0]);
        assert_eq!(AxisScale::through(&[7.0]).position(7.0), 0.5);
    }

    #[test]
    fn logarithmic_scale_omits_zero_and_ticks_at_one_two_and_five() {
        let scale = AxisScale::covering([0.0, 0.03, 4.0].into_iter(), ScaleKind::Logarithmic);
        let marks = scale.ticks();
        assert_eq!(marks.len(), 8, "{marks:?}");
        assert!((marks[0] - 0.02).abs() < 1e-12 && (marks[7] - 5.0).abs() < 1e-12, "{marks:?}");
        assert_eq!((scale.position(0.0), scale.position(5.0)), (0.0, 1.0));
    }

    #[test]
    fn scale_exists_for_a_single_value_and_for_none() {
        for steps in [ScaleKind::Linear, ScaleKind::Logarithmic] {
            for values in [vec![], vec![7.0], vec![f64::NAN], vec![1.0]] {
                let scale = AxisScale::covering(values.iter().copied(), steps);
                assert!(scale.ticks().len() >= 2, "{values:?} {scale:?}");
                assert!((0.0..=1.0).contains(&scale.position(7.0)), "{values:?} {scale:?}");
            }
        }
    }

    #[test]
    fn numbers_are_printed_with_three_significant_digits() {
        let labels: Vec<String> = [0.0, 0.0123, 0.5, 1.234, 12.34, 120.0, 1234.5].map(number).into();
        assert_eq!(labels, ["0", "0.012", "0.5", "1.23", "12.3", "120", "1234"]);
    }
}
