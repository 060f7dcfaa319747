//! `/ownerserve/v1/workers/{id}/draining`: drains workers before they stop.

use axum::extract::State;
use ownership::ledger::{Command, DrainFlag, DrainWorker};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vocabulary::WorkerId;

use super::consistency::{LedgerResponse, ReadView};
use super::drain::{DrainOptions, DrainProgress};
use super::entity_tags::IfMatch;
use super::extractors::{JsonBody, PathId};
use super::leases;
use super::problem::Problem;
use super::schemas::WorkerIdSchema;
use super::state::OperatorState;
use super::writes::{OptionalIfMatch, WriteResult, commit, linearizable_view};
use crate::drains;

/// Maximum number of workers to avoid, and maximum length of an upgrade's name.
const MAX_AVOIDED_WORKERS: usize = 1024;
const MAX_UPGRADE_NAME_CHARS: usize = 128;

/// What becomes of the sessions.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, ToSchema, Default)]
#[serde(rename_all = "lowercase")]
enum SessionDisposition {
    /// They are moved to other workers, with their blocks, one after the other.
    #[default]
    Move,
    /// They stay until their next step goes elsewhere.
    Stay,
}

/// Whether a worker is to be emptied.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DrainBody {
    /// A draining worker keeps what it has, takes no new sessions and is granted nothing more, at every router.
    draining: bool,
    #[serde(default)]
    #[schema(inline)]
    sessions: SessionDisposition,
    /// Who is to be drained after it, in that order: they get none of its sessions. Where nobody else can take them, the last one
    /// does.
    #[serde(default)]
    #[schema(value_type = Vec<WorkerIdSchema>, max_items = 1024)]
    avoid: Vec<WorkerId>,
    /// The rolling upgrade that this is a part of. No session moves twice under one name at one router.
    #[schema(min_length = 1, max_length = 128)]
    upgrade: Option<String>,
    /// Most bytes of KV that are moved a second, on the average; `drain.bandwidth` when left out.
    #[schema(minimum = 1)]
    bytes_per_second: Option<u64>,
}

impl DrainBody {
    fn drain_options(self, usual: u64) -> Result<Option<DrainOptions>, Problem> {
        if self.avoid.len() > MAX_AVOIDED_WORKERS {
            return Err(Problem::bad_body(format!("avoid: accepted are at most {MAX_AVOIDED_WORKERS} workers")));
        }
        let is_name = |name: &String| (1..=MAX_UPGRADE_NAME_CHARS).contains(&name.chars().count());
        if !self.upgrade.as_ref().is_none_or(is_name) {
            return Err(Problem::bad_body(format!("upgrade: accepted are 1 to {MAX_UPGRADE_NAME_CHARS} characters")));
        }
        if self.bytes_per_second == Some(0) {
            return Err(Problem::bad_body("bytes_per_second: accepted is 1 and more"));
        }
        let bandwidth = self.bytes_per_second.unwrap_or(usual);
        let wanted = DrainOptions { avoid: self.avoid, upgrade: self.upgrade, bandwidth };
        Ok((self.draining && self.sessions == SessionDisposition::Move).then_some(wanted))
    }
}

/// Drains a worker, or takes it back into service.
///
/// This router moves its sessions, while the ledger says that it drains; each goes with its blocks to a worker of the same fabric and
/// model. GET tells how far that is.
#[utoipa::path(put, path = "/ownerserve/v1/workers/{id}/draining", tag = "workers",
    params(("id" = WorkerIdSchema, Path), OptionalIfMatch), request_body = DrainBody,
    responses((status = 200, description = "The ledger has it, and every router acts on it.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn drain(
    State(desk): State<OperatorState>,
    PathId(id): PathId<WorkerId>,
    fence: IfMatch,
    JsonBody(body): JsonBody<DrainBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let gateway = &desk.gateway;
    fence.check_optional(leases::find_worker(&*linearizable_view(gateway).await?, id)?.epoch)?;
    let draining = if body.draining { DrainFlag::Yes } else { DrainFlag::No };
    let wanted = body.drain_options(gateway.config.drain.bandwidth.0 as u64)?;
    commit(gateway, Command::DrainWorker(DrainWorker { worker: id, draining })).await?;
    // Applies the ledger's current state instead of the request, because another write may have changed it since. The
    // other routers learn it from the ledger, as this one would a moment later.
    drains::apply(gateway.directory(), gateway.fleet(), id);
    let did = match (draining, wanted) {
        (DrainFlag::Yes, Some(wanted)) => {
            desk.drains.begin(gateway, id, wanted);
            "the worker drains: it takes no new sessions, and those that it has are moved"
        }
        (DrainFlag::Yes, None) => "the worker drains: it takes no new sessions",
        (DrainFlag::No, _) => "the worker takes sessions",
    };
    Ok(WriteResult::plain(gateway, did))
}

/// How far a drain is.
#[derive(Serialize, ToSchema)]
pub(super) struct DrainStatus {
    #[schema(value_type = WorkerIdSchema)]
    worker: WorkerId,
    /// Whether the ledger says that it drains.
    draining: bool,
    progress: DrainProgress,
}

/// How far this router is with moving a worker's sessions.
#[utoipa::path(get, path = "/ownerserve/v1/workers/{id}/draining", tag = "workers",
    params(("id" = WorkerIdSchema, Path)),
    responses((status = 200, description = "What was moved, and what is left.", body = LedgerResponse<DrainStatus>)))]
pub(super) async fn draining(
    State(desk): State<OperatorState>,
    ReadView(view): ReadView,
    PathId(id): PathId<WorkerId>,
) -> Result<LedgerResponse<DrainStatus>, Problem> {
    let draining = leases::find_worker(&view, id)?.draining == DrainFlag::Yes;
    let progress = desk.drains.progress(id);
    Ok(LedgerResponse::new(&view, DrainStatus { worker: id, draining, progress }))
}
