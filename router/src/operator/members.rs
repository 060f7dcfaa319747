//! `/ownerserve/v1/cluster/members` and `/leader`: who keeps the ledger, and how that is changed.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::State;
use ownership::{Consistency, Levels, Member, MemberChange, MemberError, Standing};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vocabulary::NodeId;

use super::fresh::{Fresh, FreshQuery, Seen};
use super::input::{Named, Told};
use super::problem::{Kind, Problem};
use super::writes::Done;
use crate::gateway::Gateway;

/// Whether a node decides or only keeps up.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum StandingWord {
    Voter,
    Learner,
}

/// Which feature levels a node's release can work at.
#[derive(Serialize, ToSchema)]
struct LevelsLine {
    lowest: u32,
    highest: u32,
}

impl From<Levels> for LevelsLine {
    fn from(levels: Levels) -> Self {
        Self { lowest: levels.lowest, highest: levels.highest }
    }
}

/// A node of the cluster, as the answering node knows it.
#[derive(Serialize, ToSchema)]
struct MemberLine {
    #[schema(value_type = u64)]
    node: NodeId,
    /// Where the others reach it; empty for one that nobody can.
    address: String,
    #[schema(inline)]
    standing: StandingWord,
    is_leader: bool,
    /// What its release knows; none when it has not been heard of.
    levels: Option<LevelsLine>,
    /// The last entry that the leader knows it to have; only the leader knows.
    matched: Option<u64>,
    /// Whether it answered the leader lately; only the leader knows.
    answers: Option<bool>,
    /// Why the answering node could not talk with it when it called it lately; none where it could, or did not call.
    trouble: Option<String>,
}

impl From<Member> for MemberLine {
    fn from(member: Member) -> Self {
        let Member { node, address, voter, is_leader, level, matched, answers } = member;
        let standing = match voter {
            Standing::Voter => StandingWord::Voter,
            Standing::Learner => StandingWord::Learner,
        };
        let levels = level.map(LevelsLine::from);
        Self { node, address, standing, is_leader, levels, matched, answers, trouble: None }
    }
}

/// The nodes of the cluster.
#[derive(Serialize, ToSchema)]
pub(super) struct Members {
    /// The cluster's id.
    cluster: String,
    members: Vec<MemberLine>,
}

/// The nodes of the cluster, by id.
#[utoipa::path(get, path = "/ownerserve/v1/cluster/members", tag = "cluster", params(FreshQuery),
    responses((
        status = 200, description = "Every node, and how each stands where that is known.",
        body = Fresh<Members>)))]
pub(super) async fn members(State(gateway): State<Arc<Gateway>>, Seen(view): Seen) -> Fresh<Members> {
    let directory = gateway.directory();
    let line = |member: Member| {
        let line = MemberLine::from(member);
        MemberLine { trouble: directory.missed(line.node), ..line }
    };
    let members = directory.members().into_iter().map(line).collect();
    let cluster = directory.cluster().to_string();
    Fresh::new(&view, Members { cluster, members })
}

/// Which nodes.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Nodes {
    /// Their ids; all are changed in one step.
    #[schema(value_type = Vec<u64>, min_items = 1, max_items = 64)]
    nodes: Vec<u64>,
}

impl Nodes {
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
pub(super) struct OneNode {
    node: u64,
}

/// Makes learners voters, all in one step: one voter and two learners make a cluster of three.
///
/// A cluster has 1, 3 or 5 voters; anything else is refused.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/members/promote", tag = "cluster", request_body = Nodes,
    responses((status = 200, description = "They vote.", body = Fresh<Done>)))]
pub(super) async fn promote(
    State(gateway): State<Arc<Gateway>>,
    Told(nodes): Told<Nodes>,
) -> Result<Fresh<Done>, Problem> {
    change(&gateway, MemberChange::Promote(nodes.ids()?), "they vote").await
}

/// Makes voters learners, all in one step.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/members/demote", tag = "cluster", request_body = Nodes,
    responses((status = 200, description = "They follow and read, and vote no more.", body = Fresh<Done>)))]
pub(super) async fn demote(
    State(gateway): State<Arc<Gateway>>,
    Told(nodes): Told<Nodes>,
) -> Result<Fresh<Done>, Problem> {
    change(&gateway, MemberChange::Demote(nodes.ids()?), "they vote no more").await
}

/// A voter, and the learner that takes its place.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Replacement {
    old: u64,
    new: u64,
}

/// Puts a learner into a voter's place, in one step: how a lost voter is replaced.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/members/replace", tag = "cluster", request_body = Replacement,
    responses((
        status = 200, description = "The learner votes in the place of the lost voter, which stays as a learner.",
        body = Fresh<Done>)))]
pub(super) async fn replace(
    State(gateway): State<Arc<Gateway>>,
    Told(body): Told<Replacement>,
) -> Result<Fresh<Done>, Problem> {
    let (old, new) = (NodeId(body.old), NodeId(body.new));
    change(&gateway, MemberChange::Replace { old, new }, "it votes in the other's place").await
}

/// Takes a node out for good. Its id never comes back; with an empty folder it joins as a new one.
#[utoipa::path(delete, path = "/ownerserve/v1/cluster/members/{node}", tag = "cluster",
    params(("node" = u64, Path, description = "The node's id.")),
    responses((
        status = 200, description = "The node is out for good; its id does not come back.",
        body = Fresh<Done>)))]
pub(super) async fn remove(
    State(gateway): State<Arc<Gateway>>,
    Named(node): Named<u64>,
) -> Result<Fresh<Done>, Problem> {
    change(&gateway, MemberChange::Remove(NodeId(node)), "it is out for good").await
}

/// Makes another voter lead.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/leader", tag = "cluster", request_body = OneNode,
    responses((status = 200, description = "That node leads now.", body = Fresh<Done>)))]
pub(super) async fn move_leader(
    State(gateway): State<Arc<Gateway>>,
    Told(body): Told<OneNode>,
) -> Result<Fresh<Done>, Problem> {
    change(&gateway, MemberChange::TransferLeader(NodeId(body.node)), "it leads").await
}

/// Carries out a change, from whichever node was asked.
pub(super) async fn change(gateway: &Gateway, change: MemberChange, did: &str) -> Result<Fresh<Done>, Problem> {
    // Without a quorum nothing is begun, so that nobody wonders what became of it.
    let quorum = gateway.directory().read(Consistency::Linearizable).await;
    quorum.map_err(|_| refused(&MemberError::NoLeader))?;
    gateway.directory().change(change).await.map_err(|error| refused(&error))?;
    Ok(Done::plain(gateway, did))
}

fn refused(error: &MemberError) -> Problem {
    let kind = match error {
        MemberError::Unknown(_) => Kind::NotFound,
        MemberError::NoLeader => Kind::NoQuorum,
        MemberError::Unknowable(_) => Kind::UnknownOutcome,
        _ => Kind::Conflict,
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
    Problem::new(kind, format!("{error}.")).caused(cause)
}
