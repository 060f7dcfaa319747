//! How a node joins, and what a failed attempt leaves.

use std::time::Duration;

use ownership::{LedgerNodeError, Options, OwnershipDirectory};
use vocabulary::NodeId;

use crate::nodes::TestCluster;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pending_join_continues_without_naming_its_members_again() {
    let mut nodes = TestCluster::found().await;
    let cluster = nodes.node(1).cluster();
    nodes.kill(1).await;
    let (folder, seed) = (tempfile::tempdir().unwrap(), nodes.addresses[&1].clone());
    let mut options = nodes.options(&folder, std::slice::from_ref(&seed));
    options.peering.join_timeout = Duration::from_millis(1);
    let refused = OwnershipDirectory::open(options).await.unwrap_err();
    assert!(matches!(refused, LedgerNodeError::NotJoined { .. }), "{refused}");
    // A node that nobody can call cannot join, and an unfinished join is not an empty folder.
    let error = OwnershipDirectory::open(Options::new(folder.path())).await.unwrap_err();
    assert!(matches!(error, LedgerNodeError::Options(_)), "{error}");
    assert!(error.to_string().contains(&seed) && error.to_string().contains("--cluster-listen"), "{error}");
    nodes.restart(1).await;
    let joined = OwnershipDirectory::open(nodes.options(&folder, &[])).await.unwrap();
    assert_eq!((joined.node(), joined.cluster()), (NodeId(2), cluster));
    joined.close().await.unwrap();
    nodes.close().await;
}
