//! Definitions of workers, and the assumptions about them until measurements exist.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::{ByteCount, Bytes, EngineSpeed, Micros, ModelId, Tokens, WorkerRole};

use crate::engine_api::KvConnector;

/// One worker.
#[derive(Clone, PartialEq, Debug)]
pub struct WorkerDefinition {
    /// Scheme, host and port.
    pub endpoint: Arc<str>,
    /// Its role.
    pub role: WorkerRole,
    /// The models it serves; if empty, the worker is asked.
    pub models: Vec<ModelId>,
    /// Bearer token for requests to it.
    pub api_key: Option<Arc<str>>,
    /// Where it publishes KV events.
    pub events: EventSourceSetting,
    /// Assumptions about it.
    pub profile: WorkerProfile,
}

impl WorkerDefinition {
    /// Creates a definition of which only URL and role are given.
    pub fn at(endpoint: &str, role: WorkerRole) -> Self {
        Self {
            endpoint: endpoint.trim_end_matches('/').into(),
            role,
            models: Vec::new(),
            api_key: None,
            events: EventSourceSetting::Discovered,
            profile: WorkerProfile::default(),
        }
    }
}

/// Where a worker publishes KV events.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum EventSourceSetting {
    /// Discovered with `GET /kv_event_sources`; if that fails, its blocks are assumed from routing.
    #[default]
    Discovered,
    /// At these endpoints; one rank.
    Configured {
        /// `tcp://host:port` of the live stream.
        live: String,
        /// `tcp://host:port` of the replay socket, if there is one.
        replay: Option<String>,
    },
    /// Its events are not followed.
    Ignored,
}

/// Performance of a class of machines, from a profile file. The default is a mid-size model on one current accelerator.
#[derive(Clone, PartialEq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerProfile {
    /// Prompt tokens per second of a single prefill.
    #[default(10_000.0)]
    pub prefill_tokens_per_second: f64,
    /// Duration of a decode step of a small batch.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(15_000))]
    pub decode_step: Micros,
    /// Additional time per decode step for each running request.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(150))]
    pub decode_step_per_request: Micros,
    /// KV bytes per token. If missing, the engine's metrics are used, then 128 KiB.
    pub kv_size_per_token: Option<ByteCount>,
    /// The worker's KV link. Workers with NIXL have one without configuration.
    pub link: LinkProfile,
}

/// Whether a worker exchanges KV with others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvExchangeSetting {
    /// If a fabric is configured, or its metrics show a KV connector (vLLM's `vllm:nixl_*`, present from the start).
    #[default]
    Auto,
    /// Yes, whatever its metrics show. If its answers contain no transfer parameters, the target computes the prompt.
    On,
    /// No.
    Off,
}

/// The link on which a worker receives KV. The default is RDMA at 100 Gbit/s, half of it usable.
#[derive(Clone, PartialEq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct LinkProfile {
    /// Whether it exchanges KV.
    #[default(KvExchangeSetting::Auto)]
    pub transfers: KvExchangeSetting,
    /// Workers exchange KV only if their fabrics are equal. If missing, it is derived from the engine's metrics.
    pub fabric: Option<String>,
    /// The KV connector; detected from its metrics if missing.
    pub connector: Option<KvConnector>,
    /// URL of Mooncake's bootstrap server; if missing, port 8998 of the worker's host.
    pub bootstrap_url: Option<String>,
    /// Fixed cost of a transfer.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(20_000))]
    pub latency: Micros,
    /// Transfer rate in bytes per second, beyond the fixed cost.
    #[serde(with = "vocabulary::bandwidth_with_unit")]
    #[default(6e9)]
    pub bandwidth: f64,
}

impl WorkerProfile {
    /// KV bytes per token if neither profile nor engine gives them: an 8B model with grouped-query attention, 16 bits.
    pub const DEFAULT_KV_BYTES: Bytes = Bytes(128 << 10);

    /// Returns the assumed speeds.
    pub fn speeds(&self) -> EngineSpeed {
        EngineSpeed {
            prefill_tokens_per_second: self.prefill_tokens_per_second.max(1.0),
            decode_step: self.decode_step,
            decode_slowdown: self.decode_step_per_request,
        }
    }
}

/// Intervals and timeouts of probes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct ProbeSettings {
    /// Interval between probes of a healthy worker.
    #[default(Duration::from_secs(1))]
    pub every: Duration,
    /// Interval after a failed probe; doubles with each failure, up to `every`.
    #[default(Duration::from_millis(100))]
    pub again: Duration,
    /// Timeout of one request.
    #[default(Duration::from_secs(2))]
    pub patience: Duration,
    /// Number of consecutive probes that may time out or break before a worker counts as unreachable. A refused
    /// connection or a 5xx of its health endpoint counts at once.
    #[default(2)]
    pub timeouts: u32,
    /// Prompt tokens assumed for requests of others, if the engine reports no mean.
    #[default(Tokens(1024))]
    pub usual_prompt: Tokens,
}
