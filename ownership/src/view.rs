//! The read view: the ledger as this node last applied it. Reading it takes no lock, no network and no copy.

use std::ops::Deref;

use ledger::Ledger;
use vocabulary::NodeId;

/// The ledger at one applied index, and what this node knew of the quorum then.
#[derive(Clone, Debug, Default)]
pub struct View {
    pub(crate) ledger: Ledger,
    pub(crate) quorum: Quorum,
}

/// What a node knows of its quorum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Quorum {
    /// Raft's term.
    pub term: u64,
    /// The leader, as far as this node knows.
    pub leader: Option<NodeId>,
    /// Whether this node cannot say that the view is fresh: no leader, or a dead quorum.
    pub stale: bool,
}

impl View {
    /// The ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The quorum.
    pub fn quorum(&self) -> Quorum {
        self.quorum
    }
}

impl Deref for View {
    type Target = Ledger;

    fn deref(&self) -> &Ledger {
        &self.ledger
    }
}
