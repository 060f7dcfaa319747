//! `/ownerserve/v1/correctness`: links that delivered wrong KV, and how to clear them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use planner::{Action, BarredLink};
use serde::Serialize;
use utoipa::ToSchema;
use vocabulary::WorkerId;

use super::extractors::PathIds;
use super::problem::Problem;
use super::schemas::WorkerIdSchema;
use crate::app_state::AppState;
use crate::transfer_check::BarredLinkRecord;

/// How transfers are checked, and what that found.
#[derive(Serialize, ToSchema)]
pub(super) struct TransferCheckStatus {
    /// Of so many transfers over a link one is checked; 0 checks none.
    one_in: u32,
    /// Links over which nothing moves, the oldest first.
    barred: Vec<BarredLinkResource>,
}

/// A barred link.
#[derive(Serialize, ToSchema)]
struct BarredLinkResource {
    /// Who would send.
    #[schema(value_type = WorkerIdSchema)]
    from: WorkerId,
    /// Who would read.
    #[schema(value_type = WorkerIdSchema)]
    to: WorkerId,
    /// What the transfer was for that failed its check, as `remote_prefill`.
    #[schema(value_type = String)]
    action: Action,
    /// Since when, milliseconds since 1970.
    since_unix_ms: u64,
}

fn check_status(gateway: &AppState) -> Json<TransferCheckStatus> {
    let barred = gateway.decisions.transfer_checks.barred_records().into_iter();
    let line = barred.map(|BarredLinkRecord { link: BarredLink { from, to }, action, since_unix_ms }| {
        BarredLinkResource { from, to, action, since_unix_ms }
    });
    Json(TransferCheckStatus { one_in: gateway.config.transfer_check.sample_every, barred: line.collect() })
}

/// Links over which nothing moves at this router, because KV came as something else over them.
#[utoipa::path(get, path = "/ownerserve/v1/correctness", tag = "steering",
    responses((status = 200, description = "How transfers are checked, and barred links.", body = TransferCheckStatus)))]
pub(super) async fn correctness(State(gateway): State<Arc<AppState>>) -> Json<TransferCheckStatus> {
    check_status(&gateway)
}

/// Lets KV move over a link again at this router; the next transfer over it is checked.
#[utoipa::path(delete, path = "/ownerserve/v1/correctness/{from}/{to}", tag = "steering",
    params(("from" = WorkerIdSchema, Path), ("to" = WorkerIdSchema, Path)),
    responses((status = 200, description = "The links that are still barred.", body = TransferCheckStatus)))]
pub(super) async fn clear(
    State(gateway): State<Arc<AppState>>,
    PathIds(from, to): PathIds<WorkerId, WorkerId>,
) -> Result<Json<TransferCheckStatus>, Problem> {
    if !gateway.decisions.transfer_checks.clear(BarredLink { from, to }) {
        return Err(Problem::not_found(format!("The link from {from} to {to} is not barred at this router.")));
    }
    tracing::info!(%from, %to, "an operator cleared the link: KV moves over it again");
    Ok(check_status(&gateway))
}

/// Describes each barred link, for people.
pub(super) fn barred_link_details(gateway: &AppState) -> impl Iterator<Item = String> {
    let endpoint = |id: WorkerId| {
        gateway.workers.worker(id).map_or_else(|| id.to_string(), |worker| worker.config.endpoint().to_string())
    };
    gateway.decisions.transfer_checks.barred_records().into_iter().map(move |barred| {
        let (from, to) = (barred.link.from, barred.link.to);
        format!(
            "KV that {} moved from {} to {} said something else than the prompt that it was computed from: nothing moves there \
             until DELETE /ownerserve/v1/correctness/{from}/{to}; before that see to the transfer and restart the target, \
             whose cache has such blocks",
            barred.action, endpoint(from), endpoint(to)
        )
    })
}
