//! What clients ask for: commands as routers send them, made from a view that may be old.

use std::sync::Arc;

use ledger::{
    AdmitNode, ClaimOwner, Command, Custody, DrainWorker, Draining, DropReplica, Expire, Fork, KvFormat, KvKinds,
    KvShape, Lease, Migrate, OpenSession, Pin, Pinned, Place, Point, Query, RegisterWorker, Release, ReplicateReadonly,
    RetireLife, Scope, SetIntent, SetQuota, StepCommit, Subject, WorkerKind, WorkerSpec,
};
use vocabulary::{
    ArtifactId, Blocks, Bytes, Chain, DpRank, Epoch, Incarnation, Micros, ModelId, NodeId, Owner, PrefixId, Role, Seed,
    SessionId, TenantId, Tokens, WorkerId,
};

use crate::rng::Rng;

const SESSIONS: u64 = 6;

/// An owner: the first rank of a worker's life.
pub(crate) fn owner(worker: u64, incarnation: u64) -> Owner {
    Owner { worker: WorkerId(worker), incarnation: Incarnation(incarnation), rank: DpRank(0) }
}

/// A registration of a worker's life.
pub(crate) fn register(worker: u64, incarnation: u64, ttl: Micros) -> Command {
    let (role, kind) = (Role::Hybrid, WorkerKind::Engine);
    let models = Arc::from([ModelId::from("tiny")]);
    let spec = WorkerSpec { endpoint: "http://worker".into(), role, kind, models, ranks: 1 };
    let (worker, incarnation) = (WorkerId(worker), Incarnation(incarnation));
    Command::RegisterWorker(RegisterWorker { worker, incarnation, spec, ttl })
}

pub(crate) fn open(session: u128) -> Command {
    let (tenant, model) = (TenantId::default(), ModelId::from("tiny"));
    Command::OpenSession(OpenSession { session: SessionId(session), tenant, model, parent: None })
}

fn scope() -> Scope {
    Scope::of(&TenantId::default(), KvFormat(0))
}

fn chain(parts: &[(u64, u64)]) -> Chain {
    let tokens = parts.iter().flat_map(|(letter, n)| (0..*n as u32).map(|i| (*letter as u32) << 16 | i));
    Chain::over_tokens(PrefixId(9), Seed(1), Tokens(1), &tokens.collect::<Vec<_>>())
}

/// The conversation of a session: a start that several share, then its own blocks.
fn conversation(session: u64, blocks: u64) -> Vec<(u64, u64)> {
    let shared = [10, 40, 70][session as usize % 3];
    vec![(1, blocks.min(shared)), (10 + session % 4, blocks.saturating_sub(shared))]
}

/// The next command of a client that sees `view`, for workers numbered up to `workers`.
pub(crate) fn next(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    match rng.below(22) {
        20 | 21 => control(rng, view, workers),
        0..=9 => step(rng, view, workers),
        10 => lifecycle(rng),
        11 => intent(rng, workers),
        12 => copy(rng, view, workers),
        13 | 14 => custody(rng, view, workers),
        15 | 16 => migrate(rng, view, workers),
        17 => lives(rng, view),
        _ => Command::Batch((0..rng.within(2, 4)).map(|_| plain(rng, view, workers)).collect()),
    }
}

/// A command that may lie in a batch.
fn plain(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    match rng.below(5) {
        0 => lifecycle(rng),
        1 => migrate(rng, view, workers),
        2 => intent(rng, workers),
        3 => lives(rng, view),
        _ => custody(rng, view, workers),
    }
}

fn session(rng: &mut Rng) -> u64 {
    rng.within(1, SESSIONS)
}

/// A life of a worker that may be over, or may never have been.
fn anyone(rng: &mut Rng, view: Option<&ledger::Ledger>, workers: u64) -> Owner {
    let worker = rng.within(1, workers);
    let current = view.and_then(|view| view.worker(WorkerId(worker))).map_or(1, |worker| worker.incarnation.0);
    owner(worker, if rng.chance(100) { rng.within(1, 3) } else { current })
}

fn step(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    let id = session(rng);
    let known = view.session(SessionId(u128::from(id)));
    let known = known.as_ref();
    let head = known.and_then(|session| session.head()).map_or(0, |head| head.point.blocks.0);
    let mut parts = conversation(id, (head + rng.below(16)).clamp(1, 160));
    if rng.chance(150) {
        // The client went back in its history and said something else.
        parts = conversation(id, head.saturating_sub(rng.within(1, 12)).max(1));
        parts.push((30 + rng.below(3), rng.within(1, 9)));
    }
    let text = chain(&parts);
    let located = view.locate(Query {
        scope: scope(),
        session: known.map(|session| session.id),
        chain: &text,
        preamble: Blocks(0),
    });
    let seen = known.map_or(Epoch::default(), |session| session.epoch);
    let owner =
        known.and_then(|s| s.owner).filter(|_| rng.chance(700)).unwrap_or_else(|| anyone(rng, Some(view), workers));
    let custody = [Custody::Stays, Custody::Claims, Custody::Claims, Custody::Moves { seen }][rng.below(4) as usize];
    let commit = StepCommit {
        session: SessionId(u128::from(id)),
        tenant: &TenantId::default(),
        model: &ModelId::from("tiny"),
        parent: None,
        chain: &text,
        sealed: text.blocks(),
        base: located.known(),
        replaces: located.rewrites(),
        owner,
        custody,
        shape: KvShape { format: KvFormat(0), kinds: KvKinds::default(), block: Tokens(1), block_bytes: Bytes(64) },
        router: NodeId(1),
    };
    Command::commit_step(commit).unwrap_or_else(|| open(u128::from(id)))
}

fn place(session: u64, blocks: u64) -> Place {
    let text = chain(&conversation(session, blocks));
    Place { scope: scope(), point: Point::on(&text, text.blocks()).expect("a conversation has a block"), extent: None }
}

fn lifecycle(rng: &mut Rng) -> Command {
    let (parent, child) = (session(rng), session(rng));
    let ids = (SessionId(u128::from(parent)), SessionId(u128::from(child)));
    match rng.below(4) {
        0 => Command::CloseSession(ids.0),
        _ => Command::Fork(Fork { parent: ids.0, child: ids.1, at: place(parent, rng.within(1, 80)) }),
    }
}

fn intent(rng: &mut Rng, workers: u64) -> Command {
    let (session, step) = (session(rng), (anyone(rng, None, workers), Micros(rng.within(1, 20_000_000))));
    let base = chain(&conversation(session, 1)).root;
    let (session, router) = (SessionId(u128::from(session)), NodeId(rng.within(1, 3)));
    Command::Intent(SetIntent { session, base, router, step: rng.chance(700).then_some(step) })
}

fn copy(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    let place = place(session(rng), rng.within(1, 80));
    let holder = anyone(rng, Some(view), workers);
    match rng.chance(700) {
        true => {
            let ttl = Micros(rng.within(1_000, 30_000_000));
            Command::ReplicateReadonly(ReplicateReadonly { place, holder, ttl })
        }
        false => Command::DropReplica(DropReplica { place, holder }),
    }
}

/// A claim, or a release of what the view shows.
fn custody(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    let session = SessionId(u128::from(session(rng)));
    let known = view.session(session);
    let known = known.as_ref();
    let extent = known.and_then(|session| session.head()).map(|head| head.artifact).filter(|_| rng.chance(400));
    let (subject, held) = match extent {
        Some(id) => (Subject::Artifact(id), view.artifact(id).map(|artifact| (artifact.owner, artifact.epoch))),
        None => (Subject::Session(session), known.map(|session| (session.owner, session.epoch))),
    };
    match held {
        Some((Some(owner), seen)) if rng.chance(500) => Command::Release(Release { subject, owner, seen }),
        _ => Command::ClaimOwner(ClaimOwner { subject, owner: anyone(rng, Some(view), workers) }),
    }
}

fn migrate(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    let session = SessionId(u128::from(session(rng)));
    let known = view.session(session);
    let known = known.as_ref();
    let head = known.and_then(|session| session.head()).map(|head| head.point.id).filter(|_| rng.chance(500));
    let seen = known.map_or(Epoch::default(), |session| session.epoch);
    Command::Migrate(Migrate { session, to: anyone(rng, Some(view), workers), head, seen })
}

/// What operators and the cluster itself ask for, whatever the level.
fn control(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    let known = view.session(SessionId(u128::from(session(rng))));
    let head = known.as_ref().and_then(|session| session.head()).map(|head| head.artifact);
    let artifact = head.unwrap_or(ArtifactId(u128::from(rng.below(9))));
    let (pinned, draining) = if rng.chance(300) { (Pinned::Yes, Draining::Yes) } else { (Pinned::No, Draining::No) };
    match rng.below(8) {
        0..=2 => {
            let (nonce, address) = (u128::from(rng.within(1, 9)), format!("node-{}:1", rng.below(3)).into());
            Command::AdmitNode(AdmitNode { nonce, address })
        }
        3 => Command::RetireNode(NodeId(rng.within(2, 9))),
        4 => Command::Pin(Pin { artifact, pinned }),
        5 => Command::Evict(artifact),
        6 => Command::DrainWorker(DrainWorker { worker: WorkerId(rng.within(1, workers)), draining }),
        _ => {
            let artifacts = rng.chance(500).then(|| rng.within(5, 60));
            Command::SetQuota(SetQuota { tenant: TenantId::default(), artifacts })
        }
    }
}

/// Workers beside those with a life of their own: registered twice, over each other, and taken out.
fn lives(rng: &mut Rng, view: &ledger::Ledger) -> Command {
    let worker = rng.within(50, 51);
    let seen = view.worker(WorkerId(worker));
    let known = seen.map_or(1, |worker| worker.incarnation.0);
    match (rng.below(5), seen.map(|worker| (worker.epoch, worker.lease))) {
        (0, Some((seen, _))) if rng.chance(500) => Command::RetireLife(RetireLife { worker: WorkerId(worker), seen }),
        (0, _) => Command::RetireWorker(WorkerId(worker)),
        // Nobody but a leader should propose this, and never so early.
        (1, Some((epoch, Lease::Held { until: deadline }))) => {
            Command::Expire(Expire { worker: WorkerId(worker), epoch, deadline })
        }
        _ => register(worker, known + rng.below(2), Micros(20_000_000)),
    }
}
