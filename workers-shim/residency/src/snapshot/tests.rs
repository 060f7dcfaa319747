use std::collections::BTreeMap;

use proptest::prelude::*;
use vocabulary::{BlockHash, DpRank, Incarnation, KvIndexState, Overlap, Tier, WorkerId};

use super::*;
use crate::event_sequence::{MessageAction, SequenceTracker};
use crate::index::ResidencyIndex;
use crate::kv_event::{BlockRemoved, BlockStored, KvCacheEvent, KvCacheSpecKind};
use crate::residency_feed::{ApplyProgress, ResidencyFeed};
use crate::tests::{chain, removed, rules, stored};

const WORKER: WorkerId = WorkerId(5);
const RANK: DpRank = DpRank(3);
const PROCESS: Incarnation = Incarnation(77);

/// One source at a router.
struct RouterFixture {
    feed: ResidencyFeed,
    index: ResidencyIndex,
    stream: SequenceTracker,
}

impl RouterFixture {
    fn new() -> Self {
        let mut stream = SequenceTracker::new();
        stream.identify_process(Some(PROCESS));
        Self { feed: ResidencyFeed::new(WORKER, RANK, rules(2)), index: ResidencyIndex::new(), stream }
    }

    fn receive(&mut self, sequence: u64, event: &KvCacheEvent) -> MessageAction {
        let verdict = self.stream.on_live(sequence);
        if verdict == MessageAction::Apply {
            if *event == KvCacheEvent::Cleared {
                self.stream.cache_cleared();
            }
            self.feed.ingest(event);
            self.tell();
        }
        verdict
    }

    fn tell(&mut self) {
        self.feed.set_kv_index_state(self.stream.kv_index_state());
        while self.feed.settle(&mut self.index, 5).unwrap() == ApplyProgress::More {}
    }

    fn chunks(&self) -> Vec<Vec<u8>> {
        self.feed.snapshot(PROCESS, self.stream.next()).collect()
    }

    fn adopt(&mut self, imprint: ResidencySnapshot) {
        self.stream.adopt(imprint.head.process, imprint.head.next);
        self.feed.adopt(imprint);
        self.tell();
    }

    /// Returns all its observable and internal state.
    fn state(&self) -> (Vec<Vec<Overlap>>, KvIndexState, usize, BTreeMap<u64, String>) {
        let overlaps = (1..14).map(|block| self.index.overlaps(&prompt_of(block))).collect();
        for block in 1..14 {
            let prompt = prompt_of(block);
            assert_eq!(
                self.index.overlaps(&prompt),
                self.index.overlaps_without_bisection(&prompt),
                "the shape is told right"
            );
        }
        let placed = self.feed.source().placed().map(|(name, block)| (name.0, format!("{block:?}")));
        let waiting = self.feed.source().orphan_entries().map(|(name, orphan)| (name.0, format!("{orphan:?}")));
        let remembered = placed.chain(waiting).collect();
        (overlaps, self.index.kv_index_state(WORKER), self.index.blocks(), remembered)
    }
}

fn read(chunks: &[Vec<u8>]) -> Result<ResidencySnapshot, ResidencySnapshotError> {
    read_as(ResidencySnapshotReader::new((WORKER, RANK), PROCESS, rules(2)), chunks)
}

fn read_as(
    mut reader: ResidencySnapshotReader,
    chunks: &[Vec<u8>],
) -> Result<ResidencySnapshot, ResidencySnapshotError> {
    for chunk in chunks {
        match reader.take(chunk)? {
            ReadProgress::More(next) => reader = next,
            ReadProgress::Complete(imprint) => return Ok(imprint),
        }
    }
    Err(ResidencySnapshotError::Damaged)
}

/// The parent of block n is block n / 2.
fn parent(block: u64) -> Option<u64> {
    (block > 1).then_some(block / 2)
}

fn tokens(block: u64) -> Vec<u32> {
    (0..4).map(|n| block as u32 * 10 + n).collect()
}

fn prompt_of(block: u64) -> Vec<BlockHash> {
    let mut path = vec![block];
    while let Some(up) = parent(*path.last().unwrap()) {
        path.push(up);
    }
    chain(2, &path.iter().rev().flat_map(|block| tokens(*block)).collect::<Vec<_>>())
}

/// Any events of an engine, in any order: blocks before their parents, slower tiers, windows, second copies.
fn event() -> impl Strategy<Value = KvCacheEvent> {
    let place = prop_oneof![
        6 => Just((Tier::Hbm, 0, KvCacheSpecKind::Full)),
        2 => Just((Tier::Host, 0, KvCacheSpecKind::Full)),
        1 => Just((Tier::Hbm, 1, KvCacheSpecKind::Window)),
    ];
    (0u8..20, 1u64..14, place).prop_map(|(kind, block, (tier, group, attention))| match kind {
        0 => KvCacheEvent::Cleared,
        1..=6 => KvCacheEvent::Removed(BlockRemoved { tier, group, ..removed(&[block]) }),
        7 => KvCacheEvent::Stored(BlockStored { tier, group, kind: attention, ..stored(&[block], parent(block), &[]) }),
        _ => KvCacheEvent::Stored(BlockStored {
            tier,
            group,
            kind: attention,
            ..stored(&[block], parent(block), &tokens(block))
        }),
    })
}

proptest! {
    #[test]
    fn snapshot_plus_rest_of_stream_equals_the_whole_stream(
        events in proptest::collection::vec(event(), 1..80),
        cut in 0usize..80,
        heard_before in 0usize..80,
    ) {
        let cut = cut.min(events.len());
        let (mut old, mut new) = (RouterFixture::new(), RouterFixture::new());
        // The new router may have received some events itself, and missed others, before it adopts the snapshot.
        for (sequence, event) in events.iter().enumerate().skip(heard_before) {
            new.stream.after_replay(sequence as u64);
            new.feed.ingest(event);
        }
        for (sequence, event) in events[..cut].iter().enumerate() {
            prop_assert_eq!(old.receive(sequence as u64, event), MessageAction::Apply);
        }
        new.adopt(read(&old.chunks()).unwrap());
        for (sequence, event) in events.iter().enumerate() {
            let expected = if sequence < cut { MessageAction::Duplicate } else { MessageAction::Apply };
            prop_assert_eq!(new.receive(sequence as u64, event), expected);
        }
        for (sequence, event) in events.iter().enumerate().skip(cut) {
            old.receive(sequence as u64, event);
        }
        new.stream.replay_ended();
        old.stream.replay_ended();
        new.tell();
        old.tell();
        prop_assert_eq!(new.state(), old.state());
        prop_assert_eq!(new.stream.kv_index_state(), KvIndexState::Exact);
    }

    #[test]
    fn arbitrary_bytes_are_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(read(&[bytes]).is_err());
    }

    #[test]
    fn single_changed_byte_is_refused(at in any::<prop::sample::Index>(), flip in 1u8..) {
        let mut chunks = router_with(40).chunks();
        let at = at.index(chunks[0].len());
        chunks[0][at] ^= flip;
        prop_assert!(read(&chunks).is_err());
    }
}

/// A router that holds a prompt of this many blocks, and one orphan.
fn router_with(blocks: u64) -> RouterFixture {
    let mut router = RouterFixture::new();
    let names: Vec<u64> = (1..=blocks).collect();
    let prompt: Vec<u32> = (0..4 * blocks as u32).collect();
    router.receive(0, &KvCacheEvent::Stored(stored(&names, None, &prompt)));
    router.receive(1, &KvCacheEvent::Stored(stored(&[u64::MAX], Some(u64::MAX - 1), &[1, 2, 3, 4])));
    router
}

#[test]
fn adopted_index_is_exact_only_after_a_gapless_continuation() {
    let old = router_with(3);
    let adopted = || {
        let mut new = RouterFixture::new();
        new.adopt(read(&old.chunks()).unwrap());
        assert_eq!(new.index.kv_index_state(WORKER), KvIndexState::Degraded, "nobody has said that this is all");
        assert_eq!(new.index.blocks(), 6);
        new
    };
    let mut by_message = adopted();
    assert_eq!(by_message.receive(2, &KvCacheEvent::Other), MessageAction::Apply);
    assert_eq!(by_message.index.kv_index_state(WORKER), KvIndexState::Exact);
    let mut by_replay = adopted();
    by_replay.stream.replay_ended();
    assert_eq!(by_replay.stream.kv_index_state(), KvIndexState::Exact);
    let mut late = adopted();
    assert_eq!(late.receive(5, &KvCacheEvent::Other), MessageAction::Replay { from: 2 });
    assert_eq!(late.stream.on_replayed(4), MessageAction::Apply, "the engine no longer has 2 and 3");
    assert_eq!(late.stream.kv_index_state(), KvIndexState::Degraded);
}

#[test]
fn large_snapshots_are_chunked_and_order_is_enforced() {
    let old = router_with(30_000);
    let chunks = old.chunks();
    assert!(chunks.len() > 3, "{}", chunks.len());
    assert!(chunks.iter().all(|chunk| chunk.len() < CHUNK_BYTES + 1024));
    let mut new = RouterFixture::new();
    new.adopt(read(&chunks).unwrap());
    assert_eq!((new.feed.blocks(), new.index.blocks()), (30_000, 60_000));
    let mut swapped = chunks.clone();
    swapped.swap(1, 2);
    assert_eq!(read(&swapped).err(), Some(ResidencySnapshotError::Place { expected: 1, found: 2 }));
    assert_eq!(read(&chunks[1..]).err(), Some(ResidencySnapshotError::Place { expected: 0, found: 1 }));
    let (mut spliced, other) = (chunks.clone(), router_with(29_999).chunks());
    spliced[1] = other[1].clone();
    assert_eq!(read(&spliced).err(), Some(ResidencySnapshotError::Damaged), "of another imprint");
    assert!(read(&chunks[..2]).is_err(), "cut off");
}

#[test]
fn snapshot_of_another_source_is_refused() {
    let chunks = router_with(3).chunks();
    let read_by = |source, process, rules| read_as(ResidencySnapshotReader::new(source, process, rules), &chunks).err();
    assert_eq!(read_by((WORKER, RANK), PROCESS, rules(2)), None);
    assert_eq!(read_by((WorkerId(6), RANK), PROCESS, rules(2)), Some(ResidencySnapshotError::OtherSource));
    assert_eq!(read_by((WORKER, DpRank(0)), PROCESS, rules(2)), Some(ResidencySnapshotError::OtherSource));
    assert_eq!(read_by((WORKER, RANK), Incarnation(78), rules(2)), Some(ResidencySnapshotError::OtherProcess));
    assert_eq!(read_by((WORKER, RANK), PROCESS, rules(4)), Some(ResidencySnapshotError::OtherRules));
    let small = BlockMappingRules { max_blocks: 2, ..rules(2) };
    assert_eq!(read_by((WORKER, RANK), PROCESS, small), Some(ResidencySnapshotError::TooMuch));
    let strict = BlockMappingRules { max_orphans: 0, ..rules(2) };
    assert_eq!(read_by((WORKER, RANK), PROCESS, strict), Some(ResidencySnapshotError::TooMuch));
    let by_block = BlockMappingRules { removal: RemovalSemantics::LastCopy, ..rules(2) };
    assert_eq!(read_by((WORKER, RANK), PROCESS, by_block), Some(ResidencySnapshotError::OtherRules));
}

/// A chunk changed by `change`, with a valid digest.
fn forged_chunk(change: impl FnOnce(&mut Vec<u8>)) -> Vec<Vec<u8>> {
    let mut chunk = router_with(3).chunks().remove(0);
    chunk.truncate(chunk.len() - DIGEST);
    change(&mut chunk);
    let digest = chain_digest(PrefixId(0), &chunk);
    chunk.extend_from_slice(&digest.0.to_le_bytes());
    vec![chunk]
}

#[test]
fn malformed_content_with_a_valid_digest_is_refused() {
    const RECORDS: usize = 4 + 2 + 1 + 4 + 8 + 2 + 8 + 8 + 16 + 8 + 8;
    assert!(read(&forged_chunk(|_| {})).is_ok());
    assert_eq!(read(&forged_chunk(|chunk| chunk[4] = 9)).err(), Some(ResidencySnapshotError::Version(9)));
    let cases: [fn(&mut Vec<u8>); 5] = [
        |chunk| chunk[6] = 2,
        |chunk| chunk[RECORDS] = 7,
        |chunk| chunk.truncate(chunk.len() - 1),
        |chunk| chunk.extend_from_within(RECORDS..),
        // A count that announces more than there is.
        |chunk| chunk[RECORDS - 8] = 200,
    ];
    for (number, case) in cases.into_iter().enumerate() {
        assert_eq!(read(&forged_chunk(case)).err(), Some(ResidencySnapshotError::Damaged), "case {number}");
    }
}
