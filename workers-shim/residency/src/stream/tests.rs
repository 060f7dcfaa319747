use super::Verdict::*;
use super::*;

const A: Incarnation = Incarnation(1);
const B: Incarnation = Incarnation(2);

/// A stream whose process is known.
fn identified() -> Stream {
    let mut stream = Stream::new();
    stream.expect(A);
    assert_eq!(stream.meet(Some(A)), Met::Same);
    stream
}

#[test]
fn nothing_is_exact_before_a_start_was_seen() {
    let mut stream = identified();
    assert_eq!((stream.knowledge(), stream.gap()), (Knowledge::Degraded, Some(Gap::Behind)));
    assert_eq!(stream.live(0), Apply);
    assert_eq!((stream.knowledge(), stream.gap()), (Knowledge::Exact, None));
    let mut idle = identified();
    idle.replay_ended();
    assert_eq!((idle.knowledge(), idle.next()), (Knowledge::Exact, 0), "nothing was said, and that is all of it");
}

#[test]
fn nothing_is_exact_before_it_is_known_whose_it_is() {
    let mut stream = Stream::new();
    stream.expect(A);
    assert_eq!(stream.meet(None), Met::Unknown);
    assert_eq!((stream.live(0), stream.replayed(1)), (Apply, Apply));
    stream.replay_ended();
    stream.cleared();
    assert_eq!((stream.knowledge(), stream.gap()), (Knowledge::Degraded, Some(Gap::Unidentified)));
    assert_eq!((stream.meet(Some(A)), stream.knowledge()), (Met::Same, Knowledge::Exact));
    assert_eq!(
        (stream.meet(None), stream.knowledge()),
        (Met::Unknown, Knowledge::Exact),
        "the connection still stands"
    );
}

#[test]
fn a_lost_connection_is_in_doubt_until_the_same_process_is_met_and_nothing_is_missing() {
    let lost = || {
        let mut stream = identified();
        assert_eq!((stream.live(0), stream.live(1), stream.knowledge()), (Apply, Apply, Knowledge::Exact));
        stream.lose();
        assert_eq!((stream.knowledge(), stream.next()), (Knowledge::Degraded, 2));
        stream
    };
    let mut replayed = lost();
    assert_eq!((replayed.meet(Some(A)), replayed.gap()), (Met::Same, Some(Gap::Behind)));
    assert_eq!((replayed.replayed(2), replayed.knowledge()), (Apply, Knowledge::Degraded), "there may be more");
    replayed.replay_ended();
    assert_eq!(replayed.knowledge(), Knowledge::Exact);
    let mut live = lost();
    assert_eq!((live.live(2), live.gap()), (Apply, Some(Gap::Unidentified)));
    assert_eq!((live.meet(Some(A)), live.gap()), (Met::Same, Some(Gap::Behind)));
    assert_eq!((live.live(3), live.knowledge()), (Apply, Knowledge::Exact), "nothing was said meanwhile");
    let mut other = lost();
    assert_eq!((other.meet(Some(B)), other.next()), (Met::Another, 0));
    let mut holed = lost();
    holed.spoiled();
    holed.lose();
    assert_eq!((holed.meet(Some(A)), holed.gap()), (Met::Same, Some(Gap::Lost(0))), "what was lost stays lost");
}

#[test]
fn a_replay_of_nobody_knows_whom_ends_what_was_certain() {
    let mut stream = identified();
    assert_eq!((stream.live(0), stream.live(2)), (Apply, Replay { from: 1 }));
    assert_eq!(stream.replayed(1), Apply);
    stream.replay_doubted();
    assert_eq!((stream.after_replay(2), stream.gap()), (Apply, Some(Gap::Behind)));
}

#[test]
fn what_was_lost_no_longer_matters_once_the_engine_has_stored_twice_what_it_can_hold() {
    let mut stream = identified();
    assert_eq!(stream.live(0), Apply);
    stream.stored(1_000, Some(10));
    stream.spoiled();
    assert_eq!(stream.gap(), Some(Gap::Lost(0)), "what was stored before does not count");
    stream.stored(19, Some(10));
    assert_eq!(stream.gap(), Some(Gap::Lost(19)));
    stream.spoiled();
    stream.stored(19, Some(10));
    assert_eq!(stream.gap(), Some(Gap::Lost(19)), "from the last loss on");
    stream.orphaned();
    stream.stored(19, None);
    assert_eq!(stream.gap(), Some(Gap::Lost(19)), "what was lost was still there");
    stream.stored(1, None);
    stream.stored(0, Some(0));
    assert_eq!(stream.gap(), Some(Gap::Lost(20)), "nobody knows how much it can hold");
    stream.stored(0, Some(10));
    assert_eq!(stream.knowledge(), Knowledge::Exact);
    stream.orphaned();
    assert_eq!(stream.knowledge(), Knowledge::Exact);
}

#[test]
fn a_live_socket_that_brings_nothing_while_replays_do_is_deaf() {
    let look = |stream: &mut Stream, replayed: u64| {
        let from = stream.next();
        (from..from + replayed).for_each(|sequence| assert_eq!(stream.replayed(sequence), Apply));
        stream.looked(from)
    };
    let mut stream = identified();
    assert_eq!((look(&mut stream, 0), look(&mut stream, 1)), (Hearing::Fine, Hearing::Fine));
    assert_eq!(stream.live(1), Apply);
    assert_eq!((look(&mut stream, 1), look(&mut stream, 1)), (Hearing::Fine, Hearing::Fine), "it heard between them");
    assert_eq!(look(&mut stream, 1), Hearing::Deaf);
    stream.lose();
    assert_eq!(
        (look(&mut stream, 1), look(&mut stream, 0), look(&mut stream, 1)),
        (Hearing::Fine, Hearing::Fine, Hearing::Fine)
    );
}

#[test]
fn a_gap_is_replayed_and_what_the_live_stream_repeats_is_ignored() {
    let mut stream = identified();
    assert_eq!(stream.live(0), Apply);
    assert_eq!(stream.live(3), Replay { from: 1 });
    for sequence in 1..=4 {
        assert_eq!(stream.replayed(sequence), Apply);
    }
    stream.replay_ended();
    assert_eq!(stream.after_replay(3), Seen);
    assert_eq!((stream.live(4), stream.live(4)), (Seen, Seen), "the replay had it; the network stutters");
    assert_eq!((stream.live(5), stream.knowledge()), (Apply, Knowledge::Exact));
}

#[test]
fn a_late_subscriber_starts_with_a_replay() {
    let mut stream = Stream::new();
    assert_eq!(stream.live(40), Replay { from: 0 });
    assert_eq!(stream.replayed(0), Apply);
    assert_eq!(stream.replayed(0), Seen);
}

#[test]
fn what_a_replay_leaves_out_is_lost_until_the_cache_is_empty() {
    let mut stream = identified();
    assert_eq!(stream.live(10), Replay { from: 0 });
    assert_eq!(stream.replayed(7), Apply, "the buffer begins at 7");
    stream.replay_ended();
    assert_eq!(stream.knowledge(), Knowledge::Degraded);
    assert_eq!(stream.after_replay(10), Apply, "8 and 9 are lost too");
    assert_eq!((stream.next(), stream.knowledge()), (11, Knowledge::Degraded));
    stream.cleared();
    assert_eq!(stream.knowledge(), Knowledge::Exact);
    stream.spoiled();
    assert_eq!(stream.knowledge(), Knowledge::Degraded);
}

#[test]
fn numbers_that_go_back_are_another_process() {
    let mut stream = Stream::new();
    assert_eq!((stream.live(0), stream.live(1), stream.live(0)), (Apply, Apply, Restarted));
    stream.restart();
    assert_eq!((stream.live(0), stream.next()), (Apply, 1));
}

#[test]
fn another_process_voids_what_was_known_of_the_first() {
    let mut stream = Stream::new();
    assert_eq!((stream.meet(Some(A)), stream.live(0), stream.meet(Some(A))), (Met::Same, Apply, Met::Same));
    assert_eq!(stream.meet(Some(B)), Met::Another);
    assert_eq!((stream.next(), stream.knowledge()), (0, Knowledge::Degraded));
    assert_eq!(stream.meet(Some(B)), Met::Same);
    stream.restart();
    assert_eq!(stream.meet(Some(A)), Met::Another, "who is expected does not change with the numbers");
}

#[test]
fn the_largest_number_does_not_wrap() {
    let mut stream = Stream::new();
    assert_eq!(stream.replayed(u64::MAX), Apply);
    assert_eq!(stream.next(), u64::MAX);
}

#[test]
fn what_is_known_from_elsewhere_is_all_only_once_the_stream_itself_goes_on_from_there() {
    let adopted = || {
        let mut stream = Stream::new();
        stream.meet(Some(A));
        assert_eq!(stream.live(7), Replay { from: 0 });
        stream.adopt(A, 9);
        assert_eq!((stream.next(), stream.knowledge()), (9, Knowledge::Degraded));
        stream
    };
    let mut live = adopted();
    assert_eq!((live.live(8), live.knowledge()), (Seen, Knowledge::Degraded), "it is in the imprint");
    assert_eq!((live.live(9), live.knowledge()), (Apply, Knowledge::Exact));
    let mut replayed = adopted();
    assert_eq!((replayed.replayed(9), replayed.knowledge()), (Apply, Knowledge::Degraded), "there may be more");
    replayed.replay_ended();
    assert_eq!(replayed.knowledge(), Knowledge::Exact);
    let mut idle = adopted();
    idle.replay_ended();
    assert_eq!(idle.knowledge(), Knowledge::Exact);
    let mut holed = adopted();
    assert_eq!((holed.replayed(11), holed.knowledge()), (Apply, Knowledge::Degraded), "9 and 10 are lost");
    let mut other = adopted();
    assert_eq!((other.meet(Some(A)), other.meet(Some(B))), (Met::Same, Met::Another));
    assert_eq!(other.next(), 0, "what was known was another process's");
}
