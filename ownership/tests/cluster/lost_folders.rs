//! Folders that are moved or removed under a running node: what it acknowledged there would not survive a restart.

use std::fs;

use ownership::{LedgerNodeError, OwnershipDirectory};

use crate::nodes::{PATIENCE, TestCluster, open_session};

async fn await_failure(node: &OwnershipDirectory) -> LedgerNodeError {
    tokio::time::timeout(PATIENCE, node.wait_for_failure()).await.expect("it notices")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_lost_its_log_leaves_the_quorum_and_keeps_its_view() {
    let mut nodes = TestCluster::three(0).await;
    let leader = nodes.leader().await;
    nodes.node(leader).submit(open_session(1)).unwrap().await.unwrap();
    fs::remove_dir_all(nodes.folders[&leader].path().join("log")).unwrap();
    let failure = await_failure(nodes.node(leader)).await.to_string();
    for what in ["log", "--join", "member replace"] {
        assert!(failure.contains(what), "{failure}");
    }
    let lost = nodes.running.remove(&leader).unwrap();
    assert_ne!(nodes.leader().await, leader);
    nodes.any().submit(open_session(2)).unwrap().await.unwrap();
    assert!(lost.view().session(vocabulary::SessionId(1)).is_some());
    assert!(lost.view().quorum().stale && lost.view().quorum().leader.is_none());
    if let Ok(ticket) = lost.submit(open_session(3)) {
        assert!(ticket.await.is_err());
    }
    lost.halt().await.unwrap();
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_data_directory_moved_acknowledges_nothing_more() {
    let nodes = TestCluster::found().await;
    let (folder, aside) = (nodes.folders[&1].path(), tempfile::tempdir().unwrap());
    fs::rename(folder, aside.path().join("moved")).unwrap();
    let failure = await_failure(nodes.node(1)).await.to_string();
    assert!(failure.contains(folder.to_str().unwrap()), "{failure}");
    if let Ok(ticket) = nodes.node(1).submit(open_session(1)) {
        assert!(ticket.await.is_err());
    }
    nodes.node(1).halt().await.unwrap();
}
