//! Keys and values of configuration files from before they were renamed. A file with any of them is refused with the
//! new name of each, before it is read as settings.

use std::time::Duration;

use serde_json::{Number, Value as Json};
use toml::{Table, Value};
use vocabulary::{ByteCount, TimeSpan};

/// A renamed key. Both paths have as many segments; `*` is any name, and lists are entered at each of their elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RenamedKey {
    old: &'static str,
    new: &'static str,
    unit: OldUnit,
}

/// Unit that a bare number had under the old key. It is now written in the value.
#[derive(Clone, Copy, Debug)]
enum OldUnit {
    None,
    Seconds,
    Micros,
    Bytes,
}

/// A renamed value of the setting at `new`, which was at `old`; equal paths if the key is unchanged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RenamedValue {
    old: &'static str,
    new: &'static str,
    old_value: &'static str,
    new_value: &'static str,
}

/// One kind of configuration file.
#[derive(Clone, Copy, Debug)]
pub struct RenamedKeys {
    keys: &'static [RenamedKey],
    values: &'static [RenamedValue],
    sections: &'static [RenamedKey],
}

pub(crate) const fn key(old: &'static str, new: &'static str) -> RenamedKey {
    RenamedKey { old, new, unit: OldUnit::None }
}

const fn seconds(old: &'static str, new: &'static str) -> RenamedKey {
    RenamedKey { old, new, unit: OldUnit::Seconds }
}

pub(crate) const fn micros(old: &'static str, new: &'static str) -> RenamedKey {
    RenamedKey { old, new, unit: OldUnit::Micros }
}

const fn bytes(old: &'static str, new: &'static str) -> RenamedKey {
    RenamedKey { old, new, unit: OldUnit::Bytes }
}

pub(crate) const fn value([old, new]: [&'static str; 2], [old_value, new_value]: [&'static str; 2]) -> RenamedValue {
    RenamedValue { old, new, old_value, new_value }
}

/// The configuration file of `serve`, and files of workers.
pub const SETTINGS: RenamedKeys = RenamedKeys {
    keys: &[
        key("steering.mode", "routing.mode"),
        key("steering.rollout_percent", "routing.rollout_percent"),
        key("steering.bypass", "routing.fallback_policy"),
        key("models.*.text", "models.*.tokenizer_dir"),
        key("models.*.attention", "models.*.attention_file"),
        key("models.*.kv_bits", "models.*.kv_cache_bits"),
        key("models.*.block", "models.*.block_size"),
        key("models.*.adapters", "models.*.lora_adapters"),
        seconds("ledger.lease", "ledger.lease_duration"),
        key("ledger.artifacts", "ledger.max_artifacts"),
        key("ledger.sessions", "ledger.max_sessions"),
        bytes("identity.memory", "prefix_cache.memory_limit"),
        key("identity.look_every", "prefix_cache.verify_every"),
        key("correctness.one_in", "transfer_check.sample_every"),
        key("correctness.noise", "transfer_check.logprob_tolerance"),
        bytes("decisions.log", "decision_log.max_size"),
        key("soft_state.redis", "shared_cache.redis_url"),
        key("soft_state.secret", "shared_cache.encryption_secret"),
        key("soft_state.plaintext", "shared_cache.allow_plaintext"),
        key("soft_state.namespace", "shared_cache.key_prefix"),
        seconds("soft_state.timeout", "shared_cache.timeout"),
        bytes("soft_state.memory", "shared_cache.memory_limit"),
        seconds("soft_state.ttl", "shared_cache.ttl"),
        bytes("soft_state.transcript", "shared_cache.max_transcript_size"),
        key("ahead.enabled", "prefix_replication.enabled"),
        bytes("ahead.bandwidth", "prefix_replication.bandwidth"),
        key("resume.most_prompt_tokens", "resume.max_prompt_tokens"),
        key("retries.percent", "retries.budget_percent"),
        seconds("upstream.answer_timeout", "upstream.first_byte_timeout"),
        seconds("upstream.pause_timeout", "upstream.stream_idle_timeout"),
        seconds("upstream.idle_timeout", "upstream.connection_idle_timeout"),
        key("upstream.idle_connections", "upstream.max_idle_connections_per_worker"),
        bytes("upstream.unfinished_events", "upstream.stream_buffer_limit"),
        seconds("proxy.body_pause", "proxy.body_idle_timeout"),
        bytes("proxy.memory", "proxy.request_memory_limit"),
        key("proxy.connections", "proxy.max_connections"),
        key("proxy.unauthenticated_connections", "proxy.max_unauthenticated_connections"),
        key("proxy.unauthenticated_per_address", "proxy.max_unauthenticated_connections_per_address"),
        bytes("operator.audit_size", "operator.max_audit_log_size"),
        key("auth.salt_secret", "auth.cache_salt_secret"),
        key("auth.prove_salts", "auth.verify_cache_salt"),
        key("discovery.registrations", "discovery.max_registrations"),
        seconds("discovery.dns.every", "discovery.dns.refresh_interval"),
        key("discovery.dns.name", "discovery.dns.address"),
        key("discovery.kubernetes.api", "discovery.kubernetes.api_server"),
        seconds("cluster.join_within", "cluster.join_timeout"),
        seconds("cluster.heartbeat", "cluster.heartbeat_interval"),
        seconds("cluster.election_min", "cluster.election_timeout_min"),
        seconds("cluster.election_max", "cluster.election_timeout_max"),
        key("cluster.insecure", "cluster.allow_plaintext"),
        key("cluster.max_level", "cluster.max_feature_level"),
        key("workers.events", "workers.kv_events_endpoint"),
        key("workers.replay", "workers.kv_events_replay_endpoint"),
        key("workers.shape", "workers.parallelism"),
        micros("workers.profile.decode_step_us", "workers.profile.decode_step"),
        micros("workers.profile.decode_slowdown_us", "workers.profile.decode_step_per_request"),
        bytes("workers.profile.kv_bytes_per_token", "workers.profile.kv_size_per_token"),
        key("workers.profile.link.dialect", "workers.profile.link.connector"),
        key("workers.profile.link.bootstrap", "workers.profile.link.bootstrap_url"),
        micros("workers.profile.link.fixed_us", "workers.profile.link.latency"),
        bytes("workers.profile.link.bytes_per_second", "workers.profile.link.bandwidth"),
        micros("planner.admission.tolerated", "planner.admission.max_displaced_compute"),
        micros("planner.admission.longest", "planner.admission.max_wait"),
        key("planner.admission.most", "planner.admission.max_queue"),
        key("planner.rule", "planner.policy"),
        key("planner.disabled", "planner.disabled_actions"),
        micros("planner.lambda", "planner.memory_cost_per_mib"),
        key("planner.mu", "planner.interference_weight"),
        key("planner.eviction", "planner.eviction_weight"),
        key("planner.growth", "planner.max_session_growth_tokens"),
        micros("planner.transfer.fixed", "planner.transfer.fixed_overhead"),
        key("planner.transfer.share", "planner.transfer.proportional_overhead"),
        key("planner.sources", "planner.replicate_dispatch"),
        key("planner.trust.degraded", "planner.kv_index_confidence.degraded"),
        key("planner.trust.fallback", "planner.kv_index_confidence.approximate"),
        micros("planner.overload.queue", "planner.overload.max_queue_time"),
        key("planner.overload.kv_usage", "planner.overload.max_kv_cache_usage"),
        bytes("planner.tiers.host_bytes_per_second", "planner.tiers.host_bandwidth"),
        bytes("planner.tiers.disk_bytes_per_second", "planner.tiers.disk_bandwidth"),
        key("planner.unknown_prefill_tokens_per_second", "planner.default_prefill_tokens_per_second"),
        key("planner.attention_doubles_at", "planner.attention_cost_doubling_tokens"),
        key("planner.thresholds.long", "planner.thresholds.long_step_tokens"),
        key("planner.thresholds.reused_percent", "planner.thresholds.tool_output_min_reused_percent"),
        micros("planner.thresholds.cold", "planner.thresholds.cold_resume_after"),
    ],
    values: &[
        value(["steering.mode", "routing.mode"], ["own", "active"]),
        value(["steering.mode", "routing.mode"], ["sticky", "bypass"]),
        value(["workers.profile.link.dialect", "workers.profile.link.connector"], ["plain", "none"]),
        value(
            ["workers.profile.link.dialect", "workers.profile.link.connector"],
            ["bidirectional", "nixl_bidirectional"],
        ),
        value(["workers.profile.link.dialect", "workers.profile.link.connector"], ["store", "shared_store"]),
        value(["planner.rule", "planner.policy"], ["own", "lowest_cost"]),
        value(["planner.sources", "planner.replicate_dispatch"], ["in_turn", "queued"]),
        value(["planner.sources", "planner.replicate_dispatch"], ["at_once", "immediate"]),
    ],
    sections: &[
        key("steering", "routing"),
        key("identity", "prefix_cache"),
        key("correctness", "transfer_check"),
        key("decisions", "decision_log"),
        key("soft_state", "shared_cache"),
        key("ahead", "prefix_replication"),
        key("planner.trust", "planner.kv_index_confidence"),
    ],
};

/// Profiles of simulated engines.
pub const PROFILE: RenamedKeys = RenamedKeys {
    keys: &[
        micros("step_overhead_us", "step_overhead"),
        micros("decode_step_us", "decode_step"),
        micros("decode_slowdown_us", "decode_step_per_request"),
        key("block_tokens", "block_size"),
        key("blocks", "num_gpu_blocks"),
        key("max_running", "max_num_seqs"),
        key("max_waiting", "max_queue"),
        key("step_tokens", "max_num_batched_tokens"),
        key("context_tokens", "max_model_len"),
        key("answer_tokens", "default_max_tokens"),
        bytes("kv_bytes_per_token", "kv_size_per_token"),
        bytes("link_bytes_per_second", "link_bandwidth"),
        micros("link_latency_us", "link_latency"),
        micros("lease_us", "kv_lease_duration"),
        micros("answer_lease_us", "reverse_pull_lease_duration"),
        micros("dead_peer_us", "peer_timeout"),
    ],
    values: &[],
    sections: &[],
};

/// Files of `models.NAME.attention_file`.
pub(crate) const ATTENTION_FILE: RenamedKeys = RenamedKeys {
    keys: &[
        bytes("alignment", "layer_alignment"),
        key("checkpoints.every", "window_checkpoints.every_tokens"),
        key("window_checkpoints.every", "window_checkpoints.every_tokens"),
        key("layers.times", "layers.repeat"),
        key("layers.each.state", "layers.pattern.kind"),
        key("layers.each.bits", "layers.pattern.element_bits"),
        key("layers.each.width", "layers.pattern.latent_dim"),
        key("layers.each.window", "layers.pattern.window_tokens"),
        key("layers.each.ratio", "layers.pattern.compression_ratio"),
        bytes("layers.each.entry", "layers.pattern.entry_size"),
        bytes("layers.each.index", "layers.pattern.index_entry_size"),
        bytes("layers.each.raw", "layers.pattern.uncompressed_token_size"),
    ],
    values: &[
        value(["layers.each.state", "layers.pattern.kind"], ["latent", "mla"]),
        value(["layers.each.state", "layers.pattern.kind"], ["window", "sliding_window"]),
    ],
    sections: &[key("checkpoints", "window_checkpoints"), key("layers.each", "layers.pattern")],
};

impl RenamedKeys {
    /// A table of keys and values for JSON.
    pub(crate) const fn of(keys: &'static [RenamedKey], values: &'static [RenamedValue]) -> Self {
        Self { keys, values, sections: &[] }
    }

    /// Returns a line for each old key and value in the file, with its new name. Values are shown only where they are
    /// words of this table or numbers that got a unit: any other may be a secret.
    pub fn find(&self, file: &Table) -> Vec<String> {
        let mut lines = Vec::new();
        for renamed in self.keys {
            for found in occurrences(file, (renamed.old, renamed.new)) {
                lines.push(self.describe(&found, renamed));
            }
        }
        for renamed in self.values {
            let unchanged = occurrences(file, (renamed.new, renamed.new));
            let old = unchanged.into_iter().filter(|found| found.value.as_str() == Some(renamed.old_value));
            lines.extend(old.map(|found| {
                let (path, RenamedValue { old_value, new_value, .. }) = (found.new, renamed);
                format!("{path} = \"{old_value}\" is now {path} = \"{new_value}\"")
            }));
        }
        for section in self.sections {
            for found in occurrences(file, (section.old, section.new)) {
                // A section is named where none of its keys is: it is empty, or holds what never was a setting.
                let begins = |line: &String| {
                    let rest = line.strip_prefix(found.old.as_str());
                    rest.is_some_and(|rest| rest.starts_with(['.', '[']))
                };
                if !lines.iter().any(begins) {
                    lines.push(format!("{} is now {}", found.old, found.new));
                }
            }
        }
        lines
    }

    /// Returns JSON with the new keys and values. `path` is its old path, empty for a whole file; `*` matches nothing.
    pub(crate) fn renamed(&self, path: &str, section: Json) -> Json {
        match section {
            Json::Object(entries) => {
                let entry = |(name, value): (String, Json)| {
                    let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                    let name = self.new_name(&path).map_or(name, str::to_owned);
                    (name, self.renamed(&path, value))
                };
                Json::Object(entries.into_iter().map(entry).collect())
            }
            Json::Array(list) => list.into_iter().map(|inner| self.renamed(path, inner)).collect(),
            Json::Number(number) => {
                let key = self.keys.iter().find(|key| key.old == path);
                let text = key.and_then(|key| key.unit.json_text(&number));
                text.map_or(Json::Number(number), Json::String)
            }
            Json::String(word) => {
                let new = self.values.iter().find(|value| value.old == path && value.old_value == word);
                Json::String(new.map_or(word, |value| value.new_value.to_owned()))
            }
            other => other,
        }
    }

    /// Returns the new name of the last segment of an old path.
    fn new_name(&self, path: &str) -> Option<&'static str> {
        let depth = path.split('.').count();
        let begins = |key: &&RenamedKey| {
            let rest = key.old.strip_prefix(path);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.keys.iter().chain(self.sections).find(begins)?.new.split('.').nth(depth - 1)
    }

    fn describe(&self, found: &Occurrence<'_>, renamed: &RenamedKey) -> String {
        let Occurrence { old, new, value } = found;
        let word = value.as_str().and_then(|text| {
            let mut values = self.values.iter();
            values.find(|value| value.old == renamed.old && value.old_value == text)
        });
        if let Some(RenamedValue { old_value, new_value, .. }) = word {
            return format!("{old} = \"{old_value}\" is now {new} = \"{new_value}\"");
        }
        match renamed.unit.convert(value) {
            Some((number, text)) => format!("{old} = {number} is now {new} = \"{text}\""),
            None => format!("{old} is now {new}"),
        }
    }
}

impl OldUnit {
    /// Returns a bare number as it was, and as it is written now; `None` for any other value.
    fn convert(self, value: &Value) -> Option<(String, String)> {
        let number = match value {
            Value::Integer(number) => *number as f64,
            Value::Float(number) => *number,
            _ => return None,
        };
        Some((value.to_string(), self.text(number)?))
    }

    /// Returns a number of JSON with its unit; whole microseconds exactly.
    fn json_text(self, number: &Number) -> Option<String> {
        match (self, number.as_u64()) {
            (Self::Micros, Some(micros)) => Some(TimeSpan::micros(micros).to_string()),
            _ => self.text(number.as_f64()?),
        }
    }

    /// Returns the number with its unit; `None` without a unit, and for a number that is no amount.
    fn text(self, number: f64) -> Option<String> {
        let span = |seconds| Duration::try_from_secs_f64(seconds).ok().map(|span| TimeSpan(span).to_string());
        match self {
            Self::None => None,
            Self::Seconds => span(number),
            Self::Micros => span(number / 1e6),
            Self::Bytes => (0.0..1e18).contains(&number).then(|| ByteCount(number as usize).to_string()),
        }
    }
}

/// An old key in a file, with both of its names there.
struct Occurrence<'v> {
    old: String,
    new: String,
    value: &'v Value,
}

fn occurrences<'v>(file: &'v Table, (old, new): (&str, &str)) -> Vec<Occurrence<'v>> {
    let segments: Vec<_> = old.split('.').zip(new.split('.')).collect();
    let mut found = Vec::new();
    enter(file, &segments, (String::new(), String::new()), &mut found);
    found
}

fn enter<'v>(
    table: &'v Table,
    segments: &[(&str, &str)],
    (old, new): (String, String),
    found: &mut Vec<Occurrence<'v>>,
) {
    let Some(((old_name, new_name), rest)) = segments.split_first() else { return };
    let join = |path: &str, name: &str| if path.is_empty() { quoted(name) } else { format!("{path}.{}", quoted(name)) };
    for (name, value) in table.iter().filter(|(name, _)| *old_name == "*" || name == old_name) {
        let new_name = if *new_name == "*" { name } else { *new_name };
        let (old, new) = (join(&old, name), join(&new, new_name));
        match value {
            _ if rest.is_empty() => found.push(Occurrence { old, new, value }),
            Value::Table(inner) => enter(inner, rest, (old, new), found),
            Value::Array(list) => {
                for (index, inner) in list.iter().enumerate() {
                    let Some(inner) = inner.as_table() else { continue };
                    enter(inner, rest, (format!("{old}[{index}]"), format!("{new}[{index}]")), found);
                }
            }
            _ => {}
        }
    }
}

/// A key as TOML writes it.
fn quoted(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.chars().all(is_bare) { name.to_owned() } else { format!("{name:?}") }
}

#[cfg(test)]
mod tests;
