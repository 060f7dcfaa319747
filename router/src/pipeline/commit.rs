//! Commit: what a step did to sessions and artifacts, told to the ledger. Never awaited by the client.

use std::sync::Arc;

use ownership::ledger::{
    Command, Custody, Outcome, Place, Point, ReplicateReadonly, SetIntent, StepCommit, StepOutcome,
};
use planner::{Claim, Handoff, Plan};
use vocabulary::{Blocks, Micros, Owner};

use super::locate::Located;
use super::plan::Classified;
use super::steering::Mode;
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
    gateway.submit(Command::Intent(intent));
}

/// Seals what the target has computed or received, moves the session's head, and settles who owns it.
pub fn commit(gateway: &Arc<Gateway>, located: &Located, plan: &Plan) {
    let Some(server) = server_of(located, plan) else { return };
    let step = Step { gateway: gateway.clone(), server, custody: custody(&plan.claim) };
    if let Some(command) = step.command(located, located.known) {
        // The answer matters only if the ledger has merged away the base that this was written on.
        let restart = (located.known > Blocks::ZERO).then(|| step.command(located, Blocks::ZERO)).flatten();
        tokio::spawn(settle(gateway.clone(), gateway.commit(command), restart));
        // The commit takes back what was announced on its own base.
        let base = Point::on(&located.prefixed.prompt.chain, located.known).map(|base| base.id);
        if base != Some(located.base) && located.base != located.prefixed.prompt.chain.root {
            withdraw(gateway, located);
        }
    } else {
        withdraw(gateway, located);
    }
    if let (Some(Handoff::Replicate { blocks, .. }), Claim::Borrow | Claim::Open) = (&plan.handoff, &plan.claim) {
        note_copy(gateway, located, (server, *blocks));
    }
}

async fn settle(
    gateway: Arc<Gateway>,
    committed: impl Future<Output = Option<Outcome>> + Send,
    restart: Option<Command>,
) {
    let Some(outcome) = committed.await else { return };
    if let (true, Some(restart)) = (StepOutcome::of(&outcome).must_restart, restart) {
        gateway.commit(restart).await;
    }
}

fn custody(claim: &Claim) -> Custody {
    match claim {
        Claim::Keep | Claim::Open => Custody::Claims,
        Claim::Borrow => Custody::Stays,
        Claim::Move { epoch, .. } => Custody::Moves { seen: *epoch },
    }
}

struct Step {
    gateway: Arc<Gateway>,
    server: Owner,
    custody: Custody,
}

impl Step {
    fn command(&self, located: &Located, base: Blocks) -> Option<Command> {
        let request = &located.prefixed.request;
        Command::commit_step(StepCommit {
            session: located.session.id,
            tenant: &request.incoming.tenant,
            model: &request.model,
            parent: located.parent,
            chain: &located.prefixed.prompt.chain,
            sealed: located.sealable(),
            base,
            replaces: located.rewrites,
            owner: self.server,
            custody: self.custody,
            shape: located.prefixed.model.shape,
            router: self.gateway.node(),
        })
    }
}

/// The target keeps a read-only copy of what was fetched.
fn note_copy(gateway: &Gateway, located: &Located, (holder, blocks): (Owner, Blocks)) {
    let chain = &located.prefixed.prompt.chain;
    let Some(point) = Point::on(chain, blocks.min(located.known)).filter(|point| point.blocks > Blocks::ZERO) else {
        return;
    };
    let scope = located.prefixed.model.scope(&located.prefixed.request.incoming.tenant);
    let place = Place { scope, point, extent: None };
    gateway.submit(Command::ReplicateReadonly(ReplicateReadonly { place, holder, ttl: REPLICA_TTL }));
}
