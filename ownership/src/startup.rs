//! Startup of a node: it founds a cluster, joins one, or resumes its membership.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use consensus::{Consistency, StalledChangeDetector, ViewPublisher};
use ledger::{Command, Outcome};
use openraft::async_runtime::watch::WatchReceiver;
use openraft::{BasicNode, Raft};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use vocabulary::LedgerTime;

use crate::command_queue::QueuedCommand;
use crate::data_dir_watch::{self, DataDirWatch};
use crate::error::LedgerNodeError;
use crate::joining::{self, PersistedJoin, UnidentifiedNode};
use crate::log_loss::refuse_log_loss;
use crate::log_store::LogStore;
use crate::maintenance_task::MaintenanceTask;
use crate::members::is_retired;
use crate::node_core::{KnownLeader, NodeCore, NodeCoreParts, start_failure, unsupported_level};
use crate::node_folder::{LockedFolder, NodeFolder, NodeIdentity, founder};
use crate::node_observer::{NodeApplyObserver, NodeStateMachine};
use crate::node_options::Options;
use crate::peers::{AbortingTask, PeerListener, PeerRegistry, PeerTls};
use crate::raft::TokioTypeConfig;
use crate::raft_network::RaftClientFactory;
use crate::snapshot_file::SnapshotFile;
use crate::terms::MAX_TERM;
use crate::{proposer, raft_follower};

/// How long the quorum may take to start.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a node that has ended may take to release its log.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of submission requests of all nodes that wait for the proposer.
const PROPOSAL_QUEUE: usize = 256;

/// A running node.
pub(crate) struct StartedNode {
    pub(crate) core: Arc<NodeCore>,
    pub(crate) folder: NodeFolder,
    /// Tasks beside Raft, in the order in which they must be stopped.
    pub(crate) tasks: Vec<AbortingTask>,
    pub(crate) queue: mpsc::Receiver<QueuedCommand>,
    /// Address at which others reach it.
    pub(crate) address: Option<String>,
}

/// Listener with the address at which others reach this node.
struct AdvertisedListener {
    listener: PeerListener,
    address: String,
    tls: Option<PeerTls>,
}

/// Starts a node up to where it can serve. Waits for the quorum only if this node is its only voter.
pub(crate) async fn start(options: &Options) -> Result<StartedNode, LedgerNodeError> {
    let reachable = listen(options).await?;
    let claimed = LockedFolder::new(&options.data_dir)?;
    refuse_log_loss(&options.data_dir)?;
    let folder = identify(claimed, options, reachable.as_ref()).await?;
    let log = open_log(&folder).await?;
    let snapshots = SnapshotFile::at(folder.path("snapshot"), folder.identity.cluster).with_shortages(&log);
    check_term(&log, &folder)?;
    let place = Arc::new(Mutex::new(DataDirWatch::of(&folder)?));
    let snapshot_at = check_snapshot(&snapshots, &log, &folder)?;
    let (publisher, observer) = (Arc::<ViewPublisher>::default(), Arc::<NodeApplyObserver>::default());
    let tls = reachable.as_ref().and_then(|reachable| reachable.tls.clone());
    let registry = PeerRegistry::new(folder.identity, (options.levels(), tls), publisher.clone());
    let machine = NodeStateMachine::new(snapshots.clone(), publisher, (observer.clone(), options.levels()));
    let config = Arc::new(options.peering.timers.raft()?);
    let network = RaftClientFactory { registry: registry.clone() };
    let raft = Raft::new(folder.identity.node.0, config, network, log.clone(), machine).await;
    let raft = raft.map_err(|error| {
        unsupported_level(&observer).or_else(|| snapshots.find_damage()).unwrap_or_else(|| quorum_error(error))
    })?;
    let (proposals, proposal_requests) = mpsc::channel(PROPOSAL_QUEUE);
    let (queue, queued) = mpsc::channel(options.queue.max(1));
    let patience = options.peering.timers.election_max + options.peering.timers.election_min;
    let root = options.data_dir.clone();
    let seeds = known_members(options)?;
    let parts = NodeCoreParts {
        raft,
        registry: registry.clone(),
        observer,
        log,
        folder: root,
        proposals,
        silence_timeout: patience,
        seeds,
    };
    let core = NodeCore::new(parts, queue);
    check_level(&core, options)?;
    if reachable.is_none() {
        check_reachable(&core)?;
    }
    let mut tasks = Vec::new();
    let own = core.clone();
    tasks.push(AbortingTask(core.supervision.supervise("follower", move || raft_follower::follow(own.clone()))));
    let (own, proposal_requests) = (core.clone(), Arc::new(AsyncMutex::new(proposal_requests)));
    tasks.push(AbortingTask(core.supervision.supervise("proposer", move || {
        let (core, proposal_requests) = (own.clone(), proposal_requests.clone());
        // Unanswered submissions are submitted again by their writer and executed once.
        async move { proposer::run(core, &mut *proposal_requests.lock().await).await }
    })));
    let own = core.clone();
    tasks.push(AbortingTask(
        core.supervision.supervise("folder_watch", move || data_dir_watch::watch(own.clone(), place.clone())),
    ));
    let address = reachable.as_ref().map(|reachable| reachable.address.clone());
    if let Some(AdvertisedListener { listener, address, .. }) = reachable {
        tracing::info!(node = %core.node(), cluster = %registry.welcome.cluster, listen = %listener.address, address, "this node listens for others");
        let (listener, own) = (Arc::new(listener), core.clone());
        tasks.push(AbortingTask(
            core.supervision
                .supervise_forever("node_listener", move || listener.clone().run(registry.clone(), own.clone())),
        ));
    }
    let (own, options_of, snapshot_bytes) = (core.clone(), options.clone(), core.log.bytes());
    tasks.push(AbortingTask(core.supervision.supervise_forever("ticker", move || {
        let (core, options, unfinished) = (own.clone(), options_of.clone(), StalledChangeDetector::default());
        MaintenanceTask { core, options, snapshot_at, snapshot_bytes, pending_change: unfinished }.run()
    })));
    let found = found_or_await_quorum(&core, address.as_deref().unwrap_or_default()).await;
    found.map_err(|error| start_failure(&core, error))?;
    Ok(StartedNode { core, folder, tasks, queue: queued, address })
}

/// Opens the log. The folder is locked by this node, but the last task of a previous run may still hold the log.
async fn open_log(folder: &NodeFolder) -> Result<LogStore, LedgerNodeError> {
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    loop {
        match LogStore::open(folder) {
            Err(LedgerNodeError::Io { source, .. })
                if source.kind() == ErrorKind::WouldBlock && Instant::now() < deadline =>
            {
                tokio::time::sleep(RELEASE_TIMEOUT / 100).await;
            }
            opened => return opened,
        }
    }
}

fn quorum_error(error: impl std::fmt::Display) -> LedgerNodeError {
    LedgerNodeError::Quorum(error.to_string())
}

async fn listen(options: &Options) -> Result<Option<AdvertisedListener>, LedgerNodeError> {
    let Some(listen) = &options.peering.listen else {
        if options.peering.join.is_empty() {
            return Ok(None);
        }
        let what = "a node that joins must be reachable: give it an address for the other nodes (`listen`)";
        return Err(LedgerNodeError::Options(what.into()));
    };
    let listener = PeerListener::bind(listen).await?;
    if options.peering.tls.is_none() && !listener.address.ip().is_loopback() {
        if !options.peering.insecure {
            return Err(LedgerNodeError::Options(format!(
                "cluster.listen {listen} can be reached from other machines, and without certificates whoever reaches it can \
                 change the ledger and stop it. Set cluster.tls, or listen on the loopback (127.0.0.1, ::1), or, in a network \
                 that nobody else is in, set cluster.allow_plaintext = true"
            )));
        }
        tracing::warn!(
            listen = %listener.address,
            "ANYBODY who reaches this address can read and change the ledger, and have clients' prompts lent by their token \
             ids: cluster.allow_plaintext lets other nodes in without a certificate, and all they say goes over the network as plain \
             text. Set cluster.tls, or keep the address in a network of its own"
        );
    }
    let address = match &options.peering.advertise {
        Some(advertise) => advertise.clone(),
        None if listener.address.ip().is_unspecified() => {
            let what =
                format!("others cannot call {listen}: say under which address they reach it (cluster.advertise)");
            return Err(LedgerNodeError::Options(what));
        }
        None => listener.address.to_string(),
    };
    let tls = options.peering.tls.as_ref().map(|files| PeerTls::load(files, &address)).transpose()?;
    Ok(Some(AdvertisedListener { listener, address, tls }))
}

/// Determines the identity of the data directory, or creates it.
async fn identify(
    folder: LockedFolder,
    options: &Options,
    reachable: Option<&AdvertisedListener>,
) -> Result<NodeFolder, LedgerNodeError> {
    if let Some(identity) = folder.identity()? {
        return folder.reopen(identity, options.cluster);
    }
    let seeds = join_seeds(&folder, options)?;
    if seeds.is_empty() {
        let identity = founder(options.cluster);
        if reachable.is_some() {
            tracing::warn!(
                cluster = %identity.cluster,
                data_dir = %folder.root.display(),
                "a NEW cluster is founded here, as the data directory is empty and nobody is named to join. A node that \
                 belonged to another cluster, and lost its disk, must not be started like this: stop it, empty the \
                 directory, and start it with --join and a member's address"
            );
        }
        return folder.adopt(identity);
    }
    let reachable = reachable.ok_or_else(|| unreachable_join_error(&folder, &seeds))?;
    let contact = (seeds.as_slice(), reachable.address.as_str());
    let unidentified = UnidentifiedNode { levels: options.levels(), tls: reachable.tls.clone() };
    let identity =
        joining::request_admission(&folder.root, contact, unidentified, options.peering.join_timeout).await?;
    let NodeIdentity { cluster: found, node } = identity;
    if let Some(expected) = options.cluster.filter(|expected| *expected != found) {
        let path = folder.root.clone();
        return Err(LedgerNodeError::OtherCluster { path, found, expected });
    }
    tracing::info!(%node, cluster = %found, "this node was let in");
    folder.adopt(identity)
}

/// Returns the join addresses: the configured ones, or those of an unfinished join.
fn join_seeds(folder: &LockedFolder, options: &Options) -> Result<Vec<String>, LedgerNodeError> {
    if !options.peering.join.is_empty() {
        return Ok(options.peering.join.clone());
    }
    let pending = PersistedJoin::read(&folder.root)?.map(|joining| joining.seeds).unwrap_or_default();
    if !pending.is_empty() {
        let (data_dir, members) = (folder.root.display(), pending.join(", "));
        tracing::info!(%data_dir, members, "resuming the unfinished join of this data directory; to found a new cluster, start with an empty directory");
    }
    Ok(pending)
}

/// Returns all member addresses that this node was given: configured ones, and those of an unfinished join.
fn known_members(options: &Options) -> Result<Vec<String>, LedgerNodeError> {
    let pending = PersistedJoin::read(&options.data_dir)?.map(|joining| joining.seeds).unwrap_or_default();
    let all: BTreeSet<String> = options.peering.join.iter().cloned().chain(pending).collect();
    Ok(all.into_iter().collect())
}

fn unreachable_join_error(folder: &LockedFolder, seeds: &[String]) -> LedgerNodeError {
    LedgerNodeError::Options(format!(
        "{} holds a join through {} that is not done, and a node that joins must be reachable: give it an address for the \
         other nodes (`--cluster-listen`, cluster.listen), or start in an empty directory to found a cluster",
        folder.root.display(),
        seeds.join(", ")
    ))
}

/// Checks that the snapshot contains everything that was purged from the log. Returns the snapshot's index.
fn check_snapshot(snapshots: &SnapshotFile, log: &LogStore, folder: &NodeFolder) -> Result<u64, LedgerNodeError> {
    let path = folder.path("snapshot");
    let (purged, _) = log.bounds().map_err(LedgerNodeError::io(folder.path("log")))?;
    let upto = snapshots.meta()?.and_then(|meta| meta.last_log_id).map_or(0, |id| id.index);
    if upto < purged {
        let detail = format!("it ends at entry {upto}, but the log was purged up to entry {purged}");
        return Err(LedgerNodeError::Damaged { path, detail });
    }
    Ok(upto)
}

/// Checks the last vote's term. An implausibly high term is no disk damage, but no later election would be possible.
fn check_term(log: &LogStore, folder: &NodeFolder) -> Result<(), LedgerNodeError> {
    let path = folder.path("log");
    let term = log.term().map_err(LedgerNodeError::io(&path))?;
    if term > MAX_TERM { Err(LedgerNodeError::Term { path, term }) } else { Ok(()) }
}

fn check_level(core: &NodeCore, options: &Options) -> Result<(), LedgerNodeError> {
    let (level, highest) = (core.view().level(), options.levels().highest);
    if level > highest { Err(LedgerNodeError::Level { level, highest }) } else { Ok(()) }
}

/// Refuses to start a member that the others cannot call, because it would be a useless voter.
fn check_reachable(core: &NodeCore) -> Result<(), LedgerNodeError> {
    let metrics: openraft::RaftMetrics<TokioTypeConfig> = core.raft.metrics().borrow_watched().clone();
    let members = metrics.membership_config.nodes().count();
    if members < 2 || is_retired(&core.view(), core.node()) {
        return Ok(());
    }
    let what = format!(
        "this node is one of {members} of a cluster, and the others must reach it: give it an address for them again \
         (`--cluster-listen`, cluster.listen)"
    );
    Err(LedgerNodeError::Options(what))
}

/// Founds the quorum if there is none. Waits for it only if this node is the only voter.
async fn found_or_await_quorum(core: &NodeCore, address: &str) -> Result<(), LedgerNodeError> {
    let is_initialized = core.raft.is_initialized().await.map_err(quorum_error)?;
    let node = core.node();
    if !is_initialized && node == ledger::FOUNDER {
        let members = BTreeMap::from([(node.0, BasicNode::new(address))]);
        core.raft.initialize(members).await.map_err(quorum_error)?;
    } else if !is_only_voter(core) {
        return Ok(());
    } else {
        core.raft.trigger().elect(false).await.map_err(quorum_error)?;
    }
    let wait = core.raft.wait(Some(START_TIMEOUT));
    wait.current_leader(node.0, "a leader").await.map_err(quorum_error)?;
    core.raft.wait_for_recovery(Some(START_TIMEOUT)).await.map_err(quorum_error)?;
    core.update_quorum();
    Ok(())
}

/// Returns whether this node is the only voter.
pub(crate) fn is_only_voter(core: &NodeCore) -> bool {
    let metrics: openraft::RaftMetrics<TokioTypeConfig> = core.raft.metrics().borrow_watched().clone();
    metrics.membership_config.voter_ids().eq([core.node().0])
}

/// Raises the level of a cluster without writes to the highest that its founder supports.
pub(crate) async fn raise_level_of_new_cluster(core: &NodeCore, options: &Options) -> Result<(), LedgerNodeError> {
    let highest = options.levels().highest;
    // Every entry advances the ledger's clock, and snapshots keep it: so it shows past writes even if the records were
    // forgotten.
    let is_new = core.is_leading() && core.view().now() == LedgerTime::default();
    if !is_new || core.view().level() >= highest {
        return Ok(());
    }
    let ticket = core.submit(Command::RaiseLevel(highest)).map_err(quorum_error)?;
    match ticket.await.map_err(quorum_error)? {
        Outcome::Done => Ok(()),
        outcome => Err(quorum_error(format!("the new ledger refused level {highest}: {outcome:?}"))),
    }
}

/// Waits until the cluster lists this new member and the member has caught up.
pub(crate) async fn await_membership(
    core: &Arc<NodeCore>,
    address: String,
    options: &Options,
) -> Result<Option<AbortingTask>, LedgerNodeError> {
    let joining = PersistedJoin::read(&options.data_dir)?;
    let is_new = joining.is_some();
    let seeds = joining.map_or_else(|| options.peering.join.clone(), |joining| joining.seeds);
    if !is_new {
        let (own, join) = (core.clone(), options.peering.join.clone());
        let task = core.supervision.supervise("enrolment", move || {
            let enrolling = joining::enrol_self(own.clone(), address.clone(), seeds.clone());
            let comparing = joining::warn_of_foreign_seeds(own.clone(), join.clone());
            async move {
                tokio::join!(enrolling, comparing);
            }
        });
        return Ok(Some(AbortingTask(task)));
    }
    let mut enrolling = tokio::spawn(joining::enrol_self(core.clone(), address, seeds.clone()));
    let settled = tokio::time::timeout(options.peering.join_timeout, async {
        // It returns only once the cluster lists this node.
        drop((&mut enrolling).await);
        // A long log takes longer than a read's timeout.
        while crate::read::fresh_view(core, Consistency::Linearizable).await.is_err() {
            if *core.leader.borrow() == KnownLeader::Stopped {
                return false;
            }
            tracing::info!("this node has not caught up with the cluster yet");
        }
        true
    });
    match settled.await {
        Ok(true) => Ok(None),
        _ => {
            enrolling.abort();
            let why = "it has an id, but was not added or did not catch up in time; start it again, it goes on there";
            Err(LedgerNodeError::NotJoined { seeds: seeds.join(", "), why: why.into() })
        }
    }
}
