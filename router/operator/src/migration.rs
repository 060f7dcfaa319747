//! Writes that move blocks between workers: replicas and migrations.
//!
//! The blocks are transferred first, by the same two legs that steps use, and the record is written only once they
//! have arrived. With blocks already present, an operator can write the record alone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use ownership::LedgerView;
use ownership::ledger::{
    Artifact, Command, DropReplica, MigrateSession, PrefixPoint, PrefixRef, ReplicateReadonly, Session,
};
use planner::{Action, DirectedLink};
use serde::Deserialize;
use utoipa::ToSchema;
use vocabulary::{
    ArtifactId, Bytes, Epoch, Micros, ModelId, Owner, SessionId, TenantId, WorkerHealth, WorkerId, WorkerView,
};

use super::consistency::LedgerResponse;
use super::entity_tags::IfMatch;
use super::extractors::{JsonBody, PathId, PathIds};
use super::problem::{Problem, ProblemKind};
use super::request_units::DurationInput;
use super::schemas::{ArtifactIdSchema, SessionIdSchema, WorkerIdSchema};
use super::sources::SessionMover;
use super::writes::{
    KvTransferReport, OwnerTarget, RequiredIfMatchSchema, WriteResult, commit, granted_epoch, linearizable_view,
};
use super::{artifacts, sessions};
use proxy::ledger_access::LedgerAccess;
use proxy::peer_exchange::prompt_exchange::{PromptKey, fetch_prompt};
use proxy::prefix_mover::PrefixRelocation;
use proxy::prompts::RetainedPrompt;
use proxy::receipt::AttemptEvent;
use vocabulary::TimeSpan;

/// The worker that is to have a read-only replica.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ReplicateRequest {
    target: OwnerTarget,
    /// Whether the target has the blocks already, so that only the record is written. Otherwise they are transferred first.
    #[serde(default)]
    record_only: bool,
    /// How long the replica is believed, from `1ms` to `24h`; `10m` when left out.
    #[schema(value_type = Option<TimeSpan>)]
    ttl: Option<DurationInput>,
}

/// Accepted range of a replica's time to live, and its default.
const TTL_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(86_400);
const DEFAULT_TTL: Duration = Duration::from_secs(600);

/// Replicates an artifact and the prefix before it to a worker, and records the replica.
#[utoipa::path(post, path = "/ownerserve/v1/artifacts/{id}/replicas", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path)), request_body = ReplicateRequest,
    responses(
        (status = 200, description = "The replica is recorded, and its blocks were transferred.", body = LedgerResponse<WriteResult>),
        (status = 502, description = "A worker failed; nothing was recorded.")))]
pub(super) async fn replicate(
    State(mover): State<SessionMover>,
    PathId(id): PathId<ArtifactId>,
    JsonBody(body): JsonBody<ReplicateRequest>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let ttl = body.ttl.map_or(DEFAULT_TTL, |ttl| ttl.0);
    if !TTL_RANGE.contains(&ttl) {
        return Err(Problem::bad_body("ttl: accepted is 1ms to 24h"));
    }
    let view = linearizable_view(&mover.ledger).await?;
    let holder = body.target.owner(&view)?;
    let artifact = artifacts::find_artifact(&view, id)?;
    if view.ownership_status(&artifact).owner() == Some(holder) {
        let why = format!("{} owns it, and an owner needs no copy", holder.worker);
        return Err(transfer_not_possible(&why, "Name another worker."));
    }
    let place = PrefixRef { scope: artifact.origin.scope(), point: artifact.end(), extent: Some(id) };
    let transfer = match body.record_only {
        true => None,
        false => {
            let moving = KvMove {
                tenant: artifact.origin.tenant.clone(),
                point: place.point,
                bytes: prefix_kv_bytes(&artifact),
                action: Action::ArtifactFetch,
            };
            ensure_present(&mover, moving, (source_owner(&view, &artifact), holder)).await?
        }
    };
    commit(&mover.ledger, Command::ReplicateReadonly(ReplicateReadonly { place, holder, ttl: Micros::of(ttl) }))
        .await?;
    let result = format!(
        "{} has a read-only copy of the first {} blocks for {}",
        holder.worker,
        place.point.blocks,
        TimeSpan(ttl)
    );
    Ok(WriteResult::with(result, None, transfer).into_response(&mover.ledger))
}

/// Deletes a worker's read-only replica of an artifact and of all that it extends.
#[utoipa::path(delete, path = "/ownerserve/v1/artifacts/{id}/replicas/{worker}", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path), ("worker" = WorkerIdSchema, Path)),
    responses((status = 200, description = "The replica does not count any more.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn drop_replica(
    State(ledger): State<LedgerAccess>,
    PathIds(id, worker): PathIds<ArtifactId, WorkerId>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let view = linearizable_view(&ledger).await?;
    let artifact = artifacts::find_artifact(&view, id)?;
    let place = PrefixRef { scope: artifact.origin.scope(), point: artifact.end(), extent: Some(id) };
    let holders = artifact.replicas.iter().map(|copy| copy.holder).filter(|holder| holder.worker == worker);
    let drops: Vec<Command> = holders.map(|holder| Command::DropReplica(DropReplica { place, holder })).collect();
    if drops.is_empty() {
        return Err(Problem::not_found(format!("{worker} has no copy of {id}.")));
    }
    commit(&ledger, Command::Batch(drops)).await?;
    Ok(WriteResult::plain(&ledger, format!("the copy at {worker} is forgotten; its blocks are the engine's to drop")))
}

/// The worker that a session moves to.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct MigrateRequest {
    target: OwnerTarget,
    /// Whether the target has the blocks already, so that only the record is written. Otherwise they are transferred first.
    #[serde(default)]
    record_only: bool,
}

/// Moves a session and the artifacts that only it references to another worker.
///
/// The blocks of its newest head are transferred first. Older heads stay at their workers until those leases expire or the
/// blocks are collected; the answer says so. The write is fenced: after another grant nothing is recorded, and the blocks at
/// the target are only a cache.
#[utoipa::path(post, path = "/ownerserve/v1/sessions/{id}/migrate", tag = "sessions",
    params(("id" = SessionIdSchema, Path), RequiredIfMatchSchema), request_body = MigrateRequest,
    responses(
        (status = 200, description = "The target owns it, and the blocks of its newest head are there.", body = LedgerResponse<WriteResult>),
        (status = 502, description = "A worker failed; nothing was recorded.")))]
pub(super) async fn migrate(
    State(mover): State<SessionMover>,
    PathId(id): PathId<SessionId>,
    if_match: IfMatch,
    JsonBody(body): JsonBody<MigrateRequest>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let view = linearizable_view(&mover.ledger).await?;
    let to = body.target.owner(&view)?;
    let session = sessions::find_session(&view, id)?;
    let seen = if_match.required_epoch(session.epoch)?;
    // The ledger decides; this check only avoids a transfer in vain.
    if_match.check_optional(session.epoch)?;
    let transfer = match body.record_only {
        true => None,
        false => ensure_head_present(&mover, &view, (&session, to)).await?,
    };
    let epoch = record_move(&mover.ledger, (&session, seen), to).await?;
    let result = format!("{} owns the session since {epoch}{}", to.worker, older_heads_note(&session));
    Ok(WriteResult::with(result, Some(epoch), transfer).into_response(&mover.ledger))
}

/// Transfers the blocks of a session's newest head to the target; `None` if there is no head or the target already
/// owns them.
pub(super) async fn ensure_head_present(
    mover: &SessionMover,
    view: &LedgerView,
    (session, to): (&Session, Owner),
) -> Result<Option<KvTransferReport>, Problem> {
    let head = session.head().and_then(|head| Some((head.point, view.artifact(head.artifact)?)));
    let Some((point, artifact)) = head else { return Ok(None) };
    let source = view.session_owner(session).or_else(|| source_owner(view, &artifact));
    let bytes = artifact.origin.shape.block_bytes * point.blocks.0;
    let moving = KvMove { tenant: session.tenant.clone(), point, bytes, action: Action::StateMigration };
    ensure_present(mover, moving, (source, to)).await
}

/// Grants a session to `to`, which has its newest head. Refused if the epoch is not `seen` any more.
pub(super) async fn record_move(
    ledger: &LedgerAccess,
    (session, seen): (&Session, Epoch),
    to: Owner,
) -> Result<Epoch, Problem> {
    let head = session.head().map(|head| head.point.id);
    let outcome = commit(ledger, Command::Migrate(MigrateSession { session: session.id, to, head, seen })).await?;
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

struct KvMove {
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
    mover: &SessionMover,
    moving: KvMove,
    (source, target): (Option<Owner>, Owner),
) -> Result<Option<KvTransferReport>, Problem> {
    let Some(source) = source else {
        return Err(transfer_not_possible(
            "nobody live has the blocks, so there is nothing to move",
            "Claim it instead: the next step computes them.",
        ));
    };
    if source.worker == target.worker {
        return Ok(None);
    }
    check_link(mover, source.worker, target.worker)?;
    let Some(prompt) = find_prompt(mover, &moving).await else {
        let why = "no router that answers knows the prompt's token ids, without which no engine moves blocks";
        return Err(transfer_not_possible(
            why,
            "Try again after a step of the session, through any router; or send \"blocks\": \"there\" if the target has them.",
        ));
    };
    let since = Instant::now();
    let (from, to, blocks, bytes) = (source.worker, target.worker, moving.point.blocks, moving.bytes);
    let relocation = PrefixRelocation { blocks, bytes, source, target, action: moving.action };
    let event = mover.prefixes.relocate(&prompt, relocation).await;
    let duration = TimeSpan::whole_millis(since.elapsed());
    match event {
        None | Some(AttemptEvent::SourceRecomputed) => {
            let source_recomputed = event.is_some();
            Ok(Some(KvTransferReport { source: from, target: to, blocks, bytes, duration, source_recomputed }))
        }
        Some(event) => {
            let detail = format!(
                "The blocks could not be moved ({}); nothing was recorded. The log has the worker's answer.",
                event.as_ref()
            );
            Err(Problem::new(ProblemKind::TransferFailed, detail).with_reason(event.into()))
        }
    }
}

/// Finds a prompt that covers what is to be moved, here or at another router.
async fn find_prompt(mover: &SessionMover, moving: &KvMove) -> Option<Arc<RetainedPrompt>> {
    if let Some(prompt) = mover.prompts.find_containing(&moving.tenant, moving.point) {
        return Some(prompt);
    }
    let key = PromptKey { tenant: moving.tenant.clone(), point: moving.point };
    let seed_of = |model: &ModelId| mover.catalog.model(model).identifier.seed();
    fetch_prompt(mover.ledger.directory().peers(), &key, seed_of, &mover.exchange_metrics).await.map(Arc::new)
}

/// Checks that both workers are listed and reachable, their link is not disabled, and they share a KV fabric.
fn check_link(mover: &SessionMover, source: WorkerId, target: WorkerId) -> Result<(), Problem> {
    let fleet = mover.fleet.snapshot();
    let find = |id: WorkerId| {
        let found = fleet.iter().find(|worker| worker.id == id);
        found
            .ok_or_else(|| transfer_not_possible("not both workers are listed to this router", "Ask a router that is."))
    };
    let (source, target) = (find(source)?, find(target)?);
    if [source, target].iter().any(|worker| worker.health == WorkerHealth::Unreachable) {
        return Err(transfer_not_possible(
            "one of the workers cannot be reached",
            "Look at GET /ownerserve/v1/workers, and try again.",
        ));
    }
    if mover.transfer_checks.disabled_links().contains(&DirectedLink { from: source.id, to: target.id }) {
        return Err(transfer_not_possible(
            "the link is disabled, because a transfer over it failed its check",
            "GET /ownerserve/v1/transfer-checks shows it; DELETE enables it again.",
        ));
    }
    let fabric = |worker: &WorkerView| worker.link.as_ref().map(|link| link.fabric.clone());
    if fabric(target).is_none() || fabric(source) != fabric(target) {
        return Err(transfer_not_possible(
            "the two workers cannot exchange KV",
            "Their `link.fabric` in GET /ownerserve/v1/workers must be there and equal.",
        ));
    }
    Ok(())
}

fn transfer_not_possible(why: &str, advice: &str) -> Problem {
    Problem::new(ProblemKind::Conflict, format!("Nothing was changed: {why}. {advice}"))
        .with_reason("transfer_not_possible")
}
