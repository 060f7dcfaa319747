//! A run's cluster under load, and what every nemesis needs of it: leader, followers, recovery.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::NemesisError;
use crate::api_client::{MemberRoleJson, MembershipChange};
use crate::check::{FinalOwners, GuaranteeViolation, NodeStateHash, check_equal_states};
use crate::cluster::{NodeBootstrapMode, NodeStartMode, ProcessCluster};
use crate::fault_rng::FaultRng;
use crate::history::{MemberSlot, OperationHistory, RunInstant};
use crate::load::LoadClients;
use crate::streams::StreamClients;
use crate::test_network::TestNetwork;
use crate::watch::WatchClients;

/// Timeout of operator actions.
pub(crate) const OPERATOR_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time from the loss of a leader to the next leader's first commit: the longest election timeout plus a
/// margin.
pub(crate) const MAX_FAIL_OVER: Duration = Duration::from_secs(4);

/// Interval at which leases are renewed and ended.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// Length and thoroughness of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RunLength {
    /// Every nemesis once; takes minutes.
    Quick,
    /// Longer faults, five voters, repeated.
    Long,
}

impl RunLength {
    /// Minimum time without a fault before and after one.
    pub(crate) fn min_calm(self) -> Duration {
        match self {
            RunLength::Quick => Duration::from_millis(1200),
            RunLength::Long => Duration::from_millis(2200),
        }
    }
}

/// Everything that a nemesis may use.
pub(crate) struct TrialEnvironment {
    /// Nodes and workers.
    pub(crate) cluster: ProcessCluster,
    /// Network between them.
    pub(crate) network: Arc<TestNetwork>,
    /// History of client operations.
    pub(crate) history: Arc<OperationHistory>,
    /// Clients of the ledger.
    pub(crate) load: LoadClients,
    /// Watches of the ledger's changes.
    pub(crate) watchers: WatchClients,
    /// Clients of the model.
    pub(crate) streams: StreamClients,
    /// Seeded random numbers.
    pub(crate) rng: FaultRng,
    /// Length of the run, which determines that of faults.
    pub(crate) pace: RunLength,
    /// Duration of worker leases.
    pub(crate) lease: Duration,
}

impl TrialEnvironment {
    /// Duration of a fault: `quick`, or up to ten times that in a long run.
    pub(crate) fn fault_duration(&mut self, quick: Duration) -> Duration {
        match self.pace {
            RunLength::Quick => quick,
            RunLength::Long => quick.mul_f64(1.0 + 9.0 * self.rng.fraction().powi(3)),
        }
    }

    /// Waits while the fault holds.
    pub(crate) async fn hold_fault(&mut self, quick: Duration) {
        let span = self.fault_duration(quick);
        tokio::time::sleep(span).await;
    }

    /// Returns the leader's slot once there is one.
    pub(crate) async fn leader(&self) -> Result<MemberSlot, NemesisError> {
        self.cluster.leader(OPERATOR_TIMEOUT).await
    }

    /// Slots of the voters.
    pub(crate) async fn voters(&self) -> Result<Vec<MemberSlot>, NemesisError> {
        self.members_with_role(MemberRoleJson::Voter).await
    }

    /// Slots of the learners.
    pub(crate) async fn learners(&self) -> Result<Vec<MemberSlot>, NemesisError> {
        self.members_with_role(MemberRoleJson::Learner).await
    }

    async fn members_with_role(&self, role: MemberRoleJson) -> Result<Vec<MemberSlot>, NemesisError> {
        let members = self.cluster.addresses().members(self.leader().await?).await?;
        let seats = self.cluster.seats();
        let is = |slot: &MemberSlot| {
            let address = self.network.relay_address(*slot).to_string();
            members.iter().any(|member| member.address == address && member.role == role)
        };
        Ok(seats.into_iter().filter(is).collect())
    }

    /// Picks a voter that is not the leader.
    pub(crate) async fn follower(&mut self) -> Result<MemberSlot, NemesisError> {
        let leader = self.leader().await?;
        let others: Vec<MemberSlot> = self.voters().await?.into_iter().filter(|seat| *seat != leader).collect();
        let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "no voter but the leader".into() };
        self.rng.pick(&others).copied().ok_or_else(nobody)
    }

    /// Returns all other slots.
    pub(crate) fn others(&self, than: MemberSlot) -> Vec<MemberSlot> {
        self.cluster.seats().into_iter().filter(|seat| *seat != than).collect()
    }

    /// Cuts a node off from all others, in both directions.
    pub(crate) async fn isolate(&self, slot: MemberSlot) -> Result<(), NemesisError> {
        for other in self.others(slot) {
            self.network.sever(slot, other).await?;
            self.network.sever(other, slot).await?;
        }
        Ok(())
    }

    /// Undoes [`TrialEnvironment::isolate`].
    pub(crate) async fn heal_isolation(&self, slot: MemberSlot) -> Result<(), NemesisError> {
        for other in self.others(slot) {
            self.network.restore(slot, other).await?;
            self.network.restore(other, slot).await?;
        }
        Ok(())
    }

    /// Waits until there is one leader, all running nodes have caught up, and writes through each of them succeed.
    pub(crate) async fn await_recovery(&mut self, since: RunInstant) -> Result<RunInstant, NemesisError> {
        let deadline = Instant::now() + OPERATOR_TIMEOUT + self.lease;
        self.load.set_slots(self.cluster.running_slots());
        let mark = self.history.read(|kept| kept.operations.len());
        loop {
            let crashed = self.cluster.crashed_slots();
            if let Some(slot) = crashed.first() {
                let detail = format!("it ended by itself: {}", self.cluster.log_tail(*slot));
                return Err(NemesisError::Answer { who: format!("node {}", slot.0), got: detail });
            }
            if self.is_converged().await && self.all_have_written(mark) {
                return Ok(self.history.now());
            }
            if Instant::now() > deadline {
                let what = format!("recovery, {:.1} s after the fault was over", self.history.now().since(since));
                return Err(NemesisError::Late { what });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn is_converged(&self) -> bool {
        let statuses = self.cluster.statuses().await;
        let awake = self.cluster.running_slots();
        let leaders: Vec<Option<u64>> = statuses.iter().map(|(_, status)| status.leader).collect();
        let agreed = leaders.first().copied().flatten().is_some() && leaders.iter().all(|one| *one == leaders[0]);
        let applied = statuses.iter().map(|(_, status)| status.applied);
        let near = applied.clone().max().zip(applied.min()).is_some_and(|(most, least)| most - least < 200);
        statuses.len() == awake.len() && agreed && near
    }

    /// Returns whether every running node has acknowledged a write since.
    fn all_have_written(&self, mark: usize) -> bool {
        let awake = self.cluster.running_slots();
        self.history.read(|kept| {
            let since = &kept.operations[mark.min(kept.operations.len())..];
            awake
                .iter()
                .all(|seat| since.iter().any(|operation| operation.seat == *seat && operation.is_acknowledged()))
        })
    }

    /// Compares state hashes of all running nodes once they have applied the same index. Nobody writes meanwhile.
    pub(crate) async fn equal_states(&self) -> Result<Vec<GuaranteeViolation>, NemesisError> {
        let deadline = Instant::now() + OPERATOR_TIMEOUT;
        let mut seen: Vec<NodeStateHash> = Vec::new();
        loop {
            let mut now = Vec::new();
            for seat in self.cluster.running_slots() {
                let (applied, hash) = self.cluster.addresses().state_hash(seat).await?;
                now.push(NodeStateHash { seat, applied, hash });
            }
            seen.extend(now.iter().cloned());
            if now.iter().all(|state| state.applied == now[0].applied) {
                return Ok(check_equal_states(&seen));
            }
            if Instant::now() > deadline {
                return Err(NemesisError::Late { what: format!("equal applied indexes: {now:?}") });
            }
        }
    }

    /// Reads the final state of every session linearizably, from the nodes in turn.
    pub(crate) async fn final_owners(&self) -> Result<FinalOwners, NemesisError> {
        let mut finals = FinalOwners::new();
        let seats = self.cluster.running_slots();
        let mut door = self.cluster.addresses().client();
        for (at, subject) in self.load.subjects().iter().enumerate() {
            let slot = seats[at % seats.len()];
            finals.insert(*subject, door.read_owner(slot, *subject).await?);
        }
        Ok(finals)
    }

    /// Wipes a stopped voter's disk, lets it join again, and makes it a voter again.
    pub(crate) async fn replace(&mut self, slot: MemberSlot) -> Result<(), NemesisError> {
        let leader = self.leader().await?;
        let old = self.cluster.member(slot, leader).await?.node_id;
        self.cluster.wipe(slot)?;
        self.cluster.start(slot, NodeStartMode::new(NodeBootstrapMode::JoinsThrough(leader))).await?;
        let new = self.await_admission(slot, old).await?;
        if new <= old {
            let detail = format!("node id {new} after {old}");
            return Err(NemesisError::Answer { who: "a wiped node that joined again".into(), got: detail });
        }
        self.change(MembershipChange::Replace { old, new }).await?;
        self.change(MembershipChange::Remove(old)).await
    }

    /// Waits until the node in `slot` has an id other than `than`, and returns it.
    async fn await_admission(&self, slot: MemberSlot, than: u64) -> Result<u64, NemesisError> {
        let deadline = Instant::now() + OPERATOR_TIMEOUT;
        loop {
            match self.cluster.addresses().status(slot).await {
                Ok(status) if status.node_id != than && status.leader.is_some() => return Ok(status.node_id),
                _ if Instant::now() > deadline => {
                    return Err(NemesisError::Late { what: format!("node {} to be admitted", slot.0) });
                }
                _ => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Requests a membership change until it succeeds, as an operator would: a lagging learner is waited for.
    pub(crate) async fn change(&self, change: MembershipChange) -> Result<(), NemesisError> {
        let deadline = Instant::now() + OPERATOR_TIMEOUT;
        loop {
            let leader = self.leader().await?;
            let refused = match self.cluster.addresses().change(leader, &change).await {
                Ok(()) => return Ok(()),
                Err(refused) => refused,
            };
            if Instant::now() > deadline {
                return Err(refused);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}
