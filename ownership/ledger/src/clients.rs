//! Who may write, and what they were answered: a repeated serial returns the first outcome.

use imbl::OrdMap;
use serde::{Deserialize, Serialize};
use vocabulary::{ClientSerial, Epoch, NodeId};

use crate::outcome::Outcome;

/// One boot of one node.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct Client {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) wrote: Epoch,
    /// The lowest serial whose outcome is still known, or that may still be executed.
    floor: ClientSerial,
    outcomes: Answers,
}

/// Outcomes by serial, and the bytes that they count for; written as the plain map.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
#[serde(from = "OrdMap<ClientSerial, Outcome>", into = "OrdMap<ClientSerial, Outcome>")]
struct Answers {
    by_serial: OrdMap<ClientSerial, Outcome>,
    bytes: u64,
}

impl From<OrdMap<ClientSerial, Outcome>> for Answers {
    fn from(by_serial: OrdMap<ClientSerial, Outcome>) -> Self {
        let bytes = by_serial.values().map(Outcome::counted_bytes).sum();
        Self { by_serial, bytes }
    }
}

impl From<Answers> for OrdMap<ClientSerial, Outcome> {
    fn from(answers: Answers) -> Self {
        answers.by_serial
    }
}

impl Answers {
    fn insert(&mut self, serial: ClientSerial, outcome: Outcome) {
        self.bytes += outcome.counted_bytes();
        let old = self.by_serial.insert(serial, outcome);
        self.bytes -= old.map_or(0, |old| old.counted_bytes());
    }

    /// Forgets the oldest; its serial.
    fn forget_oldest(&mut self) -> Option<ClientSerial> {
        let serial = *self.by_serial.get_min().map(|(serial, _)| serial)?;
        self.bytes -= self.by_serial.remove(&serial).map_or(0, |outcome| outcome.counted_bytes());
        Some(serial)
    }
}

/// How much of what a client was answered is remembered. The newest outcome always is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keep {
    pub(crate) outcomes: u32,
    pub(crate) bytes: u64,
}

/// What is known of a serial.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Recall {
    /// It was never executed.
    Fresh,
    /// It was, with this outcome.
    Answered(Outcome),
    /// It may have been, too long ago to tell.
    Forgotten,
}

impl Client {
    /// A client that opened with the command of serial `first`; what came before it is not known here.
    pub(crate) fn new(node: NodeId, epoch: Epoch, first: ClientSerial) -> Self {
        Self { node, epoch, wrote: epoch, floor: first, outcomes: Answers::default() }
    }

    pub(crate) fn recall(&self, serial: ClientSerial) -> Recall {
        match self.outcomes.by_serial.get(&serial) {
            Some(outcome) => Recall::Answered(outcome.clone()),
            None if serial < self.floor => Recall::Forgotten,
            None => Recall::Fresh,
        }
    }

    /// Remembers an outcome, and forgets the oldest beyond `keep`.
    pub(crate) fn remember(&mut self, serial: ClientSerial, outcome: Outcome, keep: Keep) {
        self.outcomes.insert(serial, outcome);
        let is_full = |answers: &Answers| {
            let len = answers.by_serial.len();
            len > keep.outcomes as usize || (len > 1 && answers.bytes > keep.bytes)
        };
        while is_full(&self.outcomes) {
            let Some(oldest) = self.outcomes.forget_oldest() else { return };
            self.floor = ClientSerial(oldest.0.saturating_add(1));
        }
    }

    /// What it was answered, by serial.
    pub(crate) fn outcomes(&self) -> &OrdMap<ClientSerial, Outcome> {
        &self.outcomes.by_serial
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_beyond_the_bound_are_unknown_and_never_fresh_again() {
        let mut client = Client::new(NodeId(1), Epoch::default(), ClientSerial(0));
        for n in 0..10 {
            client.remember(ClientSerial(n * 2), Outcome::Done, Keep { outcomes: 4, bytes: u64::MAX });
        }
        assert_eq!(client.outcomes().len(), 4);
        assert_eq!(client.recall(ClientSerial(18)), Recall::Answered(Outcome::Done));
        // 9 was never sent, but nobody can tell any more whether it was.
        assert_eq!(client.recall(ClientSerial(9)), Recall::Forgotten);
        assert_eq!(client.recall(ClientSerial(10)), Recall::Forgotten);
        assert_eq!(client.recall(ClientSerial(11)), Recall::Fresh);
        assert_eq!(client.recall(ClientSerial(20)), Recall::Fresh);
    }

    #[test]
    fn outcomes_of_large_batches_are_forgotten_by_their_bytes_and_the_newest_never() {
        let batch = |len| Outcome::Batch(vec![Outcome::Done; len]);
        let keep = Keep { outcomes: 1_024, bytes: 3 * batch(10).counted_bytes() };
        let mut client = Client::new(NodeId(1), Epoch::default(), ClientSerial(0));
        for n in 0..5 {
            client.remember(ClientSerial(n), batch(10), keep);
        }
        assert_eq!(client.outcomes().len(), 3);
        assert_eq!(client.recall(ClientSerial(1)), Recall::Forgotten);
        assert_eq!(client.recall(ClientSerial(2)), Recall::Answered(batch(10)));
        // What is read from a snapshot goes on as what was kept in memory.
        let read: Client = rmp_serde::from_slice(&rmp_serde::to_vec(&client).unwrap()).unwrap();
        assert_eq!(read, client);
        client.remember(ClientSerial(5), batch(1_000), keep);
        assert_eq!(client.outcomes().len(), 1);
        assert_eq!(client.recall(ClientSerial(5)), Recall::Answered(batch(1_000)));
        client.remember(ClientSerial(5), Outcome::Done, keep);
        for n in 6..40 {
            client.remember(ClientSerial(n), Outcome::Done, keep);
        }
        assert!(client.outcomes().len() > 30, "what was replaced or forgotten counts no more");
    }

    #[test]
    fn a_client_that_opens_late_does_not_execute_what_came_before() {
        let client = Client::new(NodeId(1), Epoch::default(), ClientSerial(7));
        assert_eq!(client.recall(ClientSerial(6)), Recall::Forgotten);
        assert_eq!(client.recall(ClientSerial(7)), Recall::Fresh);
    }
}
