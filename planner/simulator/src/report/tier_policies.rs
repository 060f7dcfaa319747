//! Comparison of tier policies: every policy at every load under each.

use super::PolicySummary;
use super::cells::with_confidence;

const FIGURES: [&str; 13] = [
    "ttft_mean_s",
    "ttft_p95_s",
    "step_mean_s",
    "session_mean_s",
    "prefill_mtok",
    "recomputed_mtok",
    "restored_mtok",
    "restore_host_s",
    "restore_disk_s",
    "disk_written_gb",
    "disk_read_gb",
    "write_amplification",
    "hbm_session_capacity",
];

/// Returns one row per cell after a header row; `-` if nothing was measured.
pub fn tier_policy_table(cells: &[PolicySummary]) -> Vec<Vec<String>> {
    let cache = |summary: &PolicySummary| summary.tier_policy.map_or_else(|| "-".to_owned(), |cache| cache.to_string());
    let caches = std::iter::once("tier_policy".to_owned()).chain(cells.iter().map(cache));
    caches.zip(with_confidence(cells, &FIGURES)).map(|(cache, row)| [vec![cache], row].concat()).collect()
}
