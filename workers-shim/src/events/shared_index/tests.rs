use residency::ResidencyChange;
use vocabulary::{HashSeed, PrefixId, Tier, Tokens};

use super::*;

const WORKER: WorkerId = WorkerId(4);
const RANK: DpRank = DpRank(0);

fn chain(blocks: u32) -> PrefixChain {
    PrefixChain::over_tokens(PrefixId(1), HashSeed(1), Tokens(4), &(0..4 * blocks).collect::<Vec<_>>())
}

fn note(index: &SharedIndex, at: (WorkerId, DpRank), chain: &PrefixChain, room: Option<Tokens>) -> KvIndexState {
    index.note_routed(at, StepPromptChains { prompts: &[chain], basis: HashInputKind::Tokens }, room)
}

fn note_bytes(index: &SharedIndex, chain: &PrefixChain) -> KvIndexState {
    index.note_routed((WORKER, RANK), StepPromptChains { prompts: &[chain], basis: HashInputKind::Bytes }, None)
}

fn depth(index: &SharedIndex, chain: &PrefixChain) -> u64 {
    index.overlaps_of_chain(chain).first().map_or(0, |overlap| overlap.blocks.0)
}

#[test]
fn approximate_blocks_stand_until_events_arrive() {
    let index = SharedIndex::new();
    let prompt = chain(2_000);
    assert_eq!(note(&index, (WORKER, RANK), &prompt, None), KvIndexState::Approximate);
    assert_eq!(depth(&index, &prompt), 0, "nobody admitted that worker");
    index.admit(WORKER, RoutedBlockLimits::default());
    note(&index, (WORKER, RANK), &prompt, None);
    assert_eq!(depth(&index, &prompt), 2_000);
    index.use_events(WORKER);
    assert_eq!((depth(&index, &prompt), index.assumed_blocks(), index.read().sources()), (0, 0, 0));
    note(&index, (WORKER, RANK), &prompt, None);
    assert_eq!(depth(&index, &prompt), 0, "events say it better");
    index.use_approximation(WORKER);
    note(&index, (WORKER, RANK), &prompt, None);
    assert_eq!(depth(&index, &prompt), 2_000);
    index.use_approximation(WORKER);
    assert_eq!(depth(&index, &prompt), 0, "a restart voids guesses");
}

#[test]
fn ranks_are_approximated_separately() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedBlockLimits::default());
    note(&index, (WORKER, DpRank(0)), &chain(2), None);
    note(&index, (WORKER, DpRank(1)), &chain(5), None);
    let overlaps = index.overlaps_of_chain(&chain(9));
    let depths: Vec<(u16, u64)> = overlaps.iter().map(|overlap| (overlap.rank.0, overlap.blocks.0)).collect();
    assert_eq!(depths, [(0, 2), (1, 5)]);
}

#[test]
fn lookups_are_current_whatever_depth_hint_a_session_has() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedBlockLimits { blocks: 5_000, ..RoutedBlockLimits::default() });
    let (session, other) = (SessionId(7), SessionId(7 + MAX_DEPTH_HINTS as u128));
    let asked = |session, blocks, known| {
        let found = index.overlaps(session, &chain(blocks), Blocks(known));
        found.first().map_or(0, |overlap| overlap.blocks.0)
    };
    assert_eq!(asked(session, 100, 50), 0);
    note(&index, (WORKER, RANK), &chain(60), None);
    assert_eq!((asked(session, 100, 50), asked(session, 100, 60), asked(session, 10, 60)), (60, 60, 10));
    note(&index, (WORKER, RANK), &chain(3_000), None);
    assert_eq!((asked(session, 4_000, 60), asked(other, 70, 60), asked(session, 4_000, 0)), (3_000, 70, 3_000));
    index.use_approximation(WORKER);
    assert_eq!((asked(session, 4_000, 3_000), asked(other, 70, 70)), (0, 0));
}

#[test]
fn approximation_is_bounded_by_the_workers_capacity() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedBlockLimits { blocks: 50, ..RoutedBlockLimits::default() });
    note(&index, (WORKER, RANK), &chain(60), None);
    assert_eq!(depth(&index, &chain(60)), 50);
    note(&index, (WORKER, RANK), &chain(60), Some(Tokens(4 * 20 + 3)));
    assert_eq!((depth(&index, &chain(60)), index.assumed_blocks()), (20, 20));
}

#[test]
fn approximate_blocks_expire_without_new_traffic() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedBlockLimits { age: Micros(0), ..RoutedBlockLimits::default() });
    note(&index, (WORKER, RANK), &chain(60), None);
    let started = Instant::now();
    while index.assumed_blocks() > 0 && started.elapsed().as_secs() < 10 {
        index.expire(WORKER);
    }
    assert_eq!((index.assumed_blocks(), depth(&index, &chain(60))), (0, 0));
}

#[test]
fn beside_events_only_byte_chains_are_approximated() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedBlockLimits { blocks: 50, ..RoutedBlockLimits::default() });
    index.use_events(WORKER);
    let events = index.index.write().add_source(WORKER, RANK, KvIndexState::Exact).unwrap();
    assert_eq!(note(&index, (WORKER, RANK), &chain(20), None), KvIndexState::Exact);
    assert_eq!(depth(&index, &chain(20)), 0);
    assert_eq!(note_bytes(&index, &chain(60)), KvIndexState::Exact);
    assert_eq!(
        (depth(&index, &chain(60)), index.read().kv_index_state(WORKER)),
        (50, KvIndexState::Exact),
        "within its bound"
    );
    index.index.write().set_kv_index_state(events, KvIndexState::Degraded);
    assert_eq!(index.read().kv_index_state(WORKER), KvIndexState::Degraded);
    index.use_approximation(WORKER);
    assert_eq!((depth(&index, &chain(60)), index.assumed_blocks()), (0, 0), "a restart voids it");
}

#[test]
fn approximate_blocks_beside_events_expire_too() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedBlockLimits { age: Micros(0), ..RoutedBlockLimits::default() });
    index.use_events(WORKER);
    note_bytes(&index, &chain(60));
    let started = Instant::now();
    while index.assumed_blocks() > 0 && started.elapsed().as_secs() < 10 {
        index.expire(WORKER);
    }
    assert_eq!(depth(&index, &chain(60)), 0);
}

#[test]
fn a_worker_that_is_admitted_again_holds_nothing() {
    let index = SharedIndex::new();
    for _ in 0..2 {
        index.admit(WORKER, RoutedBlockLimits::default());
        assert_eq!(index.assumed_blocks(), 0);
        note(&index, (WORKER, RANK), &chain(9), None);
        assert_eq!((index.assumed_blocks(), depth(&index, &chain(9))), (9, 9));
    }
    index.remove_worker(WORKER);
    assert_eq!((index.assumed_blocks(), depth(&index, &chain(9))), (0, 0));
}

#[test]
fn reported_and_assumed_overlaps_are_sorted_together() {
    let index = SharedIndex::new();
    index.admit(WORKER, RoutedBlockLimits::default());
    note(&index, (WORKER, RANK), &chain(3), None);
    for other in [WORKER.0 - 1, WORKER.0 + 1] {
        let slot = index.index.write().add_source(WorkerId(other), RANK, KvIndexState::Exact).unwrap();
        let held = chain(2).ids.iter().map(|id| ResidencyChange::Added(id.block_hash(), Tier::Hbm)).collect::<Vec<_>>();
        index.index.write().apply(slot, &held);
    }
    let overlaps = index.overlaps_of_chain(&chain(9));
    let found: Vec<(u64, u64)> = overlaps.iter().map(|overlap| (overlap.worker.0, overlap.blocks.0)).collect();
    assert_eq!(found, [(WORKER.0 - 1, 2), (WORKER.0, 3), (WORKER.0 + 1, 2)]);
}
