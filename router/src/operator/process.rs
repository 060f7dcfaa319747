//! `/livez`, `/readyz` and `/metrics`: whether the process lives, whether it can serve, and what it counts.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::header::CONTENT_TYPE;

use super::gauges;
use super::problem::Problem;
use crate::gateway::Gateway;

/// Whether the process lives.
#[utoipa::path(get, path = "/livez", tag = "process",
    responses((status = 200, description = "It does.", body = String, content_type = "text/plain")))]
pub(super) async fn live() -> &'static str {
    "ok\n"
}

/// Whether it can serve clients: some worker answers.
#[utoipa::path(get, path = "/readyz", tag = "process",
    responses(
        (status = 200, description = "It can.", body = String, content_type = "text/plain"),
        (status = 503, description = "No worker answers.")))]
pub(super) async fn ready(State(gateway): State<Arc<Gateway>>) -> Response {
    match gateway.roster.ready(gateway.fleet()).first() {
        Some(_) => {
            // Requests are served all the same: this is to be known, and no reason to take traffic away.
            let redis = gateway.remembered.state.trouble();
            let redis = redis.map(|trouble| format!("soft state: Redis is {}\n", trouble.as_str()));
            let ledger = gateway.troubles().into_iter().map(|trouble| format!("ledger: {trouble}\n"));
            std::iter::once("ok\n".to_owned()).chain(redis).chain(ledger).collect::<String>().into_response()
        }
        None => Problem::not_ready("no worker answers").into_response(),
    }
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "process",
    responses((status = 200, description = "In Prometheus' text format.", body = String, content_type = "text/plain")))]
pub(super) async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    gauges::refresh(&gateway);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], gateway.metrics.render()).into_response()
}
