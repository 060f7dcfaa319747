//! Bounds of OwnerServe's CPU time by HAProxy's, which a change must not exceed.

use crate::measure::ProxyBenchResults;

/// Maximum ratio of the medians for a body size in bytes: what was measured when it was set (6.7, 5.5, 4.0, 3.1), and
/// half as much again for a shared machine.
const BOUNDS: [(usize, f64); 4] = [(1 << 10, 10.0), (32 << 10, 8.0), (128 << 10, 6.0), (512 << 10, 4.7)];

/// Describes the ratios above their bounds, and those that are missing.
pub(crate) fn exceeded(results: &ProxyBenchResults) -> Vec<String> {
    let cpu = |target: &str, size: usize| {
        results.costs.iter().find(|cost| cost.target == target && cost.size == size).and_then(|cost| cost.cpu_us)
    };
    let verdict = |(size, bound): (usize, f64)| match cpu("ownerserve", size).zip(cpu("haproxy", size)) {
        None => Some(format!("{} KB were not measured, so that their bound was not checked", size >> 10)),
        Some((own, other)) if own / other > bound => {
            let ratio = own / other;
            Some(format!("{} KB cost {ratio:.1} times HAProxy's CPU time; {bound:.1} is the bound", size >> 10))
        }
        Some(_) => None,
    };
    BOUNDS.into_iter().filter_map(verdict).collect()
}
