use super::Verdict::*;
use super::*;

const A: Incarnation = Incarnation(1);
const B: Incarnation = Incarnation(2);

#[test]
fn nothing_is_exact_before_a_start_was_seen() {
    let mut stream = Stream::new();
    assert_eq!(stream.knowledge(), Knowledge::Degraded);
    assert_eq!(stream.live(0), Apply);
    assert_eq!(stream.knowledge(), Knowledge::Exact);
    let mut idle = Stream::new();
    idle.replay_ended();
    assert_eq!((idle.knowledge(), idle.next()), (Knowledge::Exact, 0), "nothing was said, and that is all of it");
}

#[test]
fn a_gap_is_replayed_and_what_the_live_stream_repeats_is_ignored() {
    let mut stream = Stream::new();
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
    let mut stream = Stream::new();
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
    assert_eq!((stream.meet(A), stream.live(0), stream.meet(A)), (Met::Same, Apply, Met::Same));
    assert_eq!(stream.meet(B), Met::Another);
    assert_eq!((stream.next(), stream.knowledge()), (0, Knowledge::Degraded));
    assert_eq!(stream.meet(B), Met::Same);
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
        stream.meet(A);
        assert_eq!(stream.live(7), Replay { from: 0 });
        stream.adopt(A, 9);
        assert_eq!((stream.next(), stream.knowledge()), (9, Knowledge::Degraded));
        stream
    };
    let mut live = adopted();
    assert_eq!((live.live(8), live.knowledge()), (Seen, Knowledge::Degraded), "it is in the imprint");
    assert_eq!((live.live(9), live.knowledge()), (Apply, Knowledge::Exact));
    let mut replayed = adopted();
    assert_eq!((replayed.replayed(9), replayed.knowledge()), (Apply, Knowledge::Exact));
    let mut idle = adopted();
    idle.replay_ended();
    assert_eq!(idle.knowledge(), Knowledge::Exact);
    let mut holed = adopted();
    assert_eq!((holed.replayed(11), holed.knowledge()), (Apply, Knowledge::Degraded), "9 and 10 are lost");
    let mut other = adopted();
    assert_eq!((other.meet(A), other.meet(B)), (Met::Same, Met::Another));
    assert_eq!(other.next(), 0, "what was known was another process's");
}
