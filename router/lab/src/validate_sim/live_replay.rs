//! Replays the trace's sessions against the live proxy with the simulator's timing: each step starts after the steps
//! before it are finished and its pause has passed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use parking_lot::Mutex;
use serde_json::{Value, json};
use simulator::trace::{Trace, TraceSession};
use simulator::{NEXT_SESSION_DELAY, SESSION_START_INTERVAL, SeededRng};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::demo::client::ProxyClient;
use crate::demo::local_cluster::{LocalCluster, LocalClusterError};

/// Ids of the built-in tokenizer from here on are words; smaller ones are special.
const FIRST_WORD_ID: u32 = 16;
const WORD_COUNT: u64 = 4_000;
/// Interval between two checks of the processes.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, Default)]
pub(super) struct LiveMeasurements {
    /// Times to first token in engine seconds, of steps that finished while there were still sessions to start.
    pub(super) counted_ttft_seconds: Vec<f64>,
    /// Sum over all steps, in engine seconds.
    pub(super) ttft_seconds_sum: f64,
    pub(super) steps: usize,
    /// Errors of failed steps.
    pub(super) errors: Vec<String>,
    is_draining: bool,
}

#[derive(Clone)]
pub(super) struct LiveReplay {
    trace: Arc<Trace>,
    load: usize,
    /// Real seconds per engine second.
    slowdown: f64,
    proxy: SocketAddr,
    client: ProxyClient,
    next_session: Arc<AtomicUsize>,
    measurements: Arc<Mutex<LiveMeasurements>>,
    /// Finished steps of this and other runs.
    finished_steps: Arc<AtomicUsize>,
}

impl LiveReplay {
    pub(super) fn new(
        trace: Arc<Trace>,
        (load, slowdown): (usize, f64),
        (proxy, finished_steps): (SocketAddr, Arc<AtomicUsize>),
    ) -> Self {
        Self {
            trace,
            load,
            slowdown,
            proxy,
            client: ProxyClient::new(),
            next_session: Arc::default(),
            measurements: Arc::default(),
            finished_steps,
        }
    }

    pub(super) fn measurements(&self) -> LiveMeasurements {
        self.measurements.lock().clone()
    }

    /// Replays all sessions, `load` at a time. Ends early if a process of the cluster exits.
    pub(super) async fn replay(&self, cluster: &mut LocalCluster) -> Result<(), LocalClusterError> {
        let mut lanes = JoinSet::new();
        (0..self.load).for_each(|lane| _ = lanes.spawn(self.clone().run_sessions(lane)));
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        loop {
            tokio::select! {
                ended = lanes.join_next() => if ended.is_none() { return Ok(()) },
                _ = poll.tick() => {}
            }
            if let Some(error) = cluster.exited_child() {
                return Err(error);
            }
        }
    }

    async fn pause(&self, engine_seconds: f64) {
        tokio::time::sleep(Duration::from_secs_f64(self.slowdown * engine_seconds)).await;
    }

    /// Runs one session after the other until none is left.
    async fn run_sessions(self, lane: usize) {
        self.pause(SESSION_START_INTERVAL * lane as f64).await;
        loop {
            let number = self.next_session.fetch_add(1, Ordering::Relaxed);
            let Some(session) = self.trace.sessions.get(number) else {
                self.measurements.lock().is_draining = true;
                return;
            };
            self.run_session(number, session).await;
            self.pause(NEXT_SESSION_DELAY).await;
        }
    }

    async fn run_session(&self, number: usize, session: &TraceSession) {
        let over: Vec<_> = session.steps.iter().map(|_| watch::Sender::new(false)).collect();
        let steps = session.steps.iter().zip(0..).map(|(step, index)| {
            let over = &over;
            async move {
                for before in &step.after {
                    // Cannot fail: its sender lives as long as this.
                    let _ = over[*before].subscribe().wait_for(|over| *over).await;
                }
                if !step.after.is_empty() {
                    self.pause(step.pause.0 as f64 / 1e6).await;
                }
                self.send_step((number, session), index).await;
                over[index].send_replace(true);
            }
        });
        join_all(steps).await;
    }

    async fn send_step(&self, (number, session): (usize, &TraceSession), index: usize) {
        let body = self.completion_body((number, session), index);
        let name = format!("validate-sim-{number}-{}", session.steps[index].agent);
        let answer = self.client.send(self.proxy, "/v1/completions", (&name, &body)).await;
        self.finished_steps.fetch_add(1, Ordering::Relaxed);
        let mut seen = self.measurements.lock();
        seen.steps += 1;
        match answer {
            Ok(answer) => {
                let first_token = answer.measurement.first_token.as_secs_f64() / self.slowdown;
                seen.ttft_seconds_sum += first_token;
                if !seen.is_draining {
                    seen.counted_ttft_seconds.push(first_token);
                }
            }
            Err(error) => seen.errors.push(format!("session {number} step {index}: {error}")),
        }
    }

    /// Builds a completion request whose blocks are equal where the trace's are: a run has the same tokens wherever
    /// it occurs.
    fn completion_body(&self, (number, session): (usize, &TraceSession), index: usize) -> Value {
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

/// Appends tokens that depend only on the seed.
fn words(seed: u64, tokens: u64, into: &mut Vec<u32>) {
    let mut chance = SeededRng::new(seed);
    into.extend((0..tokens).map(|_| FIRST_WORD_ID + chance.below(WORD_COUNT) as u32));
}
