//! Runs one engine in real time. It sleeps until the engine's next event and never polls. Network transfers run in
//! separate tasks.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use engine_model::{
    BlockImage, Engine, EngineOutput, EngineOutputKind, EngineRequest, EngineRequestId, EngineStats, FinishedRequest,
    RemoteBlocks, RequestRejection,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use vocabulary::Micros;

use super::clock::EngineClock;
use super::publisher::EventPublisher;
use super::side_channel;

/// Steps that end within this span are reported together: the timer's resolution is no finer.
const TICK: Duration = Duration::from_millis(1);

/// An update for a request's client.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum RequestUpdate {
    Token(u32),
    Finished(FinishedRequest),
}

/// An engine that runs in real time.
#[derive(Clone)]
pub(crate) struct EngineDriver {
    shared: Arc<DriverCore>,
}

struct DriverCore {
    state: Mutex<DriverState>,
    wake: Notify,
    clock: EngineClock,
    publisher: EventPublisher,
    wakeups: AtomicU64,
}

struct DriverState {
    engine: Engine,
    clients: HashMap<EngineRequestId, mpsc::Sender<RequestUpdate>>,
    latencies: LatencyHistograms,
}

/// Latencies in real time.
#[derive(Clone, Default)]
pub(crate) struct LatencyHistograms {
    pub(crate) first_token: Histogram,
    pub(crate) per_token: Histogram,
    pub(crate) total: Histogram,
}

/// A running request. Dropping it before its end cancels it, because the client has disconnected.
pub(crate) struct RequestHandle {
    id: EngineRequestId,
    updates: mpsc::Receiver<RequestUpdate>,
    driver: EngineDriver,
}

impl RequestHandle {
    /// Returns all updates since the last call; waits for at least one. Empty after the end.
    pub(crate) async fn updates(&mut self) -> Vec<RequestUpdate> {
        const MAX_UPDATES: usize = 256;
        let mut updates = Vec::new();
        self.updates.recv_many(&mut updates, MAX_UPDATES).await;
        updates
    }

    /// Ends the request early; its final counts still arrive.
    pub(crate) fn stop(&self) {
        self.driver.with_engine(|engine, now| engine.cancel(now, self.id));
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.driver.cancel(self.id);
    }
}

impl EngineDriver {
    pub(crate) fn new(engine: Engine, clock: EngineClock, publisher: EventPublisher) -> Self {
        let state = DriverState { engine, clients: HashMap::new(), latencies: LatencyHistograms::default() };
        let (state, wake, turns) = (Mutex::new(state), Notify::new(), AtomicU64::new(0));
        Self { shared: Arc::new(DriverCore { state, wake, clock, publisher, wakeups: turns }) }
    }

    /// Submits a request to the engine.
    pub(crate) fn submit(&self, request: EngineRequest) -> Result<RequestHandle, RequestRejection> {
        // All tokens and the end; the engine has the same limit.
        let room = request.sampling.max_tokens as usize + 2;
        let (sender, updates) = mpsc::channel(room);
        let id = {
            let mut state = self.shared.state.lock();
            let id = state.engine.submit(self.shared.clock.now(), request)?;
            state.clients.insert(id, sender);
            id
        };
        self.shared.wake.notify_one();
        Ok(RequestHandle { id, updates, driver: self.clone() })
    }

    fn cancel(&self, id: EngineRequestId) {
        let mut state = self.shared.state.lock();
        if state.clients.remove(&id).is_some() {
            state.engine.cancel(self.shared.clock.now(), id);
            drop(state);
            self.shared.wake.notify_one();
        }
    }

    /// Calls `act` with the engine and the current engine time.
    pub(crate) fn with_engine<T>(&self, act: impl FnOnce(&mut Engine, Micros) -> T) -> T {
        let done = act(&mut self.shared.state.lock().engine, self.shared.clock.now());
        self.shared.wake.notify_one();
        done
    }

    pub(crate) fn stats_and_latencies(&self) -> (EngineStats, LatencyHistograms) {
        let state = self.shared.state.lock();
        (state.engine.stats(), state.latencies.clone())
    }

    /// Returns whether the engine core has died.
    pub(crate) fn is_dead(&self) -> bool {
        self.shared.state.lock().engine.is_dead()
    }

    /// Returns how often the driver woke up.
    pub(crate) fn wakeups(&self) -> u64 {
        self.shared.wakeups.load(Ordering::Relaxed)
    }

    /// Runs the engine until the task is aborted.
    pub(crate) async fn run(self) {
        loop {
            let (outputs, next) = {
                let mut state = self.shared.state.lock();
                let outputs = state.engine.advance(self.shared.clock.now());
                (outputs, state.engine.next_event())
            };
            self.shared.wakeups.fetch_add(1, Ordering::Relaxed);
            self.dispatch_output(outputs);
            let woken = self.shared.wake.notified();
            match next.map(|at| self.shared.clock.instant_at(at).max(Instant::now() + TICK)) {
                Some(at) => drop(tokio::time::timeout_at(at.into(), woken).await),
                None => woken.await,
            }
        }
    }

    fn dispatch_output(&self, outputs: Vec<EngineOutput>) {
        for output in outputs {
            match output.kind {
                EngineOutputKind::Token { request, token } => self.send_update(request, RequestUpdate::Token(token)),
                EngineOutputKind::Finished { request, finish } => self.finish_request(request, finish, output.at),
                EngineOutputKind::Events(events) => self.shared.publisher.publish(events),
                EngineOutputKind::Pull { request, source } => {
                    drop(tokio::spawn(self.clone().pull_blocks(request, source)))
                }
                EngineOutputKind::Pulled { source, .. } => drop(tokio::spawn(side_channel::release(source))),
            }
        }
    }

    fn send_update(&self, request: EngineRequestId, update: RequestUpdate) {
        if let Some(client) = self.shared.state.lock().clients.get(&request) {
            // A disconnected client cancels by dropping its handle.
            let _ = client.try_send(update);
        }
    }

    fn finish_request(&self, request: EngineRequestId, finish: FinishedRequest, at: Micros) {
        let mut state = self.shared.state.lock();
        let clock = self.shared.clock;
        if finish.generated > 0 {
            let decode = Micros((at - finish.first_token).0 / u64::from(finish.generated.max(2) - 1));
            state.latencies.first_token.observe(clock.real_duration(finish.first_token - finish.arrived));
            state.latencies.per_token.observe(clock.real_duration(decode));
            state.latencies.total.observe(clock.real_duration(at - finish.arrived));
        }
        if let Some(client) = state.clients.remove(&request) {
            let _ = client.try_send(RequestUpdate::Finished(finish));
        }
    }

    async fn pull_blocks(self, request: EngineRequestId, source: RemoteBlocks) {
        let images: Option<Vec<BlockImage>> = side_channel::fetch(&source).await.ok();
        self.with_engine(|engine, now| match images {
            Some(images) => engine.pull_arrived(now, request, images),
            None => engine.pull_failed(now, request),
        });
    }
}

/// Bucket bounds of vLLM, in seconds.
const BOUNDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];

/// Histogram of seconds in Prometheus text format.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    counts: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    pub(crate) fn observe(&mut self, span: Duration) {
        let seconds = span.as_secs_f64();
        if let Some(bucket) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            self.counts[bucket] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }

    /// Returns its lines; `labels` without braces.
    pub(crate) fn render(&self, name: &str, labels: &str) -> String {
        let mut text = format!("# TYPE {name} histogram\n");
        let mut below = 0;
        for (bound, count) in BOUNDS.iter().zip(self.counts) {
            below += count;
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound:?}\"}} {below}.0");
        }
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {}.0", self.count);
        let _ = writeln!(text, "{name}_count{{{labels}}} {}.0\n{name}_sum{{{labels}}} {:?}", self.count, self.sum);
        text
    }
}
