//! Releases N and N+1 in one cluster: upgrade node by node, and rollback until the level is raised.
//!
//! N+1 is this code with the feature level under development enabled.

use ledger::{Command, LEVEL, NEXT_LEVEL, Outcome, Refusal};
use ownership::{CommandTicket, LedgerNodeError, MemberError, Options, OwnershipDirectory};
use vocabulary::NodeId;

use crate::nodes::{TestCluster, address, eventually, open_session, options};

fn old_release(_: &mut Options) {}

fn new_release(options: &mut Options) {
    options.max_level = Some(NEXT_LEVEL);
}

/// Submits writes through every running node; `next` numbers the sessions.
fn submit_load(nodes: &TestCluster, next: &mut u128) -> Vec<CommandTicket> {
    let mut tickets = Vec::new();
    for _ in 0..40 {
        for node in nodes.running.values() {
            *next += 1;
            tickets.push(node.submit(open_session(*next)).unwrap());
        }
    }
    tickets
}

/// Restarts a node as another release while the others write, and compares all nodes.
async fn swap_release(nodes: &mut TestCluster, id: u64, release: fn(&mut Options), next: &mut u128) {
    let before = submit_load(nodes, next);
    for ticket in before {
        assert!(matches!(ticket.await, Ok(Outcome::Opened { .. })));
    }
    nodes.leader().await;
    nodes.adjust_options = release;
    nodes.kill(id).await;
    let during = submit_load(nodes, next);
    nodes.restart(id).await;
    let after = submit_load(nodes, next);
    for ticket in during.into_iter().chain(after) {
        assert!(matches!(ticket.await, Ok(Outcome::Opened { .. })));
    }
    nodes.leader().await;
    nodes.assert_converged().await;
    assert!(nodes.running.values().all(|node| node.view().session_count() as u128 == *next), "nothing is lost");
}

async fn assert_level_gated(nodes: &TestCluster) {
    for node in nodes.running.values() {
        let refused = async || node.submit(Command::Barrier).unwrap().await.unwrap();
        let level = Outcome::Refused(Refusal::FeatureLevelTooLow { needed: NEXT_LEVEL, current: LEVEL });
        // The node's first command opens its client, which is an entry.
        assert_eq!(refused().await, level);
        nodes.assert_converged().await;
        let before = node.view().applied();
        assert_eq!(refused().await, level);
        assert_eq!(node.view().applied(), before, "what an old release cannot read never lies in the log");
    }
}

/// Raises the level once the leader has heard from all members.
async fn raise_level(nodes: &TestCluster) -> Result<(), MemberError> {
    eventually("the members to be heard", || async {
        let raised = nodes.any().raise_level(NEXT_LEVEL).await;
        let waits = matches!(raised, Err(MemberError::Unreachable(_) | MemberError::NoLeader));
        (!waits).then_some(raised)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_upgrade_under_load_can_be_reverted_until_the_level_rises() {
    let (mut nodes, mut next) = (TestCluster::three_with(0, old_release).await, 0);
    for id in [1, 2, 3] {
        assert_level_gated(&nodes).await;
        let error = raise_level(&nodes).await.unwrap_err();
        assert!(matches!(error, MemberError::FeatureLevel { level: NEXT_LEVEL, .. }), "{error}");
        assert!(error.to_string().contains("upgrade every member first"), "{error}");
        swap_release(&mut nodes, id, new_release, &mut next).await;
    }
    // All support the level and nobody has raised it, so two of them can still be rolled back under load.
    assert_level_gated(&nodes).await;
    swap_release(&mut nodes, 2, old_release, &mut next).await;
    swap_release(&mut nodes, 3, old_release, &mut next).await;
    let refused = raise_level(&nodes).await.unwrap_err();
    assert!(matches!(refused, MemberError::FeatureLevel { node: NodeId(2 | 3), .. }), "{refused}");
    swap_release(&mut nodes, 2, new_release, &mut next).await;
    swap_release(&mut nodes, 3, new_release, &mut next).await;
    raise_level(&nodes).await.unwrap();
    // A node accepts the command once it has applied the raise.
    nodes.assert_converged().await;
    for node in nodes.running.values() {
        assert_eq!(node.submit(Command::Barrier).unwrap().await.unwrap(), Outcome::Done);
    }
    nodes.assert_converged().await;
    assert!(nodes.running.values().all(|node| node.view().level() == NEXT_LEVEL));
    // Now the old release can no longer start, neither on its old folder nor as a new node.
    nodes.adjust_options = old_release;
    nodes.kill(2).await;
    let refused = nodes.reopen(2).await.unwrap_err();
    assert!(matches!(refused, LedgerNodeError::Level { level: NEXT_LEVEL, highest: LEVEL }), "{refused}");
    assert!(refused.to_string().contains("install the newer release"), "{refused}");
    let folder = tempfile::tempdir().unwrap();
    let mut stranger = options(&folder);
    stranger.peering.join = vec![address(nodes.node(1))];
    let refused = OwnershipDirectory::open(stranger).await.unwrap_err();
    assert!(matches!(refused, LedgerNodeError::NotJoined { .. }), "{refused}");
    assert!(refused.to_string().contains("install the newer release"), "{refused}");
    nodes.adjust_options = new_release;
    nodes.restart(2).await;
    nodes.leader().await;
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_and_new_releases_exchange_snapshots_and_leadership() {
    let (mut nodes, mut next) = (TestCluster::three_with(0, old_release).await, 0);
    swap_release(&mut nodes, 2, new_release, &mut next).await;
    for (leader, joining) in [(2, old_release as fn(&mut Options)), (1, new_release)] {
        eventually("the leader", || async { nodes.any().transfer_leader(NodeId(leader)).await.ok() }).await;
        assert_eq!(nodes.leader().await, leader);
        for ticket in submit_load(&nodes, &mut next) {
            assert!(matches!(ticket.await, Ok(Outcome::Opened { .. })));
        }
        nodes.node(leader).write_snapshot().await.unwrap();
        nodes.adjust_options = joining;
        nodes.join().await;
        assert_level_gated(&nodes).await;
        nodes.assert_converged().await;
    }
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_level_waits_for_a_member_that_is_down() {
    let mut nodes = TestCluster::three_with(0, new_release).await;
    // A new cluster starts at its founder's highest level, without a raise.
    assert_eq!(nodes.node(1).view().level(), NEXT_LEVEL);
    let leader = nodes.leader().await;
    let lost = if leader == 3 { 2 } else { 3 };
    nodes.kill(lost).await;
    let refused =
        eventually("the leader to miss it", || async { nodes.node(leader).raise_level(NEXT_LEVEL).await.err() }).await;
    assert_eq!(refused, MemberError::Unreachable(NodeId(lost)));
    nodes.restart(lost).await;
    raise_level(&nodes).await.unwrap();
    nodes.assert_converged().await;
    nodes.close().await;
}
