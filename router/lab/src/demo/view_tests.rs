//! Tests of the view's text.

use super::*;
use crate::demo::client::{ProxyClientError, StepMeasurement};
use crate::demo::session::FinishedStep;

fn tally() -> ReplayProgress {
    let served = |worker: &str| StepMeasurement {
        first_token: Duration::from_millis(20),
        total: Duration::from_millis(90),
        prompt_tokens: 100,
        cached_tokens: 50,
        worker: Some(worker.to_owned()),
    };
    let step = |session, turn, worker: &str| FinishedStep { session, turn, outcome: Ok(served(worker)) };
    let failed =
        FinishedStep { session: 2, turn: 0, outcome: Err(ProxyClientError::TimedOut(Duration::from_secs(60))) };
    ReplayProgress { steps: vec![step(0, 0, "a"), step(0, 1, "b"), step(1, 0, "b"), failed], started: 3, finished: 1 }
}

fn check(look: impl Fn(&RunSnapshot) -> String) -> String {
    let router = MetricsScrape::parse(concat!(
        "ownerserve_plan_actions_total{action=\"remote_prefill\"} 4\n",
        "ownerserve_predicted_time_to_first_token_seconds_sum 0.4\n",
        "ownerserve_predicted_time_to_first_token_seconds_count 10\n",
        "ownerserve_time_to_first_token_seconds_sum 0.5\nownerserve_time_to_first_token_seconds_count 10\n",
    ));
    let tally = tally();
    let workers = [("a".to_owned(), WorkerRole::Prefill), ("b".to_owned(), WorkerRole::Decode)];
    let stage = RunDescription { policy: ComparedPolicy::Ownerserve, sessions: 8, workers: workers.into() };
    look(&RunSnapshot { run: &stage, elapsed: Duration::from_millis(2_500), progress: &tally, router: &router })
}

#[test]
fn screen_shows_sessions_owners_actions_hits_and_predictions() {
    let screen = check(|moment| moment.screen().join("\n"));
    for part in [
        "ownerserve · 2.5 s",
        "2 running · 1 over · 8 in all",
        "4 · 1 errors",
        "owner hits   0.0 % · prompt from cache 50.0 %",
        "remote_prefill 4",
        "predicted 40.0 ms · seen 50.0 ms",
        "a                prefill      1 steps · owns   0 sessions",
        "b                decode       2 steps · owns   2 sessions",
    ] {
        assert!(screen.contains(part), "{part:?} is not in\n{screen}");
    }
}

#[test]
fn plain_view_is_one_line_without_escapes() {
    let line = check(|moment| moment.line());
    assert!(line.contains("1 of 8 sessions over, 4 steps, 1 errors, first token p50 20 ms"), "{line}");
    assert!(!line.contains('\n') && !line.contains('\x1b'));
}
