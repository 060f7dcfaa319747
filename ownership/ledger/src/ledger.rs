//! The replicated state: records, and the indexes derived from them.
//!
//! Cloning is O(1). Nothing here reads a clock, draws a random number, or depends on the iteration order of a hash map.

use std::io;
use std::sync::Arc;

use imbl::{OrdMap, OrdSet};
use serde::{Deserialize, Serialize};
use vocabulary::{
    ArtifactGroupId, ArtifactId, ClientId, Epoch, LedgerTime, NodeId, Owner, PrefixId, SessionId, TenantId, WorkerId,
};
use xxhash_rust::xxh3::Xxh3;

use crate::artifact::{Artifact, Scope};
use crate::artifact_table::{ArtifactTable, BoundaryArtifactView};
use crate::boundary_index::BoundaryIndex;
use crate::changes::EntryChanges;
use crate::clients::ClientRecord;
use crate::cluster_records::{ClusterRecords, Node};
use crate::limits::LedgerLimits;
use crate::origin_interner::ChainDescriptorInterner;
use crate::radix::RadixMap;
use crate::record::{Intent, Session, Worker, WorkerLease};
use crate::session_table::SessionTable;

/// Number of records that a tenant has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TenantUsage {
    /// Artifacts.
    pub artifacts: u64,
    /// Sessions.
    pub sessions: u64,
}

/// Where a restored ledger starts in another cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RestoreBaseline {
    /// Log index in the new cluster's log at which the ledger starts.
    pub applied: u64,
    /// Latest time that the lost cluster's clock may have reached.
    pub clock: LedgerTime,
    /// Lower bound of the new generation, in seconds since 1970. If the same backup is restored twice, the second
    /// restore outranks all grants of the first one.
    pub generation: u32,
}

/// All records; exactly what a snapshot contains.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
pub(crate) struct LedgerRecords {
    pub(crate) limits: LedgerLimits,
    pub(crate) generation: u32,
    pub(crate) clock: LedgerTime,
    pub(crate) applied: u64,
    pub(crate) workers: OrdMap<WorkerId, Arc<Worker>>,
    pub(crate) sessions: SessionTable,
    pub(crate) artifacts: ArtifactTable,
    pub(crate) intents: OrdMap<SessionId, Arc<Vec<Intent>>>,
    pub(crate) clients: OrdMap<ClientId, ClientRecord>,
    /// Records added since level 1; `None` at level 1, so that the encoding stays the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cluster: Option<ClusterRecords>,
}

/// Indexes derived from the records; rebuilt when a snapshot is read.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct LedgerIndexes {
    /// Boundaries by prefix.
    pub(crate) boundaries: BoundaryIndex,
    /// Held leases by deadline.
    pub(crate) leases: OrdSet<(LedgerTime, WorkerId)>,
    /// Sessions by last write.
    pub(crate) sessions: RadixMap<[u64; 3], (), 64>,
    /// Unreferenced artifacts by last write.
    pub(crate) idle_artifacts: OrdSet<(LedgerTime, ArtifactId)>,
    /// Sessions of each tenant by last write.
    pub(crate) sessions_by_tenant: OrdMap<TenantId, RadixMap<[u64; 3], (), 64>>,
    /// Unreferenced artifacts of each tenant by last write.
    pub(crate) idle_by_tenant: OrdMap<TenantId, OrdSet<(LedgerTime, ArtifactId)>>,
    /// Replicas by expiry.
    pub(crate) replicas: OrdSet<(LedgerTime, ArtifactId, Owner)>,
    pub(crate) intents: OrdSet<(LedgerTime, SessionId)>,
    pub(crate) groups: OrdSet<(ArtifactGroupId, ArtifactId)>,
    /// Artifacts in groups, by group and last write.
    pub(crate) groups_by_last_write: OrdSet<(ArtifactGroupId, LedgerTime, ArtifactId)>,
    pub(crate) usage: OrdMap<TenantId, TenantUsage>,
    /// Chain descriptors shared between records.
    pub(crate) origins: ChainDescriptorInterner,
}

impl LedgerIndexes {
    pub(crate) fn of(records: &LedgerRecords) -> Self {
        let mut index = Self::default();
        for worker in records.workers.values() {
            if let WorkerLease::Held { until } = worker.lease {
                index.leases.insert((until, worker.id));
            }
        }
        for session in records.sessions.iter() {
            index.add_session(&session);
            index.update_usage(&session.tenant, |usage| usage.sessions += 1);
        }
        for artifact in records.artifacts.iter() {
            index.add_artifact(&artifact);
        }
        for (session, intents) in &records.intents {
            index.intents.extend(intents.iter().map(|intent| (intent.expires, *session)));
        }
        index
    }

    fn add_artifact(&mut self, artifact: &Artifact) {
        let scope = artifact.origin.scope();
        for boundary in &artifact.boundaries {
            self.boundaries.insert(boundary.point.id, scope, artifact.id);
        }
        self.origins.intern(&mut artifact.origin.clone());
        self.update_usage(&artifact.origin.tenant, |usage| usage.artifacts += 1);
        self.index_metadata(artifact);
    }
}

/// The ledger. It changes only through `apply`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ledger {
    pub(crate) records: LedgerRecords,
    pub(crate) index: LedgerIndexes,
    pub(crate) changes: EntryChanges,
}

impl From<LedgerRecords> for Ledger {
    fn from(records: LedgerRecords) -> Self {
        let index = LedgerIndexes::of(&records);
        Self { records, index, changes: EntryChanges::default() }
    }
}

impl Serialize for Ledger {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.records.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Ledger {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        LedgerRecords::deserialize(deserializer).map(Self::from)
    }
}

impl Ledger {
    /// Returns this ledger for use in another cluster. Its generation is later, so that all new and all remembered
    /// grants outrank whatever the lost cluster granted. Clients and nodes are not carried over.
    pub fn restored(&self, restore: RestoreBaseline) -> Self {
        let mut records = self.records.clone();
        records.generation = records.generation.saturating_add(1).max(restore.generation);
        records.clock = records.clock.max(restore.clock);
        records.applied = restore.applied;
        records.clients.clear();
        if let Some(cluster) = &mut records.cluster {
            *cluster = ClusterRecords {
                quotas: cluster.quotas.clone(),
                ..ClusterRecords::with_founder(cluster.level, records.clock)
            };
        }
        let epoch = Epoch { generation: records.generation, index: restore.applied, position: 0 };
        let workers = self.workers().map(|worker| (worker.id, Arc::new(Worker { epoch, ..worker.clone() })));
        records.workers = workers.collect();
        let sessions = self.sessions().map(|session| Session { epoch, ..session });
        records.sessions = sessions.collect();
        records.artifacts = self.artifacts().map(|artifact| Artifact { epoch, ..artifact }).collect();
        records.into()
    }

    /// Returns the cluster's feature level.
    pub fn level(&self) -> u32 {
        self.records.cluster.as_ref().map_or(1, |cluster| cluster.level)
    }

    /// Returns when the ledger was restored from a backup, in seconds since 1970; 0 if it never was. Earlier releases
    /// counted restores here.
    pub fn generation(&self) -> u32 {
        self.records.generation
    }

    /// Returns a node that was admitted.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.records.cluster.as_ref()?.nodes.get(&id).map(|node| &**node)
    }

    /// Iterates over all admitted nodes, including retired ones.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.records.cluster.iter().flat_map(|cluster| cluster.nodes.values()).map(|node| &**node)
    }

    /// Returns a tenant's quota, if it has one.
    pub fn quota(&self, tenant: &TenantId) -> Option<u64> {
        self.records.cluster.as_ref()?.quotas.get(tenant).copied()
    }

    /// Iterates over all quotas, by tenant.
    pub fn quotas(&self) -> impl Iterator<Item = (&TenantId, u64)> {
        self.records.cluster.iter().flat_map(|cluster| cluster.quotas.iter()).map(|(tenant, quota)| (tenant, *quota))
    }

    /// Returns the number of tenants with a quota.
    pub fn quota_count(&self) -> usize {
        self.records.cluster.as_ref().map_or(0, |cluster| cluster.quotas.len())
    }

    /// Returns the number of records that a tenant has.
    pub fn usage(&self, tenant: &TenantId) -> TenantUsage {
        self.index.usage.get(tenant).copied().unwrap_or_default()
    }

    /// The ledger's clock.
    pub fn now(&self) -> LedgerTime {
        self.records.clock
    }

    /// Returns the log index of the last applied entry.
    pub fn applied(&self) -> u64 {
        self.records.applied
    }

    /// Returns the limits.
    pub fn limits(&self) -> &LedgerLimits {
        &self.records.limits
    }

    /// Returns a worker.
    pub fn worker(&self, id: WorkerId) -> Option<&Worker> {
        self.records.workers.get(&id).map(|worker| &**worker)
    }

    /// Iterates over all workers, by id.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.records.workers.values().map(|worker| &**worker)
    }

    /// Returns a session.
    pub fn session(&self, id: SessionId) -> Option<Session> {
        self.records.sessions.get(id)
    }

    /// Iterates over all sessions, by id.
    pub fn sessions(&self) -> impl Iterator<Item = Session> {
        self.records.sessions.iter()
    }

    /// Returns the number of open sessions.
    pub fn session_count(&self) -> usize {
        self.records.sessions.len()
    }

    /// Returns an artifact.
    pub fn artifact(&self, id: ArtifactId) -> Option<Artifact> {
        self.records.artifacts.get(id)
    }

    /// Iterates over all artifacts, by id.
    pub fn artifacts(&self) -> impl Iterator<Item = Artifact> {
        self.records.artifacts.iter()
    }

    /// Returns the number of artifacts.
    pub fn artifact_count(&self) -> usize {
        self.records.artifacts.len()
    }

    /// Iterates over the artifacts of a group.
    pub fn group(&self, group: ArtifactGroupId) -> impl Iterator<Item = Artifact> {
        let all = (group, ArtifactId(0))..=(group, ArtifactId(u128::MAX));
        self.index.groups.range(all).filter_map(|(_, id)| self.artifact(*id))
    }

    /// Returns when an artifact of the group was last written.
    pub fn group_touched(&self, group: ArtifactGroupId) -> Option<LedgerTime> {
        let all = (group, LedgerTime(0), ArtifactId(0))..=(group, LedgerTime(u64::MAX), ArtifactId(u128::MAX));
        self.index.groups_by_last_write.range(all).next_back().map(|(_, touched, _)| *touched)
    }

    /// Iterates over the announced steps of a session.
    pub fn intents(&self, session: SessionId) -> impl Iterator<Item = &Intent> {
        let now = self.records.clock;
        self.records.intents.get(&session).into_iter().flat_map(|all| all.iter()).filter(move |i| i.expires > now)
    }

    /// Returns the artifact that keeps a prefix as a boundary.
    pub fn artifact_with_prefix(&self, prefix: PrefixId, scope: Scope) -> Option<Artifact> {
        self.boundary(prefix, scope).map(|kept| kept.artifact())
    }

    /// Returns whether some artifact keeps a prefix as a boundary.
    pub(crate) fn has_boundary(&self, prefix: PrefixId, scope: Scope) -> bool {
        self.boundary(prefix, scope).is_some()
    }

    /// Returns the boundary at the end of a prefix, if one is kept.
    pub(crate) fn boundary(&self, prefix: PrefixId, scope: Scope) -> Option<BoundaryArtifactView<'_>> {
        self.index.boundaries.find(prefix, scope, &self.records.artifacts)
    }

    /// Returns the session with a head at this prefix in the artifact; if there are several, the one written last.
    pub(crate) fn session_with_head(&self, artifact: &Artifact, prefix: PrefixId) -> Option<Session> {
        let has = |s: &Session| s.heads.iter().any(|head| head.artifact == artifact.id && head.point.id == prefix);
        artifact.sessions.iter().filter_map(|id| self.session(id)).filter(has).max_by_key(|s| (s.touched, s.id))
    }

    /// Iterates over held leases whose deadline has passed, oldest first. The leader proposes to expire them.
    pub fn overdue_leases(&self, now: LedgerTime) -> impl Iterator<Item = (LedgerTime, &Worker)> {
        let due = ..=(now, WorkerId(u64::MAX));
        self.index.leases.range(due).filter_map(|(until, id)| Some((*until, self.worker(*id)?)))
    }

    /// Writes all records as MessagePack.
    pub fn encode(&self, to: &mut dyn io::Write) -> io::Result<()> {
        encode_records(self, to)
    }

    /// Reads what [`encode`](Self::encode) wrote, and nothing that follows it.
    pub fn decode(from: &mut dyn io::Read) -> io::Result<Self> {
        // Not generic over the reader: the decoders of all records would be compiled again for each.
        rmp_serde::from_read(from).map_err(io::Error::other)
    }

    /// Returns a digest of all records, which is equal on all nodes at an equal applied index.
    ///
    /// Sessions and artifacts are hashed when they are written, so this walks only the small tables.
    pub fn state_hash(&self) -> u128 {
        struct HashingWriter(Xxh3);
        impl io::Write for HashingWriter {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.update(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let LedgerRecords {
            limits,
            generation,
            clock,
            applied,
            workers,
            sessions,
            artifacts,
            intents,
            clients,
            cluster,
        } = &self.records;
        let rest = (limits, generation, clock, applied, workers, intents, clients, cluster);
        let mut hashed = HashingWriter(Xxh3::new());
        encode_records(&rest, &mut hashed).expect("records encode, and hashing does not fail");
        hashed.0.update(&sessions.digest.to_le_bytes());
        hashed.0.update(&artifacts.digest.to_le_bytes());
        hashed.0.digest128()
    }
}

/// Not generic over the writer, as the coders of all records would be compiled again for each; buffered, as a record is
/// written in pieces of a few bytes.
fn encode_records(records: &impl Serialize, to: &mut dyn io::Write) -> io::Result<()> {
    let mut buffered = io::BufWriter::new(to);
    rmp_serde::encode::write(&mut buffered, records).map_err(io::Error::other)?;
    buffered.into_inner().map(drop).map_err(io::IntoInnerError::into_error)
}
