//! What memory costs: who is pushed out, and whether that is worth it. A token takes 100 us to compute; at a chance of 1
//! and the policy's 0.7 a victim's token costs 70 us.

use vocabulary::*;

use super::{Scene, id};
use crate::*;

/// A worker that holds the scene's prompt beside one that does not.
const TWO: &str = "policy lambda=0 mu=0\n worker a hybrid kv=20000\n worker b hybrid kv=20000";

fn rank_of(name: &str) -> Owner {
    Owner { worker: id(name), incarnation: Incarnation(1), rank: DpRank(0) }
}

impl Scene {
    /// A session that had a step at a worker which ended so many seconds before now.
    pub(super) fn tenant(&mut self, session: u128, name: &str, tokens: u64, ago: u64) {
        self.now = self.now.max(Micros(3_600_000_000));
        let end = Micros(self.now.0 - ago * 1_000_000);
        let stay = Stay { tokens: Tokens(tokens), found: Tokens::ZERO, capacity: Tokens(20_000) };
        self.tenancy.begins(rank_of(name), SessionId(session), stay, end);
        self.tenancy.ends(rank_of(name), SessionId(session), Tokens(tokens), end);
    }

    fn eviction(&self, name: &str) -> u64 {
        let found = self.plan().candidates.into_iter().find(|c| c.decode.worker == id(name) && c.handoff.is_none());
        found.unwrap().terms.eviction.0
    }

    fn target(&self) -> String {
        self.name(self.plan().plan.target()).to_owned()
    }
}

fn scene(more: &str) -> Scene {
    let mut scene = Scene::read(&format!("{more}\n{TWO}"));
    scene.policy.growth = Tokens::ZERO;
    scene
}

#[test]
fn room_that_nobody_has_costs_nothing() {
    let mut scene = scene("");
    scene.tenant(7, "a", 18_300, 1);
    assert_eq!(scene.eviction("a"), 0, "prompt and answer are 1,700 tokens");
    scene.tenant(8, "a", 18_400, 1);
    assert!(scene.eviction("a") > 0);
}

#[test]
fn what_is_pushed_out_costs_its_computing_by_the_chance_that_it_is_wanted_soon() {
    let price = |ago| {
        let mut scene = scene("");
        scene.tenant(7, "a", 20_000, ago);
        scene.eviction("a")
    };
    // 1,700 tokens x 100 us x 0.7, half an answer held up besides, by a chance of less than 1.
    assert!((120_000..179_000).contains(&price(1)), "{}", price(1));
    assert!(price(1) > price(100) && price(100) > price(500) && price(3_000) == 0);
}

#[test]
fn a_copy_whose_session_moved_away_costs_nothing() {
    let mut scene = scene("");
    scene.tenant(7, "a", 20_000, 1);
    scene.tenancy.leaves(rank_of("a"), SessionId(7));
    assert_eq!(scene.eviction("a"), 0);
}

#[test]
fn a_new_session_goes_where_it_pushes_nobody_out() {
    for (full, free) in [("a", "b"), ("b", "a")] {
        let mut scene = scene("");
        scene.tenant(7, full, 20_000, 5);
        assert_eq!(scene.target(), free);
    }
}

#[test]
fn and_where_all_are_full_to_who_is_missed_least() {
    let mut scene = scene("");
    scene.tenant(7, "a", 20_000, 500);
    scene.tenant(8, "b", 20_000, 5);
    assert_eq!(scene.target(), "a");
}

#[test]
fn a_session_is_expected_to_grow_where_it_is_new_and_not_at_home() {
    let mut scene = scene("session id=1");
    scene.tenant(7, "a", 17_000, 5);
    assert_eq!(scene.eviction("a"), 0);
    scene.policy.growth = Tokens(2_300);
    let grown = scene.eviction("a");
    scene.policy.growth = Tokens(100_000);
    assert!(scene.eviction("a") > grown && grown > 0);
    assert!(scene.eviction("a") < 2_500 * 70, "by an eighth of the memory at most");
    scene.tenant(1, "a", 1_000, 5);
    assert_eq!(scene.eviction("a"), 0);
}

#[test]
fn more_is_never_pushed_out_for_less() {
    let mut scene = scene("");
    (0..40).for_each(|n| scene.tenant(10 + n, "a", 500, 400 - 10 * n as u64));
    let mut before = 0;
    for prompt in (0..18_000).step_by(500) {
        scene.ask.prompt = Tokens(prompt);
        let price = scene.eviction("a");
        assert!(price >= before, "{prompt} tokens cost {price}, fewer cost {before}");
        before = price;
    }
    // Beyond those that are looked at one by one the rest counts as they do: nobody is taken for missing.
    assert!(before < 18_000 * 100, "{before}");
}

#[test]
fn where_nobody_can_be_pushed_out_the_step_waits_which_is_dear() {
    let mut scene = scene("");
    let stay = Stay { tokens: Tokens(20_000), found: Tokens::ZERO, capacity: Tokens(20_000) };
    scene.tenancy.begins(rank_of("a"), SessionId(7), stay, Micros(1));
    assert_eq!(scene.eviction("a"), 1_700 * 100 * 20 * 7 / 10);
    assert_eq!(scene.target(), "b");
}

#[test]
fn a_history_that_was_rewritten_makes_room_for_itself_at_its_worker() {
    // 1,700 tokens where 1,000 are free, or none.
    let at_home = |others: &[(u64, u64)]| {
        let mut scene = scene("session id=1");
        scene.tenant(1, "a", 19_000, 30);
        (7..).zip(others).for_each(|(session, (tokens, ago))| scene.tenant(session, "a", *tokens, *ago));
        scene
    };
    assert_eq!(at_home(&[]).eviction("a"), 0, "its own old KV goes, and nobody misses it");
    assert_eq!(at_home(&[(1_000, 10)]).eviction("a"), 0, "before that of who was there later");
    let costs = at_home(&[(1_000, 50)]).eviction("a");
    assert!((1..1_000 * 70).contains(&costs), "the engine drops what is older first: {costs}");
    let alone = at_home(&[]);
    assert_eq!(costs_others(&alone.inputs(), &alone.plan()), Micros::ZERO, "nor does it wait for anybody");
}

#[test]
fn a_busy_workers_victims_hold_more_up_when_they_come_back() {
    let price = |active: u128| {
        let mut scene = scene("");
        scene.tenant(7, "a", 20_000, 90);
        (0..active).for_each(|n| scene.tenant(10 + n, "a", 1, 1));
        scene.eviction("a") as f64
    };
    assert!((price(4) / price(0) - 3.0).abs() < 0.02, "two of four are answered at a time");
    assert!((price(100) / price(0) - 5.0).abs() < 0.03, "four at most");
}

#[test]
fn prompts_that_come_until_this_one_is_computed_wait_for_it() {
    let mut scene = scene("");
    scene.policy.mu = 1.0;
    scene.workers[0].load.backlog = Tokens(1_000);
    let price = |scene: &Scene| {
        let found = scene.plan().candidates.into_iter().find(|c| c.decode.worker == id("a") && c.handoff.is_none());
        found.unwrap().terms.interference.0
    };
    assert_eq!(price(&scene), 0);
    // Sixty prompts that took no time to speak of: two a second.
    (0..60).for_each(|_| scene.tenancy.computes(rank_of("a"), Micros(0), scene.now));
    // 100 ms of queue and 160 ms of computing: half a prompt comes meanwhile, and waits for 160 ms,
    // one and a half times.
    assert_eq!(price(&scene), (160_000.0 * 1.5 * 2.0 * 0.26) as u64);
    scene.now += Micros(30_000_000);
    assert_eq!(price(&scene) * 1_000 / 124_800, 367, "after half a minute e times less");
}

#[test]
fn an_answer_costs_more_where_prompts_keep_coming() {
    let mut scene = scene("");
    scene.policy.mu = 1.0;
    let before = scene.plan().plan.because.terms.interference;
    // Half of its time: of that an answer loses nine tenths, so that it takes 1 / 0.55 times as long.
    scene.tenancy.computes(rank_of("a"), Micros(15_000_000), scene.now);
    let candidates = scene.plan().candidates;
    let at = |name| candidates.iter().find(|c| c.decode.worker == id(name) && c.handoff.is_none()).unwrap();
    let delayed = 1.5 * 160_000.0 * 0.16 / 30.0;
    let stalled = 100.0 * 20_000.0 * 0.45 / 0.55;
    assert_eq!(before, Micros::ZERO);
    assert_eq!(at("a").terms.interference, Micros((stalled + delayed) as u64));
    assert_eq!(at("b").terms.interference, Micros::ZERO);
}

#[test]
fn an_unknown_memory_and_a_price_of_nothing_are_no_pressure() {
    for odd in [0.0, -1.0, f64::NAN] {
        let mut scene = scene("");
        scene.tenant(7, "a", 20_000, 1);
        scene.policy.eviction = odd;
        assert_eq!(scene.eviction("a"), 0, "{odd}");
    }
    let mut scene = Scene::read("worker a hybrid");
    scene.tenant(7, "a", 20_000, 1);
    assert_eq!(scene.eviction("a"), 0);
}

#[test]
fn a_transfer_is_priced_with_what_its_link_may_keep_it_waiting() {
    let network = |risk| {
        let scene = "policy lambda=0\n session owner=a sealed=99\n worker a hybrid holds=99 running=10\n worker b hybrid holds=9";
        let mut scene = Scene::read(scene);
        scene.policy.transfer = risk;
        let fetch = scene.plan().candidates.into_iter().find(|c| c.decode.worker == id("b") && c.handoff.is_some());
        fetch.unwrap().terms.network.0
    };
    let none = network(TransferRisk { fixed: Micros::ZERO, share: 0.0 });
    assert_eq!(network(TransferRisk { fixed: Micros(7), share: 0.0 }), none + 7);
    assert_eq!(network(TransferRisk { fixed: Micros::ZERO, share: 0.5 }), none + 90 * 16 * 10 / 2);
    assert_eq!(network(TransferRisk { fixed: Micros::ZERO, share: f64::NAN }), none);
}

#[test]
fn a_source_that_sends_at_once_lets_nobody_wait_for_its_queue() {
    let terms = |sources| {
        let mut scene = Scene::read(
            "policy lambda=0
             session owner=a sealed=99
             worker a hybrid holds=99 backlog=5000
             worker b hybrid backlog=1000",
        );
        scene.policy.sources = sources;
        let fetch = scene.plan().candidates.into_iter().find(|c| c.decode.worker == id("b") && c.handoff.is_some());
        fetch.unwrap().terms
    };
    assert_eq!(terms(Sources::InTurn).queue.0, 500_000);
    let at_once = terms(Sources::AtOnce);
    assert_eq!((at_once.queue + at_once.network).0, 100_000, "the target's queue drains while the KV comes");
}

#[test]
fn what_is_told_of_memory_prices_a_plan_again_and_nothing_told_prices_none() {
    let mut scene = Scene::read("policy lambda=0 mu=0\n worker a hybrid kv=20000");
    (1..8).for_each(|session| scene.tenant(session, "a", 2_800, u64::try_from(session).unwrap()));
    let decision = scene.plan();
    let evicted = |decision: &Decision| decision.plan.because.terms.eviction;
    assert!(evicted(&decision) > Micros::ZERO);
    let told = scene.tenancy.told_of(&scene.inputs(), &decision);
    // 400 tokens are free, and the step needs 1,700 and may grow by 2,500: the first two of seven are reached.
    assert_eq!((told.len(), told[0].free, told[0].victims.len()), (1, Tokens(400), 2), "{told:?}");
    scene.tenancy = Tenancy::retold(&told);
    assert_eq!(scene.plan(), decision);
    assert_eq!(scene.tenancy.told_of(&scene.inputs(), &decision), told, "it says the same again");
    scene.tenancy = Tenancy::retold(&[]);
    assert_eq!(evicted(&scene.plan()), Micros::ZERO);
}

#[test]
fn what_falls_into_a_host_tier_is_loaded_again_as_far_as_that_keeps_it() {
    let price = |tiers: Tiers| {
        let mut scene = scene("");
        scene.policy.tiers = tiers;
        scene.tenant(7, "a", 20_000, 1);
        scene.eviction("a")
    };
    let computed = price(Tiers::default());
    // A token's 100,000 bytes take 5 us at 20 GB/s, and 100 us to compute. A tier of device memory's size keeps half.
    let half = price(Tiers { host_tokens: Tokens(20_000), ..Tiers::default() });
    assert!(half.abs_diff(computed * (5 + 100) / 200) <= 1, "{half} for {computed}");
    let all = price(Tiers { host_tokens: Tokens(20_000_000_000), ..Tiers::default() });
    assert!(all.abs_diff(computed / 20) <= 1, "{all} for {computed}");
    for broken in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let tiers = Tiers { host_tokens: Tokens(20_000), host_bytes_per_second: broken, ..Tiers::default() };
        assert_eq!(price(tiers), computed, "{broken}");
    }
    let slow = Tiers { host_tokens: Tokens(20_000), host_bytes_per_second: 1.0, ..Tiers::default() };
    assert_eq!(price(slow), computed, "nobody loads what is computed sooner");
}

#[test]
fn what_comes_back_from_slower_tiers_takes_device_memory_as_what_is_computed_does() {
    let price = |holds: &str| {
        let mut scene = Scene::read(&format!("policy lambda=0 mu=0\n worker a hybrid kv=20000 {holds}"));
        scene.policy.growth = Tokens::ZERO;
        scene.tenant(7, "a", 20_000, 1);
        scene.eviction("a")
    };
    assert_eq!([price("host=99"), price("disk=99")], [price(""); 2]);
    assert_eq!(price("holds=50 host=99"), price("holds=50"));
    assert!(price("holds=99") < price("holds=50") && price("holds=50") < price(""));
}

#[test]
fn a_source_loads_what_it_sends_from_slower_tiers_and_the_target_does_not() {
    let terms = |sources, holds: [&str; 2]| {
        let mut scene = Scene::read(&format!(
            "policy lambda=0\n session owner=a sealed=99\n worker a hybrid {}\n worker b hybrid {}",
            holds[0], holds[1]
        ));
        scene.policy.sources = sources;
        let fetch = scene.plan().candidates.into_iter().find(|c| c.decode.worker == id("b") && c.handoff.is_some());
        fetch.unwrap().terms
    };
    for sources in [Sources::AtOnce, Sources::InTurn] {
        let from_device = terms(sources, ["holds=99", ""]);
        let from_host = terms(sources, ["host=99", ""]);
        // 1,584 tokens x 100,000 bytes at 20 GB/s.
        assert_eq!(from_host.restore, from_device.restore + Micros(7_920), "{sources:?}");
        assert_eq!(from_host.network, from_device.network);
        assert_eq!(terms(sources, ["holds=99", "host=50"]), from_device, "{sources:?}: the target is sent all of it");
    }
}
