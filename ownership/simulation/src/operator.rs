//! Simulated operator who changes the membership during everything else.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use consensus::SupportedLevels;
use openraft::{AsyncRuntime, ChangeMembers};

use crate::disk::ProcessEnd;
use crate::process;
use crate::rng::Rng;
use crate::runtime::SimulatedRuntime;
use crate::sim_node::SimNode;
use crate::world::SimWorld;

/// Maximum number of nodes, including removed ones.
const MAX_NODES: u64 = 9;
/// Timeout of one change.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(8);

/// Runs a change in the leader's process, so that it dies with it.
pub(crate) async fn run_at_leader<F, A>(world: &Arc<SimWorld>, act: F) -> bool
where
    F: FnOnce(Arc<SimNode>) -> A,
    A: Future<Output = bool> + Send + 'static,
{
    let Some(leader) = world.leader() else { return false };
    let (pid, acting) = (leader.pid, act(leader));
    let task = process::run_in(pid, || SimulatedRuntime::spawn(acting));
    matches!(SimulatedRuntime::timeout(CHANGE_TIMEOUT, task).await, Ok(Ok(true)))
}

/// Starts a node with an unused id and returns the id; `None` if there are enough nodes.
pub(crate) async fn add_node(world: &Arc<SimWorld>, release: u32) -> Option<u64> {
    let id = world.ids().last().map_or(1, |last| last + 1);
    if id > MAX_NODES {
        return None;
    }
    world.add(id, release);
    world.start(id);
    SimulatedRuntime::sleep(Duration::from_millis(200)).await;
    Some(id)
}

/// Adds a started node to the cluster as a learner.
pub(crate) async fn admit_learner(world: &Arc<SimWorld>, id: u64) -> bool {
    let levels = SupportedLevels { lowest: 1, highest: world.release(id) };
    run_at_leader(world, move |leader| async move { leader.add_learner(id, levels).await }).await
        && count(world, "learners joined")
}

/// Changes the voters; sometimes the leader is lost during the change.
async fn set_voters(world: &Arc<SimWorld>, rng: &mut Rng, voters: BTreeSet<u64>) -> bool {
    if let Some(leader) = world.leader().filter(|_| rng.chance(400)) {
        let (lost, after) = (world.clone(), rng.micros(500, 40_000));
        drop(SimulatedRuntime::spawn(async move {
            SimulatedRuntime::sleep(after).await;
            lost.recorder.count("leaders lost in a change");
            lost.end_process(leader.id, ProcessEnd::Killed);
        }));
    }
    run_at_leader(world, move |leader| async move { leader.raft.change_membership(voters, true).await.is_ok() }).await
}

async fn remove(world: &Arc<SimWorld>, id: u64) -> bool {
    run_at_leader(world, move |leader| async move {
        let removal = ChangeMembers::RemoveNodes(BTreeSet::from([id]));
        leader.raft.change_membership(removal, false).await.is_ok()
    })
    .await
}

/// Returns the members as the leader knows them: voters, and all.
pub(crate) fn members(world: &SimWorld) -> Option<(BTreeSet<u64>, BTreeSet<u64>)> {
    use openraft::async_runtime::watch::WatchReceiver;
    let leader = world.leader()?;
    let metrics = leader.raft.metrics();
    let stored = metrics.borrow_watched().membership_config.clone();
    let membership = stored.membership();
    let voters: BTreeSet<u64> = membership.voter_ids().collect();
    let learners: BTreeSet<u64> = membership.learner_ids().collect();
    let all = voters.union(&learners).copied().collect();
    Some((voters, all))
}

/// Makes changes until it is stopped.
pub(crate) async fn run_operator(world: Arc<SimWorld>) {
    let mut rng = Rng::stream(world.plan.seed, "operator");
    loop {
        SimulatedRuntime::sleep(rng.millis(4_000, 20_000)).await;
        let Some((voters, all)) = members(&world) else { continue };
        let learners: Vec<u64> = all.difference(&voters).copied().collect();
        let done = match rng.below(6) {
            0 if world.ids().len() < MAX_NODES as usize => match add_node(&world, world.newest_level()).await {
                Some(id) => admit_learner(&world, id).await,
                None => false,
            },
            1 | 2 if !learners.is_empty() => swap_voters(&world, &mut rng, (voters, learners)).await,
            3 if !learners.is_empty() => {
                let Some(id) = rng.pick(&learners).copied() else { continue };
                let is_removed = remove(&world, id).await && count(&world, "nodes removed");
                // Some removed nodes are switched off, others keep running.
                if is_removed && rng.chance(500) {
                    world.end_process(id, ProcessEnd::Killed);
                }
                is_removed
            }
            _ => {
                let others: Vec<u64> = voters.into_iter().collect();
                let Some(to) = rng.pick(&others).copied() else { continue };
                run_at_leader(
                    &world,
                    move |leader| async move { leader.raft.trigger().transfer_leader(to).await.is_ok() },
                )
                .await
                    && count(&world, "leader transfers asked for")
            }
        };
        if !done {
            world.recorder.count("membership changes that failed");
        }
    }
}

/// Replaces a voter by a learner, or adds or removes two voters, so that their number is never even for long.
async fn swap_voters(world: &Arc<SimWorld>, rng: &mut Rng, (voters, learners): (BTreeSet<u64>, Vec<u64>)) -> bool {
    let mut next_voters = voters.clone();
    match rng.below(3) {
        0 if learners.len() >= 2 && voters.len() == 3 => next_voters.extend(learners.iter().take(2)),
        1 if voters.len() == 5 => next_voters = voters.iter().skip(rng.below(2) as usize).take(3).copied().collect(),
        _ => {
            let (Some(new), Some(old)) =
                (rng.pick(&learners).copied(), rng.pick(&voters.iter().copied().collect::<Vec<_>>()).copied())
            else {
                return false;
            };
            next_voters.remove(&old);
            next_voters.insert(new);
        }
    }
    set_voters(world, rng, next_voters).await && count(world, "voters changed")
}

fn count(world: &SimWorld, what: &'static str) -> bool {
    world.recorder.count(what);
    true
}
