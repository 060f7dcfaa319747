//! Ownership writes: claim, release and close.

use axum::extract::State;
use ownership::LedgerView;
use ownership::ledger::{ClaimOwner, Command, OwnershipSubject, ReleaseOwner};
use serde::Deserialize;
use utoipa::ToSchema;
use vocabulary::{ArtifactId, Epoch, Owner, SessionId};

use super::consistency::LedgerResponse;
use super::entity_tags::IfMatch;
use super::extractors::{JsonBody, PathId};
use super::problem::Problem;
use super::schemas::{ArtifactIdSchema, SessionIdSchema};
use super::writes::{
    EmptyBody, OptionalIfMatchSchema, OwnerTarget, RequiredIfMatchSchema, WriteResult, commit, granted_epoch,
    linearizable_view,
};
use super::{artifacts, sessions};
use proxy::ledger_access::LedgerAccess;

/// The new owner.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ClaimBody {
    owner: OwnerTarget,
}

async fn claim_owner(
    ledger: &LedgerAccess,
    subject: OwnershipSubject,
    claim: ClaimBody,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let owner = claim.owner.owner(&*linearizable_view(ledger).await?)?;
    let outcome = commit(ledger, Command::ClaimOwner(ClaimOwner { subject, owner })).await?;
    let epoch = granted_epoch(&outcome);
    Ok(WriteResult::granted(ledger, format!("{} owns it since {epoch}", owner.worker), epoch))
}

/// Grants a session without a live owner to a worker.
///
/// No blocks are transferred: the worker computes what it does not hold. A session with a live owner is migrated instead.
#[utoipa::path(post, path = "/ownerserve/v1/sessions/{id}/claim", tag = "sessions",
    params(("id" = SessionIdSchema, Path)), request_body = ClaimBody,
    responses((status = 200, description = "The worker owns it; the epoch is its fencing token.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn claim_session(
    State(ledger): State<LedgerAccess>,
    PathId(id): PathId<SessionId>,
    JsonBody(claim): JsonBody<ClaimBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    claim_owner(&ledger, OwnershipSubject::Session(id), claim).await
}

/// Grants an artifact without a live owner to a worker.
#[utoipa::path(post, path = "/ownerserve/v1/artifacts/{id}/claim", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path)), request_body = ClaimBody,
    responses((status = 200, description = "The worker owns it; the epoch is its fencing token.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn claim_artifact(
    State(ledger): State<LedgerAccess>,
    PathId(id): PathId<ArtifactId>,
    JsonBody(claim): JsonBody<ClaimBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    claim_owner(&ledger, OwnershipSubject::Artifact(id), claim).await
}

/// Returns the owner in a view, and the epoch of the grant.
fn find_owner(view: &LedgerView, subject: OwnershipSubject) -> Result<(Option<Owner>, Epoch), Problem> {
    match subject {
        OwnershipSubject::Session(id) => sessions::find_session(view, id).map(|session| (session.owner, session.epoch)),
        OwnershipSubject::Artifact(id) => {
            artifacts::find_artifact(view, id).map(|artifact| (artifact.owner, artifact.epoch))
        }
    }
}

/// Releases the ownership that the client saw. Reads linearizably first: a node that lags must not claim that
/// something is unowned.
async fn release_owner(
    ledger: &LedgerAccess,
    subject: OwnershipSubject,
    if_match: IfMatch,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let (owner, current) = find_owner(&*linearizable_view(ledger).await?, subject)?;
    let seen = if_match.required_epoch(current)?;
    let Some(owner) = owner else { return Ok(WriteResult::plain(ledger, "nobody owned it")) };
    commit(ledger, Command::Release(ReleaseOwner { subject, owner, seen })).await?;
    Ok(WriteResult::plain(ledger, format!("{} does not own it any more", owner.worker)))
}

/// Takes a session from its owner without granting it to another.
#[utoipa::path(post, path = "/ownerserve/v1/sessions/{id}/release", tag = "sessions",
    params(("id" = SessionIdSchema, Path), RequiredIfMatchSchema), request_body = EmptyBody,
    responses((status = 200, description = "The session has no owner; its next step is placed anew.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn release_session(
    State(ledger): State<LedgerAccess>,
    PathId(id): PathId<SessionId>,
    if_match: IfMatch,
    JsonBody(EmptyBody {}): JsonBody<EmptyBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    release_owner(&ledger, OwnershipSubject::Session(id), if_match).await
}

/// Takes an artifact from its owner without granting it to another.
#[utoipa::path(post, path = "/ownerserve/v1/artifacts/{id}/release", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path), RequiredIfMatchSchema), request_body = EmptyBody,
    responses((status = 200, description = "The artifact has no owner.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn release_artifact(
    State(ledger): State<LedgerAccess>,
    PathId(id): PathId<ArtifactId>,
    if_match: IfMatch,
    JsonBody(EmptyBody {}): JsonBody<EmptyBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    release_owner(&ledger, OwnershipSubject::Artifact(id), if_match).await
}

/// Closes a session. Its artifacts stay until nothing references them and they go cold.
#[utoipa::path(delete, path = "/ownerserve/v1/sessions/{id}", tag = "sessions",
    params(("id" = SessionIdSchema, Path), OptionalIfMatchSchema),
    responses((status = 200, description = "The session is closed.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn close_session(
    State(ledger): State<LedgerAccess>,
    PathId(id): PathId<SessionId>,
    if_match: IfMatch,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    if_match.check_optional(sessions::find_session(&*linearizable_view(&ledger).await?, id)?.epoch)?;
    commit(&ledger, Command::CloseSession(id)).await?;
    Ok(WriteResult::plain(&ledger, "the session is closed"))
}
