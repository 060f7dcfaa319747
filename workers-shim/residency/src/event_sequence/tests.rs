use super::MessageAction::*;
use super::*;

const A: Incarnation = Incarnation(1);
const B: Incarnation = Incarnation(2);

/// A tracker whose process is identified.
fn identified_tracker() -> SequenceTracker {
    let mut stream = SequenceTracker::new();
    stream.expect_process(A);
    assert_eq!(stream.identify_process(Some(A)), ProcessMatch::Same);
    stream
}

#[test]
fn knowledge_is_exact_only_after_the_stream_start_was_seen() {
    let mut stream = identified_tracker();
    assert_eq!((stream.kv_index_state(), stream.gap()), (KvIndexState::Degraded, Some(KnowledgeGap::CatchingUp)));
    assert_eq!(stream.on_live(0), Apply);
    assert_eq!((stream.kv_index_state(), stream.gap()), (KvIndexState::Exact, None));
    let mut idle = identified_tracker();
    idle.replay_ended();
    assert_eq!(
        (idle.kv_index_state(), idle.next()),
        (KvIndexState::Exact, 0),
        "nothing was said, and that is all of it"
    );
}

#[test]
fn knowledge_is_exact_only_after_the_process_is_identified() {
    let mut stream = SequenceTracker::new();
    stream.expect_process(A);
    assert_eq!(stream.identify_process(None), ProcessMatch::Unknown);
    assert_eq!((stream.on_live(0), stream.on_replayed(1)), (Apply, Apply));
    stream.replay_ended();
    stream.cache_cleared();
    assert_eq!((stream.kv_index_state(), stream.gap()), (KvIndexState::Degraded, Some(KnowledgeGap::Unidentified)));
    assert_eq!((stream.identify_process(Some(A)), stream.kv_index_state()), (ProcessMatch::Same, KvIndexState::Exact));
    assert_eq!(
        (stream.identify_process(None), stream.kv_index_state()),
        (ProcessMatch::Unknown, KvIndexState::Exact),
        "the connection still stands"
    );
}

#[test]
fn lost_connection_degrades_until_process_and_sequence_match() {
    let lost = || {
        let mut stream = identified_tracker();
        assert_eq!(
            (stream.on_live(0), stream.on_live(1), stream.kv_index_state()),
            (Apply, Apply, KvIndexState::Exact)
        );
        stream.disconnect();
        assert_eq!((stream.kv_index_state(), stream.next()), (KvIndexState::Degraded, 2));
        stream
    };
    let mut replayed = lost();
    assert_eq!(
        (replayed.identify_process(Some(A)), replayed.gap()),
        (ProcessMatch::Same, Some(KnowledgeGap::CatchingUp))
    );
    assert_eq!(
        (replayed.on_replayed(2), replayed.kv_index_state()),
        (Apply, KvIndexState::Degraded),
        "there may be more"
    );
    replayed.replay_ended();
    assert_eq!(replayed.kv_index_state(), KvIndexState::Exact);
    let mut live = lost();
    assert_eq!((live.on_live(2), live.gap()), (Apply, Some(KnowledgeGap::Unidentified)));
    assert_eq!((live.identify_process(Some(A)), live.gap()), (ProcessMatch::Same, Some(KnowledgeGap::CatchingUp)));
    assert_eq!((live.on_live(3), live.kv_index_state()), (Apply, KvIndexState::Exact), "nothing was said meanwhile");
    let mut other = lost();
    assert_eq!((other.identify_process(Some(B)), other.next()), (ProcessMatch::Another, 0));
    let mut holed = lost();
    holed.record_loss();
    holed.disconnect();
    assert_eq!(
        (holed.identify_process(Some(A)), holed.gap()),
        (ProcessMatch::Same, Some(KnowledgeGap::Lost(0))),
        "what was lost stays lost"
    );
}

#[test]
fn replay_from_an_unidentified_process_ends_exact_knowledge() {
    let mut stream = identified_tracker();
    assert_eq!((stream.on_live(0), stream.on_live(2)), (Apply, Replay { from: 1 }));
    assert_eq!(stream.on_replayed(1), Apply);
    stream.replay_unidentified();
    assert_eq!((stream.after_replay(2), stream.gap()), (Apply, Some(KnowledgeGap::CatchingUp)));
}

#[test]
fn lost_events_expire_once_the_engine_stored_twice_its_capacity() {
    let mut stream = identified_tracker();
    assert_eq!(stream.on_live(0), Apply);
    stream.record_stored(1_000, Some(10));
    stream.record_loss();
    assert_eq!(stream.gap(), Some(KnowledgeGap::Lost(0)), "what was stored before does not count");
    stream.record_stored(19, Some(10));
    assert_eq!(stream.gap(), Some(KnowledgeGap::Lost(19)));
    stream.record_loss();
    stream.record_stored(19, Some(10));
    assert_eq!(stream.gap(), Some(KnowledgeGap::Lost(19)), "from the last loss on");
    stream.record_orphan();
    stream.record_stored(19, None);
    assert_eq!(stream.gap(), Some(KnowledgeGap::Lost(19)), "what was lost was still there");
    stream.record_stored(1, None);
    stream.record_stored(0, Some(0));
    assert_eq!(stream.gap(), Some(KnowledgeGap::Lost(20)), "nobody knows how much it can hold");
    stream.record_stored(0, Some(10));
    assert_eq!(stream.kv_index_state(), KvIndexState::Exact);
    stream.record_orphan();
    assert_eq!(stream.kv_index_state(), KvIndexState::Exact);
}

#[test]
fn live_socket_that_stays_silent_during_replays_is_deaf() {
    let look = |stream: &mut SequenceTracker, replayed: u64| {
        let from = stream.next();
        (from..from + replayed).for_each(|sequence| assert_eq!(stream.on_replayed(sequence), Apply));
        stream.check_live_socket(from)
    };
    let mut stream = identified_tracker();
    assert_eq!((look(&mut stream, 0), look(&mut stream, 1)), (LiveSocketHealth::Fine, LiveSocketHealth::Fine));
    assert_eq!(stream.on_live(1), Apply);
    assert_eq!(
        (look(&mut stream, 1), look(&mut stream, 1)),
        (LiveSocketHealth::Fine, LiveSocketHealth::Fine),
        "it heard between them"
    );
    assert_eq!(look(&mut stream, 1), LiveSocketHealth::Deaf);
    stream.disconnect();
    assert_eq!(
        (look(&mut stream, 1), look(&mut stream, 0), look(&mut stream, 1)),
        (LiveSocketHealth::Fine, LiveSocketHealth::Fine, LiveSocketHealth::Fine)
    );
}

#[test]
fn gap_is_replayed_and_live_duplicates_are_ignored() {
    let mut stream = identified_tracker();
    assert_eq!(stream.on_live(0), Apply);
    assert_eq!(stream.on_live(3), Replay { from: 1 });
    for sequence in 1..=4 {
        assert_eq!(stream.on_replayed(sequence), Apply);
    }
    stream.replay_ended();
    assert_eq!(stream.after_replay(3), Duplicate);
    assert_eq!(
        (stream.on_live(4), stream.on_live(4)),
        (Duplicate, Duplicate),
        "the replay had it; the network stutters"
    );
    assert_eq!((stream.on_live(5), stream.kv_index_state()), (Apply, KvIndexState::Exact));
}

#[test]
fn late_subscriber_starts_with_a_replay() {
    let mut stream = SequenceTracker::new();
    assert_eq!(stream.on_live(40), Replay { from: 0 });
    assert_eq!(stream.on_replayed(0), Apply);
    assert_eq!(stream.on_replayed(0), Duplicate);
}

#[test]
fn replay_gap_stays_until_the_cache_is_cleared() {
    let mut stream = identified_tracker();
    assert_eq!(stream.on_live(10), Replay { from: 0 });
    assert_eq!(stream.on_replayed(7), Apply, "the buffer begins at 7");
    stream.replay_ended();
    assert_eq!(stream.kv_index_state(), KvIndexState::Degraded);
    assert_eq!(stream.after_replay(10), Apply, "8 and 9 are lost too");
    assert_eq!((stream.next(), stream.kv_index_state()), (11, KvIndexState::Degraded));
    stream.cache_cleared();
    assert_eq!(stream.kv_index_state(), KvIndexState::Exact);
    stream.record_loss();
    assert_eq!(stream.kv_index_state(), KvIndexState::Degraded);
}

#[test]
fn sequence_going_backwards_means_a_restart() {
    let mut stream = SequenceTracker::new();
    assert_eq!((stream.on_live(0), stream.on_live(1), stream.on_live(0)), (Apply, Apply, Restarted));
    stream.on_process_restart();
    assert_eq!((stream.on_live(0), stream.next()), (Apply, 1));
}

#[test]
fn process_change_resets_knowledge() {
    let mut stream = SequenceTracker::new();
    assert_eq!(
        (stream.identify_process(Some(A)), stream.on_live(0), stream.identify_process(Some(A))),
        (ProcessMatch::Same, Apply, ProcessMatch::Same)
    );
    assert_eq!(stream.identify_process(Some(B)), ProcessMatch::Another);
    assert_eq!((stream.next(), stream.kv_index_state()), (0, KvIndexState::Degraded));
    assert_eq!(stream.identify_process(Some(B)), ProcessMatch::Same);
    stream.on_process_restart();
    assert_eq!(
        stream.identify_process(Some(A)),
        ProcessMatch::Another,
        "who is expected does not change with the numbers"
    );
}

#[test]
fn largest_sequence_number_does_not_wrap() {
    let mut stream = SequenceTracker::new();
    assert_eq!(stream.on_replayed(u64::MAX), Apply);
    assert_eq!(stream.next(), u64::MAX);
}

#[test]
fn adopted_snapshot_is_exact_only_after_the_stream_continues() {
    let adopted = || {
        let mut stream = SequenceTracker::new();
        stream.identify_process(Some(A));
        assert_eq!(stream.on_live(7), Replay { from: 0 });
        stream.adopt(A, 9);
        assert_eq!((stream.next(), stream.kv_index_state()), (9, KvIndexState::Degraded));
        stream
    };
    let mut live = adopted();
    assert_eq!((live.on_live(8), live.kv_index_state()), (Duplicate, KvIndexState::Degraded), "it is in the imprint");
    assert_eq!((live.on_live(9), live.kv_index_state()), (Apply, KvIndexState::Exact));
    let mut replayed = adopted();
    assert_eq!(
        (replayed.on_replayed(9), replayed.kv_index_state()),
        (Apply, KvIndexState::Degraded),
        "there may be more"
    );
    replayed.replay_ended();
    assert_eq!(replayed.kv_index_state(), KvIndexState::Exact);
    let mut idle = adopted();
    idle.replay_ended();
    assert_eq!(idle.kv_index_state(), KvIndexState::Exact);
    let mut holed = adopted();
    assert_eq!((holed.on_replayed(11), holed.kv_index_state()), (Apply, KvIndexState::Degraded), "9 and 10 are lost");
    let mut other = adopted();
    assert_eq!(
        (other.identify_process(Some(A)), other.identify_process(Some(B))),
        (ProcessMatch::Same, ProcessMatch::Another)
    );
    assert_eq!(other.next(), 0, "what was known was another process's");
}
