//! `/ownerserve/v1/transfer-checks`: links that failed a transfer check, and how to enable them again.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use planner::{Action, DirectedLink};
use serde::Serialize;
use utoipa::ToSchema;
use vocabulary::WorkerId;

use super::extractors::PathIds;
use super::problem::Problem;
use super::schemas::WorkerIdSchema;
use super::settings::OperatorSettings;
use super::sources::{FleetSources, RoutingSources};
use proxy::transfer_check::{DisabledLinkRecord, TransferCheckState};
use vocabulary::UtcTime;

/// How transfers are checked, and the result.
#[derive(Serialize, ToSchema)]
#[schema(as = TransferChecks)]
pub(super) struct TransferCheckStatus {
    /// One in this many transfers over a link is checked; 0 checks none.
    sample_every: u32,
    /// Links that failed a check and transfer nothing, the oldest first.
    disabled_links: Vec<DisabledLinkResource>,
}

/// A link that failed a check.
#[derive(Serialize, ToSchema)]
#[schema(as = DisabledLink)]
struct DisabledLinkResource {
    /// The worker that would send.
    #[schema(value_type = WorkerIdSchema)]
    source: WorkerId,
    /// The worker that would receive.
    #[schema(value_type = WorkerIdSchema)]
    target: WorkerId,
    /// The action whose transfer failed its check, as `remote_prefill`.
    #[schema(value_type = String)]
    action: Action,
    /// When the link was disabled.
    disabled_at: UtcTime,
}

fn check_status(checks: &TransferCheckState, settings: &OperatorSettings) -> Json<TransferCheckStatus> {
    let records = checks.disabled_link_records().into_iter();
    let links = records.map(|DisabledLinkRecord { link: DirectedLink { from, to }, action, since_unix_ms }| {
        let disabled_at = UtcTime::from_unix_ms(since_unix_ms);
        DisabledLinkResource { source: from, target: to, action, disabled_at }
    });
    Json(TransferCheckStatus { sample_every: settings.transfer_check_sampling, disabled_links: links.collect() })
}

/// Links that transfer nothing at this router, because a transfer over them failed its check.
#[utoipa::path(get, path = "/ownerserve/v1/transfer-checks", tag = "routing",
    responses((status = 200, description = "How transfers are checked, and disabled links.", body = TransferCheckStatus)))]
pub(super) async fn transfer_checks(
    State(routing): State<RoutingSources>,
    State(settings): State<Arc<OperatorSettings>>,
) -> Json<TransferCheckStatus> {
    check_status(&routing.transfer_checks, &settings)
}

/// Enables a link at this router again; the next transfer over it is checked.
#[utoipa::path(delete, path = "/ownerserve/v1/transfer-checks/disabled-links/{source}/{target}", tag = "routing",
    params(("source" = WorkerIdSchema, Path), ("target" = WorkerIdSchema, Path)),
    responses((status = 200, description = "The links that are still disabled.", body = TransferCheckStatus)))]
pub(super) async fn enable_link(
    State(routing): State<RoutingSources>,
    State(settings): State<Arc<OperatorSettings>>,
    PathIds(source, target): PathIds<WorkerId, WorkerId>,
) -> Result<Json<TransferCheckStatus>, Problem> {
    if !routing.transfer_checks.clear(DirectedLink { from: source, to: target }) {
        return Err(Problem::not_found(format!("The link from {source} to {target} is not disabled at this router.")));
    }
    tracing::info!(%source, %target, "an operator enabled the link: KV moves over it again");
    Ok(check_status(&routing.transfer_checks, &settings))
}

/// Describes each disabled link, for people.
pub(super) fn disabled_link_details(checks: &TransferCheckState, fleet: &FleetSources) -> impl Iterator<Item = String> {
    let endpoint = |id: WorkerId| {
        fleet.workers.worker(id).map_or_else(|| id.to_string(), |worker| worker.config.endpoint().to_string())
    };
    checks.disabled_link_records().into_iter().map(move |disabled| {
        let (source, target) = (disabled.link.from, disabled.link.to);
        format!(
            "KV that {} moved from {} to {} gave another answer than computing the prompt: the link is disabled until \
             DELETE /ownerserve/v1/transfer-checks/disabled-links/{source}/{target}; before that repair the transfer and restart \
             the target, whose cache has such blocks",
            disabled.action, endpoint(source), endpoint(target)
        )
    })
}
