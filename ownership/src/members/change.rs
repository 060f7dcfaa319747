//! Membership changes, as the leader carries them out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use consensus::{JoiningNode, MemberLevelSupport, MembershipWriteError, RaiseLevelError, check_raise};
use futures::future::join_all;
use ledger::{Command, LedgerEntry, Outcome, Submission};
use openraft::async_runtime::instant::Instant as _;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::{BasicNode, ChangeMembers};
use tokio::time::error::Elapsed;
use tokio::time::timeout;
use vocabulary::{ClientId, ClientSerial, NodeId};

use crate::members::{ClusterMember, EnrolRequest, MemberChange, MemberError, MemberRole, next_voters};
use crate::node_core::{AnnouncedTransfer, KnownLeader, NodeCore};
use crate::node_folder::random_u128;
use crate::peers::{Lane, PeerMethod};
use crate::raft::{LogId, TokioTypeConfig};

/// Maximum number of entries that a learner may be behind when it becomes a voter.
const MAX_LAG: u64 = 5_000;

/// How quickly a learner must answer when it becomes a voter.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a voter may take to take over from a leader that will no longer vote.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(3);

/// How long `list` may lag behind a committed change.
const LIST_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of a change.
pub(crate) const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

type Metrics = openraft::RaftMetrics<TokioTypeConfig>;

/// Returns all members, as this node knows them.
pub(crate) fn list(core: &NodeCore) -> Vec<ClusterMember> {
    let metrics: Metrics = core.raft.metrics().borrow_watched().clone();
    let voters: BTreeSet<u64> = metrics.membership_config.voter_ids().collect();
    let is_led = !core.view().quorum().stale;
    let member = |(id, node): (&u64, &BasicNode)| {
        let matched_index = match &metrics.replication {
            _ if *id == metrics.id => metrics.last_log_index,
            Some(replication) => replication.get(id).copied().flatten().map(|log| log.index),
            None => None,
        };
        let last_heartbeat = metrics.heartbeat.as_ref().map(|heard| heard.get(id).and_then(Option::as_ref));
        let reachable = match last_heartbeat {
            _ if *id == metrics.id => Some(true),
            Some(at) => Some(at.is_some_and(|at| at.elapsed() < core.silence_timeout())),
            None => None,
        };
        ClusterMember {
            node: NodeId(*id),
            address: node.addr.clone(),
            role: if voters.contains(id) { MemberRole::Voter } else { MemberRole::Learner },
            is_leader: is_led && metrics.current_leader == Some(*id),
            feature_levels: core.registry.levels(NodeId(*id)),
            matched_index,
            reachable,
        }
    };
    metrics.membership_config.nodes().map(member).collect()
}

/// Returns the best successor when this node stops: the answering voter with the longest log. `None` if this node does
/// not lead.
pub(crate) fn best_successor(core: &NodeCore) -> Option<NodeId> {
    best_successor_among(core, |_| true)
}

/// Returns the best successor among the nodes that `may_lead` accepts.
fn best_successor_among(core: &NodeCore, may_lead: impl Fn(NodeId) -> bool) -> Option<NodeId> {
    if !core.is_leading() {
        return None;
    }
    let others = list(core).into_iter().filter(|member| member.node != core.node() && may_lead(member.node));
    let voters = others.filter(|member| member.role == MemberRole::Voter && member.reachable == Some(true));
    voters.max_by_key(|member| member.matched_index).map(|member| member.node)
}

/// Carries out a change as the leader; refused on other nodes.
pub(crate) async fn carry_out(core: &NodeCore, change: MemberChange) -> Result<(), MemberError> {
    if !core.is_leading() {
        return Err(MemberError::NoLeader);
    }
    tracing::debug!(?change, "a change of the membership was asked for");
    timeout(CHANGE_TIMEOUT, apply_change(core, change)).await.map_err(timeout_error)?
}

async fn apply_change(core: &NodeCore, change: MemberChange) -> Result<(), MemberError> {
    let members = list(core);
    let all: BTreeSet<NodeId> = members.iter().map(|member| member.node).collect();
    let is_voter = |member: &&ClusterMember| member.role == MemberRole::Voter;
    let voters: BTreeSet<NodeId> = members.iter().filter(is_voter).map(|member| member.node).collect();
    let next = next_voters(&voters, &all, &change)?;
    match change {
        MemberChange::Promote(_) | MemberChange::Demote(_) | MemberChange::Replace { .. } => {
            for node in next.difference(&voters) {
                check_caught_up(core, *node).await?;
            }
            check_majority(core, &next).await?;
            change_voters(core, &voters, next).await
        }
        MemberChange::Remove(node) => {
            // The node learns of its removal from the log, while it still receives the log.
            submit(core, Command::RetireNode(node)).await?;
            change_raft(core, ChangeMembers::RemoveNodes(BTreeSet::from([node.0]))).await
        }
        MemberChange::TransferLeader(node) => transfer(core, node).await,
        MemberChange::RaiseLevel(level) => raise_level(core, level).await,
    }
}

/// Changes the voters to `next`.
///
/// A leader that is not among them would continue to lead as a learner. If some of `next` vote already, one of them
/// takes over first and makes the change when it is asked again. If none of them votes yet, one takes over afterwards.
async fn change_voters(core: &NodeCore, voters: &BTreeSet<NodeId>, next: BTreeSet<NodeId>) -> Result<(), MemberError> {
    let stays = next.contains(&core.node());
    let heir = || best_successor_among(core, |node| next.contains(&node));
    if !stays && !voters.is_disjoint(&next) {
        // A newly elected leader has not heard from anybody yet.
        let handed_over = transfer_and_wait(core, heir().ok_or(MemberError::NoLeader)?).await;
        // The caller then asks the current leader, even if another node took over than the intended one.
        return Err(handed_over.err().filter(|_| core.is_leading()).unwrap_or(MemberError::NoLeader));
    }
    let voter_ids = next.iter().map(|node| node.0).collect();
    change_raft(core, ChangeMembers::ReplaceAllVoters(voter_ids)).await?;
    if let Some(heir) = heir().filter(|_| !stays)
        && transfer_and_wait(core, heir).await.is_err()
    {
        tracing::warn!(successor = %heir, "this node is no voter any more and still leads; `ownerserve ctl member transfer-leader` lets a voter lead");
    }
    Ok(())
}

async fn transfer_and_wait(core: &NodeCore, heir: NodeId) -> Result<(), MemberError> {
    let late = |_| MemberError::LeadershipNotTransferred { heir, secs: TRANSFER_TIMEOUT.as_secs() };
    timeout(TRANSFER_TIMEOUT, transfer(core, heir)).await.map_err(late)?
}

/// Raises the level if all members answer now with a release that supports it.
async fn raise_level(core: &NodeCore, level: u32) -> Result<(), MemberError> {
    let all = |core: &NodeCore| list(core).into_iter().map(|member| member.node).collect::<BTreeSet<_>>();
    check_level(core, level, &all(core))?;
    let turn = core.lock_membership()?;
    let members: BTreeSet<NodeId> = turn.rewrite_members(&core.raft).await?.into_iter().map(NodeId).collect();
    let others = members.iter().filter(|node| **node != core.node());
    // What a node reported in an earlier run does not count.
    for asked in join_all(others.map(|node| check_answers(core, *node))).await {
        asked?;
    }
    check_level(core, level, &members)?;
    let (time, leadership) = core.entry_time().ok_or(MemberError::NoLeader)?;
    if leadership != turn.leadership() {
        return Err(MemberError::NoLeader);
    }
    // Sent as a client of its own, so that it is never retried.
    let client = ClientId(random_u128());
    let commands = [Command::OpenClient(core.node()), Command::RaiseLevel(level)];
    let submission = |(serial, command)| Submission { client, serial: ClientSerial(serial), command };
    let submissions = (0..).zip(commands).map(submission).collect();
    match turn.write(&core.raft, LedgerEntry { time, submissions }).await?.pop() {
        Some(Outcome::Done) => Ok(()),
        outcome => Err(MemberError::Refused(format!("{outcome:?}"))),
    }
}

/// Checks that these members support a level, as far as this node knows.
fn check_level(core: &NodeCore, level: u32, members: &BTreeSet<NodeId>) -> Result<(), MemberError> {
    let known: BTreeMap<NodeId, ClusterMember> = list(core).into_iter().map(|member| (member.node, member)).collect();
    let release = |node: &NodeId| {
        let answering = known.get(node).filter(|member| member.reachable == Some(true));
        (
            *node,
            answering
                .and_then(|member| member.feature_levels)
                .map_or(MemberLevelSupport::Unreachable, MemberLevelSupport::Supports),
        )
    };
    check_raise(level, members.iter().map(release)).map_err(|error| match error {
        RaiseLevelError::Unreachable(node) => MemberError::Unreachable(node),
        RaiseLevelError::Unsupported(node, levels) => MemberError::FeatureLevel { node, level, levels },
    })
}

/// Checks that a member answers now. The connection was greeted with the member's current feature levels.
async fn check_answers(core: &NodeCore, node: NodeId) -> Result<(), MemberError> {
    let response = core.registry.link(node, Lane::Call).call(PeerMethod::Members, Bytes::new(), ANSWER_TIMEOUT).await;
    response.map(drop).map_err(|_| MemberError::Unreachable(node))
}

/// Checks that a majority of these voters answers; otherwise they could neither write nor add another voter.
async fn check_majority(core: &NodeCore, voters: &BTreeSet<NodeId>) -> Result<(), MemberError> {
    let answers = async |node: NodeId| node == core.node() || check_answers(core, node).await.is_ok();
    let answers_by_voter = join_all(voters.iter().map(|node| async { (*node, answers(*node).await) })).await;
    let answering = answers_by_voter.iter().filter(|(_, answers)| *answers).count();
    match answers_by_voter.into_iter().find(|(_, answers)| !answers) {
        Some((silent, _)) if answering * 2 <= voters.len() => {
            Err(MemberError::NoMajority { voters: voters.len(), answering, silent })
        }
        _ => Ok(()),
    }
}

/// Checks that a node answers and has caught up: an absent voter would stop the quorum instead of extending it.
async fn check_caught_up(core: &NodeCore, node: NodeId) -> Result<(), MemberError> {
    check_answers(core, node).await?;
    let mut metrics = core.raft.metrics();
    let heartbeat = async {
        loop {
            let now: Metrics = metrics.borrow_watched().clone();
            let matched = now.replication.as_ref().and_then(|replication| replication.get(&node.0)).copied().flatten();
            let behind = now.last_log_index.unwrap_or(0).saturating_sub(matched.map_or(0, |log| log.index));
            // A newly elected leader does not know the progress of the others yet.
            if behind <= MAX_LAG || matched.is_some() || metrics.changed().await.is_err() {
                return behind;
            }
        }
    };
    match timeout(ANSWER_TIMEOUT, heartbeat).await {
        Ok(behind) if behind <= MAX_LAG => Ok(()),
        Ok(behind) => Err(MemberError::Lagging { node, behind }),
        Err(_) => Err(MemberError::Unreachable(node)),
    }
}

/// Adds a learner, or updates the address of a known node.
pub(crate) async fn enrol(core: &NodeCore, enrolment: EnrolRequest) -> Result<(), MemberError> {
    if !core.is_leading() {
        return Err(MemberError::NoLeader);
    }
    timeout(CHANGE_TIMEOUT, enrol_locked(core, enrolment)).await.map_err(timeout_error)?
}

async fn enrol_locked(
    core: &NodeCore,
    EnrolRequest { node, address, levels }: EnrolRequest,
) -> Result<(), MemberError> {
    let turn = core.lock_membership()?;
    match list(core).into_iter().find(|member| member.node == node) {
        Some(member) if member.address == address => Ok(()),
        Some(_) => {
            let moved = BTreeMap::from([(node.0, BasicNode::new(&address))]);
            change_raft(core, ChangeMembers::SetNodes(moved)).await
        }
        None => {
            let newcomer = JoiningNode { id: node.0, node: BasicNode::new(&address), levels };
            let let_in = turn.add_learner(&core.raft, newcomer, || core.view().level()).await;
            let written = let_in.map_err(|error| match error {
                MembershipWriteError::Level(level) => MemberError::FeatureLevel { node, level, levels },
                error => error.into(),
            })?;
            await_listed(core, written).await;
            Ok(())
        }
    }
}

fn timeout_error(_: Elapsed) -> MemberError {
    MemberError::Unknowable(format!("not done within {} s", CHANGE_TIMEOUT.as_secs()))
}

async fn change_raft(core: &NodeCore, change: ChangeMembers<u64, BasicNode>) -> Result<(), MemberError> {
    // A replaced voter stays as a learner.
    let changed = core.raft.change_membership(change, true).await.map_err(MembershipWriteError::from)?;
    await_listed(core, changed.log_id).await;
    Ok(())
}

/// Waits until a committed membership is listed: Raft answers the caller shortly before it updates its metrics.
async fn await_listed(core: &NodeCore, written: LogId) {
    let wait = core.raft.wait(Some(LIST_TIMEOUT));
    let shows = wait.metrics(|metrics| *metrics.membership_config.log_id() >= Some(written), "the membership");
    // On a timeout, or if Raft stops, the change is made all the same.
    drop(shows.await);
}

impl From<MembershipWriteError> for MemberError {
    fn from(error: MembershipWriteError) -> Self {
        match error {
            MembershipWriteError::NotLeader => Self::NoLeader,
            MembershipWriteError::InProgress => Self::InProgress,
            error @ (MembershipWriteError::Level(_) | MembershipWriteError::Unknown(_)) => {
                Self::Unknowable(error.to_string())
            }
        }
    }
}

async fn submit(core: &NodeCore, command: Command) -> Result<(), MemberError> {
    let unknowable = |error: &dyn std::fmt::Display| MemberError::Unknowable(error.to_string());
    let ticket = core.submit(command).map_err(|error| unknowable(&error))?;
    match ticket.await.map_err(|error| unknowable(&error))? {
        Outcome::Done => Ok(()),
        outcome => Err(MemberError::Refused(format!("{outcome:?}"))),
    }
}

async fn transfer(core: &NodeCore, to: NodeId) -> Result<(), MemberError> {
    if to == core.node() {
        return Ok(());
    }
    check_answers(core, to).await?;
    let stopped = |_| MemberError::Unknowable("this node is closing".into());
    let from = core.raft.metrics().borrow_watched().vote;
    *core.transfer.lock() = Some(AnnouncedTransfer { from, to });
    core.raft.trigger().transfer_leader(to.0).await.map_err(|error| MemberError::Unknowable(error.to_string()))?;
    let mut leaders = core.leader.subscribe();
    leaders.wait_for(|known| *known == KnownLeader::Leader(to)).await.map(drop).map_err(stopped)
}
