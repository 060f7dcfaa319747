//! Section `[operator]`: the listener for operators.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::ByteCount;

use proxy::server::ListenerTlsConfig;

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
