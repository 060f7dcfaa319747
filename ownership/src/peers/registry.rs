//! Registry of the other nodes: ids, addresses, links, and the services that answer them.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use arc_swap::ArcSwap;
use consensus::{SupportedLevels, ViewPublisher};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use vocabulary::NodeId;

use crate::members::is_retired;
use crate::node_folder::NodeIdentity;
use crate::peers::PeerService;
use crate::peers::caller_identity::CallerIdentity;
use crate::peers::dial_failures::DialFailures;
use crate::peers::error::HandshakeRefusal;
use crate::peers::handshake::{Hello, HelloCheckInputs, Lane, PROTOCOL, RemovalStatus, Welcome, check_hello};
use crate::peers::log_throttle::RejectionLog;
use crate::peers::method::RouterTopic;
use crate::peers::peer_link::PeerLink;
use crate::peers::refusal_log::RefusalLog;
use crate::peers::socket::{DialDelegate, DialError, DialTarget, HandshakeResult, LaneDialer};
use crate::peers::tls::PeerTls;
use crate::snapshot_stream::DiskReservations;

/// Maximum number of incoming snapshots: one, and one that a lost leader left unfinished.
const MAX_INCOMING_SNAPSHOTS: usize = 2;

/// Maximum number of nodes whose levels are remembered; beyond it only members' are. A caller may claim any id.
const MAX_KNOWN_LEVELS: usize = 4_096;

/// What this node knows of the others. Shared by all callers and handlers.
pub(crate) struct PeerRegistry {
    pub(crate) welcome: Welcome,
    pub(crate) publisher: Arc<ViewPublisher>,
    addresses: ArcSwap<BTreeMap<NodeId, String>>,
    levels: Mutex<BTreeMap<NodeId, SupportedLevels>>,
    links: Mutex<BTreeMap<(NodeId, Lane), PeerLink>>,
    services: Mutex<BTreeMap<RouterTopic, Arc<dyn PeerService>>>,
    retired: OnceLock<()>,
    level_unsupported: OnceLock<()>,
    pub(crate) failures: PeerFailures,
    /// Permits for incoming snapshots.
    pub(crate) snapshot_permits: Semaphore,
    /// Reservations of the disk space that they will need.
    pub(crate) space: DiskReservations,
    tls: Option<PeerTls>,
}

/// Failures between this node and others that are reported to operators.
pub(crate) struct PeerFailures {
    /// Members to which a connection failed.
    dial_failures: Mutex<DialFailures>,
    /// Callers whose TLS was refused here, or who refused this node's.
    pub(crate) tls_refusals: RejectionLog,
    /// Callers of methods that only members may call.
    pub(crate) non_member_calls: RejectionLog,
    /// Raft messages with implausible terms, log positions or senders.
    pub(crate) implausible_messages: RejectionLog,
    handshake_refusals: Mutex<RefusalLog>,
}

impl Default for PeerFailures {
    fn default() -> Self {
        Self {
            dial_failures: Mutex::default(),
            tls_refusals: RejectionLog::new("a caller did not come in as another node: TLS refused it"),
            non_member_calls: RejectionLog::new("a caller that is no member was refused what only members may ask"),
            implausible_messages: RejectionLog::new(
                "a message was not handed to Raft: no sound node says what it says",
            ),
            handshake_refusals: Mutex::default(),
        }
    }
}

impl PeerRegistry {
    pub(crate) fn new(
        identity: NodeIdentity,
        (levels, tls): (SupportedLevels, Option<PeerTls>),
        publisher: Arc<ViewPublisher>,
    ) -> Arc<Self> {
        let own = Welcome { cluster: identity.cluster, node: identity.node, levels };
        Arc::new(Self {
            welcome: own,
            publisher,
            addresses: ArcSwap::default(),
            levels: Mutex::default(),
            links: Mutex::default(),
            services: Mutex::default(),
            retired: OnceLock::new(),
            level_unsupported: OnceLock::new(),
            failures: PeerFailures::default(),
            snapshot_permits: Semaphore::new(MAX_INCOMING_SNAPSHOTS),
            space: DiskReservations::default(),
            tls,
        })
    }

    /// Sets the members and their addresses from the newest membership. Closes links to nodes that left.
    pub(crate) fn set_members(&self, book: BTreeMap<NodeId, String>) {
        let mut links = self.links.lock();
        links.retain(|(node, _), _| book.contains_key(node));
        drop(links);
        self.failures.dial_failures.lock().retain_members(|node| book.contains_key(&node));
        self.addresses.store(Arc::new(book));
    }

    /// Adds a node's address if it is unknown: Raft calls new members before they are in the address book.
    pub(crate) fn note_address(&self, node: NodeId, address: &str) {
        if !self.addresses.load().contains_key(&node) {
            self.addresses.rcu(|book| {
                let mut book = BTreeMap::clone(book);
                book.insert(node, address.to_owned());
                book
            });
        }
    }

    pub(crate) fn others(&self) -> Vec<NodeId> {
        self.addresses.load().keys().copied().filter(|node| *node != self.welcome.node).collect()
    }

    /// Returns whether a caller is a member, according to its connection and the newest membership known here.
    pub(crate) fn is_member(&self, caller: &CallerIdentity) -> bool {
        let (node, cluster) = (caller.hello.node, caller.hello.cluster);
        let address = node.filter(|_| cluster == Some(self.welcome.cluster)).and_then(|node| self.address(node));
        address.is_some_and(|address| caller.certificate_covers(&address))
    }

    /// Returns the shared link to a node on a lane.
    pub(crate) fn link(self: &Arc<Self>, node: NodeId, lane: Lane) -> PeerLink {
        let mut links = self.links.lock();
        let link = links.entry((node, lane)).or_insert_with(|| self.dial(DialTarget::Node(node), lane));
        link.clone()
    }

    /// Closes all links.
    pub(crate) fn close_links(&self) {
        self.links.lock().clear();
    }

    /// Creates a link that is not shared.
    pub(crate) fn dial(self: &Arc<Self>, whom: DialTarget, lane: Lane) -> PeerLink {
        PeerLink::new(LaneDialer { target: whom, lane, policy: self.clone() })
    }

    /// Returns the feature levels that a node's release supports, if it was met.
    pub(crate) fn levels(&self, node: NodeId) -> Option<SupportedLevels> {
        if node == self.welcome.node {
            return Some(self.welcome.levels);
        }
        self.levels.lock().get(&node).copied()
    }

    /// Returns why the last call to a node failed; `None` if it succeeded or there was no recent call.
    pub(crate) fn last_dial_error(&self, node: NodeId) -> Option<String> {
        self.failures.dial_failures.lock().recent_cause(node, Instant::now())
    }

    /// Records the feature levels that a node's release supports.
    fn record_levels(&self, node: NodeId, levels: SupportedLevels) {
        let mut known = self.levels.lock();
        if known.len() >= MAX_KNOWN_LEVELS && !known.contains_key(&node) {
            let book = self.addresses.load();
            known.retain(|node, _| book.contains_key(node));
        }
        known.insert(node, levels);
    }

    pub(crate) fn register_service(&self, topic: RouterTopic, service: Arc<dyn PeerService>) {
        self.services.lock().insert(topic, service);
    }

    pub(crate) fn service(&self, topic: RouterTopic) -> Option<Arc<dyn PeerService>> {
        self.services.lock().get(&topic).cloned()
    }

    /// Returns whether another node reported that this one was removed from the cluster.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.get().is_some()
    }

    /// Records that this node was removed.
    pub(crate) fn mark_retired(&self) {
        if self.retired.set(()).is_ok() {
            let refusal = HandshakeRefusal::Retired { node: self.welcome.node };
            tracing::error!(%refusal, "this node no longer belongs to the cluster; it only serves its last view");
        }
    }

    /// Decides whether a caller is accepted.
    pub(crate) fn check_hello(&self, hello: &Hello) -> HandshakeResult {
        let view = self.publisher.view();
        let is_retired = match hello.node {
            Some(node) if is_retired(&view, node) => RemovalStatus::Yes,
            _ => RemovalStatus::No,
        };
        let judged = check_hello(hello, HelloCheckInputs { welcome: &self.welcome, level: view.level(), is_retired });
        let mut refused = self.failures.handshake_refusals.lock();
        match &judged {
            Ok(()) => refused.clear(hello.node),
            Err(refusal) => {
                if let Some(suppressed) = refused.record(hello.node, refusal, Instant::now()) {
                    let caller =
                        hello.node.map_or_else(|| "a node without an id".into(), |node| format!("node {node}"));
                    tracing::warn!(suppressed, "refused {caller}: {refusal}; repeats with this cause are not logged");
                }
            }
        }
        drop(refused);
        judged?;
        hello.node.into_iter().for_each(|node| self.record_levels(node, hello.levels));
        Ok(self.welcome.clone())
    }
}

impl DialDelegate for PeerRegistry {
    fn address(&self, node: NodeId) -> Option<String> {
        self.addresses.load().get(&node).cloned()
    }

    fn hello(&self, to: Option<NodeId>, lane: Lane) -> Hello {
        let Welcome { cluster, node, levels } = self.welcome;
        Hello { protocol: PROTOCOL, cluster: Some(cluster), node: Some(node), to, levels, lane }
    }

    fn tls(&self) -> Option<&PeerTls> {
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

    fn on_greeted(&self, handshake: &HandshakeResult) {
        match handshake {
            Ok(Welcome { node, levels, .. }) => {
                self.record_levels(*node, *levels);
                self.failures.dial_failures.lock().clear(*node);
            }
            Err(HandshakeRefusal::Retired { node }) if *node == self.welcome.node => self.mark_retired(),
            Err(refusal @ HandshakeRefusal::Level { .. }) if self.level_unsupported.set(()).is_ok() => {
                tracing::error!(%refusal, "this node can no longer take part in the cluster; it only serves its last view");
            }
            Err(_) => {}
        }
    }

    fn on_dial_failed(&self, node: NodeId, error: DialError) {
        let (DialError::Tls(why) | DialError::Other(why)) = error.clone();
        let news = self.failures.dial_failures.lock().record(node, error, Instant::now());
        if let Some(suppressed) = news {
            let address = self.address(node).unwrap_or_default();
            tracing::warn!(%node, address, reason = why, suppressed, "another node cannot be talked with: TLS failed (see reason); replace its certificate or this node's");
        }
    }
}
