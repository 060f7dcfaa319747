//! Means over seeds, with confidence intervals.

use serde::Serialize;

/// A mean over seeds.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct SeedMean {
    /// The mean.
    pub mean: f64,
    /// Half the width of the 95 % confidence interval; none for a single seed.
    pub confidence: Option<f64>,
    /// Number of seeds with a value.
    pub seeds: usize,
}

impl SeedMean {
    /// Returns the mean of one value per seed; none without values.
    pub fn of(values: &[f64]) -> Option<Self> {
        let seeds = values.len();
        if seeds == 0 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / seeds as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let confidence = (seeds > 1).then(|| {
            let deviation = (squares / (seeds - 1) as f64).sqrt();
            student_t(seeds - 1) * deviation / (seeds as f64).sqrt()
        });
        Some(Self { mean, confidence, seeds })
    }

    /// Formats the mean with `digits` decimal places.
    pub fn format(&self, digits: usize) -> String {
        match self.confidence {
            Some(confidence) => format!("{:.digits$} ±{confidence:.digits$}", self.mean),
            None => format!("{:.digits$}", self.mean),
        }
    }
}

/// Returns Student's t at 97.5 % for the degrees of freedom, from a table (the nearest smaller entry).
pub fn student_t(freedom: usize) -> f64 {
    const FREEDOM: [usize; 22] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 24, 29, 39, 59, 119];
    const T: [f64; 22] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.110, 2.093, 2.064, 2.045, 2.023, 2.001, 1.980,
    ];
    FREEDOM.iter().zip(T).rev().find(|(least, _)| **least <= freedom).map_or(f64::INFINITY, |(_, t)| t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_interval_uses_students_t_and_needs_two_seeds() {
        assert_eq!(SeedMean::of(&[]), None);
        assert_eq!(SeedMean::of(&[3.0]), Some(SeedMean { mean: 3.0, confidence: None, seeds: 1 }));
        // Standard deviation 1.5811, divided by the square root of five, times 2.776.
        let five = SeedMean::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert_eq!((five.mean, five.seeds), (3.0, 5));
        assert!((five.confidence.unwrap() - 1.963).abs() < 1e-3, "{five:?}");
        assert_eq!(five.format(2), "3.00 ±1.96");
        let two = SeedMean::of(&[1.0, 3.0]).unwrap();
        assert!((two.confidence.unwrap() - 12.706).abs() < 1e-3, "{two:?}");
    }

    #[test]
    fn students_t_rounds_down_to_the_next_table_row() {
        assert_eq!((student_t(4), student_t(16), student_t(1_000)), (2.776, 2.131, 1.980));
    }
}
