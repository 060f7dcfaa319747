use std::collections::BTreeSet;
use std::path::Path;

use planner::Action;
use serde_json::{Value, json};

use super::*;
use crate::decisions::reader::{self, DecisionMatches};
use crate::decisions::{DecisionFilter, DecisionRecords};
use vocabulary::RoutingMode;

/// A log that routers of version 1 wrote: 23 steps in seven files, three of the steps in mode `shadow`, two in `sticky`.
const LOG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/decisions/fixtures/version_1");

#[test]
fn every_recorded_decision_replays_to_the_same_plan() {
    let mut records = DecisionRecords::open(Path::new(LOG)).unwrap();
    let (mut steps, mut planned, mut actions) = (0, 0, BTreeSet::new());
    while let Some(entries) = records.next_file() {
        for entry in entries.unwrap() {
            steps += 1;
            let Some(recorded) = entry.receipt.decision else { continue };
            let (case, configured) = (entry.case.unwrap(), &entry.head.configured);
            let attention = configured.attention.get(&case.request.model);
            assert_eq!(case.plan(&entry.head.policy, (attention, &configured.shapes)).unwrap(), recorded);
            planned += 1;
            if entry.receipt.mode == RoutingMode::Active {
                let legs = entry.receipt.attempts.last().unwrap().legs.iter().map(|leg| (leg.role, leg.worker));
                assert!(legs.eq(recorded.plan.legs().map(|leg| (leg.role, leg.worker))));
                actions.insert(recorded.plan.action);
            }
        }
    }
    assert_eq!((records.count, steps, planned, records.truncated.len()), (7, 23, 21, 0));
    assert_eq!(actions, Action::ALL.into());
}

#[test]
fn searches_return_receipts_of_the_current_version() {
    let found = |filter: DecisionFilter| {
        let mut found = DecisionMatches::default();
        assert!(reader::search(Path::new(LOG), (&filter, 100), &mut found));
        found.receipts.iter().map(|raw| serde_json::from_str::<Value>(raw.get()).unwrap()).collect::<Vec<_>>()
    };
    let all = found(DecisionFilter::default());
    assert_eq!(all.len(), 23);
    assert!(all.iter().all(|receipt| receipt["attempts"][0]["legs"][0]["worker"].is_string()));
    let remote = found(DecisionFilter { action: Some(Action::RemotePrefill), ..DecisionFilter::default() });
    assert_eq!(remote.len(), 3);
    for receipt in &remote {
        assert_eq!(receipt["decision"]["plan"]["sequence"].as_array().unwrap().len(), 3, "{receipt}");
        let prefiller = serde_json::from_value(receipt["attempts"][0]["legs"][0]["worker"].clone()).unwrap();
        assert_eq!(found(DecisionFilter { worker: Some(prefiller), ..DecisionFilter::default() }), remote);
    }
}

fn upgraded_receipt(receipt: &Value) -> Value {
    upgraded(json!({"receipt": receipt}))["receipt"].take()
}

#[test]
fn plans_and_attempts_get_the_fields_of_the_current_version() {
    let leg =
        |worker: &str, cached: u64| json!({"worker": worker, "rank": 1, "tokens_cached": cached, "tokens_computed": 5});
    let plan = |prefill: &Value, decode: &Value, handoff: Value| json!({"action": "a", "prefill": prefill, "decode": decode, "handoff": handoff, "claim": {"kind": "borrow"}, "total": 9});
    let (p, d) = (leg("p", 0), leg("d", 16));
    let old = json!({
        "decision": {
            "step": "s",
            "plan": plan(&d, &d, Value::Null),
            "candidates": [
                plan(&p, &d, json!({"kind": "remote_prefill", "bytes": 7})),
                plan(&d, &d, json!({"kind": "replicate", "from": "h", "rank": 2, "blocks": 3, "bytes": 8})),
            ],
        },
        "attempts": [{"action": "a", "prefill": "p", "decode": "d"}, {"action": "a", "prefill": "d", "decode": "d"}],
    });
    let new_leg = |role: &str, worker: &str, cached: u64| json!({"leg": {"role": role, "worker": worker, "rank": 1, "cached_tokens": cached, "computed_tokens": 5}});
    let at = |worker: &str, rank: u64| json!({"worker": worker, "rank": rank});
    let handoff = |kind: &str, source: Value, blocks: Value, bytes: u64| json!({"handoff": {"kind": kind, "source": source, "target": at("d", 1), "blocks": blocks, "bytes": bytes}});
    let new_plan = |sequence: Value| json!({"action": "a", "sequence": sequence, "ownership": {"kind": "read_replica"}, "total_cost": "9us"});
    let new = json!({
        "decision": {
            "step_kind": "s",
            "plan": new_plan(json!([new_leg("serve", "d", 16)])),
            "candidates": [
                new_plan(json!([
                    new_leg("prefill", "p", 0),
                    handoff("remote_prefill", at("p", 1), Value::Null, 7),
                    new_leg("decode", "d", 16),
                ])),
                new_plan(json!([handoff("replicate", at("h", 2), json!(3), 8), new_leg("serve", "d", 16)])),
            ],
        },
        "attempts": [
            {"action": "a", "legs": [{"role": "prefill", "worker": "p"}, {"role": "decode", "worker": "d"}]},
            {"action": "a", "legs": [{"role": "serve", "worker": "d"}]},
        ],
    });
    assert_eq!(upgraded_receipt(&old), new);
    let old = json!({"at_unix_ms": 1_795_662_869_377_u64, "seen": {"ending": "client_left", "total": 1_500, "first_token": null}});
    let new = json!({"arrived_at": "2026-11-26T03:14:29.377Z", "observed": {"outcome": "client_disconnected", "duration": "1.5ms", "ttft": null}});
    assert_eq!(upgraded_receipt(&old), new);
    assert_eq!(upgraded(json!({"version": 1, "release": "x"})), json!({"version": FORMAT_VERSION, "release": "x"}));
}

#[test]
fn what_version_1_does_not_have_stays_for_the_parser_to_report() {
    for receipt in [
        json!({"decision": null, "attempts": []}),
        json!({"decision": {"plan": 7, "candidates": null}, "attempts": {"a": 1}}),
        json!({"decision": {"plan": {"decode": {}}}, "attempts": [{"prefill": "p"}, 3]}),
        json!({"decision": {"plan": {"prefill": {}, "decode": {}, "handoff": {"kind": "other"}}}, "attempts": []}),
        json!([]),
    ] {
        assert_eq!(upgraded_receipt(&receipt), receipt);
    }
    for line in [json!(null), json!([1]), json!({"cases": {}})] {
        assert_eq!(upgraded(line.clone()), line);
    }
}
