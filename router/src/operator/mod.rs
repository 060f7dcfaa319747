//! The operators' listener: metrics, health, the REST API over the ledger and its cluster, why the router decided as it
//! did, and the dial.
//!
//! It is bound to loopback unless told otherwise: without a file of tokens, whoever reaches it can change everything.

mod access;
mod artifacts;
mod audit;
mod backup;
mod cluster;
mod correctness;
mod custody;
mod desk;
mod document;
mod draining;
mod emptying;
mod fresh;
mod gate;
mod gauges;
mod guardrail;
mod input;
mod keeping;
mod kept;
mod leases;
mod members;
mod moves;
mod owners;
mod paging;
mod problem;
mod process;
mod registrations;
mod repeats;
mod sessions;
mod steering;
mod tags;
mod tenants;
mod watch;
mod words;
mod workers;
mod writes;

use std::net::SocketAddr;
use std::path::PathBuf;

use axum::Router;
use axum::middleware::from_fn_with_state;
use serde::Deserialize;
use smart_default::SmartDefault;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config::units::ByteCount;
use crate::server::ListenerTlsConfig;
pub use access::TokensFileError;
pub use desk::{OperatorStartError, OperatorState};
pub use problem::{Problem, ProblemKind};

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
    pub audit_size: ByteCount,
}

/// The operators' routes.
pub fn routes(desk: &OperatorState) -> Router {
    let routes = OpenApiRouter::new().merge(other_routes()).merge(ledger_routes()).merge(write_routes());
    desk.document
        .attach(routes)
        .fallback(|| async { Problem::unknown_path() })
        .method_not_allowed_fallback(|| async { Problem::wrong_method() })
        .layer(from_fn_with_state(desk.clone(), gate::gate))
        .with_state(desk.clone())
}

fn other_routes() -> OpenApiRouter<OperatorState> {
    OpenApiRouter::new()
        .routes(routes!(process::metrics))
        .routes(routes!(process::live))
        .routes(routes!(process::ready))
        .routes(routes!(document::document))
        .routes(routes!(steering::mode, steering::set_mode, steering::patch_mode))
        .routes(routes!(guardrail::guardrail))
        .routes(routes!(correctness::correctness))
        .routes(routes!(correctness::clear))
        .routes(routes!(steering::decisions))
        .routes(routes!(steering::decision))
}

fn ledger_routes() -> OpenApiRouter<OperatorState> {
    OpenApiRouter::new()
        .routes(routes!(workers::workers))
        .routes(routes!(workers::worker, keeping::retire))
        .routes(routes!(registrations::registrations, registrations::register))
        .routes(routes!(registrations::deregister))
        .routes(routes!(leases::leases))
        .routes(routes!(leases::lease))
        .routes(routes!(leases::intents))
        .routes(routes!(sessions::sessions))
        .routes(routes!(sessions::session, custody::close_session))
        .routes(routes!(sessions::tree))
        .routes(routes!(owners::owners))
        .routes(routes!(owners::owners_of))
        .routes(routes!(artifacts::artifacts))
        .routes(routes!(artifacts::artifact, keeping::evict))
        .routes(routes!(owners::replicas))
        .routes(routes!(owners::groups, keeping::new_group))
        .routes(routes!(tenants::tenants))
        .routes(routes!(tenants::tenant))
        .routes(routes!(watch::watch))
        .routes(routes!(cluster::cluster))
        .routes(routes!(cluster::hash))
        .routes(routes!(members::members))
}

fn write_routes() -> OpenApiRouter<OperatorState> {
    OpenApiRouter::new()
        .routes(routes!(moves::migrate))
        .routes(routes!(moves::replicate))
        .routes(routes!(moves::drop_replica))
        .routes(routes!(custody::claim_session))
        .routes(routes!(custody::release_session))
        .routes(routes!(custody::claim_artifact))
        .routes(routes!(custody::release_artifact))
        .routes(routes!(keeping::pin))
        .routes(routes!(kept::forget_tenant))
        .routes(routes!(kept::forget_session))
        .routes(routes!(keeping::set_group))
        .routes(routes!(keeping::renew))
        .routes(routes!(draining::drain, draining::draining))
        .routes(routes!(tenants::set_quota))
        .routes(routes!(cluster::raise_level))
        .routes(routes!(members::promote))
        .routes(routes!(members::demote))
        .routes(routes!(members::replace))
        .routes(routes!(members::remove))
        .routes(routes!(members::move_leader))
        .routes(routes!(cluster::snapshot, backup::save))
}

/// Runs what may look at many records on a thread that serves nobody else.
async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| {
        Problem::new(ProblemKind::Internal, "The ledger could not be searched; the log of this process has it.")
    })
}

#[cfg(test)]
mod tests;
