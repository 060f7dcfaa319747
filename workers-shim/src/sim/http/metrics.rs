//! `/metrics` with vLLM 0.32's names, or with the SGLang 0.5 names that a router reads.

use std::fmt::{Display, Write};
use std::sync::Arc;
use vocabulary::WorkerRole;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use engine_model::EngineStats;

use super::SimState;
use crate::engine_api::KvConnector;

pub(crate) async fn metrics(State(app): State<Arc<SimState>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], render(&app)).into_response()
}

fn render(state: &SimState) -> String {
    if state.transfers.connector == KvConnector::Sglang {
        return render_sglang(state);
    }
    let (stats, latencies) = state.driver.stats_and_latencies();
    let labels = format!("engine=\"0\",model_name=\"{}\"", state.model);
    let mut page = MetricsWriter { text: String::new(), labels: labels.clone() };
    let _ = writeln!(page.text, "# TYPE process_start_time_seconds gauge");
    let _ = writeln!(page.text, "process_start_time_seconds {:?}", state.started);
    gauges(&mut page, state, &stats);
    counters(&mut page, &stats);
    if matches!(state.transfers.connector, KvConnector::Nixl | KvConnector::NixlBidirectional) {
        transfers(&mut page, state, &stats);
    }
    page.text += &latencies.first_token.render("vllm:time_to_first_token_seconds", &labels);
    page.text += &latencies.per_token.render("vllm:inter_token_latency_seconds", &labels);
    page.text += &latencies.total.render("vllm:e2e_request_latency_seconds", &labels);
    page.text
}

struct MetricsWriter {
    text: String,
    labels: String,
}

impl MetricsWriter {
    fn write_family(&mut self, name: &str, kind: &str) {
        let _ = writeln!(self.text, "# HELP {name} See vLLM.\n# TYPE {name} {kind}");
    }

    fn write_sample(&mut self, (name, kind): (&str, &str), value: impl Display) {
        self.write_family(name, kind);
        let _ = writeln!(self.text, "{name}{{{}}} {value}", self.labels);
    }

    fn write_labelled(&mut self, (name, kind): (&str, &str), label: &str, values: &[(&str, u64)]) {
        self.write_family(name, kind);
        for (which, value) in values {
            let _ = writeln!(self.text, "{name}{{{},{label}=\"{which}\"}} {value}.0", self.labels);
        }
    }
}

fn gauges(writer: &mut MetricsWriter, state: &SimState, stats: &EngineStats) {
    let waiting = stats.waiting + stats.pulling;
    let usage = f64::from(stats.blocks_used) / f64::from(state.profile.num_gpu_blocks);
    writer.write_sample(("vllm:num_requests_running", "gauge"), format!("{}.0", stats.running));
    writer.write_sample(("vllm:num_requests_waiting", "gauge"), format!("{waiting}.0"));
    let reasons = [("capacity", u64::from(stats.waiting)), ("deferred", u64::from(stats.pulling))];
    writer.write_labelled(("vllm:num_requests_waiting_by_reason", "gauge"), "reason", &reasons);
    writer.write_sample(("vllm:kv_cache_usage_perc", "gauge"), format!("{usage:?}"));
    writer.write_family("vllm:cache_config_info", "gauge");
    let (block, blocks) = (state.profile.block_size, state.profile.num_gpu_blocks);
    let _ = writeln!(
        writer.text,
        "vllm:cache_config_info{{block_size=\"{block}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",\
         engine=\"0\",kv_cache_size_tokens=\"{}\",num_gpu_blocks=\"{blocks}\",prefix_caching_hash_algo=\"sha256\"}} 1.0",
        state.profile.capacity()
    );
}

fn counters(page: &mut MetricsWriter, stats: &EngineStats) {
    let counter = |name| (name, "counter");
    let prompt = &stats.prompt;
    let all = prompt.computed + prompt.cached + prompt.external;
    let one = |writer: &mut MetricsWriter, name, value: u64| writer.write_sample(counter(name), format!("{value}.0"));
    one(page, "vllm:prefix_cache_queries_total", all);
    one(page, "vllm:prefix_cache_hits_total", prompt.cached);
    one(page, "vllm:external_prefix_cache_queries_total", prompt.external);
    one(page, "vllm:external_prefix_cache_hits_total", prompt.external);
    one(page, "vllm:prompt_tokens_total", all);
    one(page, "vllm:generation_tokens_total", stats.generated);
    one(page, "vllm:num_preemptions_total", stats.preemptions);
    let sources = [
        ("local_compute", prompt.computed),
        ("local_cache_hit", prompt.cached),
        ("external_kv_transfer", prompt.external),
    ];
    page.write_labelled(counter("vllm:prompt_tokens_by_source_total"), "source", &sources);
    let tiers =
        [("device", prompt.cached), ("host", 0), ("p2p", prompt.external), ("disk", 0), ("external_unspecified", 0)];
    page.write_labelled(counter("vllm:prompt_tokens_cached_by_source_total"), "source", &tiers);
    let ends = &stats.finishes;
    let reasons =
        [("stop", ends.stop), ("length", ends.length), ("abort", ends.abort), ("error", ends.error), ("repetition", 0)];
    page.write_labelled(counter("vllm:request_success_total"), "finished_reason", &reasons);
}

fn transfers(writer: &mut MetricsWriter, state: &SimState, stats: &EngineStats) {
    let transfers = &stats.transfers;
    let seconds = state.clock.real_duration(vocabulary::Micros(transfers.micros)).as_secs_f64();
    let labels = writer.labels.clone();
    for (name, sum) in
        [("vllm:nixl_xfer_time_seconds", seconds), ("vllm:nixl_bytes_transferred", transfers.bytes.0 as f64)]
    {
        writer.write_family(name, "histogram");
        let count = transfers.done;
        let _ = writeln!(writer.text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}.0");
        let _ = writeln!(writer.text, "{name}_count{{{labels}}} {count}.0\n{name}_sum{{{labels}}} {sum:?}");
    }
    writer.write_sample(("vllm:nixl_num_failed_transfers_total", "counter"), format!("{}.0", transfers.failed));
    writer.write_sample(("vllm:nixl_num_kv_expired_reqs_total", "counter"), format!("{}.0", stats.expired_holds));
}

/// SGLang does not report its process start time.
fn render_sglang(state: &SimState) -> String {
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
