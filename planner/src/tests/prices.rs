//! Each cost term, computed by hand. A token takes 100 us to compute, 10 us to move, and 100,000 bytes of memory.

use vocabulary::Micros;

use super::terms;
use crate::*;

use Action::{ArtifactFetch, ColocatedPrefill, RemotePrefill, StateMigration};

#[test]
fn idle_worker_costs_missing_tokens_and_the_first_decode_step() {
    let price = terms("worker a hybrid holds=50", ColocatedPrefill, "a");
    assert_eq!(price, CostTerms { compute: Micros(800 * 100), restore: Micros(20_000), ..CostTerms::default() });
    assert_eq!(price.total(), Micros(100_000));
}

#[test]
fn queue_time_is_backlog_plus_half_the_step_in_flight() {
    let queue = |load: &str| terms(&format!("worker a hybrid {load}"), ColocatedPrefill, "a").queue.0;
    assert_eq!(queue("backlog=3000"), 300_000);
    assert_eq!(queue("running=4"), 12_000, "half a step of four");
    assert_eq!(queue("running=4 waiting=2"), 12_000, "what waits joins together, and is in the backlog");
    assert_eq!(queue("running=4 waiting=2 backlog=3000"), 312_000);
}

#[test]
fn first_decode_step_grows_with_the_batch() {
    assert_eq!(terms("worker a hybrid running=10", ColocatedPrefill, "a").restore, Micros(30_000));
}

#[test]
fn blocks_in_lower_tiers_load_at_their_tier_rate() {
    // 1,584 tokens x 100,000 bytes at 20 GB/s and 3 GB/s.
    let restore = |held: &str| terms(&format!("worker a hybrid {held}"), ColocatedPrefill, "a").restore.0 - 20_000;
    assert_eq!(restore("host=99"), 7_920);
    assert_eq!(restore("disk=99"), 52_800);
    assert_eq!(restore("holds=99 host=99 disk=99"), 0, "what device memory has need not be read");
    assert_eq!(restore("holds=49 host=99"), 4_000);
    assert_eq!(restore("holds=19 host=49 disk=99"), 2_400 + 26_666);
}

#[test]
fn invalid_tier_rate_makes_its_blocks_useless_rather_than_free() {
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let mut scene = super::PlanningScene::read("worker a hybrid host=99\n worker b hybrid");
        scene.policy.tiers.host_bandwidth = rate;
        let plan = scene.plan().plan;
        assert_eq!(scene.name(plan.target()), "b", "{rate}");
    }
}

#[test]
fn decode_interference_is_lost_time_weighted_by_mu() {
    // Ten answers wait for 1,600 tokens to be computed, then lose 1 ms per token for 50 tokens: they run for half of
    // the 100.
    let (delays, slowdown) = (10.0 * 160_000.0, 10.0 * 50_000.0);
    let at = |mu: &str| terms(&format!("policy mu={mu}\n worker a hybrid running=10"), ColocatedPrefill, "a");
    assert_eq!(at("1").interference, Micros((delays + slowdown) as u64));
    assert_eq!(at("3").interference, Micros((3.0 * (delays + slowdown)) as u64));
    // 160 ms of compute: 0.16 / 1.16, about a seventh, of the way from mu to full weight.
    let weight = 0.25 + 0.75 * 0.16 / 1.16;
    assert_eq!(at("0.25").interference, Micros((weight * delays + 0.25 * slowdown) as u64));
    for off in ["0", "-1", "NaN", "inf"] {
        assert_eq!(at(off).interference, Micros(0), "mu={off}");
    }
}

#[test]
fn memory_cost_is_duplicated_and_displaced_bytes_weighted_by_lambda() {
    // lambda = 1,048,576 us per MiB: one microsecond per byte.
    let at = |lines: &str| terms(&format!("policy lambda=1048576\n {lines}"), ColocatedPrefill, "b").memory.0;
    assert_eq!(at("worker b hybrid"), 0, "an empty memory displaces nothing");
    assert_eq!(at("worker b hybrid\n worker a hybrid holds=50"), 800 * 100_000);
    assert_eq!(at("worker b hybrid holds=30\n worker a hybrid holds=50"), 320 * 100_000);
    assert_eq!(at("worker b hybrid holds=50\n worker a hybrid holds=30"), 0);
    assert_eq!(at("worker b hybrid holds=50 usage=0.5"), (800 + 100) * 50_000, "prompt and answer, by half");
    assert_eq!(at("worker b hybrid usage=NaN"), at("worker b hybrid usage=1"), "unknown is full");
    assert_eq!(at("worker b hybrid usage=7"), at("worker b hybrid usage=1"));
    let moved = "session owner=a sealed=50\n worker a hybrid holds=50 health=draining";
    assert_eq!(at(&format!("{moved}\n worker b hybrid")), 0, "after a move the old copy is nobody's");
}

#[test]
fn fetch_costs_link_time_and_a_decode_step_at_each_end() {
    let scene = "policy lambda=0
         session owner=a sealed=99
         worker a hybrid holds=99 running=10
         worker b hybrid holds=9";
    let price = terms(scene, ArtifactFetch, "b");
    assert_eq!(price.network.0, 10_000 + 90 * 16 * 10 + 30_000 + 20_000);
    assert_eq!(price.queue.0, 15_000, "half of the source's step in flight");
    assert_eq!(price.compute.0, 16 * 100);
    assert_eq!(price.restore.0, 20_000);
    assert_eq!(price.interference.0, 0, "the source computes nothing and the target has no batch");
}

#[test]
fn source_recomputes_tokens_it_may_have_lost() {
    let scene = |knows: &str| {
        format!("session owner=a sealed=99\n worker a hybrid holds=99 health=draining knows={knows}\n worker b hybrid")
    };
    let exact = terms(&scene("exact"), StateMigration, "b").compute.0;
    let degraded = terms(&scene("degraded"), StateMigration, "b").compute.0;
    assert_eq!((exact, degraded), (1_600, 1_600 + (1_584 - 1_424) * 100));
}

#[test]
fn remote_prefill_costs_compute_at_the_source_and_missing_bytes_on_the_link() {
    let scene = "policy lambda=0
         worker p prefill holds=50
         worker d decode holds=20 running=10";
    let price = terms(scene, RemotePrefill, "d");
    assert_eq!(price.compute.0, 800 * 100);
    assert_eq!(price.network.0, 10_000 + (1_600 - 320) * 10 + 20_000);
    assert_eq!(price.queue.0, 0, "the target's step of 30 ms is over before the prompt is computed");
    assert_eq!(price.restore.0, 30_000);
    assert_eq!(price.interference.0, (10 * 50 * 1_000) / 4, "only the answer slows the batch");
}

#[test]
fn target_queue_drains_while_the_source_computes() {
    let queue = |source: u64, target: u64| {
        let scene = format!("worker p prefill backlog={source} holds=50\n worker d decode backlog={target}");
        terms(&scene, RemotePrefill, "d").queue.0
    };
    assert_eq!(queue(500, 0), 50_000);
    assert_eq!(queue(500, 1_300), 50_000, "130 ms, all of it while 80 ms are computed");
    assert_eq!(queue(500, 1_500), 70_000);
}

#[test]
fn prefill_worker_causes_no_decode_interference() {
    let price = terms("policy mu=1\n worker p prefill running=50\n worker d decode", RemotePrefill, "d");
    assert_eq!(price.interference, Micros(0));
}

#[test]
fn later_tokens_cost_more_with_quadratic_attention() {
    let compute = |doubles: u64, held: u64| {
        terms(&format!("policy doubles={doubles}\n worker a hybrid holds={held}"), ColocatedPrefill, "a").compute.0
    };
    assert_eq!(compute(0, 0), 160_000);
    // The token at 1,600 costs twice the first, so the tokens cost 1.5 times as much on average.
    assert_eq!(compute(1_600, 0), 240_000);
    assert_eq!(compute(1_600, 50), 80_000 + 60_000, "the second half has three quarters of the surcharge");
}

#[test]
fn unknown_prefill_rate_uses_the_policy_default_or_the_slowest() {
    let mut scene = super::PlanningScene::read("worker a hybrid rate=0");
    assert_eq!(scene.plan().plan.rationale.cost_terms.compute.0, 1_600 * 500);
    for broken in [0.0, f64::NAN, -3.0] {
        scene.policy.default_prefill_tokens_per_second = broken;
        assert_eq!(scene.plan().plan.rationale.cost_terms.compute.0, 1_600 * 1_000_000);
    }
}

#[test]
fn faster_worker_wins_over_cached_prefix() {
    super::check(
        "session owner=a sealed=99
         ask prompt=30000
         worker a hybrid holds=99
         worker b hybrid rate=50000 holds=99",
        "colocated_prefill at b 1584+28416, read_replica",
    );
}

#[test]
fn runner_up_is_the_cheapest_rejected_candidate() {
    let scene = super::PlanningScene::read("worker a hybrid holds=99\n worker b hybrid holds=50\n worker c hybrid");
    let rationale = scene.plan().plan.rationale;
    let next = rationale.runner_up.unwrap();
    assert_eq!((scene.name(next.worker), rationale.total_cost < next.total_cost), ("b", true));
    assert_eq!(super::PlanningScene::read("worker a hybrid").plan().plan.rationale.runner_up, None);
}
