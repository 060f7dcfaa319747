//! Keeping an eye on Redis: probes, what to tell it anew after it was gone or flushed, and the writes that wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redis::Pipeline;
use tokio::sync::mpsc;

use super::breaker::Standing;
use super::key::{Key, Kind, of_namespace};
use super::lease::count_routers;
use super::link::NoAnswer;
use super::memory::Held;
use super::seal::OVERHEAD;
use super::{Inner, Shared};
use crate::incoming::new_request_id;

/// Between two probes while all is well, and while it is not.
const CALM: Duration = Duration::from_secs(1);
const WORRIED: Duration = Duration::from_millis(200);
/// How long a mark stands that nobody renews.
const MARK_SECONDS: u64 = 600;
/// What is sealed so that secrets can be compared, and how long it stands that nobody renews.
const CANARY: &[u8] = b"ownerserve";
const CANARY_SECONDS: u64 = 60;
/// Most writes in one pipeline.
const BATCH: usize = 64;
/// Most writes that wait, and their bytes.
pub(super) const WAITING_WRITES: usize = 1024;
const WAITING_BYTES: usize = 32 << 20;

/// Something for Redis to remember; an empty value marks what is to be forgotten.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) key: Key,
    pub(super) held: Held,
}

impl Write {
    fn bytes(&self) -> usize {
        self.held.value.len()
    }
}

/// What a write may do to what is there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    Anything,
    /// Nothing: others may have forgotten it meanwhile.
    Nothing,
}

/// The way to the writer, which never waits.
#[derive(Clone, Debug)]
pub(super) struct Writes {
    queue: mpsc::Sender<Write>,
    bytes: Arc<AtomicUsize>,
}

impl Writes {
    pub(super) fn new() -> (Self, mpsc::Receiver<Write>) {
        let (queue, waiting) = mpsc::channel(WAITING_WRITES);
        (Self { queue, bytes: Arc::default() }, waiting)
    }

    /// Whether there was room for it.
    pub(super) fn push(&self, write: Write) -> bool {
        let bytes = write.bytes();
        if self.bytes.load(Ordering::Relaxed) + bytes > WAITING_BYTES {
            return false;
        }
        let taken = self.queue.try_send(write).is_ok();
        if taken {
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        taken
    }

    fn done(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Writes what was pushed, in order, in batches.
pub(super) async fn write_all(inner: Arc<Inner>, waiting: &mut mpsc::Receiver<Write>) {
    let Some(shared) = &inner.shared else { return };
    let mut batch = Vec::with_capacity(BATCH);
    while waiting.recv_many(&mut batch, BATCH).await > 0 {
        let outcome = shared.save(&batch, Over::Anything).await;
        if outcome != "saved" {
            shared.owe();
        }
        for write in batch.drain(..) {
            shared.writes.done(write.bytes());
            inner.metrics.written(write.key.kind, outcome);
        }
    }
}

impl Shared {
    /// Something may be missing in Redis: the next probe that is answered is followed by all that this router remembers.
    fn owe(&self) {
        self.owes.store(true, Ordering::Relaxed);
    }

    /// The word for how it went. What was not saved stays in memory, and is told anew.
    pub(super) async fn save(&self, batch: &[Write], over: Over) -> &'static str {
        let mut pipeline = redis::pipe();
        batch.iter().for_each(|write| self.command(write, over, &mut pipeline));
        match self.link.tell::<()>(&pipeline).await {
            Ok(()) => "saved",
            Err(NoAnswer::NotAsked) => "not_asked",
            Err(NoAnswer::Failed(_) | NoAnswer::Foreign) => "failed",
        }
    }

    fn command(&self, write: &Write, over: Over, pipeline: &mut Pipeline) {
        let key = write.key.text(&self.namespace);
        let millis = u64::try_from(write.held.ttl.as_millis()).unwrap_or(u64::MAX).max(1);
        let Some(value) = self.sealer.seal(&key, &write.held.value) else { return };
        pipeline.cmd("SET").arg(&key).arg(value).arg("PX").arg(millis);
        if over == Over::Nothing || write.key.kind == Kind::Holder {
            pipeline.arg("NX");
        }
        pipeline.ignore();
    }
}

/// A sealed value that all routers of a namespace share: who cannot open it has another secret than the others.
struct Canary {
    ask: Pipeline,
    renew: Pipeline,
    key: String,
}

impl Canary {
    /// None where nothing can be sealed.
    fn new(shared: &Shared) -> Option<Self> {
        let key = format!("{}:secret", of_namespace(&shared.namespace));
        let value = shared.sealer.seal(&key, CANARY)?;
        let (mut ask, mut renew) = (redis::pipe(), redis::pipe());
        ask.cmd("SET").arg(&key).arg(value).arg("NX").arg("EX").arg(CANARY_SECONDS).ignore();
        ask.cmd("GETRANGE").arg(&key).arg(0).arg(CANARY.len() + OVERHEAD);
        renew.cmd("EXPIRE").arg(&key).arg(CANARY_SECONDS).ignore();
        Some(Self { ask, renew, key })
    }

    /// Looks at what lies there, and says so when that changes. Without an answer nothing is known anew.
    async fn compare(&self, shared: &Shared) {
        let Ok((sealed,)) = shared.link.tell::<(Vec<u8>,)>(&self.ask).await else { return };
        let is_ours = shared.sealer.open(&self.key, sealed).is_some();
        if is_ours {
            // Only where it opens: it goes with the last router that has the other secret.
            let _ = shared.link.tell::<()>(&self.renew).await;
        }
        match (shared.other_secret.swap(!is_ours, Ordering::Relaxed), is_ours) {
            (false, false) => tracing::warn!(
                "another router of this namespace has another soft_state.secret: what either writes to Redis the other cannot \
                 read; give all of them the same one"
            ),
            (true, true) => tracing::info!("all routers of this namespace have the same soft_state.secret"),
            _ => {}
        }
    }
}

/// Probes Redis for as long as it is asked to, and tells it again what it has forgotten.
pub(super) async fn watch(inner: Arc<Inner>) {
    let Some(shared) = &inner.shared else { return };
    let mark = Mark::new(&shared.namespace);
    let canary = Canary::new(shared);
    let (mut marked, mut said) = (false, false);
    loop {
        let before = shared.link.standing();
        let found = shared.link.probe::<(Option<u64>, u32)>(&mark.probe).await;
        let now = shared.link.standing();
        if found.is_err() && !said && now == before {
            shared.link.say(now);
        }
        said = true;
        if let Ok((_, routers)) = found {
            inner.routers_seen.store(routers, Ordering::Relaxed);
            inner.metrics.routers.set(routers.into());
        }
        match found {
            Ok((None, _)) => {
                if std::mem::take(&mut marked) {
                    inner.metrics.flushes.inc();
                    tracing::warn!("Redis has forgotten everything: it is told again what this router remembers");
                }
                // The mark first: should Redis forget once more while it is told, the next probe finds that out.
                marked = shared.link.tell::<()>(&mark.set).await.is_ok();
                shared.owe();
            }
            Ok((Some(_), _)) => marked = true,
            Err(_) => {}
        }
        if now == Standing::Up && before != Standing::Up {
            shared.owe();
        }
        if now == Standing::Up
            && let Some(canary) = &canary
        {
            canary.compare(shared).await;
        }
        if now == Standing::Up && shared.owes.swap(false, Ordering::Relaxed) {
            tell_anew(&inner, shared).await;
        }
        let pause = if now == Standing::Up { CALM } else { WORRIED };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shared.link.opened.notified() => {}
        }
    }
}

/// A key of this router's own. When it is gone, so is everything else.
///
/// It is set only when its absence was heard: an answer that is lost must not take the news of a flush with it.
struct Mark {
    probe: Pipeline,
    set: Pipeline,
}

impl Mark {
    fn new(namespace: &str) -> Self {
        let name = new_request_id().to_string();
        let key = format!("{}:mark:{name}", of_namespace(namespace));
        let mut probe = redis::pipe();
        probe.cmd("GET").arg(&key);
        probe.cmd("EXPIRE").arg(&key).arg(MARK_SECONDS).ignore();
        count_routers(&mut probe, namespace, &name);
        let mut set = redis::pipe();
        set.cmd("SET").arg(&key).arg(1).arg("EX").arg(MARK_SECONDS).ignore();
        Self { probe, set }
    }
}

/// What other routers may ask for, newest first. Checkpoints are cheaper to make anew.
async fn tell_anew(inner: &Inner, shared: &Shared) {
    let ours = inner.memory.lock().ours(Instant::now());
    let lasting = ours.into_iter().filter(|(key, _)| matches!(key.kind, Kind::Maker | Kind::Holder | Kind::Transcript));
    let writes: Vec<Write> = lasting.map(|(key, held)| Write { key, held }).collect();
    for batch in writes.chunks(BATCH) {
        let outcome = shared.save(batch, Over::Nothing).await;
        batch.iter().for_each(|write| inner.metrics.written(write.key.kind, outcome));
        if outcome != "saved" {
            shared.owe();
            return;
        }
    }
    if !writes.is_empty() {
        tracing::info!(values = writes.len(), "Redis was told again what this router remembers");
    }
}
