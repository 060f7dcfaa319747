//! Configuration: a TOML file, then `--set path=value`, then the few flags. Sections sit beside the code that reads
//! them; this module only puts them together and says clearly what is wrong.

mod cluster;
pub(crate) mod parts;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use planner::{Action, ActionSet, Policy, SelectionRule};
use serde::Deserialize;
use smart_default::SmartDefault;
use toml::{Table, Value};
use vocabulary::{ByteCount, Micros, TimeSpan};

pub use cluster::ClusterConfig;
use proxy::auth::AuthConfig;
use proxy::catalog::ModelConfig;
use proxy::decisions::DecisionLogConfig;
use proxy::discovery::{DiscoveryConfig, WorkerConfig, workers_problem};
use proxy::host_check::ServerConfig;
use proxy::outliers::OutlierConfig;
use proxy::peer_exchange::ledger_health::LedgerFailurePolicy;
use proxy::pipeline::ResumeConfig;
use proxy::prefix_cache::PrefixCacheConfig;
use proxy::prefix_replication::PrefixReplicationConfig;
use proxy::quotas::TenantConfig;
use proxy::retries::RetryBudgetConfig;
use proxy::routing::{Percent, RoutingSettings};
use proxy::server::{ListenerTlsConfig, ProxyConfig};
use proxy::shared_cache::SharedCacheConfig;
use proxy::toml_errors::{U32_RANGE, describe_toml_error, is_setting_char, without_text};
use proxy::transfer_check::TransferCheckSettings;
use proxy::upstream::UpstreamConfig;
use vocabulary::RoutingMode;
use vocabulary::WorkerUrlError;

/// Everything `ownerserve serve` can be told. Every field has a default but the workers.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Which hosts and origins both listeners accept.
    pub server: ServerConfig,
    /// The listener for clients.
    pub proxy: ProxyConfig,
    /// The listener for operators, `/metrics` included.
    pub operator: OperatorConfig,
    /// API keys.
    pub auth: AuthConfig,
    /// How workers are reached.
    pub upstream: UpstreamConfig,
    /// Budget for retries.
    pub retries: RetryBudgetConfig,
    /// When a worker whose requests fail takes none.
    pub outliers: OutlierConfig,
    /// Prefixes that are sent before a step asks for them.
    pub prefix_replication: PrefixReplicationConfig,
    /// Broken streams that go on elsewhere.
    pub resume: ResumeConfig,
    /// The engines.
    pub workers: Vec<WorkerConfig>,
    /// Where more of them are found.
    pub discovery: DiscoveryConfig,
    /// How sessions are moved away from workers that drain.
    pub drain: WorkerDrainConfig,
    /// What is known of models, by served name.
    pub models: BTreeMap<String, ModelConfig>,
    /// Who decides where a step goes. Changes at run time by `PUT /ownerserve/v1/routing`.
    pub routing: RoutingConfig,
    /// The control group that actions are held against.
    pub guardrail: GuardrailConfig,
    /// Which transfers are checked.
    pub transfer_check: TransferCheckSettings,
    /// Prices and switches of the planner.
    pub planner: Policy,
    /// The ledger of owners and sessions.
    pub ledger: LedgerConfig,
    /// The other nodes that keep it.
    pub cluster: ClusterConfig,
    /// What tenants may use, by their names in the keys file; without one, everybody is `default`.
    pub tenants: BTreeMap<String, TenantConfig>,
    /// What is remembered beside it, and where routers share that.
    pub shared_cache: SharedCacheConfig,
    /// What conversations leave for their next step.
    pub prefix_cache: PrefixCacheConfig,
    /// What is kept of decisions.
    pub decision_log: DecisionLogConfig,
}

/// Section `[routing]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct RoutingConfig {
    /// Who decides: `active`, `shadow` or `bypass`.
    pub mode: RoutingMode,
    /// In mode `active`, the share of sessions that it applies to, 0 to 100.
    #[default(Percent::ALL)]
    pub rollout_percent: Percent,
    /// What routes where the planner does not: `session_pinning`, `round_robin` or `match_rate_minus_load`.
    #[default(SelectionRule::SessionPinning)]
    pub fallback_policy: SelectionRule,
}

/// Section `[guardrail]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct GuardrailConfig {
    /// In mode `active`, the share of sessions that are planned and served by the bypass all the same, so that actions which
    /// make the others slower are found and switched off; 0 to 50, and 0 compares nothing.
    #[default(Percent::NONE)]
    pub control_percent: Percent,
}

/// Section `[ledger]`.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct LedgerConfig {
    /// Folder of the durable log and its snapshots; made if missing. Also `--data-dir`.
    #[default(PathBuf::from("ownerserve-data"))]
    pub data_dir: PathBuf,
    /// How long a worker stays an owner without being reached.
    #[default(TimeSpan::seconds(15))]
    pub lease_duration: TimeSpan,
    /// Artifacts that the ledger shall hold, where that is more than it does; it never holds fewer than before.
    pub max_artifacts: Option<u32>,
    /// Sessions, likewise.
    pub max_sessions: Option<u32>,
    /// What happens when the log can no longer be written: `serve` goes on with the last view, `stop` ends the process.
    pub on_failure: LedgerFailurePolicy,
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}: {source}")]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("the configuration file {path} is not valid TOML: {problem}")]
    NotToml {
        /// Which file.
        path: PathBuf,
        /// Where and why, without the line itself, which may hold a secret.
        problem: String,
    },
    /// A setting on the command line has not the form it needs.
    #[error("--set {text}: expected PATH=VALUE, for example --set routing.mode=shadow")]
    NotASetting {
        /// What was given.
        text: String,
    },
    /// A setting's value is begun as TOML and is none.
    #[error(
        "--set {path}: the value is not valid TOML; accepted is, for example, --set 'workers=[{{url = \"http://127.0.0.1:8001\"}}]'"
    )]
    NotAValue {
        /// The whole path.
        path: String,
    },
    /// A setting goes through something that is not a section.
    #[error("--set {path}: {inner} is not a section")]
    NotASection {
        /// The whole path.
        path: String,
        /// The part that is a value already.
        inner: String,
    },
    /// The configuration has keys or values of before.
    #[error("the configuration has settings that were renamed:\n  {lines}")]
    Renamed {
        /// Each with its new name.
        lines: String,
    },
    /// A value is unknown, of the wrong type or out of range.
    #[error("configuration: {path}: {problem}")]
    Invalid {
        /// Where.
        path: String,
        /// What is wrong, and what is accepted.
        problem: String,
    },
}

/// What the command line adds to the file.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// `--set` settings, in order.
    pub settings: Vec<String>,
    /// `--worker` URLs, added to the file's.
    pub workers: Vec<String>,
}

impl Config {
    /// How URLs of the clients' listener begin.
    pub(crate) fn client_scheme(&self) -> &'static str {
        if self.proxy.tls.is_some() { "https" } else { "http" }
    }

    /// How URLs of the operators' listener begin.
    pub(crate) fn operator_scheme(&self) -> &'static str {
        if self.operator.tls.is_some() { "https" } else { "http" }
    }

    /// What steers from the start.
    pub fn initial_routing(&self) -> RoutingSettings {
        let RoutingConfig { mode, rollout_percent, .. } = self.routing;
        let control_percent = self.guardrail.control_percent;
        RoutingSettings { mode, rollout_percent, control_percent, disabled: ActionSet::NONE }
    }

    /// The configuration of `file`, if any, with `overrides` on top.
    pub fn load(file: Option<&Path>, overrides: &Overrides) -> Result<Self, ConfigError> {
        let mut table = match file {
            None => Table::new(),
            Some(path) => read_table(path)?,
        };
        let mut config = Self::from_table(&mut table, &overrides.settings)?;
        for url in &overrides.workers {
            let invalid =
                |error: WorkerUrlError| ConfigError::Invalid { path: "--worker".into(), problem: error.to_string() };
            config.workers.push(WorkerConfig::from_url(url.parse().map_err(invalid)?));
        }
        config.check()?;
        Ok(config)
    }

    /// The planner's policy of `file`, else `base`, with `settings` on top.
    pub(crate) fn policy(base: &Policy, file: Option<&Path>, settings: &[String]) -> Result<Policy, ConfigError> {
        let mut table = match file {
            Some(path) => read_table(path)?,
            None => {
                let policy = Value::try_from(base).expect("a policy is numbers and words");
                Table::from_iter([("planner".to_owned(), policy)])
            }
        };
        Self::from_table(&mut table, settings).map(|config| config.planner)
    }

    pub(crate) fn from_table(table: &mut Table, settings: &[String]) -> Result<Self, ConfigError> {
        for setting in settings {
            apply_setting(table, setting)?;
        }
        let renamed = proxy::renamed_keys::SETTINGS.find(table);
        if !renamed.is_empty() {
            return Err(ConfigError::Renamed { lines: renamed.join("\n  ") });
        }
        serde_path_to_error::deserialize(Value::Table(std::mem::take(table))).map_err(|error| {
            let path = error.path().to_string();
            let (path, mut problem) = redact_unknown_name(path, &without_text(error.into_inner().message().trim()));
            if problem.contains("socket address") {
                problem.push_str("; accepted is IP:PORT, for example 127.0.0.1:8080 or [::]:8080");
            }
            if path.starts_with("server.") && problem.ends_with("expected a list") {
                problem.push_str("; a list is written '[\"router.internal\"]'");
            }
            if path.ends_with(".concurrent_requests") && problem.ends_with(U32_RANGE) {
                problem.push_str("; accepted is 1 to 4294967295");
            }
            ConfigError::Invalid { path, problem }
        })
    }

    /// Of the sections that know their own bounds.
    fn problem(&self) -> Option<(&'static str, &'static str)> {
        self.cluster
            .problem()
            .or_else(|| self.auth.problem())
            .or_else(|| self.shared_cache.problem())
            .or_else(|| self.decision_log.problem())
            .or_else(|| self.transfer_check.problem())
            .or_else(|| self.discovery.problem())
            .or_else(|| self.drain.problem())
            .or_else(|| self.outliers.problem())
            .or_else(|| self.prefix_replication.problem())
            .or_else(|| self.planner_problem())
    }

    fn planner_problem(&self) -> Option<(&'static str, &'static str)> {
        let Policy { disabled_actions, admission, .. } = &self.planner;
        if disabled_actions.contains(&Action::ColocatedPrefill) {
            return Some((
                "planner.disabled_actions",
                "accepted is every action but colocated_prefill: a step must be servable",
            ));
        }
        let is_too_long = admission.max_wait > Micros(3_600_000_000);
        is_too_long.then_some(("planner.admission.max_wait", "accepted is 0s to 1h"))
    }

    /// Checks settings that depend on each other.
    fn check(&self) -> Result<(), ConfigError> {
        let invalid = |path: &str, problem: String| Err(ConfigError::Invalid { path: path.to_owned(), problem });
        if let Some((path, problem)) = workers_problem(&self.workers) {
            return invalid(&path, problem);
        }
        if self.routing.fallback_policy == SelectionRule::LowestCost {
            let accepted = "accepted is session_pinning, round_robin or match_rate_minus_load";
            return invalid("routing.fallback_policy", accepted.into());
        }
        if u8::from(self.guardrail.control_percent) > 50 {
            return invalid("guardrail.control_percent", "accepted is 0 to 50".into());
        }
        if let Some((path, accepted)) = self.proxy.problem() {
            return invalid(path, accepted.into());
        }
        let (memory, body_limit) = (self.proxy.request_memory_limit, self.proxy.body_limit);
        if memory.0 / 8 < body_limit.0 {
            let problem = format!("{memory} is less than eight times proxy.body_limit, which is {body_limit}");
            return invalid(
                "proxy.request_memory_limit",
                format!("{problem}; accepted is at least {}", ByteCount(body_limit.0.saturating_mul(8))),
            );
        }
        if !(TimeSpan::seconds(1)..=TimeSpan::seconds(3600)).contains(&self.ledger.lease_duration) {
            return invalid("ledger.lease_duration", "accepted is 1s to 1h".into());
        }
        if let Some((name, _)) =
            self.models.iter().find(|(_, model)| model.block_size.is_some_and(|b| b == 0 || b > 4096))
        {
            return invalid(&format!("models.{name}.block_size"), "accepted is 1 to 4096".into());
        }
        let mut names: BTreeSet<&str> = self.models.keys().map(String::as_str).collect();
        for (name, model) in &self.models {
            if model.lora_adapters.iter().any(String::is_empty) {
                return invalid(&format!("models.{name}.lora_adapters"), "an adapter has a name".into());
            }
            if let Some(duplicate) = model.lora_adapters.iter().find(|adapter| !names.insert(adapter)) {
                return invalid(
                    &format!("models.{name}.lora_adapters"),
                    format!("{duplicate} is another model or adapter"),
                );
            }
        }
        for (name, tenant) in &self.tenants {
            if let Some(field) = tenant.problem() {
                let most = if field == "concurrent_requests" { u32::MAX.into() } else { 1_000_000_000_000_u64 };
                return invalid(&format!("tenants.{name}.{field}"), format!("accepted is 1 to {most}"));
            }
        }
        if let Some((path, accepted)) = self.problem() {
            return invalid(path, accepted.into());
        }
        Ok(())
    }
}

fn read_table(path: &Path) -> Result<Table, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable { path: path.into(), source })?;
    text.parse()
        .map_err(|error| ConfigError::NotToml { path: path.into(), problem: describe_toml_error(&text, &error) })
}

/// Path and message without the name of an unknown field that cannot be a misspelt setting: clients' keys are put there by mistake.
fn redact_unknown_name(path: String, message: &str) -> (String, String) {
    let name = message.strip_prefix("unknown field `").and_then(|rest| rest.rsplit_once("`, expected"));
    match name {
        Some((name, expected)) if !name.chars().all(is_setting_char) => {
            let section = path.strip_suffix(name).unwrap_or_default().trim_end_matches('.');
            (section.to_owned(), format!("unknown field, expected{expected}"))
        }
        _ => (path, message.to_owned()),
    }
}

/// Puts one `path=value` into `table`. The value is TOML where it reads as TOML, and a plain text otherwise.
fn apply_setting(table: &mut Table, setting: &str) -> Result<(), ConfigError> {
    let named = setting.split('=').next().unwrap_or_default();
    let not_a_setting = || ConfigError::NotASetting { text: named.to_owned() };
    let (path, value) = setting.split_once('=').ok_or_else(not_a_setting)?;
    let mut parts: Vec<&str> = path.trim().split('.').collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(not_a_setting());
    }
    let last = parts.pop().ok_or_else(not_a_setting)?;
    let mut section = table;
    for part in parts {
        let inner = section.entry(part).or_insert_with(|| Value::Table(Table::new()));
        section = inner
            .as_table_mut()
            .ok_or_else(|| ConfigError::NotASection { path: path.to_owned(), inner: part.to_owned() })?;
    }
    let value = parse_value(value.trim()).ok_or_else(|| ConfigError::NotAValue { path: path.to_owned() })?;
    section.insert(last.to_owned(), value);
    Ok(())
}

/// None for what begins as TOML does and is none. `[` alone may begin an IPv6 address.
fn parse_value(text: &str) -> Option<Value> {
    let document: Result<Table, _> = format!("value = {text}").parse();
    if let Some(value) = document.ok().and_then(|mut table| table.remove("value")) {
        return Some(value);
    }
    let inner = text.strip_prefix('[').map_or(text, str::trim_start);
    (!inner.starts_with(['{', '[', '"', '\''])).then(|| Value::String(text.to_owned()))
}

/// Section `[drain]`.
#[derive(Clone, Copy, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerDrainConfig {
    /// Most KV that is moved a second when sessions are moved away from a worker, on the average.
    #[default(ByteCount::mebibytes(1024))]
    pub bandwidth: ByteCount,
}

impl WorkerDrainConfig {
    /// What is out of bounds, and what is accepted.
    fn problem(&self) -> Option<(&'static str, &'static str)> {
        (!self.bandwidth.is_bandwidth()).then_some(("drain.bandwidth", ByteCount::ACCEPTED_BANDWIDTH))
    }
}

/// Section `[operator]`.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct OperatorConfig {
    /// Where to listen; also `--operator-listen`.
    #[default(SocketAddr::from(([127, 0, 0, 1], 9464)))]
    pub listen: SocketAddr,
    /// File of bearer tokens with their roles, re-read when it changes. Without one no token is asked for.
    ///
    /// ```toml
    /// [tokens]
    /// "a-long-random-text" = "read"
    /// "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08" = { role = "operator", name = "alice" }
    /// ```
    pub tokens_file: Option<PathBuf>,
    /// The certificate that is shown; without one the listener speaks plain HTTP.
    pub tls: Option<ListenerTlsConfig>,
    /// Most bytes of the audit log, older files included.
    #[default(ByteCount::mebibytes(64))]
    pub max_audit_log_size: ByteCount,
}

#[cfg(test)]
mod tests;
