//! A run's cluster under load, and what every nemesis needs of it: who leads, who follows, whether all is well again.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::NemesisError;
use crate::check::{Broken, Finals, NodeState, equal_states};
use crate::cluster::{Boot, Cluster, Origin};
use crate::dice::Dice;
use crate::door::{Change, Standing};
use crate::ground::Ground;
use crate::history::{At, History, Seat};
use crate::load::Load;
use crate::streams::Streams;
use crate::watch::Watchers;

/// Longest time that anything an operator waits for may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// How thoroughly faults are drawn out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pace {
    /// Every nemesis once, in minutes.
    Quick,
    /// Longer faults, five voters, again and again.
    Long,
}

impl Pace {
    /// The shortest time without a fault, before and after one.
    pub(crate) fn shortest_calm(self) -> Duration {
        match self {
            Pace::Quick => Duration::from_millis(1200),
            Pace::Long => Duration::from_millis(2200),
        }
    }
}

/// Everything that a nemesis may touch.
pub(crate) struct Arena {
    /// The processes.
    pub(crate) cluster: Cluster,
    /// The network.
    pub(crate) ground: Arc<Ground>,
    /// What clients saw.
    pub(crate) history: Arc<History>,
    /// The clients.
    pub(crate) load: Load,
    /// Watches over the ledger's changes.
    pub(crate) watchers: Watchers,
    /// Clients of the model.
    pub(crate) streams: Streams,
    /// Chance.
    pub(crate) dice: Dice,
    /// How long faults last.
    pub(crate) pace: Pace,
    /// How long a worker's lease is held.
    pub(crate) lease: Duration,
}

impl Arena {
    /// A fault's length: `quick`, or up to ten times that in a long run.
    pub(crate) fn span(&mut self, quick: Duration) -> Duration {
        match self.pace {
            Pace::Quick => quick,
            Pace::Long => quick.mul_f64(1.0 + 9.0 * self.dice.fraction().powi(3)),
        }
    }

    /// Lets time pass under the fault.
    pub(crate) async fn hold(&mut self, quick: Duration) {
        let span = self.span(quick);
        tokio::time::sleep(span).await;
    }

    /// The leader's seat, once there is one.
    pub(crate) async fn leader(&self) -> Result<Seat, NemesisError> {
        self.cluster.leader(PATIENCE).await
    }

    /// The voters' seats.
    pub(crate) async fn voters(&self) -> Result<Vec<Seat>, NemesisError> {
        self.of_standing(Standing::Voter).await
    }

    /// The learners' seats.
    pub(crate) async fn learners(&self) -> Result<Vec<Seat>, NemesisError> {
        self.of_standing(Standing::Learner).await
    }

    async fn of_standing(&self, standing: Standing) -> Result<Vec<Seat>, NemesisError> {
        let members = self.cluster.doors().members(self.leader().await?).await?;
        let seats = self.cluster.seats();
        let is = |seat: &Seat| {
            let address = self.ground.shadow(*seat).to_string();
            members.iter().any(|member| member.address == address && member.standing == standing)
        };
        Ok(seats.into_iter().filter(is).collect())
    }

    /// A voter that does not lead.
    pub(crate) async fn follower(&mut self) -> Result<Seat, NemesisError> {
        let leader = self.leader().await?;
        let others: Vec<Seat> = self.voters().await?.into_iter().filter(|seat| *seat != leader).collect();
        let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "no voter but the leader".into() };
        self.dice.pick(&others).copied().ok_or_else(nobody)
    }

    /// Everyone else.
    pub(crate) fn others(&self, than: Seat) -> Vec<Seat> {
        self.cluster.seats().into_iter().filter(|seat| *seat != than).collect()
    }

    /// Cuts a node off from all others, both ways.
    pub(crate) async fn isolate(&self, seat: Seat) -> Result<(), NemesisError> {
        for other in self.others(seat) {
            self.ground.sever(seat, other).await?;
            self.ground.sever(other, seat).await?;
        }
        Ok(())
    }

    /// Takes that back.
    pub(crate) async fn rejoin(&self, seat: Seat) -> Result<(), NemesisError> {
        for other in self.others(seat) {
            self.ground.mend(seat, other).await?;
            self.ground.mend(other, seat).await?;
        }
        Ok(())
    }

    /// Waits until there is one leader, everybody who runs has what it has, and writes succeed through everybody.
    pub(crate) async fn recovered(&mut self, since: At) -> Result<At, NemesisError> {
        let deadline = Instant::now() + PATIENCE + self.lease;
        self.load.turn_to(self.cluster.awake());
        let mark = self.history.look(|kept| kept.operations.len());
        loop {
            let crashed = self.cluster.crashed();
            if let Some(seat) = crashed.first() {
                let got = format!("it ended by itself: {}", self.cluster.last_words(*seat));
                return Err(NemesisError::Answer { who: format!("node {}", seat.0), got });
            }
            if self.is_whole().await && self.all_write(mark) {
                return Ok(self.history.now());
            }
            if Instant::now() > deadline {
                let what = format!("recovery, {:.1} s after the fault was over", self.history.now().since(since));
                return Err(NemesisError::Late { what });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn is_whole(&self) -> bool {
        let statuses = self.cluster.statuses().await;
        let awake = self.cluster.awake();
        let leaders: Vec<Option<u64>> = statuses.iter().map(|(_, status)| status.leader).collect();
        let agreed = leaders.first().copied().flatten().is_some() && leaders.iter().all(|one| *one == leaders[0]);
        let applied = statuses.iter().map(|(_, status)| status.applied);
        let near = applied.clone().max().zip(applied.min()).is_some_and(|(most, least)| most - least < 200);
        statuses.len() == awake.len() && agreed && near
    }

    /// Whether every node that runs has acknowledged a write since.
    fn all_write(&self, mark: usize) -> bool {
        let awake = self.cluster.awake();
        self.history.look(|kept| {
            let since = &kept.operations[mark.min(kept.operations.len())..];
            awake
                .iter()
                .all(|seat| since.iter().any(|operation| operation.seat == *seat && operation.is_acknowledged()))
        })
    }

    /// State hashes of everybody who runs, asked until all have applied the same. Nobody writes meanwhile.
    pub(crate) async fn equal_states(&self) -> Result<Vec<Broken>, NemesisError> {
        let deadline = Instant::now() + PATIENCE;
        let mut seen: Vec<NodeState> = Vec::new();
        loop {
            let mut now = Vec::new();
            for seat in self.cluster.awake() {
                let (applied, hash) = self.cluster.doors().state_hash(seat).await?;
                now.push(NodeState { seat, applied, hash });
            }
            seen.extend(now.iter().cloned());
            if now.iter().all(|state| state.applied == now[0].applied) {
                return Ok(equal_states(&seen));
            }
            if Instant::now() > deadline {
                return Err(NemesisError::Late { what: format!("equal applied indexes: {now:?}") });
            }
        }
    }

    /// What every session is now, read linearizably, one node after the other.
    pub(crate) async fn finals(&self) -> Result<Finals, NemesisError> {
        let mut finals = Finals::new();
        let seats = self.cluster.awake();
        let mut door = self.cluster.doors().enter();
        for (at, subject) in self.load.subjects().iter().enumerate() {
            let seat = seats[at % seats.len()];
            finals.insert(*subject, door.read(seat, *subject).await?);
        }
        Ok(finals)
    }

    /// Empties a stopped voter's disk, lets it join anew, and gives it its place among the voters back.
    pub(crate) async fn replace(&mut self, seat: Seat) -> Result<(), NemesisError> {
        let leader = self.leader().await?;
        let old = self.cluster.member(seat, leader).await?.node;
        self.cluster.wipe(seat)?;
        self.cluster.start(seat, Boot::new(Origin::JoinsThrough(leader))).await?;
        let new = self.admitted(seat, old).await?;
        if new <= old {
            let got = format!("node id {new} after {old}");
            return Err(NemesisError::Answer { who: "a wiped node that joined again".into(), got });
        }
        self.change(Change::Replace { old, new }).await?;
        self.change(Change::Remove(old)).await
    }

    /// The id of the node in `seat`, once it is another one than `than`.
    async fn admitted(&self, seat: Seat, than: u64) -> Result<u64, NemesisError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.cluster.doors().status(seat).await {
                Ok(status) if status.node != than && status.leader.is_some() => return Ok(status.node),
                _ if Instant::now() > deadline => {
                    return Err(NemesisError::Late { what: format!("node {} to be admitted", seat.0) });
                }
                _ => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Asks for a change of the membership until it is done, as an operator would: a lagging learner is waited for.
    pub(crate) async fn change(&self, change: Change) -> Result<(), NemesisError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let leader = self.leader().await?;
            let refused = match self.cluster.doors().change(leader, &change).await {
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
