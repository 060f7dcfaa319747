use serde_json::json;

use super::*;

fn candidate(action: &str, worker: &str, cost: &str, rejection: Option<&str>) -> Value {
    let leg = json!({"role": "serve", "worker": worker, "rank": 0, "cached_tokens": 512, "computed_tokens": 88});
    json!({
        "action": action, "sequence": [{"leg": leg}], "ownership": {"kind": "keep"},
        "cost_terms": {"queue": "0s", "compute": cost}, "total_cost": cost, "rejection": rejection,
    })
}

fn receipt() -> Value {
    let chosen = candidate("colocated_prefill", "w-1", "1.5ms", None);
    let mut plan = chosen.clone();
    let runner_up = json!({"action": "colocated_prefill", "worker": "w-2", "total_cost": "9.75ms"});
    plan["rationale"] =
        json!({"policy": "lowest_cost", "cost_terms": {}, "total_cost": "1.5ms", "runner_up": runner_up});
    json!({
        "request_id": "req-7", "tenant": "a", "model": "m", "mode": "active",
        "lookup": {
            "session_id": "s-1", "token_ids_unavailable": null, "tier": "leading", "owner": {"worker": "w-1"},
            "prompt_tokens": 600, "sealed_tokens": 512, "max_overlap_tokens": 512,
            "evidence": {"ledger_view": "current", "pending_commit": true, "peer_intents": 0},
        },
        "decision": {
            "step_kind": "small_increment", "plan": plan,
            "candidates": [
                candidate("colocated_prefill", "w-3", "0s", Some("draining")),
                candidate("colocated_prefill", "w-2", "9.75ms", None),
                chosen,
            ],
        },
        "attempts": [{"action": "colocated_prefill", "legs": [{"role": "serve", "worker": "w-1"}], "kv_index_state": "exact", "events": ["decode_busy"]}],
        "observed": {
            "outcome": "complete", "http_status": 200, "predicted_ttft": "1.5ms", "ttft": "1.8ms", "duration": "20ms",
            "predicted_cached_tokens": 512, "cached_tokens": 512, "output_tokens": 32, "transferred_bytes": 0,
        },
    })
}

#[test]
fn explanation_covers_lookup_evidence_through_outcome() {
    let names = WorkerUrls::of(&[
        json!({"id": "w-1", "endpoint": "http://a:1"}),
        json!({"id": "w-2", "endpoint": "http://b:1"}),
    ]);
    let expected = "\
request     req-7
session     s-1
asked by    a, for m
step        small_increment, mode active
prompt      600 tokens, 512 of them sealed; the most that a worker holds is 512
known       by token ids, recognised by leading
owner       http://a:1
decided on  current view of the ledger, a newer step of our own

   ACTION             WORKER      SOURCE  CACHED  COMPUTED  COMPUTE  QUEUE  TOTAL COST  REJECTION
*  colocated_prefill  http://a:1  -       512     88        1.5ms    0s     1.5ms
   colocated_prefill  http://b:1  -       512     88        9.8ms    0s     9.8ms
   colocated_prefill  w-3         -       512     88        -        -      -           draining

chosen     by lowest_cost for 1.5ms; next colocated_prefill at http://b:1, 8.2ms more
ownership  stays where it is
tried      colocated_prefill at http://a:1, KV index exact; decode_busy
ended      complete, status 200
TTFT       1.8ms (expected 1.5ms)
cached     512 (expected 512)
answer     32 tokens, 20ms in all
moved      0 bytes
";
    assert_eq!(render(&receipt(), &names), expected);
}

#[test]
fn candidates_show_where_kv_comes_from() {
    let mut moved = receipt();
    let at = |worker: &str, rank: u64| json!({"worker": worker, "rank": rank});
    let leg = |role: &str, worker: &str, cached: u64, computed: u64| json!({"leg": {"role": role, "worker": worker, "rank": 0, "cached_tokens": cached, "computed_tokens": computed}});
    let handoff = |kind: &str, source: Value, target: &str| json!({"handoff": {"kind": kind, "source": source, "target": at(target, 0), "blocks": null, "bytes": 1}});
    let mut candidates =
        [candidate("remote_prefill", "w-2", "1.5ms", None), candidate("artifact_fetch", "w-3", "9ms", None)];
    candidates[0]["sequence"] = json!([
        leg("prefill", "w-1", 0, 600),
        handoff("remote_prefill", at("w-1", 0), "w-2"),
        leg("decode", "w-2", 512, 0),
    ]);
    candidates[1]["sequence"] = json!([handoff("replicate", at("w-2", 1), "w-3"), leg("serve", "w-3", 512, 88)]);
    let decision = &mut moved["decision"];
    decision["plan"]["action"] = json!("remote_prefill");
    decision["plan"]["sequence"] = candidates[0]["sequence"].clone();
    decision["candidates"] = json!(candidates);
    moved["attempts"][0]["legs"] = json!([{"role": "prefill", "worker": "w-1"}, {"role": "decode", "worker": "w-2"}]);
    let shown = render(&moved, &WorkerUrls::default());
    let columns = |action| {
        let line = shown.lines().find(|line| line.contains(action)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert!(columns("* ").starts_with("* remote_prefill w-2 w-1 512 600 "), "{shown}");
    assert!(columns("artifact_fetch").starts_with("artifact_fetch w-3 w-2 rank 1 512 88 "), "{shown}");
    assert!(shown.contains("tried      colocated_prefill at w-1 and w-2, KV index exact"), "{shown}");
}

#[test]
fn unplanned_step_shows_no_candidates() {
    let mut sticky = receipt();
    (sticky["decision"], sticky["mode"], sticky["observed"]) = (Value::Null, json!("bypass"), Value::Null);
    let shown = render(&sticky, &WorkerUrls::default());
    assert!(
        shown.contains("not planned, mode bypass") && shown.contains("tried") && !shown.contains("TOTAL COST"),
        "{shown}"
    );
}

#[test]
fn engine_disagreement_is_shown_with_a_remedy() {
    let mut wrong = receipt();
    wrong["observed"]["token_count_mismatch"] = json!({"router": 600, "engine": 612});
    let shown = render(&wrong, &WorkerUrls::default());
    assert!(
        shown.contains("the engine counts 612 prompt tokens where 600 were computed here: see that models."),
        "{shown}"
    );
    wrong["observed"] = receipt()["observed"].clone();
    wrong["observed"]["cache_hit_mismatch"] = json!({"reported": 16, "cached_tokens": 512, "block_size": 16});
    let shown = render(&wrong, &WorkerUrls::default());
    let expected =
        "the engine found 512 prompt tokens in its cache where its events had told of 16 by then: they may be late;";
    assert!(shown.contains(expected) && !shown.contains("counts"), "{shown}");
    assert!(!render(&receipt(), &WorkerUrls::default()).contains("disagrees"));
}

#[test]
fn step_that_skips_the_engine_cache_is_explained() {
    let mut whole = receipt();
    whole["lookup"]["evidence"]["cache_not_readable"] = json!("prompt_logprobs");
    let shown = render(&whole, &WorkerUrls::default());
    assert!(shown.contains("nothing that workers hold: prompt_logprobs has all of it computed"), "{shown}");
}

#[test]
fn shadow_mode_shows_the_plan_that_was_not_executed() {
    let mut shadowed = receipt();
    shadowed["mode"] = json!("shadow");
    let shown = render(&shadowed, &WorkerUrls::default());
    let line = shown.lines().find(|line| line.starts_with("would be")).unwrap();
    assert!(line.contains("colocated_prefill at w-1 for 1.5ms") && line.ends_with("the bypass served it:"), "{line}");
    assert!(!shown.contains("chosen"), "{shown}");
}

#[test]
fn unrecognised_prompts_and_estimated_blocks_are_explained() {
    let mut receipt = receipt();
    receipt["lookup"]["tier"] = json!("miss");
    assert!(
        render(&receipt, &WorkerUrls::default()).contains("known       by token ids, and nothing of it recognised\n")
    );
    receipt["attempts"][0]["kv_index_state"] = json!("approximate");
    let shown = render(&receipt, &WorkerUrls::default());
    assert!(
        shown.contains("nothing of it recognised; what its worker holds is an estimate: REASON in `ctl worker list`"),
        "{shown}"
    );
}

#[test]
fn unsent_step_shows_no_ownership_claim() {
    let mut left = receipt();
    left["decision"]["plan"]["ownership"] = json!({"kind": "claim"});
    assert!(render(&left, &WorkerUrls::default()).contains("the target claims it"));
    left["attempts"] = json!([]);
    let shown = render(&left, &WorkerUrls::default());
    assert!(shown.contains("ownership  as it was: the step was never sent") && !shown.contains("claims"), "{shown}");
}
