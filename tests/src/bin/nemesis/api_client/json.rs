//! JSON of the operator API, as far as this program reads or writes it.

use http::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use vocabulary::{ArtifactGroupId, ArtifactId, DpRank, Epoch, Incarnation, Owner, SessionId, WorkerId};

use crate::history::{LeaseSighting, Register, RegisterValue, SessionOwner};

/// Status of a node.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct NodeStatusJson {
    /// Node id.
    pub(crate) node_id: u64,
    /// Leader that the node knows.
    pub(crate) leader: Option<u64>,
    /// Index of the last applied entry.
    #[serde(rename = "revision")]
    pub(crate) applied: u64,
    /// Feature level of the cluster.
    pub(crate) feature_level: u32,
}

/// Role of a member in the quorum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MemberRoleJson {
    /// Takes part in votes.
    Voter,
    /// Only replicates.
    Learner,
}

/// Member of the cluster.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct MemberJson {
    /// Node id.
    pub(crate) node_id: u64,
    /// Address for other nodes.
    pub(crate) address: String,
    /// Role of the member.
    pub(crate) role: MemberRoleJson,
}

#[derive(Deserialize)]
pub(super) struct MembersJson {
    pub(super) members: Vec<MemberJson>,
}

/// A membership change.
#[derive(Clone, Debug)]
pub(crate) enum MembershipChange {
    /// Makes learners voters, in one step.
    Promote(Vec<u64>),
    /// Makes voters learners, in one step.
    Demote(Vec<u64>),
    /// Replaces a voter by a learner.
    Replace {
        /// Id of the voter.
        old: u64,
        /// Id of the learner.
        new: u64,
    },
    /// Removes a learner permanently.
    Remove(u64),
    /// Transfers leadership to another voter.
    TransferLeader(u64),
}

impl MembershipChange {
    pub(super) fn request(&self) -> (Method, String, Value) {
        let members = |verb: &str| format!("/cluster/members/{verb}");
        match self {
            MembershipChange::Promote(nodes) => (Method::POST, members("promote"), json!({ "nodes": nodes })),
            MembershipChange::Demote(nodes) => (Method::POST, members("demote"), json!({ "nodes": nodes })),
            MembershipChange::Replace { old, new } => {
                (Method::POST, members("replace"), json!({ "old": old, "new": new }))
            }
            MembershipChange::Remove(node) => (Method::DELETE, members(&node.to_string()), json!({})),
            MembershipChange::TransferLeader(node) => (Method::POST, "/cluster/leader".into(), json!({ "node": node })),
        }
    }
}

#[derive(Deserialize)]
pub(super) struct StateHashJson {
    pub(super) revision: u64,
    pub(super) state_hash: String,
}

#[derive(Deserialize)]
pub(super) struct WriteReplyJson {
    pub(super) epoch: Option<Epoch>,
}

#[derive(Deserialize)]
pub(super) struct OwnerJson {
    worker: WorkerId,
    incarnation: Incarnation,
    rank: DpRank,
}

#[derive(Deserialize)]
pub(super) struct SessionJson {
    pub(super) id: SessionId,
    pub(super) owner: Option<OwnerJson>,
    epoch: Epoch,
    heads: Vec<HeadJson>,
}

#[derive(Deserialize)]
struct HeadJson {
    artifact: ArtifactId,
}

impl SessionJson {
    pub(super) fn session_owner(&self) -> SessionOwner {
        let owner = |word: &OwnerJson| Owner { worker: word.worker, incarnation: word.incarnation, rank: word.rank };
        SessionOwner { owner: self.owner.as_ref().map(owner), epoch: self.epoch }
    }

    pub(super) fn head_artifact(&self) -> Option<ArtifactId> {
        self.heads.last().map(|head| head.artifact)
    }
}

#[derive(Deserialize)]
pub(super) struct SessionReplyJson {
    pub(super) session: SessionJson,
}

#[derive(Deserialize)]
pub(super) struct SessionsJson {
    pub(super) sessions: Vec<SessionJson>,
}

#[derive(Deserialize)]
struct LeaseJson {
    worker: WorkerId,
    incarnation: Incarnation,
    state: String,
    epoch: Epoch,
    ranks: u16,
}

#[derive(Deserialize)]
pub(super) struct LeasesJson {
    revision: u64,
    leases: Vec<LeaseJson>,
}

impl LeasesJson {
    pub(super) fn sightings(&self) -> Vec<LeaseSighting> {
        let sighting = |lease: &LeaseJson| LeaseSighting {
            worker: lease.worker,
            granted: lease.epoch,
            is_live: lease.state == "held",
            revision: self.revision,
        };
        self.leases.iter().map(sighting).collect()
    }

    pub(super) fn live_owners(&self) -> Vec<Owner> {
        let expected = self.leases.iter().filter(|lease| lease.state == "held");
        let ranks = |lease: &LeaseJson| {
            let Owner { worker, incarnation, .. } =
                Owner { worker: lease.worker, incarnation: lease.incarnation, rank: DpRank(0) };
            (0..lease.ranks).map(move |rank| Owner { worker, incarnation, rank: DpRank(rank) })
        };
        expected.flat_map(ranks).collect()
    }
}

/// Serializes an owner as writes expect it.
pub(super) fn target(owner: Owner) -> Value {
    json!({ "worker": owner.worker, "rank": owner.rank, "incarnation": owner.incarnation })
}

#[derive(Deserialize)]
struct TenantReplyJson {
    tenant: TenantJson,
}

#[derive(Deserialize)]
struct TenantJson {
    max_entries: Option<u64>,
}

#[derive(Deserialize)]
struct ArtifactReplyJson {
    artifact: ArtifactJson,
}

#[derive(Deserialize)]
struct ArtifactJson {
    pinned: bool,
    group: Option<ArtifactGroupId>,
}

/// Path of the resource that holds a register.
pub(super) fn register_path(register: Register) -> String {
    match register {
        Register::Quota(tenant) => format!("/tenants/nemesis-{tenant}"),
        Register::Pin(artifact) | Register::Group(artifact) => format!("/artifacts/{artifact}"),
    }
}

/// Path and body that set a register.
pub(super) fn register_write(register: Register, RegisterValue(value): RegisterValue) -> (String, Value) {
    let (leaf, body) = match register {
        Register::Quota(_) => ("quota", json!({ "max_entries": value.and_then(|value| u64::try_from(value).ok()) })),
        Register::Pin(_) => ("pin", json!({ "pinned": value == Some(1) })),
        Register::Group(_) => ("group", json!({ "group": value.map(ArtifactGroupId) })),
    };
    (format!("{}/{leaf}", register_path(register)), body)
}

/// Value of a register in the resource that holds it.
pub(super) fn register_value(register: Register, body: &[u8]) -> Option<RegisterValue> {
    let artifact = || serde_json::from_slice(body).ok().map(|ArtifactReplyJson { artifact }| artifact);
    let value = match register {
        Register::Quota(_) => {
            let TenantReplyJson { tenant } = serde_json::from_slice(body).ok()?;
            tenant.max_entries.map(u128::from)
        }
        Register::Pin(_) => Some(u128::from(artifact()?.pinned)),
        Register::Group(_) => artifact()?.group.map(|group| group.0),
    };
    Some(RegisterValue(value))
}
