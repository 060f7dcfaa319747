use std::time::Duration;

use super::*;

const USUAL: Tokens = Tokens(1000);

fn scrape(running: u32, waiting: u32) -> Scrape {
    Scrape { running, waiting, ..Scrape::default() }
}

fn desk() -> Arc<Desk> {
    Arc::default()
}

fn seen(load: Load) -> (u32, u32, u64) {
    (load.running, load.waiting, load.backlog.0)
}

#[test]
fn a_request_waits_then_runs_then_is_gone() {
    let desk = desk();
    let load = || seen(desk.counters.load(&scrape(0, 0), Mark::default(), USUAL));
    let mut flight = InFlight::new(Some(desk.clone()), DpRank(0), Tokens(300));
    assert_eq!(load(), (0, 1, 300));
    flight.first_token();
    flight.first_token();
    assert_eq!(load(), (1, 0, 0));
    drop(flight);
    assert_eq!(load(), (0, 0, 0));
    drop(InFlight::new(Some(desk.clone()), DpRank(0), Tokens(300)));
    assert_eq!(load(), (0, 0, 0), "also without a first token");
}

#[test]
fn what_a_scrape_has_seen_of_ours_is_not_counted_twice() {
    let desk = desk();
    let (mut a, b) = (
        InFlight::new(Some(desk.clone()), DpRank(0), Tokens(10)),
        InFlight::new(Some(desk.clone()), DpRank(0), Tokens(20)),
    );
    a.first_token();
    let mark = desk.counters.mark();
    let at = scrape(2, 0);
    assert_eq!(seen(desk.counters.load(&at, mark, USUAL)), (1, 1, 20));
    let c = InFlight::new(Some(desk.clone()), DpRank(0), Tokens(40));
    assert_eq!(seen(desk.counters.load(&at, mark, USUAL)), (1, 2, 60));
    drop(a);
    assert_eq!(seen(desk.counters.load(&at, mark, USUAL)), (0, 2, 60));
    drop((b, c));
    assert_eq!(seen(desk.counters.load(&at, mark, USUAL)), (0, 0, 0));
}

#[test]
fn requests_of_others_count_by_the_usual_prompt() {
    let desk = desk();
    let at = scrape(5, 3);
    assert_eq!(seen(desk.counters.load(&at, Mark::default(), USUAL)), (5, 3, 3000));
    let measured = Scrape { mean_prompt: Some(Tokens(7)), ..at };
    assert_eq!(seen(desk.counters.load(&measured, Mark::default(), USUAL)), (5, 3, 21));
    let _ours = InFlight::new(Some(desk.clone()), DpRank(0), Tokens(100));
    assert_eq!(seen(desk.counters.load(&measured, Mark::default(), USUAL)), (5, 4, 121));
    let mark = desk.counters.mark();
    assert_eq!(seen(desk.counters.load(&measured, mark, USUAL)), (5, 3, 114), "one of the three that wait is ours");
}

#[test]
fn what_leaves_while_a_scrape_is_on_its_way_is_nobody_elses() {
    let desk = desk();
    let sent = desk.counters.mark();
    let _ours = InFlight::new(Some(desk.clone()), DpRank(0), Tokens(100));
    let at = sent.until(desk.counters.mark());
    assert_eq!(seen(desk.counters.load(&scrape(0, 1), at, USUAL)), (0, 1, 100), "the engine had it already");
    assert_eq!(seen(desk.counters.load(&scrape(0, 0), at, USUAL)), (0, 1, 100), "or had not yet");
    assert_eq!(seen(desk.counters.load(&scrape(2, 2), at, USUAL)), (2, 2, 1100), "one that waits is somebody else's");
}

#[test]
fn what_left_and_ended_while_a_scrape_was_on_its_way_is_taken_off_once() {
    let desk = desk();
    let _old: Vec<_> = (0..3).map(|_| InFlight::new(Some(desk.clone()), DpRank(0), Tokens(10))).collect();
    let mark = desk.counters.mark();
    drop(InFlight::new(Some(desk.clone()), DpRank(0), Tokens(10)));
    let mark = mark.until(desk.counters.mark());
    // The three, and two of somebody else.
    assert_eq!(
        desk.counters.load(&scrape(5, 0), mark, USUAL).running + desk.counters.load(&scrape(5, 0), mark, USUAL).waiting,
        5
    );
}

#[test]
fn a_stale_scrape_never_hides_what_we_know() {
    let desk = desk();
    let mark = desk.counters.mark();
    let flights: Vec<InFlight> = (0..4).map(|_| InFlight::new(Some(desk.clone()), DpRank(0), Tokens(1))).collect();
    // The engine answered the scrape late and had two of the four already.
    let load = desk.counters.load(&scrape(2, 0), mark, USUAL);
    assert_eq!(load.running + load.waiting, 6, "at most counted twice until the next scrape");
    let marked = desk.counters.mark();
    let load = desk.counters.load(&scrape(0, 0), marked, USUAL);
    assert_eq!(load.running + load.waiting, 4, "never fewer than ours");
    drop(flights);
    assert_eq!(seen(desk.counters.load(&scrape(0, 0), marked, USUAL)), (0, 0, 0));
}

/// What another router says: so many sent, begun and over, and tokens that wait.
fn others(dispatched: u64, begun: u64, finished: u64, pending: u64) -> Others {
    Others { generation: 1, dispatched, begun, finished, pending: Tokens(pending) }
}

#[test]
fn requests_of_other_routers_count_like_ours_and_only_once() {
    let desk = desk();
    assert!(desk.counters.overlay(others(5, 4, 3, 200)));
    assert!(!desk.counters.overlay(others(5, 4, 3, 200)), "nothing new");
    let mark = desk.counters.mark();
    let at = scrape(1, 1);
    assert_eq!(seen(desk.counters.load(&at, mark, USUAL)), (1, 1, 200), "the engine has both of theirs");
    let ours = InFlight::new(Some(desk.clone()), DpRank(0), Tokens(30));
    assert_eq!(seen(desk.counters.load(&at, mark, USUAL)), (1, 2, 230));
    desk.counters.overlay(others(7, 6, 4, 100));
    assert_eq!(seen(desk.counters.load(&at, mark, USUAL)), (2, 2, 130), "two came and one went since");
    drop(ours);
    let stranger = scrape(3, 2);
    let mark = desk.counters.mark();
    assert_eq!(seen(desk.counters.load(&stranger, mark, USUAL)), (3, 2, 1100), "one that waits is nobody's");
}

#[test]
fn routers_that_come_or_go_do_not_look_like_requests_that_do() {
    let desk = desk();
    desk.counters.overlay(others(1000, 1000, 990, 0));
    let mark = desk.counters.mark();
    let at = scrape(12, 0);
    desk.counters.overlay(Others { generation: 2, ..others(50, 50, 45, 0) });
    assert_eq!(
        seen(desk.counters.load(&at, mark, USUAL)),
        (12, 0, 0),
        "what the engine said stands until it speaks again"
    );
    desk.counters.overlay(Others { generation: 3, ..others(2000, 2000, 1970, 0) });
    assert_eq!(seen(desk.counters.load(&at, mark, USUAL)), (30, 0, 0), "never fewer than they have in flight");
}

#[test]
fn a_prompt_beside_those_of_other_routers_teaches_no_speed() {
    let desk = desk();
    let profile = desk.speeds();
    desk.counters.overlay(others(1, 0, 0, 900));
    let mut flight = InFlight::new(Some(desk.clone()), DpRank(0), Tokens(4000));
    std::thread::sleep(Duration::from_millis(2));
    flight.first_token();
    flight.complete(&Usage { prompt: Tokens(4000), completion: Tokens(1), cached: None });
    assert_eq!(desk.speeds(), profile);
}

#[test]
fn what_is_in_flight_is_told_by_rank() {
    let desk = desk();
    let mut first = InFlight::new(Some(desk.clone()), DpRank(2), Tokens(10));
    let second = InFlight::new(Some(desk.clone()), DpRank(2), Tokens(5));
    let third = InFlight::new(Some(desk.clone()), DpRank(0), Tokens(7));
    first.first_token();
    drop(third);
    let flow = |rank, dispatched, begun, finished, pending| Flow {
        worker: WorkerId(0),
        rank: DpRank(rank),
        dispatched,
        begun,
        finished,
        pending: Tokens(pending),
    };
    assert_eq!(desk.flows(), [flow(2, 2, 1, 0, 5), flow(0, 1, 1, 1, 0)]);
    drop((first, second));
    assert_eq!(desk.flows(), [flow(2, 2, 2, 2, 0), flow(0, 1, 1, 1, 0)]);
}

#[test]
fn only_undisturbed_prompts_teach_speed() {
    let desk = desk();
    let profile = desk.speeds();
    let usage = Usage { prompt: Tokens(4000), completion: Tokens(1), cached: None };
    let (mut first, mut second) = (
        InFlight::new(Some(desk.clone()), DpRank(0), Tokens(4000)),
        InFlight::new(Some(desk.clone()), DpRank(0), Tokens(4000)),
    );
    std::thread::sleep(Duration::from_millis(2));
    first.first_token();
    second.first_token();
    second.complete(&usage);
    assert_eq!(desk.speeds(), profile, "it stood behind the first");
    first.complete(&usage);
    assert_ne!(desk.speeds().prefill_tokens_per_second, profile.prefill_tokens_per_second);
}

#[test]
fn every_change_makes_views_old() {
    let desk = desk();
    let revision = || desk.revision.load(Relaxed);
    let mut last = revision();
    let mut changed = || std::mem::replace(&mut last, revision()) != revision();
    let mut flight = InFlight::new(Some(desk.clone()), DpRank(0), Tokens(1));
    assert!(changed());
    flight.first_token();
    assert!(changed());
    drop(flight);
    assert!(changed() && !changed());
}

#[test]
fn a_worker_that_left_takes_requests_without_a_trace() {
    let mut flight = InFlight::new(None, DpRank(0), Tokens(1));
    flight.first_token();
    flight.complete(&Usage::default());
}

/// Speeds after one prompt that was planned to compute `planned` tokens and says `usage`.
fn taught(planned: u64, usage: Usage) -> f64 {
    let desk = desk();
    let mut flight = InFlight::new(Some(desk.clone()), DpRank(0), Tokens(planned));
    std::thread::sleep(Duration::from_millis(2));
    flight.first_token();
    flight.complete(&usage);
    desk.speeds().prefill_tokens_per_second
}

#[test]
fn a_prompt_of_which_more_was_computed_or_moved_than_planned_teaches_nothing() {
    let start = desk().speeds().prefill_tokens_per_second;
    let usage = |cached| Usage { prompt: Tokens(8_000), completion: Tokens(1), cached: Some(Tokens(cached)) };
    assert_eq!(taught(300, usage(0)), start, "7,700 tokens came from elsewhere, or were lost");
    assert_ne!(taught(1_000, usage(6_960)), start, "a partial block is no surprise");
    assert_ne!(taught(8_000, usage(4_000)), start, "less work is known exactly");
}

#[test]
fn what_came_before_the_request_left_is_not_its_workers_time() {
    let mut flight = InFlight::new(Some(desk()), DpRank(0), Tokens(100_000));
    let dispatched = flight.sent;
    std::thread::sleep(Duration::from_millis(3));
    flight.sent();
    assert!(flight.sent - dispatched >= Duration::from_millis(3));
}
