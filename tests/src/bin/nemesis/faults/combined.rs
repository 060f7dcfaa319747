//! Several faults at once.

use std::time::Duration;

use super::links::links;
use super::processes::kill;
use super::record::NemesisRecord;
use crate::NemesisError;
use crate::test_network::LinkCondition;
use crate::testbed::TrialEnvironment;

const STOP_DURATION: Duration = Duration::from_secs(4);

/// Slow links, a killed follower, and a paused leader: of three voters, one works.
pub(super) async fn three_faults(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let (leader, follower) = (environment.leader().await?, environment.follower().await?);
    let slow = LinkCondition::Slow { delay: Duration::from_millis(10), jitter: Duration::from_millis(20) };
    let mut fault = NemesisRecord::begin(environment);
    fault.count_fault();
    for (from, to) in links(environment) {
        environment.network.set_condition(from, to, slow);
    }
    fault.count_fault();
    kill(environment, follower).await?;
    // Without a quorum nobody can take over, so this does not count as a fail-over.
    fault.count_fault();
    environment.cluster.running(leader)?.pause().await?;
    environment.hold_fault(STOP_DURATION).await;
    environment.cluster.restart(follower).await?;
    environment.cluster.running(leader)?.resume().await?;
    for (from, to) in links(environment) {
        environment.network.set_condition(from, to, LinkCondition::Healthy);
    }
    Ok(fault.end(environment))
}
