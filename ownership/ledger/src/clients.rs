//! Clients that may write, and their past outcomes: a repeated serial returns the first outcome.

use imbl::OrdMap;
use serde::{Deserialize, Serialize};
use vocabulary::{ClientSerial, Epoch, NodeId};

use crate::outcome::Outcome;

/// A client: one boot of one node.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct ClientRecord {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) wrote: Epoch,
    /// Lowest serial whose outcome is still known or that may still be executed.
    floor: ClientSerial,
    outcomes: OutcomesBySerial,
}

/// Outcomes by serial, and the bytes that they count for. Serialized as a plain map.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
#[serde(from = "OrdMap<ClientSerial, Outcome>", into = "OrdMap<ClientSerial, Outcome>")]
struct OutcomesBySerial {
    by_serial: OrdMap<ClientSerial, Outcome>,
    bytes: u64,
}

impl From<OrdMap<ClientSerial, Outcome>> for OutcomesBySerial {
    fn from(by_serial: OrdMap<ClientSerial, Outcome>) -> Self {
        let bytes = by_serial.values().map(Outcome::counted_bytes).sum();
        Self { by_serial, bytes }
    }
}

impl From<OutcomesBySerial> for OrdMap<ClientSerial, Outcome> {
    fn from(answers: OutcomesBySerial) -> Self {
        answers.by_serial
    }
}

impl OutcomesBySerial {
    fn insert(&mut self, serial: ClientSerial, outcome: Outcome) {
        self.bytes += outcome.counted_bytes();
        let old = self.by_serial.insert(serial, outcome);
        self.bytes -= old.map_or(0, |old| old.counted_bytes());
    }

    /// Forgets the oldest outcome and returns its serial.
    fn forget_oldest(&mut self) -> Option<ClientSerial> {
        let serial = *self.by_serial.get_min().map(|(serial, _)| serial)?;
        self.bytes -= self.by_serial.remove(&serial).map_or(0, |outcome| outcome.counted_bytes());
        Some(serial)
    }
}

/// How many outcomes of a client are remembered. The newest one always is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutcomeLimits {
    pub(crate) max_outcomes: u32,
    pub(crate) max_bytes: u64,
}

/// What is known about a serial.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum SerialStatus {
    /// It was never executed.
    Fresh,
    /// It was executed, with this outcome.
    Executed(Outcome),
    /// It may have been executed, but its outcome is no longer remembered.
    Forgotten,
}

impl ClientRecord {
    /// Creates a client that opened with the command of serial `first`. Nothing is known of earlier serials.
    pub(crate) fn new(node: NodeId, epoch: Epoch, first: ClientSerial) -> Self {
        Self { node, epoch, wrote: epoch, floor: first, outcomes: OutcomesBySerial::default() }
    }

    pub(crate) fn serial_status(&self, serial: ClientSerial) -> SerialStatus {
        match self.outcomes.by_serial.get(&serial) {
            Some(outcome) => SerialStatus::Executed(outcome.clone()),
            None if serial < self.floor => SerialStatus::Forgotten,
            None => SerialStatus::Fresh,
        }
    }

    /// Records an outcome, and forgets the oldest ones beyond `keep`.
    pub(crate) fn record_outcome(&mut self, serial: ClientSerial, outcome: Outcome, keep: OutcomeLimits) {
        self.outcomes.insert(serial, outcome);
        let is_full = |answers: &OutcomesBySerial| {
            let len = answers.by_serial.len();
            len > keep.max_outcomes as usize || (len > 1 && answers.bytes > keep.max_bytes)
        };
        while is_full(&self.outcomes) {
            let Some(oldest) = self.outcomes.forget_oldest() else { return };
            self.floor = ClientSerial(oldest.0.saturating_add(1));
        }
    }

    /// Returns the remembered outcomes by serial.
    pub(crate) fn outcomes(&self) -> &OrdMap<ClientSerial, Outcome> {
        &self.outcomes.by_serial
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_beyond_the_bound_are_forgotten_and_never_fresh_again() {
        let mut client = ClientRecord::new(NodeId(1), Epoch::default(), ClientSerial(0));
        for n in 0..10 {
            client.record_outcome(
                ClientSerial(n * 2),
                Outcome::Done,
                OutcomeLimits { max_outcomes: 4, max_bytes: u64::MAX },
            );
        }
        assert_eq!(client.outcomes().len(), 4);
        assert_eq!(client.serial_status(ClientSerial(18)), SerialStatus::Executed(Outcome::Done));
        // 9 was never sent, but that is no longer known.
        assert_eq!(client.serial_status(ClientSerial(9)), SerialStatus::Forgotten);
        assert_eq!(client.serial_status(ClientSerial(10)), SerialStatus::Forgotten);
        assert_eq!(client.serial_status(ClientSerial(11)), SerialStatus::Fresh);
        assert_eq!(client.serial_status(ClientSerial(20)), SerialStatus::Fresh);
    }

    #[test]
    fn outcomes_are_bounded_by_bytes_and_the_newest_is_always_retained() {
        let batch = |len| Outcome::Batch(vec![Outcome::Done; len]);
        let keep = OutcomeLimits { max_outcomes: 1_024, max_bytes: 3 * batch(10).counted_bytes() };
        let mut client = ClientRecord::new(NodeId(1), Epoch::default(), ClientSerial(0));
        for n in 0..5 {
            client.record_outcome(ClientSerial(n), batch(10), keep);
        }
        assert_eq!(client.outcomes().len(), 3);
        assert_eq!(client.serial_status(ClientSerial(1)), SerialStatus::Forgotten);
        assert_eq!(client.serial_status(ClientSerial(2)), SerialStatus::Executed(batch(10)));
        // A client read from a snapshot behaves like the one that was kept in memory.
        let read: ClientRecord = rmp_serde::from_slice(&rmp_serde::to_vec(&client).unwrap()).unwrap();
        assert_eq!(read, client);
        client.record_outcome(ClientSerial(5), batch(1_000), keep);
        assert_eq!(client.outcomes().len(), 1);
        assert_eq!(client.serial_status(ClientSerial(5)), SerialStatus::Executed(batch(1_000)));
        client.record_outcome(ClientSerial(5), Outcome::Done, keep);
        for n in 6..40 {
            client.record_outcome(ClientSerial(n), Outcome::Done, keep);
        }
        assert!(client.outcomes().len() > 30, "what was replaced or forgotten counts no more");
    }

    #[test]
    fn serials_before_the_client_opened_are_not_executed() {
        let client = ClientRecord::new(NodeId(1), Epoch::default(), ClientSerial(7));
        assert_eq!(client.serial_status(ClientSerial(6)), SerialStatus::Forgotten);
        assert_eq!(client.serial_status(ClientSerial(7)), SerialStatus::Fresh);
    }
}
