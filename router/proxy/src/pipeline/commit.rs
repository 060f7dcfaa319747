//! Commit: reports to the ledger what a step did to sessions and artifacts. The client never waits for it.

use std::sync::Arc;
use std::time::Instant;

use ownership::ledger::{
    ChainDescriptor, Command, Outcome, OwnershipTransition, PrefixPoint, PrefixRef, ReplicateReadonly, SetIntent,
    StepCommitOutcome,
};
use planner::{Handoff, HandoffKind, OwnershipEffect, Plan};
use vocabulary::{Blocks, Micros, Owner, PrefixChain};

use crate::ledger_access::LedgerAccess;
use crate::peer_exchange::pending_commits::{SubmissionOutcome, UncommittedStep};
use crate::request_states::{ClassifiedStep, LocatedRequest, serving_owner};
use vocabulary::RoutingMode;

/// How long other routers count a dispatched step as in flight.
const INTENT_TTL: Micros = Micros(120_000_000);
/// How long a read-only replica is assumed to exist without being observed again.
const REPLICA_TTL: Micros = Micros(600_000_000);

/// Publishes the step's intent at dispatch. It is advice to the other routers and changes no ownership.
pub fn announce(ledger: &LedgerAccess, step: &ClassifiedStep, plan: &Plan) {
    if step.mode == RoutingMode::Bypass {
        return;
    }
    let Some(owner) = serving_owner(&step.located, plan) else { return };
    submit_intent(ledger, &step.located, Some((owner, INTENT_TTL)));
}

/// Withdraws the intent of a step that produced nothing.
pub fn withdraw(ledger: &LedgerAccess, located: &LocatedRequest) {
    submit_intent(ledger, located, None);
}

fn submit_intent(ledger: &LedgerAccess, located: &LocatedRequest, step: Option<(Owner, Micros)>) {
    // Other routers can match this session only by its name or its head; a newly created session has neither.
    if located.identified.named_session.is_none() && located.idle.is_none() {
        return;
    }
    let intent = SetIntent { session: located.session.id, base: located.base, router: ledger.node_id(), step };
    ledger.submit_advice(Command::Intent(intent));
}

/// Seals the blocks that the target computed or received, moves the session's head, and settles its ownership.
pub fn commit(ledger: &LedgerAccess, located: &LocatedRequest, plan: &Plan) {
    let Some(owner) = serving_owner(located, plan) else { return };
    if located.sealable_blocks() > Blocks::ZERO {
        enqueue_commit(ledger, finished_step(located, plan, owner));
    } else {
        withdraw(ledger, located);
    }
    if let (Some(Handoff { blocks: Some(blocks), .. }), OwnershipEffect::ReadReplica | OwnershipEffect::Claim) =
        (plan.sequence.handoff(HandoffKind::Replicate), &plan.ownership)
    {
        record_replica(ledger, located, (owner, *blocks));
    }
}

fn finished_step(located: &LocatedRequest, plan: &Plan, owner: Owner) -> UncommittedStep {
    let (request, chain) = (&located.identified.request, &located.identified.prompt.chain);
    let sealed = chain.ids.iter().take(usize::try_from(located.sealable_blocks().0).unwrap_or(usize::MAX));
    UncommittedStep {
        session: located.session.id,
        parent: located.parent,
        origin: ChainDescriptor {
            tenant: request.incoming.tenant.clone(),
            model: request.model.clone(),
            root: chain.root,
            shape: located.identified.model.shape,
        },
        chain: PrefixChain { ids: sealed.copied().collect(), ..*chain },
        replaces: located.rewrites,
        owner,
        ownership_transition: ownership_transition(&plan.ownership),
        base: located.base,
    }
}

/// Stores the step until the ledger shows it, and submits it now if no other commit of its session is in flight.
fn enqueue_commit(ledger: &LedgerAccess, step: UncommittedStep) {
    let actions = ledger.pending_commits().add(step, ledger.ledger_reach(), Instant::now());
    if let Some(replaced) = actions.replaced {
        withdraw_intent(ledger, &replaced);
    }
    for step in actions.branch.into_iter().chain(actions.send) {
        submit_commits(ledger, step);
    }
}

/// Submits a step to the ledger, on top of what the ledger view shows of its chain; once that is answered, the step
/// queued behind it. The first is submitted before this returns, so that the commands of a session stay in order.
pub fn submit_commits(ledger: &LedgerAccess, step: Arc<UncommittedStep>) {
    let view = ledger.directory().view();
    let known = view.deepest_boundary(step.scope(), &step.chain).map_or(Blocks::ZERO, |kept| kept.point.blocks);
    let command = |base| step.command(base, ledger.node_id());
    let Some(command_now) = command(known) else { return complete(ledger, &step, SubmissionOutcome::Answered) };
    // The answer matters only if the ledger has merged away the base that this command was written on.
    let restart = (known > Blocks::ZERO).then(|| command(Blocks::ZERO)).flatten();
    let (after, submitted) = (ledger.clone(), step.clone());
    ledger.commit(command_now, move |outcome| match (outcome, restart) {
        (Some(outcome), Some(restart)) if StepCommitOutcome::of(&outcome).restart_from_root => {
            let again = after.clone();
            after.commit(restart, move |outcome| complete(&again, &submitted, answered(&outcome)));
        }
        (outcome, _) => complete(&after, &submitted, answered(&outcome)),
    });
    // The commit itself withdraws an intent on its own base; an intent on another base is withdrawn here.
    let base = PrefixPoint::on_chain(&step.chain, known).map(|base| base.id);
    if base != Some(step.base) && step.base != step.chain.root {
        withdraw_intent(ledger, &step);
    }
}

fn answered(outcome: &Option<Outcome>) -> SubmissionOutcome {
    if outcome.is_some() { SubmissionOutcome::Answered } else { SubmissionOutcome::Unknown }
}

/// Records that a step was answered, and submits the one queued behind it.
fn complete(ledger: &LedgerAccess, step: &Arc<UncommittedStep>, outcome: SubmissionOutcome) {
    let next = ledger.pending_commits().complete(step, outcome, ledger.ledger_reach());
    if let Some(next) = next {
        submit_commits(ledger, next);
    }
}

fn withdraw_intent(ledger: &LedgerAccess, step: &UncommittedStep) {
    let intent = SetIntent { session: step.session, base: step.base, router: ledger.node_id(), step: None };
    ledger.submit_advice(Command::Intent(intent));
}

fn ownership_transition(effect: &OwnershipEffect) -> OwnershipTransition {
    match effect {
        OwnershipEffect::Keep | OwnershipEffect::Claim => OwnershipTransition::Claim,
        OwnershipEffect::ReadReplica => OwnershipTransition::Unchanged,
        OwnershipEffect::Move { epoch, .. } => OwnershipTransition::Migrate { seen: *epoch },
    }
}

/// Records that the target keeps a read-only replica of what was fetched.
fn record_replica(ledger: &LedgerAccess, located: &LocatedRequest, (holder, blocks): (Owner, Blocks)) {
    let chain = &located.identified.prompt.chain;
    let Some(point) =
        PrefixPoint::on_chain(chain, blocks.min(located.evidence.known)).filter(|point| point.blocks > Blocks::ZERO)
    else {
        return;
    };
    let scope = located.identified.model.scope(&located.identified.request.incoming.tenant);
    let place = PrefixRef { scope, point, extent: None };
    ledger.submit_advice(Command::ReplicateReadonly(ReplicateReadonly { place, holder, ttl: REPLICA_TTL }));
}
