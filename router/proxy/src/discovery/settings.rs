//! Where workers are found, beside `[[workers]]`.

use std::path::PathBuf;

use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::{TimeSpan, WorkerRole};

use super::worker_config::UNSENDABLE;
use crate::auth::bearer;
use vocabulary::Secret;

/// Maximum number of workers per router; further ones are left out and counted.
pub const MAX_WORKERS: usize = 1024;

/// Section `[discovery]`.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct DiscoveryConfig {
    /// A file of `[[workers]]`, or of `{"workers": [...]}` where it ends in `.json`, read anew when it changes.
    pub workers_file: Option<PathBuf>,
    /// Names whose addresses are workers, `[[discovery.dns]]`.
    pub dns: Vec<DnsConfig>,
    /// Services whose ready endpoints are workers, `[[discovery.kubernetes]]`.
    pub kubernetes: Vec<KubernetesConfig>,
    /// Most workers that are registered over the operators' API at a time; with 0 none can.
    #[default(256)]
    pub max_registrations: usize,
}

/// Section `[[discovery.dns]]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DnsConfig {
    /// `HOST:PORT`; each address of the host is a worker, over http.
    pub address: String,
    /// Between two looks.
    #[serde(default = "default_interval")]
    pub refresh_interval: TimeSpan,
    /// What they are for; hybrid when left out.
    pub role: Option<WorkerRole>,
    /// The models they serve; asked from them when empty.
    #[serde(default)]
    pub models: Vec<String>,
    /// Sent to them as a bearer token.
    pub api_key: Option<Secret>,
}

/// Section `[[discovery.kubernetes]]`. What is left out is as a pod finds it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KubernetesConfig {
    /// The service whose endpoints are workers, over http.
    pub service: String,
    /// Where it is.
    pub namespace: Option<String>,
    /// Which of its endpoints' ports; the only one when left out.
    pub port: Option<PortSelector>,
    /// What they are for; hybrid when left out.
    pub role: Option<WorkerRole>,
    /// The models they serve; asked from them when empty.
    #[serde(default)]
    pub models: Vec<String>,
    /// Sent to them as a bearer token.
    pub api_key: Option<Secret>,
    /// The API server, `https://HOST:PORT`, or `http://` for a proxy on this machine.
    pub api_server: Option<String>,
    /// The token that is sent to it, read anew for each request.
    pub token_file: Option<PathBuf>,
    /// The authorities that its certificate may be of, in PEM.
    pub ca_file: Option<PathBuf>,
}

/// A port of an endpoint.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(untagged, expecting = "accepted is a port's number or its name in the EndpointSlice")]
pub enum PortSelector {
    /// This one.
    Number(u16),
    /// The one that is called so.
    Name(String),
}

impl KubernetesConfig {
    fn problem(&self) -> Option<(&'static str, &'static str)> {
        // As Kubernetes accepts names: RFC 1123 labels.
        let is_label = |name: &str| {
            let is_inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            !name.is_empty()
                && name.len() <= 63
                && name.bytes().all(is_inside)
                && !name.starts_with('-')
                && !name.ends_with('-')
        };
        let is_api = |api: &str| {
            let rest = api.strip_prefix("https://").or_else(|| api.strip_prefix("http://"));
            rest.is_some_and(|rest| !rest.is_empty() && !rest.contains(['@', ' ', '?', '#']))
        };
        const LABEL: &str = "accepted is a name of lower-case letters, digits and '-', at most 63";
        if !is_label(&self.service) {
            return Some(("discovery.kubernetes.service", LABEL));
        }
        if self.namespace.as_deref().is_some_and(|name| !is_label(name)) {
            return Some(("discovery.kubernetes.namespace", LABEL));
        }
        if self.port == Some(PortSelector::Number(0)) {
            return Some(("discovery.kubernetes.port", "accepted is a port's number or its name in the EndpointSlice"));
        }
        let is_wrong = self.api_server.as_deref().is_some_and(|api| !is_api(api));
        is_wrong.then_some((
            "discovery.kubernetes.api_server",
            "accepted is https://HOST:PORT, or http:// for a proxy on this machine",
        ))
    }
}

fn default_interval() -> TimeSpan {
    TimeSpan::seconds(10)
}

const MAX_DNS_NAMES: usize = 64;

impl DiscoveryConfig {
    /// Whether workers are found anywhere but in the configuration.
    pub fn is_enabled(&self) -> bool {
        self.workers_file.is_some() || !self.dns.is_empty() || !self.kubernetes.is_empty()
    }

    /// What is out of bounds, and what is accepted.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        let is_name = |name: &str| {
            let parts = name.rsplit_once(':').filter(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
            parts.is_some() && name.len() <= 255 && !name.contains(['/', '@', ' '])
        };
        if self.dns.len() > MAX_DNS_NAMES {
            return Some(("discovery.dns", "accepted are at most 64 names"));
        }
        if !self.dns.iter().all(|dns| is_name(&dns.address)) {
            return Some((
                "discovery.dns.address",
                "accepted is HOST:PORT without a scheme, for example engines.internal:8000",
            ));
        }
        if !self.dns.iter().all(|dns| (TimeSpan::seconds(1)..=TimeSpan::seconds(3600)).contains(&dns.refresh_interval))
        {
            return Some(("discovery.dns.refresh_interval", "accepted is 1s to 1h"));
        }
        if self.kubernetes.len() > MAX_DNS_NAMES {
            return Some(("discovery.kubernetes", "accepted are at most 64 services"));
        }
        if let Some(problem) = self.kubernetes.iter().find_map(KubernetesConfig::problem) {
            return Some(problem);
        }
        let is_unsendable = |key: &Option<Secret>| key.is_some() && bearer(key.as_ref()).is_none();
        if self.dns.iter().any(|dns| is_unsendable(&dns.api_key)) {
            return Some(("discovery.dns.api_key", UNSENDABLE));
        }
        if self.kubernetes.iter().any(|service| is_unsendable(&service.api_key)) {
            return Some(("discovery.kubernetes.api_key", UNSENDABLE));
        }
        (self.max_registrations > MAX_WORKERS).then_some(("discovery.max_registrations", "accepted is 0 to 1024"))
    }
}
