//! The read view: the ledger as this node last applied it. Reading it takes no lock, no network and no copy.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use ledger::Ledger;
use vocabulary::NodeId;

/// The ledger at one applied index, and the status of the quorum at that time.
#[derive(Clone, Debug, Default)]
pub struct LedgerView {
    ledger: Ledger,
    quorum: QuorumStatus,
}

/// What a node knows of its quorum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QuorumStatus {
    /// Current Raft term.
    pub term: u64,
    /// Leader, as far as this node knows.
    pub leader: Option<NodeId>,
    /// Whether the view may be stale: there is no leader, or the quorum is lost.
    pub stale: bool,
}

impl LedgerView {
    /// Returns the ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the status of the quorum.
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

/// Holder of the current view. Readers take no lock; the two writers (apply, quorum watch) are serialized.
#[derive(Debug)]
pub struct ViewPublisher {
    view: ArcSwap<LedgerView>,
    /// Replaced views that a reader still held. They are kept so that no reader is the last holder: freeing a view that
    /// many entries have diverged from takes milliseconds.
    replaced: Mutex<Vec<Arc<LedgerView>>>,
}

/// Replaced views without readers, for the caller to drop.
#[derive(Debug, Default)]
pub struct ReplacedViews {
    /// View that was current until now. Cheap to drop, because it shares all but the last entries.
    pub current: Option<Arc<LedgerView>>,
    /// Views that readers held for longer. Do not drop them on a latency-critical path.
    pub retained: Vec<Arc<LedgerView>>,
}

impl Default for ViewPublisher {
    /// Nothing is known before the log is read, so the view counts as stale.
    fn default() -> Self {
        let quorum = QuorumStatus { stale: true, ..QuorumStatus::default() };
        Self { view: ArcSwap::from_pointee(LedgerView { quorum, ..LedgerView::default() }), replaced: Mutex::default() }
    }
}

impl ViewPublisher {
    /// Returns the current view.
    pub fn view(&self) -> Arc<LedgerView> {
        self.view.load_full()
    }

    /// Publishes the ledger as it is now. Returns the replaced views that have no readers.
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

    /// Publishes the quorum status.
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

/// Returns whether a reader still holds a replaced view. No new reader can get it.
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
