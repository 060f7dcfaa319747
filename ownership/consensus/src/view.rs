//! The read view: the ledger as this node last applied it. Reading it takes no lock, no network and no copy.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use ledger::Ledger;
use vocabulary::NodeId;

/// The ledger at one applied index, and what this node knew of the quorum then.
#[derive(Clone, Debug, Default)]
pub struct View {
    ledger: Ledger,
    quorum: Quorum,
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

/// Where the current view hangs. Readers take no lock; the two writers (apply, quorum watch) take turns.
#[derive(Debug)]
pub struct Publisher {
    view: ArcSwap<View>,
    turn: Mutex<()>,
}

impl Default for Publisher {
    /// Before the log is read nothing is known: stale.
    fn default() -> Self {
        let quorum = Quorum { stale: true, ..Quorum::default() };
        Self { view: ArcSwap::from_pointee(View { quorum, ..View::default() }), turn: Mutex::default() }
    }
}

impl Publisher {
    /// The current view.
    pub fn view(&self) -> Arc<View> {
        self.view.load_full()
    }

    /// Hangs up the ledger as it is now. Returns the view before.
    pub fn ledger(&self, ledger: Ledger) -> Arc<View> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let quorum = self.view.load().quorum;
        self.view.swap(Arc::new(View { ledger, quorum }))
    }

    /// Hangs up what is known of the quorum now.
    pub fn quorum(&self, quorum: Quorum) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.view.load_full();
        if old.quorum != quorum {
            self.view.store(Arc::new(View { ledger: old.ledger.clone(), quorum }));
        }
    }
}
