//! Tests of whole sessions against a minimal OpenAI server that records the requests.

use axum::{Json, Router, http::StatusCode, response::IntoResponse, routing::post};
use tokio::net::TcpListener;

use super::*;
use crate::demo::corpus::{PauseCause, RecordedStep};

type ReceivedBodies = Arc<Mutex<Vec<Value>>>;

/// Responds to every request with "served N", where N counts them; to every `broken`th with a 500.
async fn server(broken: usize) -> (SocketAddr, ReceivedBodies) {
    let seen = ReceivedBodies::default();
    let requests = seen.clone();
    let answer = move |Json(body): Json<Value>| async move {
        let number = {
            let mut requests = requests.lock();
            requests.push(body);
            requests.len()
        };
        if number % broken == 0 {
            return (StatusCode::INTERNAL_SERVER_ERROR, "broken").into_response();
        }
        let chunk = json!({"choices": [{"delta": {"content": format!("served {number}")}, "finish_reason": "stop"}]});
        let usage = json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}});
        ([("x-sim-worker", "w1")], format!("data: {chunk}\n\ndata: {usage}\n\ndata: [DONE]\n\n")).into_response()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().route("/v1/chat/completions", post(answer));
    tokio::spawn(async move { axum::serve(listener, app).await });
    (address, seen)
}

fn dialogue(turns: usize, history: HistoryChange) -> RecordedDialogue {
    let turn = |turn| RecordedStep {
        new_messages: vec![json!({"role": "user", "content": format!("ask {turn}")})],
        history,
        pause: PauseCause::Tool,
        recorded_answer: json!({"role": "assistant", "content": "recorded", "tool_calls": []}),
        answer_tokens: 8,
    };
    RecordedDialogue { name: "test".into(), turns: (0..turns).map(turn).collect() }
}

async fn run(dialogues: Vec<RecordedDialogue>, broken: usize) -> (Vec<FinishedStep>, Vec<Value>) {
    let (proxy, seen) = server(broken).await;
    let tally = Arc::new(Mutex::new(ReplayProgress::default()));
    let tempo = ThinkTimeModel { seed: 1, scale: 0.0 };
    replay(ReplaySetup { dialogues: Arc::new(dialogues), tempo, proxy, concurrency: 2, tally: tally.clone() }).await;
    let tally = std::mem::take(&mut *tally.lock());
    assert_eq!(tally.started, tally.finished);
    (tally.steps, std::mem::take(&mut *seen.lock()))
}

fn contents(request: &Value) -> Vec<&str> {
    request["messages"].as_array().unwrap().iter().map(|message| message["content"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn each_step_resends_the_history_with_served_answers() {
    let (steps, seen) = run(vec![dialogue(3, HistoryChange::Extends)], usize::MAX).await;
    assert_eq!(contents(&seen[2]), ["ask 0", "served 1", "ask 1", "served 2", "ask 2"]);
    assert_eq!(steps.iter().map(|step| step.turn).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(steps.iter().all(|step| step.outcome.as_ref().unwrap().worker.as_deref() == Some("w1")));
}

#[tokio::test]
async fn session_continues_from_the_recorded_answer_after_an_error() {
    let (steps, seen) = run(vec![dialogue(3, HistoryChange::Extends)], 2).await;
    assert_eq!(contents(&seen[2]), ["ask 0", "served 1", "ask 1", "recorded", "ask 2"]);
    assert!(matches!(steps[1].outcome, Err(ProxyClientError::Status { status: 500, .. })));
    assert_eq!(steps.iter().filter(|step| step.outcome.is_err()).count(), 1);
}

#[tokio::test]
async fn restarted_history_drops_earlier_messages() {
    let (_, seen) = run(vec![dialogue(2, HistoryChange::Restarts)], usize::MAX).await;
    assert_eq!(contents(&seen[1]), ["ask 1"]);
}

#[tokio::test]
async fn all_sessions_are_replayed_when_concurrency_is_lower() {
    let (steps, _) = run(vec![dialogue(2, HistoryChange::Extends); 7], usize::MAX).await;
    assert_eq!(steps.len(), 14);
    let mut sessions: Vec<_> = steps.iter().map(|step| step.session).collect();
    sessions.sort_unstable();
    sessions.dedup();
    assert_eq!(sessions, (0..7).collect::<Vec<_>>());
}
