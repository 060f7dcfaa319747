//! The command line, and what is said of failures.

use clap::Parser;
use strum::VariantArray as _;

use super::*;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    options: Options,
}

fn parse(line: &str) -> Result<Options, String> {
    let parsed = Command::try_parse_from(std::iter::once("demo").chain(line.split_whitespace()));
    parsed.map(|command| command.options).map_err(|error| error.to_string())
}

#[test]
fn without_flags_all_three_policies_run() {
    let options = parse("").unwrap();
    assert_eq!(options.policies, Policy::VARIANTS);
    assert_eq!((options.sessions, options.seed, options.keep), (48, 1, false));
    assert!(options.report.is_none() && options.corpus.is_none());
}

#[test]
fn policies_are_a_list_of_the_words_of_the_report() {
    let options = parse("--policies ownerserve,round_robin").unwrap();
    assert_eq!(options.policies, [Policy::Ownerserve, Policy::RoundRobin]);
    assert!(parse("--policies luck").unwrap_err().contains("session_pinning"));
}

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    assert!(parse("--speed-up 0").unwrap_err().contains("0.01"));
    assert!(parse("--speed-up nan").is_err());
    assert!(parse("--think-scale -1").is_err());
    assert!(parse("--sessions 0").is_err());
    assert_eq!(parse("--think-scale 0").unwrap().think_scale, 0.0);
}

#[test]
fn failures_are_shown_with_their_step_and_only_the_first_few() {
    let step = |turn| Step { session: 4, turn, outcome: Err(ClientError::Status { status: 503, body: "full".into() }) };
    let tally = Tally { steps: (0..9).map(step).collect(), begun: 1, over: 1 };
    let lines = failures(&tally);
    assert_eq!(lines.len(), SHOWN_ERRORS);
    assert_eq!(lines[1], "  session 4 step 1: HTTP 503: full");
}

#[tokio::test]
async fn a_corpus_that_is_not_there_fails_the_demo_before_anything_starts() {
    let options = parse("--corpus /nonexistent/corpus.gz").unwrap();
    let error = perform(&options, &mut View::new()).await.err().unwrap();
    assert!(error.to_string().starts_with("cannot read the corpus"), "{error}");
}

#[test]
fn help_defines_every_figure_of_the_report() {
    use clap::CommandFactory as _;
    let help = Command::command().render_long_help().to_string();
    let figures = report::Figures {
        requests: 0,
        errors: 0,
        first_token_p50_ms: 0.0,
        first_token_p99_ms: 0.0,
        step_mean_ms: 0.0,
        step_p99_ms: 0.0,
        prefill_tokens: 0,
        owner_hit_rate: 0.0,
        duplicate_factor: 0.0,
        kv_bytes_moved: 0,
        actions: Default::default(),
    };
    let figures = serde_json::to_value(figures).unwrap();
    for figure in figures.as_object().unwrap().keys() {
        assert!(help.contains(&format!("\n  {figure} ")), "{figure} is not in\n{help}");
    }
}

#[tokio::test]
async fn a_report_that_cannot_be_written_fails_the_demo_before_anything_starts() {
    let options = parse("--report /nonexistent/report.json").unwrap();
    let error = perform(&options, &mut View::new()).await.err().unwrap();
    assert!(error.to_string().starts_with("cannot write the report"), "{error}");
}
