//! A distribution of times, and the one percentile that every figure means.

use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

/// What a percentile is, in words.
pub(super) const PERCENTILE: &str = "pN of n times is the one that floor(N/100 * n) of them come before when they are sorted; of \
    several seeds the mean of each seed's pN, with the half width of its 95 % confidence interval by Student's t";

/// What is measured when, in words.
pub(super) const MEASUREMENT_WINDOW: &str = "times of steps are measured from the beginning until fewer sessions run than were asked for, that \
    is until the trace has no next session (requests at recorded times: all of them); session times, tokens, bytes and \
    shares are of the whole run";

/// A distribution of times, in seconds. Without any all are zero, and JSON says `null`.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TimeDistribution {
    /// How many were measured.
    pub count: usize,
    /// The mean.
    pub mean: f64,
    /// Half are shorter.
    pub p50: f64,
    /// 95 of a hundred are.
    pub p95: f64,
    /// 99 of a hundred are.
    pub p99: f64,
    /// p0 to p100; empty without any.
    pub curve: Vec<f64>,
}

impl TimeDistribution {
    /// Of times in any order.
    pub fn of(mut times: Vec<f64>) -> Self {
        if times.is_empty() {
            return Self::default();
        }
        // Summed as they came, so that equal runs have equal means to the bit.
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        times.sort_by(f64::total_cmp);
        let at = |share: f64| percentile(&times, share);
        let curve = (0..=100).map(|percent| at(f64::from(percent) / 100.0)).collect();
        Self { count: times.len(), mean, p50: at(0.5), p95: at(0.95), p99: at(0.99), curve }
    }

    /// One of its figures; none when nothing was measured.
    pub fn if_measured(&self, figure: fn(&Self) -> f64) -> Option<f64> {
        (self.count > 0).then(|| figure(self))
    }
}

impl Serialize for TimeDistribution {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut all = serializer.serialize_struct("Times", 5)?;
        all.serialize_field("count", &self.count)?;
        all.serialize_field("mean", &self.if_measured(|times| times.mean))?;
        all.serialize_field("p50", &self.if_measured(|times| times.p50))?;
        all.serialize_field("p95", &self.if_measured(|times| times.p95))?;
        all.serialize_field("p99", &self.if_measured(|times| times.p99))?;
        all.end()
    }
}

/// The value that this share of sorted values comes before; zero without any.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = (share * sorted.len() as f64) as usize;
    sorted.get(at).or(sorted.last()).copied().unwrap_or_default()
}
