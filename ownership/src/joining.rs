//! Joining a cluster: a new node asks any member for an id, persists the id, and asks to be added.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use consensus::SupportedLevels;
use ledger::{AdmitNode, Command, Outcome, Refusal as LedgerRefusal};
use openraft::async_runtime::watch::WatchReceiver;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use vocabulary::NodeId;

use crate::error::LedgerNodeError;
use crate::leader_call;
use crate::members::{self, EnrolRequest, MemberError};
use crate::node_core::NodeCore;
use crate::node_folder::{ClusterId, NodeIdentity, random_u128, read_json, write_durably};
use crate::peers::error::HandshakeRefusal;
use crate::peers::handshake::{Hello, PROTOCOL};
use crate::peers::socket::{DialDelegate, HandshakeResult, LaneDialer};
use crate::peers::{self, DialTarget, Lane, PeerError, PeerLink, PeerMethod, PeerTls};

/// Timeout for one member's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Wait before the same members are asked again.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Request of a new node for an id.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct JoinRequest {
    /// Random number drawn once per data directory, so that a repeated request gets the same id.
    nonce: u128,
    address: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct JoinReply {
    cluster: ClusterId,
    node: NodeId,
}

/// Why a node is not admitted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum AdmissionError {
    /// Permanent: asking again does not help.
    #[error("{0}")]
    Never(String),
    /// Temporary: asking again may help.
    #[error("{0}")]
    NotNow(String),
}

/// Answers a join request at a member. The ledger assigns the id.
pub(crate) async fn admit(core: &NodeCore, application: JoinRequest) -> Result<JoinReply, AdmissionError> {
    let JoinRequest { nonce, address } = application;
    let not_now = |error: &dyn std::fmt::Display| AdmissionError::NotNow(error.to_string());
    let command = Command::AdmitNode(AdmitNode { nonce, address: address.as_str().into() });
    let ticket = core.submit(command).map_err(|error| not_now(&error))?;
    match ticket.await.map_err(|error| not_now(&error))? {
        Outcome::Admitted { node } => {
            tracing::info!(%node, address, "a node was given its id");
            Ok(JoinReply { cluster: core.registry.welcome.cluster, node })
        }
        // A cluster that is being founded gets its level raised shortly.
        Outcome::Refused(LedgerRefusal::FeatureLevelTooLow { needed, current }) => {
            Err(AdmissionError::NotNow(format!(
                "the cluster works at feature level {current} and nodes can join from level {needed} on; upgrade every \
             node, then raise the level"
            )))
        }
        Outcome::Refused(LedgerRefusal::NodeRemoved { node }) => Err(AdmissionError::Never(format!(
            "this data directory belonged to node {node}, which was removed; start with an empty one"
        ))),
        outcome => Err(AdmissionError::Never(format!("the ledger refused: {outcome:?}"))),
    }
}

/// Answers an enrolment at a member. The leader carries it out; other members forward it once.
pub(crate) async fn enrol(core: &NodeCore, from: NodeId, enrolment: EnrolRequest) -> Result<(), MemberError> {
    if core.is_leading() {
        return members::enrol(core, enrolment).await;
    }
    if from != enrolment.node {
        return Err(MemberError::NoLeader);
    }
    let deadline = Instant::now() + ANSWER_TIMEOUT / 2;
    match leader_call::ask_leader(core, (PeerMethod::Enrol, &enrolment), deadline).await {
        Some(answer) => answer.unwrap_or_else(|error: PeerError| Err(MemberError::Unknowable(error.to_string()))),
        None => Err(MemberError::NoLeader),
    }
}

/// State that a joining node persists until it is a member.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PersistedJoin {
    nonce: String,
    pub(crate) seeds: Vec<String>,
}

const JOIN_FILE: &str = "joining.json";

impl PersistedJoin {
    /// Reads the state of an earlier attempt.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, LedgerNodeError> {
        read_json(&folder.join(JOIN_FILE))
    }

    /// Resumes an earlier attempt or begins a new one; durable when this returns.
    fn begin_or_resume(folder: &Path, seeds: &[String]) -> Result<Self, LedgerNodeError> {
        let earlier = Self::read(folder)?;
        let nonce = earlier.map_or_else(|| format!("{:032x}", random_u128()), |earlier| earlier.nonce);
        let joining = Self { nonce, seeds: seeds.to_vec() };
        let bytes = serde_json::to_vec_pretty(&joining).expect("plain text encodes");
        let path = folder.join(JOIN_FILE);
        write_durably(&path, |file| file.write_all(&bytes)).map_err(LedgerNodeError::io(&path))?;
        Ok(joining)
    }

    fn nonce(&self, folder: &Path) -> Result<u128, LedgerNodeError> {
        let damaged = |error: std::num::ParseIntError| LedgerNodeError::Damaged {
            path: folder.join(JOIN_FILE),
            detail: format!("its nonce is no number: {error}"),
        };
        u128::from_str_radix(&self.nonce, 16).map_err(damaged)
    }
}

/// A node that has no identity yet.
pub(crate) struct UnidentifiedNode {
    pub(crate) levels: SupportedLevels,
    pub(crate) tls: Option<PeerTls>,
}

impl DialDelegate for UnidentifiedNode {
    fn address(&self, _node: NodeId) -> Option<String> {
        None
    }

    fn hello(&self, to: Option<NodeId>, lane: Lane) -> Hello {
        Hello { protocol: PROTOCOL, cluster: None, node: None, to, levels: self.levels, lane }
    }

    fn tls(&self) -> Option<&PeerTls> {
        self.tls.as_ref()
    }

    fn on_greeted(&self, _greeted: &HandshakeResult) {}
}

/// Asks the members in turn for an id until one assigns it.
pub(crate) async fn request_admission(
    folder: &Path,
    (seeds, address): (&[String], &str),
    unidentified: UnidentifiedNode,
    within: Duration,
) -> Result<NodeIdentity, LedgerNodeError> {
    let joining = PersistedJoin::begin_or_resume(folder, seeds)?;
    let application = JoinRequest { nonce: joining.nonce(folder)?, address: address.to_owned() };
    let question = Bytes::from(rmp_serde::to_vec(&application).expect("plain values encode"));
    let directions: Arc<dyn DialDelegate> = Arc::new(unidentified);
    let deadline = Instant::now() + within;
    let mut why = "no address to ask".to_owned();
    let mut reported = None;
    loop {
        for seed in seeds {
            let dialer =
                LaneDialer { target: DialTarget::Address(seed.clone()), lane: Lane::Call, policy: directions.clone() };
            let answer = PeerLink::new(dialer).call(PeerMethod::Admit, question.clone(), ANSWER_TIMEOUT).await;
            match answer.and_then(|answer| peers::decode(&answer)) {
                Ok(Ok(JoinReply { cluster, node })) => return Ok(NodeIdentity { cluster, node }),
                Ok(Err(AdmissionError::Never(reason))) => {
                    return Err(LedgerNodeError::NotJoined { seeds: seed.clone(), why: reason });
                }
                Err(PeerError::Refused { refusal, .. }) => {
                    return Err(LedgerNodeError::NotJoined { seeds: seed.clone(), why: refusal.to_string() });
                }
                Ok(Err(error)) => why = format!("{seed}: {error}"),
                Err(error) => why = error.to_string(),
            }
        }
        if Instant::now() >= deadline {
            return Err(LedgerNodeError::NotJoined { seeds: seeds.join(", "), why });
        }
        if reported.as_deref() != Some(why.as_str()) {
            tracing::warn!(reason = %why, ?within, "no member has admitted this node yet; retrying");
            reported = Some(why.clone());
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Asks until the cluster lists this node under `address`, then returns.
pub(crate) async fn enrol_self(core: Arc<NodeCore>, address: String, seeds: Vec<String>) {
    let enrolment = EnrolRequest { node: core.node(), address, levels: core.registry.welcome.levels };
    let question = Bytes::from(rmp_serde::to_vec(&enrolment).expect("plain values encode"));
    let mut ways: Vec<DialTarget> = seeds.into_iter().map(DialTarget::Address).collect();
    while !is_enrolled(&core, &enrolment) && !core.registry.is_retired() {
        if core.is_leading() {
            if let Err(error) = members::enrol(&core, enrolment.clone()).await {
                tracing::warn!(%error, "this node's address is not known to the cluster yet");
            }
        } else {
            let known = core.registry.others().into_iter().map(DialTarget::Node);
            for whom in known.chain(ways.iter().cloned()) {
                let link = core.registry.dial(whom, Lane::Call);
                let answer = link.call(PeerMethod::Enrol, question.clone(), ANSWER_TIMEOUT).await;
                match answer.and_then(|answer| peers::decode::<Result<(), MemberError>>(&answer)) {
                    Ok(Ok(())) => break,
                    Ok(Err(error)) => tracing::info!(%error, "this node is not added yet"),
                    Err(error) => tracing::info!(%error, "this node is not added yet"),
                }
            }
        }
        // The leader's write arrives through the log.
        let wait = core.raft.wait(Some(RETRY_DELAY));
        drop(wait.metrics(|metrics| lists_node(metrics, &enrolment), "the membership").await);
    }
    ways.clear();
    let path = core.folder.join(JOIN_FILE);
    if path.exists()
        && let Err(error) = std::fs::remove_file(&path)
    {
        tracing::warn!(%error, path = %path.display(), "the note about joining could not be removed");
    }
}

/// Number of rounds in which the join addresses are compared with this node's cluster, and the time between them.
const COMPARE_ROUNDS: u32 = 12;
const ROUND_DELAY: Duration = Duration::from_secs(5);

/// Logs a warning if a configured join address belongs to another cluster.
///
/// A data directory that already belongs to a cluster keeps it and does not join another one, so without the warning
/// two clusters would run side by side unnoticed.
pub(crate) async fn warn_of_foreign_seeds(core: Arc<NodeCore>, seeds: Vec<String>) {
    let mut unasked = seeds;
    for _ in 0..COMPARE_ROUNDS {
        let mut silent = Vec::new();
        for seed in unasked {
            let link = core.registry.dial(DialTarget::Address(seed.clone()), Lane::Call);
            match link.call(PeerMethod::Members, Bytes::new(), ANSWER_TIMEOUT).await {
                Err(PeerError::Refused { refusal: HandshakeRefusal::OtherCluster { cluster }, .. }) => {
                    let data_dir = core.folder.display();
                    tracing::warn!(
                        member = seed, %cluster, local_cluster = %core.registry.welcome.cluster, %data_dir,
                        "this node is NOT in the cluster that it was to join: its data directory belongs to another \
                         one. To join, stop it, move the directory aside, and start it with an empty one"
                    );
                }
                Err(PeerError::Unreachable { .. } | PeerError::TimedOut { .. }) => silent.push(seed),
                _ => {}
            }
        }
        if silent.is_empty() {
            return;
        }
        unasked = silent;
        tokio::time::sleep(ROUND_DELAY).await;
    }
}

fn is_enrolled(core: &NodeCore, enrolment: &EnrolRequest) -> bool {
    lists_node(&core.raft.metrics().borrow_watched(), enrolment)
}

fn lists_node(metrics: &openraft::RaftMetrics<crate::raft::TokioTypeConfig>, enrolment: &EnrolRequest) -> bool {
    let node = metrics.membership_config.get_node(&enrolment.node.0);
    node.is_some_and(|node| node.addr == enrolment.address)
}
