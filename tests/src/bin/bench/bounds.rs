//! Bounds of OwnerServe's CPU time by HAProxy's, which a change must not exceed.

use crate::measure::ProxyBenchResults;

/// Maximum ratio of the medians for a body size in bytes. The measured ratios, with room for a shared machine.
const BOUNDS: [(usize, f64); 4] = [(1 << 10, 14.0), (32 << 10, 12.0), (128 << 10, 9.0), (512 << 10, 7.0)];

/// Describes the ratios above their bounds.
pub(crate) fn exceeded(results: &ProxyBenchResults) -> Vec<String> {
    let cpu = |target: &str, size: usize| {
        results.costs.iter().find(|cost| cost.target == target && cost.size == size).and_then(|cost| cost.cpu_us)
    };
    let ratio = |size| cpu("ownerserve", size).zip(cpu("haproxy", size)).map(|(own, other)| own / other);
    let above =
        |(size, bound): (usize, f64)| ratio(size).filter(|ratio| *ratio > bound).map(|ratio| (size, bound, ratio));
    let text = |(size, bound, ratio): (usize, f64, f64)| {
        format!("{} KB cost {ratio:.1} times HAProxy's CPU time; {bound:.1} is the bound", size >> 10)
    };
    BOUNDS.into_iter().filter_map(above).map(text).collect()
}
