//! Tests with real nodes: a voter change that stopped between its two steps is finished by the current leader.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use openraft::ChangeMembers;
use openraft::async_runtime::watch::WatchReceiver;
use tempfile::TempDir;

use crate::members::MemberRole;
use crate::{ClusterOptions, Options, OwnershipDirectory};

const PATIENCE: Duration = Duration::from_secs(60);

type VoterSets = Vec<BTreeSet<u64>>;

async fn open(folder: &TempDir, join: &[String]) -> OwnershipDirectory {
    let (listen, join) = (Some("127.0.0.1:0".into()), join.to_vec());
    let peering = ClusterOptions { listen, join, join_timeout: PATIENCE, ..ClusterOptions::default() };
    let options = Options { peering, tick: Duration::from_millis(500), ..Options::new(folder.path()) };
    OwnershipDirectory::open(options).await.unwrap()
}

/// Returns the voter sets as this node knows them; two of them during a change.
fn voter_sets(node: &OwnershipDirectory) -> VoterSets {
    let stored = node.raft().metrics().borrow_watched().committed_membership_config.clone();
    stored.membership().get_joint_config().to_vec()
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn leader(nodes: &[OwnershipDirectory]) -> Option<usize> {
    nodes.iter().position(|node| node.raft().is_leader() && !node.view().quorum().stale)
}

/// Begins a voter change and abandons it once its first step is in the log. Returns true if the second step was not
/// taken by then.
async fn abandon_voter_change(leader: &OwnershipDirectory, voters: &BTreeSet<u64>) -> bool {
    let (raft, wanted) = (leader.raft().clone(), ChangeMembers::ReplaceAllVoters(voters.clone()));
    let mut metrics = raft.metrics();
    let change = tokio::spawn(async move { raft.change_membership(wanted, true).await });
    while metrics.borrow_watched().membership_config.membership().get_joint_config().len() < 2 && !change.is_finished()
    {
        tokio::time::timeout(PATIENCE, metrics.changed()).await.unwrap().unwrap();
    }
    change.abort();
    drop(change.await);
    until("the first step", || voter_sets(leader).len() > 1 || voter_sets(leader) == [voters.clone()]).await;
    voter_sets(leader).len() > 1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unfinished_voter_change_is_finished_by_its_leader_or_the_next() {
    let folders: Vec<TempDir> = (0..5).map(|_| tempfile::tempdir().unwrap()).collect();
    let mut nodes = vec![open(&folders[0], &[]).await];
    let seed = nodes[0].members()[0].address.clone();
    for folder in &folders[1..] {
        nodes.push(open(folder, std::slice::from_ref(&seed)).await);
    }
    nodes[0].promote([nodes[1].node(), nodes[2].node()]).await.unwrap();
    let (three, five) = (BTreeSet::from([1, 2, 3]), (1..=5).collect::<BTreeSet<u64>>());
    let mut left = 0;
    for round in 0..20 {
        // In the first rounds the leader that gave up stays; in the last one it is lost.
        let goal = if round % 2 == 0 { &five } else { &three };
        until("a leader", || leader(&nodes).is_some()).await;
        let lead = leader(&nodes).unwrap();
        let is_left = abandon_voter_change(&nodes[lead], goal).await;
        left += u32::from(is_left);
        let is_last = left >= 2 && is_left && *goal == five;
        if is_last {
            nodes.remove(lead).halt().await.unwrap();
        }
        until("one set of voters", || nodes.iter().all(|node| voter_sets(node) == [goal.clone()])).await;
        if is_last {
            let members = nodes[0].members();
            assert!(members.iter().all(|member| member.role == MemberRole::Voter), "{members:?}");
            return;
        }
    }
    panic!("no change could be left half done");
}
