use ownership::ledger::{
    ChainDescriptor, KvBlockSpec, KvFormatDigest, KvKinds, LedgerEntry, RegisterWorker, Submission, WorkerKind,
    WorkerSpec,
};
use ownership::ledger::{Command, Outcome, StepCommitOutcome};
use vocabulary::{
    Bytes, ClientId, ClientSerial, DpRank, Epoch, HashSeed, Incarnation, LedgerTime, Micros, ModelId, NodeId,
    PrefixChain, TenantId, Tokens, WorkerId, WorkerRole,
};

use super::*;
use crate::peer_exchange::pending_commits::QuorumReachability;

const NEW_SESSION: SessionId = SessionId(999);

/// A ledger that knows workers 1 and 2.
struct TwoWorkerLedger {
    ledger: Ledger,
    index: u64,
}

impl TwoWorkerLedger {
    fn new() -> Self {
        let mut bench = Self { ledger: Ledger::default(), index: 0 };
        bench.run(Command::OpenClient(NodeId(1)));
        for worker in [1, 2] {
            let spec = WorkerSpec {
                endpoint: format!("http://w{worker}:1").into(),
                role: WorkerRole::Hybrid,
                kind: WorkerKind::Engine,
                models: [].into(),
                ranks: 1,
            };
            let (worker, incarnation) = (owner(worker).worker, owner(worker).incarnation);
            let ttl = Micros(15_000_000);
            bench.run(Command::RegisterWorker(RegisterWorker { worker, incarnation, spec, ttl }));
        }
        bench
    }

    fn run(&mut self, command: Command) -> Outcome {
        self.index += 1;
        let submission = Submission { client: ClientId(1), serial: ClientSerial(self.index), command };
        let entry = LedgerEntry { time: LedgerTime(self.index), submissions: vec![submission] };
        self.ledger.apply(self.index, &entry).remove(0)
    }

    fn commit(&mut self, step: &UncommittedStep) {
        let command = step.command(Blocks::ZERO, NodeId(1)).unwrap();
        assert!(StepCommitOutcome::of(&self.run(command)).sealed);
    }

    /// Resolves a prompt from the view and `own`.
    fn resolve(&self, named: Option<u128>, prompt: &PrefixChain, own: &PendingCommits) -> SessionResolution {
        let session = named.map(SessionId);
        let query = LocateQuery { scope: step(1, 1, 0).scope(), session, chain: prompt, shared_prefix: Blocks::ZERO };
        let found = self.ledger.locate(query);
        SessionResolution::from_view(&found, session, NEW_SESSION).with_pending(
            own,
            &self.ledger,
            (query, Instant::now()),
        )
    }
}

fn owner(worker: u64) -> Owner {
    Owner { worker: WorkerId(worker), incarnation: Incarnation(1), rank: DpRank(0) }
}

/// A chain of `blocks` blocks, of which those after the tenth are specific to this path.
fn chain(blocks: u32, path: u32) -> PrefixChain {
    let tokens: Vec<u32> = (0..blocks).map(|block| if block < 10 { block } else { block + 1000 * path }).collect();
    PrefixChain::over_tokens(PrefixId(9), HashSeed(1), Tokens(1), &tokens)
}

fn step(session: u128, blocks: u32, path: u32) -> UncommittedStep {
    let shape =
        KvBlockSpec { format: KvFormatDigest(1), kinds: KvKinds::default(), block: Tokens(1), block_bytes: Bytes(1) };
    let origin = ChainDescriptor { tenant: TenantId::default(), model: ModelId::from("m"), root: PrefixId(9), shape };
    let (parent, replaces, ownership_transition, base) = (None, None, OwnershipTransition::Claim, PrefixId(9));
    let (session, owner, chain) = (SessionId(session), owner(1), chain(blocks, path));
    UncommittedStep { session, parent, origin, chain, replaces, owner, ownership_transition, base }
}

fn pending(steps: impl IntoIterator<Item = UncommittedStep>) -> PendingCommits {
    let mut own = PendingCommits::default();
    for step in steps {
        own.add(step, QuorumReachability::NoQuorum, Instant::now());
    }
    own
}

fn head(resolution: &SessionResolution) -> (u128, u64, u64) {
    let (head, shared) = resolution.head.map_or((0, 0), |(head, shared)| (head.blocks.0, shared.0));
    (resolution.session.0, head, shared)
}

#[test]
fn resolution_continues_from_a_pending_commit() {
    let bench = TwoWorkerLedger::new();
    let own = pending([step(1, 12, 0)]);
    let named = bench.resolve(Some(1), &chain(15, 0), &own);
    assert_eq!((head(&named), named.owner(None)), ((1, 12, 12), Some(owner(1))));
    let by_chain = bench.resolve(None, &chain(15, 0), &own);
    assert_eq!((head(&by_chain), by_chain.owner(None)), ((1, 12, 12), Some(owner(1))));
    let other = bench.resolve(Some(2), &chain(15, 0), &own);
    assert_eq!((head(&other), other.owner(None)), ((2, 0, 0), None), "another session's step");
    let nothing = bench.resolve(None, &chain(15, 0), &PendingCommits::default());
    assert_eq!(head(&nothing), (NEW_SESSION.0, 0, 0));
}

#[test]
fn the_ledger_view_wins_once_it_shows_the_step() {
    let mut bench = TwoWorkerLedger::new();
    bench.commit(&step(1, 12, 0));
    let moved = UncommittedStep {
        owner: owner(2),
        ownership_transition: OwnershipTransition::Migrate { seen: Epoch::default() },
        ..step(1, 12, 0)
    };
    let resolution = bench.resolve(Some(1), &chain(20, 0), &pending([moved.clone()]));
    assert_eq!(
        (head(&resolution), resolution.pending.is_none()),
        ((1, 12, 12), true),
        "what was made of it is the ledger's to say"
    );
    assert_eq!(resolution.owner(Some(owner(1))), Some(owner(1)));
    let newer =
        bench.resolve(Some(1), &chain(20, 0), &pending([UncommittedStep { chain: chain(16, 0), ..moved.clone() }]));
    assert_eq!((head(&newer), newer.owner(Some(owner(1)))), ((1, 16, 16), Some(owner(2))));
    bench.commit(&step(1, 18, 0));
    let older = bench.resolve(Some(1), &chain(20, 0), &pending([UncommittedStep { chain: chain(16, 0), ..moved }]));
    assert_eq!((head(&older), older.pending.is_none()), ((1, 18, 18), true), "another router went on from there");
}

#[test]
fn a_prompt_that_diverges_late_rewrites_the_step_and_early_does_not() {
    let bench = TwoWorkerLedger::new();
    let own = pending([step(1, 18, 0)]);
    let late = bench.resolve(Some(1), &chain(20, 1), &own);
    assert_eq!((head(&late), late.rewrites), ((1, 18, 10), Some(step(1, 18, 0).head().unwrap().id)));
    let early = bench.resolve(Some(1), &chain(3, 0), &own);
    assert_eq!((head(&early), early.rewrites), ((1, 18, 3), None));
    let unnamed = bench.resolve(None, &chain(20, 1), &own);
    assert_eq!(head(&unnamed), (NEW_SESSION.0, 0, 0), "only a head that the chain goes through names a session");
}

#[test]
fn borrowing_keeps_the_owner_and_claiming_takes_an_unowned_session() {
    let resolve = |ownership_transition| {
        TwoWorkerLedger::new().resolve(
            Some(1),
            &chain(15, 0),
            &pending([UncommittedStep { ownership_transition, ..step(1, 12, 0) }]),
        )
    };
    let owners = |ownership_transition| {
        [None, Some(owner(2))].map(|known| resolve(ownership_transition).owner(known).map(|owner| owner.worker.0))
    };
    assert_eq!(owners(OwnershipTransition::Unchanged), [None, Some(2)]);
    assert_eq!(owners(OwnershipTransition::Claim), [Some(1), Some(2)]);
    assert_eq!(owners(OwnershipTransition::Migrate { seen: Epoch::default() }), [Some(1), Some(1)]);
}
