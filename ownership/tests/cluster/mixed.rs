//! Releases N and N+1 in one cluster: an upgrade node by node, and the way back until the level is raised.
//!
//! N+1 is this code where it offers the level that is being made.

use ledger::{Command, LEVEL, NEXT_LEVEL, Outcome, Refusal};
use ownership::{Directory, MemberError, Options, OwnershipError, Ticket};
use vocabulary::NodeId;

use crate::nodes::{Nodes, address, eventually, open_session, options};

fn old(_: &mut Options) {}

fn new(options: &mut Options) {
    options.max_level = Some(NEXT_LEVEL);
}

/// Writes through every node that is up; sessions are numbered on.
fn load(nodes: &Nodes, next: &mut u128) -> Vec<Ticket> {
    let mut tickets = Vec::new();
    for _ in 0..40 {
        for node in nodes.up.values() {
            *next += 1;
            tickets.push(node.submit(open_session(*next)).unwrap());
        }
    }
    tickets
}

/// Restarts a node as another release while the others write, and compares all.
async fn swap(nodes: &mut Nodes, id: u64, release: fn(&mut Options), next: &mut u128) {
    let before = load(nodes, next);
    for ticket in before {
        assert!(matches!(ticket.await, Ok(Outcome::Opened { .. })));
    }
    nodes.leader().await;
    nodes.tune = release;
    nodes.kill(id).await;
    let during = load(nodes, next);
    nodes.restart(id).await;
    let after = load(nodes, next);
    for ticket in during.into_iter().chain(after) {
        assert!(matches!(ticket.await, Ok(Outcome::Opened { .. })));
    }
    nodes.leader().await;
    nodes.converge().await;
    assert!(nodes.up.values().all(|node| node.view().session_count() as u128 == *next), "nothing is lost");
}

async fn is_behind_the_gate(nodes: &Nodes) {
    for node in nodes.up.values() {
        let refused = async || node.submit(Command::Barrier).unwrap().await.unwrap();
        let level = Outcome::Refused(Refusal::Level { needed: NEXT_LEVEL, current: LEVEL });
        // The node's first command opens its client, which is an entry.
        assert_eq!(refused().await, level);
        nodes.converge().await;
        let before = node.view().applied();
        assert_eq!(refused().await, level);
        assert_eq!(node.view().applied(), before, "what an old release cannot read never lies in the log");
    }
}

/// Raises the level once the leader has heard all members.
async fn raise(nodes: &Nodes) -> Result<(), MemberError> {
    eventually("the members to be heard", || async {
        let raised = nodes.any().raise_level(NEXT_LEVEL).await;
        let waits = matches!(raised, Err(MemberError::Silent(_) | MemberError::NoLeader));
        (!waits).then_some(raised)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_is_upgraded_node_by_node_under_load_and_goes_back_until_its_level_is_raised() {
    let (mut nodes, mut next) = (Nodes::three_with(0, old).await, 0);
    for id in [1, 2, 3] {
        is_behind_the_gate(&nodes).await;
        let refused = raise(&nodes).await.unwrap_err();
        assert!(matches!(refused, MemberError::Level { level: NEXT_LEVEL, .. }), "{refused}");
        assert!(refused.to_string().contains("upgrade every member first"), "{refused}");
        swap(&mut nodes, id, new, &mut next).await;
    }
    // All could, and nobody has raised it: there is a way back, for two of them and under load.
    is_behind_the_gate(&nodes).await;
    swap(&mut nodes, 2, old, &mut next).await;
    swap(&mut nodes, 3, old, &mut next).await;
    let refused = raise(&nodes).await.unwrap_err();
    assert!(matches!(refused, MemberError::Level { node: NodeId(2 | 3), .. }), "{refused}");
    swap(&mut nodes, 2, new, &mut next).await;
    swap(&mut nodes, 3, new, &mut next).await;
    raise(&nodes).await.unwrap();
    // A node lets the command through from when it has applied the raise.
    nodes.converge().await;
    for node in nodes.up.values() {
        assert_eq!(node.submit(Command::Barrier).unwrap().await.unwrap(), Outcome::Done);
    }
    nodes.converge().await;
    assert!(nodes.up.values().all(|node| node.view().level() == NEXT_LEVEL));
    // Now there is none: neither with what it wrote, nor as a new node.
    nodes.tune = old;
    nodes.kill(2).await;
    let refused = nodes.reopen(2).await.unwrap_err();
    assert!(matches!(refused, OwnershipError::Level { level: NEXT_LEVEL, highest: LEVEL }), "{refused}");
    assert!(refused.to_string().contains("install the newer release"), "{refused}");
    let folder = tempfile::tempdir().unwrap();
    let mut stranger = options(&folder);
    stranger.peering.join = vec![address(nodes.node(1))];
    let refused = Directory::open(stranger).await.unwrap_err();
    assert!(matches!(refused, OwnershipError::NotJoined { .. }), "{refused}");
    assert!(refused.to_string().contains("install the newer release"), "{refused}");
    nodes.tune = new;
    nodes.restart(2).await;
    nodes.leader().await;
    nodes.converge().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_and_new_releases_install_each_others_snapshots_and_lead_each_other() {
    let (mut nodes, mut next) = (Nodes::three_with(0, old).await, 0);
    swap(&mut nodes, 2, new, &mut next).await;
    for (leader, joining) in [(2, old as fn(&mut Options)), (1, new)] {
        eventually("the leader", || async { nodes.any().transfer_leader(NodeId(leader)).await.ok() }).await;
        assert_eq!(nodes.leader().await, leader);
        for ticket in load(&nodes, &mut next) {
            assert!(matches!(ticket.await, Ok(Outcome::Opened { .. })));
        }
        nodes.node(leader).snapshot().await.unwrap();
        nodes.tune = joining;
        nodes.join().await;
        is_behind_the_gate(&nodes).await;
        nodes.converge().await;
    }
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_is_down_may_come_back_as_an_older_release_so_the_level_waits_for_it() {
    let mut nodes = Nodes::three_with(0, new).await;
    // A new cluster works at its founder's highest level; nothing is raised any more.
    assert_eq!(nodes.node(1).view().level(), NEXT_LEVEL);
    let leader = nodes.leader().await;
    let lost = if leader == 3 { 2 } else { 3 };
    nodes.kill(lost).await;
    let refused =
        eventually("the leader to miss it", || async { nodes.node(leader).raise_level(NEXT_LEVEL).await.err() }).await;
    assert_eq!(refused, MemberError::Silent(NodeId(lost)));
    nodes.restart(lost).await;
    raise(&nodes).await.unwrap();
    nodes.converge().await;
    nodes.close().await;
}
