//! Locate: whose session is it, who owns what is sealed of it, who holds blocks of it now. Memory reads only.

use std::sync::Arc;
use std::time::Instant;

use ownership::LedgerView;
use ownership::ledger::{Ledger, Lineage, LocateQuery, LocateResult as Found};
use planner::{HeadRelation, LiveIntent, SessionView, TransferObstacle, lcm};
use prefix::ConvertedRequest;
use serde::Serialize;
use vocabulary::{Blocks, Micros, Overlap, Owner, PrefixId, SessionId, Tokens, WorkerHealth, WorkerView};

use super::batch;
use super::conversation_fingerprint::shared_prefix_blocks;
use super::identify::IdentifiedRequest;
use super::knowledge;
use super::offload_pool::OffloadTask;
use super::parse::ParsedRequest;
use super::session_resolution::SessionResolution;
use crate::app_state::AppState;
use crate::error::ApiError;

/// A prompt whose place in the world is known.
#[derive(Debug)]
pub struct LocatedRequest {
    /// The prompt.
    pub identified: IdentifiedRequest,
    /// What must be stable over a conversation's steps: the client's name for it, else how it began.
    pub affinity_key: SessionId,
    /// The session: the named one, the one that the chain extends, or a new one.
    pub session: SessionView,
    /// The session that this one leaves or was spawned from, where the chain or the client says so.
    pub parent: Option<SessionId>,
    /// What it was found by.
    pub evidence: LookupEvidence,
    /// The head that the step extends: the intent's base.
    pub base: PrefixId,
    /// The head whose history the client rewrote.
    pub rewrites: Option<PrefixId>,
    /// How the prompt relates to the session's head.
    pub relation: HeadRelation,
    /// Blocks that the prompt shares with the session's head.
    pub shared_blocks: Blocks,
    /// Time since the session's last step.
    pub idle: Option<Micros>,
    /// Who holds how much.
    pub overlaps: Vec<Overlap>,
    /// The fleet at this moment, as this step's prompt is known there.
    pub workers: Arc<[WorkerView]>,
}

/// Whether the view of the ledger is known to be fresh.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum LedgerFreshness {
    /// There is a quorum.
    Current,
    /// There is none that this node knows of: ownership stands still.
    Stale,
}

/// What a prompt's place was found by.
#[derive(Clone, Copy, Serialize, Debug)]
pub struct LookupEvidence {
    /// The deepest block of the chain that the ledger knows.
    #[serde(skip)]
    pub known: Blocks,
    /// Leading blocks that many conversations share, where that had to be found out.
    #[serde(skip)]
    pub preamble: Blocks,
    /// The view of the ledger.
    pub view: LedgerFreshness,
    /// Whether a step of this session counted that was served here and is not in the view yet.
    pub unapplied: bool,
    /// Steps of this session that other routers said are on their way.
    pub promises: usize,
    /// Other routers whose requests in flight were counted.
    pub routers: usize,
    /// What in the request keeps engines from reading their caches, so that it counted nowhere what they hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unread: Option<TransferObstacle>,
}

impl LocatedRequest {
    /// The most that any worker holds.
    pub fn deepest_overlap(&self) -> Blocks {
        self.overlaps.iter().map(|overlap| overlap.blocks).max().unwrap_or_default()
    }

    /// Whole blocks that every engine of the model can keep.
    pub fn sealable_blocks(&self) -> Blocks {
        sealable_blocks_of(&self.identified, &self.workers)
    }

    /// Leading tokens known from before, where its engine uses them.
    pub fn reused_tokens(&self) -> Tokens {
        if self.evidence.unread.is_some() {
            return Tokens::ZERO;
        }
        self.deepest_overlap().max(self.shared_blocks).tokens(self.identified.prompt.chain.block)
    }
}

/// Reads ledger view, residency and fleet, and what this router has done and the view does not show yet. `chat` is what
/// the engine makes of a request in another endpoint's words.
pub async fn locate(
    gateway: &AppState,
    prefixed: IdentifiedRequest,
    chat: Option<ConvertedRequest>,
) -> Result<LocatedRequest, ApiError> {
    let view = gateway.directory().view();
    let found = view.locate(query(&prefixed));
    if !matches!(found.lineage, Lineage::ForksFrom { .. }) || prefixed.named_session.is_some() {
        return Ok(build_located(gateway, &view, (prefixed, found, Blocks::ZERO)));
    }
    // A fork, or just another conversation with the same system prompt?
    let load = OffloadTask::of(&prefixed.request.incoming);
    let work = move || (shared_prefix_blocks(&prefixed, chat.as_ref()), prefixed);
    let (preamble, prefixed) = load.run(&gateway.offload_pool, work).await?;
    // What was applied meanwhile is no longer among the steps of our own that wait for it.
    Ok(locate_fresh(gateway, prefixed, preamble))
}

/// A step that has waited, in the world as it is now.
pub fn locate_waiting(gateway: &AppState, waited: LocatedRequest) -> LocatedRequest {
    locate_fresh(gateway, waited.identified, waited.evidence.preamble)
}

fn locate_fresh(gateway: &AppState, prefixed: IdentifiedRequest, preamble: Blocks) -> LocatedRequest {
    let view = gateway.directory().view();
    let found = view.locate(LocateQuery { shared_prefix: preamble, ..query(&prefixed) });
    build_located(gateway, &view, (prefixed, found, preamble))
}

/// A step whose answer broke off: as it was, with the fleet and who holds how much as they are now.
pub fn refresh_broken(gateway: &AppState, located: LocatedRequest) -> LocatedRequest {
    let prefixed = &located.identified;
    let workers = knowledge::workers_for_step(gateway, prefixed, gateway.fleet().snapshot());
    let is_read = located.evidence.unread.is_none();
    let overlaps = if is_read { overlaps(gateway, prefixed, located.evidence.known) } else { Vec::new() };
    LocatedRequest { workers, overlaps, ..located }
}

fn build_located(
    gateway: &AppState,
    view: &LedgerView,
    (prefixed, found, preamble): (IdentifiedRequest, Found, Blocks),
) -> LocatedRequest {
    let pin = prefixed.affinity_key;
    let workers = knowledge::workers_for_step(gateway, &prefixed, gateway.fleet().snapshot());
    let place = resolve_session(gateway, view, (&prefixed, &found));
    let chain = &prefixed.prompt.chain;
    let unread = prefixed.request.cache_bypass_reason();
    // What nobody reads is nowhere, whoever owns it.
    let overlaps = if unread.is_none() { overlaps(gateway, &prefixed, found.known_blocks()) } else { Vec::new() };
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
        promises: if unread.is_none() { other_intents(gateway, view, place.session, &prefixed) } else { Vec::new() },
    };
    let idle = record.map(|session| Micros(view.now().0.saturating_sub(session.touched.0)));
    let grounds = LookupEvidence {
        known: found.known_blocks(),
        preamble,
        view: if view.quorum().stale { LedgerFreshness::Stale } else { LedgerFreshness::Current },
        unapplied: place.pending.is_some(),
        promises: session.promises.len(),
        routers: gateway.fleet().peer_count(),
        unread,
    };
    LocatedRequest {
        affinity_key: pin,
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

/// Who holds how much of the prompts, of a batch all of them together.
fn overlaps(gateway: &AppState, prefixed: &IdentifiedRequest, known: Blocks) -> Vec<Overlap> {
    let index = gateway.index();
    let first = index.overlaps(prefixed.affinity_key, &prefixed.prompt.chain, known);
    if prefixed.other_chains.is_empty() {
        return first;
    }
    // Those who write have their turn between two of them.
    let others = prefixed.other_chains.iter().map(|chain| index.read().overlaps_of_chain(chain));
    batch::sum_overlaps(std::iter::once(first).chain(others))
}

/// What the ledger is asked about a prompt.
fn query(prefixed: &IdentifiedRequest) -> LocateQuery<'_> {
    let scope = prefixed.model.scope(&prefixed.request.incoming.tenant);
    LocateQuery { scope, session: prefixed.named_session, chain: &prefixed.prompt.chain, shared_prefix: Blocks::ZERO }
}

fn resolve_session(
    gateway: &AppState,
    view: &Ledger,
    (prefixed, found): (&IdentifiedRequest, &Found),
) -> SessionResolution {
    let place = SessionResolution::from_view(found, prefixed.named_session, SessionId(prefixed.request.incoming.id.0));
    let unapplied = gateway.pending_commits();
    if unapplied.is_empty() { place } else { place.with_pending(&unapplied, view, (query(prefixed), Instant::now())) }
}

/// Whether this life of the worker is reached, whatever the ledger has heard of it.
fn is_reachable(workers: &[WorkerView], owner: Owner) -> bool {
    let is_it = |worker: &WorkerView| worker.id == owner.worker && worker.incarnation == owner.incarnation;
    workers.iter().any(|worker| is_it(worker) && worker.health != WorkerHealth::Unreachable)
}

/// Whole blocks of the prompt, down to a multiple of every engine's own block: engines keep and drop only those whole.
fn sealable_blocks_of(prefixed: &IdentifiedRequest, workers: &[WorkerView]) -> Blocks {
    let chain = &prefixed.prompt.chain;
    let serving = workers.iter().filter(|worker| worker.models.contains(&prefixed.request.model));
    let units = serving.map(|worker| worker.capacity.block.whole_blocks(chain.block).0.max(1));
    let unit = units.fold(1, lcm);
    Blocks(chain.blocks().0 / unit * unit)
}

/// The session that the client says this one was spawned from.
fn named_parent(request: &ParsedRequest) -> Option<SessionId> {
    let parent = request.session_key.as_ref()?.parent.as_ref()?;
    Some(SessionId::of_key(&request.incoming.tenant, &request.model, parent))
}

/// Live intents of other routers, with how much of this prompt their step shares.
fn other_intents(
    gateway: &AppState,
    view: &Ledger,
    session: SessionId,
    prefixed: &IdentifiedRequest,
) -> Vec<LiveIntent> {
    let chain = &prefixed.prompt.chain;
    let shared = |base: PrefixId| match chain.ids.iter().position(|id| *id == base) {
        Some(at) => Blocks(at as u64 + 1),
        None => Blocks::ZERO,
    };
    view.intents(session)
        .filter(|intent| intent.router != gateway.node_id() && view.is_live(intent.worker))
        .map(|intent| LiveIntent {
            worker: intent.worker.worker,
            rank: intent.worker.rank,
            blocks: shared(intent.base),
        })
        .collect()
}
