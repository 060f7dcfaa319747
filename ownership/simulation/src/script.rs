//! Client commands, built as routers build them from a possibly stale view.

use std::sync::Arc;

use ledger::{
    AdmitNode, ArtifactPinFlag, ClaimOwner, Command, DrainFlag, DrainWorker, DropReplica, ExpireLease, ForkSession,
    KvBlockSpec, KvFormatDigest, KvKinds, LocateQuery, MigrateSession, OpenSession, OwnershipSubject,
    OwnershipTransition, PinArtifact, PrefixPoint, PrefixRef, RegisterWorker, ReleaseOwner, ReplicateReadonly,
    RetireIncarnation, Scope, SetIntent, SetQuota, StepCommit, WorkerKind, WorkerLease, WorkerSpec,
};
use vocabulary::{
    ArtifactId, Blocks, Bytes, DpRank, Epoch, HashSeed, Incarnation, Micros, ModelId, NodeId, Owner, PrefixChain,
    PrefixId, SessionId, TenantId, Tokens, WorkerId, WorkerRole,
};

use crate::rng::Rng;

const SESSIONS: u64 = 6;

/// Returns the first rank of a worker's incarnation.
pub(crate) fn owner(worker: u64, incarnation: u64) -> Owner {
    Owner { worker: WorkerId(worker), incarnation: Incarnation(incarnation), rank: DpRank(0) }
}

/// Returns a registration of a worker's incarnation.
pub(crate) fn register(worker: u64, incarnation: u64, ttl: Micros) -> Command {
    let (role, kind) = (WorkerRole::Hybrid, WorkerKind::Engine);
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
    Scope::of(&TenantId::default(), KvFormatDigest(0))
}

fn chain(parts: &[(u64, u64)]) -> PrefixChain {
    let tokens = parts.iter().flat_map(|(letter, n)| (0..*n as u32).map(|i| (*letter as u32) << 16 | i));
    PrefixChain::over_tokens(PrefixId(9), HashSeed(1), Tokens(1), &tokens.collect::<Vec<_>>())
}

/// Returns the conversation of a session: a start that several share, then its own blocks.
fn conversation(session: u64, blocks: u64) -> Vec<(u64, u64)> {
    let shared = [10, 40, 70][session as usize % 3];
    vec![(1, blocks.min(shared)), (10 + session % 4, blocks.saturating_sub(shared))]
}

/// Draws the next command of a client that sees `view`, for workers numbered up to `workers`.
pub(crate) fn next_command(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    match rng.below(22) {
        20 | 21 => control(rng, view, workers),
        0..=9 => step(rng, view, workers),
        10 => lifecycle(rng),
        11 => intent(rng, workers),
        12 => copy(rng, view, workers),
        13 | 14 => claim_or_release(rng, view, workers),
        15 | 16 => migrate(rng, view, workers),
        17 => incarnation_command(rng, view),
        _ => Command::Batch((0..rng.within(2, 4)).map(|_| batchable_command(rng, view, workers)).collect()),
    }
}

/// Draws a command that may be part of a batch.
fn batchable_command(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    match rng.below(5) {
        0 => lifecycle(rng),
        1 => migrate(rng, view, workers),
        2 => intent(rng, workers),
        3 => incarnation_command(rng, view),
        _ => claim_or_release(rng, view, workers),
    }
}

fn session(rng: &mut Rng) -> u64 {
    rng.within(1, SESSIONS)
}

/// Draws an owner whose incarnation may be over or may never have existed.
fn random_owner(rng: &mut Rng, view: Option<&ledger::Ledger>, workers: u64) -> Owner {
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
        // The client went back in its history and continued differently.
        parts = conversation(id, head.saturating_sub(rng.within(1, 12)).max(1));
        parts.push((30 + rng.below(3), rng.within(1, 9)));
    }
    let text = chain(&parts);
    let located = view.locate(LocateQuery {
        scope: scope(),
        session: known.map(|session| session.id),
        chain: &text,
        shared_prefix: Blocks(0),
    });
    let seen = known.map_or(Epoch::default(), |session| session.epoch);
    let owner = known
        .and_then(|s| s.owner)
        .filter(|_| rng.chance(700))
        .unwrap_or_else(|| random_owner(rng, Some(view), workers));
    let transition = [
        OwnershipTransition::Unchanged,
        OwnershipTransition::Claim,
        OwnershipTransition::Claim,
        OwnershipTransition::Migrate { seen },
    ][rng.below(4) as usize];
    let commit = StepCommit {
        session: SessionId(u128::from(id)),
        tenant: &TenantId::default(),
        model: &ModelId::from("tiny"),
        parent: None,
        chain: &text,
        sealed: text.blocks(),
        base: located.known_blocks(),
        replaced_head: located.replaced_head(),
        owner,
        ownership: transition,
        shape: KvBlockSpec {
            format: KvFormatDigest(0),
            kinds: KvKinds::default(),
            block: Tokens(1),
            block_bytes: Bytes(64),
        },
        router: NodeId(1),
    };
    Command::commit_step(commit).unwrap_or_else(|| open(u128::from(id)))
}

fn place(session: u64, blocks: u64) -> PrefixRef {
    let text = chain(&conversation(session, blocks));
    PrefixRef {
        scope: scope(),
        point: PrefixPoint::on_chain(&text, text.blocks()).expect("a conversation has a block"),
        extent: None,
    }
}

fn lifecycle(rng: &mut Rng) -> Command {
    let (parent, child) = (session(rng), session(rng));
    let ids = (SessionId(u128::from(parent)), SessionId(u128::from(child)));
    match rng.below(4) {
        0 => Command::CloseSession(ids.0),
        _ => Command::Fork(ForkSession { parent: ids.0, child: ids.1, at: place(parent, rng.within(1, 80)) }),
    }
}

fn intent(rng: &mut Rng, workers: u64) -> Command {
    let (session, step) = (session(rng), (random_owner(rng, None, workers), Micros(rng.within(1, 20_000_000))));
    let base = chain(&conversation(session, 1)).root;
    let (session, router) = (SessionId(u128::from(session)), NodeId(rng.within(1, 3)));
    Command::Intent(SetIntent { session, base, router, step: rng.chance(700).then_some(step) })
}

fn copy(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    let place = place(session(rng), rng.within(1, 80));
    let holder = random_owner(rng, Some(view), workers);
    match rng.chance(700) {
        true => {
            let ttl = Micros(rng.within(1_000, 30_000_000));
            Command::ReplicateReadonly(ReplicateReadonly { place, holder, ttl })
        }
        false => Command::DropReplica(DropReplica { place, holder }),
    }
}

/// Draws a claim, or a release of an ownership in the view.
fn claim_or_release(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    let session = SessionId(u128::from(session(rng)));
    let known = view.session(session);
    let known = known.as_ref();
    let extent = known.and_then(|session| session.head()).map(|head| head.artifact).filter(|_| rng.chance(400));
    let (subject, held) = match extent {
        Some(id) => {
            (OwnershipSubject::Artifact(id), view.artifact(id).map(|artifact| (artifact.owner, artifact.epoch)))
        }
        None => (OwnershipSubject::Session(session), known.map(|session| (session.owner, session.epoch))),
    };
    match held {
        Some((Some(owner), seen)) if rng.chance(500) => Command::Release(ReleaseOwner { subject, owner, seen }),
        _ => Command::ClaimOwner(ClaimOwner { subject, owner: random_owner(rng, Some(view), workers) }),
    }
}

fn migrate(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    let session = SessionId(u128::from(session(rng)));
    let known = view.session(session);
    let known = known.as_ref();
    let head = known.and_then(|session| session.head()).map(|head| head.point.id).filter(|_| rng.chance(500));
    let seen = known.map_or(Epoch::default(), |session| session.epoch);
    Command::Migrate(MigrateSession { session, to: random_owner(rng, Some(view), workers), head, seen })
}

/// Draws an operator or cluster command, whatever the level.
fn control(rng: &mut Rng, view: &ledger::Ledger, workers: u64) -> Command {
    let known = view.session(SessionId(u128::from(session(rng))));
    let head = known.as_ref().and_then(|session| session.head()).map(|head| head.artifact);
    let artifact = head.unwrap_or(ArtifactId(u128::from(rng.below(9))));
    let (pinned, draining) =
        if rng.chance(300) { (ArtifactPinFlag::Yes, DrainFlag::Yes) } else { (ArtifactPinFlag::No, DrainFlag::No) };
    match rng.below(8) {
        0..=2 => {
            let (nonce, address) = (u128::from(rng.within(1, 9)), format!("node-{}:1", rng.below(3)).into());
            Command::AdmitNode(AdmitNode { nonce, address })
        }
        3 => Command::RetireNode(NodeId(rng.within(2, 9))),
        4 => Command::Pin(PinArtifact { artifact, pinned }),
        5 => Command::Evict(artifact),
        6 => Command::DrainWorker(DrainWorker { worker: WorkerId(rng.within(1, workers)), draining }),
        _ => {
            let artifacts = rng.chance(500).then(|| rng.within(5, 60));
            Command::SetQuota(SetQuota { tenant: TenantId::default(), artifacts })
        }
    }
}

/// Draws a command about separate workers: registered twice, replaced by another incarnation, and retired.
fn incarnation_command(rng: &mut Rng, view: &ledger::Ledger) -> Command {
    let worker = rng.within(50, 51);
    let seen = view.worker(WorkerId(worker));
    let known = seen.map_or(1, |worker| worker.incarnation.0);
    match (rng.below(5), seen.map(|worker| (worker.epoch, worker.lease))) {
        (0, Some((seen, _))) if rng.chance(500) => {
            Command::RetireLife(RetireIncarnation { worker: WorkerId(worker), seen })
        }
        (0, _) => Command::RetireWorker(WorkerId(worker)),
        // Only a leader should propose this, and never so early.
        (1, Some((epoch, WorkerLease::Held { until: deadline }))) => {
            Command::ExpireLease(ExpireLease { worker: WorkerId(worker), epoch, deadline })
        }
        _ => register(worker, known + rng.below(2), Micros(20_000_000)),
    }
}
