//! Commands from any node, over changes of the leader.

use ledger::Outcome;
use vocabulary::SessionId;

use crate::nodes::{Nodes, eventually, open_session};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_outlives_its_leader_and_a_restart_of_all() {
    let mut nodes = Nodes::three(1).await;
    let mut acknowledged = Vec::new();
    for round in 0..3u128 {
        let leader = nodes.leader().await;
        for n in 0..20 {
            let session = round * 100 + n;
            let ids: Vec<u64> = nodes.up.keys().copied().collect();
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
    nodes.converge().await;
    let ids: Vec<u64> = nodes.up.keys().copied().collect();
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
        let all = nodes.up.values().all(|node| {
            let view = node.view();
            acknowledged.iter().all(|session| view.session(SessionId(*session)).is_some())
        });
        all.then_some(())
    })
    .await;
    nodes.converge().await;
    nodes.close().await;
}
