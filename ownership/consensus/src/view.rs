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
    /// Views that were taken down while somebody read them, so that no reader is the last who holds one: dropping what
    /// many entries have left behind takes milliseconds.
    taken_down: Mutex<Vec<Arc<View>>>,
}

/// Views that nobody reads any more.
#[derive(Debug, Default)]
pub struct Outdated {
    /// The one that hung there until now; cheap to drop, because it shares all but the last entries.
    pub last: Option<Arc<View>>,
    /// Those that were read for longer; not to be dropped where somebody waits.
    pub older: Vec<Arc<View>>,
}

impl Default for Publisher {
    /// Before the log is read nothing is known: stale.
    fn default() -> Self {
        let quorum = Quorum { stale: true, ..Quorum::default() };
        Self { view: ArcSwap::from_pointee(View { quorum, ..View::default() }), taken_down: Mutex::default() }
    }
}

impl Publisher {
    /// The current view.
    pub fn view(&self) -> Arc<View> {
        self.view.load_full()
    }

    /// Hangs up the ledger as it is now. Returns the views that nobody reads any more.
    pub fn ledger(&self, ledger: Ledger) -> Outdated {
        let mut taken_down = self.taken_down.lock().unwrap_or_else(PoisonError::into_inner);
        let quorum = self.view.load().quorum;
        let before = self.view.swap(Arc::new(View { ledger, quorum }));
        let (read, older) = std::mem::take(&mut *taken_down).into_iter().partition(is_read);
        *taken_down = read;
        if is_read(&before) {
            taken_down.push(before);
            return Outdated { last: None, older };
        }
        Outdated { last: Some(before), older }
    }

    /// Hangs up what is known of the quorum now.
    pub fn quorum(&self, quorum: Quorum) {
        let mut taken_down = self.taken_down.lock().unwrap_or_else(PoisonError::into_inner);
        let ledger = {
            let old = self.view.load();
            if old.quorum == quorum {
                return;
            }
            old.ledger.clone()
        };
        taken_down.push(self.view.swap(Arc::new(View { ledger, quorum })));
    }
}

/// Whether somebody besides the publisher holds a view that was taken down; nobody new can get it.
fn is_read(view: &Arc<View>) -> bool {
    Arc::strong_count(view) > 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_is_never_the_last_who_holds_a_view() {
        let publisher = Publisher::default();
        drop(publisher.ledger(Ledger::default()));
        let (read, held) = (publisher.view(), Arc::downgrade(&publisher.view()));
        for _ in 0..3 {
            let outdated = publisher.ledger(Ledger::default());
            assert!(outdated.older.is_empty(), "it is still read");
        }
        drop(read);
        assert!(held.upgrade().is_some(), "the reader dropped it and freed nothing");
        let outdated = publisher.ledger(Ledger::default());
        assert_eq!(outdated.older.len(), 1);
        assert!(outdated.last.is_some(), "what nobody read while it hung there");
        drop(outdated);
        assert!(held.upgrade().is_none());
    }

    #[test]
    fn a_view_that_only_the_quorum_replaced_is_kept_for_its_reader_too() {
        let publisher = Publisher::default();
        let (read, held) = (publisher.view(), Arc::downgrade(&publisher.view()));
        publisher.quorum(Quorum { term: 7, ..Quorum::default() });
        assert_eq!(publisher.view().quorum().term, 7);
        drop(read);
        assert!(held.upgrade().is_some());
        assert_eq!(publisher.ledger(Ledger::default()).older.len(), 1);
        assert!(held.upgrade().is_none());
    }
}
