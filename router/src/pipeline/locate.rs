//! Locate: whose session is it, who owns what is sealed of it, who holds blocks of it now. Memory reads only.

use std::sync::Arc;
use std::time::Instant;

use ownership::View;
use ownership::ledger::{Ledger, Lineage, Located as Found, Query};
use planner::{HeadRelation, Promise, SessionView, TransferBar, lcm};
use prefix::Converted;
use serde::Serialize;
use vocabulary::{Blocks, Health, Micros, Overlap, Owner, PrefixId, SessionId, Tokens, WorkerView};

use super::aside::Load;
use super::batch;
use super::identify::Prefixed;
use super::knowledge;
use super::opening::preamble;
use super::parse::Request;
use super::place::Place;
use crate::error::ApiError;
use crate::gateway::Gateway;

/// A prompt whose place in the world is known.
#[derive(Debug)]
pub struct Located {
    /// The prompt.
    pub prefixed: Prefixed,
    /// What must be stable over a conversation's steps: the client's name for it, else how it began.
    pub pin: SessionId,
    /// The session: the named one, the one that the chain extends, or a new one.
    pub session: SessionView,
    /// The session that this one leaves or was spawned from, where the chain or the client says so.
    pub parent: Option<SessionId>,
    /// What it was found by.
    pub grounds: Grounds,
    /// The head that the step extends: the intent's base.
    pub base: PrefixId,
    /// The head whose history the client rewrote.
    pub rewrites: Option<PrefixId>,
    /// How the prompt relates to the session's head.
    pub relation: HeadRelation,
    /// Blocks that the prompt shares with the session's head.
    pub shared: Blocks,
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
pub enum Freshness {
    /// There is a quorum.
    Current,
    /// There is none that this node knows of: ownership stands still.
    Stale,
}

/// What a prompt's place was found by.
#[derive(Clone, Copy, Serialize, Debug)]
pub struct Grounds {
    /// The deepest block of the chain that the ledger knows.
    #[serde(skip)]
    pub known: Blocks,
    /// Leading blocks that many conversations share, where that had to be found out.
    #[serde(skip)]
    pub preamble: Blocks,
    /// The view of the ledger.
    pub view: Freshness,
    /// Whether a step of this session counted that was served here and is not in the view yet.
    pub unapplied: bool,
    /// Steps of this session that other routers said are on their way.
    pub promises: usize,
    /// Other routers whose requests in flight were counted.
    pub routers: usize,
    /// What in the request keeps engines from reading their caches, so that it counted nowhere what they hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unread: Option<TransferBar>,
}

impl Located {
    /// The most that any worker holds.
    pub fn deepest_overlap(&self) -> Blocks {
        self.overlaps.iter().map(|overlap| overlap.blocks).max().unwrap_or_default()
    }

    /// Whole blocks that every engine of the model can keep.
    pub fn sealable(&self) -> Blocks {
        sealable(&self.prefixed, &self.workers)
    }

    /// Leading tokens known from before, where its engine uses them.
    pub fn reused(&self) -> Tokens {
        if self.grounds.unread.is_some() {
            return Tokens::ZERO;
        }
        self.deepest_overlap().max(self.shared).tokens(self.prefixed.prompt.chain.block)
    }
}

/// Reads ledger view, residency and fleet, and what this router has done and the view does not show yet. `chat` is what
/// the engine makes of a request in another endpoint's words.
pub async fn locate(gateway: &Gateway, prefixed: Prefixed, chat: Option<Converted>) -> Result<Located, ApiError> {
    let view = gateway.directory().view();
    let found = view.locate(query(&prefixed));
    if !matches!(found.lineage, Lineage::Leaves { .. }) || prefixed.named.is_some() {
        return Ok(located(gateway, &view, (prefixed, found, Blocks::ZERO)));
    }
    // A fork, or just another conversation with the same system prompt?
    let load = Load::of(&prefixed.request.incoming);
    let work = move || (preamble(&prefixed, chat.as_ref()), prefixed);
    let (preamble, prefixed) = load.done(&gateway.aside, work).await?;
    // What was applied meanwhile is no longer among the steps of our own that wait for it.
    Ok(anew(gateway, prefixed, preamble))
}

/// A step that has waited, in the world as it is now.
pub fn again(gateway: &Gateway, waited: Located) -> Located {
    anew(gateway, waited.prefixed, waited.grounds.preamble)
}

fn anew(gateway: &Gateway, prefixed: Prefixed, preamble: Blocks) -> Located {
    let view = gateway.directory().view();
    let found = view.locate(Query { preamble, ..query(&prefixed) });
    located(gateway, &view, (prefixed, found, preamble))
}

/// A step whose answer broke off: as it was, with the fleet and who holds how much as they are now.
pub fn broken_off(gateway: &Gateway, located: Located) -> Located {
    let prefixed = &located.prefixed;
    let workers = knowledge::of_step(gateway, prefixed, gateway.fleet().snapshot());
    let is_read = located.grounds.unread.is_none();
    let overlaps = if is_read { overlaps(gateway, prefixed, located.grounds.known) } else { Vec::new() };
    Located { workers, overlaps, ..located }
}

fn located(gateway: &Gateway, view: &View, (prefixed, found, preamble): (Prefixed, Found, Blocks)) -> Located {
    let pin = prefixed.pin;
    let workers = knowledge::of_step(gateway, &prefixed, gateway.fleet().snapshot());
    let place = place(gateway, view, (&prefixed, &found));
    let chain = &prefixed.prompt.chain;
    let unread = prefixed.request.unread();
    // What nobody reads is nowhere, whoever owns it.
    let overlaps = if unread.is_none() { overlaps(gateway, &prefixed, found.known()) } else { Vec::new() };
    let relation = place.head.map_or(HeadRelation::Unknown, |(head, shared)| {
        HeadRelation::of(sealable(&prefixed, &workers), head.blocks, shared)
    });
    let record = view.session(place.session);
    let owner = place.owner(record.as_ref().and_then(|session| view.session_owner(session)));
    let owner = owner.filter(|owner| view.is_live(*owner) || is_there(&workers, *owner));
    let sealed = found.sealed.as_ref();
    let shared = place.head.map_or(Blocks::ZERO, |(_, shared)| shared);
    let session = SessionView {
        id: place.session,
        owner,
        epoch: record.as_ref().map(|session| session.epoch).unwrap_or_default(),
        sealed: match unread {
            Some(_) => Blocks::ZERO,
            None if place.own.is_some() => found.known().max(shared),
            None => found.known(),
        },
        replicas: sealed.map_or_else(Vec::new, |sealed| sealed.holders(owner)),
        promises: if unread.is_none() { promises(gateway, view, place.session, &prefixed) } else { Vec::new() },
    };
    let idle = record.map(|session| Micros(view.now().0.saturating_sub(session.touched.0)));
    let grounds = Grounds {
        known: found.known(),
        preamble,
        view: if view.quorum().stale { Freshness::Stale } else { Freshness::Current },
        unapplied: place.own.is_some(),
        promises: session.promises.len(),
        routers: gateway.fleet().routers(),
        unread,
    };
    Located {
        pin,
        session,
        parent: place.parent.or_else(|| place.head.is_none().then(|| named_parent(&prefixed.request)).flatten()),
        grounds,
        base: place.head.map_or(chain.root, |(head, shared)| if shared == head.blocks { head.id } else { chain.root }),
        rewrites: place.rewrites,
        relation,
        shared,
        idle: place.own.map_or(idle, |(_, ago)| Some(Micros::of(ago))),
        overlaps,
        workers,
        prefixed,
    }
}

/// Who holds how much of the prompts, of a batch all of them together.
fn overlaps(gateway: &Gateway, prefixed: &Prefixed, known: Blocks) -> Vec<Overlap> {
    let index = gateway.index();
    let first = index.overlaps(prefixed.pin, &prefixed.prompt.chain, known);
    if prefixed.others.is_empty() {
        return first;
    }
    // Those who write have their turn between two of them.
    let others = prefixed.others.iter().map(|chain| index.read().overlaps_of(chain));
    batch::together(std::iter::once(first).chain(others))
}

/// What the ledger is asked about a prompt.
fn query(prefixed: &Prefixed) -> Query<'_> {
    let scope = prefixed.model.scope(&prefixed.request.incoming.tenant);
    Query { scope, session: prefixed.named, chain: &prefixed.prompt.chain, preamble: Blocks::ZERO }
}

fn place(gateway: &Gateway, view: &Ledger, (prefixed, found): (&Prefixed, &Found)) -> Place {
    let place = Place::in_view(found, prefixed.named, SessionId(prefixed.request.incoming.id.0));
    let unapplied = gateway.unapplied();
    if unapplied.is_empty() { place } else { place.with_own(&unapplied, view, (query(prefixed), Instant::now())) }
}

/// Whether this life of the worker is reached, whatever the ledger has heard of it.
fn is_there(workers: &[WorkerView], owner: Owner) -> bool {
    let is_it = |worker: &WorkerView| worker.id == owner.worker && worker.incarnation == owner.incarnation;
    workers.iter().any(|worker| is_it(worker) && worker.health != Health::Unreachable)
}

/// Whole blocks of the prompt, down to a multiple of every engine's own block: engines keep and drop only those whole.
fn sealable(prefixed: &Prefixed, workers: &[WorkerView]) -> Blocks {
    let chain = &prefixed.prompt.chain;
    let serving = workers.iter().filter(|worker| worker.models.contains(&prefixed.request.model));
    let units = serving.map(|worker| worker.capacity.block.whole_blocks(chain.block).0.max(1));
    let unit = units.fold(1, lcm);
    Blocks(chain.blocks().0 / unit * unit)
}

/// The session that the client says this one was spawned from.
fn named_parent(request: &Request) -> Option<SessionId> {
    let parent = request.session_key.as_ref()?.parent.as_ref()?;
    Some(SessionId::of_key(&request.incoming.tenant, &request.model, parent))
}

/// Live intents of other routers, with how much of this prompt their step shares.
fn promises(gateway: &Gateway, view: &Ledger, session: SessionId, prefixed: &Prefixed) -> Vec<Promise> {
    let chain = &prefixed.prompt.chain;
    let shared = |base: PrefixId| match chain.ids.iter().position(|id| *id == base) {
        Some(at) => Blocks(at as u64 + 1),
        None => Blocks::ZERO,
    };
    view.intents(session)
        .filter(|intent| intent.router != gateway.node() && view.is_live(intent.worker))
        .map(|intent| Promise { worker: intent.worker.worker, rank: intent.worker.rank, blocks: shared(intent.base) })
        .collect()
}
