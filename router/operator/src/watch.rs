//! `GET /ownerserve/v1/watch`: changes of the ledger as server-sent events, in order, without gaps, resumable.
//!
//! One event holds all changes of one revision, so that its id is enough to resume after it, at any node.

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
use ownership::ledger::{ChangeOp, RecordKey};
use ownership::{ChangeEvent, ChangeStream, CompactedRevision};
use serde::{Deserialize, Serialize};
use strum::EnumString;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use utoipa::{IntoParams, ToSchema};

use super::access::OperatorTokens;
use super::consistency::REVISION_HEADER;
use super::extractors::QueryParams;
use super::problem::{Problem, ProblemKind};
use proxy::ledger_access::LedgerAccess;

/// Maximum number of concurrent watchers.
const MAX_WATCHERS: usize = 64;
/// Interval between heartbeats of an idle watch.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Places for watchers. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct WatcherSlots(Arc<Semaphore>);

impl Default for WatcherSlots {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_WATCHERS)))
    }
}

/// What is watched.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WatchQuery {
    /// The first revision that is sent; what comes from now on when left out.
    from_revision: Option<u64>,
    /// Kinds of records, separated by commas: `worker`, `session`, `artifact`, `node`, `quota`. All when left out.
    #[param(max_length = 100)]
    kind: Option<String>,
}

/// A kind of record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema, EnumString, Debug)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
enum RecordKind {
    Worker,
    Session,
    Artifact,
    Node,
    Quota,
}

/// One record that changed.
#[derive(Serialize, ToSchema)]
#[schema(as = Change)]
struct ChangedRecord {
    /// `put` or `delete`.
    op: &'static str,
    kind: RecordKind,
    /// Its id, or the tenant's name.
    key: String,
}

impl ChangedRecord {
    fn new(change: &ChangeEvent) -> Self {
        let op = match change.op {
            ChangeOp::Put => "put",
            ChangeOp::Removed => "delete",
        };
        let (kind, key) = match &change.key {
            RecordKey::Worker(id) => (RecordKind::Worker, id.to_string()),
            RecordKey::Session(id) => (RecordKind::Session, id.to_string()),
            RecordKey::Artifact(id) => (RecordKind::Artifact, id.to_string()),
            RecordKey::Node(id) => (RecordKind::Node, id.to_string()),
            RecordKey::Quota(tenant) => (RecordKind::Quota, tenant.to_string()),
        };
        Self { op, kind, key }
    }
}

/// The data of an event `changes`.
#[derive(Serialize, ToSchema)]
pub(super) struct ChangesEvent {
    revision: u64,
    changes: Vec<ChangedRecord>,
}

/// The data of an event `progress`.
#[derive(Serialize, ToSchema)]
pub(super) struct ProgressEvent {
    /// Revision up to which nothing watched changed.
    revision: u64,
}

/// The data of the event `compacted`, the last one of a watcher that was too slow.
#[derive(Serialize, ToSchema)]
#[schema(as = Compacted)]
pub(super) struct CompactedEvent {
    /// The first revision that can still be watched.
    oldest_revision: u64,
    /// What to do.
    detail: String,
}

/// Changes as they are applied: server-sent events `changes`, whose id is the revision.
///
/// A broken watch is resumed after `Last-Event-ID`; one that broke before its first event, after the header
/// `ownerserve-revision` of its answer. After ten seconds without a watched change an event `progress` is sent, whose id is the
/// revision reached. A watcher that is too slow gets an event `compacted` as its last; 410 means that a revision is not kept any
/// more. In both cases read the records again, and watch from their revision on.
#[utoipa::path(get, path = "/ownerserve/v1/watch", tag = "watch",
    params(WatchQuery, ("Last-Event-ID" = Option<u64>, Header, description = "The revision that was seen last; goes before `from_revision`.")),
    responses(
        (status = 200, description = "The changes; the stream does not end.", body = ChangesEvent, content_type = "text/event-stream"),
        (status = 410, description = "The revision is not kept any more; `oldest_revision` is."),
        (status = 429, description = "Too many watchers.")))]
pub(super) async fn watch(
    State(ledger): State<LedgerAccess>,
    State(slots): State<WatcherSlots>,
    State(tokens): State<Arc<OperatorTokens>>,
    headers: HeaderMap,
    QueryParams(query): QueryParams<WatchQuery>,
) -> Result<impl IntoResponse, Problem> {
    let kinds = query.kind.as_deref().map(|kinds| kinds.split(',').map(str::parse).collect()).transpose();
    let kinds = kinds.map_err(|_: strum::ParseError| {
        let accepted = "kind: accepted are worker, session, artifact, node and quota, with commas between";
        Problem::bad_query(accepted)
    })?;
    let slot = slots.0.try_acquire_owned().map_err(|_| {
        Problem::new(
            ProblemKind::TooManyRequests,
            format!("There are {MAX_WATCHERS} watchers already. Watch at another node, or end one."),
        )
    })?;
    let directory = ledger.directory();
    let now = directory.view().applied();
    let from = match (parse_last_event_id(&headers)?, query.from_revision) {
        (Some(last), _) => last.saturating_add(1),
        (None, Some(from)) => from,
        (None, None) => now + 1,
    };
    let watch = directory.watch(from).map_err(|compacted| {
        let CompactedRevision { oldest } = compacted;
        let detail = format!("Revision {from} is not kept any more. Read the records anew, and watch from their revision on; the oldest is {oldest}.");
        Problem::new(ProblemKind::Compacted, detail).with_oldest_revision(oldest)
    })?;
    let start = Instant::now();
    let is_let_in = Box::new(move || tokens.authenticate(&headers).is_ok());
    let seen = from.saturating_sub(1);
    let watcher = WatchStream {
        changes: watch.peekable(),
        kinds,
        is_authorized: is_let_in,
        last_revision: seen,
        last_sent: start,
        _permit: Arc::new(slot),
    };
    let events = stream::unfold(Some(watcher), |watcher| async move { watcher?.next().await });
    // Revision of "now", for clients that reconnect elsewhere before the first event.
    Ok(([(REVISION_HEADER, now.to_string())], Sse::new(events.map(Ok::<_, Infallible>))))
}

fn parse_last_event_id(headers: &HeaderMap) -> Result<Option<u64>, Problem> {
    let Some(value) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    let revision = value.to_str().ok().and_then(|text| text.parse().ok());
    let wrong =
        || Problem::new(ProblemKind::InvalidHeader, "Last-Event-ID: accepted is the id of an event, a revision.");
    revision.map(Some).ok_or_else(wrong)
}

struct WatchStream {
    changes: Peekable<ChangeStream>,
    kinds: Option<BTreeSet<RecordKind>>,
    /// Returns whether its token is still valid.
    is_authorized: Box<dyn Fn() -> bool + Send>,
    last_revision: u64,
    /// When it was sent something last.
    last_sent: Instant,
    _permit: Arc<OwnedSemaphorePermit>,
}

/// Next input of a watcher.
enum WatchSignal {
    Change(ChangeEvent),
    /// No change for a while.
    Idle,
    Compacted(CompactedRevision),
}

impl WatchStream {
    /// Returns the next event: a revision with watched changes, a heartbeat, or the end because of compaction.
    async fn next(mut self) -> Option<(Event, Option<Self>)> {
        loop {
            let next = self.wait().await?;
            if !(self.is_authorized)() {
                return None;
            }
            let first = match next {
                WatchSignal::Change(first) => first,
                WatchSignal::Idle => return Some(self.progress()),
                WatchSignal::Compacted(CompactedRevision { oldest }) => return Some((compacted_event(oldest), None)),
            };
            let revision = first.revision;
            let mut changes = vec![ChangedRecord::new(&first)];
            // A revision is published as a whole, so a change that is not immediately available belongs to another
            // one.
            let mut same = Pin::new(&mut self.changes);
            while let Some(Some(Ok(next))) =
                same.as_mut().next_if(|it| it.as_ref().is_ok_and(|it| it.revision == revision)).now_or_never()
            {
                changes.push(ChangedRecord::new(&next));
            }
            if let Some(Some(Err(CompactedRevision { oldest }))) = same.as_mut().peek().now_or_never() {
                // Compacted in the middle of a revision: a part must not be sent under the id of the whole.
                return Some((compacted_event(*oldest), None));
            }
            changes.retain(|change| self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&change.kind)));
            self.last_revision = revision;
            if !changes.is_empty() {
                self.last_sent = Instant::now();
                return Some((
                    event("changes", &ChangesEvent { revision, changes }).id(revision.to_string()),
                    Some(self),
                ));
            }
            if self.last_sent.elapsed() >= HEARTBEAT_INTERVAL {
                return Some(self.progress());
            }
        }
    }

    /// Waits for a change, at most until a heartbeat is due.
    async fn wait(&mut self) -> Option<WatchSignal> {
        if let Ok(next) = timeout_at(self.last_sent + HEARTBEAT_INTERVAL, self.changes.next()).await {
            return next.map(WatchSignal::of);
        }
        let upto = self.changes.get_ref().published()?;
        match self.changes.next().now_or_never() {
            Some(next) => next.map(WatchSignal::of),
            None => {
                // A watcher that waits for a later revision is not moved back.
                self.last_revision = self.last_revision.max(upto);
                Some(WatchSignal::Idle)
            }
        }
    }

    fn progress(mut self) -> (Event, Option<Self>) {
        self.last_sent = Instant::now();
        let revision = self.last_revision;
        (event("progress", &ProgressEvent { revision }).id(revision.to_string()), Some(self))
    }
}

impl WatchSignal {
    fn of(next: Result<ChangeEvent, CompactedRevision>) -> Self {
        next.map_or_else(Self::Compacted, Self::Change)
    }
}

fn compacted_event(oldest: u64) -> Event {
    let detail = "This watcher was too slow. Read the records anew, and watch from their revision on.".into();
    event("compacted", &CompactedEvent { oldest_revision: oldest, detail })
}

fn event(name: &str, data: &impl Serialize) -> Event {
    Event::default().event(name).data(serde_json::to_string(data).unwrap_or_default())
}
