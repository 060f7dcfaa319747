//! Ring buffer of the ledger's last changes, for watchers. Pure. Delivers whole revisions, in order and without gaps.

use std::collections::VecDeque;

use ledger::{ChangeOp, RecordKey, RecordUpdate};

/// Maximum number of changes that one read returns, unless a single revision has more.
const MAX_WATCH_BATCH: usize = 256;

/// One change of a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChangeEvent {
    /// Log index of the entry that made the change. Several changes may share one revision.
    pub revision: u64,
    /// Whether the record was written or removed.
    pub op: ChangeOp,
    /// Key of the changed record.
    pub key: RecordKey,
}

/// Error: the requested revision is no longer kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("changes before revision {oldest} are not kept any more; read the records anew and watch from there")]
pub struct CompactedRevision {
    /// First revision that is still complete.
    pub oldest: u64,
}

/// Position of a watcher: the first revision that it has not read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChangeCursor(u64);

/// Ring buffer of the last changes, in order.
#[derive(Debug)]
pub struct ChangeRing {
    changes: VecDeque<ChangeEvent>,
    capacity: usize,
    /// First revision of which all changes are kept.
    oldest: u64,
}

impl ChangeRing {
    /// Creates an empty ring for `capacity` changes.
    pub fn new(capacity: usize) -> Self {
        Self { changes: VecDeque::new(), capacity, oldest: 0 }
    }

    /// Adds the changes of one revision.
    pub fn push(&mut self, revision: u64, changes: &[RecordUpdate]) {
        self.changes.extend(changes.iter().map(|RecordUpdate { key, op }| ChangeEvent {
            revision,
            op: *op,
            key: key.clone(),
        }));
        while self.changes.len() > self.capacity {
            // A revision is dropped as a whole.
            let Some(gone) = self.changes.front().map(|change| change.revision) else { return };
            while self.changes.front().is_some_and(|change| change.revision == gone) {
                self.changes.pop_front();
            }
            self.oldest = gone + 1;
        }
    }

    /// Drops all changes up to `revision`, which were replaced by a snapshot.
    pub fn compact(&mut self, revision: u64) {
        self.changes.clear();
        self.oldest = revision + 1;
    }

    /// Returns a cursor that reads all changes from revision `from` on.
    pub fn cursor(&self, from: u64) -> Result<ChangeCursor, CompactedRevision> {
        if from < self.oldest { Err(CompactedRevision { oldest: self.oldest }) } else { Ok(ChangeCursor(from)) }
    }

    /// Reads the next whole revisions, at most up to `upto`, of which all changes must have been pushed. Returns
    /// nothing if all is read.
    ///
    /// A cursor fails only if a change that it has not read was dropped.
    pub fn read(&self, cursor: &mut ChangeCursor, upto: u64) -> Result<Vec<ChangeEvent>, CompactedRevision> {
        *cursor = self.cursor(cursor.0)?;
        let start = self.changes.partition_point(|change| change.revision < cursor.0);
        let mut batch: Vec<ChangeEvent> = Vec::new();
        for change in self.changes.range(start..).take_while(|change| change.revision <= upto) {
            let is_full = batch.len() >= MAX_WATCH_BATCH;
            if is_full && batch.last().is_some_and(|last| last.revision < change.revision) {
                *cursor = ChangeCursor(change.revision);
                return Ok(batch);
            }
            batch.push(change.clone());
        }
        *cursor = ChangeCursor(cursor.0.max(upto + 1));
        Ok(batch)
    }
}

#[cfg(test)]
mod tests {
    use vocabulary::SessionId;

    use super::*;

    fn put(n: u128) -> RecordUpdate {
        RecordUpdate { key: RecordKey::Session(SessionId(n)), op: ChangeOp::Put }
    }

    fn revisions(changes: &[ChangeEvent]) -> Vec<u64> {
        changes.iter().map(|change| change.revision).collect()
    }

    #[test]
    fn changes_arrive_in_order_from_the_requested_revision() {
        let mut ring = ChangeRing::new(100);
        (1..=10).for_each(|revision| ring.push(revision, &[put(1), put(2)]));
        let mut cursor = ring.cursor(8).unwrap();
        assert_eq!(revisions(&ring.read(&mut cursor, 9).unwrap()), [8, 8, 9, 9], "10 is not shown yet");
        assert!(ring.read(&mut cursor, 9).unwrap().is_empty());
        ring.push(11, &[]);
        ring.push(12, &[put(3)]);
        assert_eq!(revisions(&ring.read(&mut cursor, 12).unwrap()), [10, 10, 12]);
        assert!(ring.read(&mut cursor, 12).unwrap().is_empty());
        let mut later = ring.cursor(14).unwrap();
        (13..=14).for_each(|revision| ring.push(revision, &[put(4)]));
        assert_eq!(revisions(&ring.read(&mut later, 14).unwrap()), [14]);
    }

    #[test]
    fn a_revision_is_read_and_forgotten_as_a_whole() {
        let many: Vec<RecordUpdate> = (0..MAX_WATCH_BATCH as u128 - 1).map(put).collect();
        let mut ring = ChangeRing::new(3 * MAX_WATCH_BATCH);
        (1..=4).for_each(|revision| ring.push(revision, &many));
        assert_eq!(ring.cursor(1), Err(CompactedRevision { oldest: 2 }));
        let mut cursor = ring.cursor(2).unwrap();
        for (first, last) in [(2, 3), (4, 4)] {
            let read = revisions(&ring.read(&mut cursor, 4).unwrap());
            assert_eq!((read.first(), read.last()), (Some(&first), Some(&last)));
            assert_eq!(read.len() % many.len(), 0, "{read:?}");
        }
    }

    #[test]
    fn a_lagging_reader_gets_the_oldest_readable_revision() {
        let mut ring = ChangeRing::new(8);
        let mut slow = ring.cursor(0).unwrap();
        (1..=10).for_each(|revision| ring.push(revision, &[put(1), put(2)]));
        assert_eq!(ring.read(&mut slow, 10), Err(CompactedRevision { oldest: 7 }));
        assert_eq!(ring.cursor(6), Err(CompactedRevision { oldest: 7 }));
        let mut anew = ring.cursor(7).unwrap();
        assert_eq!(revisions(&ring.read(&mut anew, 7).unwrap()), [7, 7]);
    }

    #[test]
    fn a_reader_is_compacted_only_when_its_next_revision_is_gone() {
        let mut ring = ChangeRing::new(4);
        (1..=4).for_each(|revision| ring.push(revision, &[put(1)]));
        let (mut late, mut ahead) = (ring.cursor(4).unwrap(), ring.cursor(9).unwrap());
        (5..=7).for_each(|revision| ring.push(revision, &[put(1)]));
        assert_eq!(revisions(&ring.read(&mut late, 7).unwrap()), [4, 5, 6, 7]);
        (8..=12).for_each(|revision| ring.push(revision, &[put(1)]));
        assert_eq!(revisions(&ring.read(&mut ahead, 12).unwrap()), [9, 10, 11, 12]);
        // The dropped revisions are ones that the cursor had already read.
        (13..=16).for_each(|revision| ring.push(revision, &[put(1)]));
        assert_eq!(revisions(&ring.read(&mut ahead, 16).unwrap()), [13, 14, 15, 16]);
        assert_eq!(ring.read(&mut late, 16), Err(CompactedRevision { oldest: 13 }));
    }

    #[test]
    fn installing_a_foreign_snapshot_compacts_all_earlier_changes() {
        let mut ring = ChangeRing::new(8);
        ring.push(1, &[put(1)]);
        let mut cursor = ring.cursor(1).unwrap();
        assert_eq!(revisions(&ring.read(&mut cursor, 1).unwrap()), [1]);
        ring.compact(50);
        assert_eq!(ring.read(&mut cursor, 50), Err(CompactedRevision { oldest: 51 }));
        assert_eq!(ring.cursor(50), Err(CompactedRevision { oldest: 51 }));
        let mut anew = ring.cursor(51).unwrap();
        ring.push(51, &[put(2)]);
        assert_eq!(revisions(&ring.read(&mut anew, 51).unwrap()), [51]);
    }
}
