//! The metrics, all of them: one struct of families over a registry of their own, never a global one.
//!
//! Every label's values are bounded: paths of the route table, words of enums, configured workers, tenants of the keys file.

use planner::{Action, StepKind};
use prometheus::{
    Encoder as _, Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
    TextEncoder,
};
use workers_shim::dialect::Stripped;

use super::between_steps::BetweenSteps;
use super::cluster::ClusterMetrics;
use super::decisions::DecisionMetrics;
use super::discovery::DiscoveryMetrics;
use super::exchange::ExchangeMetrics;
use super::families::{FINE_SECONDS, Families, SECONDS, TOKENS};
use super::identity::IdentityMetrics;
use super::soft_state::SoftStateMetrics;

/// All families, by what they tell about.
#[derive(Debug)]
pub struct Metrics {
    /// Clients' requests.
    pub requests: Requests,
    /// Decisions and what came of them.
    pub plans: Plans,
    /// The workers, one label value each.
    pub workers: Workers,
    /// The ledger as this node sees it.
    pub ledger: Ledger,
    /// How prompts are known.
    pub identity: IdentityMetrics,
    /// What routers share beside the ledger.
    pub soft_state: SoftStateMetrics,
    /// The quorum that keeps the ledger.
    pub cluster: ClusterMetrics,
    /// Routers among themselves.
    pub exchange: ExchangeMetrics,
    /// The decision log, and prices held against what was seen.
    pub decisions: DecisionMetrics,
    /// This process.
    pub process: Process,
    registry: Registry,
    names: Vec<String>,
}

/// What clients see.
#[derive(Debug)]
pub struct Requests {
    /// `requests_total{path, code}`.
    pub total: IntCounterVec,
    /// `tenant_requests_total{tenant}`.
    pub by_tenant: IntCounterVec,
    /// `requests_in_flight`.
    pub in_flight: IntGauge,
    /// `request_duration_seconds{path}`: first byte in to last byte out.
    pub duration: HistogramVec,
    /// `time_to_first_token_seconds{kind}`: arrival to the first byte of the answer, by step kind.
    pub first_token: HistogramVec,
    /// `request_body_bytes`.
    pub body_bytes: Histogram,
    /// `errors_total{cause}`.
    pub errors: IntCounterVec,
    /// `stripped_parameters_total{name}`: parameters that concern transfers and came from clients.
    pub stripped: IntCounterVec,
    /// `retries_total{cause}`: tries of a request after the first.
    pub retries: IntCounterVec,
    /// `retries_refused_total`: tries that the retry budget did not allow.
    pub retries_refused: IntCounter,
    /// `broken_streams_total{outcome}`: what became of streams that broke off after their first byte.
    pub broken: IntCounterVec,
    /// `resume_seconds`: from a stream's break to the first byte from elsewhere.
    pub resume: Histogram,
}

/// What the pipeline decides, and what happened then.
#[derive(Debug)]
pub struct Plans {
    /// `step_seconds{step}`: time spent in each of the eight steps.
    pub step: HistogramVec,
    /// KV that moves, or waits to, between two steps.
    pub between_steps: BetweenSteps,
    /// `plan_actions_total{action}`.
    pub actions: IntCounterVec,
    /// `step_kinds_total{kind}`.
    pub kinds: IntCounterVec,
    /// `owner_lookups_total`: steps whose session had a live owner.
    pub owner_lookups: IntCounter,
    /// `owner_hits_total`: of these, the ones served at it.
    pub owner_hits: IntCounter,
    /// `overlap_tokens`: prompt tokens that the chosen worker held already.
    pub overlap: Histogram,
    /// `prompt_tokens_total{source}`: cached, computed or transferred.
    pub prompt_tokens: IntCounterVec,
    /// `completion_tokens_total`.
    pub completion_tokens: IntCounter,
    /// `kv_moved_bytes_total`: KV moved between workers, as planned.
    pub moved_bytes: IntCounter,
    /// `fallback_total{cause}`: steps served with less knowledge or another plan than wanted.
    pub fallback: IntCounterVec,
    /// `first_token_predicted_seconds`: the plans' prices, beside what was seen.
    pub predicted: Histogram,
}

/// Refreshed from the fleet when scraped.
#[derive(Debug)]
pub struct Workers {
    /// `worker_up{worker, role}`: 1 when it takes work.
    pub up: IntGaugeVec,
    /// `worker_requests_running{worker}`.
    pub running: IntGaugeVec,
    /// `worker_requests_waiting{worker}`.
    pub waiting: IntGaugeVec,
    /// `worker_backlog_tokens{worker}`.
    pub backlog: IntGaugeVec,
    /// `worker_kv_usage_ratio{worker}`.
    pub kv_usage: GaugeVec,
    /// `kv_knowledge{worker, state}`: 1 for the state that holds: exact, degraded or fallback.
    pub knowledge: IntGaugeVec,
    /// `kv_event_sources{worker, state}`: event sources that are connected, and that are lost or never came up.
    pub event_sources: IntGaugeVec,
    /// `kv_events_total{worker}`.
    pub events: IntCounterVec,
    /// `kv_event_gaps_total{worker}`.
    pub event_gaps: IntCounterVec,
    /// `kv_event_lag_seconds{worker}`.
    pub event_lag: GaugeVec,
    /// `residency_blocks{worker}`: blocks it is known to hold.
    pub blocks: IntGaugeVec,
    /// `residency_distinct_blocks`: the same, each counted once.
    pub distinct_blocks: IntGauge,
}

/// Refreshed from the view when scraped.
#[derive(Debug)]
pub struct Ledger {
    /// `leases{state}`: held, expired or retired, one a worker.
    pub leases: IntGaugeVec,
    /// `sessions`.
    pub sessions: IntGauge,
    /// `ledger_applied_index`.
    pub applied: IntGauge,
    /// `ledger_term`.
    pub term: IntGauge,
    /// `ledger_stale`: 1 while there is no quorum.
    pub stale: IntGauge,
    /// `ledger_queue_commands`.
    pub queue: IntGauge,
    /// `ledger_commits_total{outcome}`.
    pub commits: IntCounterVec,
    /// `ledger_commit_seconds`: from handing in a command to its outcome.
    pub commit_seconds: Histogram,
}

/// What this process is and is set to.
#[derive(Debug)]
pub struct Process {
    /// Who lists workers.
    pub discovery: DiscoveryMetrics,
    /// `build_info{version}`: always 1.
    pub build: IntGaugeVec,
    /// `mode{mode}`: 1 for the mode in force.
    pub mode: IntGaugeVec,
    /// `rollout_ratio`: the share of sessions that the mode applies to, 0 to 1.
    pub rollout: Gauge,
    /// `client_connections`.
    pub connections: IntGauge,
    /// `audit_failed_total{what}`: operators' writes that were refused because their line had no room, lines lost, and lines skipped of what was refused.
    pub audit_failed: IntCounterVec,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(Registry::new())
    }
}

impl Metrics {
    /// Registers every family with `registry`. Twice with the same one is a bug of ours.
    pub fn new(registry: Registry) -> Self {
        let families = Families::new(&registry);
        let metrics = Self {
            requests: Requests::new(&families),
            plans: Plans::new(&families),
            workers: Workers::new(&families),
            ledger: Ledger::new(&families),
            identity: IdentityMetrics::new(&families),
            soft_state: SoftStateMetrics::new(&families),
            cluster: ClusterMetrics::new(&families),
            exchange: ExchangeMetrics::new(&families),
            decisions: DecisionMetrics::new(&families),
            process: Process::new(&families),
            names: families.names(),
            registry,
        };
        metrics.process.build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        metrics
    }

    /// The names of all families, with their prefix, without the suffixes of histograms.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// All values in Prometheus' text format.
    pub fn render(&self) -> Vec<u8> {
        let mut text = Vec::with_capacity(16 * 1024);
        // Writing into memory cannot fail, and every family was checked when it was made.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut text);
        text
    }
}

impl Requests {
    fn new(f: &Families<'_>) -> Self {
        let requests = Self::families(f);
        BREAKS.iter().for_each(|outcome| drop(requests.broken.with_label_values(&[outcome])));
        requests
    }

    fn families(f: &Families<'_>) -> Self {
        Self {
            total: f.counters("requests_total", "Requests answered, by path and HTTP status.", &["path", "code"]),
            by_tenant: f.counters("tenant_requests_total", "Requests accepted, by tenant.", &["tenant"]),
            in_flight: f.gauge("requests_in_flight", "Requests being served."),
            duration: f.histograms(
                "request_duration_seconds",
                "From a request's arrival to the last byte of its answer.",
                (&["path"], SECONDS),
            ),
            first_token: f.histograms(
                "time_to_first_token_seconds",
                "From a request's arrival to the first byte of its answer, by step kind.",
                (&["kind"], SECONDS),
            ),
            body_bytes: f.histogram(
                "request_body_bytes",
                "Size of request bodies, decompressed.",
                &[1024.0, 8192.0, 32768.0, 131072.0, 524288.0, 2097152.0, 8388608.0, 33554432.0],
            ),
            errors: f.counters("errors_total", "Requests that ended in an error of this proxy, by cause.", &["cause"]),
            stripped: f.counters(
                "stripped_parameters_total",
                "Parameters taken out of clients' bodies because only routers may send them.",
                &["name"],
            ),
            retries: f.counters("retries_total", "Tries of a request after its first, by cause.", &["cause"]),
            retries_refused: f
                .counter("retries_refused_total", "Tries of a request after its first that the retry budget did not allow."),
            broken: f.counters(
                "broken_streams_total",
                "Streams that broke off after their first byte: resumed elsewhere, complete but for their end, or ended with an error.",
                &["outcome"],
            ),
            resume: f.histogram("resume_seconds", "From a stream's break to the first byte from another worker.", SECONDS),
        }
    }
}

/// What became of a stream that broke off, as `broken_streams_total` names it.
pub const BREAKS: [&str; 4] = ["resumed", "complete", "unresumable", "failed"];

impl Requests {
    /// Parameters that only routers may send were left out of a client's body.
    pub fn count_stripped(&self, stripped: Stripped) {
        let counts = [
            ("kv_transfer_params", stripped.transfer_parameters),
            ("kv_cache_report_mode", stripped.report_mode),
            ("cache_salt", stripped.salt),
        ];
        for (name, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
            self.stripped.with_label_values(&[name]).inc_by(count.into());
        }
    }
}

/// The eight steps, as `step_seconds` names them.
pub const STEPS: [&str; 8] = ["parse", "identify", "locate", "classify", "plan", "execute", "stream", "commit"];
/// Where a prompt token's KV came from, as `prompt_tokens_total` names it.
pub const SOURCES: [&str; 3] = ["cached", "computed", "transferred"];

impl Plans {
    fn new(f: &Families<'_>) -> Self {
        let plans = Self::families(f);
        // Series that exist from the start, so that their first count is an increase from zero.
        STEPS.iter().for_each(|step| drop(plans.step.with_label_values(&[step])));
        SOURCES.iter().for_each(|source| drop(plans.prompt_tokens.with_label_values(&[source])));
        Action::ALL.iter().for_each(|action| drop(plans.actions.with_label_values(&[action.as_str()])));
        StepKind::ALL.iter().for_each(|kind| drop(plans.kinds.with_label_values(&[kind.as_str()])));
        plans
    }

    fn families(f: &Families<'_>) -> Self {
        Self {
            step: f.histograms("step_seconds", "Time spent in each step of the pipeline.", (&["step"], FINE_SECONDS)),
            between_steps: BetweenSteps::new(f),
            actions: f.counters("plan_actions_total", "Plans executed, by action.", &["action"]),
            kinds: f.counters("step_kinds_total", "Agent steps, by kind.", &["kind"]),
            owner_lookups: f.counter("owner_lookups_total", "Steps whose session had a live owner."),
            owner_hits: f.counter("owner_hits_total", "Steps served at the owner of their session."),
            overlap: f.histogram("overlap_tokens", "Prompt tokens that the chosen worker held already.", TOKENS),
            prompt_tokens: f.counters(
                "prompt_tokens_total",
                "Prompt tokens by where their KV came from: cached, computed or transferred.",
                &["source"],
            ),
            completion_tokens: f.counter("completion_tokens_total", "Tokens generated, as the engines count them."),
            moved_bytes: f.counter("kv_moved_bytes_total", "KV bytes moved between workers, as planned."),
            fallback: f.counters(
                "fallback_total",
                "Steps served with less knowledge, or by another plan, than wanted; by cause.",
                &["cause"],
            ),
            predicted: f.histogram(
                "first_token_predicted_seconds",
                "Predicted time to the first token of executed plans.",
                SECONDS,
            ),
        }
    }
}

impl Workers {
    fn new(f: &Families<'_>) -> Self {
        let worker = &["worker"];
        Self {
            up: f.gauges("worker_up", "1 when the worker takes work.", &["worker", "role"]),
            running: f.gauges("worker_requests_running", "Requests in the worker's batch.", worker),
            waiting: f.gauges("worker_requests_waiting", "Requests waiting at the worker.", worker),
            backlog: f.gauges("worker_backlog_tokens", "Prompt tokens still to be computed at the worker.", worker),
            kv_usage: f.fractions("worker_kv_usage_ratio", "Share of the worker's KV blocks in use.", worker),
            knowledge: f.gauges(
                "kv_knowledge",
                "1 for what is known of the worker's blocks: exact, degraded or fallback.",
                &["worker", "state"],
            ),
            event_sources: f.gauges(
                "kv_event_sources",
                "KV event sources of the worker, by state: connected, or lost (or never connected).",
                &["worker", "state"],
            ),
            events: f.counters("kv_events_total", "KV events applied since start.", worker),
            event_gaps: f.counters("kv_event_gaps_total", "Gaps seen in the worker's KV events since start.", worker),
            event_lag: f.fractions("kv_event_lag_seconds", "Age of the newest KV event when it was applied.", worker),
            blocks: f.gauges("residency_blocks", "Blocks that the worker is known to hold.", worker),
            distinct_blocks: f
                .gauge("residency_distinct_blocks", "Blocks that any worker is known to hold, each once."),
        }
    }

    /// Forgets every worker, before the ones that are there now are written anew.
    pub fn reset(&self) {
        let Self { up, running, waiting, backlog, knowledge, blocks, event_sources, .. } = self;
        [up, running, waiting, backlog, knowledge, blocks, event_sources].iter().for_each(|family| family.reset());
        // Counters too: their source counts, and a counter can only be set by starting it anew.
        self.events.reset();
        self.event_gaps.reset();
        [&self.kv_usage, &self.event_lag].iter().for_each(|family| family.reset());
    }
}

impl Ledger {
    fn new(f: &Families<'_>) -> Self {
        Self {
            leases: f.gauges("leases", "Workers by the state of their lease: held, expired or retired.", &["state"]),
            sessions: f.gauge("sessions", "Sessions in the ledger."),
            applied: f.gauge("ledger_applied_index", "Index of the last log entry applied here."),
            term: f.gauge("ledger_term", "The quorum's term as known here."),
            stale: f.gauge("ledger_stale", "1 while the ledger's view cannot be confirmed by a quorum."),
            queue: f.gauge("ledger_queue_commands", "Commands waiting for the quorum."),
            commits: f.counters("ledger_commits_total", "Commands handed in, by outcome.", &["outcome"]),
            commit_seconds: f.histogram(
                "ledger_commit_seconds",
                "From handing in a command to its outcome.",
                FINE_SECONDS,
            ),
        }
    }
}

impl Process {
    fn new(f: &Families<'_>) -> Self {
        Self {
            discovery: DiscoveryMetrics::new(f),
            build: f.gauges("build_info", "Always 1; the version is the label.", &["version"]),
            mode: f.gauges("mode", "1 for the mode in force: shadow, sticky or own.", &["mode"]),
            rollout: f.fraction("rollout_ratio", "Share of sessions that mode own applies to."),
            connections: f.gauge("client_connections", "Open connections of clients."),
            audit_failed: f.counters(
                "audit_failed_total",
                "Operators' writes that were refused because the audit log had no room, and lines that it lost.",
                &["what"],
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_family_is_prefixed_and_a_value_shows() {
        let metrics = Metrics::default();
        metrics.requests.total.with_label_values(&["/v1/models", "200"]).inc();
        metrics.plans.overlap.observe(100.0);
        let text = String::from_utf8(metrics.render()).unwrap();
        assert!(text.contains("ownerserve_requests_total{code=\"200\",path=\"/v1/models\"} 1"), "{text}");
        assert!(text.contains("ownerserve_overlap_tokens_bucket{le=\"256\"} 1"));
        assert!(text.lines().filter(|l| !l.starts_with('#')).all(|l| l.starts_with("ownerserve_")));
    }

    #[test]
    fn the_dashboard_shows_every_family_and_nothing_else() {
        let dashboard = include_str!("../../../configs/grafana/ownerserve.json");
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
        let known: BTreeSet<_> = Metrics::default().names().iter().cloned().collect();
        assert_eq!(shown, known);
    }

    #[test]
    fn no_two_panels_of_the_dashboard_have_one_id() {
        let dashboard = include_str!("../../../configs/grafana/ownerserve.json");
        let json: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let ids: Vec<_> =
            json["panels"].as_array().unwrap().iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "{ids:?}");
    }

    #[test]
    fn a_worker_that_is_gone_leaves_no_series() {
        let metrics = Metrics::default();
        metrics.workers.running.with_label_values(&["127.0.0.1:1"]).set(3);
        metrics.workers.kv_usage.with_label_values(&["127.0.0.1:1"]).set(0.5);
        metrics.workers.reset();
        assert!(!String::from_utf8(metrics.render()).unwrap().contains("127.0.0.1:1"));
    }
}
