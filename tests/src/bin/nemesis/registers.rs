//! Clients that write and read registers: quotas of tenants, pins and groups of artifacts. Each client uses one node
//! and moves to another one when it does not respond.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{RwLock, watch};
use vocabulary::ArtifactId;

use crate::NemesisError;
use crate::api_client::{ApiClient, ClusterAddresses};
use crate::fault_rng::FaultRng;
use crate::history::{
    MemberSlot, OperationHistory, Register, RegisterOperation, RegisterReply, RegisterRequest, RegisterValue,
};

/// Number of clients. All use all registers, so that their operations overlap.
pub(crate) const CLIENTS: usize = 4;
/// Time between two requests of a client.
const PACE: Duration = Duration::from_millis(100);
/// Timeout of one request; longer than an election.
const REPLY_TIMEOUT: Duration = Duration::from_secs(6);
/// Percentage of requests that write.
const WRITE_PERCENT: u64 = 50;
/// Percentage of writes that set no quota or no group.
const UNSET_PERCENT: u64 = 10;
/// Percentage of requests at which a client moves to another node.
const WANDER_PERCENT: u64 = 5;
/// Number of tenants with a quota.
const TENANTS: u8 = 3;

/// Registers of a run: quotas of tenants that have nothing else, and the pin and the group of each artifact.
pub(crate) fn registers(artifacts: &[ArtifactId]) -> Vec<Register> {
    let of_artifact = |artifact: &ArtifactId| [Register::Pin(*artifact), Register::Group(*artifact)];
    (0..TENANTS).map(Register::Quota).chain(artifacts.iter().flat_map(of_artifact)).collect()
}

/// One client.
pub(crate) struct RegisterClient {
    /// Its number among these clients.
    pub(crate) number: u32,
    /// Its random choices.
    pub(crate) rng: FaultRng,
    /// Addresses of all nodes.
    pub(crate) addresses: ClusterAddresses,
    /// Nodes that it may use at present.
    pub(crate) seats: watch::Receiver<Vec<MemberSlot>>,
    /// Registers that it uses.
    pub(crate) registers: Arc<[Register]>,
    /// Where its operations are recorded.
    pub(crate) history: Arc<OperationHistory>,
}

impl RegisterClient {
    /// Writes and reads until the history is full. Each request holds `gate`.
    pub(crate) async fn run(mut self, gate: Arc<RwLock<()>>) {
        let mut api = self.addresses.client();
        let mut seat = None;
        for step in 0_u64.. {
            tokio::time::sleep(PACE).await;
            let admitted = gate.read().await;
            let seats = self.seats.borrow().clone();
            let stays = seat.filter(|seat| seats.contains(seat)).filter(|_| self.rng.below(100) >= WANDER_PERCENT);
            let Some(slot) = stays.or_else(|| self.rng.pick(&seats).copied()) else { continue };
            let Some(register) = self.rng.pick(&self.registers).copied() else { return };
            let asked = self.next_request(register, step);
            let operation = request(&mut api, &self.history, (self.number, slot), (register, asked)).await;
            let is_served = !matches!(operation.answer, RegisterReply::Unavailable | RegisterReply::Unknown);
            seat = is_served.then_some(slot);
            if !self.history.record_register(operation) {
                return;
            }
            drop(admitted);
        }
    }

    /// A read, or a write of a value that no other write has, where the register has so many.
    fn next_request(&mut self, register: Register, step: u64) -> RegisterRequest {
        if self.rng.below(100) >= WRITE_PERCENT {
            return RegisterRequest::Read;
        }
        let unique = 1 + (u128::from(self.number) << 40) + u128::from(step);
        RegisterRequest::Write(RegisterValue(match register {
            Register::Pin(_) => Some(u128::from(self.rng.below(2))),
            Register::Quota(_) | Register::Group(_) => (self.rng.below(100) >= UNSET_PERCENT).then_some(unique),
        }))
    }
}

/// Reads every register once, from the nodes in turn, and records that. Every read must succeed.
pub(crate) async fn read_all(
    registers: &[Register],
    (addresses, seats): (&ClusterAddresses, &[MemberSlot]),
    history: &OperationHistory,
) -> Result<(), NemesisError> {
    let mut api = addresses.client();
    for (register, slot) in registers.iter().zip(seats.iter().cycle()) {
        let asked = (*register, RegisterRequest::Read);
        let operation = request(&mut api, history, (CLIENTS as u32, *slot), asked).await;
        if !matches!(operation.answer, RegisterReply::Found(_)) {
            let got = format!("{:?} to a linearizable read of {register:?}", operation.answer);
            return Err(NemesisError::Answer { who: format!("node {}", slot.0), got });
        }
        history.record_register(operation);
    }
    Ok(())
}

async fn request(
    api: &mut ApiClient,
    history: &OperationHistory,
    (client, seat): (u32, MemberSlot),
    (register, asked): (Register, RegisterRequest),
) -> RegisterOperation {
    let invoked = history.now();
    let answer = api.register_request(seat, (register, asked), REPLY_TIMEOUT).await;
    RegisterOperation { client, seat, register, asked, invoked, completed: history.now(), answer }
}
