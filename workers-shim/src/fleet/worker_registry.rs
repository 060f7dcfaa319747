//! The workers of the fleet. Read as a snapshot, changed while requests are served.
//!
//! A worker that leaves gets no new requests. Its running requests finish and it is probed until then; its blocks are
//! forgotten at once. A worker that rejoins counts as new, and its events are followed once its predecessor's blocks
//! are forgotten.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use vocabulary::WorkerId;

use super::error::FleetError;
use super::worker_definition::WorkerDefinition;
use super::worker_handle::WorkerHandle;

/// Result of a change of the worker list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FleetChangeCounts {
    /// Workers that were added.
    pub joined: usize,
    /// Workers whose definition changed, so they start anew.
    pub changed: usize,
    /// Workers that were removed.
    pub left: usize,
}

/// All workers at one moment.
#[derive(Default)]
pub(super) struct WorkerTable {
    /// The listed workers, in order.
    pub(super) members: Vec<Arc<WorkerHandle>>,
    /// Workers that left and still run requests; those that left first come first.
    pub(super) leaving: Vec<Arc<WorkerHandle>>,
    by_id: HashMap<WorkerId, Arc<WorkerHandle>>,
}

impl WorkerTable {
    fn of(members: Vec<Arc<WorkerHandle>>, leaving: Vec<Arc<WorkerHandle>>) -> Self {
        // The current handle of a rejoined worker replaces the one that left.
        let all = leaving.iter().chain(&members);
        let by_id = all.map(|member| (member.id, member.clone())).collect();
        Self { members, leaving, by_id }
    }

    /// Returns the worker, also one that is leaving.
    pub(super) fn member(&self, worker: WorkerId) -> Option<&Arc<WorkerHandle>> {
        self.by_id.get(&worker)
    }

    fn serving(&self, worker: WorkerId) -> Option<&Arc<WorkerHandle>> {
        self.member(worker).filter(|member| !member.has_left())
    }
}

/// A new worker, and its predecessor whose blocks have to be forgotten first.
pub(super) struct WorkerSuccession {
    pub(super) member: Arc<WorkerHandle>,
    pub(super) predecessor: Option<Arc<WorkerHandle>>,
}

/// The table of workers and its lock for changes.
#[derive(Default)]
pub(super) struct WorkerRegistry {
    table: ArcSwap<WorkerTable>,
    changing: Mutex<()>,
}

impl WorkerRegistry {
    pub(super) fn load(&self) -> Guard<Arc<WorkerTable>> {
        self.table.load()
    }

    /// Replaces the list of workers, in this order. Those with an unchanged definition stay; all others leave.
    pub(super) fn set_workers(
        &self,
        specs: Vec<WorkerDefinition>,
        member_of: impl Fn(WorkerDefinition) -> WorkerHandle,
    ) -> Result<(FleetChangeCounts, Vec<WorkerSuccession>), FleetError> {
        let _changing = self.changing.lock();
        let table = self.table.load_full();
        let mut seen = HashSet::new();
        if let Some(spec) = specs.iter().find(|spec| !seen.insert(WorkerId::of_endpoint(&spec.endpoint))) {
            return Err(FleetError::DuplicateWorker(spec.endpoint.clone()));
        }
        let (mut turnover, mut newcomers) = (FleetChangeCounts::default(), Vec::new());
        let mut members = Vec::with_capacity(specs.len());
        for spec in specs {
            let id = WorkerId::of_endpoint(&spec.endpoint);
            let known = table.serving(id);
            if let Some(same) = known.filter(|member| member.spec == spec) {
                members.push(same.clone());
                continue;
            }
            turnover.joined += usize::from(known.is_none());
            turnover.changed += usize::from(known.is_some());
            let member = Arc::new(member_of(spec));
            known.into_iter().for_each(|known| member.carry_over(known));
            newcomers.push(WorkerSuccession { member: member.clone(), predecessor: table.member(id).cloned() });
            members.push(member);
        }
        turnover.left = table.members.len() + turnover.joined - members.len();
        let stays = |old: &Arc<WorkerHandle>| members.iter().any(|member| Arc::ptr_eq(member, old));
        let gone: Vec<_> = match turnover.changed + turnover.left {
            0 => Vec::new(),
            _ => table.members.iter().filter(|old| !stays(old)).cloned().collect(),
        };
        let leaving = table.leaving.iter().chain(&gone).cloned().collect();
        self.table.store(Arc::new(WorkerTable::of(members, leaving)));
        gone.iter().for_each(|member| member.mark_left());
        Ok((turnover, newcomers))
    }

    /// Removes a worker that left and runs no more requests.
    pub(super) fn remove(&self, gone: &Arc<WorkerHandle>) {
        let _changing = self.changing.lock();
        let table = self.table.load_full();
        let leaving = table.leaving.iter().filter(|member| !Arc::ptr_eq(member, gone)).cloned().collect();
        self.table.store(Arc::new(WorkerTable::of(table.members.clone(), leaving)));
    }
}
