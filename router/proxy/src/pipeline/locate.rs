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
use super::step_workers;
use super::session_resolution::SessionResolution;
use crate::error::ApiError;
use crate::identified_request::{IdentifiedRequest, ParsedRequest};
use crate::ledger_access::LedgerAccess;
use crate::offload_pool::{OffloadPool, OffloadTask};
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
    let load = OffloadTask::of(&identified.request.incoming);
    let work = move || (shared_prefix_blocks(&identified, converted.as_ref()), identified);
    let (preamble, identified) = load.run(&stage.offload_pool, work).await?;
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
    (prefixed, found, preamble): (IdentifiedRequest, Found, Blocks),
) -> LocatedRequest {
    let affinity_key = prefixed.affinity_key;
    let workers = workers_for_step(stage, &prefixed);
    let place = resolve_session(stage, view, (&prefixed, &found));
    let chain = &prefixed.prompt.chain;
    let unread = prefixed.request.cache_bypass_reason();
    // KV that engines will not read counts as held nowhere, whoever owns it.
    let overlaps = if unread.is_none() { overlaps(stage, &prefixed, found.known_blocks()) } else { Vec::new() };
    let relation = place.head.map_or(HeadRelation::Unknown, |(head, shared)| {
        HeadRelation::of(sealable_blocks_of(&prefixed, &workers), head.blocks, shared)
    });
    let record = view.session(place.session);
    let owner = place.owner(record.as_ref().and_then(|session| view.session_owner(session)));
    let owner = owner.filter(|owner| view.is_live(*owner) || is_reachable(&workers, *owner));
    let sealed = found.sealed.as_ref();
    let shared = place.head.map_or(Blocks::ZERO, |(_, shared)| shared);
    let session = SessionView {
        id: place.session,
        owner,
        epoch: record.as_ref().map(|session| session.epoch).unwrap_or_default(),
        sealed: match unread {
            Some(_) => Blocks::ZERO,
            None if place.pending.is_some() => found.known_blocks().max(shared),
            None => found.known_blocks(),
        },
        replicas: sealed.map_or_else(Vec::new, |sealed| sealed.holders(owner)),
        peer_intents: if unread.is_none() { other_intents(stage, view, place.session, &prefixed) } else { Vec::new() },
    };
    let idle = record.map(|session| Micros(view.now().0.saturating_sub(session.touched.0)));
    let grounds = LookupEvidence {
        known: found.known_blocks(),
        preamble,
        ledger_view: if view.quorum().stale { LedgerFreshness::Stale } else { LedgerFreshness::Current },
        pending_commit: place.pending.is_some(),
        peer_intents: session.peer_intents.len(),
        peer_routers: stage.fleet.peer_count(),
        cache_not_readable: unread,
    };
    LocatedRequest {
        affinity_key,
        session,
        parent: place.parent.or_else(|| place.head.is_none().then(|| named_parent(&prefixed.request)).flatten()),
        evidence: grounds,
        base: place.head.map_or(chain.root, |(head, shared)| if shared == head.blocks { head.id } else { chain.root }),
        rewrites: place.rewrites,
        relation,
        shared_blocks: shared,
        idle: place.pending.map_or(idle, |(_, ago)| Some(Micros::of(ago))),
        overlaps,
        workers,
        identified: prefixed,
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
    let others = identified.other_chains.iter().map(|chain| index.read().overlaps_of_chain(chain));
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
    (prefixed, found): (&IdentifiedRequest, &Found),
) -> SessionResolution {
    let place = SessionResolution::from_view(found, prefixed.named_session, SessionId(prefixed.request.incoming.id.0));
    let unapplied = stage.ledger.pending_commits();
    if unapplied.is_empty() { place } else { place.with_pending(&unapplied, view, (query(prefixed), Instant::now())) }
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
