//! Runs one engine in real time. It sleeps until the engine's next event and never polls; whatever crosses the network
//! happens in tasks of its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use engine_model::{BlockImage, Engine, Finish, Output, OutputKind, Refused, Request, RequestId, Source, Stats};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use vocabulary::Micros;

use super::clock::Clock;
use super::histogram::Histogram;
use super::publisher::Publisher;
use super::side_channel;

/// Steps that end within this much real time are told together: the timer knows no shorter span.
const TICK: Duration = Duration::from_millis(1);

/// What a request's client is told.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Update {
    Token(u32),
    Finished(Finish),
}

/// An engine in real time.
#[derive(Clone)]
pub(crate) struct Driver {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    wake: Notify,
    clock: Clock,
    publisher: Publisher,
    turns: AtomicU64,
}

struct State {
    engine: Engine,
    clients: HashMap<RequestId, mpsc::Sender<Update>>,
    latencies: Latencies,
}

/// How long things took, in real time.
#[derive(Clone, Default)]
pub(crate) struct Latencies {
    pub(crate) first_token: Histogram,
    pub(crate) per_token: Histogram,
    pub(crate) whole: Histogram,
}

/// A request under way. Dropped before its end, it is cancelled: the client has left.
pub(crate) struct Ticket {
    id: RequestId,
    updates: mpsc::Receiver<Update>,
    driver: Driver,
}

impl Ticket {
    /// Everything said since the last call; waits for at least one update, none after the end.
    pub(crate) async fn updates(&mut self) -> Vec<Update> {
        const AT_ONCE: usize = 256;
        let mut updates = Vec::new();
        self.updates.recv_many(&mut updates, AT_ONCE).await;
        updates
    }

    /// End it here; its counts still come.
    pub(crate) fn stop(&self) {
        self.driver.with(|engine, now| engine.cancel(now, self.id));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.driver.cancel(self.id);
    }
}

impl Driver {
    pub(crate) fn new(engine: Engine, clock: Clock, publisher: Publisher) -> Self {
        let state = State { engine, clients: HashMap::new(), latencies: Latencies::default() };
        let (state, wake, turns) = (Mutex::new(state), Notify::new(), AtomicU64::new(0));
        Self { shared: Arc::new(Shared { state, wake, clock, publisher, turns }) }
    }

    /// Hand a request to the engine.
    pub(crate) fn submit(&self, request: Request) -> Result<Ticket, Refused> {
        // Tokens and the end; the engine holds the same bound.
        let room = request.sampling.max_tokens as usize + 2;
        let (sender, updates) = mpsc::channel(room);
        let id = {
            let mut state = self.shared.state.lock();
            let id = state.engine.submit(self.shared.clock.now(), request)?;
            state.clients.insert(id, sender);
            id
        };
        self.shared.wake.notify_one();
        Ok(Ticket { id, updates, driver: self.clone() })
    }

    fn cancel(&self, id: RequestId) {
        let mut state = self.shared.state.lock();
        if state.clients.remove(&id).is_some() {
            state.engine.cancel(self.shared.clock.now(), id);
            drop(state);
            self.shared.wake.notify_one();
        }
    }

    /// Do something to the engine at the present engine time.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut Engine, Micros) -> T) -> T {
        let done = act(&mut self.shared.state.lock().engine, self.shared.clock.now());
        self.shared.wake.notify_one();
        done
    }

    pub(crate) fn measures(&self) -> (Stats, Latencies) {
        let state = self.shared.state.lock();
        (state.engine.stats(), state.latencies.clone())
    }

    /// Whether the engine core has died.
    pub(crate) fn is_dead(&self) -> bool {
        self.shared.state.lock().engine.is_dead()
    }

    /// How often the engine was looked at.
    pub(crate) fn turns(&self) -> u64 {
        self.shared.turns.load(Ordering::Relaxed)
    }

    /// Run the engine. Ends only by being aborted.
    pub(crate) async fn run(self) {
        loop {
            let (outputs, next) = {
                let mut state = self.shared.state.lock();
                let outputs = state.engine.advance(self.shared.clock.now());
                (outputs, state.engine.next_event())
            };
            self.shared.turns.fetch_add(1, Ordering::Relaxed);
            self.tell(outputs);
            let woken = self.shared.wake.notified();
            match next.map(|at| self.shared.clock.instant(at).max(Instant::now() + TICK)) {
                Some(at) => drop(tokio::time::timeout_at(at.into(), woken).await),
                None => woken.await,
            }
        }
    }

    fn tell(&self, outputs: Vec<Output>) {
        for output in outputs {
            match output.kind {
                OutputKind::Token { request, token } => self.tell_client(request, Update::Token(token)),
                OutputKind::Finished { request, finish } => self.finish(request, finish, output.at),
                OutputKind::Events(events) => self.shared.publisher.publish(events),
                OutputKind::Pull { request, source } => drop(tokio::spawn(self.clone().pull(request, source))),
                OutputKind::Pulled { source, .. } => drop(tokio::spawn(side_channel::release(source))),
            }
        }
    }

    fn tell_client(&self, request: RequestId, update: Update) {
        if let Some(client) = self.shared.state.lock().clients.get(&request) {
            // A client that is gone cancels by itself.
            let _ = client.try_send(update);
        }
    }

    fn finish(&self, request: RequestId, finish: Finish, at: Micros) {
        let mut state = self.shared.state.lock();
        let clock = self.shared.clock;
        if finish.generated > 0 {
            let decode = Micros((at - finish.first_token).0 / u64::from(finish.generated.max(2) - 1));
            state.latencies.first_token.observe(clock.real(finish.first_token - finish.arrived));
            state.latencies.per_token.observe(clock.real(decode));
            state.latencies.whole.observe(clock.real(at - finish.arrived));
        }
        if let Some(client) = state.clients.remove(&request) {
            let _ = client.try_send(Update::Finished(finish));
        }
    }

    async fn pull(self, request: RequestId, source: Source) {
        let images: Option<Vec<BlockImage>> = side_channel::fetch(&source).await.ok();
        self.with(|engine, now| match images {
            Some(images) => engine.arrived(now, request, images),
            None => engine.pull_failed(now, request),
        });
    }
}
