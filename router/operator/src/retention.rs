//! Writes about retention and workers: pins, groups, evictions, leases and drains.

use axum::extract::State;
use ownership::ledger::{ArtifactPinFlag, Command, Outcome, PinArtifact, RenewLease, RetireIncarnation, SetGroup};
use ring::rand::{SecureRandom as _, SystemRandom};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vocabulary::{ArtifactGroupId, ArtifactId, Micros, WorkerHealth, WorkerId};

use super::consistency::LedgerResponse;
use super::entity_tags::IfMatch;
use super::extractors::{JsonBody, PathId};
use super::problem::{Problem, ProblemKind};
use super::schemas::{ArtifactIdSchema, GroupIdSchema, WorkerIdSchema};
use super::sources::FleetSources;
use super::writes::{EmptyBody, OptionalIfMatchSchema, WriteResult, commit, linearizable_view};
use super::{artifacts, leases};
use proxy::ledger_access::LedgerAccess;
use vocabulary::TimeSpan;

/// Whether an artifact is pinned.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ArtifactPinBody {
    /// A pinned artifact is never evicted or collected.
    pinned: bool,
}

/// Pins or unpins an artifact.
#[utoipa::path(put, path = "/ownerserve/v1/artifacts/{id}/pin", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path), OptionalIfMatchSchema), request_body = ArtifactPinBody,
    responses((status = 200, description = "The artifact is pinned, or may be collected again.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn pin(
    State(ledger): State<LedgerAccess>,
    PathId(id): PathId<ArtifactId>,
    if_match: IfMatch,
    JsonBody(body): JsonBody<ArtifactPinBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    if_match.check_optional(artifacts::find_artifact(&*linearizable_view(&ledger).await?, id)?.epoch)?;
    let (pinned, result) = match body.pinned {
        true => (ArtifactPinFlag::Yes, "the artifact is pinned"),
        false => (ArtifactPinFlag::No, "the artifact is not pinned"),
    };
    commit(&ledger, Command::Pin(PinArtifact { artifact: id, pinned })).await?;
    Ok(WriteResult::plain(&ledger, result))
}

/// Group of an artifact.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupAssignmentBody {
    /// The group; null for none.
    #[schema(value_type = Option<GroupIdSchema>, required = true)]
    #[serde(deserialize_with = "super::extractors::required_nullable")]
    group: Option<ArtifactGroupId>,
}

/// Assigns an artifact to a group, or to none.
#[utoipa::path(put, path = "/ownerserve/v1/artifacts/{id}/group", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path), OptionalIfMatchSchema), request_body = GroupAssignmentBody,
    responses((status = 200, description = "The artifact is in that group, or in none.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn set_group(
    State(ledger): State<LedgerAccess>,
    PathId(id): PathId<ArtifactId>,
    if_match: IfMatch,
    JsonBody(body): JsonBody<GroupAssignmentBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    if_match.check_optional(artifacts::find_artifact(&*linearizable_view(&ledger).await?, id)?.epoch)?;
    commit(&ledger, Command::SetGroup(SetGroup { artifact: id, group: body.group })).await?;
    let result =
        body.group.map_or("the artifact is in no group".to_owned(), |group| format!("the artifact is in {group}"));
    Ok(WriteResult::plain(&ledger, result))
}

/// Artifacts of a new group.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewGroupBody {
    /// Artifacts that are assigned at once; a group exists as long as it has one.
    #[schema(value_type = Vec<ArtifactIdSchema>, max_items = 100)]
    #[serde(default)]
    artifacts: Vec<ArtifactId>,
}

/// Maximum number of artifacts in a new group.
const MAX_GROUP_ARTIFACTS: usize = 100;

/// A new group.
#[derive(Serialize, ToSchema)]
pub(super) struct CreatedGroup {
    /// Its id.
    #[schema(value_type = GroupIdSchema)]
    group: ArtifactGroupId,
    /// What was done, in words.
    result: String,
}

/// Creates a group and assigns artifacts to it.
#[utoipa::path(post, path = "/ownerserve/v1/groups", tag = "artifacts", request_body = NewGroupBody,
    responses((status = 200, description = "Its id, which no other group has.", body = LedgerResponse<CreatedGroup>)))]
pub(super) async fn new_group(
    State(ledger): State<LedgerAccess>,
    JsonBody(body): JsonBody<NewGroupBody>,
) -> Result<LedgerResponse<CreatedGroup>, Problem> {
    if body.artifacts.len() > MAX_GROUP_ARTIFACTS {
        return Err(Problem::bad_body(format!("artifacts: accepted are at most {MAX_GROUP_ARTIFACTS}")));
    }
    let view = linearizable_view(&ledger).await?;
    for id in &body.artifacts {
        artifacts::find_artifact(&view, *id)?;
    }
    let mut digits = [0; 16];
    SystemRandom::new().fill(&mut digits).map_err(|_| Problem::new(ProblemKind::Internal, "No id could be drawn."))?;
    let group = ArtifactGroupId(u128::from_be_bytes(digits));
    let put = |artifact: &ArtifactId| Command::SetGroup(SetGroup { artifact: *artifact, group: Some(group) });
    let puts: Vec<Command> = body.artifacts.iter().map(put).collect();
    let put_count = puts.len();
    if put_count > 0 {
        match commit(&ledger, Command::Batch(puts)).await {
            // Artifacts forgotten meanwhile are ignored; the others are in the group.
            Err(problem) if problem.kind() != ProblemKind::NotFound => return Err(problem),
            _ => {}
        }
    }
    let view = ledger.directory().view();
    let result = match (view.group(group).count(), put_count) {
        (_, 0) => "the id is new; the group is listed once an artifact is in it".to_owned(),
        (1, 1) => "one artifact is in it".to_owned(),
        (there, _) if there == put_count => format!("{there} artifacts are in it"),
        (there, _) => format!("{there} of {put_count} artifacts are in it; the others were forgotten meanwhile"),
    };
    Ok(LedgerResponse::new(&view, CreatedGroup { group, result }))
}

/// Evicts an artifact that nothing references and that is not pinned.
///
/// Engines drop its blocks when they need the memory; no engine lets a proxy drop them.
#[utoipa::path(delete, path = "/ownerserve/v1/artifacts/{id}", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path), OptionalIfMatchSchema),
    responses((
        status = 200, description = "The artifact is not in the ledger any more.",
        body = LedgerResponse<WriteResult>)))]
pub(super) async fn evict(
    State(ledger): State<LedgerAccess>,
    PathId(id): PathId<ArtifactId>,
    if_match: IfMatch,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    if_match.check_optional(artifacts::find_artifact(&*linearizable_view(&ledger).await?, id)?.epoch)?;
    commit(&ledger, Command::Evict(id)).await?;
    Ok(WriteResult::plain(&ledger, "the artifact is forgotten"))
}

/// Renews the lease of a worker's present incarnation by one lease duration.
///
/// Routers do this by themselves as long as they reach the worker.
#[utoipa::path(post, path = "/ownerserve/v1/leases/{worker}/renew", tag = "workers",
    params(("worker" = WorkerIdSchema, Path), OptionalIfMatchSchema), request_body = EmptyBody,
    responses((status = 200, description = "The lease is held for one more lease duration.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn renew(
    State(ledger): State<LedgerAccess>,
    PathId(id): PathId<WorkerId>,
    if_match: IfMatch,
    JsonBody(EmptyBody {}): JsonBody<EmptyBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let view = linearizable_view(&ledger).await?;
    let worker = leases::find_worker(&view, id)?;
    if_match.check_optional(worker.epoch)?;
    let ttl = Micros::of(ledger.directory().lease_duration());
    let outcome =
        commit(&ledger, Command::RenewLease(RenewLease { alive: vec![(id, worker.incarnation)], ttl })).await?;
    match outcome {
        Outcome::Renewed { renewed: 1.., .. } => Ok(WriteResult::granted(
            &ledger,
            format!("the lease is held for {} more", TimeSpan::from(ttl)),
            worker.epoch,
        )),
        _ => {
            let detail = "Nothing was changed: the lease of this incarnation has expired. A router registers the worker again once \
                          it reaches it.";
            Err(Problem::new(ProblemKind::Conflict, detail).with_reason("lease_expired").with_epoch(worker.epoch))
        }
    }
}

/// Retires a worker that is gone for good: what it owns has no owner, or its replicas', at once and not when the lease expires.
///
/// Refused while this router reaches the worker, because it would be registered again.
#[utoipa::path(delete, path = "/ownerserve/v1/workers/{id}", tag = "workers",
    params(("id" = WorkerIdSchema, Path), OptionalIfMatchSchema),
    responses((status = 200, description = "The worker owns nothing any more.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn retire(
    State(ledger): State<LedgerAccess>,
    State(fleet): State<FleetSources>,
    PathId(id): PathId<WorkerId>,
    if_match: IfMatch,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let view = linearizable_view(&ledger).await?;
    let seen = leases::find_worker(&view, id)?.epoch;
    if_match.check_optional(seen)?;
    let fleet = fleet.workers.fleet().snapshot();
    if fleet.iter().any(|worker| worker.id == id && worker.health != WorkerHealth::Unreachable) {
        let detail = "Nothing was changed: the worker answers, and would be registered again. Stop it first, or take it \
                      out of the configuration; PUT /ownerserve/v1/workers/ID/drain empties it before.";
        return Err(Problem::new(ProblemKind::Conflict, detail).with_reason("worker_reachable"));
    }
    let fenced = Command::RetireLife(RetireIncarnation { worker: id, seen });
    // A cluster at level 1 does not support the fenced command.
    let retire = if fenced.level() <= view.level() { fenced } else { Command::RetireWorker(id) };
    commit(&ledger, retire).await?;
    Ok(WriteResult::plain(&ledger, "the worker is retired: it owns nothing any more"))
}
