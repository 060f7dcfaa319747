//! Locate: finds the prompt's session, who owns its sealed prefix, and who holds its blocks now. Memory reads only.

use std::sync::Arc;
use std::time::Instant;

use ownership::LedgerView;
use ownership::ledger::{Ledger, LocateQuery, LocateResult as Found, SessionMatch};
use planner::{HeadRelation, LiveIntent, SessionView};
use prefix::ConvertedRequest;
use vocabulary::{Blocks, Micros, Overlap, Owner, PrefixId, SessionId, WorkerHealth, WorkerView};
use workers_shim::events::SharedIndex;
use workers_shim::fleet::Fleet;

use super::batch;
use super::conversation_fingerprint::shared_prefix_blocks;
use super::session_resolution::SessionResolution;
use super::step_workers;
use crate::error::ApiError;
use crate::identified_request::{IdentifiedRequest, ParsedRequest};
use crate::ledger_access::LedgerAccess;
use crate::offload_pool::{OffloadPool, OffloadSpec};
use crate::prefix_cache::tokenizer_drift::TokenizerDrift;
use crate::receipt::{LedgerFreshness, LookupEvidence};
use crate::request_states::{LocatedRequest, sealable_blocks_of};

/// What locating a prompt reads.
#[derive(Debug)]
pub struct LocateStage {
    pub(super) ledger: LedgerAccess,
    pub(super) fleet: Arc<Fleet>,
    pub(super) index: SharedIndex,
    pub(super) drift: Arc<TokenizerDrift>,
    pub(super) offload_pool: Arc<OffloadPool>,
}

/// Locates a prompt in the ledger view, the KV index and the fleet, including this router's own steps that the view
/// does not show yet. `converted` is the request of another endpoint as the engine converts it.
pub async fn locate(
    stage: &LocateStage,
    identified: IdentifiedRequest,
    converted: Option<ConvertedRequest>,
) -> Result<LocatedRequest, ApiError> {
    let view = stage.ledger.directory().view();
    let found = view.locate(query(&identified));
    if !matches!(found.session_match, SessionMatch::ForksFrom { .. }) || identified.named_session.is_some() {
        return Ok(build_located(stage, &view, (identified, found, Blocks::ZERO)));
    }
    // Decide whether this is a fork, or another conversation with the same system prompt.
    let task = OffloadSpec::of(&identified.request.incoming);
    let work = move || (shared_prefix_blocks(&identified, converted.as_ref()), identified);
    let (preamble, identified) = task.run(&stage.offload_pool, work).await?;
    // Read the view again: own steps that were applied meanwhile are no longer pending.
    Ok(locate_fresh(stage, identified, preamble))
}

/// Locates a step again after it has waited.
pub fn locate_waiting(stage: &LocateStage, waited: LocatedRequest) -> LocatedRequest {
    locate_fresh(stage, waited.identified, waited.evidence.preamble)
}

fn locate_fresh(stage: &LocateStage, identified: IdentifiedRequest, preamble: Blocks) -> LocatedRequest {
    let view = stage.ledger.directory().view();
    let found = view.locate(LocateQuery { shared_prefix: preamble, ..query(&identified) });
    build_located(stage, &view, (identified, found, preamble))
}

/// Refreshes the fleet and the overlaps of a step whose answer broke off; all else stays as it was.
pub fn refresh_broken(stage: &LocateStage, located: LocatedRequest) -> LocatedRequest {
    let identified = &located.identified;
    let workers = workers_for_step(stage, identified);
    let is_read = located.evidence.cache_not_readable.is_none();
    let overlaps = if is_read { overlaps(stage, identified, located.evidence.known) } else { Vec::new() };
    LocatedRequest { workers, overlaps, ..located }
}

fn workers_for_step(stage: &LocateStage, identified: &IdentifiedRequest) -> Arc<[WorkerView]> {
    let (drift, fleet) = (&stage.drift, &stage.fleet);
    step_workers::workers_for_step((drift, fleet), identified, fleet.snapshot())
}

fn build_located(
    stage: &LocateStage,
    view: &LedgerView,
    (identified, found, preamble): (IdentifiedRequest, Found, Blocks),
) -> LocatedRequest {
    let affinity_key = identified.affinity_key;
    let workers = workers_for_step(stage, &identified);
    let resolution = resolve_session(stage, view, (&identified, &found));
    let chain = &identified.prompt.chain;
    let cache_not_readable = identified.request.cache_bypass_reason();
    // KV that engines will not read counts as held nowhere, whoever owns it.
    let overlaps =
        if cache_not_readable.is_none() { overlaps(stage, &identified, found.known_blocks()) } else { Vec::new() };
    let relation = resolution.head.map_or(HeadRelation::Unknown, |(head, shared)| {
        HeadRelation::of(sealable_blocks_of(&identified, &workers), head.blocks, shared)
    });
    let record = view.session(resolution.session);
    let owner = resolution.owner(record.as_ref().and_then(|session| view.session_owner(session)));
    let owner = owner.filter(|owner| view.is_live(*owner) || is_reachable(&workers, *owner));
    let sealed = found.sealed.as_ref();
    let shared = resolution.head.map_or(Blocks::ZERO, |(_, shared)| shared);
    let session = SessionView {
        id: resolution.session,
        owner,
        epoch: record.as_ref().map(|session| session.epoch).unwrap_or_default(),
        sealed: match cache_not_readable {
            Some(_) => Blocks::ZERO,
            None if resolution.pending.is_some() => found.known_blocks().max(shared),
            None => found.known_blocks(),
        },
        replicas: sealed.map_or_else(Vec::new, |sealed| sealed.holders(owner)),
        peer_intents: if cache_not_readable.is_none() {
            other_intents(stage, view, resolution.session, &identified)
        } else {
            Vec::new()
        },
    };
    let idle = record.map(|session| Micros(view.now().0.saturating_sub(session.touched.0)));
    let evidence = LookupEvidence {
        known: found.known_blocks(),
        preamble,
        ledger_view: if view.quorum().stale { LedgerFreshness::Stale } else { LedgerFreshness::Current },
        pending_commit: resolution.pending.is_some(),
        peer_intents: session.peer_intents.len(),
        peer_routers: stage.fleet.peer_count(),
        cache_not_readable,
    };
    LocatedRequest {
        affinity_key,
        session,
        parent: resolution
            .parent
            .or_else(|| resolution.head.is_none().then(|| named_parent(&identified.request)).flatten()),
        evidence,
        base: resolution
            .head
            .map_or(chain.root, |(head, shared)| if shared == head.blocks { head.id } else { chain.root }),
        rewrites: resolution.rewrites,
        relation,
        shared_blocks: shared,
        idle: resolution.pending.map_or(idle, |(_, ago)| Some(Micros::of(ago))),
        overlaps,
        workers,
        identified,
    }
}

/// Returns the overlaps with the prompts, summed over a batch.
fn overlaps(stage: &LocateStage, identified: &IdentifiedRequest, known: Blocks) -> Vec<Overlap> {
    let index = &stage.index;
    let first = index.overlaps(identified.affinity_key, &identified.prompt.chain, known);
    if identified.other_chains.is_empty() {
        return first;
    }
    // One read lock per chain, so that writers get a turn in between.
    let others = identified.other_chains.iter().map(|chain| index.overlaps_of_chain(chain));
    batch::sum_overlaps(std::iter::once(first).chain(others))
}

/// Builds the ledger query for a prompt.
fn query(identified: &IdentifiedRequest) -> LocateQuery<'_> {
    let scope = identified.model.scope(&identified.request.incoming.tenant);
    LocateQuery {
        scope,
        session: identified.named_session,
        chain: &identified.prompt.chain,
        shared_prefix: Blocks::ZERO,
    }
}

fn resolve_session(
    stage: &LocateStage,
    view: &Ledger,
    (identified, found): (&IdentifiedRequest, &Found),
) -> SessionResolution {
    let resolution =
        SessionResolution::from_view(found, identified.named_session, SessionId(identified.request.incoming.id.0));
    let pending_commits = stage.ledger.pending_commits();
    if pending_commits.is_empty() {
        resolution
    } else {
        resolution.with_pending(&pending_commits, view, (query(identified), Instant::now()))
    }
}

/// Whether this incarnation of the worker is reachable, whatever the ledger knows of it.
fn is_reachable(workers: &[WorkerView], owner: Owner) -> bool {
    let is_it = |worker: &WorkerView| worker.id == owner.worker && worker.incarnation == owner.incarnation;
    workers.iter().any(|worker| is_it(worker) && worker.health != WorkerHealth::Unreachable)
}

/// Returns the session that, according to the client, spawned this one.
fn named_parent(request: &ParsedRequest) -> Option<SessionId> {
    let parent = request.session_key.as_ref()?.parent.as_ref()?;
    Some(SessionId::of_key(&request.incoming.tenant, &request.model, parent))
}

/// Returns live intents of other routers, each with the blocks that its step shares with this prompt.
fn other_intents(
    stage: &LocateStage,
    view: &Ledger,
    session: SessionId,
    identified: &IdentifiedRequest,
) -> Vec<LiveIntent> {
    let chain = &identified.prompt.chain;
    let shared = |base: PrefixId| match chain.ids.iter().position(|id| *id == base) {
        Some(at) => Blocks(at as u64 + 1),
        None => Blocks::ZERO,
    };
    view.intents(session)
        .filter(|intent| intent.router != stage.ledger.node_id() && view.is_live(intent.worker))
        .map(|intent| LiveIntent {
            worker: intent.worker.worker,
            rank: intent.worker.rank,
            blocks: shared(intent.base),
        })
        .collect()
}
