//! An operator who changes the membership while everything else goes on.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use consensus::Levels;
use openraft::{AsyncRuntime, ChangeMembers};

use crate::disk::Ending;
use crate::node::Node;
use crate::process;
use crate::rng::Rng;
use crate::runtime::Sim;
use crate::world::World;

/// Nodes at most, those that are gone included.
const MOST: u64 = 9;
/// How long one change may take.
const PATIENCE: Duration = Duration::from_secs(8);

/// Runs a change in the leader's own process, so that it dies with it.
pub(crate) async fn at_leader<F, A>(world: &Arc<World>, act: F) -> bool
where
    F: FnOnce(Arc<Node>) -> A,
    A: Future<Output = bool> + Send + 'static,
{
    let Some(leader) = world.leader() else { return false };
    let (pid, acting) = (leader.pid, act(leader));
    let task = process::within(pid, || Sim::spawn(acting));
    matches!(Sim::timeout(PATIENCE, task).await, Ok(Ok(true)))
}

/// Puts up a node under a number that nobody had; none when there are enough.
pub(crate) async fn put_up(world: &Arc<World>, release: u32) -> Option<u64> {
    let id = world.ids().last().map_or(1, |last| last + 1);
    if id > MOST {
        return None;
    }
    world.add(id, release);
    world.start(id);
    Sim::sleep(Duration::from_millis(200)).await;
    Some(id)
}

/// Lets a node that was put up in, as a learner.
pub(crate) async fn let_in(world: &Arc<World>, id: u64) -> bool {
    let levels = Levels { lowest: 1, highest: world.release(id) };
    at_leader(world, move |leader| async move { leader.let_in(id, levels).await }).await
        && count(world, "learners joined")
}

/// Changes the voters; now and then the leader is lost in the middle of it.
async fn set_voters(world: &Arc<World>, rng: &mut Rng, voters: BTreeSet<u64>) -> bool {
    if let Some(leader) = world.leader().filter(|_| rng.chance(400)) {
        let (lost, after) = (world.clone(), rng.micros(500, 40_000));
        drop(Sim::spawn(async move {
            Sim::sleep(after).await;
            lost.book.count("leaders lost in a change");
            lost.end(leader.id, Ending::Killed);
        }));
    }
    at_leader(world, move |leader| async move { leader.raft.change_membership(voters, true).await.is_ok() }).await
}

async fn remove(world: &Arc<World>, id: u64) -> bool {
    at_leader(world, move |leader| async move {
        let gone = ChangeMembers::RemoveNodes(BTreeSet::from([id]));
        leader.raft.change_membership(gone, false).await.is_ok()
    })
    .await
}

/// The members as the leader knows them: voters, and all.
pub(crate) fn members(world: &World) -> Option<(BTreeSet<u64>, BTreeSet<u64>)> {
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
pub(crate) async fn operate(world: Arc<World>) {
    let mut rng = Rng::stream(world.plan.seed, "operator");
    loop {
        Sim::sleep(rng.millis(4_000, 20_000)).await;
        let Some((voters, all)) = members(&world) else { continue };
        let learners: Vec<u64> = all.difference(&voters).copied().collect();
        let done = match rng.below(6) {
            0 if world.ids().len() < MOST as usize => match put_up(&world, world.newest()).await {
                Some(id) => let_in(&world, id).await,
                None => false,
            },
            1 | 2 if !learners.is_empty() => swap(&world, &mut rng, (voters, learners)).await,
            3 if !learners.is_empty() => {
                let Some(id) = rng.pick(&learners).copied() else { continue };
                let gone = remove(&world, id).await && count(&world, "nodes removed");
                // Some of those that were removed are switched off, and others do not notice.
                if gone && rng.chance(500) {
                    world.end(id, Ending::Killed);
                }
                gone
            }
            _ => {
                let others: Vec<u64> = voters.into_iter().collect();
                let Some(to) = rng.pick(&others).copied() else { continue };
                at_leader(&world, move |leader| async move { leader.raft.trigger().transfer_leader(to).await.is_ok() })
                    .await
                    && count(&world, "leader transfers asked for")
            }
        };
        if !done {
            world.book.count("membership changes that failed");
        }
    }
}

/// A learner takes a voter's place, or voters become two more or two fewer: never an even number for long.
async fn swap(world: &Arc<World>, rng: &mut Rng, (voters, learners): (BTreeSet<u64>, Vec<u64>)) -> bool {
    let mut wanted = voters.clone();
    match rng.below(3) {
        0 if learners.len() >= 2 && voters.len() == 3 => wanted.extend(learners.iter().take(2)),
        1 if voters.len() == 5 => wanted = voters.iter().skip(rng.below(2) as usize).take(3).copied().collect(),
        _ => {
            let (Some(new), Some(old)) =
                (rng.pick(&learners).copied(), rng.pick(&voters.iter().copied().collect::<Vec<_>>()).copied())
            else {
                return false;
            };
            wanted.remove(&old);
            wanted.insert(new);
        }
    }
    set_voters(world, rng, wanted).await && count(world, "voters changed")
}

fn count(world: &World, what: &'static str) -> bool {
    world.book.count(what);
    true
}
