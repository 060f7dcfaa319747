//! Watches across nodes, and reads from another node than the one that was written to.

use std::collections::BTreeMap;

use futures::StreamExt;
use ledger::RecordKey;
use ownership::{ChangeEvent, Consistency, OwnershipDirectory};
use vocabulary::SessionId;

use crate::nodes::{TestCluster, open_session};

/// Reads changes until `session` was put; returns them by revision.
async fn read_until_put(node: &OwnershipDirectory, from: u64, session: u128) -> BTreeMap<u64, Vec<ChangeEvent>> {
    let mut watch = node.watch(from).unwrap();
    let mut read: BTreeMap<u64, Vec<ChangeEvent>> = BTreeMap::new();
    let mut last = 0;
    loop {
        let change = tokio::time::timeout(crate::nodes::PATIENCE, watch.next()).await.unwrap().unwrap().unwrap();
        assert!(change.revision >= last, "in order");
        last = change.revision;
        let is_last = change.key == RecordKey::Session(SessionId(session));
        read.entry(last).or_default().push(change);
        if is_last {
            return read;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_is_resumed_on_another_node_without_a_gap() {
    let nodes = TestCluster::three(1).await;
    for n in 0..40 {
        nodes.node(1).submit(open_session(n)).unwrap().await.unwrap();
    }
    let first = read_until_put(nodes.node(2), 1, 19).await;
    let seen = *first.keys().last().unwrap();
    // Resumed at the revision where it broke: that revision's changes come again, and none is missing.
    let rest = read_until_put(nodes.node(4), seen, 39).await;
    let mut resumed = first;
    resumed.extend(rest);
    let whole = read_until_put(nodes.node(3), 1, 39).await;
    assert_eq!(resumed, whole);
    for n in 0..40 {
        let key = RecordKey::Session(SessionId(n));
        assert_eq!(whole.values().flatten().filter(|change| change.key == key).count(), 1);
    }
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_linearizable_read_on_any_node_shows_every_acknowledged_write() {
    let nodes = TestCluster::three(1).await;
    for n in 0..30u128 {
        let writer = nodes.node(1 + n as u64 % 4);
        let reader = nodes.node(1 + (n as u64 + 2) % 4);
        writer.submit(open_session(n)).unwrap().await.unwrap();
        let view = reader.read(Consistency::Linearizable).await.unwrap();
        assert!(view.session(SessionId(n)).is_some(), "session {n}");
    }
    let bound = std::time::Duration::from_secs(30);
    nodes.node(4).read(Consistency::Bounded(bound)).await.unwrap();
    assert!(nodes.node(4).staleness().unwrap() <= bound);
    nodes.assert_converged().await;
    nodes.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_quorum_reads_are_local_or_refused() {
    let mut nodes = TestCluster::three(0).await;
    nodes.node(1).submit(open_session(1)).unwrap().await.unwrap();
    nodes.node(3).read(Consistency::Linearizable).await.unwrap();
    nodes.kill(1).await;
    nodes.kill(2).await;
    let alone = nodes.node(3);
    let bounded = Consistency::Bounded(std::time::Duration::ZERO);
    let (linearizable, bounded) = tokio::join!(alone.read(Consistency::Linearizable), alone.read(bounded));
    assert!(linearizable.is_err() && bounded.is_err());
    let view = alone.read(Consistency::Local).await.unwrap();
    assert!(view.session(SessionId(1)).is_some(), "serving goes on");
    crate::nodes::eventually("the view to be called stale", || async { alone.view().quorum().stale.then_some(()) })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_joining_node_watches_from_its_snapshot() {
    let mut nodes = TestCluster::found().await;
    for n in 0..1_300 {
        nodes.node(1).submit(open_session(n)).unwrap().await.unwrap();
    }
    nodes.node(1).write_snapshot().await.unwrap();
    nodes.node(1).submit(open_session(9_999)).unwrap().await.unwrap();
    let id = nodes.join().await;
    let late = nodes.node(id);
    assert_eq!(late.view().session_count(), 1_301);
    let compacted = late.watch(1).unwrap_err();
    assert!(compacted.oldest > 1_000, "{compacted}");
    nodes.node(1).submit(open_session(10_000)).unwrap().await.unwrap();
    let read = read_until_put(late, compacted.oldest, 10_000).await;
    assert!(!read.is_empty());
    nodes.assert_converged().await;
    nodes.close().await;
}
