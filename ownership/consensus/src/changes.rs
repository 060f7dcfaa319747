//! The last changes of the ledger, as watchers are told them: whole revisions, in order, without a gap. Pure.

use std::collections::VecDeque;

use ledger::{Changed, Key, Op};

/// Changes that a watcher takes at once, unless one revision has more.
const BATCH: usize = 256;

/// One change of a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// The log index of the entry that made it; several changes may have the same.
    pub revision: u64,
    /// Written or forgotten.
    pub op: Op,
    /// Which record.
    pub key: Key,
}

/// What was asked for is not kept any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("changes before revision {oldest} are not kept any more; read the records anew and watch from there")]
pub struct Compacted {
    /// The first revision that is still complete.
    pub oldest: u64,
}

/// How far a watcher has read: the first revision of which it was told nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cursor(u64);

/// The last changes, in order.
#[derive(Debug)]
pub struct Ring {
    changes: VecDeque<Change>,
    capacity: usize,
    /// The first revision of which everything is kept.
    oldest: u64,
}

impl Ring {
    /// An empty one, for so many changes.
    pub fn new(capacity: usize) -> Self {
        Self { changes: VecDeque::new(), capacity, oldest: 0 }
    }

    /// Adds what a revision changed.
    pub fn push(&mut self, revision: u64, changes: &[Changed]) {
        self.changes.extend(changes.iter().map(|Changed { key, op }| Change { revision, op: *op, key: key.clone() }));
        while self.changes.len() > self.capacity {
            // A revision goes as a whole.
            let Some(gone) = self.changes.front().map(|change| change.revision) else { return };
            while self.changes.front().is_some_and(|change| change.revision == gone) {
                self.changes.pop_front();
            }
            self.oldest = gone + 1;
        }
    }

    /// Forgets everything: what happened up to `revision` came as a whole.
    pub fn compact(&mut self, revision: u64) {
        self.changes.clear();
        self.oldest = revision + 1;
    }

    /// A reader of everything from revision `from` on.
    pub fn cursor(&self, from: u64) -> Result<Cursor, Compacted> {
        if from < self.oldest { Err(Compacted { oldest: self.oldest }) } else { Ok(Cursor(from)) }
    }

    /// What comes next, up to the revision `upto`, of which everything was pushed: whole revisions, nothing when all is
    /// read. A reader is cut off only when something is gone that it wants.
    pub fn read(&self, cursor: &mut Cursor, upto: u64) -> Result<Vec<Change>, Compacted> {
        *cursor = self.cursor(cursor.0)?;
        let start = self.changes.partition_point(|change| change.revision < cursor.0);
        let mut batch: Vec<Change> = Vec::new();
        for change in self.changes.range(start..).take_while(|change| change.revision <= upto) {
            let is_full = batch.len() >= BATCH;
            if is_full && batch.last().is_some_and(|last| last.revision < change.revision) {
                *cursor = Cursor(change.revision);
                return Ok(batch);
            }
            batch.push(change.clone());
        }
        *cursor = Cursor(cursor.0.max(upto + 1));
        Ok(batch)
    }
}

#[cfg(test)]
mod tests {
    use vocabulary::SessionId;

    use super::*;

    fn put(n: u128) -> Changed {
        Changed { key: Key::Session(SessionId(n)), op: Op::Put }
    }

    fn revisions(changes: &[Change]) -> Vec<u64> {
        changes.iter().map(|change| change.revision).collect()
    }

    #[test]
    fn changes_come_in_order_without_a_gap_from_where_was_asked() {
        let mut ring = Ring::new(100);
        (1..=10).for_each(|revision| ring.push(revision, &[put(1), put(2)]));
        let mut cursor = ring.cursor(8).unwrap();
        assert_eq!(revisions(&ring.read(&mut cursor, 9).unwrap()), [8, 8, 9, 9], "10 is not shown yet");
        assert_eq!(revisions(&ring.read(&mut cursor, 9).unwrap()), []);
        ring.push(11, &[]);
        ring.push(12, &[put(3)]);
        assert_eq!(revisions(&ring.read(&mut cursor, 12).unwrap()), [10, 10, 12]);
        assert_eq!(revisions(&ring.read(&mut cursor, 12).unwrap()), []);
        let mut later = ring.cursor(14).unwrap();
        (13..=14).for_each(|revision| ring.push(revision, &[put(4)]));
        assert_eq!(revisions(&ring.read(&mut later, 14).unwrap()), [14]);
    }

    #[test]
    fn a_revision_is_read_as_a_whole_however_large_and_forgotten_as_a_whole() {
        let many: Vec<Changed> = (0..BATCH as u128 - 1).map(put).collect();
        let mut ring = Ring::new(3 * BATCH);
        (1..=4).for_each(|revision| ring.push(revision, &many));
        assert_eq!(ring.cursor(1), Err(Compacted { oldest: 2 }));
        let mut cursor = ring.cursor(2).unwrap();
        for (first, last) in [(2, 3), (4, 4)] {
            let read = revisions(&ring.read(&mut cursor, 4).unwrap());
            assert_eq!((read.first(), read.last()), (Some(&first), Some(&last)));
            assert_eq!(read.len() % many.len(), 0, "{read:?}");
        }
    }

    #[test]
    fn a_slow_reader_is_told_where_to_begin() {
        let mut ring = Ring::new(8);
        let mut slow = ring.cursor(0).unwrap();
        (1..=10).for_each(|revision| ring.push(revision, &[put(1), put(2)]));
        assert_eq!(ring.read(&mut slow, 10), Err(Compacted { oldest: 7 }));
        assert_eq!(ring.cursor(6), Err(Compacted { oldest: 7 }));
        let mut anew = ring.cursor(7).unwrap();
        assert_eq!(revisions(&ring.read(&mut anew, 7).unwrap()), [7, 7]);
    }

    #[test]
    fn a_reader_is_cut_off_only_when_something_is_gone_that_it_wants() {
        let mut ring = Ring::new(4);
        (1..=4).for_each(|revision| ring.push(revision, &[put(1)]));
        let (mut late, mut ahead) = (ring.cursor(4).unwrap(), ring.cursor(9).unwrap());
        (5..=7).for_each(|revision| ring.push(revision, &[put(1)]));
        assert_eq!(revisions(&ring.read(&mut late, 7).unwrap()), [4, 5, 6, 7]);
        (8..=12).for_each(|revision| ring.push(revision, &[put(1)]));
        assert_eq!(revisions(&ring.read(&mut ahead, 12).unwrap()), [9, 10, 11, 12]);
        // Of what it had not read, nothing is kept that is gone.
        (13..=16).for_each(|revision| ring.push(revision, &[put(1)]));
        assert_eq!(revisions(&ring.read(&mut ahead, 16).unwrap()), [13, 14, 15, 16]);
        assert_eq!(ring.read(&mut late, 16), Err(Compacted { oldest: 13 }));
    }

    #[test]
    fn a_snapshot_from_another_node_compacts_everything_up_to_it() {
        let mut ring = Ring::new(8);
        ring.push(1, &[put(1)]);
        let mut cursor = ring.cursor(1).unwrap();
        assert_eq!(revisions(&ring.read(&mut cursor, 1).unwrap()), [1]);
        ring.compact(50);
        assert_eq!(ring.read(&mut cursor, 50), Err(Compacted { oldest: 51 }));
        assert_eq!(ring.cursor(50), Err(Compacted { oldest: 51 }));
        let mut anew = ring.cursor(51).unwrap();
        ring.push(51, &[put(2)]);
        assert_eq!(revisions(&ring.read(&mut anew, 51).unwrap()), [51]);
    }
}
