//! The operators' listener: metrics, health, what the router knows and why it decided, and the dial.
//!
//! It is bound to loopback unless told otherwise: whoever reaches it can change how traffic is routed.

mod api;
mod gauges;
mod ledger;
mod problem;
mod workers;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::CONTENT_TYPE;
use serde::Deserialize;

use crate::gateway::Gateway;
pub use problem::Problem;

/// Section `[operator]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OperatorConfig {
    /// Where to listen; also `--operator-listen`.
    pub listen: SocketAddr,
}

impl Default for OperatorConfig {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 9464)) }
    }
}

/// The operators' routes.
pub fn routes(gateway: &Arc<Gateway>) -> Router {
    let mode = get(api::mode).put(api::set_mode).patch(api::set_mode);
    Router::new()
        .route("/metrics", get(metrics))
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/ownerserve/v1/mode", mode)
        .route("/ownerserve/v1/workers", get(workers::workers))
        .route("/ownerserve/v1/sessions", get(ledger::sessions))
        .route("/ownerserve/v1/sessions/{id}", get(ledger::session))
        .route("/ownerserve/v1/owners/{prefix}", get(ledger::owners))
        .route("/ownerserve/v1/decisions", get(api::decisions))
        .route("/ownerserve/v1/decisions/{request}", get(api::decision))
        .fallback(|| async { Problem::unknown_path() })
        .method_not_allowed_fallback(|| async { Problem::wrong_method() })
        .with_state(gateway.clone())
}

async fn ready(State(gateway): State<Arc<Gateway>>) -> Response {
    match gateway.roster.ready(gateway.fleet()).first() {
        Some(_) => match gateway.remembered.state.trouble() {
            None => "ok\n".into_response(),
            // Requests are served all the same: this is to be known, and no reason to take traffic away.
            Some(trouble) => format!("ok\nsoft state: Redis is {}\n", trouble.as_str()).into_response(),
        },
        None => Problem::not_ready("no worker answers").into_response(),
    }
}

async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    gauges::refresh(&gateway);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], gateway.metrics.render()).into_response()
}

#[cfg(test)]
mod tests;
