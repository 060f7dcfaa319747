use std::sync::Arc;

use planner::{
    ActionSet, ClassificationInputs, RecordedPlanningInputs, RequestProfile, SessionView, TransferPermission,
};
use serde_json::json;
use vocabulary::{Blocks, Bytes, Micros, Overlap, SessionId, TimeSpan, Tokens, WorkerId, WorkerView};

use super::*;
use proxy::decisions::{DecisionLogHeader, ReplayRecord, StaticPlanningInputs};

fn worker(id: u64, backlog: u64) -> WorkerView {
    let view = json!({
        "id": WorkerId(id), "endpoint": format!("http://w{id}:1"), "incarnation": 1, "role": "hybrid", "models": ["m"],
        "ranks": 1, "health": "ready", "knowledge": "exact",
        "load": {"running": 0, "waiting": 0, "backlog": backlog, "kv_usage": 0.0},
        "capacity": {"kv": 1_000_000, "block": 16, "context": 100_000},
        "speeds": {"prefill_tokens_per_second": 10_000.0, "decode_step": 1_000, "decode_slowdown": 10},
        "kv_bytes_per_token": Bytes(1_000), "link": null,
    });
    serde_json::from_value(view).unwrap()
}

/// Worker 1 holds all but 100 of 1,000 tokens, worker 2 nothing.
fn case(session: u128, backlog: u64) -> RecordedPlanningInputs {
    let overlap =
        Overlap { worker: WorkerId(1), rank: Default::default(), tier: vocabulary::Tier::Hbm, blocks: Blocks(56) };
    RecordedPlanningInputs {
        step: ClassificationInputs {
            prompt_tokens: Tokens(1_000),
            reused_tokens: Tokens(896),
            ..ClassificationInputs::default()
        },
        request: RequestProfile {
            model: "m".into(),
            adapter: None,
            prompt_tokens: Tokens(1_000),
            expected_output_tokens: Tokens(10),
            expected_growth_tokens: Tokens::ZERO,
            longest_prompt_tokens: None,
            block_size: Tokens(16),
            transfers: TransferPermission::Allowed,
        },
        session: SessionView::new(SessionId(session)),
        workers: Arc::new([worker(1, backlog), worker(2, 0)]),
        overlaps: vec![overlap],
        failed_workers: Vec::new(),
        disabled_actions: ActionSet::NONE,
        disabled_links: Vec::new(),
        kv_occupancy: Some(Vec::new()),
    }
}

/// A step of mode `mode` that was served at `served` and whose first token took `seen`.
fn entry(case: RecordedPlanningInputs, (mode, served): (&str, u64), seen: Micros) -> ReplayRecord {
    let policy = Policy::default();
    let decision = case.plan(&policy, (None, &[])).unwrap();
    let told = json!({
        "lookup": {"session_id": case.session.id}, "mode": mode, "decision": decision,
        "attempts": [{"action": "colocated_prefill", "legs": [{"role": "serve", "worker": WorkerId(served)}]}],
        "observed": {"outcome": "complete", "ttft": TimeSpan(seen.duration())},
    });
    let head =
        DecisionLogHeader { version: 2, release: "x".into(), policy, configured: StaticPlanningInputs::default() };
    let parsed = serde_json::from_value(told).unwrap();
    ReplayRecord { head: Arc::new(head), receipt: parsed, case: Some(case) }
}

fn compared(change: WhatIfScenario, entries: impl IntoIterator<Item = ReplayRecord>) -> WhatIfComparison {
    let mut comparing = ComparisonBuilder::default();
    entries.into_iter().for_each(|entry| comparing.add(entry, &change));
    comparing.finish()
}

#[test]
fn active_mode_log_is_reproduced_and_saves_nothing() {
    let own = || (1..=4).map(|n| entry(case(n, 0), ("active", 1), Micros(12_000)));
    let comparison = compared(WhatIfScenario::default(), own());
    assert_eq!((comparison.modes.active, comparison.compared, comparison.sessions), (4, 4, 4));
    assert_eq!((comparison.replayed.reproduced, comparison.replayed.unreproduced, comparison.changed_plans), (4, 0, 0));
    let saved = comparison.predicted_ttft_saving_ms.unwrap();
    assert_eq!((saved.mean, saved.within), (0.0, Some(0.0)));
    assert_eq!(comparison.as_served, comparison.what_if);
}

#[test]
fn records_without_displaced_kv_facts_are_counted() {
    let old = |n| entry(RecordedPlanningInputs { kv_occupancy: None, ..case(n, 0) }, ("active", 1), Micros(12_000));
    let comparison =
        compared(WhatIfScenario::default(), [old(1), old(2), entry(case(3, 0), ("active", 1), Micros(12_000))]);
    assert_eq!((comparison.replayed.reproduced, comparison.replayed.without_memory), (3, 2));
}

#[test]
fn shadow_log_yields_predicted_savings() {
    // The bypass took the worker that holds nothing: 90 ms more, for every step.
    let comparison =
        compared(WhatIfScenario::default(), (1..=4).map(|n| entry(case(n, 0), ("shadow", 2), Micros(120_000))));
    let (served, planned) = (comparison.as_served.unwrap(), comparison.what_if.unwrap());
    assert_eq!((served.computed_tokens, planned.computed_tokens), (4_000, 416));
    let saved = comparison.predicted_ttft_saving_ms.unwrap();
    assert!((saved.mean - 89.6).abs() < 0.5 && saved.within == Some(0.0), "{saved:?}");
    assert_eq!((comparison.modes.shadow, comparison.changed_plans), (4, 4));
    let told = comparison_text(&comparison, 1);
    assert!(
        told.contains("Prediction: the time to first token is 89.6")
            && told.contains("4 of 4 steps would have another plan"),
        "{told}"
    );
}

#[test]
fn bypass_colocated_step_matches_the_planner_action() {
    // Nothing is new: for the planner a continuation, wherever it is served.
    let mut continued = case(1, 0);
    continued.step.relation = planner::HeadRelation::Equals;
    continued.overlaps[0].blocks = Blocks(62);
    let owner = json!({"worker": WorkerId(1), "incarnation": 1, "rank": 0});
    continued.session.owner = Some(serde_json::from_value(owner).unwrap());
    continued.session.sealed = Blocks(62);
    let entry = entry(continued, ("shadow", 1), Micros(12_000));
    let planned = entry.receipt.decision.as_ref().unwrap().plan.action;
    assert_ne!(planned, planner::Action::ColocatedPrefill);
    let comparison = compared(WhatIfScenario::default(), [entry]);
    assert_eq!(
        (comparison.compared, comparison.changed_plans, comparison.predicted_ttft_saving_ms.unwrap().mean),
        (1, 0, 0.0)
    );
}

#[test]
fn changed_fleet_is_compared_on_the_same_steps() {
    let own = |n| entry(case(n, 0), ("active", 1), Micros(12_000));
    let without = |workers: &[u64]| WhatIfScenario {
        removed_workers: workers.iter().copied().map(WorkerId).collect(),
        ..WhatIfScenario::default()
    };
    let comparison = compared(without(&[1]), [own(1), own(2)]);
    assert_eq!(
        (comparison.changed_plans, comparison.what_if.unwrap().computed_tokens, comparison.replayed.reproduced),
        (2, 2_000, 2)
    );
    let comparison = compared(without(&[1, 2]), [own(1)]);
    assert_eq!((comparison.unservable, comparison.compared, comparison.what_if), (1, 0, None));
    let faster = compared(WhatIfScenario { prefill_speedup: Some(2.0), ..WhatIfScenario::default() }, [own(1), own(2)]);
    assert!((faster.predicted_ttft_saving_ms.unwrap().mean - 5.2).abs() < 0.2, "{:?}", faster.predicted_ttft_saving_ms);
}

#[test]
fn changed_policy_gives_different_decisions() {
    let policy = Policy { policy: planner::SelectionRule::MatchRateMinusLoad, ..Policy::default() };
    let busy = || entry(case(1, 5_000), ("active", 2), Micros(100_000));
    assert_eq!(compared(WhatIfScenario::default(), [busy()]).changed_plans, 0);
    let comparison = compared(WhatIfScenario { policy: Some(policy), ..WhatIfScenario::default() }, [busy()]);
    assert_eq!((comparison.changed_plans, comparison.what_if.unwrap().computed_tokens), (1, 104));
}

#[test]
fn observed_ttft_is_compared_with_the_prediction() {
    let first = |n| {
        compared(WhatIfScenario::default(), [entry(case(n, 0), ("active", 1), Micros(1))]).ttft_prediction
            [&planner::Action::ColocatedPrefill]
            .predicted_ms
    };
    let predicted = first(1);
    // Twice as slow as predicted, for most.
    let slow = Micros((predicted * 2_000.0) as u64);
    let comparison = compared(
        WhatIfScenario::default(),
        (1..=5).map(|n| entry(case(n, 0), ("active", 1), if n == 1 { Micros(1) } else { slow })),
    );
    let accuracy = comparison.ttft_prediction[&planner::Action::ColocatedPrefill];
    assert_eq!(accuracy.steps, 5);
    assert!((accuracy.bias + 0.5).abs() < 0.01 && (accuracy.error - 0.5).abs() < 0.01, "{accuracy:?}");
}

#[test]
fn unplanned_steps_are_counted_but_not_compared() {
    let mut bypass = entry(case(1, 0), ("bypass", 1), Micros(1));
    (bypass.receipt.decision, bypass.case) = (None, None);
    let comparison = compared(WhatIfScenario::default(), [bypass]);
    assert_eq!((comparison.modes.bypass, comparison.compared, comparison.predicted_ttft_saving_ms), (1, 0, None));
    assert!(comparison_text(&comparison, 1).contains("Nothing could be compared"));
}

#[test]
fn settings_outside_the_policy_are_rejected() {
    let args = |settings: &[&str]| WhatIfArgs {
        log: "nowhere".into(),
        config: None,
        settings: settings.iter().map(|text| (*text).to_owned()).collect(),
        exclude_worker: Vec::new(),
        prefill_speedup: None,
        link_speedup: None,
        output: OutputFormat::Table,
    };
    let read = |base: &Policy, _: Option<&Path>, settings: &[String]| {
        assert_eq!(settings, ["planner.memory_cost_per_mib=7us"]);
        Ok(Policy { memory_cost_per_mib: 7.0, ..base.clone() })
    };
    let message = run(&args(&["proxy.listen=x"]), read).unwrap_err().to_string();
    assert!(message.contains("accepted are paths that begin with planner."), "{message}");
    let policy = Policy { interference_weight: 3.0, ..Policy::default() };
    let change = args(&["planner.memory_cost_per_mib=7us"]).change(&policy, read).unwrap().policy.unwrap();
    assert_eq!((change.interference_weight, change.memory_cost_per_mib), (3.0, 7.0));
    assert_eq!(args(&[]).change(&policy, read).unwrap().policy, None, "it is not read");
}
