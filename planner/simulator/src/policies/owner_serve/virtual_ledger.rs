//! Replaces the quorum of the simulated router: the real ledger, in virtual time.
//!
//! It is written by the commands that routers send, and read as they read it. A command is applied when it is sent: a
//! router plans with its own steps before the ledger shows them, so a later log entry would change nothing that one
//! router sees.

use engine_model::runs::RunId;
use ledger::{
    ChainDescriptor, Command, KvBlockSpec, KvFormatDigest, KvKinds, LEVEL, Ledger, LedgerEntry, LocateQuery,
    MAX_CLOCK_STEP, Outcome, OwnershipTransition, PrefixPoint, PrefixRef, RegisterWorker, ReplicateReadonly, Scope,
    SetIntent, StepCommit, StepCommitOutcome, Submission, WorkerKind, WorkerSpec,
};
use planner::{Handoff, HandoffKind, HeadRelation, OwnershipEffect, Plan, SessionView};
use vocabulary::{
    Blocks, Bytes, ClientId, ClientSerial, LedgerTime, Micros, ModelId, NodeId, Owner, PrefixChain, PrefixId,
    SessionId, TenantId, Tokens,
};

use super::run_prefix_ids::RunTreePrefixIds;
use super::{FleetView, MODEL, owner, view};

/// This router's node id and client id.
const ROUTER: NodeId = NodeId(1);
const BOOT: ClientId = ClientId(1);
/// Simulated workers never expire.
const LEASE: Micros = Micros(u64::MAX);
/// Time for which other routers believe that a dispatched step is running.
const INTENT_TTL: Micros = Micros(120_000_000);
/// Time for which a read-only replica is believed without being observed again.
const REPLICA_TTL: Micros = Micros(600_000_000);
/// Most log entries written for one gap in the traffic. After a day the ledger has forgotten everything idle, so the
/// rest of a longer gap would change nothing.
const MAX_TICKS: u32 = 90_000;

/// The ledger, with this router's identifiers in it.
pub(super) struct VirtualLedger {
    ledger: Ledger,
    last_serial: u64,
    /// Virtual time that has passed in the traffic but not in the ledger.
    clock_lag: Micros,
    chains: RunTreePrefixIds,
    origin: ChainDescriptor,
    scope: Scope,
}

/// Query for a prompt.
pub(super) struct PromptQuery<'a> {
    /// Session, if the client names it.
    pub(super) client_session: Option<SessionId>,
    /// Id for the session if it is new.
    pub(super) new_session: SessionId,
    /// Whole blocks of the prompt.
    pub(super) path: &'a [RunId],
    pub(super) prompt: Tokens,
}

/// What the ledger knows of a prompt.
pub(super) struct PromptMatch {
    pub(super) session: SessionView,
    pub(super) relation: HeadRelation,
    /// Blocks that the prompt shares with the session's head.
    pub(super) shared: Blocks,
    /// Time since the session's last step.
    pub(super) idle: Option<Micros>,
    /// Whether the client named the session.
    pub(super) is_named: bool,
    parent: Option<SessionId>,
    /// Head that the step extends.
    base: PrefixId,
    replaces: Option<PrefixId>,
    chain: PrefixChain,
}

impl VirtualLedger {
    /// Creates a ledger that contains only the fleet.
    pub(super) fn new(fleet: &FleetView<'_>) -> Self {
        let block_bytes = Bytes(fleet.spec.kv_bytes * fleet.block.0);
        let shape = KvBlockSpec {
            format: KvFormatDigest::default(),
            kinds: KvKinds::default(),
            block: fleet.block,
            block_bytes,
        };
        let chains = RunTreePrefixIds::new(fleet.runs, fleet.block);
        let origin = ChainDescriptor {
            tenant: TenantId::default(),
            model: ModelId::from(MODEL),
            root: RunTreePrefixIds::ROOT,
            shape,
        };
        let (scope, ledger) = (origin.scope(), Ledger::default());
        let mut quorum = Self { ledger, last_serial: 0, clock_lag: Micros::ZERO, chains, origin, scope };
        quorum.advance_clock(super::micros(fleet.now.0));
        quorum.send(Command::OpenClient(ROUTER));
        quorum.send(Command::RaiseLevel(LEVEL));
        fleet.all().for_each(|worker| _ = quorum.send(register(worker, fleet)));
        quorum
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns what the ledger knows of a prompt at this time.
    pub(super) fn locate(&mut self, prompt: &PromptQuery<'_>, now: Micros) -> PromptMatch {
        self.advance_clock(now);
        let chain = self.chains.of(prompt.path, prompt.prompt);
        let query = LocateQuery {
            scope: self.scope,
            session: prompt.client_session,
            chain: &chain,
            shared_prefix: Blocks::ZERO,
        };
        let found = self.ledger.locate(query);
        let session_match = found.resolve_session(prompt.client_session, prompt.new_session);
        let record = self.ledger.session(session_match.session);
        let owner = record.as_ref().and_then(|session| self.ledger.session_owner(session));
        let shared = session_match.head.map_or(Blocks::ZERO, |(_, shared)| shared);
        let on_head = session_match.head.filter(|(head, shared)| head.blocks == *shared);
        PromptMatch {
            session: SessionView {
                owner,
                epoch: record.as_ref().map(|session| session.epoch).unwrap_or_default(),
                sealed: found.known_blocks(),
                replicas: found.sealed.as_ref().map_or_else(Vec::new, |sealed| sealed.holders(owner)),
                ..SessionView::new(session_match.session)
            },
            relation: session_match
                .head
                .map_or(HeadRelation::Unknown, |(head, shared)| HeadRelation::of(chain.blocks(), head.blocks, shared)),
            shared,
            idle: record.map(|session| Micros(self.ledger.now().0 - session.touched.0)),
            is_named: prompt.client_session.is_some(),
            parent: session_match.parent,
            base: on_head.map_or(chain.root, |(head, _)| head.id),
            replaces: session_match.replaced_head,
            chain,
        }
    }

    /// Announces that a step is running.
    pub(super) fn announce(&mut self, prompt_match: &PromptMatch, owner: Owner) {
        // Another router can find this session only by its name or its head.
        if prompt_match.is_named || prompt_match.idle.is_some() {
            self.intend(prompt_match, Some((owner, INTENT_TTL)));
        }
    }

    /// Seals what a step has computed, advances its session's head, and settles its ownership.
    pub(super) fn commit(&mut self, prompt_match: &PromptMatch, plan: &Plan, now: Micros) {
        self.advance_clock(now);
        let serving_owner = Owner { rank: plan.answer_leg().rank, ..owner(super::worker_index(plan.target())) };
        let known = self
            .ledger
            .deepest_boundary(self.scope, &prompt_match.chain)
            .map_or(Blocks::ZERO, |kept| kept.point.blocks);
        let transition = ownership_transition(&plan.ownership);
        let Some(command) = self.command(prompt_match, (serving_owner, transition), known) else {
            return self.intend(prompt_match, None);
        };
        let outcome = self.send(command);
        if StepCommitOutcome::of(&outcome).restart_from_root
            && let Some(command) = self.command(prompt_match, (serving_owner, transition), Blocks::ZERO)
        {
            self.send(command);
        }
        // The commit withdraws an intent on its own base.
        if prompt_match.chain.prefix(known) != Some(prompt_match.base) && prompt_match.base != prompt_match.chain.root {
            self.intend(prompt_match, None);
        }
        if let (Some(Handoff { blocks: Some(blocks), .. }), OwnershipEffect::ReadReplica | OwnershipEffect::Claim) =
            (plan.sequence.handoff(HandoffKind::Replicate), &plan.ownership)
        {
            self.record_replica(prompt_match, (serving_owner, *blocks));
        }
    }

    fn command(
        &self,
        prompt_match: &PromptMatch,
        (owner, transition): (Owner, OwnershipTransition),
        base: Blocks,
    ) -> Option<Command> {
        Command::commit_step(StepCommit {
            session: prompt_match.session.id,
            tenant: &self.origin.tenant,
            model: &self.origin.model,
            parent: prompt_match.parent,
            chain: &prompt_match.chain,
            sealed: prompt_match.chain.blocks(),
            base,
            replaced_head: prompt_match.replaces,
            owner,
            ownership: transition,
            shape: self.origin.shape,
            router: ROUTER,
        })
    }

    fn intend(&mut self, prompt_match: &PromptMatch, to: Option<(Owner, Micros)>) {
        self.send(Command::Intent(SetIntent {
            session: prompt_match.session.id,
            base: prompt_match.base,
            router: ROUTER,
            step: to,
        }));
    }

    /// Records that the worker keeps a read-only replica of the fetched prefix.
    fn record_replica(&mut self, prompt_match: &PromptMatch, (holder, blocks): (Owner, Blocks)) {
        let point = PrefixPoint::on_chain(&prompt_match.chain, blocks.min(prompt_match.session.sealed));
        let Some(point) = point.filter(|point| point.blocks > Blocks::ZERO) else { return };
        let place = PrefixRef { scope: self.scope, point, extent: None };
        self.send(Command::ReplicateReadonly(ReplicateReadonly { place, holder, ttl: REPLICA_TTL }));
    }

    fn send(&mut self, command: Command) -> Outcome {
        self.last_serial += 1;
        let submission = Submission { client: BOOT, serial: ClientSerial(self.last_serial), command };
        let mut outcomes = self.enter(vec![submission]);
        outcomes.pop().expect("one command has one outcome")
    }

    fn enter(&mut self, submissions: Vec<Submission>) -> Vec<Outcome> {
        let entry = LedgerEntry { time: self.ledger.now(), submissions };
        self.ledger.apply(self.ledger.applied() + 1, &entry)
    }

    /// Advances the ledger's clock, by at most one second per log entry.
    fn advance_clock(&mut self, now: Micros) {
        let until = LedgerTime((now - self.clock_lag).0);
        let mut ticks = 0;
        while self.ledger.now() < until && ticks < MAX_TICKS {
            let time = until.min(self.ledger.now().after(MAX_CLOCK_STEP));
            self.ledger.apply(self.ledger.applied() + 1, &LedgerEntry { time, submissions: Vec::new() });
            ticks += 1;
        }
        self.clock_lag = Micros(now.0 - self.ledger.now().0);
    }
}

/// Translates a claim to the ledger's ownership transition.
fn ownership_transition(effect: &OwnershipEffect) -> OwnershipTransition {
    match effect {
        OwnershipEffect::Keep | OwnershipEffect::Claim => OwnershipTransition::Claim,
        OwnershipEffect::ReadReplica => OwnershipTransition::Unchanged,
        OwnershipEffect::Move { epoch, .. } => OwnershipTransition::Migrate { seen: *epoch },
    }
}

fn register(worker: usize, fleet: &FleetView<'_>) -> Command {
    let (view, life) = (view(worker, fleet), owner(worker));
    let models: Vec<ModelId> = view.models.iter().cloned().collect();
    let spec = WorkerSpec {
        endpoint: view.endpoint,
        role: view.role,
        kind: WorkerKind::Engine,
        models: models.into(),
        ranks: view.ranks,
    };
    Command::RegisterWorker(RegisterWorker { worker: life.worker, incarnation: life.incarnation, spec, ttl: LEASE })
}
