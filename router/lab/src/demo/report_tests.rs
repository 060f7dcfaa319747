//! Tests of figures and JSON from steps and metrics pages.

use std::time::Duration;

use strum::VariantArray as _;

use super::*;
use crate::demo::client::{ProxyClientError, StepMeasurement};

fn step(session: usize, turn: usize, worker: &str) -> FinishedStep {
    let outcome = match worker {
        "" => Err(ProxyClientError::TimedOut(Duration::from_secs(60))),
        worker => Ok(StepMeasurement {
            first_token: Duration::from_millis(10 * (turn as u64 + 1)),
            total: Duration::from_millis(500),
            prompt_tokens: 100,
            cached_tokens: 64,
            worker: Some(worker.to_owned()),
        }),
    };
    FinishedStep { session, turn, outcome }
}

#[test]
fn step_on_the_previous_worker_counts_as_an_owner_hit() {
    let steps = [step(0, 0, "a"), step(1, 0, "b"), step(0, 1, "a"), step(1, 1, "a"), step(1, 2, "a")];
    assert_eq!(owner_hit_rate(&steps), 0.6667);
}

#[test]
fn first_steps_and_steps_after_errors_are_excluded_from_the_hit_rate() {
    assert_eq!(owner_hit_rate(&[step(0, 0, "a"), step(1, 0, "a")]), 0.0);
    assert_eq!(owner_hit_rate(&[step(0, 0, "a"), step(0, 1, ""), step(0, 2, "b"), step(0, 3, "b")]), 1.0);
}

#[test]
fn hit_rate_does_not_depend_on_completion_order() {
    assert_eq!(owner_hit_rate(&[step(0, 2, "b"), step(0, 1, "a"), step(0, 0, "a")]), 0.5);
}

fn figures() -> PolicyStats {
    let worker = MetricsScrape::parse(concat!(
        "vllm:prompt_tokens_by_source_total{source=\"local_compute\"} 300\n",
        "vllm:prompt_tokens_by_source_total{source=\"local_cache_hit\"} 900\n",
        "vllm:prompt_tokens_by_source_total{source=\"external_kv_transfer\"} 10\n",
    ));
    let router = MetricsScrape::parse(concat!(
        "ownerserve_plan_actions_total{action=\"artifact_fetch\"} 2\n",
        "ownerserve_plan_actions_total{action=\"decode_continuation\"} 5\n",
        "ownerserve_plan_actions_total{action=\"remote_prefill\"} 0\n",
        "ownerserve_residency_blocks{worker=\"a\"} 60\nownerserve_residency_blocks{worker=\"b\"} 30\n",
        "ownerserve_residency_distinct_blocks 72\n",
    ));
    let steps = [step(0, 0, "a"), step(0, 1, "a"), step(1, 0, "")];
    RunMeasurements { steps: &steps, workers: &[worker.clone(), worker], router: &router, kv_bytes_per_token: 1_000 }
        .figures()
}

#[test]
fn figures_sum_over_all_workers() {
    let figures = figures();
    assert_eq!((figures.requests, figures.errors), (3, 1));
    assert_eq!((figures.ttft_p50_ms, figures.ttft_p99_ms), (10.0, 20.0));
    assert_eq!(figures.computed_prompt_tokens, 600);
    assert_eq!(figures.kv_transfer_bytes, 20_000);
    assert_eq!(figures.duplicate_factor, 1.25);
    assert_eq!(action_mix(&figures.actions), "decode_continuation 5 · artifact_fetch 2");
}

#[test]
fn report_has_the_documented_json_shape() {
    let mut report = PolicyComparison::default();
    for policy in ComparedPolicy::VARIANTS {
        report.add(*policy, figures());
    }
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&json), ["policies"]);
    assert_eq!(keys(&json["policies"]), ["ownerserve", "round_robin", "session_pinning"]);
    let expected = [
        "actions",
        "computed_prompt_tokens",
        "duplicate_factor",
        "errors",
        "kv_transfer_bytes",
        "owner_hit_rate",
        "requests",
        "step_latency_mean_ms",
        "step_latency_p99_ms",
        "ttft_p50_ms",
        "ttft_p99_ms",
    ];
    let mut seen = keys(&json["policies"]["ownerserve"]);
    seen.sort();
    assert_eq!(seen, expected);
    assert!(report.has_errors());
}

#[test]
fn table_names_every_policy_once_and_aligns_columns() {
    let mut report = PolicyComparison::default();
    for policy in ComparedPolicy::VARIANTS {
        report.add(*policy, figures());
    }
    let table = report.table();
    assert!(ComparedPolicy::VARIANTS.iter().all(|policy| table[0].contains(&policy.to_string())));
    let widths: Vec<_> = table[..11].iter().map(|line| line.chars().count()).collect();
    assert!(widths.iter().all(|width| *width == widths[0]), "{widths:?}");
}

#[test]
fn duplicate_factor_is_zero_without_router_metrics() {
    assert_eq!(duplicate_factor(&MetricsScrape::default()), 0.0);
    assert_eq!(action_mix(&BTreeMap::new()), "none");
}
