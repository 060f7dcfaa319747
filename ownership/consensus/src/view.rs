//! The read view: the ledger as this node last applied it. Reading it takes no lock, no network and no copy.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use ledger::Ledger;
use vocabulary::NodeId;

/// The ledger at one applied index, and what this node knew of the quorum then.
#[derive(Clone, Debug, Default)]
pub struct LedgerView {
    ledger: Ledger,
    quorum: QuorumStatus,
}

/// What a node knows of its quorum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QuorumStatus {
    /// Raft's term.
    pub term: u64,
    /// The leader, as far as this node knows.
    pub leader: Option<NodeId>,
    /// Whether this node cannot say that the view is fresh: no leader, or a dead quorum.
    pub stale: bool,
}

impl LedgerView {
    /// The ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The quorum.
    pub fn quorum(&self) -> QuorumStatus {
        self.quorum
    }
}

impl Deref for LedgerView {
    type Target = Ledger;

    fn deref(&self) -> &Ledger {
        &self.ledger
    }
}

/// Where the current view hangs. Readers take no lock; the two writers (apply, quorum watch) take turns.
#[derive(Debug)]
pub struct ViewPublisher {
    view: ArcSwap<LedgerView>,
    /// Views that were taken down while somebody read them, so that no reader is the last who holds one: dropping what
    /// many entries have left behind takes milliseconds.
    replaced: Mutex<Vec<Arc<LedgerView>>>,
}

/// Views that nobody reads any more.
#[derive(Debug, Default)]
pub struct ReplacedViews {
    /// The one that hung there until now; cheap to drop, because it shares all but the last entries.
    pub current: Option<Arc<LedgerView>>,
    /// Those that were read for longer; not to be dropped where somebody waits.
    pub retained: Vec<Arc<LedgerView>>,
}

impl Default for ViewPublisher {
    /// Before the log is read nothing is known: stale.
    fn default() -> Self {
        let quorum = QuorumStatus { stale: true, ..QuorumStatus::default() };
        Self { view: ArcSwap::from_pointee(LedgerView { quorum, ..LedgerView::default() }), replaced: Mutex::default() }
    }
}

impl ViewPublisher {
    /// The current view.
    pub fn view(&self) -> Arc<LedgerView> {
        self.view.load_full()
    }

    /// Hangs up the ledger as it is now. Returns the views that nobody reads any more.
    pub fn publish_ledger(&self, ledger: Ledger) -> ReplacedViews {
        let mut taken_down = self.replaced.lock().unwrap_or_else(PoisonError::into_inner);
        let quorum = self.view.load().quorum;
        let before = self.view.swap(Arc::new(LedgerView { ledger, quorum }));
        let (read, older) = std::mem::take(&mut *taken_down).into_iter().partition(has_readers);
        *taken_down = read;
        if has_readers(&before) {
            taken_down.push(before);
            return ReplacedViews { current: None, retained: older };
        }
        ReplacedViews { current: Some(before), retained: older }
    }

    /// Hangs up what is known of the quorum now.
    pub fn publish_quorum(&self, quorum: QuorumStatus) {
        let mut taken_down = self.replaced.lock().unwrap_or_else(PoisonError::into_inner);
        let ledger = {
            let old = self.view.load();
            if old.quorum == quorum {
                return;
            }
            old.ledger.clone()
        };
        taken_down.push(self.view.swap(Arc::new(LedgerView { ledger, quorum })));
    }
}

/// Whether somebody besides the publisher holds a view that was taken down; nobody new can get it.
fn has_readers(view: &Arc<LedgerView>) -> bool {
    Arc::strong_count(view) > 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_a_reader_never_frees_a_view() {
        let publisher = ViewPublisher::default();
        drop(publisher.publish_ledger(Ledger::default()));
        let (read, held) = (publisher.view(), Arc::downgrade(&publisher.view()));
        for _ in 0..3 {
            let outdated = publisher.publish_ledger(Ledger::default());
            assert!(outdated.retained.is_empty(), "it is still read");
        }
        drop(read);
        assert!(held.upgrade().is_some(), "the reader dropped it and freed nothing");
        let outdated = publisher.publish_ledger(Ledger::default());
        assert_eq!(outdated.retained.len(), 1);
        assert!(outdated.current.is_some(), "what nobody read while it hung there");
        drop(outdated);
        assert!(held.upgrade().is_none());
    }

    #[test]
    fn a_view_replaced_by_a_quorum_update_is_retained_for_its_reader() {
        let publisher = ViewPublisher::default();
        let (read, held) = (publisher.view(), Arc::downgrade(&publisher.view()));
        publisher.publish_quorum(QuorumStatus { term: 7, ..QuorumStatus::default() });
        assert_eq!(publisher.view().quorum().term, 7);
        drop(read);
        assert!(held.upgrade().is_some());
        assert_eq!(publisher.publish_ledger(Ledger::default()).retained.len(), 1);
        assert!(held.upgrade().is_none());
    }
}
