use vocabulary::{PrefixId, Seed, Tokens};

use super::*;

const WORKER: WorkerId = WorkerId(4);
const RANK: DpRank = DpRank(0);

fn chain(blocks: u32) -> Chain {
    Chain::over_tokens(PrefixId(1), Seed(1), Tokens(4), &(0..4 * blocks).collect::<Vec<_>>())
}

fn note(index: &SharedIndex, at: (WorkerId, DpRank), chain: &Chain, room: Option<Tokens>) -> Knowledge {
    index.note_routed(at, Served { prompts: &[chain], by: KnownBy::Tokens }, room)
}

fn note_bytes(index: &SharedIndex, chain: &Chain) -> Knowledge {
    index.note_routed((WORKER, RANK), Served { prompts: &[chain], by: KnownBy::Bytes }, None)
}

fn depth(index: &SharedIndex, chain: &Chain) -> u64 {
    index.read().overlaps_of(chain).first().map_or(0, |overlap| overlap.blocks.0)
}

#[test]
fn guesses_stand_until_events_are_heard() {
    let index = SharedIndex::new();
    let prompt = chain(2_000);
    assert_eq!(note(&index, (WORKER, RANK), &prompt, None), Knowledge::Fallback);
    assert_eq!(depth(&index, &prompt), 0, "nobody admitted that worker");
    index.admit(WORKER, RoutedLimits::default());
    note(&index, (WORKER, RANK), &prompt, None);
    assert_eq!(depth(&index, &prompt), 2_000);
    index.observed(WORKER);
    assert_eq!((depth(&index, &prompt), index.read().blocks(), index.read().sources()), (0, 0, 0));
    note(&index, (WORKER, RANK), &prompt, None);
    assert_eq!(depth(&index, &prompt), 0, "events say it better");
    index.guessed(WORKER);
    note(&index, (WORKER, RANK), &prompt, None);
    assert_eq!(depth(&index, &prompt), 2_000);
    index.guessed(WORKER);
    assert_eq!(depth(&index, &prompt), 0, "a restart voids guesses");
}

#[test]
fn ranks_are_guessed_apart() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedLimits::default());
    note(&index, (WORKER, DpRank(0)), &chain(2), None);
    note(&index, (WORKER, DpRank(1)), &chain(5), None);
    let overlaps = index.read().overlaps_of(&chain(9));
    let depths: Vec<(u16, u64)> = overlaps.iter().map(|overlap| (overlap.rank.0, overlap.blocks.0)).collect();
    assert_eq!(depths, [(0, 2), (1, 5)]);
}

#[test]
fn a_session_is_told_what_is_true_now_wherever_its_holders_ended_before() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedLimits { blocks: 5_000, ..RoutedLimits::default() });
    let (session, other) = (SessionId(7), SessionId(7 + NEAR as u128));
    let asked = |session, blocks, known| {
        let found = index.overlaps(session, &chain(blocks), Blocks(known));
        found.first().map_or(0, |overlap| overlap.blocks.0)
    };
    assert_eq!(asked(session, 100, 50), 0);
    note(&index, (WORKER, RANK), &chain(60), None);
    assert_eq!((asked(session, 100, 50), asked(session, 100, 60), asked(session, 10, 60)), (60, 60, 10));
    note(&index, (WORKER, RANK), &chain(3_000), None);
    assert_eq!((asked(session, 4_000, 60), asked(other, 70, 60), asked(session, 4_000, 0)), (3_000, 70, 3_000));
    index.guessed(WORKER);
    assert_eq!((asked(session, 4_000, 3_000), asked(other, 70, 70)), (0, 0));
}

#[test]
fn no_more_is_guessed_than_the_worker_has_room_for() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedLimits { blocks: 50, ..RoutedLimits::default() });
    note(&index, (WORKER, RANK), &chain(60), None);
    assert_eq!(depth(&index, &chain(60)), 50);
    note(&index, (WORKER, RANK), &chain(60), Some(Tokens(4 * 20 + 3)));
    assert_eq!((depth(&index, &chain(60)), index.read().blocks()), (20, 20));
}

#[test]
fn guesses_grow_old_also_where_nothing_is_routed_any_more() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedLimits { age: Micros(0), ..RoutedLimits::default() });
    note(&index, (WORKER, RANK), &chain(60), None);
    let started = Instant::now();
    while index.read().blocks() > 0 && started.elapsed().as_secs() < 10 {
        index.age(WORKER);
    }
    assert_eq!((index.read().blocks(), depth(&index, &chain(60))), (0, 0));
}

#[test]
fn beside_events_only_what_is_known_by_its_bytes_is_guessed_and_nothing_is_known_less_well_for_it() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedLimits { blocks: 50, ..RoutedLimits::default() });
    index.observed(WORKER);
    let events = index.index.write().join(WORKER, RANK, Knowledge::Exact).unwrap();
    assert_eq!(note(&index, (WORKER, RANK), &chain(20), None), Knowledge::Exact);
    assert_eq!(depth(&index, &chain(20)), 0);
    assert_eq!(note_bytes(&index, &chain(60)), Knowledge::Exact);
    assert_eq!((depth(&index, &chain(60)), index.read().knowledge(WORKER)), (50, Knowledge::Exact), "within its bound");
    index.index.write().know(events, Knowledge::Degraded);
    assert_eq!(index.read().knowledge(WORKER), Knowledge::Degraded);
    index.guessed(WORKER);
    assert_eq!((depth(&index, &chain(60)), index.read().blocks()), (0, 0), "a restart voids it");
}

#[test]
fn what_is_guessed_beside_events_grows_old_too() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedLimits { age: Micros(0), ..RoutedLimits::default() });
    index.observed(WORKER);
    note_bytes(&index, &chain(60));
    let started = Instant::now();
    while index.read().blocks() > 0 && started.elapsed().as_secs() < 10 {
        index.age(WORKER);
    }
    assert_eq!(depth(&index, &chain(60)), 0);
}
