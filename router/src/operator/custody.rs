//! Writes about who owns what: claim, release and close.

use std::sync::Arc;

use axum::extract::State;
use ownership::View;
use ownership::ledger::{ClaimOwner, Command, Release, Subject};
use serde::Deserialize;
use utoipa::ToSchema;
use vocabulary::{ArtifactId, Epoch, Owner, SessionId};

use super::fresh::Fresh;
use super::input::{Named, Told};
use super::problem::Problem;
use super::tags::Fence;
use super::words::{ArtifactWord, SessionWord};
use super::writes::{Done, FenceAllowed, FenceNeeded, Nothing, Target, epoch_of, newest, write};
use super::{artifacts, sessions};
use crate::gateway::Gateway;

/// Who is to own it.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Claim {
    owner: Target,
}

async fn claimed(gateway: &Gateway, subject: Subject, claim: Claim) -> Result<Fresh<Done>, Problem> {
    let owner = claim.owner.owner(&*newest(gateway).await?)?;
    let outcome = write(gateway, Command::ClaimOwner(ClaimOwner { subject, owner })).await?;
    let epoch = epoch_of(&outcome);
    Ok(Done::granted(gateway, format!("{} owns it since {epoch}", owner.worker), epoch))
}

/// Gives a session that nobody live owns to a worker.
///
/// Says nothing about blocks: what the worker does not hold it computes. A session with a live owner is migrated instead.
#[utoipa::path(post, path = "/ownerserve/v1/sessions/{id}/claim", tag = "sessions",
    params(("id" = SessionWord, Path)), request_body = Claim,
    responses((status = 200, description = "The worker owns it; the epoch is its fencing token.", body = Fresh<Done>)))]
pub(super) async fn claim_session(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<SessionId>,
    Told(claim): Told<Claim>,
) -> Result<Fresh<Done>, Problem> {
    claimed(&gateway, Subject::Session(id), claim).await
}

/// Gives an artifact that nobody live owns to a worker.
#[utoipa::path(post, path = "/ownerserve/v1/artifacts/{id}/claim", tag = "artifacts",
    params(("id" = ArtifactWord, Path)), request_body = Claim,
    responses((status = 200, description = "The worker owns it; the epoch is its fencing token.", body = Fresh<Done>)))]
pub(super) async fn claim_artifact(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<ArtifactId>,
    Told(claim): Told<Claim>,
) -> Result<Fresh<Done>, Problem> {
    claimed(&gateway, Subject::Artifact(id), claim).await
}

/// Who has it, and since when, as a view knows it.
fn holder(view: &View, subject: Subject) -> Result<(Option<Owner>, Epoch), Problem> {
    match subject {
        Subject::Session(id) => sessions::known(view, id).map(|session| (session.owner, session.epoch)),
        Subject::Artifact(id) => artifacts::known(view, id).map(|artifact| (artifact.owner, artifact.epoch)),
    }
}

/// What the client saw is released. The leader is asked first: a node that is behind must not say that nobody owned what
/// it has not heard of yet.
async fn released(gateway: &Gateway, subject: Subject, fence: Fence) -> Result<Fresh<Done>, Problem> {
    let (owner, current) = holder(&*newest(gateway).await?, subject)?;
    let seen = fence.needed(current)?;
    let Some(owner) = owner else { return Ok(Done::plain(gateway, "nobody owned it")) };
    write(gateway, Command::Release(Release { subject, owner, seen })).await?;
    Ok(Done::plain(gateway, format!("{} does not own it any more", owner.worker)))
}

/// Takes a session from its owner, without giving it to another.
#[utoipa::path(post, path = "/ownerserve/v1/sessions/{id}/release", tag = "sessions",
    params(("id" = SessionWord, Path), FenceNeeded), request_body = Nothing,
    responses((status = 200, description = "Nobody owns it now; its next step is placed anew.", body = Fresh<Done>)))]
pub(super) async fn release_session(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<SessionId>,
    fence: Fence,
    Told(Nothing {}): Told<Nothing>,
) -> Result<Fresh<Done>, Problem> {
    released(&gateway, Subject::Session(id), fence).await
}

/// Takes an artifact from its owner, without giving it to another.
#[utoipa::path(post, path = "/ownerserve/v1/artifacts/{id}/release", tag = "artifacts",
    params(("id" = ArtifactWord, Path), FenceNeeded), request_body = Nothing,
    responses((status = 200, description = "Nobody owns it now; it was granted to no other.", body = Fresh<Done>)))]
pub(super) async fn release_artifact(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<ArtifactId>,
    fence: Fence,
    Told(Nothing {}): Told<Nothing>,
) -> Result<Fresh<Done>, Problem> {
    released(&gateway, Subject::Artifact(id), fence).await
}

/// Forgets a session. Its artifacts stay until nothing references them and they go cold.
#[utoipa::path(delete, path = "/ownerserve/v1/sessions/{id}", tag = "sessions",
    params(("id" = SessionWord, Path), FenceAllowed),
    responses((status = 200, description = "The session is forgotten.", body = Fresh<Done>)))]
pub(super) async fn close_session(
    State(gateway): State<Arc<Gateway>>,
    Named(id): Named<SessionId>,
    fence: Fence,
) -> Result<Fresh<Done>, Problem> {
    fence.allowed(sessions::known(&*newest(&gateway).await?, id)?.epoch)?;
    write(&gateway, Command::CloseSession(id)).await?;
    Ok(Done::plain(&gateway, "the session is closed"))
}
