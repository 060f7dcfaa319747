//! The load: many clients that claim, release, migrate and read sessions, each at its own pace, through whatever node
//! answers. Everything that they ask and are told goes into the history.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::{OwnedRwLockWriteGuard, RwLock, watch};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use vocabulary::{Owner, SessionId};

use crate::NemesisError;
use crate::dice::Dice;
use crate::door::{Door, Doors};
use crate::history::{Answer, Asked, History, Holding, Operation, Seat};

/// How long a client waits for one answer; longer than an election takes.
const PATIENCE: Duration = Duration::from_secs(6);
/// Of a hundred requests, so many are about subjects that all clients share.
const SHARED_SHARE: u64 = 15;
/// Of a hundred requests, so many are the first at another node.
const WANDER: u64 = 5;
/// Subjects that all clients share.
pub(crate) const SHARED: usize = 24;
/// Subjects of each client alone.
pub(crate) const OWN: usize = 2;

/// How much load there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amount {
    /// Clients at once.
    pub(crate) clients: usize,
    /// Requests a second that they aim at together.
    pub(crate) rate: f64,
}

impl Amount {
    /// How many sessions it needs.
    pub(crate) fn subjects(self) -> usize {
        SHARED + self.clients * OWN
    }
}

/// What all clients see.
struct Field {
    history: Arc<History>,
    doors: Doors,
    subjects: Vec<SessionId>,
    owners: watch::Receiver<Vec<Owner>>,
    seats: watch::Receiver<Vec<Seat>>,
    is_full: AtomicBool,
}

/// Clients at work. Dropping it ends them.
pub(crate) struct Load {
    field: Arc<Field>,
    gate: Arc<RwLock<()>>,
    seats: watch::Sender<Vec<Seat>>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts it on sessions that exist. Clients turn to `seats`, and claim for `owners`.
    pub(crate) fn start(
        (amount, dice): (Amount, &Dice),
        history: Arc<History>,
        doors: Doors,
        (subjects, owners): (Vec<SessionId>, watch::Receiver<Vec<Owner>>),
    ) -> Load {
        let (seats, seen) = watch::channel(doors.seats());
        let field = Field { history, doors, subjects, owners, seats: seen, is_full: AtomicBool::new(false) };
        let (field, gate) = (Arc::new(field), Arc::new(RwLock::new(())));
        let pace = Duration::from_secs_f64(amount.clients as f64 / amount.rate);
        let client = |number: usize| {
            let client = Client::new(number, dice.split(number as u64), field.clone());
            tokio::spawn(client.run(pace, gate.clone()))
        };
        let clients = (0..amount.clients).map(client).collect();
        Load { field, gate, seats, clients }
    }

    /// Lets requests in flight end, and holds the clients until the guard is dropped.
    pub(crate) async fn pause(&self) -> OwnedRwLockWriteGuard<()> {
        self.gate.clone().write_owned().await
    }

    /// The nodes that clients turn to from now on.
    pub(crate) fn turn_to(&self, seats: Vec<Seat>) {
        // Clients that are gone turn to nobody.
        let _ = self.seats.send(seats);
    }

    /// The sessions.
    pub(crate) fn subjects(&self) -> &[SessionId] {
        &self.field.subjects
    }

    /// An error when something was not kept, or a client has died: then the history says less than it should.
    pub(crate) fn check(&self) -> Result<(), NemesisError> {
        let dead = self.clients.iter().any(JoinHandle::is_finished);
        match dead || self.field.is_full.load(Relaxed) {
            false => Ok(()),
            true => Err(NemesisError::Answer {
                who: "the load".into(),
                got: "a client died, or the history is full".into(),
            }),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for client in &self.clients {
            client.abort();
        }
    }
}

/// One client: its connections, and what it believes of its sessions.
struct Client {
    number: u32,
    dice: Dice,
    door: Door,
    seat: Seat,
    beliefs: HashMap<SessionId, Holding>,
    field: Arc<Field>,
}

impl Client {
    fn new(number: usize, dice: Dice, field: Arc<Field>) -> Client {
        let seats = field.doors.seats();
        let seat = seats[number % seats.len()];
        let door = field.doors.enter();
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        Client { number, dice, door, seat, beliefs: HashMap::new(), field }
    }

    async fn run(mut self, pace: Duration, gate: Arc<RwLock<()>>) {
        tokio::time::sleep(pace.mul_f64(self.dice.fraction())).await;
        let mut ticks = tokio::time::interval(pace);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let admitted = gate.read().await;
            // Now and then to another node, so that those who come back find clients again.
            if !self.field.seats.borrow().contains(&self.seat) || self.dice.below(100) < WANDER {
                self.turn();
            }
            let subject = self.subject();
            let asked = self.choose(subject);
            self.attempt(subject, asked).await;
            drop(admitted);
        }
    }

    fn subject(&mut self) -> SessionId {
        let own = SHARED + self.number as usize * OWN;
        let at = match self.dice.below(100) < SHARED_SHARE {
            true => self.dice.below(SHARED as u64) as usize,
            false => own + self.dice.below(OWN as u64) as usize,
        };
        self.field.subjects[at]
    }

    /// The next request about a session, from what is believed of it.
    fn choose(&mut self, subject: SessionId) -> Asked {
        let owners = self.field.owners.borrow().clone();
        let drawn = self.dice.below(100);
        let someone = self.dice.pick(&owners).copied();
        match (self.beliefs.get(&subject), someone) {
            (None, _) | (_, None) => Asked::Read,
            (Some(_), _) if drawn < 10 => Asked::Read,
            (Some(Holding { owner: None, .. }), Some(someone)) => Asked::Claim(someone),
            (Some(_), Some(someone)) if drawn < 20 => Asked::Claim(someone),
            (Some(Holding { owner: Some(owner), epoch }), _) if drawn < 55 => {
                Asked::Release { owner: *owner, seen: *epoch }
            }
            (Some(Holding { epoch, .. }), Some(to)) => Asked::Migrate { to, seen: *epoch },
        }
    }

    async fn attempt(&mut self, subject: SessionId, asked: Asked) {
        let seat = self.seat;
        let invoked = self.field.history.now();
        let (answer, revision) = self.door.ask(seat, (subject, asked), PATIENCE).await;
        let completed = self.field.history.now();
        self.learn(subject, asked, answer);
        if matches!(answer, Answer::Unavailable | Answer::Unknown) {
            self.turn();
        }
        let client = self.number;
        let operation = Operation { client, seat, subject, asked, invoked, completed, answer, revision };
        if !self.field.history.note(operation) {
            self.field.is_full.store(true, Relaxed);
        }
    }

    fn learn(&mut self, subject: SessionId, asked: Asked, answer: Answer) {
        let known = match (answer, asked) {
            (Answer::Granted(epoch), Asked::Claim(owner) | Asked::Migrate { to: owner, .. }) => {
                Some(Holding { owner: Some(owner), epoch })
            }
            (Answer::Found(holding), _) => Some(holding),
            (Answer::Released, Asked::Release { seen, .. }) => Some(Holding { owner: None, epoch: seen }),
            (Answer::Unavailable, _) => return,
            _ => None,
        };
        match known {
            Some(holding) => self.beliefs.insert(subject, holding),
            None => self.beliefs.remove(&subject),
        };
    }

    /// To another node, as clients do when one does not answer.
    fn turn(&mut self) {
        let seats = self.field.seats.borrow().clone();
        let others: Vec<Seat> = seats.into_iter().filter(|seat| *seat != self.seat).collect();
        if let Some(seat) = self.dice.pick(&others) {
            self.seat = *seat;
        }
    }
}
