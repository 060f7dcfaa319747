//! A run's cluster under load, and what every nemesis needs of it: who leads, who follows, whether all is well again.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::NemesisError;
use crate::api_client::{MemberRoleJson, MembershipChange};
use crate::check::{FinalOwners, GuaranteeViolation, NodeStateHash, check_equal_states};
use crate::cluster::{BootOrigin, NodeBoot, ProcessCluster};
use crate::fault_rng::FaultRng;
use crate::history::{MemberSlot, OperationHistory, RunInstant};
use crate::load::ClientLoad;
use crate::streams::StreamClients;
use crate::test_network::TestNetwork;
use crate::watch::WatchClients;

/// Longest time that anything an operator waits for may take.
pub(crate) const OPERATOR_TIMEOUT: Duration = Duration::from_secs(30);

/// How thoroughly faults are drawn out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RunLength {
    /// Every nemesis once, in minutes.
    Quick,
    /// Longer faults, five voters, again and again.
    Long,
}

impl RunLength {
    /// The shortest time without a fault, before and after one.
    pub(crate) fn min_calm(self) -> Duration {
        match self {
            RunLength::Quick => Duration::from_millis(1200),
            RunLength::Long => Duration::from_millis(2200),
        }
    }
}

/// Everything that a nemesis may touch.
pub(crate) struct Testbed {
    /// The processes.
    pub(crate) cluster: ProcessCluster,
    /// The network.
    pub(crate) network: Arc<TestNetwork>,
    /// What clients saw.
    pub(crate) history: Arc<OperationHistory>,
    /// The clients.
    pub(crate) load: ClientLoad,
    /// Watches over the ledger's changes.
    pub(crate) watchers: WatchClients,
    /// Clients of the model.
    pub(crate) streams: StreamClients,
    /// Chance.
    pub(crate) rng: FaultRng,
    /// How long faults last.
    pub(crate) pace: RunLength,
    /// How long a worker's lease is held.
    pub(crate) lease: Duration,
}

impl Testbed {
    /// A fault's length: `quick`, or up to ten times that in a long run.
    pub(crate) fn fault_duration(&mut self, quick: Duration) -> Duration {
        match self.pace {
            RunLength::Quick => quick,
            RunLength::Long => quick.mul_f64(1.0 + 9.0 * self.rng.fraction().powi(3)),
        }
    }

    /// Lets time pass under the fault.
    pub(crate) async fn hold_fault(&mut self, quick: Duration) {
        let span = self.fault_duration(quick);
        tokio::time::sleep(span).await;
    }

    /// The leader's seat, once there is one.
    pub(crate) async fn leader(&self) -> Result<MemberSlot, NemesisError> {
        self.cluster.leader(OPERATOR_TIMEOUT).await
    }

    /// The voters' seats.
    pub(crate) async fn voters(&self) -> Result<Vec<MemberSlot>, NemesisError> {
        self.members_with_role(MemberRoleJson::Voter).await
    }

    /// The learners' seats.
    pub(crate) async fn learners(&self) -> Result<Vec<MemberSlot>, NemesisError> {
        self.members_with_role(MemberRoleJson::Learner).await
    }

    async fn members_with_role(&self, standing: MemberRoleJson) -> Result<Vec<MemberSlot>, NemesisError> {
        let members = self.cluster.addresses().members(self.leader().await?).await?;
        let seats = self.cluster.seats();
        let is = |seat: &MemberSlot| {
            let address = self.network.relay_address(*seat).to_string();
            members.iter().any(|member| member.address == address && member.standing == standing)
        };
        Ok(seats.into_iter().filter(is).collect())
    }

    /// A voter that does not lead.
    pub(crate) async fn follower(&mut self) -> Result<MemberSlot, NemesisError> {
        let leader = self.leader().await?;
        let others: Vec<MemberSlot> = self.voters().await?.into_iter().filter(|seat| *seat != leader).collect();
        let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "no voter but the leader".into() };
        self.rng.pick(&others).copied().ok_or_else(nobody)
    }

    /// Everyone else.
    pub(crate) fn others(&self, than: MemberSlot) -> Vec<MemberSlot> {
        self.cluster.seats().into_iter().filter(|seat| *seat != than).collect()
    }

    /// Cuts a node off from all others, both ways.
    pub(crate) async fn isolate(&self, seat: MemberSlot) -> Result<(), NemesisError> {
        for other in self.others(seat) {
            self.network.sever(seat, other).await?;
            self.network.sever(other, seat).await?;
        }
        Ok(())
    }

    /// Takes that back.
    pub(crate) async fn heal_isolation(&self, seat: MemberSlot) -> Result<(), NemesisError> {
        for other in self.others(seat) {
            self.network.restore(seat, other).await?;
            self.network.restore(other, seat).await?;
        }
        Ok(())
    }

    /// Waits until there is one leader, everybody who runs has what it has, and writes succeed through everybody.
    pub(crate) async fn await_recovery(&mut self, since: RunInstant) -> Result<RunInstant, NemesisError> {
        let deadline = Instant::now() + OPERATOR_TIMEOUT + self.lease;
        self.load.set_slots(self.cluster.running_slots());
        let mark = self.history.read(|kept| kept.operations.len());
        loop {
            let crashed = self.cluster.crashed_slots();
            if let Some(seat) = crashed.first() {
                let got = format!("it ended by itself: {}", self.cluster.log_tail(*seat));
                return Err(NemesisError::Answer { who: format!("node {}", seat.0), got });
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

    /// Whether every node that runs has acknowledged a write since.
    fn all_have_written(&self, mark: usize) -> bool {
        let awake = self.cluster.running_slots();
        self.history.read(|kept| {
            let since = &kept.operations[mark.min(kept.operations.len())..];
            awake
                .iter()
                .all(|seat| since.iter().any(|operation| operation.seat == *seat && operation.is_acknowledged()))
        })
    }

    /// State hashes of everybody who runs, asked until all have applied the same. Nobody writes meanwhile.
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

    /// What every session is now, read linearizably, one node after the other.
    pub(crate) async fn final_owners(&self) -> Result<FinalOwners, NemesisError> {
        let mut finals = FinalOwners::new();
        let seats = self.cluster.running_slots();
        let mut door = self.cluster.addresses().client();
        for (at, subject) in self.load.subjects().iter().enumerate() {
            let seat = seats[at % seats.len()];
            finals.insert(*subject, door.read_owner(seat, *subject).await?);
        }
        Ok(finals)
    }

    /// Empties a stopped voter's disk, lets it join anew, and gives it its place among the voters back.
    pub(crate) async fn replace(&mut self, seat: MemberSlot) -> Result<(), NemesisError> {
        let leader = self.leader().await?;
        let old = self.cluster.member(seat, leader).await?.node;
        self.cluster.wipe(seat)?;
        self.cluster.start(seat, NodeBoot::new(BootOrigin::JoinsThrough(leader))).await?;
        let new = self.await_admission(seat, old).await?;
        if new <= old {
            let got = format!("node id {new} after {old}");
            return Err(NemesisError::Answer { who: "a wiped node that joined again".into(), got });
        }
        self.change(MembershipChange::Replace { old, new }).await?;
        self.change(MembershipChange::Remove(old)).await
    }

    /// The id of the node in `seat`, once it is another one than `than`.
    async fn await_admission(&self, seat: MemberSlot, than: u64) -> Result<u64, NemesisError> {
        let deadline = Instant::now() + OPERATOR_TIMEOUT;
        loop {
            match self.cluster.addresses().status(seat).await {
                Ok(status) if status.node != than && status.leader.is_some() => return Ok(status.node),
                _ if Instant::now() > deadline => {
                    return Err(NemesisError::Late { what: format!("node {} to be admitted", seat.0) });
                }
                _ => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Asks for a change of the membership until it is done, as an operator would: a lagging learner is waited for.
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
