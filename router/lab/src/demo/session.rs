//! Replays recorded sessions against the proxy: pauses, sends a step, and continues from the response that was really
//! served.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{sync::Semaphore, task::JoinSet};

use super::client::{ChatRequest, ProxyClient, ProxyClientError, ServedAnswer, StepMeasurement};
use super::corpus::{HistoryChange, RecordedDialogue};
use super::think_time::ThinkTimeModel;

/// Model that simulated workers serve.
const MODEL: &str = "tiny";

#[derive(Debug)]
pub(super) struct FinishedStep {
    pub session: usize,
    pub turn: usize,
    /// Measurements of the response, or the error.
    pub outcome: Result<StepMeasurement, ProxyClientError>,
}

/// Progress of a run for the view and the report. Bounded by the corpus.
#[derive(Default, Debug)]
pub(super) struct ReplayProgress {
    /// Finished steps, in order of completion.
    pub steps: Vec<FinishedStep>,
    pub started: usize,
    pub finished: usize,
}

#[derive(Clone)]
pub(super) struct ReplaySetup {
    pub dialogues: Arc<Vec<RecordedDialogue>>,
    pub tempo: ThinkTimeModel,
    pub proxy: SocketAddr,
    /// Maximum number of concurrent sessions.
    pub concurrency: usize,
    /// Where finished steps are recorded.
    pub tally: Arc<Mutex<ReplayProgress>>,
}

/// Replays every session and returns when all are done. Dropping the future stops them.
pub(super) async fn replay(script: ReplaySetup) {
    let places = Arc::new(Semaphore::new(script.concurrency));
    let client = ProxyClient::new();
    let began = Instant::now();
    let mut sessions = JoinSet::new();
    for number in 0..script.dialogues.len() {
        let (script, places, client) = (script.clone(), places.clone(), client.clone());
        sessions.spawn(async move {
            let start = script.tempo.start(number, script.dialogues.len());
            tokio::time::sleep(start.saturating_sub(began.elapsed())).await;
            // Cannot fail: the semaphore is never closed.
            let _place = places.acquire().await;
            script.tally.lock().started += 1;
            replay_session(&script, &client, number).await;
            script.tally.lock().finished += 1;
        });
    }
    while sessions.join_next().await.is_some() {}
}

/// Replays one session from its first step to its last.
async fn replay_session(script: &ReplaySetup, client: &ProxyClient, session: usize) {
    let name = format!("demo-{session}");
    let mut history: Vec<Value> = Vec::new();
    for (turn, recorded) in script.dialogues[session].turns.iter().enumerate() {
        tokio::time::sleep(script.tempo.pause(session, turn, recorded.pause)).await;
        if recorded.history == HistoryChange::Restarts {
            history.clear();
        }
        history.extend(recorded.new_messages.iter().cloned());
        let ask = ChatRequest { model: MODEL, messages: &history, max_tokens: recorded.answer_tokens };
        let answer = client.send_step(script.proxy, &name, &ask).await;
        // The history continues with the served response, so that its blocks are reused; after an error with the
        // recorded one.
        let served = |answer: &ServedAnswer| json!({"role": "assistant", "content": answer.text});
        history.push(answer.as_ref().map_or_else(|_| recorded.recorded_answer.clone(), served));
        let outcome = answer.map(|answer| answer.measurement);
        script.tally.lock().steps.push(FinishedStep { session, turn, outcome });
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
