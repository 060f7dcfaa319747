//! `/ownerserve/v1/workers/{id}/draining`: workers that are emptied before they stop.

use axum::extract::State;
use ownership::ledger::{Command, DrainWorker, Draining};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vocabulary::WorkerId;

use super::desk::Desk;
use super::emptying::{EmptyingProgress, Wanted};
use super::fresh::{Fresh, Seen};
use super::input::{Named, Told};
use super::leases;
use super::problem::Problem;
use super::tags::Fence;
use super::words::WorkerWord;
use super::writes::{Done, FenceAllowed, newest, write};
use crate::drains;

/// Most workers that are to be drained next, and the longest name of an upgrade.
const MOST_NEXT: usize = 1024;
const LONGEST_NAME: usize = 128;

/// What becomes of the sessions.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, ToSchema, Default)]
#[serde(rename_all = "lowercase")]
enum SessionsWord {
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
    sessions: SessionsWord,
    /// Who is to be drained after it, in that order: they get none of its sessions. Where nobody else can take them, the last one
    /// does.
    #[serde(default)]
    #[schema(value_type = Vec<WorkerWord>, max_items = 1024)]
    avoid: Vec<WorkerId>,
    /// The rolling upgrade that this is a part of. No session moves twice under one name at one router.
    #[schema(min_length = 1, max_length = 128)]
    upgrade: Option<String>,
    /// Most bytes of KV that are moved a second, on the average; `drain.bandwidth` when left out.
    #[schema(minimum = 1)]
    bytes_per_second: Option<u64>,
}

impl DrainBody {
    fn wanted(self, usual: u64) -> Result<Option<Wanted>, Problem> {
        if self.avoid.len() > MOST_NEXT {
            return Err(Problem::bad_body(format!("avoid: accepted are at most {MOST_NEXT} workers")));
        }
        let is_name = |name: &String| (1..=LONGEST_NAME).contains(&name.chars().count());
        if !self.upgrade.as_ref().is_none_or(is_name) {
            return Err(Problem::bad_body(format!("upgrade: accepted are 1 to {LONGEST_NAME} characters")));
        }
        if self.bytes_per_second == Some(0) {
            return Err(Problem::bad_body("bytes_per_second: accepted is 1 and more"));
        }
        let bandwidth = self.bytes_per_second.unwrap_or(usual);
        let wanted = Wanted { avoid: self.avoid, upgrade: self.upgrade, bandwidth };
        Ok((self.draining && self.sessions == SessionsWord::Move).then_some(wanted))
    }
}

/// Drains a worker, or takes it back into service.
///
/// This router moves its sessions, while the ledger says that it drains; each goes with its blocks to a worker of the same fabric and
/// model. GET tells how far that is.
#[utoipa::path(put, path = "/ownerserve/v1/workers/{id}/draining", tag = "workers",
    params(("id" = WorkerWord, Path), FenceAllowed), request_body = DrainBody,
    responses((status = 200, description = "The ledger has it, and every router acts on it.", body = Fresh<Done>)))]
pub(super) async fn drain(
    State(desk): State<Desk>,
    Named(id): Named<WorkerId>,
    fence: Fence,
    Told(body): Told<DrainBody>,
) -> Result<Fresh<Done>, Problem> {
    let gateway = &desk.gateway;
    fence.allowed(leases::known(&*newest(gateway).await?, id)?.epoch)?;
    let draining = if body.draining { Draining::Yes } else { Draining::No };
    let wanted = body.wanted(gateway.config.drain.bandwidth.0 as u64)?;
    write(gateway, Command::DrainWorker(DrainWorker { worker: id, draining })).await?;
    // What the ledger says by now, and not what was asked: it may have been told otherwise since. The other routers hear of
    // it from the ledger, as this one would in a moment.
    drains::obey(gateway.directory(), gateway.fleet(), id);
    let did = match (draining, wanted) {
        (Draining::Yes, Some(wanted)) => {
            desk.emptyings.begin(gateway, id, wanted);
            "the worker drains: it takes no new sessions, and those that it has are moved"
        }
        (Draining::Yes, None) => "the worker drains: it takes no new sessions",
        (Draining::No, _) => "the worker takes sessions",
    };
    Ok(Done::plain(gateway, did))
}

/// How far a drain is.
#[derive(Serialize, ToSchema)]
pub(super) struct DrainNow {
    #[schema(value_type = WorkerWord)]
    worker: WorkerId,
    /// Whether the ledger says that it drains.
    draining: bool,
    progress: EmptyingProgress,
}

/// How far this router is with moving a worker's sessions.
#[utoipa::path(get, path = "/ownerserve/v1/workers/{id}/draining", tag = "workers",
    params(("id" = WorkerWord, Path)),
    responses((status = 200, description = "What was moved, and what is left.", body = Fresh<DrainNow>)))]
pub(super) async fn draining(
    State(desk): State<Desk>,
    Seen(view): Seen,
    Named(id): Named<WorkerId>,
) -> Result<Fresh<DrainNow>, Problem> {
    let draining = leases::known(&view, id)?.draining == Draining::Yes;
    let progress = desk.emptyings.progress(id);
    Ok(Fresh::new(&view, DrainNow { worker: id, draining, progress }))
}
