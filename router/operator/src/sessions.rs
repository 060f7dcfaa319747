//! `/ownerserve/v1/sessions`: conversations with their heads, owners and forks.

use std::collections::BTreeMap;
use std::sync::Arc;

use ownership::LedgerView;
use ownership::ledger::{Session, SessionHead};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{ArtifactId, Blocks, Epoch, ModelId, PrefixId, SessionId, TenantId, Tokens, WorkerId};

use super::blocking::run_blocking;
use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::entity_tags::EntityTag;
use super::extractors::{PathId, QueryParams};
use super::paging::{MAX_LIMIT, PageMeta, PageQuery};
use super::problem::Problem;
use super::schemas::{
    ArtifactIdSchema, EpochSchema, OwnerResource, PrefixIdSchema, SessionIdSchema, TenantIdSchema, WorkerIdSchema,
    ledger_span,
};
use vocabulary::TimeSpan;

/// A conversation.
#[derive(Serialize, ToSchema)]
#[schema(as = Session)]
pub(super) struct SessionResource {
    #[schema(value_type = SessionIdSchema)]
    id: SessionId,
    #[schema(value_type = TenantIdSchema)]
    tenant: TenantId,
    /// The model it talks to.
    #[schema(value_type = String)]
    model: ModelId,
    /// The session that it was forked from.
    #[schema(value_type = Option<SessionIdSchema>)]
    parent: Option<SessionId>,
    /// The worker that decodes it.
    owner: Option<OwnerResource>,
    /// Epoch of the grant to the owner, or of the session's start.
    #[schema(value_type = EpochSchema)]
    epoch: Epoch,
    /// Its heads; the last one moved last.
    heads: Vec<HeadResource>,
    /// Steps that routers have dispatched and not yet committed.
    in_flight_steps: usize,
    /// Time since it was last written, on the ledger's clock.
    idle: TimeSpan,
}

/// A head of a session, which its next step may extend.
#[derive(Serialize, ToSchema)]
struct HeadResource {
    #[schema(value_type = PrefixIdSchema)]
    prefix: PrefixId,
    /// Blocks from the start.
    #[schema(value_type = u64)]
    blocks: Blocks,
    /// Tokens in them.
    #[schema(value_type = Option<u64>)]
    tokens: Option<Tokens>,
    /// The artifact that it ends in.
    #[schema(value_type = ArtifactIdSchema)]
    artifact: ArtifactId,
}

impl SessionResource {
    pub(super) fn new(view: &LedgerView, session: &Session) -> Self {
        let head = |head: &SessionHead| HeadResource {
            prefix: head.point.id,
            blocks: head.point.blocks,
            tokens: view.artifact(head.artifact).map(|it| head.point.blocks.tokens(it.origin.shape.block)),
            artifact: head.artifact,
        };
        Self {
            id: session.id,
            tenant: session.tenant.clone(),
            model: session.model.clone(),
            parent: session.parent,
            owner: session.owner.map(|owner| OwnerResource::new(view, owner)),
            epoch: session.epoch,
            heads: session.heads.iter().map(head).collect(),
            in_flight_steps: view.intents(session.id).count(),
            idle: ledger_span(session.touched, view.now()),
        }
    }

    fn tag(&self) -> EntityTag {
        EntityTag::of(self.epoch, &(&self.owner, &self.heads, self.parent, self.in_flight_steps))
    }
}

/// One session.
#[derive(Serialize, ToSchema)]
pub(super) struct SessionResponse {
    session: SessionResource,
}

pub(super) fn find_session(view: &LedgerView, id: SessionId) -> Result<Session, Problem> {
    view.session(id).ok_or_else(|| Problem::not_found(format!("No session {id} is in the ledger.")))
}

/// One session.
#[utoipa::path(get, path = "/ownerserve/v1/sessions/{id}", tag = "sessions",
    params(("id" = SessionIdSchema, Path), ConsistencyQuery),
    responses((
        status = 200, description = "The session, with its owner and its heads.",
        body = LedgerResponse<SessionResponse>, headers(("etag" = String, description = "Its fencing tag.")))))]
pub(super) async fn session(
    ReadView(view): ReadView,
    PathId(id): PathId<SessionId>,
) -> Result<LedgerResponse<SessionResponse>, Problem> {
    let session = SessionResource::new(&view, &find_session(&view, id)?);
    let tag = session.tag();
    Ok(LedgerResponse::new(&view, SessionResponse { session }).with_tag(tag))
}

/// Filter of sessions; all conditions must hold.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct SessionFilter {
    /// Of this tenant.
    tenant: Option<String>,
    /// With this model.
    model: Option<String>,
    /// The client's own name of the session; needs `model`, and `tenant` unless that is `default`.
    session_key: Option<String>,
    /// Owned by this worker.
    #[param(value_type = Option<WorkerIdSchema>)]
    worker: Option<WorkerId>,
    /// Forked from this session.
    #[param(value_type = Option<SessionIdSchema>)]
    parent: Option<SessionId>,
}

impl SessionFilter {
    fn matches(&self, session: &Session) -> bool {
        self.tenant.as_deref().is_none_or(|tenant| &*session.tenant.0 == tenant)
            && self.model.as_deref().is_none_or(|model| &*session.model.0 == model)
            && self.worker.is_none_or(|worker| session.owner.is_some_and(|owner| owner.worker == worker))
            && self.parent.is_none_or(|parent| session.parent == Some(parent))
    }
}

/// Sessions, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct SessionPage {
    /// Number of open sessions, whatever the filter.
    total: usize,
    sessions: Vec<SessionResource>,
    #[serde(flatten)]
    listed: PageMeta,
}

/// Sessions, by id.
#[utoipa::path(get, path = "/ownerserve/v1/sessions", tag = "sessions", params(SessionFilter, PageQuery, ConsistencyQuery),
    responses((
        status = 200, description = "A page of sessions, and where the next one begins.",
        body = LedgerResponse<SessionPage>)))]
pub(super) async fn sessions(
    ReadView(view): ReadView,
    QueryParams(filter): QueryParams<SessionFilter>,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<SessionPage>, Problem> {
    let page = page.page("sessions", &filter, view.applied())?;
    let named = match (&filter.session_key, &filter.model) {
        (None, _) => None,
        (Some(_), None) => {
            return Err(Problem::bad_query(
                "session_key: accepted only with model, and with tenant unless that is default",
            ));
        }
        (Some(key), Some(model)) => {
            let tenant = filter.tenant.as_deref().map(|name| TenantId(name.into())).unwrap_or_default();
            Some(SessionId::of_key(&tenant, &ModelId::from(model.as_str()), key))
        }
    };
    let looking = view.clone();
    let list = move || {
        let line = |session: Session| {
            let lines =
                filter.matches(&session).then(|| SessionResource::new(&looking, &session)).into_iter().collect();
            (session.id, lines)
        };
        match named {
            Some(id) => page.fill(looking.session(id).into_iter().map(line)),
            None => page.fill(looking.sessions_after(page.after).map(line)),
        }
    };
    let (sessions, listed) = run_blocking(list).await?;
    Ok(LedgerResponse::new(&view, SessionPage { total: view.session_count(), sessions, listed }))
}

/// A session in the tree of its forks.
#[derive(Serialize, ToSchema)]
struct ForkTreeNode {
    #[schema(value_type = SessionIdSchema)]
    id: SessionId,
    /// The session that it was forked from, whether that is still open or not.
    #[schema(value_type = Option<SessionIdSchema>)]
    parent: Option<SessionId>,
    /// Number of forks between it and the root.
    depth: usize,
    /// The worker that decodes it.
    owner: Option<OwnerResource>,
    /// Blocks of its deepest head.
    #[schema(value_type = u64)]
    blocks: Blocks,
    /// Number of its heads.
    heads: usize,
}

/// Fork tree of a session: its oldest open ancestor and everything forked from that.
#[derive(Serialize, ToSchema)]
pub(super) struct ForkTree {
    /// Parents before their children, children in the order of their ids.
    branches: Vec<ForkTreeNode>,
    /// Whether branches are missing because there are more than fit into one answer.
    truncated: bool,
}

/// A session's fork tree.
#[utoipa::path(get, path = "/ownerserve/v1/sessions/{id}/tree", tag = "sessions",
    params(("id" = SessionIdSchema, Path), ConsistencyQuery),
    responses((
        status = 200, description = "Its oldest open ancestor and everything forked from that.",
        body = LedgerResponse<ForkTree>)))]
pub(super) async fn tree(
    ReadView(view): ReadView,
    PathId(id): PathId<SessionId>,
) -> Result<LedgerResponse<ForkTree>, Problem> {
    find_session(&view, id)?;
    let looking: Arc<LedgerView> = view.clone();
    let tree = run_blocking(move || fork_tree(&looking, id)).await?;
    Ok(LedgerResponse::new(&view, tree))
}

/// Walks up to the oldest open ancestor, then down. Fork ids are hashes, so children are found only by scanning all
/// sessions.
fn fork_tree(view: &LedgerView, id: SessionId) -> ForkTree {
    let mut eldest = id;
    let mut above = std::collections::BTreeSet::from([id]);
    while let Some(parent) =
        view.session(eldest).and_then(|session| session.parent).filter(|id| view.session(*id).is_some())
        && above.insert(parent)
    {
        eldest = parent;
    }
    let mut children: BTreeMap<SessionId, Vec<SessionId>> = BTreeMap::new();
    for session in view.sessions() {
        if let Some(parent) = session.parent {
            children.entry(parent).or_default().push(session.id);
        }
    }
    let (mut branches, mut open, mut seen) = (Vec::new(), vec![(eldest, 0)], std::collections::BTreeSet::new());
    let most = usize::from(MAX_LIMIT);
    while let Some((id, depth)) = open.pop() {
        let Some(session) = view.session(id).filter(|_| seen.insert(id)) else { continue };
        if branches.len() == most {
            return ForkTree { branches, truncated: true };
        }
        branches.push(ForkTreeNode {
            id,
            parent: session.parent,
            depth,
            owner: session.owner.map(|owner| OwnerResource::new(view, owner)),
            blocks: session.heads.iter().map(|head| head.point.blocks).max().unwrap_or_default(),
            heads: session.heads.len(),
        });
        open.extend(children.get(&id).into_iter().flatten().rev().map(|child| (*child, depth + 1)));
    }
    ForkTree { branches, truncated: false }
}
