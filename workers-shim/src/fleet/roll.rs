//! Who belongs to the fleet. Read as a snapshot, changed while requests are served.
//!
//! A worker that leaves gets nothing new. What it began it brings to its end, watched as before; what was known of its
//! blocks is forgotten at once. One that comes back is somebody new, who is followed once the former is forgotten.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use vocabulary::WorkerId;

use super::FleetError;
use super::config::WorkerSpec;
use super::member::Member;

/// What a change of the fleet came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Turnover {
    /// Workers that were not there.
    pub joined: usize,
    /// Workers that are described otherwise, and so begin anew.
    pub changed: usize,
    /// Workers that are no longer there.
    pub left: usize,
}

/// The workers at one moment.
#[derive(Default)]
pub(super) struct Table {
    /// Those that get work, in the order of their list.
    pub(super) members: Vec<Arc<Member>>,
    /// Those that left and are not at their end yet, the longest gone first.
    pub(super) leaving: Vec<Arc<Member>>,
    places: HashMap<WorkerId, Arc<Member>>,
}

impl Table {
    fn of(members: Vec<Arc<Member>>, leaving: Vec<Arc<Member>>) -> Self {
        // Whoever came back goes before who left.
        let all = leaving.iter().chain(&members);
        let places = all.map(|member| (member.id, member.clone())).collect();
        Self { members, leaving, places }
    }

    /// The worker, also one that is leaving.
    pub(super) fn member(&self, worker: WorkerId) -> Option<&Arc<Member>> {
        self.places.get(&worker)
    }

    fn serving(&self, worker: WorkerId) -> Option<&Arc<Member>> {
        self.member(worker).filter(|member| !member.has_left())
    }
}

/// Somebody who joins, and who is to be forgotten before.
pub(super) struct Newcomer {
    pub(super) member: Arc<Member>,
    pub(super) before: Option<Arc<Member>>,
}

/// The table, and the way to change it.
#[derive(Default)]
pub(super) struct Roll {
    table: ArcSwap<Table>,
    changing: Mutex<()>,
}

impl Roll {
    pub(super) fn load(&self) -> Guard<Arc<Table>> {
        self.table.load()
    }

    /// Makes these the workers, in this order. Those who are described as before stay as they are; all others leave.
    pub(super) fn set(
        &self,
        specs: Vec<WorkerSpec>,
        member_of: impl Fn(WorkerSpec) -> Member,
    ) -> Result<(Turnover, Vec<Newcomer>), FleetError> {
        let _changing = self.changing.lock();
        let table = self.table.load_full();
        let mut seen = HashSet::new();
        if let Some(spec) = specs.iter().find(|spec| !seen.insert(WorkerId::of_endpoint(&spec.endpoint))) {
            return Err(FleetError::Twice(spec.endpoint.clone()));
        }
        let (mut turnover, mut newcomers) = (Turnover::default(), Vec::new());
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
            known.into_iter().for_each(|known| member.describes_anew(known));
            newcomers.push(Newcomer { member: member.clone(), before: table.member(id).cloned() });
            members.push(member);
        }
        turnover.left = table.members.len() + turnover.joined - members.len();
        let stays = |old: &Arc<Member>| members.iter().any(|member| Arc::ptr_eq(member, old));
        let gone: Vec<_> = match turnover.changed + turnover.left {
            0 => Vec::new(),
            _ => table.members.iter().filter(|old| !stays(old)).cloned().collect(),
        };
        let leaving = table.leaving.iter().chain(&gone).cloned().collect();
        self.table.store(Arc::new(Table::of(members, leaving)));
        gone.iter().for_each(|member| member.leave());
        Ok((turnover, newcomers))
    }

    /// Takes out somebody who left and has brought everything to its end.
    pub(super) fn strike(&self, gone: &Arc<Member>) {
        let _changing = self.changing.lock();
        let table = self.table.load_full();
        let leaving = table.leaving.iter().filter(|member| !Arc::ptr_eq(member, gone)).cloned().collect();
        self.table.store(Arc::new(Table::of(table.members.clone(), leaving)));
    }
}
