//! Distribution of times, and the definition of percentiles that every figure uses.

use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

/// Definition of percentiles, as text.
pub(super) const PERCENTILE: &str = "pN of n times is the one that floor(N/100 * n) of them come before when they are sorted; of \
    several seeds the mean of each seed's pN, with the half width of its 95 % confidence interval by Student's t";

/// Definition of the measurement window, as text.
pub(super) const MEASUREMENT_WINDOW: &str = "times of steps are measured from the beginning until fewer sessions run than were asked for, that \
    is until the trace has no next session (requests at recorded times: all of them); session times, tokens, bytes and \
    shares are of the whole run";

/// Distribution of times, in seconds. All zeros without samples; serialized as `null` then.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TimeDistribution {
    /// Number of samples.
    pub count: usize,
    /// The mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Percentiles p0 to p100; empty without samples.
    pub curve: Vec<f64>,
}

impl TimeDistribution {
    /// Returns the distribution of times in any order.
    pub fn of(mut times: Vec<f64>) -> Self {
        if times.is_empty() {
            return Self::default();
        }
        // Summed in the original order, so that equal runs have bit-identical means.
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        times.sort_by(f64::total_cmp);
        let at = |share: f64| percentile(&times, share);
        let curve = (0..=100).map(|percent| at(f64::from(percent) / 100.0)).collect();
        Self { count: times.len(), mean, p50: at(0.5), p95: at(0.95), p99: at(0.99), curve }
    }

    /// Returns one figure of the distribution; none without samples.
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

/// Returns the value at this share of the sorted values; zero without any.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = (share * sorted.len() as f64) as usize;
    sorted.get(at).or(sorted.last()).copied().unwrap_or_default()
}
