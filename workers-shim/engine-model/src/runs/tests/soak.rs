use super::*;

/// Random growing and forking prompts, sent at random times to an engine with little memory.
struct SoakTest {
    bench: RunEngineHarness,
    paths: Vec<Vec<RunId>>,
    sent: Vec<(u32, u64)>,
}

impl SoakTest {
    fn of(seed: u64, host: u64) -> Self {
        let (mut chance, mut runs, mut paths) = (PromptRng::new(seed), RunTree::default(), Vec::<Vec<RunId>>::new());
        for _ in 0..60 {
            let parent = paths.get(chance.below(paths.len() as u64 + 3) as usize).cloned().unwrap_or_default();
            let keep = chance.below(parent.len() as u64 + 1) as usize;
            let mut path = parent[..keep].to_vec();
            for _ in 0..=chance.below(3) {
                path.push(runs.add(path.last().copied(), 1 + chance.below(200) as u32));
            }
            paths.push(path);
        }
        Self { bench: RunEngineHarness::new(runs, TIMING, sizes(3_000, host)), paths, sent: Vec::new() }
    }

    fn run(mut self, seed: u64) -> Self {
        let mut chance = PromptRng::new(seed);
        let mut now = 0.0;
        for ticket in 0..300 {
            now += chance.below(1_000) as f64 / 500.0;
            self.bench.run_until(now);
            let at = chance.below(self.paths.len() as u64) as usize;
            let path = self.paths[at].clone();
            let (tokens, answer) = (self.bench.runs.end_depth(&path).0 + chance.below(60), 1 + chance.below(80));
            // The answer is part of a longer prompt that continues this one, if there is one.
            let longer = self.paths.iter().find(|other| other.len() > path.len() && other.starts_with(&path));
            let resent = longer.map(|other| other[..path.len() + 1].into());
            self.bench.submit(RunRequest { expected_history: resent, ..run_request(ticket, &path, tokens, answer) });
            self.sent.push((ticket, tokens));
            assert!(self.bench.engine.memory_used() <= Tokens(3_000));
            assert!(self.bench.engine.memory_in_use() <= self.bench.engine.memory_used());
        }
        self.bench.run_until(now + 10_000.0);
        self
    }
}

#[test]
fn every_request_finishes_once_in_order_and_frees_its_memory() {
    for seed in 1..6 {
        let soak = SoakTest::of(seed, if seed % 2 == 0 { 2_000 } else { 0 }).run(seed);
        let bench = &soak.bench;
        let engine = &bench.engine;
        assert_eq!((engine.memory_in_use(), *engine.load()), (Tokens::ZERO, OutstandingRequests::default()));
        assert_eq!((engine.queued(), engine.batch(), engine.is_prefilling()), (0, (0, 0), false));
        let count = |is: fn(&RunRequestEvent) -> bool| bench.events.iter().filter(|(_, said)| is(said)).count();
        assert_eq!(count(|said| matches!(said, RunRequestEvent::Started(_))), 300);
        assert_eq!(count(|said| matches!(said, RunRequestEvent::FirstToken(_))), 300);
        assert_eq!(count(|said| matches!(said, RunRequestEvent::Finished(_))), 300);
        assert!(bench.events.windows(2).all(|pair| pair[0].0 <= pair[1].0), "time never goes back");
        let begun: Vec<u32> = bench.events.iter().filter_map(|(_, said)| started_id(said)).collect();
        assert!(begun.windows(2).all(|pair| pair[0] < pair[1]), "prompts begin in the order in which they came");
        assert!(engine.evicted() > Tokens(3_000), "the memory is too large for this test");
    }
}

fn started_id(event: &RunRequestEvent) -> Option<u32> {
    match event {
        RunRequestEvent::Started(started) => Some(started.ticket.0),
        _ => None,
    }
}

#[test]
fn cache_hits_plus_computed_tokens_equal_the_prompt() {
    let soak = SoakTest::of(9, 2_000).run(9);
    let mut restored = 0;
    for (ticket, tokens) in &soak.sent {
        let [local, fetched, from_host, computed] = soak.bench.started(*ticket);
        let found = local + fetched + from_host;
        // A prompt that is completely cached still computes one token.
        assert_eq!(computed, tokens.saturating_sub(found).max(1));
        assert!(found <= *tokens && fetched == 0);
        restored += from_host;
    }
    assert!(restored > 0, "nothing came from the host tier");
}

#[test]
fn no_prefill_is_faster_than_alone() {
    let soak = SoakTest::of(4, 0).run(4);
    for (ticket, _) in &soak.sent {
        let [local, .., computed] = soak.bench.started(*ticket);
        let took = soak.bench.first_token(*ticket) - soak.bench.time_of(|said| started_id(said) == Some(*ticket));
        assert!(took >= TIMING.prefill_time(Tokens(computed), Tokens(local)) - 1e-6);
        assert!(soak.bench.finished(*ticket) > soak.bench.first_token(*ticket));
    }
}

#[test]
fn same_traffic_gives_identical_results() {
    let [once, again] = [(); 2].map(|()| SoakTest::of(5, 1_000).run(5).bench.events);
    assert_eq!(once, again);
}

#[test]
fn results_do_not_depend_on_polling_frequency() {
    let mut runs = RunTree::default();
    let paths = [chain(&mut runs, &[700]), chain(&mut runs, &[900])];
    let told = |step: f64| {
        let mut bench = RunEngineHarness::new(runs.clone(), TIMING, sizes(10_000, 0));
        bench.submit(run_request(1, &paths[0], 700, 90));
        bench.submit(run_request(2, &paths[1], 900, 50));
        let mut now = 0.0;
        while now < 20.0 {
            now += step;
            bench.run_until(now);
        }
        [1, 2].map(|ticket| (bench.first_token(ticket), bench.finished(ticket)))
    };
    for (seldom, often) in told(20.0).iter().zip(told(0.013)) {
        assert_near(often.0, seldom.0);
        assert_near(often.1, seldom.1);
    }
}

#[test]
fn outbound_runs_stay_pinned_until_sent() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[500, 400]), chain(&mut runs, &[900]));
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(1_000, 0));
    bench.submit(run_request(1, &a, 900, 1));
    bench.run_until(10.0);
    bench.engine.pin_for_transfer(&bench.runs, &a);
    bench.submit(run_request(2, &b, 900, 1));
    bench.run_until(20.0);
    assert_eq!(bench.engine.queued(), 1, "there is no room beside what is lent");
    bench.engine.transfer_sent(&bench.runs, &a);
    assert_eq!(bench.engine.evicted(), Tokens::ZERO);
    bench.handle_due_work();
    bench.run_until(30.0);
    assert!(bench.finished(2) > 20.0);
    assert_eq!(bench.engine.evicted(), Tokens(900), "now it makes room");
}

#[test]
fn remote_decode_without_room_falls_back_to_the_prefill_worker() {
    let mut runs = RunTree::default();
    let path = chain(&mut runs, &[300]);
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(1_000, 0));
    bench.submit(RunRequest { decode_location: DecodeLocation::Remote, ..run_request(1, &path, 310, 20) });
    let expected = bench.engine.load().context;
    bench.engine.cancel_expected(Tokens(310));
    bench.engine.expect_arrival();
    assert_eq!((expected, bench.engine.load().context), (Tokens(310), Tokens(0)));
    bench.run_until(5.0);
    let Some((_, RunRequestEvent::Prefilled(prefilled))) = bench.events.pop() else { panic!("it is computed") };
    bench.engine.decode_locally(prefilled);
    bench.run_until(10.0);
    bench.finished(1);
    assert_eq!((bench.engine.memory_in_use(), *bench.engine.load()), (Tokens::ZERO, OutstandingRequests::default()));
}

#[test]
fn outbound_runs_are_read_from_lower_tiers_one_at_a_time() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[500, 400]), chain(&mut runs, &[900]));
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(1_000, 5_000));
    bench.submit(run_request(1, &a, 900, 1));
    bench.run_until(10.0);
    bench.submit(run_request(2, &b, 900, 1));
    bench.run_until(20.0);
    let lent = bench.engine.pin_for_transfer(&bench.runs, &b);
    assert_eq!((lent.pinned, lent.load_seconds), (b.to_vec(), 0.0));
    // Both runs of the first prompt moved to the host tier, which loads 10,000 tokens per second.
    let lent = bench.engine.pin_for_transfer(&bench.runs, &a);
    assert_eq!(lent.pinned, []);
    assert_near(lent.load_seconds, 0.09);
    assert_near(bench.engine.pin_for_transfer(&bench.runs, &a).load_seconds, 0.18);
}
