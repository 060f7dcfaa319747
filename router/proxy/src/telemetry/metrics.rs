//! All metrics: one struct of families over a registry of its own, never a global one.
//!
//! The values of every label are bounded: paths of the route table, enum variants, configured workers, tenants of the
//! keys file.

use planner::{Action, StepKind};
use prometheus::{
    Encoder as _, Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
    TextEncoder,
};
use workers_shim::engine_api::{EventRefusal, StrippedFieldCounts};

use super::decision_metrics::DecisionMetrics;
use super::discovery_metrics::DiscoveryMetrics;
use super::families::{FINE_SECONDS, FamilyDescription, FamilyRegistrar, SECONDS, TOKENS, families, label_values};
use super::peer_exchange_metrics::ExchangeMetrics;
use super::prefix_cache_metrics::PrefixCacheMetrics;
use super::shared_cache_metrics::SharedCacheMetrics;
use crate::receipt::ReversePullOutcome;
use crate::server::ClosedConnections;
use crate::tenant_isolation::SaltSupport;

families! {
    /// All families, grouped by subject.
    #[derive(Debug)]
    pub struct Metrics {
        + requests: RequestMetrics, "Clients' requests.";
        + plans: PipelineMetrics, "Decisions and what came of them.";
        + workers: WorkerMetrics, "The workers, one label value each.";
        + ledger: LedgerMetrics, "The ledger as this node sees it.";
        + prefix_cache: PrefixCacheMetrics, "How prompts are known.";
        + shared_cache: SharedCacheMetrics, "What routers share beside the ledger.";
        + cluster: ClusterMetrics, "The quorum that keeps the ledger.";
        + exchange: ExchangeMetrics, "Routers among themselves.";
        + decisions: DecisionMetrics, "The decision log, and prices held against what was seen.";
        + memory: RequestMemoryMetrics, "Memory of the requests in work.";
        + process: RouterProcessMetrics, "This process.";
        + registered: MetricRegistry, "Where all of them are; made last.";
    }
}

/// The registry, and what its families are.
#[derive(Debug)]
pub struct MetricRegistry {
    registry: Registry,
    families: Vec<FamilyDescription>,
}

impl MetricRegistry {
    fn register(families: &FamilyRegistrar) -> Self {
        Self { registry: families.registry.clone(), families: families.families.borrow().clone() }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(Registry::new())
    }
}

impl Metrics {
    /// Registers every family with `registry`. Registering twice with the same one is a bug of ours.
    pub fn new(registry: Registry) -> Self {
        let metrics = Self::register(&FamilyRegistrar { registry, families: Default::default() });
        metrics.process.build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        metrics
    }

    /// Returns the definitions of all families.
    pub fn families(&self) -> &[FamilyDescription] {
        &self.registered.families
    }

    /// Returns all values in Prometheus's text format.
    pub fn render(&self) -> Vec<u8> {
        let mut text = Vec::with_capacity(16 * 1024);
        // Writing into memory cannot fail, and every family was checked when it was created.
        let _ = TextEncoder::new().encode(&self.registered.registry.gather(), &mut text);
        text
    }
}

families! {
    /// Metrics of clients' requests; clones share their values.
    #[derive(Clone, Debug)]
    pub struct RequestMetrics {
        total: IntCounterVec = "requests_total" {path, code}, "Requests answered, by path and HTTP status.";
        by_tenant: IntCounterVec = "tenant_requests_total" {tenant}, "Requests accepted, by tenant.";
        in_flight: IntGauge = "requests_in_flight", "Requests being served.";
        duration: HistogramVec = "request_duration_seconds" {path} [SECONDS],
            "From a request's arrival to the last byte of its answer.";
        first_token: HistogramVec = "time_to_first_token_seconds" {step_kind} [SECONDS],
            "From a request's arrival to the first byte of its answer, by step kind.";
        body_bytes: Histogram = "request_body_bytes"
            [&[1024.0, 8192.0, 32768.0, 131072.0, 524288.0, 2097152.0, 8388608.0, 33554432.0]],
            "Size of request bodies, decompressed.";
        errors: IntCounterVec = "request_errors_total" {error_type},
            "Requests that ended in an error of this proxy, by type of error.";
        stripped: IntCounterVec = "stripped_parameters_total" {parameter},
            "Parameters taken out of clients' bodies because only routers may send them.";
        salt_support: IntCounterVec = "cache_salt_checks_total" {outcome = label_values::<SaltSupport>()},
            "Workers that were asked once whether they keep prompts of different salts apart, by what they showed.";
        retries: IntCounterVec = "retries_total" {reason}, "Tries of a request after its first, by reason.";
        retries_refused: IntCounter = "retry_budget_exhausted_total",
            "Tries of a request after its first that the retry budget did not allow.";
        broken_streams: IntCounterVec = "stream_interruptions_total"
            {outcome = ["resumed", "complete", "not_resumable", "failed"]},
            "Streams that broke off after their first byte: resumed elsewhere, complete but for their end, or ended with an error.";
        refused_events: IntCounterVec = "stream_events_refused_total" {reason = label_values::<EventRefusal>()},
            "Events of workers that were not forwarded, which ends their streams, by reason.";
        resume: Histogram = "stream_resume_duration_seconds" [SECONDS],
            "From a stream's break to the first byte from another worker.";
        implausible_usage: IntCounter = "invalid_usage_reports_total",
            "Answers whose worker counted more tokens than the request can have.";
    }
}

families! {
    /// Metrics of the pipeline's decisions and their results; clones share their values.
    #[derive(Clone, Debug)]
    pub struct PipelineMetrics {
        stage_seconds: HistogramVec = "pipeline_stage_duration_seconds"
            {stage = ["parse", "identify", "locate", "classify", "plan", "execute", "stream", "commit"]} [FINE_SECONDS],
            "Time spent in each stage of the pipeline.";
        actions: IntCounterVec = "plan_actions_total" {action = Action::ALL.map(Action::as_str)},
            "Plans executed, by action.";
        kinds: IntCounterVec = "steps_total" {step_kind = StepKind::ALL.map(StepKind::as_str)}, "Agent steps, by kind.";
        owner_lookups: IntCounter = "owner_lookups_total", "Steps whose session had a live owner.";
        owner_hits: IntCounter = "owner_hits_total", "Steps served at the owner of their session.";
        overlap: Histogram = "prefix_overlap_tokens" [TOKENS], "Prompt tokens that the chosen worker held already.";
        prompt_tokens: IntCounterVec = "input_tokens_total" {source = ["cached", "computed", "transferred"]},
            "Prompt tokens by where their KV came from: cached, computed or transferred.";
        completion_tokens: IntCounter = "output_tokens_total", "Tokens generated, as the engines count them.";
        moved_bytes: IntCounter = "kv_transfer_bytes_total", "KV bytes moved between workers, as planned.";
        fallback: IntCounterVec = "plan_fallbacks_total" {reason},
            "Steps served with less knowledge, or by another plan, than wanted; by reason.";
        predicted: Histogram = "predicted_time_to_first_token_seconds" [SECONDS],
            "Predicted time to the first token of executed plans.";
        + kv_movement: InterStepKvMetrics, "KV that moves, or waits to, between two steps.";
    }
}

families! {
    /// Metrics of KV movement between two steps of a session; clones share their values.
    #[derive(Clone, Debug)]
    pub struct InterStepKvMetrics {
        prefix_replications: IntCounterVec = "prefix_replications_total"
            {outcome = ["sent", "failed", "used", "unused"]},
            "Prefixes that were sent to another worker before a step asked for them: sent or failed, and of those that \
             were sent, used or unused by the session's next step.";
        replicated_bytes: IntCounter = "prefix_replication_bytes_total", "KV that was sent before a step asked for it.";
        reverse_pulls: IntCounterVec = "reverse_pulls_total" {outcome = label_values::<ReversePullOutcome>()},
            "KV that decode workers handed back for their sessions' next steps, by what came of it.";
    }
}

families! {
    /// Metrics of the workers, refreshed from the fleet when scraped.
    #[derive(Debug)]
    pub struct WorkerMetrics {
        up: IntGaugeVec = "worker_up" {worker, role}, "1 when the worker takes work.";
        running: IntGaugeVec = "worker_requests_running" {worker}, "Requests in the worker's batch.";
        waiting: IntGaugeVec = "worker_requests_waiting" {worker}, "Requests waiting at the worker.";
        backlog: IntGaugeVec = "worker_pending_prefill_tokens" {worker},
            "Prompt tokens still to be computed at the worker.";
        kv_usage: GaugeVec = "worker_kv_cache_usage_ratio" {worker}, "Share of the worker's KV blocks in use.";
        kv_index_state: IntGaugeVec = "kv_index_state" {worker, state},
            "1 for the state of the index of the worker's blocks: exact, degraded or approximate.";
        event_sources: IntGaugeVec = "kv_event_sources" {worker, state},
            "KV event sources of the worker, by state: connected, or disconnected (or never connected).";
        events: IntCounterVec = "kv_events_total" {worker}, "KV events applied since start.";
        event_gaps: IntCounterVec = "kv_event_gaps_total" {worker}, "Gaps seen in the worker's KV events since start.";
        event_lag: GaugeVec = "kv_event_lag_seconds" {worker}, "Age of the newest KV event when it was applied.";
        blocks: IntGaugeVec = "residency_blocks" {worker}, "Blocks that the worker is known to hold.";
        distinct_blocks: IntGauge = "residency_distinct_blocks",
            "Blocks that any worker is known from its events to hold, each once.";
        assumed_blocks: IntGauge = "residency_assumed_blocks",
            "Blocks that workers are assumed to hold because prompts were routed there, counted once for each rank: of workers without KV events, and of prompts that are known by their bytes only.";
    }
}

families! {
    /// Metrics of the ledger, refreshed from its view when scraped.
    #[derive(Debug)]
    pub struct LedgerMetrics {
        leases: IntGaugeVec = "ledger_leases" {state}, "Workers by the state of their lease: held, expired or retired.";
        sessions: IntGauge = "ledger_sessions", "Sessions in the ledger.";
        applied: IntGauge = "ledger_applied_index", "Index of the last log entry applied here.";
        term: IntGauge = "ledger_term", "The quorum's term as known here.";
        stale: IntGauge = "ledger_stale", "1 while the ledger's view cannot be confirmed by a quorum.";
        queue: IntGauge = "ledger_commit_queue_depth", "Commands waiting for the quorum.";
        commits: IntCounterVec = "ledger_commits_total" {outcome}, "Commands handed in, by outcome.";
        commit_seconds: Histogram = "ledger_commit_duration_seconds" [FINE_SECONDS],
            "From handing in a command to its outcome.";
    }
}

families! {
    /// Metrics of the quorum that keeps the ledger, as known to this node; refreshed from the directory when scraped.
    #[derive(Debug)]
    pub struct ClusterMetrics {
        is_leader: IntGauge = "ledger_is_leader", "1 where this node leads the ledger's quorum.";
        members: IntGaugeVec = "ledger_members" {role}, "Nodes that keep the ledger, voters and learners.";
        lag: IntGaugeVec = "ledger_member_lag_entries" {node}, "Log entries that a member lacks; told by the leader.";
        level: IntGauge = "ledger_feature_level", "Feature level of the ledger's cluster.";
        tls_refused: IntCounter = "ledger_tls_handshake_failures_total",
            "Callers at the address for other nodes that TLS kept out, or that refused this node's certificate.";
        refused: IntCounterVec = "ledger_peer_connections_rejected_total" {reason = ["not_a_member", "invalid_term"]},
            "Callers at the address for other nodes that are no members of the cluster, or that said a term that cannot be.";
    }
}

families! {
    /// Metrics of the memory of requests in progress.
    #[derive(Clone, Debug)]
    pub struct RequestMemoryMetrics {
        reserved: IntGauge = "request_memory_reserved_bytes", "Memory that requests in work have reserved.";
        refused: IntCounterVec = "request_memory_rejections_total" {scope = ["tenant", "total"]},
            "Requests that were refused because no memory was left for their tenant, or for anybody.";
    }
}

families! {
    /// Metrics of this process and its settings.
    #[derive(Debug)]
    pub struct RouterProcessMetrics {
        build: IntGaugeVec = "build_info" {version}, "Always 1; the version is the label.";
        mode: IntGaugeVec = "routing_mode" {mode}, "1 for the mode in force: shadow, bypass or active.";
        rollout: Gauge = "routing_rollout_ratio", "Share of sessions that mode active applies to.";
        connections: IntGauge = "client_connections", "Open connections of clients.";
        unauthenticated_closed: IntCounterVec = "unauthenticated_connections_closed_total"
            {listener = ["clients", "operators"], reason = ClosedConnections::CAUSES},
            "Connections closed before they had authenticated: for a newer one because there were too many altogether or of \
             one address, or because they took too long.";
        idle_closed: IntCounterVec = "idle_connections_closed_total" {listener = ["clients", "operators"]},
            "Idle connections closed because a new one waited for room.";
        audit_failed: IntCounterVec = "audit_log_failures_total" {kind},
            "Operators' writes that were refused because the audit log had no room, and lines that it lost.";
        tasks_ended: IntCounterVec = "background_task_restarts_total" {task},
            "Background tasks that ended in an error of ours and were begun anew.";
        shortages: IntCounter = "ledger_resource_shortages_total",
            "Files and threads of the ledger that could not be opened because the process lacked something, and were waited for.";
        + discovery: DiscoveryMetrics, "Who lists workers.";
    }
}

impl RequestMetrics {
    /// Counts the parameters that only routers may send and that were removed from a client's body.
    pub fn count_stripped(&self, stripped: StrippedFieldCounts) {
        let counts = [
            ("kv_transfer_params", stripped.transfer_parameters),
            ("kv_cache_report_mode", stripped.report_mode),
            ("cache_salt", stripped.salt),
            ("request_id", stripped.request_ids),
            ("priority", stripped.priority),
        ];
        for (name, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
            self.stripped.with_label_values(&[name]).inc_by(count.into());
        }
    }
}

impl WorkerMetrics {
    /// Removes every worker's series, before the present workers are written again.
    pub fn reset(&self) {
        let Self { up, running, waiting, backlog, kv_index_state, blocks, event_sources, .. } = self;
        [up, running, waiting, backlog, kv_index_state, blocks, event_sources].iter().for_each(|family| family.reset());
        // Counters, too: they copy their source's count, and a counter can only be set after a reset.
        self.events.reset();
        self.event_gaps.reset();
        [&self.kv_usage, &self.event_lag].iter().for_each(|family| family.reset());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_family_has_the_prefix_and_renders_its_value() {
        let metrics = Metrics::default();
        metrics.requests.total.with_label_values(&["/v1/models", "200"]).inc();
        metrics.plans.overlap.observe(100.0);
        let text = String::from_utf8(metrics.render()).unwrap();
        assert!(text.contains("ownerserve_requests_total{code=\"200\",path=\"/v1/models\"} 1"), "{text}");
        assert!(text.contains("ownerserve_prefix_overlap_tokens_bucket{le=\"256\"} 1"));
        assert!(text.lines().filter(|l| !l.starts_with('#')).all(|l| l.starts_with("ownerserve_")));
    }

    #[test]
    fn dashboard_shows_exactly_the_registered_families() {
        let dashboard = include_str!("../../../../configs/grafana/ownerserve.json");
        let json: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let targets =
            json["panels"].as_array().unwrap().iter().filter_map(|panel| panel["targets"].as_array()).flatten();
        let queries: String = targets.map(|target| format!("{} ", target["expr"].as_str().unwrap())).collect();
        let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
        let base = |name: &str| {
            let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            histogram.unwrap_or(name).to_owned()
        };
        let shown: BTreeSet<_> = queries.split(word).filter(|w| w.starts_with("ownerserve_")).map(base).collect();
        let known: BTreeSet<_> = Metrics::default().families().iter().map(|family| family.name.clone()).collect();
        assert_eq!(shown, known);
    }

    #[test]
    fn dashboard_panel_ids_are_unique() {
        let dashboard = include_str!("../../../../configs/grafana/ownerserve.json");
        let json: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let ids: Vec<_> =
            json["panels"].as_array().unwrap().iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "{ids:?}");
    }

    #[test]
    fn removed_worker_leaves_no_series() {
        let metrics = Metrics::default();
        metrics.workers.running.with_label_values(&["127.0.0.1:1"]).set(3);
        metrics.workers.kv_usage.with_label_values(&["127.0.0.1:1"]).set(0.5);
        metrics.workers.reset();
        assert!(!String::from_utf8(metrics.render()).unwrap().contains("127.0.0.1:1"));
    }
}
