//! The trace's sessions against the live proxy, as the simulator's script has them: each step once those before it are
//! over and its pause is.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use parking_lot::Mutex;
use serde_json::{Value, json};
use simulator::trace::{Session, Trace};
use simulator::{Chance, NEXT_SESSION, START_GAP};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::demo::client::Client;
use crate::demo::cluster::{Cluster, ClusterError};

/// Ids of the built-in tokenizer that are words: beyond those with a meaning of their own.
const FIRST_WORD: u32 = 16;
const WORDS: u64 = 4_000;
/// Between two looks at the processes.
const LOOK_EVERY: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Engine seconds until the first token, of the steps that count: until fewer sessions run than were asked for.
    pub(super) first_tokens: Vec<f64>,
    /// The same of all steps, summed.
    pub(super) all_first_tokens: f64,
    pub(super) steps: usize,
    /// What went wrong.
    pub(super) errors: Vec<String>,
    cut: bool,
}

#[derive(Clone)]
pub(super) struct Live {
    trace: Arc<Trace>,
    load: usize,
    /// Seconds that an engine's second takes.
    slower: f64,
    proxy: SocketAddr,
    client: Client,
    next: Arc<AtomicUsize>,
    seen: Arc<Mutex<Seen>>,
    /// Steps that are over, here and in other runs.
    over: Arc<AtomicUsize>,
}

impl Live {
    pub(super) fn new(
        trace: Arc<Trace>,
        (load, slower): (usize, f64),
        (proxy, over): (SocketAddr, Arc<AtomicUsize>),
    ) -> Self {
        Self { trace, load, slower, proxy, client: Client::new(), next: Arc::default(), seen: Arc::default(), over }
    }

    pub(super) fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    /// All sessions, so many at once. Ends early where a process of the cluster does.
    pub(super) async fn replay(&self, cluster: &mut Cluster) -> Result<(), ClusterError> {
        let mut places = JoinSet::new();
        (0..self.load).for_each(|place| _ = places.spawn(self.clone().place(place)));
        let mut look = tokio::time::interval(LOOK_EVERY);
        loop {
            tokio::select! {
                over = places.join_next() => if over.is_none() { return Ok(()) },
                _ = look.tick() => {}
            }
            if let Some(error) = cluster.failed() {
                return Err(error);
            }
        }
    }

    async fn pause(&self, engine_seconds: f64) {
        tokio::time::sleep(Duration::from_secs_f64(self.slower * engine_seconds)).await;
    }

    /// One session after the other, until there is no next one.
    async fn place(self, place: usize) {
        self.pause(START_GAP * place as f64).await;
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(session) = self.trace.sessions.get(number) else {
                self.seen.lock().cut = true;
                return;
            };
            self.session(number, session).await;
            self.pause(NEXT_SESSION).await;
        }
    }

    async fn session(&self, number: usize, session: &Session) {
        let over: Vec<_> = session.steps.iter().map(|_| watch::Sender::new(false)).collect();
        let steps = session.steps.iter().zip(0..).map(|(step, index)| {
            let over = &over;
            async move {
                for before in &step.after {
                    // Its sender lives as long as this.
                    let _ = over[*before].subscribe().wait_for(|over| *over).await;
                }
                if !step.after.is_empty() {
                    self.pause(step.think.0 as f64 / 1e6).await;
                }
                self.ask((number, session), index).await;
                over[index].send_replace(true);
            }
        });
        join_all(steps).await;
    }

    async fn ask(&self, (number, session): (usize, &Session), index: usize) {
        let body = self.completion((number, session), index);
        let name = format!("closed-loop-{number}-{}", session.steps[index].agent);
        let answer = self.client.stream(self.proxy, "/v1/completions", (&name, &body)).await;
        self.over.fetch_add(1, Ordering::Relaxed);
        let mut seen = self.seen.lock();
        seen.steps += 1;
        match answer {
            Ok(answer) => {
                let first_token = answer.served.first_token.as_secs_f64() / self.slower;
                seen.all_first_tokens += first_token;
                if !seen.cut {
                    seen.first_tokens.push(first_token);
                }
            }
            Err(error) => seen.errors.push(format!("session {number} step {index}: {error}")),
        }
    }

    /// Blocks are equal where the trace's are: a run has the same tokens wherever it is.
    fn completion(&self, (number, session): (usize, &Session), index: usize) -> Value {
        let step = &session.steps[index];
        let mut prompt = Vec::with_capacity(step.prompt.0 as usize);
        for run in step.path.iter() {
            words(u64::from(run.0), self.trace.runs.tokens(*run).0, &mut prompt);
        }
        let own = 1 << 63 | (number as u64) << 24 | index as u64;
        words(own, step.prompt.0 - prompt.len() as u64, &mut prompt);
        json!({
            "model": "tiny", "prompt": prompt, "max_tokens": step.answer.0, "ignore_eos": true,
            "temperature": 0.0, "stream": true, "stream_options": {"include_usage": true},
        })
    }
}

/// So many tokens that only this seed gives.
fn words(seed: u64, tokens: u64, into: &mut Vec<u32>) {
    let mut chance = Chance::new(seed);
    into.extend((0..tokens).map(|_| FIRST_WORD + chance.below(WORDS) as u32));
}
