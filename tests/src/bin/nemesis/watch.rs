//! Watches over the ledger's changes: server-sent events that are resumed at another node whenever one breaks.

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
use crate::check::{Broken, Change, Watched, aside, newest};
use crate::door::Doors;
use crate::history::{History, Kept, Seat};

const WATCHERS: usize = 2;
const BEGINS_WITHIN: Duration = Duration::from_secs(3);
/// A node that says nothing for longer is left; under load there is always something, and comments between.
const SILENCE: Duration = Duration::from_secs(20);

/// Watchers at work. Dropping it ends them.
pub(crate) struct Watchers {
    watched: Vec<Arc<Mutex<Watched>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Watchers {
    /// Starts them at the present revision, each at another node.
    pub(crate) async fn start(doors: &Doors, seats: &[Seat]) -> Result<Watchers, NemesisError> {
        let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "nobody to watch".into() };
        let from = doors.status(*seats.first().ok_or_else(nobody)?).await?.applied + 1;
        let mut watchers = Watchers { watched: Vec::new(), tasks: Vec::new() };
        for number in 0..WATCHERS {
            let watched = Arc::new(Mutex::new(Watched { from, ..Watched::default() }));
            watchers.tasks.push(tokio::spawn(follow(doors.clone(), turned(seats, number), watched.clone())));
            watchers.watched.push(watched);
        }
        Ok(watchers)
    }

    /// Order, gaps and equality of what was seen, once every watcher was told what clients were told, or time is up.
    pub(crate) async fn check(&self, history: &Arc<History>, within: Duration) -> Result<Vec<Broken>, NemesisError> {
        let due = history.look(|kept| newest(&kept.operations));
        let deadline = tokio::time::Instant::now() + within;
        let behind = || self.watched.iter().any(|one| !lock(one).has(due));
        while behind() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let seen: Vec<Watched> = self.watched.iter().map(|one| lock(one).clone()).collect();
        let upto = seen.iter().map(|one| one.next().saturating_sub(1)).min().unwrap_or(0);
        let history = history.clone();
        let broken = aside(move || judge(&seen, &history, due)).await?;
        for one in &self.watched {
            lock(one).forget(upto);
        }
        Ok(broken)
    }

    /// Changes seen and reconnections, over all watchers.
    pub(crate) fn count(&self) -> (usize, u64) {
        let seen = self.watched.iter().map(|one| {
            let one = lock(one);
            (one.forgotten + one.changes.len(), one.reconnections)
        });
        seen.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }
}

fn lock(watched: &Mutex<Watched>) -> MutexGuard<'_, Watched> {
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

fn judge(seen: &[Watched], history: &History, due: u64) -> Vec<Broken> {
    let mut broken: Vec<Broken> = seen.iter().flat_map(Watched::ordered).collect();
    let gaps = |kept: &Kept| seen.iter().flat_map(|one| one.gapless(&kept.operations, due)).collect::<Vec<_>>();
    broken.extend(history.look(gaps));
    broken.extend(seen.windows(2).flat_map(|pair| pair[0].equal(&pair[1])));
    broken
}

impl Drop for Watchers {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// The seats, beginning with another one.
fn turned(seats: &[Seat], by: usize) -> VecDeque<Seat> {
    let mut seats: VecDeque<Seat> = seats.iter().copied().collect();
    seats.rotate_left(by % seats.len().max(1));
    seats
}

async fn follow(doors: Doors, mut seats: VecDeque<Seat>, watched: Arc<Mutex<Watched>>) {
    let mut forgotten = 0;
    loop {
        let from = lock(&watched).next();
        let over = match seats.front() {
            Some(seat) => connection(&doors, (*seat, from), &watched).await,
            None => return,
        };
        lock(&watched).reconnections += 1;
        forgotten = match over {
            // Only what nobody keeps is skipped; it is what 410 asks for, and it is counted.
            Over::Compacted(oldest) if forgotten + 1 >= seats.len() => {
                lock(&watched).skip_to(oldest);
                0
            }
            Over::Compacted(_) => forgotten + 1,
            Over::Broken => 0,
        };
        seats = turned(seats.make_contiguous(), 1);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// One event, as the API writes it: all that one entry changed.
#[derive(Deserialize)]
struct Event {
    revision: u64,
    changes: Vec<Line>,
}

#[derive(Deserialize)]
struct Line {
    op: String,
    key: String,
}

/// Why a connection is over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    /// It broke, or never was.
    Broken,
    /// What was asked for is not kept there any more; this is the oldest that is.
    Compacted(u64),
}

/// Reads one connection until it ends.
async fn connection(doors: &Doors, (seat, from): (Seat, u64), watched: &Mutex<Watched>) -> Over {
    let address = doors.operator(seat);
    let request = Request::builder()
        .method(Method::GET)
        .uri(format!("/ownerserve/v1/watch?from={from}"))
        .header(HOST, address.to_string())
        .header(ACCEPT, "text/event-stream")
        .body(Full::default())
        .expect("headers are plain text");
    let mut line = crate::http::Line::new(address);
    let Ok(answer) = line.open(request, BEGINS_WITHIN).await else { return Over::Broken };
    let status = answer.status();
    let mut body = answer.into_body();
    if status == StatusCode::GONE {
        return compacted(body).await;
    }
    let mut text = Vec::new();
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(SILENCE, body.frame()).await {
        text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
        let Some(end) = text.windows(2).rposition(|pair| pair == b"\n\n") else { continue };
        let whole: Vec<u8> = text.drain(..end + 2).collect();
        for event in String::from_utf8_lossy(&whole).lines().filter_map(|line| line.strip_prefix("data:")) {
            let Ok(Event { revision, changes }) = serde_json::from_str(event) else { continue };
            let changes = changes.into_iter().map(|Line { op, key }| Change { revision, key, op });
            lock(watched).changes.extend(changes);
        }
    }
    Over::Broken
}

async fn compacted(body: Incoming) -> Over {
    #[derive(Deserialize)]
    struct Gone {
        oldest: u64,
    }
    let body = body.collect().await.ok();
    let gone = body.and_then(|body| serde_json::from_slice::<Gone>(&body.to_bytes()).ok());
    gone.map_or(Over::Broken, |gone| Over::Compacted(gone.oldest))
}
