//! Who may write, and what they were answered: a repeated serial returns the first outcome.

use imbl::OrdMap;
use serde::{Deserialize, Serialize};
use vocabulary::{ClientSerial, Epoch, NodeId};

use crate::outcome::Outcome;

/// One boot of one node.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct Client {
    /// Which node.
    pub(crate) node: NodeId,
    /// When it opened.
    pub(crate) epoch: Epoch,
    /// When it last wrote.
    pub(crate) wrote: Epoch,
    /// The lowest serial whose outcome is still known, or that may still be executed.
    floor: ClientSerial,
    /// What it was answered lately.
    outcomes: OrdMap<ClientSerial, Outcome>,
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
        Self { node, epoch, wrote: epoch, floor: first, outcomes: OrdMap::new() }
    }

    pub(crate) fn recall(&self, serial: ClientSerial) -> Recall {
        match self.outcomes.get(&serial) {
            Some(outcome) => Recall::Answered(outcome.clone()),
            None if serial < self.floor => Recall::Forgotten,
            None => Recall::Fresh,
        }
    }

    /// Remembers an outcome, and forgets the oldest beyond `keep`.
    pub(crate) fn remember(&mut self, serial: ClientSerial, outcome: Outcome, keep: u32) {
        self.outcomes.insert(serial, outcome);
        while self.outcomes.len() > keep as usize {
            let Some(oldest) = self.outcomes.get_min().map(|(serial, _)| *serial) else { return };
            self.outcomes.remove(&oldest);
            self.floor = ClientSerial(oldest.0.saturating_add(1));
        }
    }

    /// What it was answered, by serial.
    pub(crate) fn outcomes(&self) -> &OrdMap<ClientSerial, Outcome> {
        &self.outcomes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_beyond_the_bound_are_unknown_and_never_fresh_again() {
        let mut client = Client::new(NodeId(1), Epoch::default(), ClientSerial(0));
        for n in 0..10 {
            client.remember(ClientSerial(n * 2), Outcome::Done, 4);
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
    fn a_client_that_opens_late_does_not_execute_what_came_before() {
        let client = Client::new(NodeId(1), Epoch::default(), ClientSerial(7));
        assert_eq!(client.recall(ClientSerial(6)), Recall::Forgotten);
        assert_eq!(client.recall(ClientSerial(7)), Recall::Fresh);
    }
}
