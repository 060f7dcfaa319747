use ownership::ledger::{KvBlockSpec, KvFormatDigest, KvKinds};
use proptest::prelude::*;
use vocabulary::{Bytes, DpRank, HashSeed, Incarnation, ModelId, TenantId, Tokens, WorkerId};

use super::*;

/// The first `blocks` blocks of a path that differs from other paths after its fourth block.
fn chain(path: u32, blocks: u32) -> PrefixChain {
    let tokens: Vec<u32> = (0..blocks).map(|block| if block < 4 { block } else { block + 1000 * path }).collect();
    PrefixChain::over_tokens(PrefixId(9), HashSeed(1), Tokens(1), &tokens)
}

fn step(session: u128, path: u32, blocks: u32) -> UncommittedStep {
    let shape =
        KvBlockSpec { format: KvFormatDigest(1), kinds: KvKinds::default(), block: Tokens(1), block_bytes: Bytes(1) };
    let origin = ChainDescriptor { tenant: TenantId::default(), model: ModelId::from("m"), root: PrefixId(9), shape };
    let owner = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };
    let chain = chain(path, blocks);
    let (parent, replaces, ownership_transition, base) = (None, None, OwnershipTransition::Claim, PrefixId(9));
    UncommittedStep { session: SessionId(session), parent, origin, chain, replaces, owner, ownership_transition, base }
}

fn blocks(step: Option<Arc<UncommittedStep>>) -> u64 {
    step.map_or(0, |step| step.chain.blocks().0)
}

fn newest(all: &PendingCommits, session: u128) -> u64 {
    blocks(all.newest(SessionId(session), Instant::now()).map(|(step, _)| step))
}

#[test]
fn waiting_step_is_replaced_by_a_newer_step_of_its_session() {
    let (mut all, now) = (PendingCommits::default(), Instant::now());
    let first = all.add(step(1, 0, 5), QuorumReachability::Quorum, now).send.unwrap();
    assert_eq!(all.add(step(1, 0, 6), QuorumReachability::Quorum, now), SubmissionActions::default());
    let third = all.add(step(1, 0, 7), QuorumReachability::Quorum, now);
    assert_eq!((blocks(third.send), blocks(third.replaced), blocks(third.branch)), (0, 6, 0));
    assert_eq!((newest(&all, 1), all.pending_count()), (7, 1));
    let next = all.complete(&first, SubmissionOutcome::Answered, QuorumReachability::Quorum).unwrap();
    assert_eq!(next.chain.blocks(), Blocks(7));
    assert_eq!(all.complete(&first, SubmissionOutcome::Answered, QuorumReachability::Quorum), None, "said twice");
    assert_eq!(all.complete(&next, SubmissionOutcome::Answered, QuorumReachability::Quorum), None);
    assert_eq!((newest(&all, 1), all.pending_count()), (7, 0), "until the view shows it");
    all.sweep(now, |_| false);
    assert_eq!(newest(&all, 1), 7);
    all.sweep(now, |step| step.session == SessionId(1));
    assert!(all.is_empty() && all.heads.is_empty() && all.idle.is_empty() && all.blocks == 0);
}

#[test]
fn separate_branch_is_sent_beside_newer_steps_with_a_quorum() {
    let (mut all, now) = (PendingCommits::default(), Instant::now());
    all.add(step(1, 0, 5), QuorumReachability::Quorum, now);
    all.add(step(1, 1, 6), QuorumReachability::Quorum, now);
    let taken = all.add(step(1, 2, 7), QuorumReachability::Quorum, now);
    assert_eq!((blocks(taken.replaced), blocks(taken.branch)), (0, 6));
    let cut_off = all.add(step(1, 3, 8), QuorumReachability::NoQuorum, now);
    assert_eq!((blocks(cut_off.replaced), blocks(cut_off.branch)), (7, 0), "without one the newest counts");
}

#[test]
fn steps_wait_without_a_quorum_and_are_due_when_it_returns() {
    let (mut all, now) = (PendingCommits::default(), Instant::now());
    let lost = all.add(step(1, 0, 5), QuorumReachability::Quorum, now).send.unwrap();
    assert_eq!(all.complete(&lost, SubmissionOutcome::Unknown, QuorumReachability::NoQuorum), None);
    assert_eq!(newest(&all, 1), 5, "it is said again");
    for session in 2..5 {
        assert_eq!(all.add(step(session, 0, 5), QuorumReachability::NoQuorum, now).send, None);
    }
    assert_eq!(all.pending_count(), 4);
    let due = |all: &mut PendingCommits, most| all.take_due(most).iter().map(|step| step.session.0).collect::<Vec<_>>();
    assert_eq!(due(&mut all, 3), [1, 2, 3], "the ones that wait longest first");
    assert_eq!(due(&mut all, 3), [4]);
    assert_eq!(due(&mut all, 3), []);
}

#[test]
fn uncommitted_step_is_superseded_by_the_newer_one() {
    let (mut all, now) = (PendingCommits::default(), Instant::now());
    let lost = all.add(step(1, 0, 5), QuorumReachability::Quorum, now).send.unwrap();
    all.add(step(1, 0, 8), QuorumReachability::Quorum, now);
    assert_eq!(
        all.complete(&lost, SubmissionOutcome::Unknown, QuorumReachability::Quorum),
        None,
        "not at once: whoever failed is to come back first"
    );
    assert_eq!(all.take_due(9).iter().map(|step| step.chain.blocks().0).collect::<Vec<_>>(), [8]);
}

#[test]
fn new_session_keeps_its_parent_when_its_first_step_is_replaced() {
    let (mut all, now) = (PendingCommits::default(), Instant::now());
    all.add(UncommittedStep { parent: Some(SessionId(77)), ..step(1, 0, 5) }, QuorumReachability::NoQuorum, now);
    all.add(step(1, 0, 6), QuorumReachability::NoQuorum, now);
    assert_eq!(all.take_due(1)[0].parent, Some(SessionId(77)));
}

#[test]
fn lookup_by_chain_finds_the_deepest_pending_head() {
    let (mut all, now) = (PendingCommits::default(), Instant::now());
    all.add(step(1, 0, 6), QuorumReachability::NoQuorum, now);
    all.add(step(2, 0, 9), QuorumReachability::NoQuorum, now);
    all.add(step(3, 1, 10), QuorumReachability::NoQuorum, now);
    let scope = step(1, 0, 1).scope();
    let found = |path, blocks, beyond| all.deepest_head(scope, &chain(path, blocks), Blocks(beyond)).map(|id| id.0);
    assert_eq!([found(0, 12, 0), found(0, 8, 0), found(0, 5, 0)], [Some(2), Some(1), None]);
    assert_eq!([found(0, 12, 9), found(0, 12, 20), found(1, 12, 0)], [None, None, Some(3)]);
    let shared = |path, blocks| step(1, 0, 6).shared_blocks(&chain(path, blocks)).0;
    assert_eq!([shared(0, 12), shared(0, 3), shared(1, 12), shared(1, 0)], [6, 3, 4, 0]);
}

#[test]
fn longest_idle_session_is_dropped_and_counted_at_the_limit() {
    let (mut all, now) = (PendingCommits::new(PendingCommitLimits { sessions: 3, blocks: 30 }), Instant::now());
    let sent = all.add(step(1, 0, 5), QuorumReachability::Quorum, now).send.unwrap();
    for session in 2..=4 {
        all.add(step(session, 0, 5), QuorumReachability::NoQuorum, now);
    }
    assert_eq!([1, 2, 3, 4].map(|session| newest(&all, session)), [5, 0, 5, 5], "what is on its way stays");
    assert_eq!(all.dropped_count(), 1);
    all.add(step(3, 0, 21), QuorumReachability::NoQuorum, now);
    assert_eq!([1, 3, 4].map(|session| newest(&all, session)), [5, 21, 0], "31 blocks are too many");
    assert_eq!(all.dropped_count(), 2);
    all.complete(&sent, SubmissionOutcome::Answered, QuorumReachability::NoQuorum);
    all.add(step(5, 0, 5), QuorumReachability::NoQuorum, now);
    assert_eq!((newest(&all, 1), all.dropped_count()), (0, 2), "the ledger has it: nothing is lost");
}

#[test]
fn committed_step_missing_from_the_view_expires() {
    let (mut all, now) = (PendingCommits::default(), Instant::now());
    let sent = all.add(step(1, 0, 5), QuorumReachability::Quorum, now).send.unwrap();
    all.sweep(now + 2 * COMMITTED_RETENTION, |_| true);
    assert_eq!(newest(&all, 1), 5, "it is still on its way");
    all.complete(&sent, SubmissionOutcome::Answered, QuorumReachability::Quorum);
    all.sweep(now + 2 * COMMITTED_RETENTION, |_| false);
    assert!(all.is_empty());
}

proptest! {
    #[test]
    fn newest_step_of_every_session_reaches_the_ledger_after_recovery(
        acts in proptest::collection::vec((0u8..6, 0u128..4, 1u32..12), 1..80),
    ) {
        let (mut all, now) = (PendingCommits::default(), Instant::now());
        let (mut sent, mut expected) = (Vec::<Arc<UncommittedStep>>::new(), BTreeMap::new());
        let mut acknowledged = BTreeMap::new();
        for (act, session, length) in acts {
            match act {
                // A session's head only ever advances, along one path.
                0..=2 => {
                    let blocks = expected.get(&session).copied().unwrap_or(0) + length;
                    expected.insert(session, blocks);
                    let reach = if act == 0 { QuorumReachability::NoQuorum } else { QuorumReachability::Quorum };
                    sent.extend(all.add(step(session, 0, blocks), reach, now).send);
                }
                3 => sent.extend(all.take_due(2)),
                4 if !sent.is_empty() => {
                    let step = sent.remove(0);
                    acknowledged.insert(step.session.0, step.chain.blocks().0 as u32);
                    sent.extend(all.complete(&step, SubmissionOutcome::Answered, QuorumReachability::Quorum));
                }
                5 if !sent.is_empty() => {
                    let step = sent.remove(0);
                    sent.extend(all.complete(&step, SubmissionOutcome::Unknown, QuorumReachability::Quorum));
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
        sent.extend(all.take_due(99));
        while let Some(step) = sent.pop() {
            acknowledged.insert(step.session.0, step.chain.blocks().0 as u32);
            sent.extend(all.complete(&step, SubmissionOutcome::Answered, QuorumReachability::Quorum));
            sent.extend(all.take_due(99));
        }
        prop_assert_eq!(acknowledged, expected);
        all.sweep(now, |_| true);
        prop_assert!(all.is_empty() && all.blocks == 0 && all.heads.is_empty());
    }
}
