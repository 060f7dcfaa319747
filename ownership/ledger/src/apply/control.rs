//! Commands of operators and of the cluster itself: nodes, levels, limits, pins, drains and quotas.

use std::sync::Arc;

use vocabulary::{ArtifactId, NodeId, TenantId};

use super::CommandResult;
use crate::artifact::Artifact;
use crate::cluster_records::{ClusterRecords, FOUNDER, Node, NodeLifecycle};
use crate::control::{AdmitNode, DrainWorker, NEXT_LEVEL, PinArtifact, SetQuota};
use crate::ledger::Ledger;
use crate::limits::LedgerLimits;
use crate::outcome::{Outcome, Refusal};
use crate::record::Worker;

/// Maximum number of nodes remembered, including retired ones. Beyond it the node that was retired first is forgotten.
pub(crate) const MAX_NODES: usize = 1_024;

pub(crate) const MAX_QUOTAS: usize = 1 << 16;

/// Maximum length of a node's address, in bytes.
const MAX_ADDRESS_BYTES: usize = 256;

impl Ledger {
    /// Admits a node. Ids only increase: a node with an unknown nonce is a new one, even if its address is known.
    pub(super) fn admit_node(&mut self, admit: &AdmitNode) -> CommandResult {
        if admit.address.is_empty() || admit.address.len() > MAX_ADDRESS_BYTES {
            return Err(Refusal::InvalidAddress);
        }
        let known = self.nodes().find(|node| node.nonce == admit.nonce && node.nonce != 0).cloned();
        if let Some(known) = known {
            if !known.is_member() {
                return Err(Refusal::NodeRemoved { node: known.id });
            }
            let node = known.id;
            if known.address != admit.address {
                self.put_node(Node { address: admit.address.clone(), ..known });
            }
            return Ok(Outcome::Admitted { node });
        }
        if self.nodes().count() >= MAX_NODES && !self.forget_retired_node() {
            return Err(Refusal::LedgerFull);
        }
        let Some(cluster) = &mut self.records.cluster else { return Err(Refusal::LedgerFull) };
        let node = NodeId(cluster.last_node.0 + 1);
        cluster.last_node = node;
        let membership = NodeLifecycle::Admitted { at: self.now() };
        self.put_node(Node { id: node, nonce: admit.nonce, address: admit.address.clone(), membership });
        Ok(Outcome::Admitted { node })
    }

    pub(super) fn retire_node(&mut self, id: NodeId) -> CommandResult {
        let node = self.node(id).ok_or(Refusal::UnknownNode)?.clone();
        if node.is_member() {
            self.put_node(Node { membership: NodeLifecycle::Retired { at: self.now() }, ..node });
        }
        Ok(Outcome::Done)
    }

    /// Raises the feature level. It never falls, and whoever applies the entry has checked that this release knows the
    /// level.
    pub(super) fn raise_level(&mut self, level: u32) -> CommandResult {
        let current = self.level();
        if level > NEXT_LEVEL {
            return Err(Refusal::FeatureLevelTooLow { needed: level, current });
        }
        let now = self.now();
        if self.records.cluster.is_none() && level > current {
            self.changes.put(crate::RecordKey::Node(FOUNDER));
        }
        if level > current {
            self.records.cluster.get_or_insert_with(|| ClusterRecords::with_founder(level, now)).level = level;
        }
        Ok(Outcome::Done)
    }

    /// Widens the limits. They never narrow, so that no entry has to forget more than a sweep may.
    pub(super) fn set_limits(&mut self, limits: &LedgerLimits) -> CommandResult {
        if !limits.covers(self.limits()) {
            return Err(Refusal::InvalidLimits);
        }
        self.records.limits = *limits;
        Ok(Outcome::Done)
    }

    pub(super) fn pin(&mut self, pin: PinArtifact) -> CommandResult {
        let artifact = self.artifact(pin.artifact).ok_or(Refusal::UnknownArtifact)?;
        if artifact.pinned != pin.pinned {
            self.put_artifact(Artifact { pinned: pin.pinned, ..artifact });
        }
        Ok(Outcome::Done)
    }

    pub(super) fn evict(&mut self, id: ArtifactId) -> CommandResult {
        let artifact = self.artifact(id).ok_or(Refusal::UnknownArtifact)?;
        if !artifact.pinned.is_no() {
            return Err(Refusal::Pinned);
        }
        if !artifact.is_idle() {
            return Err(Refusal::Referenced);
        }
        self.remove_artifact(id);
        Ok(Outcome::Done)
    }

    pub(super) fn drain_worker(&mut self, drain: DrainWorker) -> CommandResult {
        let worker = self.worker(drain.worker).ok_or(Refusal::UnknownWorker)?.clone();
        if worker.draining != drain.draining {
            self.put_worker(Worker { draining: drain.draining, ..worker });
        }
        Ok(Outcome::Done)
    }

    pub(super) fn set_quota(&mut self, set: &SetQuota) -> CommandResult {
        let known = self.quota(&set.tenant).is_some();
        if set.artifacts.is_some() && !known && self.quota_count() >= MAX_QUOTAS {
            return Err(Refusal::LedgerFull);
        }
        self.put_quota(&set.tenant, set.artifacts);
        Ok(Outcome::Done)
    }

    /// Checks whether a tenant may have one more artifact.
    pub(super) fn check_artifact_quota(&self, tenant: &TenantId) -> Result<(), Refusal> {
        let quota = self.quota(tenant).unwrap_or(u64::MAX);
        if self.usage(tenant).artifacts < quota { Ok(()) } else { Err(Refusal::QuotaExceeded { quota }) }
    }

    /// Checks whether a tenant may have one more session, which also needs an artifact for its head.
    pub(super) fn check_session_quota(&self, tenant: &TenantId) -> Result<(), Refusal> {
        let quota = self.quota(tenant).unwrap_or(u64::MAX);
        let usage = self.usage(tenant);
        if usage.sessions.max(usage.artifacts) < quota { Ok(()) } else { Err(Refusal::QuotaExceeded { quota }) }
    }

    /// Forgets the node that was retired first; returns false if none is retired.
    fn forget_retired_node(&mut self) -> bool {
        let retired = |node: &Node| match node.membership {
            NodeLifecycle::Admitted { .. } => None,
            NodeLifecycle::Retired { at } => Some((at, node.id)),
        };
        let first = self.nodes().filter_map(retired).min();
        first.map(|(_, id)| self.remove_node(id)).is_some()
    }

    fn put_node(&mut self, node: Node) {
        if let Some(cluster) = &mut self.records.cluster {
            self.changes.put(crate::RecordKey::Node(node.id));
            cluster.nodes.insert(node.id, Arc::new(node));
        }
    }

    fn remove_node(&mut self, id: NodeId) {
        if let Some(cluster) = &mut self.records.cluster {
            self.changes.gone(crate::RecordKey::Node(id));
            cluster.nodes.remove(&id);
        }
    }

    fn put_quota(&mut self, tenant: &TenantId, quota: Option<u64>) {
        let Some(cluster) = &mut self.records.cluster else { return };
        match quota {
            Some(quota) => {
                if cluster.quotas.insert(tenant.clone(), quota) != Some(quota) {
                    self.changes.put(crate::RecordKey::Quota(tenant.clone()));
                }
            }
            None => {
                if cluster.quotas.remove(tenant).is_some() {
                    self.changes.gone(crate::RecordKey::Quota(tenant.clone()));
                }
            }
        }
    }
}
