//! `/ownerserve/v1/correctness`: links over which KV came as something else, and clearing them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use planner::{Action, BarredLink};
use serde::Serialize;
use utoipa::ToSchema;
use vocabulary::WorkerId;

use super::input::Both;
use super::problem::Problem;
use super::words::WorkerWord;
use crate::correctness::Barred;
use crate::gateway::Gateway;

/// How transfers are checked, and what that found.
#[derive(Serialize, ToSchema)]
pub(super) struct Checked {
    /// Of so many transfers over a link one is checked; 0 checks none.
    one_in: u32,
    /// Links over which nothing moves, the oldest first.
    barred: Vec<BarredLine>,
}

/// A barred link.
#[derive(Serialize, ToSchema)]
struct BarredLine {
    /// Who would send.
    #[schema(value_type = WorkerWord)]
    from: WorkerId,
    /// Who would read.
    #[schema(value_type = WorkerWord)]
    to: WorkerId,
    /// What the transfer was for that failed its check, as `remote_prefill`.
    #[schema(value_type = String)]
    action: Action,
    /// Since when, milliseconds since 1970.
    since_unix_ms: u64,
}

fn checked(gateway: &Gateway) -> Json<Checked> {
    let barred = gateway.decisions.correctness.barred().into_iter();
    let line = barred.map(|Barred { link: BarredLink { from, to }, action, since_unix_ms }| BarredLine {
        from,
        to,
        action,
        since_unix_ms,
    });
    Json(Checked { one_in: gateway.config.correctness.one_in, barred: line.collect() })
}

/// Links over which nothing moves at this router, because KV came as something else over them.
#[utoipa::path(get, path = "/ownerserve/v1/correctness", tag = "steering",
    responses((status = 200, description = "How transfers are checked, and barred links.", body = Checked)))]
pub(super) async fn correctness(State(gateway): State<Arc<Gateway>>) -> Json<Checked> {
    checked(&gateway)
}

/// Lets KV move over a link again at this router; the next transfer over it is checked.
#[utoipa::path(delete, path = "/ownerserve/v1/correctness/{from}/{to}", tag = "steering",
    params(("from" = WorkerWord, Path), ("to" = WorkerWord, Path)),
    responses((status = 200, description = "The links that are still barred.", body = Checked)))]
pub(super) async fn clear(
    State(gateway): State<Arc<Gateway>>,
    Both(from, to): Both<WorkerId, WorkerId>,
) -> Result<Json<Checked>, Problem> {
    if !gateway.decisions.correctness.clear(BarredLink { from, to }) {
        return Err(Problem::not_found(format!("The link from {from} to {to} is not barred at this router.")));
    }
    tracing::info!(%from, %to, "an operator cleared the link: KV moves over it again");
    Ok(checked(&gateway))
}

/// What is barred, in words.
pub(super) fn told(gateway: &Gateway) -> impl Iterator<Item = String> {
    let endpoint =
        |id: WorkerId| gateway.worker(id).map_or_else(|| id.to_string(), |worker| worker.config.endpoint().to_string());
    gateway.decisions.correctness.barred().into_iter().map(move |barred| {
        let (from, to) = (barred.link.from, barred.link.to);
        format!(
            "KV that {} moved from {} to {} said something else than the prompt that it was computed from: nothing moves there \
             until DELETE /ownerserve/v1/correctness/{from}/{to}; before that see to the transfer and restart the target, \
             whose cache has such blocks",
            barred.action, endpoint(from), endpoint(to)
        )
    })
}
