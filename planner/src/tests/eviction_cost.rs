//! Eviction cost: whose KV is evicted, and whether that is worth it. A token takes 100 us to compute; with a return
//! chance of 1 and the policy's weight of 0.7, a victim's token costs 70 us.

use vocabulary::*;

use super::{PlanningScene, id, is_local_to};
use crate::*;

/// Two workers; neither has the prompt cached unless a test adds it.
const TWO: &str = "policy lambda=0 mu=0\n worker a hybrid kv=20000\n worker b hybrid kv=20000";

fn rank_of(name: &str) -> Owner {
    Owner { worker: id(name), incarnation: Incarnation(1), rank: DpRank(0) }
}

impl PlanningScene {
    /// Adds a session whose step at a worker ended `ago` seconds before now.
    pub(super) fn add_resident(&mut self, session: u128, name: &str, tokens: u64, ago: u64) {
        self.now = self.now.max(Micros(3_600_000_000));
        let end = Micros(self.now.0 - ago * 1_000_000);
        let footprint = StepFootprint { tokens: Tokens(tokens), cached: Tokens::ZERO, capacity: Tokens(20_000) };
        self.occupancy.step_started(rank_of(name), SessionId(session), footprint, end);
        self.occupancy.step_ended(rank_of(name), SessionId(session), Tokens(tokens), end);
    }

    fn eviction_cost(&self, name: &str) -> u64 {
        let found = self.plan().candidates.into_iter().find(|c| is_local_to(c, name));
        found.unwrap().cost_terms.eviction.0
    }

    fn target(&self) -> String {
        self.name(self.plan().plan.target()).to_owned()
    }
}

fn scene(more: &str) -> PlanningScene {
    let mut scene = PlanningScene::read(&format!("{more}\n{TWO}"));
    scene.policy.max_session_growth_tokens = Tokens::ZERO;
    scene
}

#[test]
fn free_memory_has_no_eviction_cost() {
    let mut scene = scene("");
    scene.add_resident(7, "a", 18_300, 1);
    assert_eq!(scene.eviction_cost("a"), 0, "prompt and answer are 1,700 tokens");
    scene.add_resident(8, "a", 18_400, 1);
    assert!(scene.eviction_cost("a") > 0);
}

#[test]
fn eviction_cost_is_recompute_time_weighted_by_return_probability() {
    let price = |ago| {
        let mut scene = scene("");
        scene.add_resident(7, "a", 20_000, ago);
        scene.eviction_cost("a")
    };
    // 1,700 tokens x 100 us x 0.7 x 1.5 (half an answer is delayed), with a chance below 1.
    assert!((120_000..179_000).contains(&price(1)), "{}", price(1));
    assert!(price(1) > price(100) && price(100) > price(500) && price(3_000) == 0);
}

#[test]
fn copy_of_a_departed_session_has_no_eviction_cost() {
    let mut scene = scene("");
    scene.add_resident(7, "a", 20_000, 1);
    scene.occupancy.session_moved(rank_of("a"), SessionId(7));
    assert_eq!(scene.eviction_cost("a"), 0);
}

#[test]
fn new_session_goes_to_the_worker_with_free_memory() {
    for (full, free) in [("a", "b"), ("b", "a")] {
        let mut scene = scene("");
        scene.add_resident(7, full, 20_000, 5);
        assert_eq!(scene.target(), free);
    }
}

#[test]
fn full_fleet_evicts_the_session_least_likely_to_return() {
    let mut scene = scene("");
    scene.add_resident(7, "a", 20_000, 500);
    scene.add_resident(8, "b", 20_000, 5);
    assert_eq!(scene.target(), "a");
}

#[test]
fn growth_is_expected_only_where_the_session_is_new() {
    let mut scene = scene("session id=1");
    scene.add_resident(7, "a", 17_000, 5);
    assert_eq!(scene.eviction_cost("a"), 0);
    scene.policy.max_session_growth_tokens = Tokens(2_300);
    let grown = scene.eviction_cost("a");
    scene.policy.max_session_growth_tokens = Tokens(100_000);
    assert!(scene.eviction_cost("a") > grown && grown > 0);
    assert!(scene.eviction_cost("a") < 2_500 * 70, "by an eighth of the memory at most");
    scene.add_resident(1, "a", 1_000, 5);
    assert_eq!(scene.eviction_cost("a"), 0);
}

#[test]
fn eviction_cost_never_falls_with_more_tokens() {
    let mut scene = scene("");
    (0..40).for_each(|n| scene.add_resident(10 + n, "a", 500, 400 - 10 * n as u64));
    let mut before = 0;
    for prompt in (0..18_000).step_by(500) {
        scene.ask.prompt_tokens = Tokens(prompt);
        let price = scene.eviction_cost("a");
        assert!(price >= before, "{prompt} tokens cost {price}, fewer cost {before}");
        before = price;
    }
    // Victims beyond those examined count as the average of these, not as missing.
    assert!(before < 18_000 * 100, "{before}");
}

#[test]
fn unevictable_memory_makes_waiting_expensive() {
    let mut scene = scene("");
    let footprint = StepFootprint { tokens: Tokens(20_000), cached: Tokens::ZERO, capacity: Tokens(20_000) };
    scene.occupancy.step_started(rank_of("a"), SessionId(7), footprint, Micros(1));
    assert_eq!(scene.eviction_cost("a"), 1_700 * 100 * 20 * 7 / 10);
    assert_eq!(scene.target(), "b");
}

#[test]
fn rewritten_history_evicts_its_own_stale_kv_first() {
    // 1,700 tokens, with 1,000 or none free.
    let at_home = |others: &[(u64, u64)]| {
        let mut scene = scene("session id=1");
        scene.add_resident(1, "a", 19_000, 30);
        (7..).zip(others).for_each(|(session, (tokens, ago))| scene.add_resident(session, "a", *tokens, *ago));
        scene
    };
    assert_eq!(at_home(&[]).eviction_cost("a"), 0, "its own old KV goes, and nobody misses it");
    assert_eq!(at_home(&[(1_000, 10)]).eviction_cost("a"), 0, "before that of who was there later");
    let costs = at_home(&[(1_000, 50)]).eviction_cost("a");
    assert!((1..1_000 * 70).contains(&costs), "the engine drops what is older first: {costs}");
    let alone = at_home(&[]);
    assert_eq!(displaced_compute(&alone.inputs(), &alone.plan()), Micros::ZERO, "nor does it wait for anybody");
}

#[test]
fn returning_victims_cost_more_at_a_busy_worker() {
    let price = |active: u128| {
        let mut scene = scene("");
        scene.add_resident(7, "a", 20_000, 90);
        (0..active).for_each(|n| scene.add_resident(10 + n, "a", 1, 1));
        scene.eviction_cost("a") as f64
    };
    assert!((price(4) / price(0) - 3.0).abs() < 0.02, "two of four are answered at a time");
    assert!((price(100) / price(0) - 5.0).abs() < 0.03, "four at most");
}

#[test]
fn interference_counts_prompts_that_arrive_during_compute() {
    let mut scene = scene("");
    scene.policy.interference_weight = 1.0;
    scene.workers[0].load.backlog = Tokens(1_000);
    let price = |scene: &PlanningScene| {
        let found = scene.plan().candidates.into_iter().find(|c| is_local_to(c, "a"));
        found.unwrap().cost_terms.interference.0
    };
    assert_eq!(price(&scene), 0);
    // Sixty prompts of negligible compute: two per second.
    (0..60).for_each(|_| scene.occupancy.prefill_started(rank_of("a"), Micros(0), scene.now));
    // 100 ms of queue and 160 ms of compute: half a prompt arrives meanwhile and waits for 160 ms, times 1.5.
    assert_eq!(price(&scene), (160_000.0 * 1.5 * 2.0 * 0.26) as u64);
    scene.now += Micros(30_000_000);
    assert_eq!(price(&scene) * 1_000 / 124_800, 367, "after half a minute e times less");
}

#[test]
fn answer_costs_more_under_steady_prefill_load() {
    let mut scene = scene("");
    scene.policy.interference_weight = 1.0;
    let before = scene.plan().plan.rationale.cost_terms.interference;
    // Prefill takes half of the time; an answer loses nine tenths of that, so it takes 1 / 0.55 times as long.
    scene.occupancy.prefill_started(rank_of("a"), Micros(15_000_000), scene.now);
    let candidates = scene.plan().candidates;
    let at = |name| candidates.iter().find(|c| is_local_to(c, name)).unwrap();
    let delayed = 1.5 * 160_000.0 * 0.16 / 30.0;
    let stalled = 100.0 * 20_000.0 * 0.45 / 0.55;
    assert_eq!(before, Micros::ZERO);
    assert_eq!(at("a").cost_terms.interference, Micros((stalled + delayed) as u64));
    assert_eq!(at("b").cost_terms.interference, Micros::ZERO);
}

#[test]
fn unknown_capacity_or_invalid_weight_has_no_eviction_cost() {
    for odd in [0.0, -1.0, f64::NAN] {
        let mut scene = scene("");
        scene.add_resident(7, "a", 20_000, 1);
        scene.policy.eviction_weight = odd;
        assert_eq!(scene.eviction_cost("a"), 0, "{odd}");
    }
    let mut scene = PlanningScene::read("worker a hybrid");
    scene.add_resident(7, "a", 20_000, 1);
    assert_eq!(scene.eviction_cost("a"), 0);
}

#[test]
fn transfer_cost_includes_link_risk() {
    let network = |risk| {
        let scene = "policy lambda=0\n session owner=a sealed=99\n worker a hybrid holds=99 running=10\n worker b hybrid holds=9";
        let mut scene = PlanningScene::read(scene);
        scene.policy.transfer = risk;
        let fetch =
            scene.plan().candidates.into_iter().find(|c| c.sequence.target() == id("b") && c.sequence.has_handoff());
        fetch.unwrap().cost_terms.network.0
    };
    let none = network(TransferTimeMargin { fixed_overhead: Micros::ZERO, proportional_overhead: 0.0 });
    assert_eq!(network(TransferTimeMargin { fixed_overhead: Micros(7), proportional_overhead: 0.0 }), none + 7);
    assert_eq!(
        network(TransferTimeMargin { fixed_overhead: Micros::ZERO, proportional_overhead: 0.5 }),
        none + 90 * 16 * 10 / 2
    );
    assert_eq!(network(TransferTimeMargin { fixed_overhead: Micros::ZERO, proportional_overhead: f64::NAN }), none);
}

#[test]
fn source_that_sends_at_once_adds_no_queue_time() {
    let terms = |sources| {
        let mut scene = PlanningScene::read(
            "policy lambda=0
             session owner=a sealed=99
             worker a hybrid holds=99 backlog=5000
             worker b hybrid backlog=1000",
        );
        scene.policy.replicate_dispatch = sources;
        let fetch =
            scene.plan().candidates.into_iter().find(|c| c.sequence.target() == id("b") && c.sequence.has_handoff());
        fetch.unwrap().cost_terms
    };
    assert_eq!(terms(ReplicateSendTiming::Queued).queue.0, 500_000);
    let at_once = terms(ReplicateSendTiming::Immediate);
    assert_eq!((at_once.queue + at_once.network).0, 100_000, "the target's queue drains while the KV comes");
}

#[test]
fn recorded_rank_memory_replays_eviction_costs() {
    let mut scene = PlanningScene::read("policy lambda=0 mu=0\n worker a hybrid kv=20000");
    (1..8).for_each(|session| scene.add_resident(session, "a", 2_800, u64::try_from(session).unwrap()));
    let decision = scene.plan();
    let evicted = |decision: &Decision| decision.plan.rationale.cost_terms.eviction;
    assert!(evicted(&decision) > Micros::ZERO);
    let recorded = scene.occupancy.recorded_memory(&scene.inputs(), &decision);
    // 400 tokens are free; the step needs 1,700 and may grow by 2,500, which reaches the first two of seven victims.
    assert_eq!(
        (recorded.len(), recorded[0].free_tokens, recorded[0].eviction_candidates.len()),
        (1, Tokens(400), 2),
        "{recorded:?}"
    );
    scene.occupancy = OccupancyModel::from_recorded(&recorded);
    assert_eq!(scene.plan(), decision);
    assert_eq!(scene.occupancy.recorded_memory(&scene.inputs(), &decision), recorded, "it says the same again");
    scene.occupancy = OccupancyModel::from_recorded(&[]);
    assert_eq!(evicted(&scene.plan()), Micros::ZERO);
}

#[test]
fn kv_evicted_to_the_host_tier_is_reloaded_by_its_retention_share() {
    let price = |tiers: LowerTiers| {
        let mut scene = scene("");
        scene.policy.tiers = tiers;
        scene.add_resident(7, "a", 20_000, 1);
        scene.eviction_cost("a")
    };
    let computed = price(LowerTiers::default());
    // The 100,000 bytes of a token take 5 us to load at 20 GB/s and 100 us to compute. A host tier as large as device
    // memory keeps half.
    let half = price(LowerTiers { host_tokens: Tokens(20_000), ..LowerTiers::default() });
    assert!(half.abs_diff(computed * (5 + 100) / 200) <= 1, "{half} for {computed}");
    let all = price(LowerTiers { host_tokens: Tokens(20_000_000_000), ..LowerTiers::default() });
    assert!(all.abs_diff(computed / 20) <= 1, "{all} for {computed}");
    for broken in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let tiers = LowerTiers { host_tokens: Tokens(20_000), host_bandwidth: broken, ..LowerTiers::default() };
        assert_eq!(price(tiers), computed, "{broken}");
    }
    let slow = LowerTiers { host_tokens: Tokens(20_000), host_bandwidth: 1.0, ..LowerTiers::default() };
    assert_eq!(price(slow), computed, "nobody loads what is computed sooner");
}

#[test]
fn restored_tokens_need_device_memory_like_computed_ones() {
    let price = |holds: &str| {
        let mut scene = PlanningScene::read(&format!("policy lambda=0 mu=0\n worker a hybrid kv=20000 {holds}"));
        scene.policy.max_session_growth_tokens = Tokens::ZERO;
        scene.add_resident(7, "a", 20_000, 1);
        scene.eviction_cost("a")
    };
    assert_eq!([price("host=99"), price("disk=99")], [price(""); 2]);
    assert_eq!(price("holds=50 host=99"), price("holds=50"));
    assert!(price("holds=99") < price("holds=50") && price("holds=50") < price(""));
}

#[test]
fn source_pays_to_load_lower_tiers_and_the_target_does_not() {
    let terms = |sources, holds: [&str; 2]| {
        let mut scene = PlanningScene::read(&format!(
            "policy lambda=0\n session owner=a sealed=99\n worker a hybrid {}\n worker b hybrid {}",
            holds[0], holds[1]
        ));
        scene.policy.replicate_dispatch = sources;
        let fetch =
            scene.plan().candidates.into_iter().find(|c| c.sequence.target() == id("b") && c.sequence.has_handoff());
        fetch.unwrap().cost_terms
    };
    for sources in [ReplicateSendTiming::Immediate, ReplicateSendTiming::Queued] {
        let from_device = terms(sources, ["holds=99", ""]);
        let from_host = terms(sources, ["host=99", ""]);
        // 1,584 tokens x 100,000 bytes at 20 GB/s.
        assert_eq!(from_host.restore, from_device.restore + Micros(7_920), "{sources:?}");
        assert_eq!(from_host.network, from_device.network);
        assert_eq!(terms(sources, ["holds=99", "host=50"]), from_device, "{sources:?}: the target is sent all of it");
    }
}
