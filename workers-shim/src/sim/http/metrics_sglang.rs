//! `/metrics` with the SGLang 0.5 names that a router reads. SGLang does not report its process start time.

use std::fmt::Write;

use vocabulary::WorkerRole;

use super::SimState;

pub(super) fn render(state: &SimState) -> String {
    let (stats, _) = state.driver.stats_and_latencies();
    let kind = if state.transfers.role == WorkerRole::Hybrid { "unified" } else { state.transfers.role.as_str() };
    let usage = f64::from(stats.blocks_used) / f64::from(state.profile.num_gpu_blocks);
    let labels = format!("engine_type=\"{kind}\",model_name=\"{}\",pp_rank=\"0\",tp_rank=\"0\"", state.model);
    let mut page = String::new();
    for (name, value) in [
        ("num_running_reqs", f64::from(stats.running)),
        ("num_queue_reqs", f64::from(stats.waiting + stats.pulling)),
        ("token_usage", usage),
        ("max_total_num_tokens", state.profile.capacity() as f64),
        ("page_size", f64::from(state.profile.block_size)),
        ("num_pages", f64::from(state.profile.num_gpu_blocks)),
        ("context_len", f64::from(state.profile.max_model_len)),
    ] {
        let _ = writeln!(page, "# TYPE sglang:{name} gauge\nsglang:{name}{{{labels}}} {value:?}");
    }
    let _ = writeln!(page, "# TYPE sglang:prefill_effective_tokens_total counter");
    for (mode, tokens) in [("input", stats.prompt.computed), ("device_hit", stats.prompt.cached)] {
        let _ = writeln!(page, "sglang:prefill_effective_tokens_total{{{labels},mode=\"{mode}\"}} {tokens}.0");
    }
    page
}
