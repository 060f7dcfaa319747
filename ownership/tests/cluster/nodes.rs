//! Nodes that a test starts, stops and queries. Every wait has a deadline.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::{Duration, Instant};

use ledger::{Command, OpenSession};
use ownership::{ClusterOptions, ElectionTimers, LedgerNodeError, MemberRole, Options, OwnershipDirectory};
use tempfile::TempDir;
use vocabulary::{ModelId, NodeId, SessionId, TenantId};

/// Timeout of any wait, generous for a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Running nodes by id, and the folders of those that are down.
pub(crate) struct TestCluster {
    pub(crate) running: BTreeMap<u64, OwnershipDirectory>,
    pub(crate) folders: BTreeMap<u64, TempDir>,
    /// Last addresses of nodes that are down.
    pub(crate) addresses: BTreeMap<u64, String>,
    pub(crate) adjust_options: fn(&mut Options),
}

impl TestCluster {
    /// Starts a cluster of one.
    pub(crate) async fn found() -> Self {
        Self::found_with(|_| {}).await
    }

    pub(crate) async fn found_with(tune: fn(&mut Options)) -> Self {
        let (up, folders, addresses) = Default::default();
        let mut nodes = Self { running: up, folders, addresses, adjust_options: tune };
        let folder = tempfile::tempdir().unwrap();
        let founder = OwnershipDirectory::open(nodes.options(&folder, &[])).await.unwrap();
        nodes.running.insert(1, founder);
        nodes.folders.insert(1, folder);
        nodes
    }

    /// Starts a cluster of three voters and `learners` learners.
    pub(crate) async fn three(learners: usize) -> Self {
        Self::three_with(learners, |_| {}).await
    }

    pub(crate) async fn three_with(learners: usize, tune: fn(&mut Options)) -> Self {
        let mut nodes = Self::found_with(tune).await;
        for _ in 0..2 + learners {
            nodes.join().await;
        }
        nodes.promote(&[2, 3]).await;
        nodes
    }

    pub(crate) fn options(&self, folder: &TempDir, join: &[String]) -> Options {
        let mut options = options(folder);
        options.peering.join = join.to_vec();
        (self.adjust_options)(&mut options);
        options
    }

    /// Adds a node, admitted by any running node. Returns its id.
    pub(crate) async fn join(&mut self) -> u64 {
        let seeds: Vec<String> = self.running.values().map(address).collect();
        let folder = tempfile::tempdir().unwrap();
        let node = OwnershipDirectory::open(self.options(&folder, &seeds)).await.unwrap();
        let id = node.node().0;
        assert!(self.folders.insert(id, folder).is_none(), "node {id} had its id before");
        self.running.insert(id, node);
        id
    }

    pub(crate) async fn promote(&self, ids: &[u64]) {
        let ids: Vec<NodeId> = ids.iter().copied().map(NodeId).collect();
        let node = self.any();
        eventually("the promotion", || async {
            match node.promote(ids.clone()).await {
                Ok(()) => Some(()),
                Err(_) => {
                    // An earlier attempt may have succeeded after all.
                    let done = ids.iter().all(|id| {
                        node.members().iter().any(|member| member.node == *id && member.role == MemberRole::Voter)
                    });
                    done.then_some(())
                }
            }
        })
        .await;
    }

    pub(crate) fn any(&self) -> &OwnershipDirectory {
        self.running.values().next().expect("a node is up")
    }

    pub(crate) fn node(&self, id: u64) -> &OwnershipDirectory {
        &self.running[&id]
    }

    /// Returns the leader, once the other nodes know it, too.
    pub(crate) async fn leader(&self) -> u64 {
        eventually("one leader that all know", || async {
            let known: Vec<_> = self.running.values().map(|node| node.view().quorum()).collect();
            let leader = known[0].leader?.0;
            let agreed = known.iter().all(|quorum| !quorum.stale && quorum.leader == Some(NodeId(leader)));
            (agreed && self.running.contains_key(&leader)).then_some(leader)
        })
        .await
    }

    /// Stops a node without a graceful shutdown.
    pub(crate) async fn kill(&mut self, id: u64) {
        let node = self.running.remove(&id).expect("it is up");
        self.addresses.insert(id, address(&node));
        node.halt().await.unwrap();
    }

    /// Starts a node again at its old address.
    pub(crate) async fn restart(&mut self, id: u64) {
        let node = self.reopen(id).await.unwrap();
        assert_eq!(node.node(), NodeId(id));
        self.running.insert(id, node);
    }

    /// Starts a node again on another port.
    pub(crate) async fn restart_elsewhere(&mut self, id: u64) {
        self.addresses.remove(&id);
        self.restart(id).await;
    }

    pub(crate) async fn reopen(&self, id: u64) -> Result<OwnershipDirectory, LedgerNodeError> {
        let mut options = self.options(&self.folders[&id], &[]);
        options.peering.listen = self.addresses.get(&id).cloned().or(options.peering.listen);
        OwnershipDirectory::open(options).await
    }

    /// Waits until all nodes have applied the same entries, compares them bit for bit, and checks every invariant.
    pub(crate) async fn assert_converged(&self) {
        eventually("equal applied indexes", || async {
            let applied: Vec<u64> = self.running.values().map(|node| node.view().applied()).collect();
            applied.iter().all(|index| *index == applied[0]).then_some(())
        })
        .await;
        let views: Vec<_> = self.running.values().map(OwnershipDirectory::view).collect();
        let newest = views.iter().map(|view| view.applied()).max();
        for view in &views {
            ledger::invariants::check(view).unwrap();
            if Some(view.applied()) == newest {
                let first = views.iter().find(|view| Some(view.applied()) == newest).unwrap();
                assert_eq!(view.state_hash(), first.state_hash(), "at entry {}", view.applied());
            }
        }
    }

    pub(crate) async fn close(self) {
        for (_, node) in self.running {
            node.close().await.unwrap();
        }
    }
}

/// Returns options with a system-chosen port and without ticks that write by themselves.
pub(crate) fn options(folder: &TempDir) -> Options {
    let peering =
        ClusterOptions { listen: Some("127.0.0.1:0".into()), join_timeout: PATIENCE, ..ClusterOptions::default() };
    let tick = Duration::from_secs(3_600);
    Options { peering, tick, submit_timeout: PATIENCE, ..Options::new(folder.path()) }
}

/// Makes election timeouts so long that no pause of a busy machine causes an election.
pub(crate) fn without_elections(options: &mut Options) {
    let (election_min, election_max) = (PATIENCE, 2 * PATIENCE);
    options.peering.timers = ElectionTimers { election_min, election_max, ..ElectionTimers::default() };
}

pub(crate) fn address(node: &OwnershipDirectory) -> String {
    let own = node.node();
    let members = node.members();
    members.into_iter().find(|member| member.node == own).expect("it knows itself").address
}

/// Calls `ask` until it returns something.
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> F) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = ask().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub(crate) fn open_session(n: u128) -> Command {
    let (tenant, model) = (TenantId::default(), ModelId::from("tiny"));
    Command::OpenSession(OpenSession { session: SessionId(n), tenant, model, parent: None })
}
