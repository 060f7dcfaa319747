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
    let mut flight = InFlight::new(Some(desk.clone()), Tokens(300));
    assert_eq!(load(), (0, 1, 300));
    flight.first_token();
    flight.first_token();
    assert_eq!(load(), (1, 0, 0));
    drop(flight);
    assert_eq!(load(), (0, 0, 0));
    drop(InFlight::new(Some(desk.clone()), Tokens(300)));
    assert_eq!(load(), (0, 0, 0), "also without a first token");
}

#[test]
fn what_a_scrape_has_seen_of_ours_is_not_counted_twice() {
    let desk = desk();
    let (mut a, b) = (InFlight::new(Some(desk.clone()), Tokens(10)), InFlight::new(Some(desk.clone()), Tokens(20)));
    a.first_token();
    let mark = desk.counters.mark();
    let at = scrape(2, 0);
    assert_eq!(seen(desk.counters.load(&at, mark, USUAL)), (1, 1, 20));
    let c = InFlight::new(Some(desk.clone()), Tokens(40));
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
    let _ours = InFlight::new(Some(desk.clone()), Tokens(100));
    assert_eq!(seen(desk.counters.load(&measured, Mark::default(), USUAL)), (5, 4, 121));
    let mark = desk.counters.mark();
    assert_eq!(seen(desk.counters.load(&measured, mark, USUAL)), (5, 3, 114), "one of the three that wait is ours");
}

#[test]
fn a_stale_scrape_never_hides_what_we_know() {
    let desk = desk();
    let mark = desk.counters.mark();
    let flights: Vec<InFlight> = (0..4).map(|_| InFlight::new(Some(desk.clone()), Tokens(1))).collect();
    // The engine answered the scrape late and had two of the four already.
    let load = desk.counters.load(&scrape(2, 0), mark, USUAL);
    assert_eq!(load.running + load.waiting, 6, "at most counted twice until the next scrape");
    let marked = desk.counters.mark();
    let load = desk.counters.load(&scrape(0, 0), marked, USUAL);
    assert_eq!(load.running + load.waiting, 4, "never fewer than ours");
    drop(flights);
    assert_eq!(seen(desk.counters.load(&scrape(0, 0), marked, USUAL)), (0, 0, 0));
}

#[test]
fn only_undisturbed_prompts_teach_speed() {
    let desk = desk();
    let profile = desk.speeds();
    let usage = Usage { prompt: Tokens(4000), completion: Tokens(1), cached: None };
    let (mut first, mut second) =
        (InFlight::new(Some(desk.clone()), Tokens(4000)), InFlight::new(Some(desk.clone()), Tokens(4000)));
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
    let mut flight = InFlight::new(Some(desk.clone()), Tokens(1));
    assert!(changed());
    flight.first_token();
    assert!(changed());
    drop(flight);
    assert!(changed() && !changed());
}

#[test]
fn a_worker_that_left_takes_requests_without_a_trace() {
    let mut flight = InFlight::new(None, Tokens(1));
    flight.first_token();
    flight.complete(&Usage::default());
}

/// Speeds after one prompt that was planned to compute `planned` tokens and says `usage`.
fn taught(planned: u64, usage: Usage) -> f64 {
    let desk = desk();
    let mut flight = InFlight::new(Some(desk.clone()), Tokens(planned));
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
    let mut flight = InFlight::new(Some(desk()), Tokens(100_000));
    let dispatched = flight.sent;
    std::thread::sleep(Duration::from_millis(3));
    flight.sent();
    assert!(flight.sent - dispatched >= Duration::from_millis(3));
}
