//! Two releases in one quorum: nodes are upgraded one by one while everything else continues. Until the first raise
//! they may be rolled back; the level is raised once all nodes support it.

use std::sync::Arc;
use std::time::Duration;

use consensus::{MemberLevelSupport, check_raise};
use futures::future::{join, join_all};
use ledger::LEVEL;
use openraft::AsyncRuntime;
use vocabulary::NodeId;

use crate::disk::ProcessEnd;
use crate::operator::{add_node, admit_learner, run_at_leader};
use crate::rng::Rng;
use crate::runtime::SimulatedRuntime;
use crate::sim_network::ask;
use crate::sim_node::{RPC_TIMEOUT, SimNode};
use crate::world::{OLD_LEVEL, SimWorld};

/// How long a node of the older release asks to join during a raise.
const JOIN_TIMEOUT: Duration = Duration::from_millis(60);

/// Swaps releases and raises the level until it is stopped.
pub(crate) async fn run_upgrades(world: Arc<SimWorld>) {
    let mut rng = Rng::stream(world.plan.seed, "releases");
    loop {
        SimulatedRuntime::sleep(rng.millis(1_000, 6_000)).await;
        let old: Vec<u64> = world.ids().into_iter().filter(|id| world.release(*id) == OLD_LEVEL).collect();
        if !world.is_level_raised() && rng.chance(200) {
            // Whatever the outcome of the first attempt, no node is rolled back any more.
            world.mark_level_raised();
        }
        let swapped = match rng.pick(&old).copied().filter(|_| rng.chance(700)) {
            Some(id) => Some((id, LEVEL)),
            None if world.is_level_raised() => None,
            None => rng.pick(&world.ids()).map(|id| (*id, OLD_LEVEL)),
        };
        match swapped {
            Some((id, level)) => swap_release(&world, &mut rng, (id, level)).await,
            None => raise_while_node_joins(&world, &mut rng).await,
        }
    }
}

/// Raises the level while sometimes a node of the older release joins.
async fn raise_while_node_joins(world: &Arc<SimWorld>, rng: &mut Rng) {
    let newcomer = if rng.chance(400) { add_node(world, OLD_LEVEL).await } else { None };
    let after = rng.micros(0, 10_000);
    // A caller that gives up at once leaves the raise in progress.
    let patience = if rng.chance(500) { rng.micros(100, 6_000) } else { RPC_TIMEOUT };
    let joining = async {
        let Some(newcomer) = newcomer else { return };
        SimulatedRuntime::sleep(after).await;
        // Like a joining node, it asks until it is admitted.
        let admission = async {
            while !admit_learner(world, newcomer).await {
                SimulatedRuntime::sleep(Duration::from_micros(500)).await;
            }
        };
        let was_let_in = SimulatedRuntime::timeout(JOIN_TIMEOUT, admission).await.is_ok();
        world.recorder.count(if was_let_in { "let in beside a raise" } else { "not let in beside a raise" });
    };
    let (raised, ()) = join(raise_level(world, patience), joining).await;
    world.recorder.count(if raised { "raises done" } else { "raises refused" });
}

/// Restarts a node as another release.
async fn swap_release(world: &Arc<SimWorld>, rng: &mut Rng, (id, level): (u64, u32)) {
    world.end_process(id, ProcessEnd::Killed);
    world.set_release(id, level);
    world.recorder.count("releases swapped");
    SimulatedRuntime::sleep(rng.millis(0, 3_000)).await;
    world.start(id);
}

/// Lets the leader ask every member for its supported levels, and raise the level if all support it.
async fn raise_level(world: &Arc<SimWorld>, patience: Duration) -> bool {
    let asking = world.clone();
    run_at_leader(world, move |leader| async move {
        let Some(turn) = leader.lock_membership() else { return false };
        let Ok(members) = turn.rewrite_members(&leader.raft).await else { return false };
        let release = |id: u64| {
            let (asking, from) = (asking.clone(), leader.id);
            async move {
                let levels =
                    ask(&asking, (from, id), RPC_TIMEOUT, |node: Arc<SimNode>| async move { node.levels }).await;
                (NodeId(id), levels.map_or(MemberLevelSupport::Unreachable, MemberLevelSupport::Supports))
            }
        };
        let members = join_all(members.into_iter().map(release)).await;
        let may = check_raise(LEVEL, members).is_ok();
        may && matches!(SimulatedRuntime::timeout(patience, leader.raise_level(&turn, LEVEL)).await, Ok(true))
    })
    .await
}
