//! Commands submitted at any node, across leader changes.

use std::collections::BTreeSet;

use ledger::{AdmitNode, Command, Outcome};
use vocabulary::{NodeId, SessionId};

use crate::nodes::{TestCluster, eventually, open_session};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_writes_survive_leader_loss_and_full_restart() {
    let mut nodes = TestCluster::three(1).await;
    let mut acknowledged = Vec::new();
    for round in 0..3u128 {
        let leader = nodes.leader().await;
        for n in 0..20 {
            let session = round * 100 + n;
            let ids: Vec<u64> = nodes.running.keys().copied().collect();
            let node = nodes.node(ids[n as usize % ids.len()]);
            let outcome = node.submit(open_session(session)).unwrap().await.unwrap();
            assert!(matches!(outcome, Outcome::Opened { .. }), "{outcome:?}");
            acknowledged.push(session);
        }
        nodes.kill(leader).await;
        let after = nodes.leader().await;
        assert_ne!(after, leader);
        nodes.restart_elsewhere(leader).await;
    }
    nodes.leader().await;
    nodes.assert_converged().await;
    let ids: Vec<u64> = nodes.running.keys().copied().collect();
    for id in &ids {
        nodes.kill(*id).await;
    }
    for id in &ids {
        nodes.restart(*id).await;
    }
    nodes.leader().await;
    let node = nodes.any();
    node.submit(open_session(9_999)).unwrap().await.unwrap();
    eventually("all sessions everywhere", || async {
        let all = nodes.running.values().all(|node| {
            let view = node.view();
            acknowledged.iter().all(|session| view.session(SessionId(*session)).is_some())
        });
        all.then_some(())
    })
    .await;
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_execute_exactly_once_across_leader_changes_under_load() {
    let mut nodes = TestCluster::three(1).await;
    let before = nodes.node(1).view().nodes().count();
    // Without a remembered nonce every execution assigns a new id, so a double execution would show.
    let admit = || Command::AdmitNode(AdmitNode { nonce: 0, address: "127.0.0.1:1".into() });
    let mut tickets = Vec::new();
    for round in 0..4 {
        for _ in 0..50 {
            tickets.extend(nodes.running.values().map(|node| node.submit(admit()).unwrap()));
        }
        let leader = nodes.leader().await;
        if round == 1 {
            // A closing node answers the commands that it accepted.
            let leaving = nodes.running.remove(&leader).unwrap();
            leaving.close().await.unwrap();
        } else {
            let next = *nodes.running.keys().find(|id| **id != leader && **id < 4).unwrap();
            nodes.any().transfer_leader(NodeId(next)).await.unwrap();
        }
    }
    let mut given = BTreeSet::new();
    for ticket in tickets {
        match ticket.await {
            Ok(Outcome::Admitted { node }) => assert!(given.insert(node), "{node} was given twice"),
            other => panic!("{other:?}"),
        }
    }
    nodes.assert_converged().await;
    assert_eq!(nodes.any().view().nodes().count(), before + given.len(), "no command was executed twice");
    nodes.close().await;
}
