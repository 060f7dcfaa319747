//! Settings of the operator API.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::exposure::ExposedListener;
use proxy::host_check::HostRules;

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
