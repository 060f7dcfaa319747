use super::*;

/// Prompts that grow and fork at random, sent at random to an engine whose memory is short.
struct Soak {
    bench: Bench,
    paths: Vec<Vec<RunId>>,
    sent: Vec<(u32, u64)>,
}

impl Soak {
    fn of(seed: u64, host: u64) -> Self {
        let (mut chance, mut runs, mut paths) = (Chance::new(seed), Runs::default(), Vec::<Vec<RunId>>::new());
        for _ in 0..60 {
            let parent = paths.get(chance.below(paths.len() as u64 + 3) as usize).cloned().unwrap_or_default();
            let keep = chance.below(parent.len() as u64 + 1) as usize;
            let mut path = parent[..keep].to_vec();
            for _ in 0..=chance.below(3) {
                path.push(runs.add(path.last().copied(), 1 + chance.below(200) as u32));
            }
            paths.push(path);
        }
        Self { bench: Bench::new(runs, TIMING, sizes(3_000, host)), paths, sent: Vec::new() }
    }

    fn run(mut self, seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut now = 0.0;
        for ticket in 0..300 {
            now += chance.below(1_000) as f64 / 500.0;
            self.bench.until(now);
            let at = chance.below(self.paths.len() as u64) as usize;
            let path = self.paths[at].clone();
            let (tokens, answer) = (self.bench.runs.end(&path).0 + chance.below(60), 1 + chance.below(80));
            // The answer lies under a longer prompt that goes on from this one, if there is one.
            let longer = self.paths.iter().find(|other| other.len() > path.len() && other.starts_with(&path));
            let resent = longer.map(|other| other[..path.len() + 1].into());
            self.bench.submit(Prompt { resent, ..asked(ticket, &path, tokens, answer) });
            self.sent.push((ticket, tokens));
            assert!(self.bench.engine.memory_taken() <= Tokens(3_000));
            assert!(self.bench.engine.memory_in_use() <= self.bench.engine.memory_taken());
        }
        self.bench.until(now + 10_000.0);
        self
    }
}

#[test]
fn everything_is_answered_once_in_order_and_nothing_is_left_behind() {
    for seed in 1..6 {
        let soak = Soak::of(seed, if seed % 2 == 0 { 2_000 } else { 0 }).run(seed);
        let bench = &soak.bench;
        let engine = &bench.engine;
        assert_eq!((engine.memory_in_use(), *engine.load()), (Tokens::ZERO, Load::default()));
        assert_eq!((engine.queued(), engine.batch(), engine.is_prefilling()), (0, (0, 0), false));
        let count = |is: fn(&Happening) -> bool| bench.said.iter().filter(|(_, said)| is(said)).count();
        assert_eq!(count(|said| matches!(said, Happening::Started(_))), 300);
        assert_eq!(count(|said| matches!(said, Happening::FirstToken(_))), 300);
        assert_eq!(count(|said| matches!(said, Happening::Finished(_))), 300);
        assert!(bench.said.windows(2).all(|pair| pair[0].0 <= pair[1].0), "time never goes back");
        let begun: Vec<u32> = bench.said.iter().filter_map(|(_, said)| begun(said)).collect();
        assert!(begun.windows(2).all(|pair| pair[0] < pair[1]), "prompts begin in the order in which they came");
        assert!(engine.evicted() > Tokens(3_000), "the memory is too large for this test");
    }
}

fn begun(said: &Happening) -> Option<u32> {
    match said {
        Happening::Started(started) => Some(started.ticket.0),
        _ => None,
    }
}

#[test]
fn what_is_found_and_what_is_computed_is_the_prompt() {
    let soak = Soak::of(9, 2_000).run(9);
    let mut restored = 0;
    for (ticket, tokens) in &soak.sent {
        let [local, fetched, from_host, computed] = soak.bench.started(*ticket);
        let found = local + fetched + from_host;
        // A prompt that is there to its last token still computes one.
        assert_eq!(computed, tokens.saturating_sub(found).max(1));
        assert!(found <= *tokens && fetched == 0);
        restored += from_host;
    }
    assert!(restored > 0, "nothing came from the host tier");
}

#[test]
fn no_prompt_is_quicker_than_alone() {
    let soak = Soak::of(4, 0).run(4);
    for (ticket, _) in &soak.sent {
        let [local, .., computed] = soak.bench.started(*ticket);
        let took = soak.bench.first_token(*ticket) - soak.bench.at(|said| begun(said) == Some(*ticket));
        assert!(took >= TIMING.prefill(Tokens(computed), Tokens(local)) - 1e-6);
        assert!(soak.bench.finished(*ticket) > soak.bench.first_token(*ticket));
    }
}

#[test]
fn the_same_traffic_is_the_same_to_the_bit() {
    let [once, again] = [(); 2].map(|()| Soak::of(5, 1_000).run(5).bench.said);
    assert_eq!(once, again);
}

#[test]
fn it_does_not_matter_how_often_one_looks() {
    let mut runs = Runs::default();
    let paths = [chain(&mut runs, &[700]), chain(&mut runs, &[900])];
    let told = |step: f64| {
        let mut bench = Bench::new(runs.clone(), TIMING, sizes(10_000, 0));
        bench.submit(asked(1, &paths[0], 700, 90));
        bench.submit(asked(2, &paths[1], 900, 50));
        let mut now = 0.0;
        while now < 20.0 {
            now += step;
            bench.until(now);
        }
        [1, 2].map(|ticket| (bench.first_token(ticket), bench.finished(ticket)))
    };
    for (seldom, often) in told(20.0).iter().zip(told(0.013)) {
        near(often.0, seldom.0);
        near(often.1, seldom.1);
    }
}

#[test]
fn what_is_lent_stays_until_it_was_sent() {
    let mut runs = Runs::default();
    let (a, b) = (chain(&mut runs, &[500, 400]), chain(&mut runs, &[900]));
    let mut bench = Bench::new(runs, TIMING, sizes(1_000, 0));
    bench.submit(asked(1, &a, 900, 1));
    bench.until(10.0);
    bench.engine.lend(&bench.runs, &a);
    bench.submit(asked(2, &b, 900, 1));
    bench.until(20.0);
    assert_eq!(bench.engine.queued(), 1, "there is no room beside what is lent");
    bench.engine.lent(&bench.runs, &a);
    assert_eq!(bench.engine.evicted(), Tokens::ZERO);
    bench.happen();
    bench.until(30.0);
    assert!(bench.finished(2) > 20.0);
    assert_eq!(bench.engine.evicted(), Tokens(900), "now it makes room");
}

#[test]
fn an_answer_without_room_elsewhere_is_given_where_its_prompt_is() {
    let mut runs = Runs::default();
    let path = chain(&mut runs, &[300]);
    let mut bench = Bench::new(runs, TIMING, sizes(1_000, 0));
    bench.submit(Prompt { answered: Where::Elsewhere, ..asked(1, &path, 310, 20) });
    let expected = bench.engine.load().context;
    bench.engine.expect_no_more(Tokens(310));
    bench.engine.expect_arrival();
    assert_eq!((expected, bench.engine.load().context), (Tokens(310), Tokens(0)));
    bench.until(5.0);
    let Some((_, Happening::Prefilled(prefilled))) = bench.said.pop() else { panic!("it is computed") };
    bench.engine.answer_here(prefilled);
    bench.until(10.0);
    bench.finished(1);
    assert_eq!((bench.engine.memory_in_use(), *bench.engine.load()), (Tokens::ZERO, Load::default()));
}

#[test]
fn what_is_lent_from_slower_tiers_is_read_first_one_after_the_other() {
    let mut runs = Runs::default();
    let (a, b) = (chain(&mut runs, &[500, 400]), chain(&mut runs, &[900]));
    let mut bench = Bench::new(runs, TIMING, sizes(1_000, 5_000));
    bench.submit(asked(1, &a, 900, 1));
    bench.until(10.0);
    bench.submit(asked(2, &b, 900, 1));
    bench.until(20.0);
    let lent = bench.engine.lend(&bench.runs, &b);
    assert_eq!((lent.kept, lent.loads), (b.to_vec(), 0.0));
    // Both runs of the first prompt fell into the host tier, which gives 10,000 tokens a second.
    let lent = bench.engine.lend(&bench.runs, &a);
    assert_eq!(lent.kept, []);
    near(lent.loads, 0.09);
    near(bench.engine.lend(&bench.runs, &a).loads, 0.18);
}
