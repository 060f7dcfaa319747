//! Which workers there are, and what is assumed of them until it was measured.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::{Bytes, EngineSpeed, Micros, ModelId, Tokens, WorkerRole};

use crate::engine_api::KvConnector;

/// One worker.
#[derive(Clone, PartialEq, Debug)]
pub struct WorkerDefinition {
    /// Scheme, host and port.
    pub endpoint: Arc<str>,
    /// What it is for.
    pub role: WorkerRole,
    /// The models it serves; asked from it when empty.
    pub models: Vec<ModelId>,
    /// Sent to it as a bearer token.
    pub api_key: Option<Arc<str>>,
    /// Where it tells its KV events.
    pub events: EventSourceSetting,
    /// What is assumed of it.
    pub profile: WorkerProfile,
}

impl WorkerDefinition {
    /// A worker of which nothing but URL and role is known.
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

/// Where a worker tells its KV events.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum EventSourceSetting {
    /// As it says at `GET /kv_event_sources`; without an answer it is known by what was routed to it.
    #[default]
    Discovered,
    /// At these endpoints, one rank.
    Configured {
        /// `tcp://host:port` of the live stream.
        live: String,
        /// `tcp://host:port` of the replay, where there is one.
        replay: Option<String>,
    },
    /// Nowhere.
    Ignored,
}

/// A class of machine, from a profile file; by default a mid-size model on one current accelerator.
#[derive(Clone, PartialEq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerProfile {
    /// Prompt tokens computed a second, alone.
    #[default(10_000.0)]
    pub prefill_tokens_per_second: f64,
    /// Microseconds of a decode step of a small batch.
    #[default(15_000)]
    pub decode_step_us: u64,
    /// Microseconds that one more running request adds to it.
    #[default(150)]
    pub decode_slowdown_us: u64,
    /// Bytes of KV a token; where it is missing the engine's own figures, then 128 KiB.
    pub kv_bytes_per_token: Option<u64>,
    /// How KV comes to it; workers that offer NIXL have one without asking.
    pub link: LinkProfile,
}

/// Whether a worker exchanges KV.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvExchangeMode {
    /// When a fabric is configured, or its metrics show a KV connector (vLLM's `vllm:nixl_*`, there from its start).
    #[default]
    Auto,
    /// It does, whatever its metrics show. An answer without transfer parameters is then made good by computing.
    On,
    /// It does not.
    Off,
}

/// The way KV comes to a worker. By default RDMA at 100 Gbit/s, half of it used.
#[derive(Clone, PartialEq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct LinkProfile {
    /// Whether it exchanges KV at all.
    #[default(KvExchangeMode::Auto)]
    pub transfers: KvExchangeMode,
    /// Workers exchange KV only with those of an equal fabric; from the engine's own figures where it is missing.
    pub fabric: Option<String>,
    /// How it is spoken to; from its metrics where it is missing.
    pub dialect: Option<KvConnector>,
    /// URL of Mooncake's bootstrap server; port 8998 of its host where it is missing.
    pub bootstrap: Option<String>,
    /// Microseconds of any transfer.
    #[default(20_000)]
    pub fixed_us: u64,
    /// Rate after that.
    #[default(6e9)]
    pub bytes_per_second: f64,
}

impl WorkerProfile {
    /// KV of a token where neither profile nor engine tells: an 8B model with grouped queries, in 16 bits.
    pub const DEFAULT_KV_BYTES: Bytes = Bytes(128 << 10);

    /// The speeds that it assumes.
    pub fn speeds(&self) -> EngineSpeed {
        EngineSpeed {
            prefill_tokens_per_second: self.prefill_tokens_per_second.max(1.0),
            decode_step: Micros(self.decode_step_us),
            decode_slowdown: Micros(self.decode_slowdown_us),
        }
    }
}

/// How often and how patiently workers are asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct ProbeSettings {
    /// Between two probes of a healthy worker.
    #[default(Duration::from_secs(1))]
    pub every: Duration,
    /// Between two probes of one that just failed; doubles up to `every`.
    #[default(Duration::from_millis(100))]
    pub again: Duration,
    /// The longest wait for one answer.
    #[default(Duration::from_secs(2))]
    pub patience: Duration,
    /// Probes in a row that may time out or break before a worker counts as unreachable. One refused connection, or
    /// one 5xx of its health page, is enough.
    #[default(2)]
    pub timeouts: u32,
    /// Prompt tokens assumed for a request of others where the engine tells no mean.
    #[default(Tokens(1024))]
    pub usual_prompt: Tokens,
}
