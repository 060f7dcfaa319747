use clap::Parser;

use simulator::report::RunStats;

use super::*;

#[derive(Debug, Parser)]
struct SimulateCommandLine {
    #[command(flatten)]
    args: SimulateArgs,
}

fn traces() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/traces/weka_cc").to_owned()
}

fn args(words: &[&str]) -> Result<SimulateArgs, String> {
    let all = ["simulate", &traces()].into_iter().chain(words.iter().copied()).map(str::to_owned).collect::<Vec<_>>();
    SimulateCommandLine::try_parse_from(all).map(|line| line.args).map_err(|error| error.to_string())
}

fn simulated(args: &SimulateArgs) -> Result<SimulationReport, SimulateError> {
    args.simulate(files::load(&args.trace).unwrap())
}

fn figures(words: &[&str]) -> Vec<RunStats> {
    simulated(&args(words).unwrap()).unwrap().runs
}

fn refused(words: &[&str]) -> String {
    simulated(&args(words).unwrap()).unwrap_err().to_string()
}

#[test]
fn every_policy_load_and_seed_is_a_separate_run() {
    let small = ["--workers=2", "--policy=session_pinning,ownerserve", "--load=2,4", "--seeds=1,2", "--max-steps=10"];
    let runs = figures(&small);
    let cells: Vec<_> = runs.iter().map(|run| (run.traffic.seed, run.traffic.load as u64, run.policy)).collect();
    let cell = |seed, load| [(seed, load, "session_pinning"), (seed, load, "ownerserve")];
    assert_eq!(cells, [cell(1, 2), cell(1, 4), cell(2, 2), cell(2, 4)].concat());
    assert_eq!(runs, figures(&small), "the same seeds are the same figures");
    assert_ne!(runs[0].ttft, runs[4].ttft, "another seed is another order of sessions");
    assert!(runs.iter().all(|run| run.unserved == 0));
}

#[test]
fn session_list_is_replayed_in_its_order() {
    let list = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(list.path(), "trace_0291\ntrace_0016\n").unwrap();
    let path = list.path().to_str().unwrap();
    let runs = figures(&["--policy=oracle", "--session-list", path, "--seeds=1,2", "--load=2"]);
    assert_eq!(runs[0].service, runs[1].service);
    assert_eq!(runs[0].service.sessions_over, 2);
}

#[test]
fn argument_errors_name_the_accepted_values() {
    let said = |words: &[&str]| args(words).unwrap_err();
    assert!(said(&["--policy=best"]).contains("there is no policy `best`; accepted: round_robin, "));
    assert!(said(&["--profile=b200"]).contains("accepted: 8b_h100, 8b_a100, 30a3_h200, 70b_tp4"));
    assert!(said(&["--load=many"]).contains("invalid"));
    for bandwidth in ["0", "6", "-1GB", "fast", "11TB"] {
        let refused = said(&[&format!("--disk-read-bandwidth={bandwidth}")]);
        assert!(refused.contains("accepted is a size per second with a unit, 1MiB to 10TB"), "{refused}");
    }
    assert!(said(&["--max-pause=300"]).contains("accepted is a duration with a unit"));
    assert!(
        said(&["--max-steps=1"])
            .contains("accepted: a whole number, 3 or more: sessions with fewer steps are left out")
    );
    assert_eq!(refused(&["--policy=oracle", "--workers=0"]), "oracle is given 0 workers; accepted: 1 to 1024");
    for (load, shown) in [("36", "36"), ("0", "0"), ("-4", "-4"), ("2,nan", "NaN"), ("inf", "inf"), ("1.5", "1.5")] {
        let accepted = "a whole number of sessions at once, 1 to the 35 that the trace has";
        let error = refused(&["--policy=round_robin,oracle", "--load", load]);
        assert_eq!(error, format!("--load: the load is {shown}; accepted: {accepted}"));
    }
    let lost = refused(&["--session-list=/nowhere"]);
    assert!(lost.starts_with("cannot read the list of sessions /nowhere: "), "{lost}");
}

#[test]
fn default_load_is_the_session_cap_or_the_recorded_rate() {
    let load = |words: &[&str]| figures(words).iter().map(|run| run.traffic.load).collect::<Vec<_>>();
    let list = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(list.path(), "trace_0291\ntrace_0016\n").unwrap();
    let small = ["--policy=oracle", "--max-steps=3"];
    assert_eq!(load(&small), [24.0], "of 35");
    assert_eq!(load(&[&small[..], &["--session-list", list.path().to_str().unwrap()]].concat()), [2.0]);
    let recorded = tempfile::NamedTempFile::with_suffix(".jsonl").unwrap();
    let line = |at| format!("{{\"timestamp\":{at},\"input_length\":600,\"output_length\":9,\"hash_ids\":[1]}}\n");
    std::fs::write(recorded.path(), [0, 1_000, 60_000].map(line).concat()).unwrap();
    let words = ["simulate", recorded.path().to_str().unwrap(), "--policy=oracle"];
    let run = &simulated(&SimulateCommandLine::try_parse_from(words).unwrap().args).unwrap().runs[0];
    assert_eq!((run.traffic.load, run.service.seconds > 60.0), (1.0, true), "{run:?}");
    let error = simulated(&SimulateCommandLine::try_parse_from([&words[..], &["--load=0"]].concat()).unwrap().args)
        .unwrap_err();
    assert!(error.to_string().starts_with("--load: the load is 0; accepted: a factor"), "{error}");
    let help = <SimulateCommandLine as clap::CommandFactory>::command().render_long_help().to_string();
    assert!(
        help.contains("24 sessions, or all that there are if fewer") && help.contains("the recorded rate"),
        "{help}"
    );
}

#[test]
fn slower_tiers_use_the_given_sizes_and_speeds() {
    let sizes = |words: &[&str]| args(words).unwrap().spec().sizes;
    let usual = sizes(&[]);
    assert_eq!((usual.host, usual.disk), (Tokens::ZERO, Tokens::ZERO));
    let words = ["--host-tokens=7", "--disk-tokens=9", "--host-bandwidth=131072MB", "--disk-read-bandwidth=13107200kB"];
    let named = sizes(&words);
    assert_eq!((named.host, named.disk, named.host_tokens_per_second), (Tokens(7), Tokens(9), 1e6));
    assert_eq!((named.disk_speed.read, named.disk_speed.write), (1e5, usual.disk_speed.write));
    assert_eq!(sizes(&["--disk-write-bandwidth=13107200kB"]).disk_speed.write, 1e5);
}

/// A model of which every other layer keeps 128 tokens.
const HYBRID: &str = r#"
    [[layers]]
    repeat = 16
    pattern = [
        { kind = "dense", kv_heads = 8, head_dim = 128 },
        { kind = "sliding_window", kv_heads = 8, head_dim = 128, window_tokens = 128 },
    ]"#;

fn model(ending: &str, text: &str) -> (tempfile::NamedTempFile, String) {
    let file = tempfile::NamedTempFile::with_suffix(ending).unwrap();
    std::fs::write(file.path(), text).unwrap();
    let word = format!("--attention-file={}", file.path().display());
    (file, word)
}

#[test]
fn every_policy_runs_under_every_tier_policy() {
    let (_file, attention) = model(".toml", HYBRID);
    let policies = ["none", "lru", "full", "periodic:4096", "no_windows", "lowest_cost"];
    let policy = format!("--tier-policy={}", policies.join(","));
    let tiers = ["--device-tokens=100000", "--host-tokens=20000", "--disk-tokens=400000"];
    let limits = ["--load=4", "--max-context-tokens=90000"];
    let small = [&["--workers=2", "--policy=session_pinning,ownerserve", &attention, &policy], &limits[..]].concat();
    let report = simulated(&args(&[&small[..], &tiers].concat()).unwrap()).unwrap();
    let ran: Vec<_> =
        report.runs.iter().map(|run| (run.traffic.tier_policy.unwrap().to_string(), run.policy)).collect();
    let of = |tiers: &&str| ["session_pinning", "ownerserve"].map(|policy| ((*tiers).to_owned(), policy));
    assert_eq!(ran, policies.iter().flat_map(of).collect::<Vec<_>>());
    assert_eq!((report.tier_policies.len(), report.cells.len(), report.subject.device_tokens), (12, 2, 200_000));
    assert!(report.notes.iter().any(|note| note.starts_with("the cheapest is to store")), "{:?}", report.notes);
    assert!(report.runs.iter().all(|run| run.unserved == 0));
    assert_eq!(report.runs[2].reuse, report.runs[4].reuse, "this model says full");
    let text = report_text(&report);
    assert!(text.contains("\nby tier policy:\ntier_policy ") && text.contains("\nperiodic:4096  ownerserve"), "{text}");
}

#[test]
fn invalid_tier_policies_are_rejected_before_any_run() {
    let accepted = "accepted: none, lru, full, periodic:TOKENS, no_windows, lowest_cost";
    for word in ["best", "periodic", "periodic:0", "periodic:x"] {
        assert!(args(&[&format!("--tier-policy={word}")]).unwrap_err().contains(accepted), "{word}");
    }
    assert_eq!(refused(&["--tier-policy=lru,lru"]), "`--tier-policy` names lru twice; accepted: each value once");
    for word in ["full", "no_windows", "periodic:64", "lowest_cost"] {
        let text = format!(
            "--tier-policy {word} depends on what a model's layers keep; give the model with --attention-file, or use none or lru"
        );
        assert_eq!(refused(&[&format!("--tier-policy={word}")]), text);
    }
    let lost = refused(&["--attention-file=/nowhere.toml"]);
    assert!(lost.starts_with("--attention-file: ") && lost.contains("/nowhere.toml"), "{lost}");
    let (_file, strange) = model(".json", r#"{"model_type": "jamba"}"#);
    assert!(refused(&[&strange]).contains("model_type is jamba; accepted: "), "{}", refused(&[&strange]));
    let (_file, dense) = model(".toml", "[[layers]]\npattern = [{ kind = \"dense\", kv_heads = 8, head_dim = 128 }]");
    let message = refused(&[&dense, "--tier-policy=no_windows"]);
    assert!(message.contains("--tier-policy: ") && message.contains("accepted: none, lru, lowest_cost"), "{message}");
}

#[test]
fn duplicate_arguments_are_rejected() {
    let twice = |flag, value| format!("`{flag}` names {value} twice; accepted: each value once");
    assert_eq!(refused(&["--load=2,4,2.0"]), twice("--load", "2"));
    assert_eq!(refused(&["--seeds=1,1"]), twice("--seeds", "1"));
    assert_eq!(refused(&["--policy=all,oracle"]), twice("--policy", "oracle"));
    let list = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(list.path(), "trace_0291\ntrace_0291\n").unwrap();
    let error = refused(&["--session-list", list.path().to_str().unwrap()]);
    assert_eq!(error, "line 2 of the list names the session `trace_0291` again; accepted: each session once");
}

#[test]
fn empty_trace_error_names_the_limit_that_excluded_it() {
    let error = refused(&["--max-context-tokens=10"]);
    assert!(
        error.contains("no step of at most 10 tokens (--max-context-tokens), or no session with 3 of them"),
        "{error}"
    );
    let empty = tempfile::NamedTempFile::new().unwrap();
    let error = files::load(empty.path()).unwrap_err().to_string();
    assert!(error.ends_with(":1: holds no request; accepted: at least one"), "{error}");
}

#[test]
fn table_is_followed_by_verdicts_and_notes() {
    let words = ["--workers=2", "--policy=dynamo,ownerserve", "--load=2,4", "--seeds=1,2", "--max-steps=10"];
    let report = simulated(&args(&words).unwrap()).unwrap();
    let text = report_text(&report);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("policy      load  ttft_mean_s"), "{text}");
    assert_eq!((lines.len(), lines[5]), (1 + 4 + 1 + 1 + 6, ""), "{text}");
    assert!(lines[6].starts_with("load  figure          best baseline"), "{text}");
    assert!(lines[7..].iter().all(|line| line.contains("dynamo") && (line.contains("PASS") || line.contains("SHORT"))));
    assert_eq!(report.subject.sessions, 35);
}

#[test]
fn unwritable_output_is_rejected_before_any_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let refused = |page: &Path, inputs: &[&Path]| ReportFiles::new(page, inputs).err().unwrap().to_string();
    assert!(refused(&at("report.pdf"), &[]).contains("accepted: a file whose name ends in .html"));
    assert!(refused(&at("nowhere/a.html"), &[]).starts_with("cannot write the report "));
    std::fs::create_dir(at("b.json")).unwrap();
    assert!(refused(&at("b.html"), &[]).contains("b.json, which is no plain file"));
    std::fs::write(at("c.csv"), "TIMESTAMP").unwrap();
    assert!(refused(&at("c.html"), &[&at("c.csv")]).contains("c.csv, which is read here"));
    assert!(refused(&at("d.html"), &[folder.path()]).contains("be read as a part of the trace"));
    ReportFiles::new(&at("e.html"), &[&at("c.csv")]).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing was left behind");
}

#[test]
fn report_has_three_files_and_is_deterministic_per_seed() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("it.html");
    let report =
        simulated(&args(&["--workers=2", "--policy=dynamo,ownerserve", "--load=2", "--max-steps=5"]).unwrap()).unwrap();
    ReportFiles::new(&page, &[]).unwrap().write(&report).unwrap();
    let read = |ending| std::fs::read_to_string(page.with_extension(ending)).unwrap();
    assert!(read("html").starts_with("<!doctype html>"));
    assert_eq!(read("csv"), report::csv(&report.runs));
    let json: serde_json::Value = serde_json::from_str(&read("json")).unwrap();
    assert_eq!(json["runs"].as_array().unwrap().len(), 2);
    let again =
        simulated(&args(&["--workers=2", "--policy=dynamo,ownerserve", "--load=2", "--max-steps=5"]).unwrap()).unwrap();
    assert_eq!((crate::ctl::pretty(&again), report::page(&again)), (read("json"), read("html")));
}

#[test]
fn timing_decisions_changes_no_other_figure() {
    let words = ["--workers=2", "--policy=dynamo,ownerserve", "--load=2", "--max-steps=5"];
    let plain = simulated(&args(&words).unwrap()).unwrap();
    let mut timed = simulated(&args(&[&words[..], &["--report=a.html"]].concat()).unwrap()).unwrap();
    let counts: Vec<_> = timed.planning.drain(..).map(|one| (one.policy, one.micros.count)).collect();
    assert_eq!(counts, [("dynamo", plain.subject.steps), ("ownerserve", plain.subject.steps)]);
    assert_eq!(timed, plain);
}

#[test]
fn router_and_simulation_use_the_same_policy_names() {
    use planner::SelectionRule;
    for rule in [SelectionRule::RoundRobin, SelectionRule::SessionPinning, SelectionRule::MatchRateMinusLoad] {
        let word = serde_json::to_value(rule).unwrap();
        assert_eq!(PolicyKind::from_str(word.as_str().unwrap()).unwrap().as_str(), word);
    }
    assert!(args(&["--policy=sticky_sessions"]).unwrap_err().contains("there is no policy `sticky_sessions`"));
}
