//! The only code that writes records. Every write updates the indexes, too.

use std::sync::Arc;

use imbl::OrdSet;
use vocabulary::{ArtifactId, LedgerTime, SessionId, TenantId};

use crate::artifact::{Artifact, PrefixBoundary};
use crate::changes::RecordKey;
use crate::ledger::{Ledger, LedgerIndexes, TenantUsage};
use crate::record::{Intent, Session, Worker, WorkerLease};

/// Number of longest-idle unreferenced artifacts among which eviction picks the one with the coldest group.
const EVICTION_CANDIDATES: usize = 16;

impl Ledger {
    pub(crate) fn put_worker(&mut self, worker: Worker) {
        let id = worker.id;
        if let WorkerLease::Held { until } = worker.lease {
            self.index.leases.insert((until, id));
        }
        let until = |worker: &Worker| match worker.lease {
            WorkerLease::Held { until } => Some(until),
            WorkerLease::Expired { .. } | WorkerLease::Retired { .. } => None,
        };
        let same =
            |old: &Worker| Worker { lease: worker.lease, ..old.clone() } == worker && old.is_live() == worker.is_live();
        if !self.worker(id).is_some_and(same) {
            self.changes.put(RecordKey::Worker(id));
        }
        let (new, old) = (until(&worker), self.records.workers.insert(id, Arc::new(worker)));
        if let Some(until) = old.and_then(|old| until(&old)).filter(|old| new != Some(*old)) {
            self.index.leases.remove(&(until, id));
        }
    }

    /// Removes a worker whose lease is over.
    pub(crate) fn remove_worker(&mut self, worker: &Worker) {
        if let WorkerLease::Held { until } = worker.lease {
            self.index.leases.remove(&(until, worker.id));
        }
        self.records.workers.remove(&worker.id);
        self.changes.gone(RecordKey::Worker(worker.id));
    }

    /// Writes a session and the artifact references of its heads.
    pub(crate) fn put_session(&mut self, session: Session) {
        let old = self.session(session.id);
        match &old {
            // The commands of one entry write a session several times at the same ledger time.
            Some(old) if old.touch_key() == session.touch_key() && old.tenant == session.tenant => {}
            Some(old) => {
                self.index.drop_session(old);
                self.index.add_session(&session);
            }
            None => {
                self.index.update_usage(&session.tenant, |usage| usage.sessions += 1);
                self.index.add_session(&session);
            }
        }
        self.changes.put(RecordKey::Session(session.id));
        self.records.sessions.insert(&session);
        self.update_references(old.as_ref(), Some(&session));
    }

    pub(crate) fn remove_session(&mut self, id: SessionId) {
        if let Some(old) = self.records.sessions.remove(id) {
            self.index.drop_session(&old);
            self.index.update_usage(&old.tenant, |usage| usage.sessions -= 1);
            self.changes.gone(RecordKey::Session(id));
            self.update_references(Some(&old), None);
        }
        self.put_intents(id, Vec::new());
    }

    /// Moves a session's references from the artifacts of its old heads to those of its new heads.
    fn update_references(&mut self, old: Option<&Session>, new: Option<&Session>) {
        let holds = |session: Option<&Session>, id| session.is_some_and(|s| s.heads.iter().any(|h| h.artifact == id));
        for head in new.iter().flat_map(|session| &session.heads).filter(|head| !holds(old, head.artifact)) {
            self.edit_artifact(head.artifact, |artifact, session| artifact.sessions.insert(session), new);
        }
        for head in old.iter().flat_map(|session| &session.heads).filter(|head| !holds(new, head.artifact)) {
            self.edit_artifact(head.artifact, |artifact, session| artifact.sessions.remove(session), old);
        }
    }

    fn edit_artifact(
        &mut self,
        id: ArtifactId,
        edit: impl FnOnce(&mut Artifact, SessionId) -> bool,
        session: Option<&Session>,
    ) {
        if let (Some(mut artifact), Some(session)) = (self.artifact(id), session) {
            edit(&mut artifact, session.id);
            self.put_artifact(artifact);
        }
    }

    pub(crate) fn put_artifact(&mut self, mut artifact: Artifact) {
        let id = artifact.id;
        let old = self.artifact(id);
        self.index_boundaries(old.as_ref(), &artifact);
        match &old {
            Some(old) => self.index.unindex_metadata(old),
            None => {
                self.index.origins.intern(&mut artifact.origin);
                self.index.update_usage(&artifact.origin.tenant, |usage| usage.artifacts += 1);
            }
        }
        self.changes.put(RecordKey::Artifact(id));
        self.index.index_metadata(&artifact);
        self.records.artifacts.insert(&artifact);
    }

    /// Removes an unreferenced artifact.
    pub(crate) fn remove_artifact(&mut self, id: ArtifactId) {
        let Some(old) = self.records.artifacts.remove(id) else { return };
        let scope = old.origin.scope();
        for boundary in &old.boundaries {
            self.index.boundaries.remove(boundary.point.id, scope, id);
        }
        self.index.origins.release(&old.origin);
        self.index.unindex_metadata(&old);
        self.index.update_usage(&old.origin.tenant, |usage| usage.artifacts -= 1);
        self.changes.gone(RecordKey::Artifact(id));
        if let Some(mut parent) = old.parent.and_then(|parent| self.artifact(parent.artifact)) {
            parent.children.remove(id);
            self.put_artifact(parent);
        }
    }

    /// Updates the index of only the boundaries that changed; most boundaries of a long artifact never do.
    fn index_boundaries(&mut self, old: Option<&Artifact>, new: &Artifact) {
        let scope = new.origin.scope();
        let before: &[PrefixBoundary] = old.map_or(&[], |old| &old.boundaries);
        let same = before.iter().zip(&new.boundaries).take_while(|(a, b)| a.point == b.point).count();
        for boundary in &before[same..] {
            self.index.boundaries.remove(boundary.point.id, scope, new.id);
        }
        for boundary in &new.boundaries[same..] {
            self.index.boundaries.insert(boundary.point.id, scope, new.id);
        }
    }

    /// Replaces a session's intents.
    pub(crate) fn put_intents(&mut self, session: SessionId, intents: Vec<Intent>) {
        for old in self.records.intents.remove(&session).iter().flat_map(|old| old.iter()) {
            self.index.intents.remove(&(old.expires, session));
        }
        self.index.intents.extend(intents.iter().map(|intent| (intent.expires, session)));
        if !intents.is_empty() {
            self.records.intents.insert(session, Arc::new(intents));
        }
    }

    /// Closes the session that was idle longest.
    pub(crate) fn close_coldest_session(&mut self) {
        if let Some(([_, high, low], ())) = self.index.sessions.first() {
            self.remove_session(SessionId(u128::from(*high) << 64 | u128::from(*low)));
        }
    }

    /// Closes a session to make room for one of `tenant`.
    ///
    /// Closes the longest-idle session of the tenant that is most over its share, which may be `tenant` itself. No
    /// tenant within its share loses a session to one beyond its share.
    pub(crate) fn make_room_for_session(&mut self, tenant: &TenantId) {
        let closed = match self.level() {
            ..2 => None,
            _ => self.tenant_most_over_share(tenant, |usage| usage.sessions, |_| true),
        };
        let oldest = closed.and_then(|tenant| Some(*self.index.sessions_by_tenant.get(&tenant)?.first()?.0));
        match oldest {
            Some([_, high, low]) => self.remove_session(SessionId(u128::from(high) << 64 | u128::from(low))),
            None => self.close_coldest_session(),
        }
    }

    /// Evicts an artifact to make room for one of `tenant`, by the same rule; returns false if none can be evicted.
    /// Artifacts that sessions reference cannot.
    pub(crate) fn make_room_for_artifact(&mut self, tenant: &TenantId) -> bool {
        if self.level() < 2 {
            return self.evict_coldest_artifact();
        }
        let has_idle = |tenant: &TenantId| self.index.idle_by_tenant.contains_key(tenant);
        let crowding = self.tenant_most_over_share(tenant, |usage| usage.artifacts, has_idle);
        let coldest = match crowding.and_then(|tenant| self.index.idle_by_tenant.get(&tenant)) {
            Some(idle) => self.coldest_artifact(idle),
            // Only tenants within their share have evictable artifacts: a tenant over its share gets none of them.
            None if self.is_over_share(tenant, |usage| usage.artifacts) => None,
            None => self.coldest_artifact(&self.index.idle_artifacts),
        };
        if let Some(id) = coldest {
            self.remove_artifact(id);
        }
        coldest.is_some()
    }

    /// Returns a tenant's count if it gets one more, and its equal share of the total.
    fn usage_and_share(&self, tenant: &TenantId, count: impl Fn(&TenantUsage) -> u64) -> (u64, u64) {
        let others = self.index.usage.iter().filter(|(other, _)| *other != tenant);
        let (tenants, all) = others.fold((1, 0), |(tenants, all), (_, usage)| (tenants + 1, all + count(usage)));
        let own = self.index.usage.get(tenant).map_or(0, &count);
        (own + 1, (all + own) / tenants)
    }

    fn is_over_share(&self, tenant: &TenantId, count: impl Fn(&TenantUsage) -> u64) -> bool {
        let (own, share) = self.usage_and_share(tenant, count);
        own > share
    }

    /// Returns the tenant that is most over its share when `tenant` gets one more, among those with something to evict.
    /// On a tie `tenant` itself wins, then the first by name.
    fn tenant_most_over_share(
        &self,
        tenant: &TenantId,
        count: impl Fn(&TenantUsage) -> u64,
        can_go: impl Fn(&TenantId) -> bool,
    ) -> Option<TenantId> {
        let (own, share) = self.usage_and_share(tenant, &count);
        let others = self.index.usage.iter().filter(|(other, _)| *other != tenant);
        let all = others.map(|(other, usage)| (count(usage), other)).chain([(own, tenant)]);
        let beyond = all.filter(|(held, other)| *held > share && can_go(other));
        let most = beyond.max_by_key(|(held, other)| (*held, *other == tenant, std::cmp::Reverse(*other)));
        most.map(|(_, most)| most.clone())
    }

    /// Returns the unreferenced artifact to evict: among those idle longest, the one whose group is coldest. A group
    /// was last used when its newest artifact was written; an artifact without a group counts as its own group.
    fn coldest_artifact(&self, idle: &OrdSet<(LedgerTime, ArtifactId)>) -> Option<ArtifactId> {
        let warmth = |id| self.artifact(id)?.group.and_then(|group| self.group_touched(group));
        let candidates = if self.level() < 2 { 1 } else { EVICTION_CANDIDATES };
        let oldest = idle.iter().take(candidates);
        oldest.min_by_key(|(touched, id)| (warmth(*id).unwrap_or(*touched), *touched, *id)).map(|(_, id)| *id)
    }

    /// Evicts the coldest unreferenced artifact; returns false if all artifacts are referenced.
    pub(crate) fn evict_coldest_artifact(&mut self) -> bool {
        let coldest = self.coldest_artifact(&self.index.idle_artifacts);
        if let Some(id) = coldest {
            self.remove_artifact(id);
        }
        coldest.is_some()
    }

    /// Removes the worker whose lease has been over longest; returns false if all leases are held.
    pub(crate) fn evict_worker(&mut self) -> bool {
        let over = |worker: &Worker| match worker.lease {
            WorkerLease::Held { .. } => None,
            WorkerLease::Expired { at } | WorkerLease::Retired { at } => Some((at, worker.id)),
        };
        let coldest: Option<(LedgerTime, _)> = self.workers().filter_map(over).min();
        let worker = coldest.and_then(|(_, id)| self.worker(id).cloned());
        if let Some(worker) = &worker {
            self.remove_worker(worker);
        }
        worker.is_some()
    }
}

impl LedgerIndexes {
    /// Updates a tenant's record counts; a tenant without records is removed.
    pub(crate) fn update_usage(&mut self, tenant: &TenantId, count: impl FnOnce(&mut TenantUsage)) {
        let mut usage = self.usage.get(tenant).copied().unwrap_or_default();
        count(&mut usage);
        match usage == TenantUsage::default() {
            true => drop(self.usage.remove(tenant)),
            false => drop(self.usage.insert(tenant.clone(), usage)),
        }
    }

    pub(crate) fn add_session(&mut self, session: &Session) {
        self.sessions.insert(session.touch_key(), ());
        self.sessions_by_tenant.entry(session.tenant.clone()).or_default().insert(session.touch_key(), ());
    }

    fn drop_session(&mut self, session: &Session) {
        self.sessions.remove(&session.touch_key());
        let Some(own) = self.sessions_by_tenant.get_mut(&session.tenant) else { return };
        own.remove(&session.touch_key());
        if own.len() == 0 {
            self.sessions_by_tenant.remove(&session.tenant);
        }
    }

    /// Indexes everything about an artifact except its boundaries.
    pub(crate) fn index_metadata(&mut self, artifact: &Artifact) {
        if artifact.is_idle() {
            let place = (artifact.touched, artifact.id);
            self.idle_artifacts.insert(place);
            self.idle_by_tenant.entry(artifact.origin.tenant.clone()).or_default().insert(place);
        }
        self.replicas.extend(artifact.replicas.iter().map(|copy| (copy.expires, artifact.id, copy.holder)));
        self.groups.extend(artifact.group.map(|group| (group, artifact.id)));
        self.groups_by_last_write.extend(artifact.group.map(|group| (group, artifact.touched, artifact.id)));
    }

    fn unindex_metadata(&mut self, artifact: &Artifact) {
        let place = (artifact.touched, artifact.id);
        if self.idle_artifacts.remove(&place).is_some()
            && let Some(own) = self.idle_by_tenant.get_mut(&artifact.origin.tenant)
        {
            own.remove(&place);
            if own.is_empty() {
                self.idle_by_tenant.remove(&artifact.origin.tenant);
            }
        }
        for copy in &artifact.replicas {
            self.replicas.remove(&(copy.expires, artifact.id, copy.holder));
        }
        if let Some(group) = artifact.group {
            self.groups.remove(&(group, artifact.id));
            self.groups_by_last_write.remove(&(group, artifact.touched, artifact.id));
        }
    }
}
