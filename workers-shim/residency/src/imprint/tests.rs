use std::collections::BTreeMap;

use proptest::prelude::*;
use vocabulary::{BlockHash, DpRank, Incarnation, Knowledge, Overlap, Tier, WorkerId};

use super::*;
use crate::event::{Event, Removed, SpecKind, Stored};
use crate::feed::{Feed, Settled};
use crate::index::Index;
use crate::stream::{Stream, Verdict};
use crate::tests::{chain, removed, rules, stored};

const WORKER: WorkerId = WorkerId(5);
const RANK: DpRank = DpRank(3);
const PROCESS: Incarnation = Incarnation(77);

/// A router as far as one source is concerned.
struct Router {
    feed: Feed,
    index: Index,
    stream: Stream,
}

impl Router {
    fn new() -> Self {
        let mut stream = Stream::new();
        stream.meet(Some(PROCESS));
        Self { feed: Feed::new(WORKER, RANK, rules(2)), index: Index::new(), stream }
    }

    fn hear(&mut self, sequence: u64, event: &Event) -> Verdict {
        let verdict = self.stream.live(sequence);
        if verdict == Verdict::Apply {
            if *event == Event::Cleared {
                self.stream.cleared();
            }
            self.feed.take(event);
            self.tell();
        }
        verdict
    }

    fn tell(&mut self) {
        self.feed.know(self.stream.knowledge());
        while self.feed.settle(&mut self.index, 5).unwrap() == Settled::More {}
    }

    fn chunks(&self) -> Vec<Vec<u8>> {
        self.feed.imprint(PROCESS, self.stream.next()).collect()
    }

    fn adopt(&mut self, imprint: Imprint) {
        self.stream.adopt(imprint.head.process, imprint.head.next);
        self.feed.adopt(imprint);
        self.tell();
    }

    /// All that can be seen of it, and all that it remembers.
    fn state(&self) -> (Vec<Vec<Overlap>>, Knowledge, usize, BTreeMap<u64, String>) {
        let overlaps = (1..14).map(|block| self.index.overlaps(&prompt_of(block))).collect();
        for block in 1..14 {
            let prompt = prompt_of(block);
            assert_eq!(self.index.overlaps(&prompt), self.index.walked(&prompt), "the shape is told right");
        }
        let placed = self.feed.source().placed().map(|(name, block)| (name.0, format!("{block:?}")));
        let waiting = self.feed.source().waiting().map(|(name, orphan)| (name.0, format!("{orphan:?}")));
        let remembered = placed.chain(waiting).collect();
        (overlaps, self.index.knowledge(WORKER), self.index.blocks(), remembered)
    }
}

fn read(chunks: &[Vec<u8>]) -> Result<Imprint, ImprintError> {
    read_as(ImprintReader::new((WORKER, RANK), PROCESS, rules(2)), chunks)
}

fn read_as(mut reader: ImprintReader, chunks: &[Vec<u8>]) -> Result<Imprint, ImprintError> {
    for chunk in chunks {
        match reader.take(chunk)? {
            Taken::More(next) => reader = next,
            Taken::Whole(imprint) => return Ok(imprint),
        }
    }
    Err(ImprintError::Damaged)
}

/// Block n hangs on block n / 2.
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

/// What an engine may say, in any order: blocks before their parents, slower tiers, windows, second copies.
fn event() -> impl Strategy<Value = Event> {
    let place = prop_oneof![
        6 => Just((Tier::Hbm, 0, SpecKind::Full)),
        2 => Just((Tier::Host, 0, SpecKind::Full)),
        1 => Just((Tier::Hbm, 1, SpecKind::Window)),
    ];
    (0u8..20, 1u64..14, place).prop_map(|(kind, block, (tier, group, attention))| match kind {
        0 => Event::Cleared,
        1..=6 => Event::Removed(Removed { tier, group, ..removed(&[block]) }),
        7 => Event::Stored(Stored { tier, group, kind: attention, ..stored(&[block], parent(block), &[]) }),
        _ => Event::Stored(Stored { tier, group, kind: attention, ..stored(&[block], parent(block), &tokens(block)) }),
    })
}

proptest! {
    #[test]
    fn an_imprint_at_any_point_and_the_rest_of_the_stream_are_the_whole_stream(
        events in proptest::collection::vec(event(), 1..80),
        cut in 0usize..80,
        heard_before in 0usize..80,
    ) {
        let cut = cut.min(events.len());
        let (mut old, mut new) = (Router::new(), Router::new());
        // The new one may have heard a part itself, and missed messages, before it takes the imprint over.
        for (sequence, event) in events.iter().enumerate().skip(heard_before) {
            new.stream.after_replay(sequence as u64);
            new.feed.take(event);
        }
        for (sequence, event) in events[..cut].iter().enumerate() {
            prop_assert_eq!(old.hear(sequence as u64, event), Verdict::Apply);
        }
        new.adopt(read(&old.chunks()).unwrap());
        for (sequence, event) in events.iter().enumerate() {
            let expected = if sequence < cut { Verdict::Seen } else { Verdict::Apply };
            prop_assert_eq!(new.hear(sequence as u64, event), expected);
        }
        for (sequence, event) in events.iter().enumerate().skip(cut) {
            old.hear(sequence as u64, event);
        }
        new.stream.replay_ended();
        old.stream.replay_ended();
        new.tell();
        old.tell();
        prop_assert_eq!(new.state(), old.state());
        prop_assert_eq!(new.stream.knowledge(), Knowledge::Exact);
    }

    #[test]
    fn bytes_of_any_kind_are_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(read(&[bytes]).is_err());
    }

    #[test]
    fn one_changed_byte_refuses_all(at in any::<prop::sample::Index>(), flip in 1u8..) {
        let mut chunks = holding(40).chunks();
        let at = at.index(chunks[0].len());
        chunks[0][at] ^= flip;
        prop_assert!(read(&chunks).is_err());
    }
}

/// A router that holds a prompt of so many blocks, and one block whose parent it never heard of.
fn holding(blocks: u64) -> Router {
    let mut router = Router::new();
    let names: Vec<u64> = (1..=blocks).collect();
    let prompt: Vec<u32> = (0..4 * blocks as u32).collect();
    router.hear(0, &Event::Stored(stored(&names, None, &prompt)));
    router.hear(1, &Event::Stored(stored(&[u64::MAX], Some(u64::MAX - 1), &[1, 2, 3, 4])));
    router
}

#[test]
fn exact_only_once_the_stream_goes_on_without_a_gap() {
    let old = holding(3);
    let adopted = || {
        let mut new = Router::new();
        new.adopt(read(&old.chunks()).unwrap());
        assert_eq!(new.index.knowledge(WORKER), Knowledge::Degraded, "nobody has said that this is all");
        assert_eq!(new.index.blocks(), 6);
        new
    };
    let mut by_message = adopted();
    assert_eq!(by_message.hear(2, &Event::Other), Verdict::Apply);
    assert_eq!(by_message.index.knowledge(WORKER), Knowledge::Exact);
    let mut by_replay = adopted();
    by_replay.stream.replay_ended();
    assert_eq!(by_replay.stream.knowledge(), Knowledge::Exact);
    let mut late = adopted();
    assert_eq!(late.hear(5, &Event::Other), Verdict::Replay { from: 2 });
    assert_eq!(late.stream.replayed(4), Verdict::Apply, "the engine no longer has 2 and 3");
    assert_eq!(late.stream.knowledge(), Knowledge::Degraded);
}

#[test]
fn long_imprints_come_in_chunks_and_only_in_their_order() {
    let old = holding(30_000);
    let chunks = old.chunks();
    assert!(chunks.len() > 3, "{}", chunks.len());
    assert!(chunks.iter().all(|chunk| chunk.len() < CHUNK + 1024));
    let mut new = Router::new();
    new.adopt(read(&chunks).unwrap());
    assert_eq!((new.feed.blocks(), new.index.blocks()), (30_000, 60_000));
    let mut swapped = chunks.clone();
    swapped.swap(1, 2);
    assert_eq!(read(&swapped).err(), Some(ImprintError::Place { expected: 1, found: 2 }));
    assert_eq!(read(&chunks[1..]).err(), Some(ImprintError::Place { expected: 0, found: 1 }));
    let (mut spliced, other) = (chunks.clone(), holding(29_999).chunks());
    spliced[1] = other[1].clone();
    assert_eq!(read(&spliced).err(), Some(ImprintError::Damaged), "of another imprint");
    assert!(read(&chunks[..2]).is_err(), "cut off");
}

#[test]
fn what_is_not_of_this_source_is_refused() {
    let chunks = holding(3).chunks();
    let read_by = |source, process, rules| read_as(ImprintReader::new(source, process, rules), &chunks).err();
    assert_eq!(read_by((WORKER, RANK), PROCESS, rules(2)), None);
    assert_eq!(read_by((WorkerId(6), RANK), PROCESS, rules(2)), Some(ImprintError::OtherSource));
    assert_eq!(read_by((WORKER, DpRank(0)), PROCESS, rules(2)), Some(ImprintError::OtherSource));
    assert_eq!(read_by((WORKER, RANK), Incarnation(78), rules(2)), Some(ImprintError::OtherProcess));
    assert_eq!(read_by((WORKER, RANK), PROCESS, rules(4)), Some(ImprintError::OtherRules));
    let small = SourceRules { most_blocks: 2, ..rules(2) };
    assert_eq!(read_by((WORKER, RANK), PROCESS, small), Some(ImprintError::TooMuch));
    let strict = SourceRules { most_orphans: 0, ..rules(2) };
    assert_eq!(read_by((WORKER, RANK), PROCESS, strict), Some(ImprintError::TooMuch));
    let by_block = SourceRules { removal: Removal::LastCopy, ..rules(2) };
    assert_eq!(read_by((WORKER, RANK), PROCESS, by_block), Some(ImprintError::OtherRules));
}

/// A chunk with its digest made right again after `change`.
fn forged(change: impl FnOnce(&mut Vec<u8>)) -> Vec<Vec<u8>> {
    let mut chunk = holding(3).chunks().remove(0);
    chunk.truncate(chunk.len() - DIGEST);
    change(&mut chunk);
    let digest = digest_after(PrefixId(0), &chunk);
    chunk.extend_from_slice(&digest.0.to_le_bytes());
    vec![chunk]
}

#[test]
fn a_right_digest_over_wrong_content_is_refused_too() {
    const RECORDS: usize = 4 + 2 + 1 + 4 + 8 + 2 + 8 + 8 + 16 + 8 + 8;
    assert!(read(&forged(|_| {})).is_ok());
    assert_eq!(read(&forged(|chunk| chunk[4] = 9)).err(), Some(ImprintError::Version(9)));
    let cases: [fn(&mut Vec<u8>); 5] = [
        |chunk| chunk[6] = 2,
        |chunk| chunk[RECORDS] = 7,
        |chunk| chunk.truncate(chunk.len() - 1),
        |chunk| chunk.extend_from_within(RECORDS..),
        // A count that promises more than there is.
        |chunk| chunk[RECORDS - 8] = 200,
    ];
    for (number, case) in cases.into_iter().enumerate() {
        assert_eq!(read(&forged(case)).err(), Some(ImprintError::Damaged), "case {number}");
    }
}
