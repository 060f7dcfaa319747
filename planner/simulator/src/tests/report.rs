use super::readers::{read, sessions};
use crate::policies::PolicyKind;
use crate::report::{
    Metric, ReportSubject, RunStats, SimulationReport, TimeDistribution, csv, notes, page, summarize_policies,
    summary_table, tier_policy_table, verdict_table, verdicts,
};
use crate::trace::ReplayLimits;
use crate::{HardwareProfile, Simulation, SimulationSetup, TierPolicy};

fn run(kind: PolicyKind, seed: u64) -> RunStats {
    let trace = sessions().apply_limits(&ReplayLimits::default()).shuffled(seed);
    let setup = SimulationSetup { workers: 2, spec: HardwareProfile::A100_8B, load: 4.0, seed };
    Simulation::new(&trace, kind, setup).unwrap().run(&mut |_, _| {})
}

fn figures() -> RunStats {
    run(PolicyKind::PrefixAffinity, 1)
}

/// Returns the same run with other step times.
fn as_if(stats: &RunStats, policy: PolicyKind, seed: u64, step: f64) -> RunStats {
    let mut other = RunStats { policy: policy.as_str(), ..stats.clone() };
    other.traffic.seed = seed;
    (other.step, other.session) = (TimeDistribution::of(vec![step]), TimeDistribution::of(vec![10.0 * step]));
    other.ttft = TimeDistribution::of(vec![step / 2.0]);
    other
}

#[test]
fn csv_has_one_row_per_run() {
    let figures = figures();
    let csv = csv(std::slice::from_ref(&figures));
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!((rows.len(), rows[0].len(), rows[1].len()), (2, 3 + Metric::ALL.len(), 3 + Metric::ALL.len()));
    assert!(csv.starts_with("policy,load,seed,steps,unserved,ttft_mean_s,"));
    let cell = |name: &str| rows[1][rows[0].iter().position(|column| *column == name).unwrap()];
    assert_eq!((cell("policy"), cell("load"), cell("seed")), ("prefix_affinity", "4", "1"));
    assert_eq!(cell("ttft_mean_s"), format!("{:.3}", figures.ttft.mean));
    assert_eq!(cell("measured"), figures.step.count.to_string());
}

#[test]
fn seeds_of_a_policy_and_load_are_one_row_with_confidence() {
    let one = figures();
    let runs = [1, 2].map(|seed| as_if(&one, PolicyKind::Dynamo, seed, seed as f64));
    let cells = summarize_policies(&runs);
    let rows = summary_table(&cells);
    assert_eq!((cells.len(), rows.len(), rows[0].len()), (1, 2, rows[1].len()));
    let at = |name: &str| rows[1][rows[0].iter().position(|column| column == name).unwrap()].clone();
    assert_eq!((at("policy"), at("step_mean_s")), ("dynamo".to_owned(), "1.500 ±6.353".to_owned()));
    assert_eq!(cells[0].step[50], 1.5, "a point of the curve is the mean of the seeds'");
}

#[test]
fn verdict_compares_with_the_best_baseline_per_load_and_figure() {
    let one = figures();
    let runs = [
        as_if(&one, PolicyKind::Dynamo, 1, 2.0),
        as_if(&one, PolicyKind::SessionPinning, 1, 1.0),
        as_if(&one, PolicyKind::Oracle, 1, 0.1),
        as_if(&one, PolicyKind::LlmdCachedCounts, 1, 0.1),
        as_if(&one, PolicyKind::OwnerServe, 1, 1.04),
    ];
    let all = verdicts(&runs, &summarize_policies(&runs));
    let said: Vec<_> = all.iter().map(|one| (one.figure, one.best, one.label())).collect();
    let best = PolicyKind::SessionPinning.as_str();
    let expected = [("step_mean_s", best, "SHORT"), ("session_mean_s", best, "SHORT"), ("ttft_p95_s", best, "PASS")];
    assert_eq!(said, expected, "neither bounds nor ablations are baselines");
    assert!((all[0].ratio.mean - 1.04).abs() < 1e-12 && all[0].is_significant().is_none());
    assert_eq!(verdict_table(&all)[1][7], "SHORT");
}

#[test]
fn ratio_pairs_equal_seeds_and_reports_uncertainty() {
    let one = figures();
    let pair = |seed, theirs: f64, ratio: f64| {
        [as_if(&one, PolicyKind::Sglang, seed, theirs), as_if(&one, PolicyKind::OwnerServe, seed, theirs * ratio)]
    };
    let steady = [pair(1, 1.0, 1.01), pair(2, 9.0, 1.01), pair(3, 4.0, 1.01)].concat();
    let sure = verdicts(&steady, &summarize_policies(&steady));
    assert!(sure[0].holds && sure[0].is_significant() == Some(true), "{:?}", sure[0]);
    let shaky = [pair(1, 1.0, 0.9), pair(2, 1.0, 1.1), pair(3, 1.0, 1.0)].concat();
    let unsure = verdicts(&shaky, &summarize_policies(&shaky));
    assert_eq!((unsure[0].holds, unsure[0].is_significant()), (true, Some(false)), "{:?}", unsure[0]);
    assert_eq!(verdict_table(&unsure)[1][7], "PASS (within confidence)");
}

#[test]
fn unserved_steps_are_reported_and_never_win() {
    let one = figures();
    let (mut lame, slow) = (as_if(&one, PolicyKind::ThunderAgent, 1, 0.5), as_if(&one, PolicyKind::Dynamo, 1, 1.0));
    let mut own = as_if(&one, PolicyKind::OwnerServe, 1, 0.9);
    lame.unserved = 7;
    let runs = [lame, slow.clone(), own.clone()];
    let all = verdicts(&runs, &summarize_policies(&runs));
    assert_eq!((all[0].best, all[0].holds), ("dynamo", true));
    let notes = notes(&runs, &all);
    let steps = one.steps + 7;
    assert_eq!(
        notes[0],
        format!(
            "thunder_agent at load 4 with seed 1 never served 7 of {steps} steps: its times are of the others only"
        )
    );
    own.unserved = 1;
    let runs = [slow, own];
    assert!(verdicts(&runs, &summarize_policies(&runs)).iter().all(|verdict| !verdict.holds));
}

#[test]
fn tier_policies_are_reported_apart_and_the_first_is_the_default() {
    let one = figures();
    let under = |cache, policy, step| {
        let mut other = as_if(&one, policy, 1, step);
        other.traffic.tier_policy = Some(cache);
        other
    };
    let (own, pinned) = (PolicyKind::OwnerServe, PolicyKind::SessionPinning);
    let runs = vec![
        under(TierPolicy::LowestCost, own, 1.0),
        under(TierPolicy::LowestCost, pinned, 2.0),
        under(TierPolicy::DeviceOnly, own, 3.0),
        under(TierPolicy::DeviceOnly, pinned, 1.5),
    ];
    let subject = || ReportSubject::new("t".to_owned(), &sessions(), (2, &HardwareProfile::A100_8B));
    let report = SimulationReport::of(subject(), Vec::new(), runs.clone());
    let shown: Vec<_> = report.cells.iter().map(|cell| (cell.policy, cell.mean("step_mean_s").unwrap().mean)).collect();
    assert_eq!(shown, [("ownerserve", 1.0), ("session_pinning", 2.0)]);
    assert!(report.verdicts.iter().all(|verdict| verdict.holds && verdict.theirs.mean > verdict.ours.mean));
    let table = tier_policy_table(&report.tier_policies);
    let names: Vec<_> = table.iter().map(|row| (row[0].as_str(), row[1].as_str(), row[5].as_str())).collect();
    let cells = [("lowest_cost", "ownerserve", "1.000"), ("lowest_cost", "session_pinning", "2.000")];
    let others = [("none", "ownerserve", "3.000"), ("none", "session_pinning", "1.500")];
    assert_eq!(names[1..], [cells, others].concat());
    assert!(report.notes.iter().any(|note| note.contains("are under tier policy `lowest_cost`")), "{:?}", report.notes);
    let text = csv(&runs);
    assert!(text.lines().next().unwrap().ends_with(",tier_policy") && text.lines().nth(3).unwrap().ends_with(",none"));
    let page = page(&report);
    assert!(page.contains("aria-label=\"Tier policies\"") && page.contains(">none</th>"), "{page}");
    let alone = SimulationReport::of(subject(), Vec::new(), runs[..2].to_vec());
    assert!(alone.tier_policies.is_empty() && alone.cells.len() == 2, "of one there is nothing to compare");
}

#[test]
fn unmeasured_values_are_reported_and_left_out_of_means() {
    let one = figures();
    let mut empty = as_if(&one, PolicyKind::Dynamo, 2, 3.0);
    empty.small_step_ttft = TimeDistribution::default();
    let runs = [as_if(&one, PolicyKind::Dynamo, 1, 3.0), empty];
    let cells = summarize_policies(&runs);
    let small = cells[0].mean("small_step_ttft_p95_s").unwrap();
    assert_eq!((small.mean, small.seeds), (one.small_step_ttft.p95, 1));
    let notes = notes(&runs, &[]).join("; ");
    assert!(
        notes.contains("no time to the first token of small steps was measured in dynamo at load 4 with seed 2: `-`"),
        "{notes}"
    );
    assert!(notes.contains("no verdict: it takes `ownerserve` and at least one baseline"), "{notes}");
    assert!(!notes.contains("one seed"), "{notes}");
    let line = csv(&runs[1..]).lines().nth(1).unwrap().to_owned();
    assert!(line.contains(",,"), "an empty value: {line}");
}

#[test]
fn independent_requests_have_no_session_times() {
    let rows = r#"{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}"#;
    let setup = SimulationSetup { workers: 1, spec: HardwareProfile::A100_8B, load: 1.0, seed: 1 };
    let run = Simulation::new(&read(rows), PolicyKind::LeastLoaded, setup).unwrap().run(&mut |_, _| {});
    assert_eq!((run.steps, run.ttft.count, run.session.count, run.small_step_ttft.count), (1, 1, 0, 0));
    assert_eq!(serde_json::to_value(&run).unwrap()["session"]["mean"], serde_json::Value::Null);
    assert_eq!(summary_table(&summarize_policies(&[run]))[1][7], "-");
}

#[test]
fn json_report_names_every_figure() {
    let json = serde_json::to_value(figures()).unwrap();
    for place in [
        "/ttft/p95",
        "/ttft/count",
        "/reuse/prefill_tokens",
        "/memory/duplicate_factor",
        "/service/sessions_per_gpu_hour",
    ] {
        assert!(json.pointer(place).is_some_and(serde_json::Value::is_number), "{place}");
    }
    assert_eq!(json["service"]["fallback_steps"], 0);
    let occupancy = json["memory"]["occupancy"].as_f64().unwrap();
    assert!((0.1..1.0).contains(&occupancy), "{occupancy}");
}

#[test]
fn percentile_is_the_value_above_that_share_of_samples() {
    assert_eq!(TimeDistribution::of(Vec::new()), TimeDistribution::default());
    let times = TimeDistribution::of((0..100).rev().map(f64::from).collect());
    assert_eq!((times.count, times.mean, times.p50, times.p95, times.p99), (100, 49.5, 50.0, 95.0, 99.0));
    assert_eq!((times.curve.len(), times.curve[0], times.curve[95], times.curve[100]), (101, 0.0, 95.0, 99.0));
}

#[test]
fn every_metric_has_a_unique_name_and_a_description() {
    let names: std::collections::BTreeSet<_> = Metric::ALL.iter().map(|metric| metric.name).collect();
    assert_eq!(names.len(), Metric::ALL.len());
    assert!(Metric::ALL.iter().all(|metric| metric.description.len() > 20), "a meaning is a phrase");
}

#[test]
fn hardware_profiles_are_found_by_name() {
    for spec in HardwareProfile::ALL {
        assert_eq!(HardwareProfile::by_name(spec.name), Some(spec));
    }
    assert_eq!(HardwareProfile::by_name("none"), None);
}
