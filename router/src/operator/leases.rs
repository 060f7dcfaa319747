//! `/ownerserve/v1/leases` and `/intents`: each life of a worker as the ledger holds it, and the steps on their way.

use std::sync::Arc;

use ownership::View;
use ownership::ledger::{Draining, Intent, Lease, Worker, WorkerKind};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{Epoch, Incarnation, NodeId, PrefixId, Role, SessionId, WorkerId};

use super::fresh::{Fresh, FreshQuery, Seen};
use super::input::{Asked, Named};
use super::paging::{Listed, PageQuery};
use super::problem::Problem;
use super::tags::Tag;
use super::words::{EpochWord, OwnerLine, PrefixWord, RoleWord, SessionWord, WorkerWord};

/// Whether some router reached this life of the worker lately.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum LeaseWord {
    /// Yes.
    Held,
    /// Not within the lease's time.
    Expired,
    /// An operator took the worker out.
    Retired,
}

impl From<Lease> for LeaseWord {
    fn from(lease: Lease) -> Self {
        match lease {
            Lease::Held { .. } => Self::Held,
            Lease::Expired { .. } => Self::Expired,
            Lease::Retired { .. } => Self::Retired,
        }
    }
}

/// What the ledger says of a worker's present life.
#[derive(Serialize, ToSchema)]
pub(super) struct LeaseLine {
    #[schema(inline)]
    state: LeaseWord,
    /// When this life was granted its lease.
    #[schema(value_type = EpochWord)]
    epoch: Epoch,
    /// Until it may be ended, on the ledger's clock; none when it is over.
    left_ms: Option<u64>,
    /// Whether it is being emptied: it keeps what it has and is given nothing more.
    draining: bool,
}

impl LeaseLine {
    pub(super) fn new(view: &View, worker: &Worker) -> Self {
        let left_ms = match worker.lease {
            Lease::Held { until } => Some(until.0.saturating_sub(view.now().0) / 1000),
            Lease::Expired { .. } | Lease::Retired { .. } => None,
        };
        let draining = worker.draining == Draining::Yes;
        Self { state: worker.lease.into(), epoch: worker.epoch, left_ms, draining }
    }
}

/// A life of a worker, as the ledger holds it.
#[derive(Serialize, ToSchema)]
struct LifeLine {
    #[schema(value_type = WorkerWord)]
    worker: WorkerId,
    /// Its base URL.
    endpoint: Arc<str>,
    #[schema(value_type = RoleWord)]
    role: Role,
    /// Whether it only keeps blocks and computes nothing.
    store: bool,
    /// Data-parallel ranks.
    ranks: u16,
    /// Which life of it.
    #[schema(value_type = u64)]
    incarnation: Incarnation,
    #[serde(flatten)]
    lease: LeaseLine,
}

impl LifeLine {
    fn new(view: &View, worker: &Worker) -> Self {
        Self {
            worker: worker.id,
            endpoint: worker.spec.endpoint.clone(),
            role: worker.spec.role,
            store: worker.spec.kind == WorkerKind::Store,
            ranks: worker.spec.ranks,
            incarnation: worker.incarnation,
            lease: LeaseLine::new(view, worker),
        }
    }
}

pub(super) fn known(view: &View, id: WorkerId) -> Result<&Worker, Problem> {
    view.worker(id).ok_or_else(|| Problem::not_found(format!("No worker {id} is in the ledger.")))
}

/// The lease of one worker.
#[derive(Serialize, ToSchema)]
pub(super) struct OneLease {
    lease: LifeLine,
}

/// The lease of one worker.
#[utoipa::path(get, path = "/ownerserve/v1/leases/{worker}", tag = "workers",
    params(("worker" = WorkerWord, Path), FreshQuery),
    responses((
        status = 200, description = "The lease of the worker's newest life.",
        body = Fresh<OneLease>, headers(("etag" = String, description = "Its fencing tag.")))))]
pub(super) async fn lease(Seen(view): Seen, Named(id): Named<WorkerId>) -> Result<Fresh<OneLease>, Problem> {
    let worker = known(&view, id)?;
    let lease = LifeLine::new(&view, worker);
    let tag = Tag::of(worker.epoch, &(lease.incarnation, lease.lease.state, lease.lease.draining, &lease.endpoint));
    Ok(Fresh::new(&view, OneLease { lease }).tagged(tag))
}

/// Which leases are asked for.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct LeaseFilter {
    /// In this state.
    #[param(inline)]
    state: Option<LeaseWord>,
}

/// Leases, by worker.
#[derive(Serialize, ToSchema)]
pub(super) struct Leases {
    leases: Vec<LifeLine>,
    #[serde(flatten)]
    listed: Listed,
}

/// The newest life of every worker that the ledger knows, by worker.
#[utoipa::path(get, path = "/ownerserve/v1/leases", tag = "workers", params(LeaseFilter, PageQuery, FreshQuery),
    responses((status = 200, description = "A page of leases, and where the next one begins.", body = Fresh<Leases>)))]
pub(super) async fn leases(
    Seen(view): Seen,
    Asked(filter): Asked<LeaseFilter>,
    Asked(page): Asked<PageQuery>,
) -> Result<Fresh<Leases>, Problem> {
    let page = page.page("leases", &filter, view.applied())?;
    let line = |worker: &Worker| {
        let accepted = filter.state.is_none_or(|state| state == worker.lease.into());
        (worker.id, accepted.then(|| LifeLine::new(&view, worker)).into_iter().collect())
    };
    let (leases, listed) = page.fill(view.workers_after(page.after).map(line));
    Ok(Fresh::new(&view, Leases { leases, listed }))
}

/// A step that a router has dispatched and not yet committed. It owns nothing.
#[derive(Serialize, ToSchema)]
struct IntentLine {
    #[schema(value_type = SessionWord)]
    session: SessionId,
    /// The head that it extends; the chain's root for a first step.
    #[schema(value_type = PrefixWord)]
    base: PrefixId,
    /// Where it was sent.
    worker: OwnerLine,
    /// The node of the router that sent it.
    #[schema(value_type = u64)]
    router: NodeId,
    /// Until it is forgotten, on the ledger's clock.
    left_ms: u64,
}

impl IntentLine {
    fn new(view: &View, session: SessionId, intent: &Intent) -> Self {
        Self {
            session,
            base: intent.base,
            worker: OwnerLine::new(view, intent.worker),
            router: intent.router,
            left_ms: intent.expires.0.saturating_sub(view.now().0) / 1000,
        }
    }
}

/// Which intents are asked for.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct IntentFilter {
    /// Of this session.
    #[param(value_type = Option<SessionWord>)]
    session: Option<SessionId>,
    /// Sent to this worker.
    #[param(value_type = Option<WorkerWord>)]
    worker: Option<WorkerId>,
    /// Sent by the router of this node.
    router: Option<u64>,
}

/// Steps on their way, by session.
#[derive(Serialize, ToSchema)]
pub(super) struct Intents {
    intents: Vec<IntentLine>,
    #[serde(flatten)]
    listed: Listed,
}

/// Steps on their way, by session. Those of one session stay on one page.
#[utoipa::path(get, path = "/ownerserve/v1/intents", tag = "sessions", params(IntentFilter, PageQuery, FreshQuery),
    responses((
        status = 200, description = "A page of steps on their way, and where the next one begins.",
        body = Fresh<Intents>)))]
pub(super) async fn intents(
    Seen(view): Seen,
    Asked(filter): Asked<IntentFilter>,
    Asked(page): Asked<PageQuery>,
) -> Result<Fresh<Intents>, Problem> {
    let page = page.page("intents", &filter, view.applied())?;
    let looking = view.clone();
    let list = move || {
        let wanted = |session: SessionId, intent: &Intent| {
            filter.session.is_none_or(|wanted| wanted == session)
                && filter.worker.is_none_or(|worker| intent.worker.worker == worker)
                && filter.router.is_none_or(|router| intent.router == NodeId(router))
        };
        let lines = |(session, all): (SessionId, Vec<Intent>)| {
            let found = all.iter().filter(|intent| wanted(session, intent));
            (session, found.map(|intent| IntentLine::new(&looking, session, intent)).collect())
        };
        page.fill(looking.intents_after(page.after).map(lines))
    };
    let (intents, listed) = super::apart(list).await?;
    Ok(Fresh::new(&view, Intents { intents, listed }))
}
