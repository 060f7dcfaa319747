//! `/ownerserve/v1/cluster/members` and `/leader`: cluster membership and its changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::State;
use ownership::{ClusterMember, Consistency, MemberChange, MemberError, MemberRole, SupportedLevels};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vocabulary::NodeId;

use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::extractors::{JsonBody, PathId};
use super::problem::{Problem, ProblemKind};
use super::writes::WriteResult;
use crate::app_state::AppState;

/// Whether a node decides or only keeps up.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum VotingRole {
    Voter,
    Learner,
}

/// Which feature levels a node's release can work at.
#[derive(Serialize, ToSchema)]
struct FeatureLevelRange {
    lowest: u32,
    highest: u32,
}

impl From<SupportedLevels> for FeatureLevelRange {
    fn from(levels: SupportedLevels) -> Self {
        Self { lowest: levels.lowest, highest: levels.highest }
    }
}

/// A node of the cluster, as the answering node knows it.
#[derive(Serialize, ToSchema)]
struct MemberResource {
    #[schema(value_type = u64)]
    node: NodeId,
    /// Where the others reach it; empty for one that nobody can.
    address: String,
    #[schema(inline)]
    standing: VotingRole,
    is_leader: bool,
    /// What its release knows; none when it has not been heard of.
    levels: Option<FeatureLevelRange>,
    /// The last entry that the leader knows it to have; only the leader knows.
    matched: Option<u64>,
    /// Whether it answered the leader lately; only the leader knows.
    answers: Option<bool>,
    /// Why the answering node could not talk with it when it called it lately; none where it could, or did not call.
    trouble: Option<String>,
}

impl From<ClusterMember> for MemberResource {
    fn from(member: ClusterMember) -> Self {
        let ClusterMember { node, address, voter, is_leader, level, matched, answers } = member;
        let standing = match voter {
            MemberRole::Voter => VotingRole::Voter,
            MemberRole::Learner => VotingRole::Learner,
        };
        let levels = level.map(FeatureLevelRange::from);
        Self { node, address, standing, is_leader, levels, matched, answers, trouble: None }
    }
}

/// The nodes of the cluster.
#[derive(Serialize, ToSchema)]
pub(super) struct MemberList {
    /// The cluster's id.
    cluster: String,
    members: Vec<MemberResource>,
}

/// The nodes of the cluster, by id.
#[utoipa::path(get, path = "/ownerserve/v1/cluster/members", tag = "cluster", params(ConsistencyQuery),
    responses((
        status = 200, description = "Every node, and how each stands where that is known.",
        body = LedgerResponse<MemberList>)))]
pub(super) async fn members(
    State(gateway): State<Arc<AppState>>,
    ReadView(view): ReadView,
) -> LedgerResponse<MemberList> {
    let directory = gateway.directory();
    let line = |member: ClusterMember| {
        let line = MemberResource::from(member);
        MemberResource { trouble: directory.last_dial_error(line.node), ..line }
    };
    let members = directory.members().into_iter().map(line).collect();
    let cluster = directory.cluster().to_string();
    LedgerResponse::new(&view, MemberList { cluster, members })
}

/// Which nodes.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NodesBody {
    /// Their ids; all are changed in one step.
    #[schema(value_type = Vec<u64>, min_items = 1, max_items = 64)]
    nodes: Vec<u64>,
}

impl NodesBody {
    fn ids(self) -> Result<BTreeSet<NodeId>, Problem> {
        if !(1..=64).contains(&self.nodes.len()) {
            return Err(Problem::bad_body("nodes: accepted is 1 to 64 node ids"));
        }
        Ok(self.nodes.into_iter().map(NodeId).collect())
    }
}

/// Which node.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeBody {
    node: u64,
}

/// Makes learners voters, all in one step: one voter and two learners make a cluster of three.
///
/// A cluster has 1, 3 or 5 voters; anything else is refused.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/members/promote", tag = "cluster", request_body = NodesBody,
    responses((status = 200, description = "They vote.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn promote(
    State(gateway): State<Arc<AppState>>,
    JsonBody(nodes): JsonBody<NodesBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    apply_change(&gateway, MemberChange::Promote(nodes.ids()?), "they vote").await
}

/// Makes voters learners, all in one step.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/members/demote", tag = "cluster", request_body = NodesBody,
    responses((status = 200, description = "They follow and read, and vote no more.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn demote(
    State(gateway): State<Arc<AppState>>,
    JsonBody(nodes): JsonBody<NodesBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    apply_change(&gateway, MemberChange::Demote(nodes.ids()?), "they vote no more").await
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
    State(gateway): State<Arc<AppState>>,
    JsonBody(body): JsonBody<ReplacementBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let (old, new) = (NodeId(body.old), NodeId(body.new));
    apply_change(&gateway, MemberChange::Replace { old, new }, "it votes in the other's place").await
}

/// Takes a node out for good. Its id never comes back; with an empty folder it joins as a new one.
#[utoipa::path(delete, path = "/ownerserve/v1/cluster/members/{node}", tag = "cluster",
    params(("node" = u64, Path, description = "The node's id.")),
    responses((
        status = 200, description = "The node is out for good; its id does not come back.",
        body = LedgerResponse<WriteResult>)))]
pub(super) async fn remove(
    State(gateway): State<Arc<AppState>>,
    PathId(node): PathId<u64>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    apply_change(&gateway, MemberChange::Remove(NodeId(node)), "it is out for good").await
}

/// Makes another voter lead.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/leader", tag = "cluster", request_body = NodeBody,
    responses((status = 200, description = "That node leads now.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn move_leader(
    State(gateway): State<Arc<AppState>>,
    JsonBody(body): JsonBody<NodeBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    apply_change(&gateway, MemberChange::TransferLeader(NodeId(body.node)), "it leads").await
}

/// Carries out a change, from whichever node was asked.
pub(super) async fn apply_change(
    gateway: &AppState,
    change: MemberChange,
    did: &str,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    // Without a quorum nothing is started, so that no outcome is unknown.
    let quorum = gateway.directory().read(Consistency::Linearizable).await;
    quorum.map_err(|_| member_problem(&MemberError::NoLeader))?;
    gateway.directory().change_members(change).await.map_err(|error| member_problem(&error))?;
    Ok(WriteResult::plain(gateway, did))
}

fn member_problem(error: &MemberError) -> Problem {
    let kind = match error {
        MemberError::Unknown(_) => ProblemKind::NotFound,
        MemberError::NoLeader => ProblemKind::NoQuorum,
        MemberError::Unknowable(_) => ProblemKind::UnknownOutcome,
        _ => ProblemKind::Conflict,
    };
    let cause = match error {
        MemberError::VoterCount { .. } => "voter_count",
        MemberError::Unknown(_) => "unknown_node",
        MemberError::AlreadyVoter(_) => "already_voter",
        MemberError::NotVoter(_) => "not_voter",
        MemberError::StillVoter(_) => "still_voter",
        MemberError::InProgress => "change_in_progress",
        MemberError::Lagging { .. } => "lagging",
        MemberError::Silent(_) => "silent",
        MemberError::NoMajority { .. } => "no_majority",
        MemberError::NotTakenOver { .. } => "not_taken_over",
        MemberError::Level { .. } => "level",
        MemberError::NoLeader => "no_leader",
        MemberError::Unknowable(_) => "unknown_outcome",
        MemberError::Refused(_) => "refused",
    };
    Problem::new(kind, format!("{error}.")).with_cause(cause)
}
