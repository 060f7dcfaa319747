//! Several faults at once.

use std::time::Duration;

use super::links::links;
use super::processes::kill;
use super::record::FaultRecord;
use crate::NemesisError;
use crate::test_network::LinkCondition;
use crate::testbed::TrialEnvironment;

const STOP_DURATION: Duration = Duration::from_secs(4);

/// Slow links, a killed follower, and a paused leader: of three voters, one works.
pub(super) async fn three_faults(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let (leader, follower) = (arena.leader().await?, arena.follower().await?);
    let slow = LinkCondition::Slow { delay: Duration::from_millis(10), jitter: Duration::from_millis(20) };
    let mut strike = FaultRecord::begin(arena);
    strike.count_fault();
    for (from, to) in links(arena) {
        arena.network.set_condition(from, to, slow);
    }
    strike.count_fault();
    kill(arena, follower).await?;
    // Without a quorum nobody can take over, so this does not count as a fail-over.
    strike.count_fault();
    arena.cluster.running(leader)?.pause().await?;
    arena.hold_fault(STOP_DURATION).await;
    arena.cluster.restart(follower).await?;
    arena.cluster.running(leader)?.resume().await?;
    for (from, to) in links(arena) {
        arena.network.set_condition(from, to, LinkCondition::Healthy);
    }
    Ok(strike.end(arena))
}
