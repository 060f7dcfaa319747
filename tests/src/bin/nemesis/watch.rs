//! Watches of the ledger's changes: server-sent events, resumed at another node whenever a connection breaks.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::header::{ACCEPT, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde::Deserialize;
use tokio::task::JoinHandle;

use crate::NemesisError;
use crate::api_client::ClusterAddresses;
use crate::check::{GuaranteeViolation, WatchedChange, WatcherHistory, newest_acknowledged, run_blocking};
use crate::history::{HistoryRecords, MemberSlot, OperationHistory};

const WATCHERS: usize = 2;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Idle timeout of a connection; under load there are always events, and comments between them.
const MAX_SILENCE: Duration = Duration::from_secs(20);

/// Running watchers. Dropping it stops them.
pub(crate) struct WatchClients {
    records: Vec<Arc<Mutex<WatcherHistory>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl WatchClients {
    /// Starts watchers at the current revision, each at a different node.
    pub(crate) async fn start(
        addresses: &ClusterAddresses,
        seats: &[MemberSlot],
    ) -> Result<WatchClients, NemesisError> {
        let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "nobody to watch".into() };
        let from = addresses.status(*seats.first().ok_or_else(nobody)?).await?.applied + 1;
        let mut watchers = WatchClients { records: Vec::new(), tasks: Vec::new() };
        for number in 0..WATCHERS {
            let watched = Arc::new(Mutex::new(WatcherHistory { from, ..WatcherHistory::default() }));
            watchers.tasks.push(tokio::spawn(run_watcher(
                addresses.clone(),
                rotated_slots(seats, number),
                watched.clone(),
            )));
            watchers.records.push(watched);
        }
        Ok(watchers)
    }

    /// Checks order, gaps and equality of what was seen, once every watcher has received what clients were told, or
    /// after a timeout.
    pub(crate) async fn check(
        &self,
        history: &Arc<OperationHistory>,
        within: Duration,
    ) -> Result<Vec<GuaranteeViolation>, NemesisError> {
        let due = history.read(|kept| newest_acknowledged(&kept.operations));
        let deadline = tokio::time::Instant::now() + within;
        let behind = || self.records.iter().any(|one| !lock(one).has_received(due));
        while behind() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let seen: Vec<WatcherHistory> = self.records.iter().map(|one| lock(one).clone()).collect();
        let upto = seen.iter().map(|one| one.next_revision().saturating_sub(1)).min().unwrap_or(0);
        let history = history.clone();
        let broken = run_blocking(move || check_watches(&seen, &history, due)).await?;
        for one in &self.records {
            lock(one).forget_checked(upto);
        }
        Ok(broken)
    }

    /// Number of changes and reconnections, over all watchers.
    pub(crate) fn count(&self) -> (usize, u64) {
        let seen = self.records.iter().map(|one| {
            let one = lock(one);
            (one.checked + one.changes.len(), one.reconnections)
        });
        seen.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }
}

fn lock(watched: &Mutex<WatcherHistory>) -> MutexGuard<'_, WatcherHistory> {
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check_watches(seen: &[WatcherHistory], history: &OperationHistory, due: u64) -> Vec<GuaranteeViolation> {
    let mut broken: Vec<GuaranteeViolation> = seen.iter().flat_map(WatcherHistory::check_order).collect();
    let gaps = |history: &HistoryRecords| {
        seen.iter().flat_map(|one| one.check_no_gap(&history.operations, due)).collect::<Vec<_>>()
    };
    broken.extend(history.read(gaps));
    broken.extend(seen.windows(2).flat_map(|pair| pair[0].check_equal(&pair[1])));
    broken
}

impl Drop for WatchClients {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Returns the slots, rotated so that the first one differs.
fn rotated_slots(seats: &[MemberSlot], by: usize) -> VecDeque<MemberSlot> {
    let mut seats: VecDeque<MemberSlot> = seats.iter().copied().collect();
    seats.rotate_left(by % seats.len().max(1));
    seats
}

async fn run_watcher(
    addresses: ClusterAddresses,
    mut seats: VecDeque<MemberSlot>,
    watched: Arc<Mutex<WatcherHistory>>,
) {
    let mut forgotten = 0;
    loop {
        let from = lock(&watched).next_revision();
        let over = match seats.front() {
            Some(seat) => read_connection(&addresses, (*seat, from), &watched).await,
            None => return,
        };
        lock(&watched).reconnections += 1;
        forgotten = match over {
            // Skips only what no node keeps, as the 410 response demands; skips are counted.
            WatchDisconnect::Compacted(oldest) if forgotten + 1 >= seats.len() => {
                lock(&watched).skip_to(oldest);
                0
            }
            WatchDisconnect::Compacted(_) => forgotten + 1,
            WatchDisconnect::Disconnected => 0,
        };
        seats = rotated_slots(seats.make_contiguous(), 1);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// One event of the API: all changes of one entry.
#[derive(Deserialize)]
struct WatchEventJson {
    revision: u64,
    changes: Vec<ChangeJson>,
}

#[derive(Deserialize)]
struct ChangeJson {
    op: String,
    key: String,
}

/// Why a connection ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WatchDisconnect {
    /// It broke, or was never established.
    Disconnected,
    /// The requested revision is not kept any more; this is the oldest one kept.
    Compacted(u64),
}

/// Reads one connection until it ends.
async fn read_connection(
    addresses: &ClusterAddresses,
    (seat, from): (MemberSlot, u64),
    watched: &Mutex<WatcherHistory>,
) -> WatchDisconnect {
    let address = addresses.operator(seat);
    let request = Request::builder()
        .method(Method::GET)
        .uri(format!("/ownerserve/v1/watch?from_revision={from}"))
        .header(HOST, address.to_string())
        .header(ACCEPT, "text/event-stream")
        .body(Full::default())
        .expect("headers are plain text");
    let mut line = crate::http::KeepAliveConnection::new(address);
    let Ok(answer) = line.open(request, CONNECT_TIMEOUT).await else { return WatchDisconnect::Disconnected };
    let status = answer.status();
    let mut body = answer.into_body();
    if status == StatusCode::GONE {
        return read_compacted(body).await;
    }
    let mut text = Vec::new();
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(MAX_SILENCE, body.frame()).await {
        text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
        let Some(end) = text.windows(2).rposition(|pair| pair == b"\n\n") else { continue };
        let whole: Vec<u8> = text.drain(..end + 2).collect();
        for event in String::from_utf8_lossy(&whole).lines().filter_map(|line| line.strip_prefix("data:")) {
            let Ok(WatchEventJson { revision, changes }) = serde_json::from_str(event) else { continue };
            let changes = changes.into_iter().map(|ChangeJson { op, key }| WatchedChange { revision, key, op });
            lock(watched).changes.extend(changes);
        }
    }
    WatchDisconnect::Disconnected
}

async fn read_compacted(body: Incoming) -> WatchDisconnect {
    #[derive(Deserialize)]
    struct CompactedErrorJson {
        oldest_revision: u64,
    }
    let body = body.collect().await.ok();
    let gone = body.and_then(|body| serde_json::from_slice::<CompactedErrorJson>(&body.to_bytes()).ok());
    gone.map_or(WatchDisconnect::Disconnected, |gone| WatchDisconnect::Compacted(gone.oldest_revision))
}
