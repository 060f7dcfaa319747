//! `/ownerserve/v1/cluster/members` and `/leader`: cluster membership and its changes.

use std::collections::BTreeSet;

use axum::extract::State;
use ownership::{ClusterMember, Consistency, MemberChange, MemberError, MemberRole, SupportedLevels};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vocabulary::NodeId;

use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::extractors::{JsonBody, PathId};
use super::problem::{Problem, ProblemKind};
use super::writes::WriteResult;
use proxy::ledger_access::LedgerAccess;

/// Role of a node in the quorum.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum VotingRole {
    Voter,
    Learner,
}

/// Feature levels that a node's release supports.
#[derive(Serialize, ToSchema)]
struct FeatureLevelRange {
    min: u32,
    max: u32,
}

impl From<SupportedLevels> for FeatureLevelRange {
    fn from(levels: SupportedLevels) -> Self {
        Self { min: levels.lowest, max: levels.highest }
    }
}

/// A node of the cluster, as the answering node knows it.
#[derive(Serialize, ToSchema)]
#[schema(as = Member)]
struct MemberResource {
    #[schema(value_type = u64)]
    node_id: NodeId,
    /// Address at which other nodes reach it; empty where it does not listen for them.
    address: String,
    #[schema(inline)]
    role: VotingRole,
    is_leader: bool,
    /// Feature levels that its release supports; null before the first contact.
    feature_levels: Option<FeatureLevelRange>,
    /// Index of the last log entry that the leader knows it to have; null at nodes that do not lead.
    matched_index: Option<u64>,
    /// Whether it answered the leader lately; null at nodes that do not lead.
    reachable: Option<bool>,
    /// Why the last call of the answering node to it failed; null where it succeeded, or there was none.
    last_error: Option<String>,
}

impl From<ClusterMember> for MemberResource {
    fn from(member: ClusterMember) -> Self {
        let ClusterMember { node, address, role, is_leader, feature_levels, matched_index, reachable } = member;
        let role = match role {
            MemberRole::Voter => VotingRole::Voter,
            MemberRole::Learner => VotingRole::Learner,
        };
        let feature_levels = feature_levels.map(FeatureLevelRange::from);
        Self { node_id: node, address, role, is_leader, feature_levels, matched_index, reachable, last_error: None }
    }
}

/// The nodes of the cluster.
#[derive(Serialize, ToSchema)]
pub(super) struct MemberList {
    /// The cluster's id.
    cluster_id: String,
    members: Vec<MemberResource>,
}

/// The nodes of the cluster, by id.
#[utoipa::path(get, path = "/ownerserve/v1/cluster/members", tag = "cluster", params(ConsistencyQuery),
    responses((
        status = 200, description = "Every node, with its role and progress where known.",
        body = LedgerResponse<MemberList>)))]
pub(super) async fn members(
    State(ledger): State<LedgerAccess>,
    ReadView(view): ReadView,
) -> LedgerResponse<MemberList> {
    let directory = ledger.directory();
    let line = |member: ClusterMember| {
        let line = MemberResource::from(member);
        MemberResource { last_error: directory.last_dial_error(line.node_id), ..line }
    };
    let members = directory.members().into_iter().map(line).collect();
    let cluster_id = directory.cluster().to_string();
    LedgerResponse::new(&view, MemberList { cluster_id, members })
}

/// Nodes whose role changes.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RoleChangeBody {
    /// Their ids; all are changed in one step.
    #[schema(value_type = Vec<u64>, min_items = 1, max_items = 64)]
    nodes: Vec<u64>,
}

impl RoleChangeBody {
    fn ids(self) -> Result<BTreeSet<NodeId>, Problem> {
        if !(1..=64).contains(&self.nodes.len()) {
            return Err(Problem::bad_body("nodes: accepted is 1 to 64 node ids"));
        }
        Ok(self.nodes.into_iter().map(NodeId).collect())
    }
}

/// A node.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeBody {
    node: u64,
}

/// Makes learners voters, all in one step: one voter and two learners make a cluster of three.
///
/// A cluster has 1, 3 or 5 voters; anything else is refused.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/members/promote", tag = "cluster", request_body = RoleChangeBody,
    responses((status = 200, description = "The nodes are voters.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn promote(
    State(ledger): State<LedgerAccess>,
    JsonBody(nodes): JsonBody<RoleChangeBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    apply_change(&ledger, MemberChange::Promote(nodes.ids()?), "they vote").await
}

/// Makes voters learners, all in one step.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/members/demote", tag = "cluster", request_body = RoleChangeBody,
    responses((status = 200, description = "The nodes are learners: they replicate and do not vote.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn demote(
    State(ledger): State<LedgerAccess>,
    JsonBody(nodes): JsonBody<RoleChangeBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    apply_change(&ledger, MemberChange::Demote(nodes.ids()?), "they vote no more").await
}

/// A voter, and the learner that takes its place.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ReplacementBody {
    old: u64,
    new: u64,
}

/// Puts a learner into a voter's place, in one step: how a lost voter is replaced.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/members/replace", tag = "cluster", request_body = ReplacementBody,
    responses((
        status = 200, description = "The learner votes in the place of the lost voter, which stays as a learner.",
        body = LedgerResponse<WriteResult>)))]
pub(super) async fn replace(
    State(ledger): State<LedgerAccess>,
    JsonBody(body): JsonBody<ReplacementBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let (old, new) = (NodeId(body.old), NodeId(body.new));
    apply_change(&ledger, MemberChange::Replace { old, new }, "it votes in the other's place").await
}

/// Takes a node out for good. Its id never comes back; with an empty folder it joins as a new one.
#[utoipa::path(delete, path = "/ownerserve/v1/cluster/members/{node}", tag = "cluster",
    params(("node" = u64, Path, description = "The node's id.")),
    responses((
        status = 200, description = "The node is out for good; its id does not come back.",
        body = LedgerResponse<WriteResult>)))]
pub(super) async fn remove(
    State(ledger): State<LedgerAccess>,
    PathId(node): PathId<u64>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    apply_change(&ledger, MemberChange::Remove(NodeId(node)), "it is out for good").await
}

/// Transfers the leadership to another voter.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/leader", tag = "cluster", request_body = NodeBody,
    responses((status = 200, description = "That node leads now.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn move_leader(
    State(ledger): State<LedgerAccess>,
    JsonBody(body): JsonBody<NodeBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    apply_change(&ledger, MemberChange::TransferLeader(NodeId(body.node)), "it leads").await
}

/// Carries out a change, from whichever node was asked.
pub(super) async fn apply_change(
    ledger: &LedgerAccess,
    change: MemberChange,
    result: &str,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    // Without a quorum nothing is started, so that no outcome is unknown.
    let quorum = ledger.directory().read(Consistency::Linearizable).await;
    quorum.map_err(|_| member_problem(&MemberError::NoLeader))?;
    ledger.directory().change_members(change).await.map_err(|error| member_problem(&error))?;
    Ok(WriteResult::plain(ledger, result))
}

/// Reasons of refused membership changes.
pub(super) const MEMBER_REASONS: [&str; 14] = [
    "voter_count",
    "unknown_node",
    "already_voter",
    "not_voter",
    "still_voter",
    "change_in_progress",
    "member_lagging",
    "member_unreachable",
    "no_majority",
    "leadership_not_transferred",
    "feature_level",
    "no_leader",
    "unknown_outcome",
    "refused",
];

fn member_problem(error: &MemberError) -> Problem {
    let kind = match error {
        MemberError::Unknown(_) => ProblemKind::NotFound,
        MemberError::NoLeader => ProblemKind::NoQuorum,
        MemberError::Unknowable(_) => ProblemKind::UnknownOutcome,
        _ => ProblemKind::Conflict,
    };
    let reason = match error {
        MemberError::VoterCount { .. } => "voter_count",
        MemberError::Unknown(_) => "unknown_node",
        MemberError::AlreadyVoter(_) => "already_voter",
        MemberError::NotVoter(_) => "not_voter",
        MemberError::StillVoter(_) => "still_voter",
        MemberError::InProgress => "change_in_progress",
        MemberError::Lagging { .. } => "member_lagging",
        MemberError::Unreachable(_) => "member_unreachable",
        MemberError::NoMajority { .. } => "no_majority",
        MemberError::LeadershipNotTransferred { .. } => "leadership_not_transferred",
        MemberError::FeatureLevel { .. } => "feature_level",
        MemberError::NoLeader => "no_leader",
        MemberError::Unknowable(_) => "unknown_outcome",
        MemberError::Refused(_) => "refused",
    };
    Problem::new(kind, format!("{error}.")).with_reason(reason)
}
