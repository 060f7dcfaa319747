//! Writes about what is kept and who works: pins, groups, evictions, leases and drains.

use std::sync::Arc;

use axum::extract::State;
use ownership::ledger::{Command, Outcome, Pin, Pinned, RenewLease, RetireLife, SetGroup};
use ring::rand::{SecureRandom as _, SystemRandom};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vocabulary::{ArtifactId, GroupId, Health, Micros, WorkerId};

use super::fresh::Fresh;
use super::input::{Named, Told};
use super::problem::{Kind, Problem};
use super::tags::Fence;
use super::words::{ArtifactWord, GroupWord, WorkerWord};
use super::writes::{Done, FenceAllowed, Nothing, newest, write};
use super::{artifacts, leases};
use crate::gateway::Gateway;

/// Whether it is to be kept.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PinBody {
    /// A pinned artifact is never evicted or collected.
    pinned: bool,
}

/// Pins an artifact, or takes the pin back.
#[utoipa::path(put, path = "/ownerserve/v1/artifacts/{id}/pin", tag = "artifacts",
    params(("id" = ArtifactWord, Path), FenceAllowed), request_body = PinBody,
    responses((status = 200, description = "It is kept, or may be collected again.", body = Fresh<Done>)))]
pub(super) async fn pin(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<ArtifactId>,
    fence: Fence,
    Told(body): Told<PinBody>,
) -> Result<Fresh<Done>, Problem> {
    fence.allowed(artifacts::known(&*newest(&gateway).await?, id)?.epoch)?;
    let (pinned, did) = match body.pinned {
        true => (Pinned::Yes, "the artifact is pinned"),
        false => (Pinned::No, "the artifact is not pinned"),
    };
    write(&gateway, Command::Pin(Pin { artifact: id, pinned })).await?;
    Ok(Done::plain(&gateway, did))
}

/// To which group it is to belong.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupBody {
    /// The group; null for none.
    #[schema(value_type = Option<GroupWord>, required = true)]
    #[serde(deserialize_with = "super::input::must_be_there")]
    group: Option<GroupId>,
}

/// Puts an artifact into a group, or out of any.
#[utoipa::path(put, path = "/ownerserve/v1/artifacts/{id}/group", tag = "artifacts",
    params(("id" = ArtifactWord, Path), FenceAllowed), request_body = GroupBody,
    responses((status = 200, description = "It is in that group, or in none.", body = Fresh<Done>)))]
pub(super) async fn set_group(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<ArtifactId>,
    fence: Fence,
    Told(body): Told<GroupBody>,
) -> Result<Fresh<Done>, Problem> {
    fence.allowed(artifacts::known(&*newest(&gateway).await?, id)?.epoch)?;
    write(&gateway, Command::SetGroup(SetGroup { artifact: id, group: body.group })).await?;
    let did =
        body.group.map_or("the artifact is in no group".to_owned(), |group| format!("the artifact is in {group}"));
    Ok(Done::plain(&gateway, did))
}

/// What is to be in a new group.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewGroup {
    /// Artifacts that are put into it at once; a group is there as long as one is in it.
    #[schema(value_type = Vec<ArtifactWord>, max_items = 100)]
    #[serde(default)]
    artifacts: Vec<ArtifactId>,
}

/// Most artifacts of a new group.
const MOST_AT_ONCE: usize = 100;

/// A group that was made up.
#[derive(Serialize, ToSchema)]
pub(super) struct GroupMade {
    /// Its id.
    #[schema(value_type = GroupWord)]
    group: GroupId,
    /// In words.
    did: String,
}

/// Makes up a group, and puts artifacts into it.
#[utoipa::path(post, path = "/ownerserve/v1/groups", tag = "artifacts", request_body = NewGroup,
    responses((status = 200, description = "Its id, which no other group has.", body = Fresh<GroupMade>)))]
pub(super) async fn new_group(
    State(gateway): State<Arc<Gateway>>,
    Told(body): Told<NewGroup>,
) -> Result<Fresh<GroupMade>, Problem> {
    if body.artifacts.len() > MOST_AT_ONCE {
        return Err(Problem::bad_body(format!("artifacts: accepted are at most {MOST_AT_ONCE}")));
    }
    let view = newest(&gateway).await?;
    for id in &body.artifacts {
        artifacts::known(&view, *id)?;
    }
    let mut digits = [0; 16];
    SystemRandom::new().fill(&mut digits).map_err(|_| Problem::new(Kind::Internal, "No id could be drawn."))?;
    let group = GroupId(u128::from_be_bytes(digits));
    let put = |artifact: &ArtifactId| Command::SetGroup(SetGroup { artifact: *artifact, group: Some(group) });
    let puts: Vec<Command> = body.artifacts.iter().map(put).collect();
    let wanted = puts.len();
    if wanted > 0 {
        match write(&gateway, Command::Batch(puts)).await {
            // Some were forgotten since they were looked at; the others are in it.
            Err(problem) if problem.kind() != Kind::NotFound => return Err(problem),
            _ => {}
        }
    }
    let view = gateway.directory().view();
    let did = match (view.group(group).count(), wanted) {
        (_, 0) => "the id is new; the group is listed once an artifact is in it".to_owned(),
        (1, 1) => "one artifact is in it".to_owned(),
        (there, _) if there == wanted => format!("{there} artifacts are in it"),
        (there, _) => format!("{there} of {wanted} artifacts are in it; the others were forgotten meanwhile"),
    };
    Ok(Fresh::new(&view, GroupMade { group, did }))
}

/// Forgets an artifact that nothing references and that is not pinned.
///
/// The blocks at the engines are theirs to drop: no engine offers that to a proxy.
#[utoipa::path(delete, path = "/ownerserve/v1/artifacts/{id}", tag = "artifacts",
    params(("id" = ArtifactWord, Path), FenceAllowed),
    responses((
        status = 200, description = "It is forgotten; engines drop its blocks when they need the room.",
        body = Fresh<Done>)))]
pub(super) async fn evict(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<ArtifactId>,
    fence: Fence,
) -> Result<Fresh<Done>, Problem> {
    fence.allowed(artifacts::known(&*newest(&gateway).await?, id)?.epoch)?;
    write(&gateway, Command::Evict(id)).await?;
    Ok(Done::plain(&gateway, "the artifact is forgotten"))
}

/// Says that a worker was reached: renews the lease of its present life by one term.
///
/// Routers do this by themselves for as long as they reach it.
#[utoipa::path(post, path = "/ownerserve/v1/leases/{worker}/renew", tag = "workers",
    params(("worker" = WorkerWord, Path), FenceAllowed), request_body = Nothing,
    responses((status = 200, description = "The lease is held for one more term.", body = Fresh<Done>)))]
pub(super) async fn renew(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<WorkerId>,
    fence: Fence,
    Told(Nothing {}): Told<Nothing>,
) -> Result<Fresh<Done>, Problem> {
    let view = newest(&gateway).await?;
    let worker = leases::known(&view, id)?;
    fence.allowed(worker.epoch)?;
    let ttl = Micros::of(gateway.directory().lease());
    let outcome =
        write(&gateway, Command::RenewLease(RenewLease { alive: vec![(id, worker.incarnation)], ttl })).await?;
    match outcome {
        Outcome::Renewed { renewed: 1.., .. } => {
            Ok(Done::granted(&gateway, format!("the lease is held for {} ms more", ttl.0 / 1000), worker.epoch))
        }
        _ => {
            let detail = "Nothing was changed: the lease of this life is over. A router registers the worker again once \
                          it reaches it.";
            Err(Problem::new(Kind::Conflict, detail).caused("lease_over").at(worker.epoch))
        }
    }
}

/// Ends a worker's part in the ledger: what it owns is nobody's, or its copies', at once, and not when its lease is over.
///
/// For one that is gone for good. A router that reaches it would register it again, so it is refused while one does here.
#[utoipa::path(delete, path = "/ownerserve/v1/workers/{id}", tag = "workers",
    params(("id" = WorkerWord, Path), FenceAllowed),
    responses((status = 200, description = "The worker owns nothing any more.", body = Fresh<Done>)))]
pub(super) async fn retire(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<WorkerId>,
    fence: Fence,
) -> Result<Fresh<Done>, Problem> {
    let view = newest(&gateway).await?;
    let seen = leases::known(&view, id)?.epoch;
    fence.allowed(seen)?;
    let fleet = gateway.fleet().snapshot();
    if fleet.iter().any(|worker| worker.id == id && worker.health != Health::Unreachable) {
        let detail = "Nothing was changed: the worker answers, and would be registered again. Stop it first, or take it \
                      out of the configuration; PUT /ownerserve/v1/workers/ID/draining empties it before.";
        return Err(Problem::new(Kind::Conflict, detail).caused("worker_answers"));
    }
    let fenced = Command::RetireLife(RetireLife { worker: id, seen });
    // A cluster at level 1 has no word for what was seen.
    let retire = if fenced.level() <= view.level() { fenced } else { Command::RetireWorker(id) };
    write(&gateway, retire).await?;
    Ok(Done::plain(&gateway, "the worker is retired: it owns nothing any more"))
}
