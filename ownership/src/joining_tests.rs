//! Enrolment tests against a real leader: a joining node's release must support the cluster's level, and only one
//! membership change runs at a time.

use std::time::Duration;

use consensus::{JoiningNode, MembershipLock, MembershipWriteError, RaftTermLeader, SupportedLevels};
use futures::FutureExt;
use ledger::{Command, FOUNDER, LEVEL, LedgerEntry, NEXT_LEVEL, Submission};
use openraft::storage::RaftLogStorage;
use vocabulary::{ClientId, ClientSerial, NodeId};

use crate::log_store::LogStore;
use crate::members::{EnrolRequest, MemberError, enrol};
use crate::node_core::NodeCore;
use crate::node_folder::NodeFolder;
use crate::raft::Vote;
use crate::terms::MAX_TERM_JUMP;
use crate::{ClusterOptions, Options, OwnershipDirectory};

const NEWCOMER: NodeId = NodeId(2);

fn enrolment(highest: u32) -> EnrolRequest {
    EnrolRequest { node: NEWCOMER, address: "127.0.0.1:1".into(), levels: SupportedLevels { lowest: 1, highest } }
}

async fn open(folder: &tempfile::TempDir, max_level: u32) -> OwnershipDirectory {
    open_at("127.0.0.1:0".into(), folder, max_level).await
}

/// Starts a founder of an older release again as this release, at the same address: with a new address it would hold
/// the membership lock to announce that.
async fn upgraded_founder(folder: &tempfile::TempDir) -> OwnershipDirectory {
    let before = open(folder, LEVEL).await;
    let address = before.members()[0].address.clone();
    before.close().await.unwrap();
    drop(before);
    open_at(address, folder, NEXT_LEVEL).await
}

async fn open_at(listen: String, folder: &tempfile::TempDir, max_level: u32) -> OwnershipDirectory {
    let peering = ClusterOptions { listen: Some(listen), ..ClusterOptions::default() };
    OwnershipDirectory::open(Options { peering, max_level: Some(max_level), ..Options::new(folder.path()) })
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_support_the_level_is_not_added() {
    let folder = tempfile::tempdir().unwrap();
    let founder = open(&folder, NEXT_LEVEL).await;
    // The leader has not met the node, which may have asked a member that did not know the level yet.
    let error = enrol(founder.core(), enrolment(LEVEL)).await.unwrap_err();
    let levels = SupportedLevels { lowest: 1, highest: LEVEL };
    assert_eq!(error, MemberError::FeatureLevel { node: NEWCOMER, level: NEXT_LEVEL, levels });
    assert_eq!(founder.members().len(), 1);
    enrol(founder.core(), enrolment(NEXT_LEVEL)).await.unwrap();
    assert_eq!(founder.members().len(), 2);
    founder.halt().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adding_a_node_and_raising_the_level_exclude_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let founder = open(&folder, NEXT_LEVEL).await;
    let turn = founder.core().lock_membership().unwrap();
    assert_eq!(enrol(founder.core(), enrolment(NEXT_LEVEL)).await, Err(MemberError::InProgress));
    assert_eq!(founder.raise_level(NEXT_LEVEL).await, Err(MemberError::InProgress));
    assert_eq!(founder.members().len(), 1);
    drop(turn);
    founder.raise_level(NEXT_LEVEL).await.unwrap();
    enrol(founder.core(), enrolment(NEXT_LEVEL)).await.unwrap();
    founder.halt().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pending_level_raise_blocks_nodes_that_do_not_support_it() {
    let folder = tempfile::tempdir().unwrap();
    let founder = upgraded_founder(&folder).await;
    let core = founder.core();
    let turn = core.lock_membership().unwrap();
    let sent = turn.write(founder.raft(), raise(core)).now_or_never();
    assert!(sent.is_none() && founder.view().level() == LEVEL, "it is on its way: {sent:?}");
    drop(turn);
    let error = enrol(core, enrolment(LEVEL)).await.unwrap_err();
    assert!(matches!(error, MemberError::FeatureLevel { level: NEXT_LEVEL, .. }), "{error}");
    assert_eq!(founder.members().len(), 1);
    founder.halt().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decision_of_an_earlier_leader_term_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let founder = upgraded_founder(&folder).await;
    let own = founder.core().lock_membership().unwrap().leadership();
    let turn = MembershipLock::default();
    let turn = turn.try_acquire(RaftTermLeader { term: own.term + 1, ..own }).unwrap();
    let levels = SupportedLevels { lowest: 1, highest: NEXT_LEVEL };
    let newcomer = JoiningNode { id: NEWCOMER.0, node: openraft::BasicNode::default(), levels };
    assert_eq!(turn.add_learner(founder.raft(), newcomer, || LEVEL).await, Err(MembershipWriteError::NotLeader));
    assert_eq!(turn.write(founder.raft(), raise(founder.core())).await, Err(MembershipWriteError::NotLeader));
    assert_eq!((founder.members().len(), founder.view().level()), (1, LEVEL));
    founder.halt().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_has_elected_ever_so_often_lets_newcomers_in() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let before = open(&folder, NEXT_LEVEL).await;
    let address = before.members()[0].address.clone();
    before.close().await.unwrap();
    drop(before);
    let term = 3 * MAX_TERM_JUMP;
    let mut log = LogStore::open(&NodeFolder::open(folder.path(), None).unwrap()).unwrap();
    log.save_vote(&Vote::new(term, FOUNDER.0)).await.unwrap();
    drop(log);
    let founder = open_at(address.clone(), &folder, NEXT_LEVEL).await;
    let peering = ClusterOptions {
        listen: Some("127.0.0.1:0".into()),
        join: vec![address],
        join_timeout: Duration::from_secs(20),
        ..ClusterOptions::default()
    };
    let options = Options { peering, max_level: Some(NEXT_LEVEL), ..Options::new(other.path()) };
    let newcomer = OwnershipDirectory::open(options).await.unwrap();
    assert!(newcomer.view().quorum().term > term);
    assert_eq!(founder.members().len(), 2);
    newcomer.halt().await.unwrap();
    founder.halt().await.unwrap();
}

fn raise(core: &NodeCore) -> LedgerEntry {
    let commands = [Command::OpenClient(core.node()), Command::RaiseLevel(NEXT_LEVEL)];
    let submission = |(n, command)| Submission { client: ClientId(7), serial: ClientSerial(n), command };
    let (time, _) = core.entry_time().unwrap();
    LedgerEntry { time, submissions: (0..).zip(commands).map(submission).collect() }
}
