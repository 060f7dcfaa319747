//! `/ownerserve/v1/leases` and `/intents`: worker incarnations with their leases, and running steps.

use std::sync::Arc;

use ownership::LedgerView;
use ownership::ledger::{DrainFlag, Intent, Worker, WorkerKind, WorkerLease};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{Epoch, Incarnation, NodeId, PrefixId, SessionId, WorkerId, WorkerRole};

use super::blocking::run_blocking;
use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::entity_tags::EntityTag;
use super::extractors::{PathId, QueryParams};
use super::paging::{PageMeta, PageQuery};
use super::problem::Problem;
use super::schemas::{
    EpochSchema, OwnerResource, PrefixIdSchema, SessionIdSchema, WorkerIdSchema, WorkerRoleSchema, ledger_span,
};
use vocabulary::TimeSpan;

/// Whether a router reached this incarnation of the worker lately.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum LeaseState {
    /// A router reached it within the lease.
    Held,
    /// No router reached it within the lease.
    Expired,
    /// An operator retired the worker.
    Retired,
}

impl From<WorkerLease> for LeaseState {
    fn from(lease: WorkerLease) -> Self {
        match lease {
            WorkerLease::Held { .. } => Self::Held,
            WorkerLease::Expired { .. } => Self::Expired,
            WorkerLease::Retired { .. } => Self::Retired,
        }
    }
}

/// Lease of a worker's present incarnation.
#[derive(Serialize, ToSchema)]
pub(super) struct LeaseStatus {
    #[schema(inline)]
    state: LeaseState,
    /// Epoch of the grant of the lease.
    #[schema(value_type = EpochSchema)]
    epoch: Epoch,
    /// Time until it may be ended, on the ledger's clock; null when it is over.
    expires_in: Option<TimeSpan>,
    /// Whether it drains: it keeps what it owns and is granted nothing more.
    draining: bool,
}

impl LeaseStatus {
    pub(super) fn new(view: &LedgerView, worker: &Worker) -> Self {
        let expires_in = match worker.lease {
            WorkerLease::Held { until } => Some(ledger_span(view.now(), until)),
            WorkerLease::Expired { .. } | WorkerLease::Retired { .. } => None,
        };
        let draining = worker.draining == DrainFlag::Yes;
        Self { state: worker.lease.into(), epoch: worker.epoch, expires_in, draining }
    }
}

/// An incarnation of a worker, and its lease.
#[derive(Serialize, ToSchema)]
#[schema(as = Lease)]
struct WorkerLeaseResource {
    #[schema(value_type = WorkerIdSchema)]
    worker: WorkerId,
    /// Its base URL.
    endpoint: Arc<str>,
    #[schema(value_type = WorkerRoleSchema)]
    role: WorkerRole,
    /// Whether it only stores blocks and computes nothing.
    store_only: bool,
    /// Data-parallel ranks.
    ranks: u16,
    /// Incarnation of the worker.
    #[schema(value_type = u64)]
    incarnation: Incarnation,
    #[serde(flatten)]
    lease: LeaseStatus,
}

impl WorkerLeaseResource {
    fn new(view: &LedgerView, worker: &Worker) -> Self {
        Self {
            worker: worker.id,
            endpoint: worker.spec.endpoint.clone(),
            role: worker.spec.role,
            store_only: worker.spec.kind == WorkerKind::Store,
            ranks: worker.spec.ranks,
            incarnation: worker.incarnation,
            lease: LeaseStatus::new(view, worker),
        }
    }
}

pub(super) fn find_worker(view: &LedgerView, id: WorkerId) -> Result<&Worker, Problem> {
    view.worker(id).ok_or_else(|| Problem::not_found(format!("No worker {id} is in the ledger.")))
}

/// The lease of one worker.
#[derive(Serialize, ToSchema)]
pub(super) struct LeaseResponse {
    lease: WorkerLeaseResource,
}

/// The lease of one worker.
#[utoipa::path(get, path = "/ownerserve/v1/leases/{worker}", tag = "workers",
    params(("worker" = WorkerIdSchema, Path), ConsistencyQuery),
    responses((
        status = 200, description = "The lease of the worker's newest incarnation.",
        body = LedgerResponse<LeaseResponse>, headers(("etag" = String, description = "Its fencing tag.")))))]
pub(super) async fn lease(
    ReadView(view): ReadView,
    PathId(id): PathId<WorkerId>,
) -> Result<LedgerResponse<LeaseResponse>, Problem> {
    let worker = find_worker(&view, id)?;
    let lease = WorkerLeaseResource::new(&view, worker);
    let tag =
        EntityTag::of(worker.epoch, &(lease.incarnation, lease.lease.state, lease.lease.draining, &lease.endpoint));
    Ok(LedgerResponse::new(&view, LeaseResponse { lease }).with_tag(tag))
}

/// Filter of leases.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct LeaseFilter {
    /// In this state.
    #[param(inline)]
    state: Option<LeaseState>,
}

/// Leases, by worker.
#[derive(Serialize, ToSchema)]
pub(super) struct LeasePage {
    leases: Vec<WorkerLeaseResource>,
    #[serde(flatten)]
    listed: PageMeta,
}

/// The newest incarnation of every worker that the ledger knows, by worker.
#[utoipa::path(get, path = "/ownerserve/v1/leases", tag = "workers", params(LeaseFilter, PageQuery, ConsistencyQuery),
    responses((status = 200, description = "A page of leases, and where the next one begins.", body = LedgerResponse<LeasePage>)))]
pub(super) async fn leases(
    ReadView(view): ReadView,
    QueryParams(filter): QueryParams<LeaseFilter>,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<LeasePage>, Problem> {
    let page = page.page("leases", &filter, view.applied())?;
    let line = |worker: &Worker| {
        let accepted = filter.state.is_none_or(|state| state == worker.lease.into());
        (worker.id, accepted.then(|| WorkerLeaseResource::new(&view, worker)).into_iter().collect())
    };
    let (leases, listed) = page.fill(view.workers_after(page.after).map(line));
    Ok(LedgerResponse::new(&view, LeasePage { leases, listed }))
}

/// A step that a router has dispatched and not yet committed. It owns nothing.
#[derive(Serialize, ToSchema)]
#[schema(as = Intent)]
struct IntentResource {
    #[schema(value_type = SessionIdSchema)]
    session: SessionId,
    /// The head that it extends; the chain's root for a first step.
    #[schema(value_type = PrefixIdSchema)]
    base_prefix: PrefixId,
    /// Where it was sent.
    target: OwnerResource,
    /// The node of the router that sent it.
    #[schema(value_type = u64)]
    router_node: NodeId,
    /// Time until it is forgotten, on the ledger's clock.
    expires_in: TimeSpan,
}

impl IntentResource {
    fn new(view: &LedgerView, session: SessionId, intent: &Intent) -> Self {
        Self {
            session,
            base_prefix: intent.base,
            target: OwnerResource::new(view, intent.worker),
            router_node: intent.router,
            expires_in: ledger_span(view.now(), intent.expires),
        }
    }
}

/// Filter of intents; all conditions must hold.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct IntentFilter {
    /// Of this session.
    #[param(value_type = Option<SessionIdSchema>)]
    session: Option<SessionId>,
    /// Sent to this worker.
    #[param(value_type = Option<WorkerIdSchema>)]
    worker: Option<WorkerId>,
    /// Sent by the router of this node.
    router: Option<u64>,
}

/// Steps in flight, by session.
#[derive(Serialize, ToSchema)]
pub(super) struct IntentPage {
    intents: Vec<IntentResource>,
    #[serde(flatten)]
    listed: PageMeta,
}

/// Steps in flight, by session. Those of one session stay on one page.
#[utoipa::path(get, path = "/ownerserve/v1/intents", tag = "sessions", params(IntentFilter, PageQuery, ConsistencyQuery),
    responses((
        status = 200, description = "A page of steps in flight, and where the next one begins.",
        body = LedgerResponse<IntentPage>)))]
pub(super) async fn intents(
    ReadView(view): ReadView,
    QueryParams(filter): QueryParams<IntentFilter>,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<IntentPage>, Problem> {
    let page = page.page("intents", &filter, view.applied())?;
    let looking = view.clone();
    let list = move || {
        let is_selected = |session: SessionId, intent: &Intent| {
            filter.session.is_none_or(|wanted| wanted == session)
                && filter.worker.is_none_or(|worker| intent.worker.worker == worker)
                && filter.router.is_none_or(|router| intent.router == NodeId(router))
        };
        let lines = |(session, all): (SessionId, Vec<Intent>)| {
            let found = all.iter().filter(|intent| is_selected(session, intent));
            (session, found.map(|intent| IntentResource::new(&looking, session, intent)).collect())
        };
        page.fill(looking.intents_after(page.after).map(lines))
    };
    let (intents, listed) = run_blocking(list).await?;
    Ok(LedgerResponse::new(&view, IntentPage { intents, listed }))
}
