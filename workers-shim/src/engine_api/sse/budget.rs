//! Memory limit for what is buffered of engines' answers: incomplete events of all streams, against engines that never end
//! a line, and answers that come as one body.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

/// Bytes that each answer may hold without reserving: more than any event needs that has no prompt token ids.
const FREE_BYTES: usize = 64 << 10;

/// Limits the buffered bytes of all answers. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct EventBufferBudget(Option<Arc<BudgetState>>);

#[derive(Debug)]
struct BudgetState {
    max: usize,
    reserved: AtomicUsize,
}

impl EventBufferBudget {
    /// Creates a budget of `most` bytes, beyond the 64 KiB that each answer may hold anyway.
    pub fn of(most: usize) -> Self {
        Self(Some(Arc::new(BudgetState { max: most, reserved: AtomicUsize::new(0) })))
    }

    /// Returns the bytes that are reserved now.
    pub fn held(&self) -> usize {
        self.0.as_ref().map_or(0, |shared| shared.reserved.load(Ordering::Relaxed))
    }
}

/// One answer's share of the budget; released when dropped.
#[derive(Debug, Default)]
pub struct EventBufferShare {
    budget: EventBufferBudget,
    bytes: usize,
}

impl EventBufferShare {
    /// Creates an empty share.
    pub fn of(budget: EventBufferBudget) -> Self {
        Self { budget, bytes: 0 }
    }

    /// Returns `bytes` as a buffer whose last clone releases this share.
    pub fn hold(self, bytes: Bytes) -> Bytes {
        if self.bytes == 0 {
            return bytes;
        }
        Bytes::from_owner(SharedBuffer { bytes, _share: self })
    }

    /// Changes the reservation to `bytes` in all and returns whether that fits. If it does not, the whole reservation
    /// is released.
    pub fn reserve(&mut self, bytes: usize) -> bool {
        let Some(shared) = &self.budget.0 else { return true };
        let reserved = bytes.saturating_sub(FREE_BYTES);
        if reserved <= self.bytes {
            shared.reserved.fetch_sub(self.bytes - reserved, Ordering::Relaxed);
            self.bytes = reserved;
            return true;
        }
        let more = reserved - self.bytes;
        // Checked in one step: a reservation that fails must not make another one fail.
        let fits = |held: usize| held.checked_add(more).filter(|held| *held <= shared.max);
        if shared.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            shared.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
            self.bytes = 0;
            return false;
        }
        self.bytes = reserved;
        true
    }
}

/// A buffer and its share of the budget.
struct SharedBuffer {
    bytes: Bytes,
    _share: EventBufferShare,
}

impl AsRef<[u8]> for SharedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for EventBufferShare {
    fn drop(&mut self) {
        self.reserve(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_api::{EventRefusal, SseFilter};

    #[test]
    fn unfinished_events_of_many_streams_stay_within_the_budget() {
        let budget = EventBufferBudget::of(256 << 10);
        let mut scanners: Vec<_> = (0..40).map(|_| SseFilter::new().with_budget(budget.clone())).collect();
        let (mut passed, piece) = (Vec::new(), Bytes::from(vec![b'a'; 32 << 10]));
        for _ in 0..20 {
            for scanner in &mut scanners {
                let refused = scanner.push(piece.clone(), &mut passed).err();
                assert!(refused.is_none_or(|refusal| refusal == EventRefusal::NoMemory));
                assert!(budget.held() <= 256 << 10);
            }
        }
        assert!(scanners.iter().all(|scanner| scanner.refusal().is_some()), "each is longer than the budget");
        assert_eq!((passed.len(), budget.held()), (0, 0), "a refused event leaves nothing");
        let mut half = SseFilter::new().with_budget(budget.clone());
        half.push(Bytes::from(vec![b'a'; 128 << 10]), &mut passed).unwrap();
        assert_eq!(budget.held(), 64 << 10);
        drop(half);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn short_events_need_no_budget_and_finished_ones_return_theirs() {
        let budget = EventBufferBudget::of(100 << 10);
        let mut scanner = SseFilter::new().with_budget(budget.clone());
        let mut passed = Vec::new();
        scanner.push(Bytes::from(format!("data: \"{}", "a".repeat(FREE_BYTES / 2))), &mut passed).unwrap();
        assert_eq!(budget.held(), 0);
        scanner.push(Bytes::from("b".repeat(FREE_BYTES)), &mut passed).unwrap();
        assert!(budget.held() > 0);
        scanner.push(Bytes::from_static(b"\"\n\n"), &mut passed).unwrap();
        assert_eq!((budget.held(), scanner.facts().unread_events), (0, 1), "it was read, and is no chunk");
        assert_eq!(passed.len(), 1, "whole");
    }

    #[test]
    fn a_held_buffer_releases_its_share_with_its_last_clone() {
        let budget = EventBufferBudget::of(100);
        let mut share = EventBufferShare::of(budget.clone());
        assert!(share.reserve(FREE_BYTES + 80));
        let held = share.hold(Bytes::from_static(b"an answer"));
        let clone = held.clone();
        drop(held);
        assert_eq!((budget.held(), &clone[..]), (80, &b"an answer"[..]));
        drop(clone);
        assert_eq!(budget.held(), 0);
    }
}
