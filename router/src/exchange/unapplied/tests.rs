use ownership::ledger::{KvFormat, KvKinds, KvShape};
use proptest::prelude::*;
use vocabulary::{Bytes, DpRank, Incarnation, ModelId, Seed, TenantId, Tokens, WorkerId};

use super::*;

/// The first `blocks` blocks of the path that has this name after its fourth block.
fn chain(path: u32, blocks: u32) -> Chain {
    let tokens: Vec<u32> = (0..blocks).map(|block| if block < 4 { block } else { block + 1000 * path }).collect();
    Chain::over_tokens(PrefixId(9), Seed(1), Tokens(1), &tokens)
}

fn step(session: u128, path: u32, blocks: u32) -> Finished {
    let shape = KvShape { format: KvFormat(1), kinds: KvKinds::default(), block: Tokens(1), block_bytes: Bytes(1) };
    let origin = Origin { tenant: TenantId::default(), model: ModelId::from("m"), root: PrefixId(9), shape };
    let owner = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };
    let chain = chain(path, blocks);
    let (parent, replaces, custody, base) = (None, None, Custody::Claims, PrefixId(9));
    Finished { session: SessionId(session), parent, origin, chain, replaces, owner, custody, base }
}

fn blocks(step: Option<Arc<Finished>>) -> u64 {
    step.map_or(0, |step| step.chain.blocks().0)
}

fn newest(all: &Unapplied, session: u128) -> u64 {
    blocks(all.newest(SessionId(session), Instant::now()).map(|(step, _)| step))
}

#[test]
fn one_is_on_its_way_one_waits_and_a_newer_one_takes_its_place() {
    let (mut all, now) = (Unapplied::default(), Instant::now());
    let first = all.take(step(1, 0, 5), Reach::Quorum, now).send.unwrap();
    assert_eq!(all.take(step(1, 0, 6), Reach::Quorum, now), Taken::default());
    let third = all.take(step(1, 0, 7), Reach::Quorum, now);
    assert_eq!((blocks(third.send), blocks(third.replaced), blocks(third.branch)), (0, 6, 0));
    assert_eq!((newest(&all, 1), all.untold()), (7, 1));
    let next = all.told(&first, Told::Answered, Reach::Quorum).unwrap();
    assert_eq!(next.chain.blocks(), Blocks(7));
    assert_eq!(all.told(&first, Told::Answered, Reach::Quorum), None, "said twice");
    assert_eq!(all.told(&next, Told::Answered, Reach::Quorum), None);
    assert_eq!((newest(&all, 1), all.untold()), (7, 0), "until the view shows it");
    all.sweep(now, |_| false);
    assert_eq!(newest(&all, 1), 7);
    all.sweep(now, |step| step.session == SessionId(1));
    assert!(all.is_empty() && all.heads.is_empty() && all.idle.is_empty() && all.blocks == 0);
}

#[test]
fn another_branch_is_not_lost_to_a_newer_step_while_there_is_a_quorum() {
    let (mut all, now) = (Unapplied::default(), Instant::now());
    all.take(step(1, 0, 5), Reach::Quorum, now);
    all.take(step(1, 1, 6), Reach::Quorum, now);
    let taken = all.take(step(1, 2, 7), Reach::Quorum, now);
    assert_eq!((blocks(taken.replaced), blocks(taken.branch)), (0, 6));
    let cut_off = all.take(step(1, 3, 8), Reach::Nobody, now);
    assert_eq!((blocks(cut_off.replaced), blocks(cut_off.branch)), (7, 0), "without one the newest counts");
}

#[test]
fn without_a_quorum_steps_wait_and_are_due_when_it_is_back() {
    let (mut all, now) = (Unapplied::default(), Instant::now());
    let lost = all.take(step(1, 0, 5), Reach::Quorum, now).send.unwrap();
    assert_eq!(all.told(&lost, Told::Unknown, Reach::Nobody), None);
    assert_eq!(newest(&all, 1), 5, "it is said again");
    for session in 2..5 {
        assert_eq!(all.take(step(session, 0, 5), Reach::Nobody, now).send, None);
    }
    assert_eq!(all.untold(), 4);
    let due = |all: &mut Unapplied, most| all.due(most).iter().map(|step| step.session.0).collect::<Vec<_>>();
    assert_eq!(due(&mut all, 3), [1, 2, 3], "the ones that wait longest first");
    assert_eq!(due(&mut all, 3), [4]);
    assert_eq!(due(&mut all, 3), []);
}

#[test]
fn a_step_that_was_not_taken_gives_way_to_the_newer_one() {
    let (mut all, now) = (Unapplied::default(), Instant::now());
    let lost = all.take(step(1, 0, 5), Reach::Quorum, now).send.unwrap();
    all.take(step(1, 0, 8), Reach::Quorum, now);
    assert_eq!(
        all.told(&lost, Told::Unknown, Reach::Quorum),
        None,
        "not at once: whoever failed is to come back first"
    );
    assert_eq!(all.due(9).iter().map(|step| step.chain.blocks().0).collect::<Vec<_>>(), [8]);
}

#[test]
fn a_new_session_keeps_its_parent_when_its_first_step_is_replaced() {
    let (mut all, now) = (Unapplied::default(), Instant::now());
    all.take(Finished { parent: Some(SessionId(77)), ..step(1, 0, 5) }, Reach::Nobody, now);
    all.take(step(1, 0, 6), Reach::Nobody, now);
    assert_eq!(all.due(1)[0].parent, Some(SessionId(77)));
}

#[test]
fn a_prompt_without_a_name_finds_the_deepest_head_on_its_chain() {
    let (mut all, now) = (Unapplied::default(), Instant::now());
    all.take(step(1, 0, 6), Reach::Nobody, now);
    all.take(step(2, 0, 9), Reach::Nobody, now);
    all.take(step(3, 1, 10), Reach::Nobody, now);
    let scope = step(1, 0, 1).scope();
    let found = |path, blocks, beyond| all.deepest(scope, &chain(path, blocks), Blocks(beyond)).map(|id| id.0);
    assert_eq!([found(0, 12, 0), found(0, 8, 0), found(0, 5, 0)], [Some(2), Some(1), None]);
    assert_eq!([found(0, 12, 9), found(0, 12, 20), found(1, 12, 0)], [None, None, Some(3)]);
    let shared = |path, blocks| step(1, 0, 6).shared(&chain(path, blocks)).0;
    assert_eq!([shared(0, 12), shared(0, 3), shared(1, 12), shared(1, 0)], [6, 3, 4, 0]);
}

#[test]
fn at_the_bound_the_session_that_was_idle_longest_is_dropped_whole_and_counted() {
    let (mut all, now) = (Unapplied::new(Limits { sessions: 3, blocks: 30 }), Instant::now());
    let sent = all.take(step(1, 0, 5), Reach::Quorum, now).send.unwrap();
    for session in 2..=4 {
        all.take(step(session, 0, 5), Reach::Nobody, now);
    }
    assert_eq!([1, 2, 3, 4].map(|session| newest(&all, session)), [5, 0, 5, 5], "what is on its way stays");
    assert_eq!(all.dropped(), 1);
    all.take(step(3, 0, 21), Reach::Nobody, now);
    assert_eq!([1, 3, 4].map(|session| newest(&all, session)), [5, 21, 0], "31 blocks are too many");
    assert_eq!(all.dropped(), 2);
    all.told(&sent, Told::Answered, Reach::Nobody);
    all.take(step(5, 0, 5), Reach::Nobody, now);
    assert_eq!((newest(&all, 1), all.dropped()), (0, 2), "the ledger has it: nothing is lost");
}

#[test]
fn what_the_view_never_shows_is_forgotten_in_the_end() {
    let (mut all, now) = (Unapplied::default(), Instant::now());
    let sent = all.take(step(1, 0, 5), Reach::Quorum, now).send.unwrap();
    all.sweep(now + 2 * LINGERS, |_| true);
    assert_eq!(newest(&all, 1), 5, "it is still on its way");
    all.told(&sent, Told::Answered, Reach::Quorum);
    all.sweep(now + 2 * LINGERS, |_| false);
    assert!(all.is_empty());
}

proptest! {
    #[test]
    fn the_newest_step_of_every_session_reaches_the_ledger_once_there_is_one(
        acts in proptest::collection::vec((0u8..6, 0u128..4, 1u32..12), 1..80),
    ) {
        let (mut all, now) = (Unapplied::default(), Instant::now());
        let (mut sent, mut expected) = (Vec::<Arc<Finished>>::new(), BTreeMap::new());
        let mut acknowledged = BTreeMap::new();
        for (act, session, length) in acts {
            match act {
                // A session's head only ever moves on, along one path.
                0..=2 => {
                    let blocks = expected.get(&session).copied().unwrap_or(0) + length;
                    expected.insert(session, blocks);
                    let reach = if act == 0 { Reach::Nobody } else { Reach::Quorum };
                    sent.extend(all.take(step(session, 0, blocks), reach, now).send);
                }
                3 => sent.extend(all.due(2)),
                4 if !sent.is_empty() => {
                    let step = sent.remove(0);
                    acknowledged.insert(step.session.0, step.chain.blocks().0 as u32);
                    sent.extend(all.told(&step, Told::Answered, Reach::Quorum));
                }
                5 if !sent.is_empty() => {
                    let step = sent.remove(0);
                    sent.extend(all.told(&step, Told::Unknown, Reach::Quorum));
                }
                _ => {}
            }
            for session in 0..4 {
                prop_assert!(sent.iter().filter(|step| step.session.0 == session).count() <= 1, "one at a time");
                let (wanted, known) = (expected.get(&session), acknowledged.get(&session));
                prop_assert!(wanted == known || newest(&all, session) == u64::from(*wanted.unwrap()));
            }
        }
        // The quorum is back for good.
        sent.extend(all.due(99));
        while let Some(step) = sent.pop() {
            acknowledged.insert(step.session.0, step.chain.blocks().0 as u32);
            sent.extend(all.told(&step, Told::Answered, Reach::Quorum));
            sent.extend(all.due(99));
        }
        prop_assert_eq!(acknowledged, expected);
        all.sweep(now, |_| true);
        prop_assert!(all.is_empty() && all.blocks == 0 && all.heads.is_empty());
    }
}
