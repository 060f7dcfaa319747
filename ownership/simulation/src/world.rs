//! The simulated world: nodes with their disks, the network between them, and the recorder.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use consensus::SupportedLevels;
use ledger::LEVEL;
use openraft::AsyncRuntime;
use openraft::async_runtime::watch::WatchReceiver;

use crate::checks::durability::{self, EntryDurability};
use crate::checks::joint_configs::{JointCompletionCheck, LeaderReport};
use crate::checks::log_order::{self, LogProgress, MonotonicViewCheck};
use crate::disk::{ProcessEnd, SimDisk};
use crate::network_model::{EndpointNumber, MessageFate, NetworkModel};
use crate::process::{self, Pid};
use crate::rng::Rng;
use crate::run_plan::SimPlan;
use crate::run_recorder::RunRecorder;
use crate::runtime::SimulatedRuntime;
use crate::sim_node::{SimNode, SimNodeParts};

/// Feature level of the older release.
pub(crate) const OLD_LEVEL: u32 = LEVEL - 1;

/// A node over all its processes.
#[derive(Debug)]
struct SimHost {
    disk: SimDisk,
    pid: Option<Pid>,
    boots: u64,
    /// Highest feature level of its release.
    release: u32,
}

pub(crate) struct SimWorld {
    /// Plan of this run.
    pub(crate) plan: SimPlan,
    pub(crate) recorder: RunRecorder,
    fabric: Mutex<NetworkModel>,
    slots: Mutex<BTreeMap<u64, SimHost>>,
    running: Mutex<BTreeMap<u64, Arc<SimNode>>>,
    views: Mutex<MonotonicViewCheck>,
    joints: Mutex<JointCompletionCheck>,
    /// Whether a raise of the level was attempted: releases are not rolled back any more.
    is_level_raised: AtomicBool,
    trace: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimWorld {
    pub(crate) fn new(plan: SimPlan, recorder: RunRecorder) -> Arc<Self> {
        let mixes = plan.changes.releases;
        let fabric = Mutex::new(NetworkModel::new(Rng::stream(plan.seed, "network")));
        Arc::new(Self {
            plan,
            recorder,
            fabric,
            slots: Mutex::default(),
            running: Mutex::default(),
            views: Mutex::default(),
            joints: Mutex::default(),
            is_level_raised: AtomicBool::new(!mixes),
            trace: AtomicU64::new(0),
        })
    }

    pub(crate) fn fabric(&self) -> MutexGuard<'_, NetworkModel> {
        lock(&self.fabric)
    }

    pub(crate) fn fate(&self, from: EndpointNumber, to: EndpointNumber) -> MessageFate {
        self.fabric().fate(from, to)
    }

    /// Returns whether messages get through in this direction.
    pub(crate) fn connects(&self, from: EndpointNumber, to: EndpointNumber) -> bool {
        self.fabric().connects(from, to)
    }

    /// Adds to the digest of all events, in order.
    pub(crate) fn add_to_digest(&self, words: &[u64]) {
        let mut digest = self.trace.load(Relaxed);
        for word in words {
            digest = (digest.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
        self.trace.store(digest, Relaxed);
    }

    pub(crate) fn digest(&self) -> u64 {
        self.trace.load(Relaxed)
    }

    /// Returns the highest feature level of the release that new nodes get.
    pub(crate) fn newest_level(&self) -> u32 {
        if self.is_level_raised() { LEVEL } else { OLD_LEVEL }
    }

    /// Adds a node with an empty disk and this release.
    pub(crate) fn add(&self, id: u64, release: u32) {
        let disk = SimDisk::new(Rng::stream(self.plan.seed ^ id << 32, "disk"));
        lock(&self.slots).insert(id, SimHost { disk, pid: None, boots: 0, release });
    }

    /// Returns all nodes that were ever added.
    pub(crate) fn ids(&self) -> Vec<u64> {
        lock(&self.slots).keys().copied().collect()
    }

    pub(crate) fn disk(&self, id: u64) -> Option<SimDisk> {
        lock(&self.slots).get(&id).map(|slot| slot.disk.clone())
    }

    pub(crate) fn is_level_raised(&self) -> bool {
        self.is_level_raised.load(Relaxed)
    }

    pub(crate) fn mark_level_raised(&self) {
        self.is_level_raised.store(true, Relaxed);
    }

    /// Returns the highest feature level of a node's release.
    pub(crate) fn release(&self, id: u64) -> u32 {
        lock(&self.slots).get(&id).map_or(LEVEL, |slot| slot.release)
    }

    /// Installs another release; the next process of the node runs it.
    pub(crate) fn set_release(&self, id: u64, level: u32) {
        if let Some(slot) = lock(&self.slots).get_mut(&id) {
            slot.release = level;
        }
    }

    /// Returns a node's process, if one was started and not killed.
    pub(crate) fn pid(&self, id: u64) -> Option<Pid> {
        lock(&self.slots).get(&id).and_then(|slot| slot.pid).filter(|pid| process::is_alive(*pid))
    }

    /// Returns the running process of a node, if it is up.
    pub(crate) fn running_node(&self, id: u64) -> Option<Arc<SimNode>> {
        lock(&self.running).get(&id).filter(|node| process::is_alive(node.pid)).cloned()
    }

    pub(crate) fn running_nodes(&self) -> Vec<Arc<SimNode>> {
        lock(&self.running).values().filter(|node| process::is_alive(node.pid)).cloned().collect()
    }

    /// Starts a node that has no process. What its disk holds must be enough.
    pub(crate) fn start(self: &Arc<Self>, id: u64) {
        if self.pid(id).is_some() {
            return;
        }
        let (disk, boot, pid, highest) = {
            let mut slots = lock(&self.slots);
            let Some(slot) = slots.get_mut(&id) else { return };
            slot.boots += 1;
            let drift = Rng::stream(self.plan.seed ^ id << 32 ^ slot.boots, "drift").within(0, 2 * self.plan.drift);
            let pid = process::begin(drift as i64 - self.plan.drift as i64);
            slot.pid = Some(pid);
            (slot.disk.clone(), slot.boots, pid, slot.release)
        };
        self.recorder.record_result(log_order::check_restart(id, log_progress(&disk)));
        self.recorder.count("starts");
        self.recorder.log(|| format!("node {id} starts"));
        self.add_to_digest(&[id, boot]);
        let world = self.clone();
        process::run_in(pid, || {
            drop(SimulatedRuntime::spawn(async move {
                let parts = SimNodeParts { id, pid, boot, disk, levels: SupportedLevels { lowest: 1, highest } };
                match SimNode::start(&world, parts).await {
                    Some(node) => drop(lock(&world.running).insert(id, node)),
                    // It could not read or write its disk, so the process ends.
                    None => world.end_process(id, ProcessEnd::Killed),
                }
            }));
        });
    }

    /// Ends a node's process.
    pub(crate) fn end_process(&self, id: u64, ending: ProcessEnd) {
        let Some(pid) = self.pid(id) else { return };
        process::kill(pid);
        self.recorder.log(|| format!("node {id} ends: {ending:?}"));
        lock(&self.running).remove(&id);
        if let Some(disk) = self.disk(id) {
            disk.end_process(ending);
        }
        self.add_to_digest(&[id, ending as u64]);
    }

    /// Returns the node that leads in the highest term, according to the running nodes themselves.
    pub(crate) fn leader(&self) -> Option<Arc<SimNode>> {
        let leading = |node: &Arc<SimNode>| node.leadership().map(|leader| (leader.term, leader.node_id));
        self.running_nodes()
            .into_iter()
            .filter_map(|node| Some((leading(&node)?, node)))
            .max_by_key(|(term, _)| *term)
            .map(|(_, node)| node)
    }

    /// Checks what must hold on every node at any time.
    pub(crate) fn check(&self) {
        for node in self.running_nodes() {
            let metrics = node.raft.metrics();
            let marks = {
                let now = metrics.borrow_watched();
                let index = |id: Option<consensus::LogId>| id.map_or(0, |id| id.index);
                LogProgress {
                    purged: index(now.purged),
                    snapshot: index(now.snapshot),
                    applied: index(now.last_applied),
                    committed: index(now.local_committed),
                    last: now.last_log_index.unwrap_or(0),
                }
            };
            self.recorder.record_result(log_order::check(node.id, marks));
            let boots = lock(&self.slots).get(&node.id).map_or(0, |slot| slot.boots);
            self.recorder.record_result(lock(&self.views).check((node.id, boots), node.view().applied()));
            self.recorder.record_result(lock(&self.joints).check(node.id, leader_report(&node)));
        }
    }

    /// Checks, before a client is told that an entry is applied, that a quorum keeps it.
    pub(crate) fn check_acknowledged(&self, node: &SimNode, index: u64) {
        let metrics = node.raft.metrics();
        let (effective, committed) = {
            let now = metrics.borrow_watched();
            let sets = |stored: &consensus::StoredMembership| stored.membership().get_joint_config().to_vec();
            (sets(&now.membership_config), sets(&now.committed_membership_config))
        };
        let keepers: EntryDurability =
            lock(&self.slots).iter().map(|(id, slot)| (*id, is_durable(&slot.disk, index))).collect();
        // Between two memberships, either may be the one under which it was committed.
        let checked = durability::check(index, &effective, &keepers);
        self.recorder.record_result(checked.or_else(|_| durability::check(index, &committed, &keepers)));
        self.recorder.on_acknowledged(index);
    }
}

/// Returns what a node reports of its leadership, if it leads.
fn leader_report(node: &SimNode) -> Option<LeaderReport> {
    let leadership = node.leadership().map(|leader| (leader.term, leader.node_id))?;
    let metrics = node.raft.metrics();
    let now = metrics.borrow_watched();
    let stored = &now.membership_config;
    let is_joint = stored.membership().get_joint_config().len() > 1;
    let joint = stored.log_id().filter(|_| is_joint).map(|id| id.index);
    Some(LeaderReport { leadership, joint, committed: now.local_committed.map_or(0, |id| id.index) })
}

/// Returns whether an entry is durable on a disk.
fn is_durable(disk: &SimDisk, index: u64) -> bool {
    let snapshot = disk.snapshot().and_then(|(meta, _)| meta.last_log_id).map_or(0, |id| id.index);
    disk.durable_upto().max(snapshot) >= index
}

fn log_progress(disk: &SimDisk) -> LogProgress {
    let index = |id: Option<consensus::LogId>| id.map_or(0, |id| id.index);
    let (snapshot, mark) = (disk.snapshot().and_then(|(meta, _)| meta.last_log_id), disk.mark());
    disk.read(|log| LogProgress {
        purged: index(log.purged),
        snapshot: index(snapshot),
        applied: 0,
        committed: index(log.committed).max(mark),
        last: index(log.last()),
    })
}
