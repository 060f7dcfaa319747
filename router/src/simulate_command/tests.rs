use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    args: SimulateArgs,
}

fn traces() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/traces/weka_cc").to_owned()
}

fn args(words: &[&str]) -> Result<SimulateArgs, String> {
    let all = ["simulate", &traces()].into_iter().chain(words.iter().copied()).map(str::to_owned).collect::<Vec<_>>();
    Line::try_parse_from(all).map(|line| line.args).map_err(|error| error.to_string())
}

fn figures(words: &[&str]) -> Vec<Figures> {
    let args = args(words).unwrap();
    args.figures(files::load(&args.trace).unwrap().within(&args.limits())).unwrap()
}

#[test]
fn every_policy_load_and_seed_is_a_run_of_its_own() {
    let small = ["--workers=2", "--policy=sticky_sessions,ownerserve", "--load=2,4", "--seed=1,2", "--steps=10"];
    let runs = figures(&small);
    let cells: Vec<_> = runs.iter().map(|run| (run.traffic.seed, run.traffic.load as u64, run.policy)).collect();
    let cell = |seed, load| [(seed, load, "sticky_sessions"), (seed, load, "ownerserve")];
    assert_eq!(cells, [cell(1, 2), cell(1, 4), cell(2, 2), cell(2, 4)].concat());
    assert_eq!(runs, figures(&small), "the same seeds are the same figures");
    assert_ne!(runs[0].first_token, runs[4].first_token, "another seed is another order of sessions");
    assert!(runs.iter().all(|run| run.unserved == 0));
}

#[test]
fn a_list_of_sessions_is_replayed_in_its_order() {
    let list = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(list.path(), "trace_0291\ntrace_0016\n").unwrap();
    let path = list.path().to_str().unwrap();
    let runs = figures(&["--policy=oracle", "--sessions", path, "--seed=1,2", "--load=2"]);
    assert_eq!(runs[0].service, runs[1].service);
    assert_eq!(runs[0].service.sessions_over, 2);
}

#[test]
fn what_is_accepted_is_said() {
    let said = |words: &[&str]| args(words).unwrap_err();
    assert!(said(&["--policy=best"]).contains("there is no policy `best`; accepted: round_robin, "));
    assert!(said(&["--profile=b200"]).contains("accepted: 8b_h100, 8b_a100, 30a3_h200, 70b_tp4"));
    assert!(said(&["--load=many"]).contains("invalid"));
    let nobody = args(&["--policy=oracle", "--workers=0"]).unwrap();
    let error = nobody.figures(files::load(&nobody.trace).unwrap()).unwrap_err().to_string();
    assert_eq!(error, "oracle is given 0 workers; accepted: 1 to 1024");
    let many = args(&["--policy=round_robin,oracle", "--load=2,36"]).unwrap();
    let trace = files::load(&many.trace).unwrap().within(&many.limits());
    let error = many.cells(&trace).unwrap_err().to_string();
    assert_eq!(error, "the load is 36; accepted: a whole number of sessions at once, 1 to the 35 that the trace has");
    let lost = args(&["--sessions=/nowhere"]).unwrap();
    let error = lost.figures(files::load(&lost.trace).unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("cannot read the list of sessions /nowhere: "), "{error}");
}

#[test]
fn the_simulated_planner_expects_the_answers_that_this_router_expects() {
    assert_eq!(simulator::policies::USUAL_ANSWER, crate::pipeline::parse::USUAL_ANSWER);
}
