//! Commit: what a step did to sessions and artifacts, told to the ledger. Never awaited by the client.

use std::future::ready;
use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use ownership::ledger::{Command, Custody, Origin, Place, Point, ReplicateReadonly, SetIntent, StepOutcome};
use planner::{Claim, Handoff, Plan};
use vocabulary::{Blocks, Chain, Micros, Owner};

use super::locate::Located;
use super::plan::Classified;
use super::steering::Mode;
use crate::exchange::unapplied::{Finished, Told};
use crate::gateway::Gateway;

/// How long other routers believe that a dispatched step is on its way.
const INTENT_TTL: Micros = Micros(120_000_000);
/// How long a read-only copy is believed without being seen again.
const REPLICA_TTL: Micros = Micros(600_000_000);

/// The life of the plan's target that serves the step; none when it left the fleet meanwhile.
pub fn server_of(located: &Located, plan: &Plan) -> Option<Owner> {
    let worker = located.workers.iter().find(|worker| worker.id == plan.target())?;
    Some(Owner { worker: worker.id, incarnation: worker.incarnation, rank: plan.decode.rank })
}

/// Says at dispatch that the step is on its way. Advice to the other routers; it owns nothing.
pub fn announce(gateway: &Gateway, step: &Classified, plan: &Plan) {
    if step.mode == Mode::Sticky {
        return;
    }
    let Some(server) = server_of(&step.located, plan) else { return };
    submit_intent(gateway, &step.located, Some((server, INTENT_TTL)));
}

/// Takes the announcement back: the step came to nothing.
pub fn withdraw(gateway: &Gateway, located: &Located) {
    submit_intent(gateway, located, None);
}

fn submit_intent(gateway: &Gateway, located: &Located, step: Option<(Owner, Micros)>) {
    // Another router can meet this session only by its name or by its head; one that was made up just now has neither.
    if located.prefixed.named.is_none() && located.idle.is_none() {
        return;
    }
    let intent = SetIntent { session: located.session.id, base: located.base, router: gateway.node(), step };
    gateway.submit_advice(Command::Intent(intent));
}

/// Seals what the target has computed or received, moves the session's head, and settles who owns it.
pub fn commit(gateway: &Arc<Gateway>, located: &Located, plan: &Plan) {
    let Some(server) = server_of(located, plan) else { return };
    if located.sealable() > Blocks::ZERO {
        take(gateway, finished(located, plan, server));
    } else {
        withdraw(gateway, located);
    }
    if let (Some(Handoff::Replicate { blocks, .. }), Claim::Borrow | Claim::Open) = (&plan.handoff, &plan.claim) {
        note_copy(gateway, located, (server, *blocks));
    }
}

fn finished(located: &Located, plan: &Plan, server: Owner) -> Finished {
    let (request, chain) = (&located.prefixed.request, &located.prefixed.prompt.chain);
    let sealed = chain.ids.iter().take(usize::try_from(located.sealable().0).unwrap_or(usize::MAX));
    Finished {
        session: located.session.id,
        parent: located.parent,
        origin: Origin {
            tenant: request.incoming.tenant.clone(),
            model: request.model.clone(),
            root: chain.root,
            shape: located.prefixed.model.shape,
        },
        chain: Chain { ids: sealed.copied().collect(), ..*chain },
        replaces: located.rewrites,
        owner: server,
        custody: custody(&plan.claim),
        base: located.base,
    }
}

/// Remembers the step until the ledger shows it, and tells the ledger now if nothing of its session is on its way.
fn take(gateway: &Arc<Gateway>, step: Finished) {
    let taken = gateway.unapplied().take(step, gateway.reach(), Instant::now());
    if let Some(replaced) = taken.replaced {
        withdraw_announced(gateway, &replaced);
    }
    for step in taken.branch.into_iter().chain(taken.send) {
        tell(gateway, step);
    }
}

/// Tells the ledger of a step, then of the one that waited behind it, and so on. The first one is handed in before this
/// returns, so that commands stay in order.
pub fn tell(gateway: &Arc<Gateway>, step: Arc<Finished>) {
    let mut told = handed_in(gateway, &step);
    let (gateway, mut step) = (gateway.clone(), step);
    tokio::spawn(async move {
        loop {
            let answer = told.await;
            let next = gateway.unapplied().told(&step, answer, gateway.reach());
            let Some(next) = next else { return };
            step = next;
            told = handed_in(&gateway, &step);
        }
    });
}

/// Hands the step in, on top of what the view shows of its chain.
fn handed_in(gateway: &Arc<Gateway>, step: &Arc<Finished>) -> BoxFuture<'static, Told> {
    let view = gateway.directory().view();
    let known = view.deepest(step.scope(), &step.chain).map_or(Blocks::ZERO, |kept| kept.at.blocks);
    let command = |base| step.command(base, gateway.node());
    let Some(command_now) = command(known) else { return ready(Told::Answered).boxed() };
    let sent = gateway.commit(command_now);
    // The answer matters only if the ledger has merged away the base that this was written on.
    let restart = (known > Blocks::ZERO).then(|| command(Blocks::ZERO)).flatten();
    // The commit takes back what was announced on its own base.
    let base = Point::on(&step.chain, known).map(|base| base.id);
    if base != Some(step.base) && step.base != step.chain.root {
        withdraw_announced(gateway, step);
    }
    let gateway = gateway.clone();
    async move {
        let outcome = match (sent.await, restart) {
            (Some(outcome), Some(restart)) if StepOutcome::of(&outcome).must_restart => gateway.commit(restart).await,
            (outcome, _) => outcome,
        };
        if outcome.is_some() { Told::Answered } else { Told::Unknown }
    }
    .boxed()
}

fn withdraw_announced(gateway: &Gateway, step: &Finished) {
    let intent = SetIntent { session: step.session, base: step.base, router: gateway.node(), step: None };
    gateway.submit_advice(Command::Intent(intent));
}

fn custody(claim: &Claim) -> Custody {
    match claim {
        Claim::Keep | Claim::Open => Custody::Claims,
        Claim::Borrow => Custody::Stays,
        Claim::Move { epoch, .. } => Custody::Moves { seen: *epoch },
    }
}

/// The target keeps a read-only copy of what was fetched.
fn note_copy(gateway: &Gateway, located: &Located, (holder, blocks): (Owner, Blocks)) {
    let chain = &located.prefixed.prompt.chain;
    let Some(point) = Point::on(chain, blocks.min(located.grounds.known)).filter(|point| point.blocks > Blocks::ZERO)
    else {
        return;
    };
    let scope = located.prefixed.model.scope(&located.prefixed.request.incoming.tenant);
    let place = Place { scope, point, extent: None };
    gateway.submit_advice(Command::ReplicateReadonly(ReplicateReadonly { place, holder, ttl: REPLICA_TTL }));
}
