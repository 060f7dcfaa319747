use std::time::Duration;

use super::*;

const USUAL: Tokens = Tokens(1000);

fn scrape(running: u32, waiting: u32) -> Scrape {
    Scrape { running, waiting, ..Scrape::default() }
}

fn desk() -> Arc<InFlightTracker> {
    Arc::default()
}

fn seen(load: WorkerLoad) -> (u32, u32, u64) {
    (load.running, load.waiting, load.backlog.0)
}

#[test]
fn request_waits_then_runs_then_disappears() {
    let tracker = desk();
    let load = || seen(tracker.counters.load(&scrape(0, 0), CounterSnapshot::default(), USUAL));
    let mut flight = InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(300));
    assert_eq!(load(), (0, 1, 300));
    flight.record_first_token();
    flight.record_first_token();
    assert_eq!(load(), (1, 0, 0));
    drop(flight);
    assert_eq!(load(), (0, 0, 0));
    drop(InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(300)));
    assert_eq!(load(), (0, 0, 0), "also without a first token");
}

#[test]
fn own_requests_in_a_scrape_are_not_counted_twice() {
    let tracker = desk();
    let (mut a, b) = (
        InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(10)),
        InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(20)),
    );
    a.record_first_token();
    let mark = tracker.counters.snapshot();
    let at = scrape(2, 0);
    assert_eq!(seen(tracker.counters.load(&at, mark, USUAL)), (1, 1, 20));
    let c = InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(40));
    assert_eq!(seen(tracker.counters.load(&at, mark, USUAL)), (1, 2, 60));
    drop(a);
    assert_eq!(seen(tracker.counters.load(&at, mark, USUAL)), (0, 2, 60));
    drop((b, c));
    assert_eq!(seen(tracker.counters.load(&at, mark, USUAL)), (0, 0, 0));
}

#[test]
fn foreign_requests_count_with_the_mean_prompt() {
    let tracker = desk();
    let at = scrape(5, 3);
    assert_eq!(seen(tracker.counters.load(&at, CounterSnapshot::default(), USUAL)), (5, 3, 3000));
    let measured = Scrape { mean_prompt: Some(Tokens(7)), ..at };
    assert_eq!(seen(tracker.counters.load(&measured, CounterSnapshot::default(), USUAL)), (5, 3, 21));
    let _ours = InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(100));
    assert_eq!(seen(tracker.counters.load(&measured, CounterSnapshot::default(), USUAL)), (5, 4, 121));
    let mark = tracker.counters.snapshot();
    assert_eq!(seen(tracker.counters.load(&measured, mark, USUAL)), (5, 3, 114), "one of the three that wait is ours");
}

#[test]
fn dispatch_during_a_scrape_is_not_foreign_load() {
    let tracker = desk();
    let sent = tracker.counters.snapshot();
    let _ours = InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(100));
    let at = sent.with_response(tracker.counters.snapshot());
    assert_eq!(seen(tracker.counters.load(&scrape(0, 1), at, USUAL)), (0, 1, 100), "the engine had it already");
    assert_eq!(seen(tracker.counters.load(&scrape(0, 0), at, USUAL)), (0, 1, 100), "or had not yet");
    assert_eq!(
        seen(tracker.counters.load(&scrape(2, 2), at, USUAL)),
        (2, 2, 1100),
        "one that waits is somebody else's"
    );
}

#[test]
fn request_that_ends_during_a_scrape_is_subtracted_once() {
    let tracker = desk();
    let _old: Vec<_> = (0..3).map(|_| InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(10))).collect();
    let mark = tracker.counters.snapshot();
    drop(InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(10)));
    let mark = mark.with_response(tracker.counters.snapshot());
    // The router's own three, and two of somebody else.
    assert_eq!(
        tracker.counters.load(&scrape(5, 0), mark, USUAL).running
            + tracker.counters.load(&scrape(5, 0), mark, USUAL).waiting,
        5
    );
}

#[test]
fn stale_scrape_never_hides_own_requests() {
    let tracker = desk();
    let mark = tracker.counters.snapshot();
    let flights: Vec<InFlightGuard> =
        (0..4).map(|_| InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(1))).collect();
    // The engine answered the scrape late, when two of the four had arrived.
    let load = tracker.counters.load(&scrape(2, 0), mark, USUAL);
    assert_eq!(load.running + load.waiting, 6, "at most counted twice until the next scrape");
    let marked = tracker.counters.snapshot();
    let load = tracker.counters.load(&scrape(0, 0), marked, USUAL);
    assert_eq!(load.running + load.waiting, 4, "never fewer than ours");
    drop(flights);
    assert_eq!(seen(tracker.counters.load(&scrape(0, 0), marked, USUAL)), (0, 0, 0));
}

/// Counters that another router reports: requests dispatched, begun and finished, and pending tokens.
fn peer_in_flight(dispatched: u64, begun: u64, finished: u64, pending: u64) -> PeerInFlight {
    PeerInFlight { generation: 1, dispatched, begun, finished, pending: Tokens(pending) }
}

#[test]
fn peer_router_requests_count_like_own_ones_and_once() {
    let tracker = desk();
    assert!(tracker.counters.set_peer_in_flight(peer_in_flight(5, 4, 3, 200)));
    assert!(!tracker.counters.set_peer_in_flight(peer_in_flight(5, 4, 3, 200)), "nothing new");
    let mark = tracker.counters.snapshot();
    let at = scrape(1, 1);
    assert_eq!(seen(tracker.counters.load(&at, mark, USUAL)), (1, 1, 200), "the engine has both of theirs");
    let ours = InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(30));
    assert_eq!(seen(tracker.counters.load(&at, mark, USUAL)), (1, 2, 230));
    tracker.counters.set_peer_in_flight(peer_in_flight(7, 6, 4, 100));
    assert_eq!(seen(tracker.counters.load(&at, mark, USUAL)), (2, 2, 130), "two came and one went since");
    drop(ours);
    let stranger = scrape(3, 2);
    let mark = tracker.counters.snapshot();
    assert_eq!(seen(tracker.counters.load(&stranger, mark, USUAL)), (3, 2, 1100), "one that waits is nobody's");
}

#[test]
fn joining_or_leaving_routers_do_not_change_the_load() {
    let tracker = desk();
    tracker.counters.set_peer_in_flight(peer_in_flight(1000, 1000, 990, 0));
    let mark = tracker.counters.snapshot();
    let at = scrape(12, 0);
    tracker.counters.set_peer_in_flight(PeerInFlight { generation: 2, ..peer_in_flight(50, 50, 45, 0) });
    assert_eq!(
        seen(tracker.counters.load(&at, mark, USUAL)),
        (12, 0, 0),
        "what the engine said stands until it speaks again"
    );
    tracker.counters.set_peer_in_flight(PeerInFlight { generation: 3, ..peer_in_flight(2000, 2000, 1970, 0) });
    assert_eq!(seen(tracker.counters.load(&at, mark, USUAL)), (30, 0, 0), "never fewer than they have in flight");
}

#[test]
fn prefill_beside_peer_router_prefills_yields_no_speed_sample() {
    let tracker = desk();
    let profile = tracker.speeds();
    tracker.counters.set_peer_in_flight(peer_in_flight(1, 0, 0, 900));
    let mut flight = InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(4000));
    std::thread::sleep(Duration::from_millis(2));
    flight.record_first_token();
    flight.complete(&TokenUsage { prompt: Tokens(4000), completion: Tokens(1), cached: None });
    assert_eq!(tracker.speeds(), profile);
}

#[test]
fn in_flight_requests_are_listed_by_rank() {
    let tracker = desk();
    let mut first = InFlightGuard::new(Some(tracker.clone()), DpRank(2), Tokens(10));
    let second = InFlightGuard::new(Some(tracker.clone()), DpRank(2), Tokens(5));
    let third = InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(7));
    first.record_first_token();
    drop(third);
    let flow = |rank, dispatched, begun, finished, pending| RankInFlightCounts {
        worker: WorkerId(0),
        rank: DpRank(rank),
        dispatched,
        begun,
        finished,
        pending: Tokens(pending),
    };
    assert_eq!(tracker.entries(), [flow(2, 2, 1, 0, 5), flow(0, 1, 1, 1, 0)]);
    drop((first, second));
    assert_eq!(tracker.entries(), [flow(2, 2, 2, 2, 0), flow(0, 1, 1, 1, 0)]);
}

#[test]
fn only_undisturbed_prefills_yield_speed_samples() {
    let tracker = desk();
    let profile = tracker.speeds();
    let usage = TokenUsage { prompt: Tokens(4000), completion: Tokens(1), cached: None };
    let (mut first, mut second) = (
        InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(4000)),
        InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(4000)),
    );
    std::thread::sleep(Duration::from_millis(2));
    first.record_first_token();
    second.record_first_token();
    second.complete(&usage);
    assert_eq!(tracker.speeds(), profile, "it stood behind the first");
    first.complete(&usage);
    assert_ne!(tracker.speeds().prefill_tokens_per_second, profile.prefill_tokens_per_second);
}

#[test]
fn every_change_invalidates_views() {
    let tracker = desk();
    let revision = || tracker.revision.load(Relaxed);
    let mut last = revision();
    let mut changed = || std::mem::replace(&mut last, revision()) != revision();
    let mut flight = InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(1));
    assert!(changed());
    flight.record_first_token();
    assert!(changed());
    drop(flight);
    assert!(changed() && !changed());
}

#[test]
fn requests_of_a_departed_worker_leave_no_trace() {
    let mut flight = InFlightGuard::new(None, DpRank(0), Tokens(1));
    flight.record_first_token();
    flight.complete(&TokenUsage::default());
}

/// Returns the prefill rate after one prompt that was planned to compute `planned` tokens and reported `usage`.
fn taught(planned: u64, usage: TokenUsage) -> f64 {
    let tracker = desk();
    let mut flight = InFlightGuard::new(Some(tracker.clone()), DpRank(0), Tokens(planned));
    std::thread::sleep(Duration::from_millis(2));
    flight.record_first_token();
    flight.complete(&usage);
    tracker.speeds().prefill_tokens_per_second
}

#[test]
fn prefill_that_differs_from_the_plan_yields_no_speed_sample() {
    let start = desk().speeds().prefill_tokens_per_second;
    let usage = |cached| TokenUsage { prompt: Tokens(8_000), completion: Tokens(1), cached: Some(Tokens(cached)) };
    assert_eq!(taught(300, usage(0)), start, "7,700 tokens came from elsewhere, or were lost");
    assert_ne!(taught(1_000, usage(6_960)), start, "a partial block is no surprise");
    assert_ne!(taught(8_000, usage(4_000)), start, "less work is known exactly");
}

#[test]
fn time_before_dispatch_is_not_charged_to_the_worker() {
    let mut flight = InFlightGuard::new(Some(desk()), DpRank(0), Tokens(100_000));
    let dispatched = flight.sent_at;
    std::thread::sleep(Duration::from_millis(3));
    flight.mark_sent();
    assert!(flight.sent_at - dispatched >= Duration::from_millis(3));
}
