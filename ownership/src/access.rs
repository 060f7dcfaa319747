//! Authorization of callers at the node port. Members may call everything; a joining node only what joining needs.
//!
//! A node is a member if the newest membership that this node knows lists it. A node that was down may not know the
//! leader yet: it then asks the members that it knows, and its configured join addresses.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use vocabulary::NodeId;

use crate::members::{ClusterMember, EnrolRequest};
use crate::node_core::NodeCore;
use crate::peers::caller_identity::CallerIdentity;
use crate::peers::socket::DialDelegate as _;
use crate::peers::{self, DialTarget, Lane, PeerError, PeerMethod};

/// Timeout for a member's answer about who belongs to the cluster.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Asks all known members, and merges the answers of those that reply.
async fn fetch_members(core: &NodeCore) -> BTreeMap<NodeId, String> {
    let known = core.registry.others().into_iter().map(|node| core.registry.link(node, Lane::Call));
    let seeds = core.seeds.iter().map(|seed| core.registry.dial(DialTarget::Address(seed.clone()), Lane::Call));
    let calls = known.chain(seeds).map(|link| async move {
        let answer = link.call(PeerMethod::Members, Bytes::new(), ANSWER_TIMEOUT).await;
        answer.and_then(|answer| peers::decode::<Vec<ClusterMember>>(&answer)).unwrap_or_default()
    });
    let answers = join_all(calls).await.into_iter().flatten();
    answers.map(|member| (member.node, member.address)).collect()
}

/// Returns the caller's id if it may make this call. A node without an id counts as 0.
pub(crate) async fn authorize(
    core: &NodeCore,
    caller: &CallerIdentity,
    (method, question): (PeerMethod, &[u8]),
) -> Result<NodeId, PeerError> {
    let node = match (method, caller.hello.node) {
        (PeerMethod::Admit, node) => return Ok(node.unwrap_or(NodeId(0))),
        (_, Some(node)) if caller.hello.cluster == Some(core.registry.welcome.cluster) => node,
        _ => return Err(PeerError::Failed("only members may ask this".into())),
    };
    let listed = core.registry.address(node);
    if listed.as_ref().is_some_and(|address| caller.certificate_covers(address)) {
        return Ok(node);
    }
    match method {
        PeerMethod::Members => return Ok(node),
        // A member that moved is authorized above, by a certificate that covers its listed address.
        PeerMethod::Enrol if listed.is_none() => {
            let enrolment: EnrolRequest = peers::decode(question)?;
            let is_own = enrolment.node == node && caller.certificate_covers(&enrolment.address);
            return if is_own { Ok(node) } else { Err(rejection(core, caller, Some(enrolment.address))) };
        }
        _ => {}
    }
    match core.remote_members.address(node, fetch_members(core)).await {
        Some(address) if caller.certificate_covers(&address) => Ok(node),
        told => Err(rejection(core, caller, told.or(listed))),
    }
}

/// Counts a rejected caller, and builds the error that says how to get access.
fn rejection(core: &NodeCore, caller: &CallerIdentity, listed: Option<String>) -> PeerError {
    let node = caller.hello.node.unwrap_or(NodeId(0));
    let why = match listed {
        None => format!(
            "node {node} is not a member of the cluster, as far as node {} and the members that answer it know. If it is \
             one, start node {} with --join and the address of a member that knows it",
            core.node(),
            core.node()
        ),
        Some(address) => format!(
            "the certificate that node {node} showed does not name the host of {address}, where that node is known to be. \
             Let the authority sign one that names that host; a node that moves to another host needs one that names both, \
             until the cluster knows the new one"
        ),
    };
    core.registry.failures.non_member_calls.record(&format!("node {node}"), &why);
    PeerError::Failed(why)
}
