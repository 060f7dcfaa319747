//! The operator API: metrics, health, the REST API for the ledger and its cluster, decisions, and the routing mode.
//!
//! It is bound to loopback by default: without a tokens file, everybody who reaches it can change everything.
//!
//! This file only puts the routes together. The API knows the ledger, the workers, receipts and the routing, through
//! the handles in `OperatorParts`; never the steps of the pipeline, the router's configuration or its whole state.
//! `problem`, `schemas`, `extractors`, `consistency` and `paging` lie below the handlers; no handler imports this file.

mod access;
mod artifacts;
mod audit;
mod backup;
mod blocking;
mod cluster;
mod consistency;
mod drain;
mod drain_api;
mod entity_tags;
mod erasure;
pub mod exposure;
mod extractors;
mod gauges;
mod guardrail;
mod health;
mod idempotency;
mod leases;
mod members;
mod migration;
mod openapi;
mod owners;
mod ownership_api;
mod paging;
mod problem;
mod registrations;
mod request_gate;
mod request_units;
mod retention;
mod routing;
mod schemas;
mod sessions;
mod settings;
mod sources;
mod state;
mod tenants;
mod transfer_checks;
mod watch;
mod workers;
mod writes;

use axum::Router;
use axum::middleware::from_fn_with_state;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub use access::TokensFileError;
pub use problem::head_problem;
pub use problem::{Problem, ProblemKind};
pub use settings::OperatorSettings;
pub use sources::{FleetSources, OperatorParts, RoutingSources, SessionMover};
pub use state::{OperatorStartError, OperatorState};

/// Builds the operator routes.
pub fn routes(state: &OperatorState) -> Router {
    state
        .document
        .attach(api_routes())
        .fallback(|| async { Problem::unknown_path() })
        .method_not_allowed_fallback(|| async { Problem::wrong_method() })
        .layer(from_fn_with_state(state.clone(), request_gate::gate))
        .with_state(state.clone())
}

/// Returns the OpenAPI document of the operator routes.
pub fn openapi_document() -> serde_json::Value {
    let document = openapi::OpenApiDocument::default();
    let _ = document.attach(api_routes());
    serde_json::from_str(document.json()).unwrap_or_default()
}

fn api_routes() -> OpenApiRouter<OperatorState> {
    OpenApiRouter::new().merge(other_routes()).merge(ledger_routes()).merge(write_routes())
}

fn other_routes() -> OpenApiRouter<OperatorState> {
    OpenApiRouter::new()
        .routes(routes!(health::metrics))
        .routes(routes!(health::live))
        .routes(routes!(health::ready))
        .routes(routes!(openapi::document))
        .routes(routes!(routing::routing, routing::set_routing, routing::patch_routing))
        .routes(routes!(guardrail::guardrail))
        .routes(routes!(transfer_checks::transfer_checks))
        .routes(routes!(transfer_checks::enable_link))
        .routes(routes!(routing::decisions))
        .routes(routes!(routing::decision))
}

fn ledger_routes() -> OpenApiRouter<OperatorState> {
    OpenApiRouter::new()
        .routes(routes!(workers::workers))
        .routes(routes!(workers::worker, retention::retire))
        .routes(routes!(registrations::registrations, registrations::register))
        .routes(routes!(registrations::deregister))
        .routes(routes!(leases::leases))
        .routes(routes!(leases::lease))
        .routes(routes!(leases::intents))
        .routes(routes!(sessions::sessions))
        .routes(routes!(sessions::session, ownership_api::close_session))
        .routes(routes!(sessions::tree))
        .routes(routes!(owners::owners))
        .routes(routes!(owners::owners_of))
        .routes(routes!(artifacts::artifacts))
        .routes(routes!(artifacts::artifact, retention::evict))
        .routes(routes!(owners::replicas))
        .routes(routes!(owners::groups, retention::new_group))
        .routes(routes!(tenants::tenants))
        .routes(routes!(tenants::tenant))
        .routes(routes!(watch::watch))
        .routes(routes!(cluster::cluster))
        .routes(routes!(cluster::state_hash))
        .routes(routes!(members::members))
}

fn write_routes() -> OpenApiRouter<OperatorState> {
    OpenApiRouter::new()
        .routes(routes!(migration::migrate))
        .routes(routes!(migration::replicate))
        .routes(routes!(migration::drop_replica))
        .routes(routes!(ownership_api::claim_session))
        .routes(routes!(ownership_api::release_session))
        .routes(routes!(ownership_api::claim_artifact))
        .routes(routes!(ownership_api::release_artifact))
        .routes(routes!(retention::pin))
        .routes(routes!(erasure::erase_tenant))
        .routes(routes!(erasure::erase_session))
        .routes(routes!(retention::set_group))
        .routes(routes!(retention::renew))
        .routes(routes!(drain_api::drain, drain_api::drain_status))
        .routes(routes!(tenants::set_quota))
        .routes(routes!(cluster::raise_feature_level))
        .routes(routes!(members::promote))
        .routes(routes!(members::demote))
        .routes(routes!(members::replace))
        .routes(routes!(members::remove))
        .routes(routes!(members::move_leader))
        .routes(routes!(cluster::snapshot, backup::save))
}
