//! Tests of the ledger through its public interface: commands in, outcomes and reads out.

mod chains;
mod control;
mod corruption;
mod entry_changes;
mod generated_commands;
mod hash;
mod levels;
mod locate;
mod owners;
mod packed_records;
mod serials;
mod steps;
mod sweep;
mod workers;

use std::sync::Arc;

use vocabulary::{
    Blocks, Bytes, ClientId, ClientSerial, DpRank, Epoch, HashSeed, Incarnation, LedgerTime, Micros, ModelId, NodeId,
    Owner, PrefixChain, PrefixId, SessionId, TenantId, Tokens, WorkerId, WorkerRole,
};

use crate::*;

/// Lease duration in these tests.
pub(crate) const TTL: Micros = Micros(15_000_000);

const CLIENT: ClientId = ClientId(1);

/// A ledger with its log. Every entry is checked against all invariants.
pub(crate) struct LedgerFixture {
    pub(crate) ledger: Ledger,
    index: u64,
    serial: u64,
}

impl LedgerFixture {
    /// Creates an empty ledger as the release before feature levels would.
    pub(crate) fn level1(limits: LedgerLimits) -> Self {
        let mut bench =
            Self { ledger: crate::ledger::LedgerRecords { limits, ..Default::default() }.into(), index: 0, serial: 0 };
        assert_eq!(bench.run(Command::OpenClient(NodeId(1))), Outcome::Done);
        bench
    }

    /// Creates an empty ledger at the highest level.
    pub(crate) fn empty(limits: LedgerLimits) -> Self {
        let mut bench = Self::level1(limits);
        assert_eq!(bench.run(Command::RaiseLevel(LEVEL)), Outcome::Done);
        bench
    }

    /// Creates a ledger with three workers.
    pub(crate) fn new() -> Self {
        let mut bench = Self::empty(LedgerLimits::default());
        for n in 1..=3 {
            let outcome = bench.run(register(n, 1));
            assert!(matches!(outcome, Outcome::Granted { .. }), "{outcome:?}");
        }
        bench
    }

    /// Applies one entry, `after` the last one.
    pub(crate) fn entry(&mut self, after: Micros, submissions: Vec<Submission>) -> Vec<Outcome> {
        let before = self.ledger.clone();
        self.index += 1;
        let entry = LedgerEntry { time: before.now().after(after), submissions };
        let outcomes = self.ledger.apply(self.index, &entry);
        invariants::check(&self.ledger).unwrap();
        invariants::check_step(&before, &self.ledger).unwrap();
        entry_changes::check_changes(&before, &self.ledger, &self.ledger.pending_changes()).unwrap();
        outcomes
    }

    /// Runs one command.
    pub(crate) fn run(&mut self, command: Command) -> Outcome {
        self.serial += 1;
        let submission = Submission { client: CLIENT, serial: ClientSerial(self.serial), command };
        self.entry(Micros(1), vec![submission]).remove(0)
    }

    /// Advances the clock, one second per entry.
    pub(crate) fn advance_time(&mut self, time: Micros) {
        let end = self.ledger.now().after(time);
        while self.ledger.now() < end {
            self.entry(clock_step(end, self.ledger.now()), Vec::new());
        }
    }

    /// Commits a step and interprets its outcome.
    pub(crate) fn step(&mut self, step: StepCommit<'_>) -> StepCommitOutcome {
        let command = Command::commit_step(step).expect("the step sealed blocks");
        StepCommitOutcome::of(&self.run(command))
    }

    pub(crate) fn session(&self, id: SessionId) -> Session {
        self.ledger.session(id).expect("the session is open")
    }

    /// Returns the artifact of the session's newest head.
    pub(crate) fn head_artifact(&self, id: SessionId) -> Artifact {
        let head = self.session(id).head().expect("the session has a head");
        self.ledger.artifact(head.artifact).expect("heads point at extents")
    }

    /// Expires a worker's lease as the leader would.
    pub(crate) fn expire_lease(&mut self, n: u64) {
        let worker = self.ledger.worker(WorkerId(n)).expect("the worker is registered").clone();
        let WorkerLease::Held { until } = worker.lease else { panic!("no lease is held") };
        while self.ledger.now() < until {
            self.entry(MAX_CLOCK_STEP, Vec::new());
        }
        let expire = ExpireLease { worker: worker.id, epoch: worker.epoch, deadline: until };
        assert_eq!(self.run(Command::ExpireLease(expire)), Outcome::Done);
    }

    pub(crate) fn locate(&self, session: Option<SessionId>, chain: &PrefixChain) -> LocateResult {
        self.ledger.locate(LocateQuery { scope: scope(), session, chain, shared_prefix: Blocks(0) })
    }
}

fn clock_step(end: LedgerTime, now: LedgerTime) -> Micros {
    Micros((end - now).0.min(MAX_CLOCK_STEP.0))
}

pub(crate) fn owner(n: u64) -> Owner {
    Owner { worker: WorkerId(n), incarnation: Incarnation(1), rank: DpRank(0) }
}

pub(crate) fn spec(kind: WorkerKind) -> WorkerSpec {
    WorkerSpec {
        endpoint: "http://worker".into(),
        role: WorkerRole::Hybrid,
        kind,
        models: Arc::from([ModelId::from("tiny")]),
        ranks: 2,
    }
}

pub(crate) fn register(n: u64, incarnation: u64) -> Command {
    Command::RegisterWorker(RegisterWorker {
        worker: WorkerId(n),
        incarnation: Incarnation(incarnation),
        spec: spec(WorkerKind::Engine),
        ttl: TTL,
    })
}

pub(crate) fn tenant() -> TenantId {
    TenantId::default()
}

pub(crate) fn shape() -> KvBlockSpec {
    KvBlockSpec { format: KvFormatDigest(0), kinds: KvKinds::default(), block: Tokens(1), block_bytes: Bytes(100) }
}

pub(crate) fn scope() -> Scope {
    Scope::of(&tenant(), KvFormatDigest(0))
}

/// Builds a chain of one-token blocks from letters and their block counts: `[('a', 10), ('b', 5)]`.
pub(crate) fn chain(parts: &[(char, u64)]) -> PrefixChain {
    let tokens = parts.iter().flat_map(|(letter, n)| (0..*n as u32).map(|i| (*letter as u32) << 16 | i));
    PrefixChain::over_tokens(PrefixId(9), HashSeed(1), Tokens(1), &tokens.collect::<Vec<_>>())
}

/// Returns a reference to a prefix of the chain.
pub(crate) fn prefix_ref(chain: &PrefixChain, blocks: u64) -> PrefixRef {
    PrefixRef {
        scope: scope(),
        point: PrefixPoint::on_chain(chain, Blocks(blocks)).expect("on the chain"),
        extent: None,
    }
}

pub(crate) fn session(n: u128) -> SessionId {
    SessionId(n)
}

/// Returns a step of session `id` at worker `n` that knew `base` blocks and sealed the whole chain.
pub(crate) fn step(id: u128, chain: &PrefixChain, base: u64, n: u64) -> StepCommit<'_> {
    static TENANT: std::sync::LazyLock<TenantId> = std::sync::LazyLock::new(tenant);
    static MODEL: std::sync::LazyLock<ModelId> = std::sync::LazyLock::new(|| ModelId::from("tiny"));
    StepCommit {
        session: session(id),
        tenant: &TENANT,
        model: &MODEL,
        parent: None,
        chain,
        sealed: chain.blocks(),
        base: Blocks(base),
        replaced_head: None,
        owner: owner(n),
        ownership: OwnershipTransition::Claim,
        shape: shape(),
        router: NodeId(1),
    }
}

pub(crate) fn epoch_of(outcome: &Outcome) -> Epoch {
    match outcome {
        Outcome::Granted { epoch } | Outcome::Opened { epoch } | Outcome::Sealed { epoch, .. } => *epoch,
        other => panic!("{other:?} grants nothing"),
    }
}
