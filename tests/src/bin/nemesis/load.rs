//! Load: many clients that claim, release, migrate and read sessions, each at its own pace, through any node that
//! responds, and a few that write and read registers. All requests and replies are recorded in the history.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::{OwnedRwLockWriteGuard, RwLock, watch};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use vocabulary::{Owner, SessionId};

use crate::NemesisError;
use crate::api_client::{ApiClient, ClusterAddresses};
use crate::fault_rng::FaultRng;
use crate::history::{
    ClientOperation, MemberSlot, OperationHistory, OwnershipReply, OwnershipRequest, Register, SessionOwner,
};
use crate::registers::{self, RegisterClient};

/// Timeout of one request; longer than an election.
const REPLY_TIMEOUT: Duration = Duration::from_secs(6);
/// Percentage of requests about sessions shared by all clients.
const SHARED_PERCENT: u64 = 15;
/// Percentage of requests at which a client moves to another node.
const WANDER_PERCENT: u64 = 5;
/// Number of sessions shared by all clients.
pub(crate) const SHARED_SESSIONS: usize = 24;
/// Number of sessions of each client alone.
pub(crate) const SESSIONS_PER_CLIENT: usize = 2;

/// Amount of load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadAmount {
    /// Number of concurrent clients.
    pub(crate) clients: usize,
    /// Target rate of all clients together, in requests per second.
    pub(crate) rate: f64,
}

impl LoadAmount {
    /// Number of sessions needed.
    pub(crate) fn session_count(self) -> usize {
        SHARED_SESSIONS + self.clients * SESSIONS_PER_CLIENT
    }
}

/// State shared by all clients.
struct SharedLoadState {
    history: Arc<OperationHistory>,
    doors: ClusterAddresses,
    sessions: Vec<SessionId>,
    registers: Arc<[Register]>,
    owners: watch::Receiver<Vec<Owner>>,
    seats: watch::Receiver<Vec<MemberSlot>>,
    is_history_full: AtomicBool,
}

/// Running clients. Dropping it stops them.
pub(crate) struct LoadClients {
    shared: Arc<SharedLoadState>,
    gate: Arc<RwLock<()>>,
    seats: watch::Sender<Vec<MemberSlot>>,
    clients: Vec<JoinHandle<()>>,
}

impl LoadClients {
    /// Starts clients on existing sessions and registers. They use the nodes in `seats` and claim for `owners`.
    pub(crate) fn start(
        (amount, dice): (LoadAmount, &FaultRng),
        history: Arc<OperationHistory>,
        addresses: ClusterAddresses,
        (subjects, registers, owners): (Vec<SessionId>, Vec<Register>, watch::Receiver<Vec<Owner>>),
    ) -> LoadClients {
        let (seats, seen) = watch::channel(addresses.seats());
        let field = SharedLoadState {
            history,
            doors: addresses,
            sessions: subjects,
            registers: registers.into(),
            owners,
            seats: seen,
            is_history_full: AtomicBool::new(false),
        };
        let (shared, gate) = (Arc::new(field), Arc::new(RwLock::new(())));
        let pace = Duration::from_secs_f64(amount.clients as f64 / amount.rate);
        let client = |number: usize| {
            let client = LoadClient::new(number, dice.split(number as u64), shared.clone());
            tokio::spawn(client.run(pace, gate.clone()))
        };
        let register_client = |number: usize| {
            let client = RegisterClient {
                number: number as u32,
                rng: dice.split((amount.clients + number) as u64),
                addresses: shared.doors.clone(),
                seats: shared.seats.clone(),
                registers: shared.registers.clone(),
                history: shared.history.clone(),
            };
            tokio::spawn(client.run(gate.clone()))
        };
        let register_clients = (0..registers::CLIENTS).map(register_client);
        let clients = (0..amount.clients).map(client).chain(register_clients).collect();
        LoadClients { shared, gate, seats, clients }
    }

    /// Waits for requests in flight and blocks the clients until the guard is dropped.
    pub(crate) async fn pause(&self) -> OwnedRwLockWriteGuard<()> {
        self.gate.clone().write_owned().await
    }

    /// Sets the nodes that clients use from now on.
    pub(crate) fn set_slots(&self, seats: Vec<MemberSlot>) {
        // Fails only if all clients are gone.
        let _ = self.seats.send(seats);
    }

    /// The sessions.
    pub(crate) fn subjects(&self) -> &[SessionId] {
        &self.shared.sessions
    }

    /// The registers.
    pub(crate) fn registers(&self) -> &[Register] {
        &self.shared.registers
    }

    /// Fails if an operation was not recorded or a client has died: then the history is incomplete.
    pub(crate) fn check(&self) -> Result<(), NemesisError> {
        let dead = self.clients.iter().any(JoinHandle::is_finished);
        match dead || self.shared.is_history_full.load(Relaxed) {
            false => Ok(()),
            true => Err(NemesisError::Answer {
                who: "the load".into(),
                got: "a client died, or the history is full".into(),
            }),
        }
    }
}

impl Drop for LoadClients {
    fn drop(&mut self) {
        for client in &self.clients {
            client.abort();
        }
    }
}

/// One client: its connections, and its view of its sessions.
struct LoadClient {
    number: u32,
    rng: FaultRng,
    api: ApiClient,
    seat: MemberSlot,
    known_holders: HashMap<SessionId, SessionOwner>,
    shared: Arc<SharedLoadState>,
}

impl LoadClient {
    fn new(number: usize, rng: FaultRng, shared: Arc<SharedLoadState>) -> LoadClient {
        let seats = shared.doors.seats();
        let slot = seats[number % seats.len()];
        let api = shared.doors.client();
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        LoadClient { number, rng, api, seat: slot, known_holders: HashMap::new(), shared }
    }

    async fn run(mut self, pace: Duration, gate: Arc<RwLock<()>>) {
        tokio::time::sleep(pace.mul_f64(self.rng.fraction())).await;
        let mut ticks = tokio::time::interval(pace);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let admitted = gate.read().await;
            // Clients move to another node now and then, so that recovered nodes get clients again.
            if !self.shared.seats.borrow().contains(&self.seat) || self.rng.below(100) < WANDER_PERCENT {
                self.switch_node();
            }
            let subject = self.subject();
            let asked = self.next_request(subject);
            self.attempt(subject, asked).await;
            drop(admitted);
        }
    }

    fn subject(&mut self) -> SessionId {
        let own = SHARED_SESSIONS + self.number as usize * SESSIONS_PER_CLIENT;
        let at = match self.rng.below(100) < SHARED_PERCENT {
            true => self.rng.below(SHARED_SESSIONS as u64) as usize,
            false => own + self.rng.below(SESSIONS_PER_CLIENT as u64) as usize,
        };
        self.shared.sessions[at]
    }

    /// Chooses the next request about a session from the client's view of it.
    fn next_request(&mut self, subject: SessionId) -> OwnershipRequest {
        let owners = self.shared.owners.borrow().clone();
        let drawn = self.rng.below(100);
        let someone = self.rng.pick(&owners).copied();
        match (self.known_holders.get(&subject), someone) {
            (None, _) | (_, None) => OwnershipRequest::Read,
            (Some(_), _) if drawn < 10 => OwnershipRequest::Read,
            (Some(SessionOwner { owner: None, .. }), Some(someone)) => OwnershipRequest::Claim(someone),
            (Some(_), Some(someone)) if drawn < 20 => OwnershipRequest::Claim(someone),
            (Some(SessionOwner { owner: Some(owner), epoch }), _) if drawn < 55 => {
                OwnershipRequest::Release { owner: *owner, seen: *epoch }
            }
            (Some(SessionOwner { epoch, .. }), Some(to)) => OwnershipRequest::Migrate { to, seen: *epoch },
        }
    }

    async fn attempt(&mut self, subject: SessionId, request: OwnershipRequest) {
        let slot = self.seat;
        let invoked = self.shared.history.now();
        let (answer, revision) = self.api.request(slot, (subject, request), REPLY_TIMEOUT).await;
        let completed = self.shared.history.now();
        self.record_reply(subject, request, answer);
        if matches!(answer, OwnershipReply::Unavailable | OwnershipReply::Unknown) {
            self.switch_node();
        }
        let client = self.number;
        let operation =
            ClientOperation { client, seat: slot, subject, asked: request, invoked, completed, answer, revision };
        if !self.shared.history.record(operation) {
            self.shared.is_history_full.store(true, Relaxed);
        }
    }

    fn record_reply(&mut self, subject: SessionId, request: OwnershipRequest, reply: OwnershipReply) {
        let known = match (reply, request) {
            (
                OwnershipReply::Granted(epoch),
                OwnershipRequest::Claim(owner) | OwnershipRequest::Migrate { to: owner, .. },
            ) => Some(SessionOwner { owner: Some(owner), epoch }),
            (OwnershipReply::Found(holding), _) => Some(holding),
            (OwnershipReply::Released, OwnershipRequest::Release { seen, .. }) => {
                Some(SessionOwner { owner: None, epoch: seen })
            }
            (OwnershipReply::Unavailable, _) => return,
            _ => None,
        };
        match known {
            Some(holding) => self.known_holders.insert(subject, holding),
            None => self.known_holders.remove(&subject),
        };
    }

    /// Moves to another node, as clients do when one does not respond.
    fn switch_node(&mut self) {
        let seats = self.shared.seats.borrow().clone();
        let others: Vec<MemberSlot> = seats.into_iter().filter(|seat| *seat != self.seat).collect();
        if let Some(slot) = self.rng.pick(&others) {
            self.seat = *slot;
        }
    }
}
