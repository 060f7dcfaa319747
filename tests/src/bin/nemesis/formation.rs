//! Forms the cluster: a founder, nodes that join it, voters; and the sessions that clients will compete for.

use std::time::Duration;

use tokio::time::Instant;
use vocabulary::SessionId;

use crate::NemesisError;
use crate::api_client::MembershipChange;
use crate::check::ResponseStreamEnd;
use crate::cluster::{NodeBootstrapMode, NodeStartMode, ProcessCluster};
use crate::history::MemberSlot;
use crate::streams::{StreamRequest, StreamResult, run_stream};
use crate::testbed::OPERATOR_TIMEOUT;

const FOUNDER: MemberSlot = MemberSlot(1);

/// Forms a cluster of this many voters and a learner; one voter means a single node.
pub(crate) async fn form(cluster: &mut ProcessCluster, voters: u8) -> Result<(), NemesisError> {
    let learners = u8::from(voters > 1);
    let origin = if voters > 1 { NodeBootstrapMode::Founder } else { NodeBootstrapMode::Standalone };
    cluster.start(FOUNDER, NodeStartMode::new(origin)).await?;
    cluster.leader(OPERATOR_TIMEOUT).await?;
    for seat in (2..=voters + learners).map(MemberSlot) {
        cluster.start(seat, NodeStartMode::new(NodeBootstrapMode::JoinsThrough(FOUNDER))).await?;
    }
    let mut nodes = Vec::new();
    for seat in (2..=voters).map(MemberSlot) {
        nodes.push(await_admission(cluster, seat).await?);
    }
    // One voter and two learners become three voters, three and two become five; never two or four.
    for pair in nodes.chunks(2) {
        promote(cluster, pair.to_vec()).await?;
    }
    Ok(())
}

async fn await_admission(cluster: &ProcessCluster, slot: MemberSlot) -> Result<u64, NemesisError> {
    let deadline = Instant::now() + OPERATOR_TIMEOUT;
    loop {
        match cluster.member(slot, FOUNDER).await {
            Ok(member) => return Ok(member.node_id),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn promote(cluster: &ProcessCluster, nodes: Vec<u64>) -> Result<(), NemesisError> {
    let deadline = Instant::now() + OPERATOR_TIMEOUT;
    let change = MembershipChange::Promote(nodes);
    loop {
        let leader = cluster.leader(OPERATOR_TIMEOUT).await?;
        match cluster.addresses().change(leader, &change).await {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(error),
            // A learner that has not caught up yet is refused.
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
}

/// Opens sessions like clients, by steps that complete; returns them once the ledger has them.
pub(crate) async fn open_sessions(
    cluster: &ProcessCluster,
    slot: MemberSlot,
    count: usize,
) -> Result<Vec<SessionId>, NemesisError> {
    let key = |number: usize| format!("subject-{number}");
    let deadline = Instant::now() + 2 * OPERATOR_TIMEOUT;
    let addresses = cluster.addresses();
    let numbers: Vec<usize> = (0..count).collect();
    for some in numbers.chunks(16) {
        let steps = some.iter().map(|number| async move {
            loop {
                let wish = StreamRequest { seat: slot, key: &key(*number), tokens: 2 };
                match run_stream(addresses, wish, || {}).await {
                    StreamResult::Ended(ResponseStreamEnd::Whole) => return Ok(()),
                    other if Instant::now() > deadline => {
                        return Err(NemesisError::Answer { who: "a first step".into(), got: format!("{other:?}") });
                    }
                    // Workers may not have been probed yet.
                    _ => tokio::time::sleep(Duration::from_millis(200)).await,
                }
            }
        });
        futures::future::try_join_all(steps).await?;
    }
    let mut subjects = Vec::with_capacity(count);
    for number in numbers {
        subjects.push(loop {
            if let Some(session) = addresses.session_of(slot, &key(number)).await? {
                break session;
            }
            if Instant::now() > deadline {
                return Err(NemesisError::Late { what: format!("{} to be sealed", key(number)) });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        });
    }
    Ok(subjects)
}
