//! Settings of the operator API: its section of the configuration, and what it needs of other sections.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::ByteCount;

use super::exposure::ExposedListener;
use crate::host_check::HostRules;
use crate::server::ListenerTlsConfig;

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

/// What the operator API uses of the configuration.
#[derive(Clone, Debug)]
pub struct OperatorSettings {
    /// File of bearer tokens with their roles; without one no token is asked for.
    pub tokens_file: Option<PathBuf>,
    /// Folder of the audit log.
    pub audit_folder: PathBuf,
    /// Most bytes of the audit log, older files included.
    pub max_audit_log_size: u64,
    /// Most bytes of KV that a drain moves per second, unless its request names another rate.
    pub drain_bandwidth: u64,
    /// One in this many transfers over a link is checked; 0 checks none.
    pub transfer_check_sampling: u32,
    /// Tenants with a section of their own.
    pub tenants: BTreeSet<String>,
    /// Listeners of this router that strangers on the network can use or overhear.
    pub exposed_listeners: Vec<ExposedListener>,
    /// Hosts and origins that the operators' listener accepts.
    pub host_rules: HostRules,
}
