//! Folders that are moved or removed from under a node that runs: what it acknowledged there would not survive it.

use std::fs;

use ownership::{Directory, OwnershipError};

use crate::nodes::{Nodes, PATIENCE, open_session};

async fn failure(node: &Directory) -> OwnershipError {
    tokio::time::timeout(PATIENCE, node.failed()).await.expect("it notices")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_without_its_log_leaves_the_quorum_with_nothing_to_write_and_keeps_its_view() {
    let mut nodes = Nodes::three(0).await;
    let leader = nodes.leader().await;
    nodes.node(leader).submit(open_session(1)).unwrap().await.unwrap();
    fs::remove_dir_all(nodes.folders[&leader].path().join("log")).unwrap();
    let told = failure(nodes.node(leader)).await.to_string();
    for what in ["log", "--join", "member replace"] {
        assert!(told.contains(what), "{told}");
    }
    let lost = nodes.up.remove(&leader).unwrap();
    assert_ne!(nodes.leader().await, leader);
    nodes.any().submit(open_session(2)).unwrap().await.unwrap();
    assert!(lost.view().session(vocabulary::SessionId(1)).is_some());
    assert!(lost.view().quorum().stale && lost.view().quorum().leader.is_none());
    if let Ok(ticket) = lost.submit(open_session(3)) {
        assert!(ticket.await.is_err());
    }
    lost.halt().await.unwrap();
    nodes.converge().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_folder_was_moved_acknowledges_nothing_more() {
    let nodes = Nodes::found().await;
    let (folder, aside) = (nodes.folders[&1].path(), tempfile::tempdir().unwrap());
    fs::rename(folder, aside.path().join("moved")).unwrap();
    let told = failure(nodes.node(1)).await.to_string();
    assert!(told.contains(folder.to_str().unwrap()), "{told}");
    if let Ok(ticket) = nodes.node(1).submit(open_session(1)) {
        assert!(ticket.await.is_err());
    }
    nodes.node(1).halt().await.unwrap();
}
