//! Which worker serves, in situations that a person can judge.

use super::{PlanningScene, check, decide, id, list};
use crate::*;

/// A session of 3,000 sealed blocks whose owner has sixteen running answers, and an idle worker.
const BUSY_OWNER: &str = "
    session owner=a sealed=3000
    worker a hybrid holds=3000 running=16
    worker b hybrid";

/// A short session whose owner is draining.
const DRAINING_OWNER: &str = "
    session owner=a sealed=99
    worker a hybrid holds=99 health=draining";

#[test]
fn idle_owner_with_the_prefix_serves() {
    check(
        "session owner=a sealed=99
         worker a hybrid holds=99
         worker b hybrid",
        "colocated_prefill at a 1584+16, keep",
    );
}

#[test]
fn exact_retry_continues_at_the_owner() {
    check(
        "session owner=a sealed=99
         ask step=decode_continuation
         worker a hybrid holds=99
         worker b hybrid",
        "decode_continuation at a 1584+16, keep",
    );
}

#[test]
fn retry_without_its_owner_is_not_a_continuation() {
    check(
        "session owner=a sealed=99
         ask step=decode_continuation exclude=a
         worker a hybrid holds=99
         worker b hybrid",
        "colocated_prefill at b 0+1600, move (owner_failed_attempt)",
    );
}

#[test]
fn long_tool_output_moves_from_a_busy_decoder_with_its_prefix() {
    check(
        &format!("ask step=long_tool_output prompt=58000 {BUSY_OWNER}"),
        "artifact_fetch at b 48000+10000, 3000 blocks from a, read_replica",
    );
}

#[test]
fn small_increment_stays_at_a_busy_owner() {
    check(&format!("ask prompt=48100 {BUSY_OWNER}"), "colocated_prefill at a 48000+100, keep");
}

#[test]
fn unsealed_tokens_are_recomputed_at_the_target() {
    check(
        "session owner=a sealed=2000
         ask step=long_tool_output prompt=58000
         worker a hybrid holds=3000 running=16
         worker b hybrid",
        "tail_recompute at b 32000+26000, 2000 blocks from a, read_replica",
    );
}

#[test]
fn short_tail_behind_an_older_replica_is_recomputed() {
    check(
        "session owner=a sealed=3000
         ask prompt=50000
         worker a hybrid holds=3000 running=16
         worker b hybrid holds=2990",
        "tail_recompute at b 47840+2160, read_replica",
    );
}

#[test]
fn disabled_tail_recompute_still_serves_with_one_leg() {
    check(
        "session owner=a sealed=3000
         policy off=tail_recompute
         ask prompt=50000
         worker a hybrid holds=3000 running=16
         worker b hybrid holds=2990",
        "colocated_prefill at b 47840+2160, read_replica",
    );
}

#[test]
fn tail_recompute_covers_at_most_half_of_the_prefix() {
    // a could send 98 blocks, but that never pays over such a slow link.
    let scene = |held| {
        format!(
            "session owner=a sealed=98
             worker a hybrid holds=98 running=64
             worker b hybrid holds={held} fixed=1000000"
        )
    };
    assert_eq!(decide(&scene(48)), "colocated_prefill at b 768+832, read_replica");
    assert_eq!(decide(&scene(49)), "tail_recompute at b 784+816, read_replica");
}

#[test]
fn source_holding_the_whole_prefix_sends_it_without_a_tail() {
    // The last block of the prompt is cached too, but an engine recomputes it in any case.
    check(
        "session owner=a sealed=3000
         policy off=remote_prefill
         ask prompt=48000
         worker a hybrid holds=3000 backlog=15000
         worker c decode holds=3000 running=60
         worker b hybrid",
        "artifact_fetch at b 47984+16, 2999 blocks from c, read_replica",
    );
}

#[test]
fn owner_with_full_memory_loses_the_session() {
    let scene = |usage| {
        format!(
            "session owner=a sealed=3000
             ask prompt=58000
             worker a hybrid holds=3000 running=16 usage={usage}
             worker b hybrid"
        )
    };
    let fetch = "artifact_fetch at b 48000+10000, 3000 blocks from a, read_replica";
    assert_eq!(decide(&scene("0.94")), fetch);
    let migration = "state_migration at b 48000+10000, 3000 blocks from a, move (owner_overloaded)";
    assert_eq!(decide(&scene("0.95")), migration);
}

#[test]
fn intent_for_a_missing_rank_is_ignored() {
    let mut scene = PlanningScene::read("session promise=a:99\n worker a hybrid ranks=2");
    scene.session.peer_intents[0].rank = vocabulary::DpRank(2);
    assert_eq!(scene.plan().plan.answer_leg().cached_tokens.0, 0);
    scene.session.peer_intents[0].rank = vocabulary::DpRank(1);
    assert_eq!(scene.plan().plan.answer_leg().cached_tokens.0, 1_264);
}

#[test]
fn draining_owner_migrates_its_state() {
    check(
        &format!("{DRAINING_OWNER}\n worker b hybrid"),
        "state_migration at b 1584+16, 99 blocks from a, move (owner_draining)",
    );
}

#[test]
fn draining_worker_serves_as_a_last_resort() {
    check(DRAINING_OWNER, "colocated_prefill at a 1584+16, keep");
    check(&format!("{DRAINING_OWNER}\n worker b prefill"), "colocated_prefill at a 1584+16, keep");
}

#[test]
fn disabled_migration_becomes_a_fetch_under_the_same_owner() {
    check(
        &format!("policy off=state_migration {DRAINING_OWNER}\n worker b hybrid"),
        "artifact_fetch at b 1584+16, 99 blocks from a, read_replica",
    );
}

#[test]
fn overloaded_owner_loses_the_session() {
    check(
        "session owner=a sealed=99
         worker a hybrid holds=99 backlog=30000
         worker b hybrid",
        "colocated_prefill at b 0+1600, move (owner_overloaded)",
    );
}

#[test]
fn session_is_borrowed_between_two_overloaded_workers() {
    check(
        "session owner=a sealed=99
         worker a hybrid holds=99 backlog=60000
         worker b hybrid backlog=30000",
        "colocated_prefill at b 0+1600, read_replica",
    );
}

#[test]
fn prefill_only_owner_hands_over_to_a_decode_worker() {
    let scene = "session owner=p sealed=99
         worker p prefill holds=99
         worker d decode";
    check(scene, "remote_prefill at d 0+0, prefill at p 1584+16, move (owner_prefill_only)");
    check(
        &format!("policy off=remote_prefill\n {scene}"),
        "state_migration at d 1584+16, 99 blocks from p, move (owner_prefill_only)",
    );
}

#[test]
fn owner_that_evicted_the_prefix_loses_to_a_worker_holding_it() {
    check(
        "session owner=a sealed=99
         worker a hybrid
         worker b hybrid holds=99",
        "colocated_prefill at b 1584+16, move (owner_evicted)",
    );
}

#[test]
fn ownership_moves_to_the_worker_holding_more_of_the_prompt() {
    check(
        "session owner=a sealed=99
         worker a hybrid holds=60
         worker b hybrid holds=99",
        "colocated_prefill at b 1584+16, move (target_holds_more)",
    );
}

#[test]
fn migration_completes_the_prefix_at_the_worker_that_takes_ownership() {
    check(
        "session owner=a sealed=3000
         policy off=remote_prefill
         ask prompt=58000
         worker a hybrid holds=1600
         worker b hybrid holds=2000
         worker c decode holds=3000 running=60",
        "state_migration at b 48000+10000, 3000 blocks from c, move (target_holds_more)",
    );
}

#[test]
fn new_incarnation_of_the_owner_is_not_the_owner() {
    check("session owner=a+life sealed=99\n worker a hybrid", "colocated_prefill at a 0+1600, move (owner_gone)");
    check(
        "session owner=a+life sealed=99\n worker a hybrid knows=approximate",
        "colocated_prefill at a 0+1600, move (owner_gone)",
    );
}

#[test]
fn unreachable_or_missing_owner_counts_as_gone() {
    for owner in ["worker a hybrid holds=99 health=unreachable", "worker c prefill"] {
        check(
            &format!("session owner=a sealed=99\n {owner}\n worker b hybrid"),
            "colocated_prefill at b 0+1600, move (owner_gone)",
        );
    }
}

#[test]
fn long_new_prompt_is_prefilled_away_from_a_busy_decoder() {
    check(
        "ask step=new_long_prefix prompt=16000
         worker p prefill
         worker d decode running=8",
        "remote_prefill at d 0+0, prefill at p 0+16000, claim",
    );
}

#[test]
fn idle_decoder_prefills_instead_of_waiting_for_a_transfer() {
    check(
        "ask step=new_long_prefix prompt=16000
         worker p prefill
         worker d decode",
        "colocated_prefill at d 0+16000, claim",
    );
}

#[test]
fn decoder_prefills_small_increments_itself() {
    check(
        "session owner=d sealed=990
         ask prompt=16000
         worker p prefill
         worker d decode holds=990 running=8",
        "colocated_prefill at d 15840+160, keep",
    );
}

#[test]
fn remote_prefill_prefers_the_worker_with_the_prefix() {
    check(
        "ask step=new_long_prefix prompt=32000
         worker p prefill
         worker q prefill holds=1000
         worker d decode running=8",
        "remote_prefill at d 0+0, prefill at q 16000+16000, claim",
    );
}

#[test]
fn hybrid_worker_may_prefill_for_others_and_a_decode_worker_may_not() {
    let with = |role: &str| {
        format!(
            "ask step=new_long_prefix prompt=16000
             worker a {role} kv=16050
             worker d decode running=8"
        )
    };
    // a is too small for the answer, so it is never a target; only the prefill role needs no room for the answer.
    assert_eq!(decide(&with("prefill")), "remote_prefill at d 0+0, prefill at a 0+16000, claim");
    assert_eq!(decide(&with("decode")), "colocated_prefill at d 0+16000, claim");
    let hybrid = list("worker a hybrid\n worker d decode");
    assert!(hybrid.contains(&"remote_prefill at d 0+0, prefill at a 0+1600, claim".to_owned()), "{hybrid:#?}");
    assert!(!hybrid.iter().any(|line| line.contains("prefill at d 0+1600, claim") && line.contains("remote")));
}

#[test]
fn request_that_forbids_transfers_gets_only_local_candidates() {
    assert_eq!(
        list(&format!("ask prompt=58000 transfers=no {BUSY_OWNER}")),
        ["colocated_prefill at a 48000+10000, keep", "colocated_prefill at b 0+58000, read_replica"]
    );
}

#[test]
fn disabled_actions_are_listed_but_never_chosen() {
    let scene = format!("policy off=artifact_fetch off=remote_prefill\n ask prompt=58000 {BUSY_OWNER}");
    assert_eq!(
        list(&scene),
        [
            "colocated_prefill at a 48000+10000, keep",
            "remote_prefill at a: action_disabled",
            "colocated_prefill at b 0+58000, read_replica",
            "artifact_fetch at b: action_disabled",
            "remote_prefill at b: action_disabled",
        ]
    );
    // A second of compute at the owner is a noticeable stall for its answers.
    assert_eq!(decide(&scene), "colocated_prefill at b 0+58000, read_replica");
}

#[test]
fn next_best_source_sends_around_a_disabled_link() {
    let scene = |barred: &str| {
        format!(
            "policy off=remote_prefill {barred}
             session owner=a sealed=990
             ask prompt=15900
             worker a hybrid holds=990 health=draining backlog=9000
             worker c decode holds=990 health=draining
             worker b hybrid"
        )
    };
    let from = |name| format!("state_migration at b 15840+60, 990 blocks from {name}, move (owner_draining)");
    check(&scene("barred=b>c barred=c>a"), &from("c"));
    check(&scene("barred=c>b"), &from("a"));
    let both = scene("barred=a>b barred=c>b");
    check(&both, "colocated_prefill at b 0+15900, move (owner_draining)");
    assert!(list(&both).contains(&"artifact_fetch at b: link_disabled".to_owned()), "{:#?}", list(&both));
    let prefill =
        "policy barred=p>d\n ask step=new_long_prefix prompt=32000\n worker p prefill\n worker d decode running=8";
    assert_eq!(list(prefill)[1..], ["colocated_prefill at d 0+32000, claim", "remote_prefill at d: link_disabled"]);
}

#[test]
fn workers_without_a_shared_fabric_recompute() {
    for (fabric, why) in [("mooncake", "fabric_mismatch"), ("none", "no_link")] {
        let scene = format!("{DRAINING_OWNER}\n worker b hybrid fabric={fabric}");
        assert_eq!(decide(&scene), "colocated_prefill at b 0+1600, move (owner_draining)");
        assert!(list(&scene).contains(&format!("artifact_fetch at b: {why}")), "{:#?}", list(&scene));
    }
    for link in ["0", "-1", "NaN", "inf"] {
        let scene = format!("{DRAINING_OWNER}\n worker b hybrid link={link}");
        assert!(list(&scene).contains(&"artifact_fetch at b: no_link".to_owned()), "{link}");
    }
}

#[test]
fn replicate_ends_at_a_block_boundary_of_both_engines() {
    check(
        "session owner=a sealed=99
         worker a hybrid holds=99 health=draining block=32
         worker b hybrid block=48",
        "state_migration at b 1536+64, 96 blocks from a, move (owner_draining)",
    );
}

#[test]
fn last_prompt_token_is_always_computed() {
    check("worker a hybrid holds=100", "colocated_prefill at a 1584+16, claim");
    check("worker a hybrid holds=100 block=64", "colocated_prefill at a 1536+64, claim");
    check("ask prompt=1601\n worker a hybrid holds=100", "colocated_prefill at a 1600+1, claim");
}

#[test]
fn source_with_the_shorter_queue_sends() {
    check(
        "session owner=a sealed=990
         ask prompt=15900
         worker a hybrid holds=990 health=draining backlog=9000
         worker c decode holds=990 health=draining
         worker b hybrid",
        "state_migration at b 15840+60, 990 blocks from c, move (owner_draining)",
    );
}

#[test]
fn guessed_prefix_counts_for_less_than_an_observed_one() {
    check("session owner=a sealed=99\n worker a hybrid knows=approximate", "colocated_prefill at a 1264+336, keep");
    check("worker a hybrid holds=99 knows=degraded", "colocated_prefill at a 1424+176, claim");
    check(
        "session owner=a sealed=99
         worker a hybrid knows=approximate
         worker b hybrid holds=99",
        "colocated_prefill at b 1584+16, read_replica",
    );
}

#[test]
fn replica_is_believed_only_without_exact_events() {
    let scene = |knows| {
        format!("session owner=a sealed=99 replica=b\n worker b hybrid knows={knows}\n worker c hybrid running=1")
    };
    assert_eq!(decide(&scene("approximate")), "colocated_prefill at b 1264+336, move (owner_gone)");
    assert_eq!(decide(&scene("exact")), "colocated_prefill at b 0+1600, move (owner_gone)");
}

#[test]
fn intent_of_another_router_draws_the_session_to_the_same_worker() {
    for name in ["a", "b"] {
        check(
            &format!("session promise={name}:99\n worker a hybrid\n worker b hybrid"),
            &format!("colocated_prefill at {name} 1264+336, claim"),
        );
    }
}

#[test]
fn host_memory_blocks_rank_between_device_memory_and_none() {
    check("worker a hybrid host=99\n worker b hybrid", "colocated_prefill at a 1584+16, claim");
    check("worker a hybrid host=99\n worker b hybrid holds=99", "colocated_prefill at b 1584+16, claim");
}

#[test]
fn rank_with_the_longest_prefix_serves() {
    check("worker a hybrid ranks=2 holds=10 holds1=50", "colocated_prefill at a/1 800+800, claim");
    check("worker a hybrid ranks=2 holds=50 holds1=10", "colocated_prefill at a 800+800, claim");
    check("worker a hybrid ranks=1 holds=10 holds1=50", "colocated_prefill at a 160+1440, claim");
}

#[test]
fn owners_rank_wins_ties_and_another_rank_is_another_owner() {
    let scene = |one: u32, two: u32| {
        format!("session owner=a owner_rank=1 sealed=50\n worker a hybrid ranks=2 holds={one} holds1={two}")
    };
    assert_eq!(decide(&scene(50, 50)), "colocated_prefill at a/1 800+800, keep");
    assert_eq!(decide(&scene(50, 10)), "colocated_prefill at a 800+800, move (target_holds_more)");
}

#[test]
fn new_session_gets_a_deterministic_rank_and_sessions_spread_over_ranks() {
    let rank = |session: u128| {
        let mut scene = PlanningScene::read("worker a hybrid ranks=4");
        scene.session.id = vocabulary::SessionId(session);
        scene.plan().plan.answer_leg().rank.0
    };
    let ranks: Vec<_> = (0..200).map(rank).collect();
    assert!((0..4).all(|wanted| ranks.iter().filter(|rank| **rank == wanted).count() > 25), "{ranks:?}");
    assert_eq!(rank(5), rank(5));
}

#[test]
fn new_sessions_spread_evenly_over_idle_workers() {
    let mut counts = [0; 4];
    for session in 0..400 {
        let mut scene = PlanningScene::read("worker a hybrid\n worker b hybrid\n worker c hybrid\n worker d decode");
        scene.session.id = vocabulary::SessionId(session);
        let target = scene.plan().plan.target();
        counts[["a", "b", "c", "d"].into_iter().position(|name| id(name) == target).unwrap()] += 1;
    }
    assert!(counts.iter().all(|n| (60..140).contains(n)), "{counts:?}");
}

#[test]
fn planning_error_names_the_reason_no_worker_can_serve() {
    check("ask model=x\n worker a hybrid", "no worker serves the model x");
    check("ask model=m adapter=x\n worker a hybrid", "no worker serves the model x");
    check("ask model=y adapter=x\n worker a hybrid models=x", "no worker serves the model y");
    check("", "no worker serves the model m");
    check("worker a hybrid health=unreachable", "no worker that serves the model is ready");
    check("worker a prefill", "no worker that serves the model is ready");
    check("ask exclude=a\n worker a hybrid", "every ready worker failed already in this attempt");
    check(
        "ask exclude=a\n worker a hybrid\n worker b hybrid health=unreachable",
        "every ready worker failed already in this attempt",
    );
    let longest = "prompt and answer exceed 1699 tokens, the most that a ready worker takes";
    check("worker a hybrid context=1699\n worker b hybrid kv=100", longest);
    check(
        "worker a hybrid context=1699\n worker b hybrid health=unreachable",
        "no worker that serves the model is ready",
    );
}

#[test]
fn worker_without_the_adapter_is_skipped() {
    check(
        "ask adapter=lora
         worker a hybrid holds=99
         worker b hybrid models=m,lora",
        "colocated_prefill at b 0+1600, claim",
    );
}

#[test]
fn worker_that_is_too_small_is_skipped() {
    let scene =
        "worker a hybrid holds=99 context=1699\n worker b hybrid kv=1699\n worker c hybrid context=1700 kv=1700";
    check(scene, "colocated_prefill at c 0+1600, claim");
    assert_eq!(
        list(scene)[..2],
        ["colocated_prefill at a: exceeds_context", "colocated_prefill at b: exceeds_kv_capacity"]
    );
}

#[test]
fn longest_prompt_of_a_batch_must_fit() {
    let mut scene = PlanningScene::read("worker a hybrid holds=99 context=1099 kv=1099\n worker b hybrid");
    let prompt = scene.ask.prompt_tokens;
    let served = |longest, scene: &mut PlanningScene| {
        scene.ask.longest_prompt_tokens = Some(longest);
        let plan = scene.plan().plan;
        (scene.name(plan.target()).to_owned(), plan.answer_leg().cached_tokens + plan.answer_leg().computed_tokens)
    };
    assert_eq!(served(vocabulary::Tokens(999), &mut scene), ("a".to_owned(), prompt), "and all of them are priced");
    assert_eq!(served(vocabulary::Tokens(1_000), &mut scene), ("b".to_owned(), prompt));
}

#[test]
fn every_ineligible_worker_is_listed_with_its_reason() {
    assert_eq!(
        list(
            "ask exclude=e
             worker a hybrid
             worker b prefill fabric=none
             worker c hybrid health=unreachable
             worker d hybrid health=draining
             worker e hybrid
             worker f hybrid models=other"
        ),
        [
            "colocated_prefill at a 0+1600, claim",
            "colocated_prefill at b: prefill_only",
            "colocated_prefill at c: not_ready",
            "colocated_prefill at d: draining",
            "colocated_prefill at e: failed_earlier_attempt",
            "colocated_prefill at f: model_not_served",
        ]
    );
}

#[test]
fn empty_prompt_or_unknown_block_size_is_served_without_reuse() {
    check("ask prompt=0\n worker a hybrid holds=5", "colocated_prefill at a 0+0, claim");
    check(
        "ask block=0\n session owner=a sealed=9\n worker a hybrid holds=5 block=0",
        "colocated_prefill at a 0+1600, keep",
    );
}

#[test]
fn workers_with_invalid_numbers_lose_to_valid_ones() {
    for broken in ["rate=0", "rate=NaN", "rate=-5", "rate=inf", "usage=NaN running=1", "rate=1e-310"] {
        check(&format!("worker a hybrid {broken}\n worker b hybrid"), "colocated_prefill at b 0+1600, claim");
    }
}

#[test]
fn single_worker_with_unknown_speed_still_serves() {
    check("worker a hybrid rate=0", "colocated_prefill at a 0+1600, claim");
    check("worker a hybrid rate=1e-310 backlog=5", "colocated_prefill at a 0+1600, claim");
}

#[test]
fn round_robin_rotates_over_decode_workers_only() {
    let at = |turn: u64| {
        decide(&format!(
            "policy rule=round_robin
             ask turn={turn}
             session owner=a sealed=99
             worker a hybrid holds=99 running=60
             worker b decode
             worker p prefill
             worker c hybrid health=draining
             worker d decode"
        ))
    };
    let mut three = [at(0), at(1), at(2)];
    assert_eq!(three, [at(3), at(4), at(5)]);
    three.sort();
    assert_eq!(
        three,
        [
            "colocated_prefill at a 1584+16, keep",
            "colocated_prefill at b 0+1600, read_replica",
            "colocated_prefill at d 0+1600, read_replica",
        ]
    );
}

#[test]
fn session_pinning_ignores_load_and_overlap_while_its_worker_lives() {
    let fleet = "worker a hybrid\n worker b hybrid\n worker c decode";
    let mut scene = PlanningScene::read(&format!("policy rule=session_pinning\n {fleet}"));
    let pinned = scene.plan().plan.target();
    let place = scene.workers.iter().position(|view| view.id == pinned).unwrap();
    scene.workers[place].load.running = 500;
    assert_eq!(scene.plan().plan.target(), pinned);
    scene.excluded.push(pinned);
    let second = scene.plan().plan.target();
    assert_ne!(second, pinned);
    scene.excluded.clear();
    assert_eq!(scene.plan().plan.target(), pinned, "it returns with its worker");
}

#[test]
fn match_rate_minus_load_weighs_hits_against_relative_load() {
    let with = |held: u32, running: u32| {
        decide(&format!(
            "policy rule=match_rate_minus_load
             worker a hybrid holds={held} running={running}
             worker b hybrid running=10"
        ))
    };
    assert_eq!(with(90, 5), "colocated_prefill at a 1440+160, claim");
    assert_eq!(with(0, 5), "colocated_prefill at a 0+1600, claim", "less loaded");
    assert_eq!(with(40, 20), "colocated_prefill at b 0+1600, claim", "0.4 - 1 is less than 0 - 0.5");
    assert_eq!(with(60, 20), "colocated_prefill at a 960+640, claim");
}

#[test]
fn baselines_offer_one_single_leg_candidate_per_worker() {
    for rule in ["round_robin", "session_pinning", "match_rate_minus_load"] {
        let lines = list(&format!("policy rule={rule}\n ask prompt=58000 {BUSY_OWNER}\n worker p prefill"));
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(lines.iter().all(|line| line.starts_with("colocated_prefill")), "{lines:#?}");
    }
}

#[test]
fn decision_round_trips_through_json() {
    let scene = PlanningScene::read(&format!("ask prompt=58000 {BUSY_OWNER}\n worker p prefill"));
    let decision = scene.plan();
    let text = serde_json::to_string(&decision).unwrap();
    assert_eq!(serde_json::from_str::<Decision>(&text).unwrap(), decision);
    assert!(text.contains(r#""action":"artifact_fetch""#) && text.contains(r#""interference":"#), "{text}");
}

/// A decode worker that only answers prompts handed over by a prefill worker, and such a prefill worker.
const PAIR: &str = "
    worker d decode carries=prompts holds=90
    worker p prefill carries=prompts";

#[test]
fn decoder_without_prefill_capability_always_uses_remote_prefill() {
    let words = "remote_prefill at d 96+0, prefill at p 0+100, claim";
    check(&format!("ask prompt=100 {PAIR}"), words);
    // Such decode workers do not exchange KV before a request either.
    check(
        &format!("session owner=d sealed=90 {PAIR}\n worker e decode carries=prompts"),
        "remote_prefill at d 1440+0, prefill at p 0+1600, keep",
    );
}

#[test]
fn decoder_without_prefill_capability_needs_a_prefill_worker() {
    let none = PlanningError::NoneReady.to_string();
    for alone in [
        "worker d decode carries=prompts".to_owned(),
        format!("ask transfers=no {PAIR}"),
        format!("ask exclude=p {PAIR}"),
        format!("policy barred=p>d {PAIR}"),
    ] {
        assert_eq!(decide(&alone), none, "{alone}");
    }
    let beside = format!("ask exclude=p {PAIR}\n worker h hybrid fabric=other");
    assert_eq!(list(&beside)[0], "colocated_prefill at d: requires_prefill_worker");
    check(&beside, "colocated_prefill at h 0+1600, claim");
}
