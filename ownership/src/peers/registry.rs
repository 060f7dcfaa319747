//! Who the other nodes are, where they listen, the links to them, and who answers what they ask.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use arc_swap::ArcSwap;
use consensus::{Levels, Publisher};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use vocabulary::NodeId;

use crate::core::is_retired;
use crate::node_folder::Identity;
use crate::peers::caller::Caller;
use crate::peers::error::Refusal;
use crate::peers::handshake::{Callee, Hello, Lane, PROTOCOL, Retired, Welcome, judge};
use crate::peers::kept_out::KeptOut;
use crate::peers::link::Link;
use crate::peers::misses::Misses;
use crate::peers::refused::Refused;
use crate::peers::socket::{Dialer, Directions, Greeted, Missed, Whom};
use crate::peers::tls::Tls;
use crate::peers::{PeerService, Topic};
use crate::snapshot_stream::Space;

/// Snapshots that may come from other nodes at once: one, and what a leader that was lost meanwhile left behind.
const INCOMING: usize = 2;

/// Nodes whose releases are remembered; beyond it only members' are. A caller may say that it is any node.
const MOST_MET: usize = 4_096;

/// What this node knows of the others. Shared by everything that calls or is called.
pub(crate) struct Registry {
    pub(crate) own: Welcome,
    pub(crate) publisher: Arc<Publisher>,
    book: ArcSwap<BTreeMap<NodeId, String>>,
    levels: Mutex<BTreeMap<NodeId, Levels>>,
    links: Mutex<BTreeMap<(NodeId, Lane), Link>>,
    services: Mutex<BTreeMap<Topic, Arc<dyn PeerService>>>,
    retired: OnceLock<()>,
    too_old: OnceLock<()>,
    pub(crate) failures: Failures,
    /// Places for snapshots on their way here.
    pub(crate) incoming: Semaphore,
    /// What these will need on the disk.
    pub(crate) space: Space,
    tls: Option<Tls>,
}

/// What went wrong between this node and others, as far as people are told of it.
pub(crate) struct Failures {
    /// Members that could not be talked with.
    misses: Mutex<Misses>,
    /// Callers whose TLS was refused here, or who refused this node's.
    pub(crate) strangers: KeptOut,
    /// Callers that asked what only members may ask.
    pub(crate) outsiders: KeptOut,
    /// Messages of Raft that name terms or entries that no sound node names.
    pub(crate) implausible: KeptOut,
    refused: Mutex<Refused>,
}

impl Default for Failures {
    fn default() -> Self {
        Self {
            misses: Mutex::default(),
            strangers: KeptOut::new("a caller did not come in as another node: TLS refused it"),
            outsiders: KeptOut::new("a caller that is no member was refused what only members may ask"),
            implausible: KeptOut::new("a message was not handed to Raft: no sound node says what it says"),
            refused: Mutex::default(),
        }
    }
}

impl Registry {
    pub(crate) fn new(
        identity: Identity,
        (levels, tls): (Levels, Option<Tls>),
        publisher: Arc<Publisher>,
    ) -> Arc<Self> {
        let own = Welcome { cluster: identity.cluster, node: identity.node, levels };
        Arc::new(Self {
            own,
            publisher,
            book: ArcSwap::default(),
            levels: Mutex::default(),
            links: Mutex::default(),
            services: Mutex::default(),
            retired: OnceLock::new(),
            too_old: OnceLock::new(),
            failures: Failures::default(),
            incoming: Semaphore::new(INCOMING),
            space: Space::default(),
            tls,
        })
    }

    /// The members and where they listen, as of the newest membership. Links to nodes that left are closed.
    pub(crate) fn set_book(&self, book: BTreeMap<NodeId, String>) {
        let mut links = self.links.lock();
        links.retain(|(node, _), _| book.contains_key(node));
        drop(links);
        self.failures.misses.lock().keep(|node| book.contains_key(&node));
        self.book.store(Arc::new(book));
    }

    /// Where a node listens, should the book not have it yet: Raft calls new members before they are in it.
    pub(crate) fn note(&self, node: NodeId, address: &str) {
        if !self.book.load().contains_key(&node) {
            self.book.rcu(|book| {
                let mut book = BTreeMap::clone(book);
                book.insert(node, address.to_owned());
                book
            });
        }
    }

    pub(crate) fn others(&self) -> Vec<NodeId> {
        self.book.load().keys().copied().filter(|node| *node != self.own.node).collect()
    }

    /// Whether a caller is a member, as far as its connection and the newest membership here show it.
    pub(crate) fn lists(&self, caller: &Caller) -> bool {
        let (node, cluster) = (caller.hello.node, caller.hello.cluster);
        let address = node.filter(|_| cluster == Some(self.own.cluster)).and_then(|node| self.address(node));
        address.is_some_and(|address| caller.shows(&address))
    }

    /// The link to a node on a lane; one for all who call it.
    pub(crate) fn link(self: &Arc<Self>, node: NodeId, lane: Lane) -> Link {
        let mut links = self.links.lock();
        let link = links.entry((node, lane)).or_insert_with(|| self.dial(Whom::Node(node), lane));
        link.clone()
    }

    /// Closes all links.
    pub(crate) fn hang_up(&self) {
        self.links.lock().clear();
    }

    /// A link of one's own.
    pub(crate) fn dial(self: &Arc<Self>, whom: Whom, lane: Lane) -> Link {
        Link::new(Dialer { whom, lane, directions: self.clone() })
    }

    /// What a node's binary can do, once it was met.
    pub(crate) fn levels(&self, node: NodeId) -> Option<Levels> {
        if node == self.own.node {
            return Some(self.own.levels);
        }
        self.levels.lock().get(&node).copied()
    }

    /// Why a node could not be talked with when it was called lately; none where it could, or was not called.
    pub(crate) fn missed(&self, node: NodeId) -> Option<String> {
        self.failures.misses.lock().lately(node, Instant::now())
    }

    /// Notes what a node's release can work at.
    fn learn(&self, node: NodeId, levels: Levels) {
        let mut known = self.levels.lock();
        if known.len() >= MOST_MET && !known.contains_key(&node) {
            let book = self.book.load();
            known.retain(|node, _| book.contains_key(node));
        }
        known.insert(node, levels);
    }

    pub(crate) fn serve(&self, topic: Topic, service: Arc<dyn PeerService>) {
        self.services.lock().insert(topic, service);
    }

    pub(crate) fn service(&self, topic: Topic) -> Option<Arc<dyn PeerService>> {
        self.services.lock().get(&topic).cloned()
    }

    /// Whether another node said that this one was removed from the cluster.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.get().is_some()
    }

    /// Notes that this node was removed.
    pub(crate) fn retire(&self) {
        if self.retired.set(()).is_ok() {
            let refusal = Refusal::Retired { node: self.own.node };
            tracing::error!(%refusal, "this node no longer belongs to the cluster; it only serves its last view");
        }
    }

    /// Whether a caller may come in.
    pub(crate) fn judge(&self, hello: &Hello) -> Greeted {
        let view = self.publisher.view();
        let is_retired = match hello.node {
            Some(node) if is_retired(&view, node) => Retired::Yes,
            _ => Retired::No,
        };
        let judged = judge(hello, Callee { welcome: &self.own, level: view.level(), is_retired });
        let mut refused = self.failures.refused.lock();
        match &judged {
            Ok(()) => refused.came_in(hello.node),
            Err(refusal) => {
                if let Some(untold) = refused.news(hello.node, refusal, Instant::now()) {
                    let caller =
                        hello.node.map_or_else(|| "a node without an id".into(), |node| format!("node {node}"));
                    tracing::warn!(untold, "{caller} is refused, and not told of again until that changes: {refusal}");
                }
            }
        }
        drop(refused);
        judged?;
        hello.node.into_iter().for_each(|node| self.learn(node, hello.levels));
        Ok(self.own.clone())
    }
}

impl Directions for Registry {
    fn address(&self, node: NodeId) -> Option<String> {
        self.book.load().get(&node).cloned()
    }

    fn hello(&self, to: Option<NodeId>, lane: Lane) -> Hello {
        let Welcome { cluster, node, levels } = self.own;
        Hello { protocol: PROTOCOL, cluster: Some(cluster), node: Some(node), to, levels, lane }
    }

    fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    fn objection(&self, welcome: &Welcome) -> Option<String> {
        let (Welcome { node, levels, .. }, level) = (welcome, self.publisher.view().level());
        let what = || {
            format!(
                "node {node} works at feature levels {levels}, and the cluster at {level}; install the newer release there"
            )
        };
        (!levels.contains(level)).then(what)
    }

    fn met(&self, greeted: &Greeted) {
        match greeted {
            Ok(Welcome { node, levels, .. }) => {
                self.learn(*node, *levels);
                self.failures.misses.lock().met(*node);
            }
            Err(Refusal::Retired { node }) if *node == self.own.node => self.retire(),
            Err(refusal @ Refusal::Level { .. }) if self.too_old.set(()).is_ok() => {
                tracing::error!(%refusal, "this node can no longer take part in the cluster; it only serves its last view");
            }
            Err(_) => {}
        }
    }

    fn missed(&self, node: NodeId, missed: Missed) {
        let (Missed::Tls(why) | Missed::Other(why)) = missed.clone();
        let news = self.failures.misses.lock().note(node, missed, Instant::now());
        if let Some(untold) = news {
            let address = self.address(node).unwrap_or_default();
            tracing::warn!(%node, address, why, untold, "another node cannot be talked with until its certificate, or this node's, is mended");
        }
    }
}
