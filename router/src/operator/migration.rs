//! Writes that move blocks between workers: replicas and migrations.
//!
//! The blocks are transferred first, by the same two legs that steps use, and the record is written only once they
//! have arrived. With blocks already present, an operator can write the record alone.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use ownership::LedgerView;
use ownership::ledger::{
    Artifact, Command, DropReplica, MigrateSession, PrefixPoint, PrefixRef, ReplicateReadonly, Session,
};
use planner::{Action, BarredLink};
use serde::Deserialize;
use utoipa::ToSchema;
use vocabulary::{
    ArtifactId, Bytes, Epoch, Micros, ModelId, Owner, SessionId, TenantId, WorkerHealth, WorkerId, WorkerView,
};

use super::consistency::LedgerResponse;
use super::entity_tags::IfMatch;
use super::extractors::{JsonBody, PathId, PathIds};
use super::problem::{Problem, ProblemKind};
use super::schemas::{ArtifactIdSchema, SessionIdSchema, WorkerIdSchema};
use super::writes::{MovedBlocks, OwnerTarget, RequiredIfMatch, WriteResult, commit, granted_epoch, linearizable_view};
use super::{artifacts, sessions};
use crate::app_state::AppState;
use crate::peer_exchange::prompts::{PromptKey, fetch_prompt};
use crate::pipeline::prompts::StoredPrompt;
use crate::pipeline::receipt::AttemptEvent;
use crate::prefix_mover::PrefixRelocation;

/// Whether blocks have to be moved.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, ToSchema, Default)]
#[serde(rename_all = "lowercase")]
enum MigrationMode {
    /// They are moved from who has them; the record is written when they are there.
    #[default]
    Move,
    /// They are there already: only the record is written.
    There,
}

/// Who is to have a read-only copy.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ReplicaBody {
    holder: OwnerTarget,
    #[serde(default)]
    #[schema(inline)]
    blocks: MigrationMode,
    /// How long the copy is believed; ten minutes when left out.
    #[schema(minimum = 1, maximum = 86_400_000)]
    ttl_ms: Option<u32>,
}

/// Maximum time to live of a replica, in milliseconds.
const MAX_TTL: u32 = 86_400_000;

/// Copies an artifact, and the prefix it hangs on, to a worker, and records the copy.
#[utoipa::path(post, path = "/ownerserve/v1/artifacts/{id}/replicas", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path)), request_body = ReplicaBody,
    responses(
        (status = 200, description = "The copy is recorded, and the blocks that it needed were moved.", body = LedgerResponse<WriteResult>),
        (status = 502, description = "A worker failed; nothing was recorded.")))]
pub(super) async fn replicate(
    State(gateway): State<Arc<AppState>>,
    PathId(id): PathId<ArtifactId>,
    JsonBody(body): JsonBody<ReplicaBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let ttl = body.ttl_ms.unwrap_or(600_000);
    if !(1..=MAX_TTL).contains(&ttl) {
        return Err(Problem::bad_body(format!("ttl_ms: accepted is 1 to {MAX_TTL}")));
    }
    let view = linearizable_view(&gateway).await?;
    let holder = body.holder.owner(&view)?;
    let artifact = artifacts::find_artifact(&view, id)?;
    if view.ownership_status(&artifact).owner() == Some(holder) {
        let why = format!("{} owns it, and an owner needs no copy", holder.worker);
        return Err(not_movable(&why, "Name another worker."));
    }
    let place = PrefixRef { scope: artifact.origin.scope(), point: artifact.end(), extent: Some(id) };
    let moved = match body.blocks {
        MigrationMode::There => None,
        MigrationMode::Move => {
            let moving = MoveRequest {
                tenant: artifact.origin.tenant.clone(),
                point: place.point,
                bytes: prefix_kv_bytes(&artifact),
                action: Action::ArtifactFetch,
            };
            ensure_present(&gateway, moving, (source_owner(&view, &artifact), holder)).await?
        }
    };
    commit(
        &gateway,
        Command::ReplicateReadonly(ReplicateReadonly { place, holder, ttl: Micros(u64::from(ttl) * 1000) }),
    )
    .await?;
    let did = format!("{} has a read-only copy of the first {} blocks for {ttl} ms", holder.worker, place.point.blocks);
    Ok(WriteResult::with(did, None, moved).into_response(&gateway))
}

/// Forgets a worker's read-only copy, on every artifact from the root to this one.
#[utoipa::path(delete, path = "/ownerserve/v1/artifacts/{id}/replicas/{worker}", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path), ("worker" = WorkerIdSchema, Path)),
    responses((status = 200, description = "The copy is not believed any more.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn drop_replica(
    State(gateway): State<Arc<AppState>>,
    PathIds(id, worker): PathIds<ArtifactId, WorkerId>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let view = linearizable_view(&gateway).await?;
    let artifact = artifacts::find_artifact(&view, id)?;
    let place = PrefixRef { scope: artifact.origin.scope(), point: artifact.end(), extent: Some(id) };
    let holders = artifact.replicas.iter().map(|copy| copy.holder).filter(|holder| holder.worker == worker);
    let drops: Vec<Command> = holders.map(|holder| Command::DropReplica(DropReplica { place, holder })).collect();
    if drops.is_empty() {
        return Err(Problem::not_found(format!("{worker} has no copy of {id}.")));
    }
    commit(&gateway, Command::Batch(drops)).await?;
    Ok(WriteResult::plain(&gateway, format!("the copy at {worker} is forgotten; its blocks are the engine's to drop")))
}

/// Where a session is to go.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct MigrateBody {
    to: OwnerTarget,
    #[serde(default)]
    #[schema(inline)]
    blocks: MigrationMode,
}

/// Moves a session and the artifacts that only it references to another worker.
///
/// The blocks of its newest head are moved first. Older heads stay with who has them, until the lease of that worker is
/// over or they are collected; the answer says so where there are any. It is fenced: when the session was granted anew meanwhile, nothing is
/// recorded, and the blocks at the target are a plain cache.
#[utoipa::path(post, path = "/ownerserve/v1/sessions/{id}/migrate", tag = "sessions",
    params(("id" = SessionIdSchema, Path), RequiredIfMatch), request_body = MigrateBody,
    responses(
        (status = 200, description = "The target owns it, and the blocks of its newest head are there.", body = LedgerResponse<WriteResult>),
        (status = 502, description = "A worker failed; nothing was recorded.")))]
pub(super) async fn migrate(
    State(gateway): State<Arc<AppState>>,
    PathId(id): PathId<SessionId>,
    fence: IfMatch,
    JsonBody(body): JsonBody<MigrateBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let view = linearizable_view(&gateway).await?;
    let to = body.to.owner(&view)?;
    let session = sessions::find_session(&view, id)?;
    let seen = fence.required_epoch(session.epoch)?;
    // The ledger decides; this check only avoids a transfer in vain.
    fence.check_optional(session.epoch)?;
    let moved = match body.blocks {
        MigrationMode::Move => ensure_head_present(&gateway, &view, (&session, to)).await?,
        MigrationMode::There => None,
    };
    let epoch = record_move(&gateway, (&session, seen), to).await?;
    let did = format!("{} owns the session since {epoch}{}", to.worker, older_heads_note(&session));
    Ok(WriteResult::with(did, Some(epoch), moved).into_response(&gateway))
}

/// Transfers the blocks of a session's newest head to the target; `None` if there is no head or the target already
/// owns them.
pub(super) async fn ensure_head_present(
    gateway: &Arc<AppState>,
    view: &LedgerView,
    (session, to): (&Session, Owner),
) -> Result<Option<MovedBlocks>, Problem> {
    let head = session.head().and_then(|head| Some((head.point, view.artifact(head.artifact)?)));
    let Some((point, artifact)) = head else { return Ok(None) };
    let source = view.session_owner(session).or_else(|| source_owner(view, &artifact));
    let bytes = artifact.origin.shape.block_bytes * point.blocks.0;
    let moving = MoveRequest { tenant: session.tenant.clone(), point, bytes, action: Action::StateMigration };
    ensure_present(gateway, moving, (source, to)).await
}

/// Grants a session to `to`, which has its newest head. Refused if the epoch is not `seen` any more.
pub(super) async fn record_move(
    gateway: &AppState,
    (session, seen): (&Session, Epoch),
    to: Owner,
) -> Result<Epoch, Problem> {
    let head = session.head().map(|head| head.point.id);
    let outcome = commit(gateway, Command::Migrate(MigrateSession { session: session.id, to, head, seen })).await?;
    Ok(granted_epoch(&outcome))
}

/// Note about the heads that a migration does not move.
fn older_heads_note(session: &Session) -> String {
    let older = match session.heads.len().saturating_sub(1) {
        0 => return String::new(),
        1 => "its older head was".to_owned(),
        count => format!("its {count} older heads were"),
    };
    format!(
        "; {older} not moved: what is there stays with who has it, until the lease of that worker is over or it is \
         collected, and a step that goes on from it computes or moves what it needs"
    )
}

struct MoveRequest {
    tenant: TenantId,
    point: PrefixPoint,
    bytes: Bytes,
    action: Action,
}

fn prefix_kv_bytes(artifact: &Artifact) -> Bytes {
    artifact.origin.shape.block_bytes * artifact.end().blocks.0
}

fn source_owner(view: &LedgerView, artifact: &Artifact) -> Option<Owner> {
    view.ownership_status(artifact).owner()
}

/// Transfers the blocks to the target; `None` if the target already owns them.
async fn ensure_present(
    gateway: &Arc<AppState>,
    moving: MoveRequest,
    (source, target): (Option<Owner>, Owner),
) -> Result<Option<MovedBlocks>, Problem> {
    let Some(source) = source else {
        return Err(not_movable(
            "nobody live has the blocks, so there is nothing to move",
            "Claim it instead: the next step computes them.",
        ));
    };
    if source.worker == target.worker {
        return Ok(None);
    }
    check_link(gateway, source.worker, target.worker)?;
    let Some(kept) = find_prompt(gateway, &moving).await else {
        let why = "no router that answers knows the prompt's token ids, without which no engine moves blocks";
        return Err(not_movable(
            why,
            "Try again after a step of the session, through any router; or send \"blocks\": \"there\" if the target has them.",
        ));
    };
    let since = Instant::now();
    let (from, to, blocks, bytes) = (source.worker, target.worker, moving.point.blocks, moving.bytes);
    let wanted = PrefixRelocation { blocks, bytes, source, target, action: moving.action };
    let remark = gateway.prefix_mover.relocate(&kept, wanted).await;
    let took_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
    match remark {
        None | Some(AttemptEvent::SourceRecomputed) => {
            Ok(Some(MovedBlocks { from, to, blocks, bytes, took_ms, recomputed: remark.is_some() }))
        }
        Some(remark) => {
            let detail = format!(
                "The blocks could not be moved ({}); nothing was recorded. The log has the worker's answer.",
                remark.as_ref()
            );
            Err(Problem::new(ProblemKind::MoveFailed, detail).with_cause(remark.into()))
        }
    }
}

/// Finds a prompt that covers what is to be moved, here or at another router.
async fn find_prompt(gateway: &AppState, moving: &MoveRequest) -> Option<Arc<StoredPrompt>> {
    if let Some(kept) = gateway.caches.prompts.find_containing(&moving.tenant, moving.point) {
        return Some(kept);
    }
    let wanted = PromptKey { tenant: moving.tenant.clone(), point: moving.point };
    let seed_of = |model: &ModelId| gateway.catalog().model(model).identifier.seed();
    fetch_prompt(gateway.directory().peers(), &wanted, seed_of, &gateway.metrics.exchange).await.map(Arc::new)
}

/// Checks that both workers are listed and reachable, their link is not barred, and they share a KV fabric.
fn check_link(gateway: &AppState, source: WorkerId, target: WorkerId) -> Result<(), Problem> {
    let fleet = gateway.fleet().snapshot();
    let find = |id: WorkerId| {
        let found = fleet.iter().find(|worker| worker.id == id);
        found.ok_or_else(|| not_movable("not both workers are listed to this router", "Ask a router that is."))
    };
    let (source, target) = (find(source)?, find(target)?);
    if [source, target].iter().any(|worker| worker.health == WorkerHealth::Unreachable) {
        return Err(not_movable(
            "one of the workers cannot be reached",
            "Look at GET /ownerserve/v1/workers, and try again.",
        ));
    }
    if gateway.decisions.transfer_checks.barred_links().contains(&BarredLink { from: source.id, to: target.id }) {
        return Err(not_movable(
            "the link is barred, because KV came over it as something else",
            "See GET /ownerserve/v1/correctness; DELETE clears it.",
        ));
    }
    let fabric = |worker: &WorkerView| worker.link.as_ref().map(|link| link.fabric.clone());
    if fabric(target).is_none() || fabric(source) != fabric(target) {
        return Err(not_movable(
            "the two workers cannot exchange KV",
            "Their `link.fabric` in GET /ownerserve/v1/workers must be there and equal.",
        ));
    }
    Ok(())
}

fn not_movable(why: &str, advice: &str) -> Problem {
    Problem::new(ProblemKind::Conflict, format!("Nothing was changed: {why}. {advice}")).with_cause("not_movable")
}
