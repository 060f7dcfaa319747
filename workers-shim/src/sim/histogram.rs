//! Histogram of seconds in Prometheus text format, with vLLM's buckets.

use std::fmt::Write;
use std::time::Duration;

const BOUNDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];

/// Counts by bucket.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    counts: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    pub(crate) fn observe(&mut self, span: Duration) {
        let seconds = span.as_secs_f64();
        if let Some(bucket) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            self.counts[bucket] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }

    /// Returns its lines; `labels` without braces.
    pub(crate) fn render(&self, name: &str, labels: &str) -> String {
        let mut text = format!("# TYPE {name} histogram\n");
        let mut below = 0;
        for (bound, count) in BOUNDS.iter().zip(self.counts) {
            below += count;
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound:?}\"}} {below}.0");
        }
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {}.0", self.count);
        let _ = writeln!(text, "{name}_count{{{labels}}} {}.0\n{name}_sum{{{labels}}} {:?}", self.count, self.sum);
        text
    }
}
