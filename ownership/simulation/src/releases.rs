//! Two releases in one quorum: nodes are upgraded one by one while everything else goes on, taken back before the level is
//! first to be raised, and raised once all can read what that brings.

use std::sync::Arc;
use std::time::Duration;

use consensus::{Release, check_raise};
use futures::future::{join, join_all};
use ledger::LEVEL;
use openraft::AsyncRuntime;
use vocabulary::NodeId;

use crate::disk::Ending;
use crate::network::ask;
use crate::node::{Node, PATIENCE};
use crate::operator::{at_leader, let_in, put_up};
use crate::rng::Rng;
use crate::runtime::Sim;
use crate::world::World;

pub(crate) const OLD: u32 = LEVEL - 1;

/// How long a node of the older release asks to be let in beside a raise.
const ASKS_FOR: Duration = Duration::from_millis(60);

/// Swaps releases and raises the level until it is stopped.
pub(crate) async fn change(world: Arc<World>) {
    let mut rng = Rng::stream(world.plan.seed, "releases");
    loop {
        Sim::sleep(rng.millis(1_000, 6_000)).await;
        let old: Vec<u64> = world.ids().into_iter().filter(|id| world.release(*id) == OLD).collect();
        if !world.is_raised() && rng.chance(200) {
            // Whatever becomes of the first attempt, nobody goes back any more.
            world.raise();
        }
        let swapped = match rng.pick(&old).copied().filter(|_| rng.chance(700)) {
            Some(id) => Some((id, LEVEL)),
            None if world.is_raised() => None,
            None => rng.pick(&world.ids()).map(|id| (*id, OLD)),
        };
        match swapped {
            Some((id, level)) => swap(&world, &mut rng, (id, level)).await,
            None => raise_beside_a_newcomer(&world, &mut rng).await,
        }
    }
}

/// Raises the level, while somebody now and then lets a node of the older release in.
async fn raise_beside_a_newcomer(world: &Arc<World>, rng: &mut Rng) {
    let newcomer = if rng.chance(400) { put_up(world, OLD).await } else { None };
    let after = rng.micros(0, 10_000);
    // Who gives up at once leaves the raise on its way.
    let patience = if rng.chance(500) { rng.micros(100, 6_000) } else { PATIENCE };
    let joining = async {
        let Some(newcomer) = newcomer else { return };
        Sim::sleep(after).await;
        // As a node that joins does, it asks until it is let in.
        let asks = async {
            while !let_in(world, newcomer).await {
                Sim::sleep(Duration::from_micros(500)).await;
            }
        };
        let was_let_in = Sim::timeout(ASKS_FOR, asks).await.is_ok();
        world.book.count(if was_let_in { "let in beside a raise" } else { "not let in beside a raise" });
    };
    let (raised, ()) = join(raise(world, patience), joining).await;
    world.book.count(if raised { "raises done" } else { "raises refused" });
}

/// Restarts a node as another release.
async fn swap(world: &Arc<World>, rng: &mut Rng, (id, level): (u64, u32)) {
    world.end(id, Ending::Killed);
    world.set_release(id, level);
    world.book.count("releases swapped");
    Sim::sleep(rng.millis(0, 3_000)).await;
    world.start(id);
}

/// Lets the leader ask every member what it can read, and raise the level when all can.
async fn raise(world: &Arc<World>, patience: Duration) -> bool {
    let asking = world.clone();
    at_leader(world, move |leader| async move {
        let Some(turn) = leader.turn() else { return false };
        let Ok(members) = turn.settle_members(&leader.raft).await else { return false };
        let release = |id: u64| {
            let (asking, from) = (asking.clone(), leader.id);
            async move {
                let levels = ask(&asking, (from, id), PATIENCE, |node: Arc<Node>| async move { node.levels }).await;
                (NodeId(id), levels.map_or(Release::Silent, Release::Reads))
            }
        };
        let members = join_all(members.into_iter().map(release)).await;
        let may = check_raise(LEVEL, members).is_ok();
        may && matches!(Sim::timeout(patience, leader.raise(&turn, LEVEL)).await, Ok(true))
    })
    .await
}
