//! Tests of the command line and of failure messages.

use clap::Parser;
use strum::VariantArray as _;

use super::*;

#[derive(Parser)]
struct DemoCommandLine {
    #[command(flatten)]
    options: DemoArgs,
}

fn parse(line: &str) -> Result<DemoArgs, String> {
    let parsed = DemoCommandLine::try_parse_from(std::iter::once("demo").chain(line.split_whitespace()));
    parsed.map(|command| command.options).map_err(|error| error.to_string())
}

#[test]
fn all_three_policies_run_by_default() {
    let options = parse("").unwrap();
    assert_eq!(options.policies, ComparedPolicy::VARIANTS);
    assert_eq!((options.sessions, options.seed, options.keep_running), (48, 1, false));
    assert!(options.report.is_none() && options.corpus.is_none());
}

#[test]
fn policies_flag_accepts_the_names_used_in_the_report() {
    let options = parse("--policies ownerserve,round_robin").unwrap();
    assert_eq!(options.policies, [ComparedPolicy::Ownerserve, ComparedPolicy::RoundRobin]);
    assert!(parse("--policies luck").unwrap_err().contains("session_pinning"));
}

#[test]
fn out_of_range_numbers_are_rejected_with_the_range() {
    assert!(parse("--speed-up 0").unwrap_err().contains("0.01"));
    assert!(parse("--speed-up nan").is_err());
    assert!(parse("--think-scale -1").is_err());
    assert!(parse("--sessions 0").is_err());
    assert_eq!(parse("--think-scale 0").unwrap().think_scale, 0.0);
}

#[test]
fn only_the_first_failures_are_shown_each_with_its_step() {
    let step = |turn| FinishedStep {
        session: 4,
        turn,
        outcome: Err(ProxyClientError::Status { status: 503, body: "full".into() }),
    };
    let tally = ReplayProgress { steps: (0..9).map(step).collect(), started: 1, finished: 1 };
    let lines = failures(&tally);
    assert_eq!(lines.len(), MAX_SHOWN_ERRORS);
    assert_eq!(lines[1], "  session 4 step 1: HTTP 503: full");
}

#[tokio::test]
async fn missing_corpus_fails_before_anything_starts() {
    let options = parse("--corpus /nonexistent/corpus.gz").unwrap();
    let error = run_policies(&options, &mut LiveView::new()).await.err().unwrap();
    assert!(error.to_string().starts_with("cannot read the corpus"), "{error}");
}

#[test]
fn help_defines_every_figure_of_the_report() {
    use clap::CommandFactory as _;
    let help = DemoCommandLine::command().render_long_help().to_string();
    let figures = report::PolicyStats {
        requests: 0,
        errors: 0,
        ttft_p50_ms: 0.0,
        ttft_p99_ms: 0.0,
        step_latency_mean_ms: 0.0,
        step_latency_p99_ms: 0.0,
        computed_prompt_tokens: 0,
        owner_hit_rate: 0.0,
        duplicate_factor: 0.0,
        kv_transfer_bytes: 0,
        actions: Default::default(),
    };
    let figures = serde_json::to_value(figures).unwrap();
    for figure in figures.as_object().unwrap().keys() {
        assert!(help.contains(&format!("\n  {figure} ")), "{figure} is not in\n{help}");
    }
}

#[tokio::test]
async fn unwritable_report_fails_before_anything_starts() {
    let options = parse("--report /nonexistent/report.json").unwrap();
    let error = run_policies(&options, &mut LiveView::new()).await.err().unwrap();
    assert!(error.to_string().starts_with("cannot write the report"), "{error}");
}
