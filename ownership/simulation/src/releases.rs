//! Two releases in one quorum: nodes are upgraded one by one while everything else goes on, taken back before the level is
//! first to be raised, and raised once all can read what that brings.

use std::sync::Arc;

use consensus::{Release, check_raise};
use futures::future::join_all;
use ledger::{Command, LEVEL};
use openraft::AsyncRuntime;
use vocabulary::NodeId;

use crate::disk::Ending;
use crate::network::ask;
use crate::node::{Node, PATIENCE};
use crate::operator::{at_leader, members};
use crate::rng::Rng;
use crate::runtime::Sim;
use crate::world::World;

/// The older release's level.
pub const OLD: u32 = LEVEL - 1;

/// Swaps releases and raises the level until it is stopped.
pub async fn change(world: Arc<World>) {
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
            None if raise(&world).await => world.book.count("raises asked for"),
            None => world.book.count("raises refused"),
        }
    }
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
async fn raise(world: &Arc<World>) -> bool {
    let Some((_, all)) = members(world) else { return false };
    let asking = world.clone();
    at_leader(world, move |leader| async move {
        let release = |id: u64| {
            let (asking, from) = (asking.clone(), leader.id);
            async move {
                let levels = ask(&asking, (from, id), PATIENCE, |node: Arc<Node>| async move { node.levels }).await;
                (NodeId(id), levels.map_or(Release::Silent, Release::Reads))
            }
        };
        let members = join_all(all.into_iter().map(release)).await;
        let may = check_raise(LEVEL, members).is_ok();
        if may {
            leader.submit_own(Command::RaiseLevel(LEVEL));
        }
        may
    })
    .await
}
