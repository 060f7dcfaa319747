//! Changes of the membership, as the leader carries them out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use consensus::{NotRaised, Release, check_raise};
use ledger::{Command, Outcome};
use openraft::async_runtime::instant::Instant as _;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use openraft::{BasicNode, ChangeMembers};
use tokio::time::timeout;
use vocabulary::NodeId;

use crate::core::{Core, Known};
use crate::members::{Member, MemberChange, MemberError, Standing, next_voters};
use crate::peers::{Lane, Method};
use crate::raft::Types;

/// Entries that a learner may be behind when it becomes a voter.
const MAX_LAG: u64 = 5_000;

/// How soon a learner must answer when it is to become a voter.
const LATELY: Duration = Duration::from_secs(2);

/// How long a change may take.
pub(crate) const CHANGE_WITHIN: Duration = Duration::from_secs(30);

type Metrics = openraft::RaftMetrics<Types>;

/// Everybody, as this node knows it.
pub(crate) fn list(core: &Core) -> Vec<Member> {
    let metrics: Metrics = core.raft.metrics().borrow_watched().clone();
    let voters: BTreeSet<u64> = metrics.membership_config.voter_ids().collect();
    let member = |(id, node): (&u64, &BasicNode)| {
        let matched = match &metrics.replication {
            _ if *id == metrics.id => metrics.last_log_index,
            Some(replication) => replication.get(id).copied().flatten().map(|log| log.index),
            None => None,
        };
        let heard = metrics.heartbeat.as_ref().map(|heard| heard.get(id).and_then(Option::as_ref));
        let answers = match heard {
            _ if *id == metrics.id => Some(true),
            Some(at) => Some(at.is_some_and(|at| at.elapsed() < core.patience())),
            None => None,
        };
        Member {
            node: NodeId(*id),
            address: node.addr.clone(),
            voter: if voters.contains(id) { Standing::Voter } else { Standing::Learner },
            is_leader: metrics.current_leader == Some(*id),
            level: core.registry.levels(NodeId(*id)),
            matched,
            answers,
        }
    };
    metrics.membership_config.nodes().map(member).collect()
}

/// Who leads best when this node stops: the voter that has most of the log. None when this node does not lead.
pub(crate) fn heir(core: &Core) -> Option<NodeId> {
    if !core.leads() {
        return None;
    }
    let others = list(core).into_iter().filter(|member| member.node != core.node());
    let voters = others.filter(|member| member.voter == Standing::Voter);
    voters.max_by_key(|member| member.matched).map(|member| member.node)
}

/// Carries out a change as the leader; refused elsewhere.
pub(crate) async fn carry_out(core: &Core, change: MemberChange) -> Result<(), MemberError> {
    if !core.leads() {
        return Err(MemberError::NoLeader);
    }
    let late = |_| MemberError::Unknowable(format!("not done within {} s", CHANGE_WITHIN.as_secs()));
    tracing::info!(?change, "a change of the membership was asked for");
    timeout(CHANGE_WITHIN, decide(core, change)).await.map_err(late)?
}

async fn decide(core: &Core, change: MemberChange) -> Result<(), MemberError> {
    let members = list(core);
    let all: BTreeSet<NodeId> = members.iter().map(|member| member.node).collect();
    let is_voter = |member: &&Member| member.voter == Standing::Voter;
    let voters: BTreeSet<NodeId> = members.iter().filter(is_voter).map(|member| member.node).collect();
    let next = next_voters(&voters, &all, &change)?;
    match change {
        MemberChange::Promote(_) | MemberChange::Demote(_) | MemberChange::Replace { .. } => {
            for node in next.difference(&voters) {
                check_keeps_up(core, *node).await?;
            }
            let next: BTreeSet<u64> = next.into_iter().map(|node| node.0).collect();
            change_raft(core, ChangeMembers::ReplaceAllVoters(next)).await
        }
        MemberChange::Remove(node) => {
            // It learns from the log that it is removed, while it still gets the log.
            submit(core, Command::RetireNode(node)).await?;
            change_raft(core, ChangeMembers::RemoveNodes(BTreeSet::from([node.0]))).await
        }
        MemberChange::TransferLeader(node) => transfer(core, node).await,
        MemberChange::RaiseLevel(level) => {
            let release = |member: Member| match member.level.filter(|_| member.answers == Some(true)) {
                Some(levels) => (member.node, Release::Reads(levels)),
                None => (member.node, Release::Silent),
            };
            check_raise(level, members.into_iter().map(release)).map_err(|error| match error {
                NotRaised::Silent(node) => MemberError::Silent(node),
                NotRaised::CannotRead(node, levels) => MemberError::Level { node, level, levels },
            })?;
            submit(core, Command::RaiseLevel(level)).await
        }
    }
}

/// A voter that is not there would stop the quorum instead of widening it.
async fn check_keeps_up(core: &Core, node: NodeId) -> Result<(), MemberError> {
    let asked = core.registry.link(node, Lane::Call).call(Method::Members, Bytes::new(), LATELY).await;
    asked.map_err(|_| MemberError::Silent(node))?;
    let metrics: Metrics = core.raft.metrics().borrow_watched().clone();
    let matched = metrics.replication.as_ref().and_then(|replication| replication.get(&node.0)).copied().flatten();
    let behind = metrics.last_log_index.unwrap_or(0).saturating_sub(matched.map_or(0, |log| log.index));
    if behind > MAX_LAG { Err(MemberError::Lagging { node, behind }) } else { Ok(()) }
}

/// Adds a learner, or notes where a known node listens now.
pub(crate) async fn enrol(core: &Core, node: NodeId, address: String) -> Result<(), MemberError> {
    if !core.leads() {
        return Err(MemberError::NoLeader);
    }
    let known = list(core).into_iter().find(|member| member.node == node);
    let nodes = BTreeMap::from([(node.0, BasicNode::new(&address))]);
    match known {
        Some(member) if member.address == address => Ok(()),
        Some(_) => change_raft(core, ChangeMembers::SetNodes(nodes)).await,
        None => change_raft(core, ChangeMembers::AddNodes(nodes)).await,
    }
}

async fn change_raft(core: &Core, change: ChangeMembers<u64, BasicNode>) -> Result<(), MemberError> {
    // A voter that is replaced stays as a learner.
    let changed = core.raft.change_membership(change, true).await;
    changed.map(drop).map_err(|error| match error {
        RaftError::APIError(ClientWriteError::ForwardToLeader(_)) => MemberError::NoLeader,
        RaftError::APIError(ClientWriteError::ChangeMembershipError(ChangeMembershipError::InProgress(_))) => {
            MemberError::InProgress
        }
        error => MemberError::Unknowable(error.to_string()),
    })
}

async fn submit(core: &Core, command: Command) -> Result<(), MemberError> {
    let unknowable = |error: &dyn std::fmt::Display| MemberError::Unknowable(error.to_string());
    let ticket = core.submit(command).map_err(|error| unknowable(&error))?;
    match ticket.await.map_err(|error| unknowable(&error))? {
        Outcome::Done => Ok(()),
        outcome => Err(MemberError::Refused(format!("{outcome:?}"))),
    }
}

async fn transfer(core: &Core, to: NodeId) -> Result<(), MemberError> {
    if to == core.node() {
        return Ok(());
    }
    let stopped = |_| MemberError::Unknowable("this node is closing".into());
    core.raft.trigger().transfer_leader(to.0).await.map_err(|error| MemberError::Unknowable(error.to_string()))?;
    let mut leaders = core.leader.subscribe();
    leaders.wait_for(|known| *known == Known::Leader(to)).await.map(drop).map_err(stopped)
}
