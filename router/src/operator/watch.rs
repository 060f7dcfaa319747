//! `GET /ownerserve/v1/watch`: changes of the ledger as server-sent events, in order, without a gap, resumable.
//!
//! One event is all that one revision changed, so that its id is all a reader needs to go on behind it, at any node.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::IntoResponse;
use axum::response::sse::{Event, Sse};
use futures::stream::Peekable;
use futures::{FutureExt as _, StreamExt as _, stream};
use http::{HeaderMap, HeaderName};
use ownership::ledger::{Key, Op};
use ownership::{Change, Compacted, Watch};
use serde::{Deserialize, Serialize};
use strum::EnumString;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};
use utoipa::{IntoParams, ToSchema};

use super::desk::Desk;
use super::fresh::REVISION;
use super::input::Asked;
use super::problem::{Kind, Problem};

/// Most watchers at once.
pub(super) const WATCHERS: usize = 64;
/// Between two signs of life of a watch that has nothing to tell.
const HEARTBEAT: Duration = Duration::from_secs(10);
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// What is watched.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WatchQuery {
    /// The first revision that is told; what comes from now on when left out.
    from: Option<u64>,
    /// Kinds of records, with commas between: `worker`, `session`, `artifact`, `node`, `quota`. All when left out.
    #[param(max_length = 100)]
    kind: Option<String>,
}

/// A kind of record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema, EnumString, Debug)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
enum KeyKind {
    Worker,
    Session,
    Artifact,
    Node,
    Quota,
}

/// One record that changed.
#[derive(Serialize, ToSchema)]
struct ChangeLine {
    /// `put` or `gone`.
    op: &'static str,
    kind: KeyKind,
    /// Its id, or the tenant's name.
    key: String,
}

impl ChangeLine {
    fn new(change: &Change) -> Self {
        let op = match change.op {
            Op::Put => "put",
            Op::Gone => "gone",
        };
        let (kind, key) = match &change.key {
            Key::Worker(id) => (KeyKind::Worker, id.to_string()),
            Key::Session(id) => (KeyKind::Session, id.to_string()),
            Key::Artifact(id) => (KeyKind::Artifact, id.to_string()),
            Key::Node(id) => (KeyKind::Node, id.to_string()),
            Key::Quota(tenant) => (KeyKind::Quota, tenant.to_string()),
        };
        Self { op, kind, key }
    }
}

/// The data of an event `changes`.
#[derive(Serialize, ToSchema)]
pub(super) struct Changes {
    revision: u64,
    changes: Vec<ChangeLine>,
}

/// The data of an event `progress`.
#[derive(Serialize, ToSchema)]
pub(super) struct Progress {
    /// Nothing that is watched changed up to here.
    revision: u64,
}

/// The data of the event `compacted`, the last one of a watcher that was too slow.
#[derive(Serialize, ToSchema)]
pub(super) struct Cut {
    /// The first revision that can still be watched.
    oldest: u64,
    /// What to do.
    detail: String,
}

/// Changes as they are applied: server-sent events `changes`, whose id is the revision.
///
/// A watch that broke goes on behind `Last-Event-ID`; one that broke before its first event behind the header
/// `ownerserve-revision` of its answer. One that has nothing to tell for ten seconds is sent an event `progress`, whose id says
/// how far it is, so that it goes on from there however much else has changed. One that is too slow ends with an event
/// `compacted`; 410 says the same of a revision that is not kept any more: read the records anew, and watch from there.
#[utoipa::path(get, path = "/ownerserve/v1/watch", tag = "watch",
    params(WatchQuery, ("Last-Event-ID" = Option<u64>, Header, description = "The revision that was seen last; goes before `from`.")),
    responses(
        (status = 200, description = "The changes, without end.", body = Changes, content_type = "text/event-stream"),
        (status = 410, description = "Not kept any more; `oldest` is."),
        (status = 429, description = "Too many watchers.")))]
pub(super) async fn watch(
    State(desk): State<Desk>,
    headers: HeaderMap,
    Asked(query): Asked<WatchQuery>,
) -> Result<impl IntoResponse, Problem> {
    let kinds = query.kind.as_deref().map(|kinds| kinds.split(',').map(str::parse).collect()).transpose();
    let kinds = kinds.map_err(|_: strum::ParseError| {
        let accepted = "kind: accepted are worker, session, artifact, node and quota, with commas between";
        Problem::bad_query(accepted)
    })?;
    let place = desk.watchers.clone().try_acquire_owned().map_err(|_| {
        Problem::new(
            Kind::TooMany,
            format!("There are {WATCHERS} watchers already. Watch at another node, or end one."),
        )
    })?;
    let directory = desk.gateway.directory();
    let now = directory.view().applied();
    let from = match (last_seen(&headers)?, query.from) {
        (Some(last), _) => last.saturating_add(1),
        (None, Some(from)) => from,
        (None, None) => now + 1,
    };
    let watch = directory.watch(from).map_err(|compacted| {
        let Compacted { oldest } = compacted;
        let detail = format!("Revision {from} is not kept any more. Read the records anew, and watch from their revision on; the oldest is {oldest}.");
        Problem::new(Kind::Compacted, detail).oldest(oldest)
    })?;
    let told = Instant::now();
    let tokens = desk.tokens.clone();
    let is_let_in = Box::new(move || tokens.who(&headers).is_ok());
    let seen = from.saturating_sub(1);
    let watcher = Watcher { changes: watch.peekable(), kinds, is_let_in, seen, told, _place: Arc::new(place) };
    let events = stream::unfold(Some(watcher), |watcher| async move { watcher?.next().await });
    // Where "now" was, for a reader who goes on elsewhere before the first event.
    Ok(([(REVISION, now.to_string())], Sse::new(events.map(Ok::<_, Infallible>))))
}

fn last_seen(headers: &HeaderMap) -> Result<Option<u64>, Problem> {
    let Some(value) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    let revision = value.to_str().ok().and_then(|text| text.parse().ok());
    let wrong = || Problem::new(Kind::InvalidHeader, "Last-Event-ID: accepted is the id of an event, a revision.");
    revision.map(Some).ok_or_else(wrong)
}

struct Watcher {
    changes: Peekable<Watch>,
    kinds: Option<BTreeSet<KeyKind>>,
    /// Whether its token is still good.
    is_let_in: Box<dyn Fn() -> bool + Send>,
    seen: u64,
    /// When it was sent something last.
    told: Instant,
    _place: Arc<OwnedSemaphorePermit>,
}

/// What comes next for a watcher.
enum Next {
    Change(Change),
    /// Nothing for a while.
    Quiet,
    Cut(Compacted),
}

impl Watcher {
    /// The next event: a revision that changed something that is watched, how far it is, or that it is cut off.
    async fn next(mut self) -> Option<(Event, Option<Self>)> {
        loop {
            let next = self.step().await?;
            if !(self.is_let_in)() {
                return None;
            }
            let first = match next {
                Next::Change(first) => first,
                Next::Quiet => return Some(self.progress()),
                Next::Cut(Compacted { oldest }) => return Some((cut(oldest), None)),
            };
            let revision = first.revision;
            let mut changes = vec![ChangeLine::new(&first)];
            // A revision is published as a whole: what does not come at once is another one.
            let mut same = Pin::new(&mut self.changes);
            while let Some(Some(Ok(next))) =
                same.as_mut().next_if(|it| it.as_ref().is_ok_and(|it| it.revision == revision)).now_or_never()
            {
                changes.push(ChangeLine::new(&next));
            }
            if let Some(Some(Err(Compacted { oldest }))) = same.as_mut().peek().now_or_never() {
                // Cut off in the middle: a part must not go out under an id that says that it was the whole.
                return Some((cut(*oldest), None));
            }
            changes.retain(|change| self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&change.kind)));
            self.seen = revision;
            if !changes.is_empty() {
                self.told = Instant::now();
                return Some((event("changes", &Changes { revision, changes }).id(revision.to_string()), Some(self)));
            }
            if self.told.elapsed() >= HEARTBEAT {
                return Some(self.progress());
            }
        }
    }

    /// Waits for a change, and no longer than until a sign of life is due.
    async fn step(&mut self) -> Option<Next> {
        if let Ok(next) = timeout_at(self.told + HEARTBEAT, self.changes.next()).await {
            return next.map(Next::of);
        }
        let upto = self.changes.get_ref().published()?;
        match self.changes.next().now_or_never() {
            Some(next) => next.map(Next::of),
            None => {
                // One that waits for a later revision is not sent back.
                self.seen = self.seen.max(upto);
                Some(Next::Quiet)
            }
        }
    }

    fn progress(mut self) -> (Event, Option<Self>) {
        self.told = Instant::now();
        let revision = self.seen;
        (event("progress", &Progress { revision }).id(revision.to_string()), Some(self))
    }
}

impl Next {
    fn of(next: Result<Change, Compacted>) -> Self {
        next.map_or_else(Self::Cut, Self::Change)
    }
}

fn cut(oldest: u64) -> Event {
    let detail = "This watcher was too slow. Read the records anew, and watch from their revision on.".into();
    event("compacted", &Cut { oldest, detail })
}

fn event(name: &str, data: &impl Serialize) -> Event {
    Event::default().event(name).data(serde_json::to_string(data).unwrap_or_default())
}
