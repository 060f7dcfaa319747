//! `/ownerserve/v1/workers/{id}/drain`: drains workers before they stop.

use std::sync::Arc;

use axum::extract::State;
use ownership::ledger::{Command, DrainFlag, DrainWorker};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vocabulary::WorkerId;

use super::consistency::{LedgerResponse, ReadView};
use super::drain::{DrainOptions, DrainProgress, DrainRegistry};
use super::entity_tags::IfMatch;
use super::extractors::{JsonBody, PathId};
use super::leases;
use super::problem::Problem;
use super::request_units::ByteSizeInput;
use super::schemas::WorkerIdSchema;
use super::settings::OperatorSettings;
use super::sources::SessionMover;
use super::writes::{OptionalIfMatchSchema, WriteResult, commit, linearizable_view};
use proxy::drains;

/// Maximum number of workers to avoid, and maximum length of an upgrade's id.
const MAX_AVOIDED_WORKERS: usize = 1024;
const MAX_UPGRADE_ID_CHARS: usize = 128;

/// What happens to the sessions.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, ToSchema, Default)]
#[serde(rename_all = "lowercase")]
enum SessionDisposition {
    /// They are moved to other workers, with their blocks, one after the other.
    #[default]
    Move,
    /// They keep their owner until their next step goes elsewhere.
    Keep,
}

/// Options of a drain.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DrainRequest {
    /// A draining worker keeps what it has, takes no new sessions and is granted nothing more, at every router.
    draining: bool,
    #[serde(default)]
    #[schema(inline)]
    sessions: SessionDisposition,
    /// Workers that are drained after it, in that order: they get none of its sessions, unless no other worker can take them;
    /// then the last one gets them.
    #[serde(default)]
    #[schema(value_type = Vec<WorkerIdSchema>, max_items = 1024)]
    avoid_workers: Vec<WorkerId>,
    /// Id of the rolling upgrade that this drain belongs to. No session moves twice in one upgrade at one router.
    #[schema(min_length = 1, max_length = 128)]
    upgrade_id: Option<String>,
    /// Most KV that is moved per second, on average; `drain.bandwidth` of the router when left out.
    #[schema(value_type = Option<ByteSizeInput>)]
    bandwidth: Option<ByteSizeInput>,
}

impl DrainRequest {
    fn drain_options(self, usual: u64) -> Result<Option<DrainOptions>, Problem> {
        if self.avoid_workers.len() > MAX_AVOIDED_WORKERS {
            return Err(Problem::bad_body(format!(
                "avoid_workers: accepted are at most {MAX_AVOIDED_WORKERS} workers"
            )));
        }
        let is_name = |name: &String| (1..=MAX_UPGRADE_ID_CHARS).contains(&name.chars().count());
        if !self.upgrade_id.as_ref().is_none_or(is_name) {
            return Err(Problem::bad_body(format!("upgrade_id: accepted are 1 to {MAX_UPGRADE_ID_CHARS} characters")));
        }
        if self.bandwidth == Some(ByteSizeInput(0)) {
            return Err(Problem::bad_body("bandwidth: accepted is 1B and more, a second"));
        }
        let bandwidth = self.bandwidth.map_or(usual, |size| size.0);
        let options = DrainOptions { avoid_workers: self.avoid_workers, upgrade_id: self.upgrade_id, bandwidth };
        Ok((self.draining && self.sessions == SessionDisposition::Move).then_some(options))
    }
}

/// Drains a worker, or takes it back into service.
///
/// While the worker drains, this router moves its sessions, each with its blocks, to workers of the same fabric and model. GET
/// shows the progress.
#[utoipa::path(put, path = "/ownerserve/v1/workers/{id}/drain", tag = "workers",
    params(("id" = WorkerIdSchema, Path), OptionalIfMatchSchema), request_body = DrainRequest,
    responses((status = 200, description = "The drain is in the ledger, and every router respects it.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn drain(
    State(mover): State<SessionMover>,
    State(running): State<Arc<DrainRegistry>>,
    State(settings): State<Arc<OperatorSettings>>,
    PathId(id): PathId<WorkerId>,
    if_match: IfMatch,
    JsonBody(body): JsonBody<DrainRequest>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let ledger = &mover.ledger;
    if_match.check_optional(leases::find_worker(&*linearizable_view(ledger).await?, id)?.epoch)?;
    let draining = if body.draining { DrainFlag::Yes } else { DrainFlag::No };
    let options = body.drain_options(settings.drain_bandwidth)?;
    commit(ledger, Command::DrainWorker(DrainWorker { worker: id, draining })).await?;
    // Applies the ledger's current state instead of the request, because another write may have changed it since. The
    // other routers learn it from the ledger, as this one would a moment later.
    drains::apply(ledger.directory(), &mover.fleet, id);
    let result = match (draining, options) {
        (DrainFlag::Yes, Some(options)) => {
            running.begin(&mover, id, options);
            "the worker drains: it takes no new sessions, and those that it has are moved"
        }
        (DrainFlag::Yes, None) => "the worker drains: it takes no new sessions",
        (DrainFlag::No, _) => "the worker takes sessions",
    };
    Ok(WriteResult::plain(ledger, result))
}

/// Status of a drain.
#[derive(Serialize, ToSchema)]
pub(super) struct DrainStatus {
    #[schema(value_type = WorkerIdSchema)]
    worker: WorkerId,
    /// Whether the worker drains, by the ledger.
    draining: bool,
    progress: DrainProgress,
}

/// Status of a drain, with this router's progress in moving the worker's sessions.
#[utoipa::path(get, path = "/ownerserve/v1/workers/{id}/drain", tag = "workers",
    params(("id" = WorkerIdSchema, Path)),
    responses((status = 200, description = "What was moved, and what is left to move.", body = LedgerResponse<DrainStatus>)))]
pub(super) async fn drain_status(
    State(running): State<Arc<DrainRegistry>>,
    ReadView(view): ReadView,
    PathId(id): PathId<WorkerId>,
) -> Result<LedgerResponse<DrainStatus>, Problem> {
    let draining = leases::find_worker(&view, id)?.draining == DrainFlag::Yes;
    let progress = running.progress(id);
    Ok(LedgerResponse::new(&view, DrainStatus { worker: id, draining, progress }))
}
