//! What managing the cache in other ways comes to: every policy at every load, under each.

use super::{Cell, Metric};

/// What is compared.
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
    "sessions_fit",
];

/// One row a cell, below the columns' names; `-` where nothing was measured.
pub fn cache_table(cells: &[Cell]) -> Vec<Vec<String>> {
    let names = ["cache", "policy", "load"].into_iter().chain(FIGURES).map(str::to_owned).collect();
    let row = |cell: &Cell| {
        let said = |name: &&str| match (Metric::named(name), cell.mean(name)) {
            (Some(metric), Some(mean)) => mean.said(metric.digits),
            _ => "-".to_owned(),
        };
        let cache = cell.cache.map_or_else(|| "-".to_owned(), |cache| cache.to_string());
        let who = [cache, cell.policy.to_owned(), cell.load.to_string()];
        who.into_iter().chain(FIGURES.iter().map(said)).collect()
    };
    std::iter::once(names).chain(cells.iter().map(row)).collect()
}
