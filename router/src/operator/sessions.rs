//! `/ownerserve/v1/sessions`: conversations, their heads, owners and forks.

use std::collections::BTreeMap;
use std::sync::Arc;

use ownership::View;
use ownership::ledger::{Head, Session};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{ArtifactId, Blocks, Epoch, ModelId, PrefixId, SessionId, TenantId, Tokens, WorkerId};

use super::fresh::{Fresh, FreshQuery, Seen};
use super::input::{Asked, Named};
use super::paging::{Listed, MOST, PageQuery};
use super::problem::Problem;
use super::tags::Tag;
use super::words::{ArtifactWord, EpochWord, OwnerLine, PrefixWord, SessionWord, TenantWord, WorkerWord};

/// A conversation.
#[derive(Serialize, ToSchema)]
pub(super) struct SessionLine {
    #[schema(value_type = SessionWord)]
    id: SessionId,
    #[schema(value_type = TenantWord)]
    tenant: TenantId,
    /// The model it talks to.
    #[schema(value_type = String)]
    model: ModelId,
    /// The session that it was forked from.
    #[schema(value_type = Option<SessionWord>)]
    parent: Option<SessionId>,
    /// Who decodes it.
    owner: Option<OwnerLine>,
    /// When the owner was granted, or the session opened.
    #[schema(value_type = EpochWord)]
    epoch: Epoch,
    /// Its ends, the one that moved last at the end.
    heads: Vec<HeadLine>,
    /// Steps that routers have dispatched and not yet committed.
    steps_on_their_way: usize,
    /// Time since it was last written, on the ledger's clock.
    idle_ms: u64,
}

/// One end of a session: where its next step may go on.
#[derive(Serialize, ToSchema)]
struct HeadLine {
    #[schema(value_type = PrefixWord)]
    prefix: PrefixId,
    /// Blocks from the start.
    #[schema(value_type = u64)]
    blocks: Blocks,
    /// Tokens in them.
    #[schema(value_type = Option<u64>)]
    tokens: Option<Tokens>,
    /// The artifact that it ends in.
    #[schema(value_type = ArtifactWord)]
    artifact: ArtifactId,
}

impl SessionLine {
    pub(super) fn new(view: &View, session: &Session) -> Self {
        let head = |head: &Head| HeadLine {
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
            owner: session.owner.map(|owner| OwnerLine::new(view, owner)),
            epoch: session.epoch,
            heads: session.heads.iter().map(head).collect(),
            steps_on_their_way: view.intents(session.id).count(),
            idle_ms: view.now().0.saturating_sub(session.touched.0) / 1000,
        }
    }

    fn tag(&self) -> Tag {
        Tag::of(self.epoch, &(&self.owner, &self.heads, self.parent, self.steps_on_their_way))
    }
}

/// One session.
#[derive(Serialize, ToSchema)]
pub(super) struct OneSession {
    session: SessionLine,
}

pub(super) fn known(view: &View, id: SessionId) -> Result<Session, Problem> {
    view.session(id).ok_or_else(|| Problem::not_found(format!("No session {id} is in the ledger.")))
}

/// One session.
#[utoipa::path(get, path = "/ownerserve/v1/sessions/{id}", tag = "sessions",
    params(("id" = SessionWord, Path), FreshQuery),
    responses((
        status = 200, description = "The session, with its owner and its heads.",
        body = Fresh<OneSession>, headers(("etag" = String, description = "Its fencing tag.")))))]
pub(super) async fn session(Seen(view): Seen, Named(id): Named<SessionId>) -> Result<Fresh<OneSession>, Problem> {
    let session = SessionLine::new(&view, &known(&view, id)?);
    let tag = session.tag();
    Ok(Fresh::new(&view, OneSession { session }).tagged(tag))
}

/// Which sessions are asked for.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct SessionFilter {
    /// Of this tenant.
    tenant: Option<String>,
    /// With this model.
    model: Option<String>,
    /// What the client calls its session; needs `model`, and `tenant` unless that is `default`.
    key: Option<String>,
    /// Decoded by this worker.
    #[param(value_type = Option<WorkerWord>)]
    worker: Option<WorkerId>,
    /// Forked from this session.
    #[param(value_type = Option<SessionWord>)]
    parent: Option<SessionId>,
}

impl SessionFilter {
    fn accepts(&self, session: &Session) -> bool {
        self.tenant.as_deref().is_none_or(|tenant| &*session.tenant.0 == tenant)
            && self.model.as_deref().is_none_or(|model| &*session.model.0 == model)
            && self.worker.is_none_or(|worker| session.owner.is_some_and(|owner| owner.worker == worker))
            && self.parent.is_none_or(|parent| session.parent == Some(parent))
    }
}

/// Sessions, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct Sessions {
    /// Open sessions, whatever the filter.
    total: usize,
    sessions: Vec<SessionLine>,
    #[serde(flatten)]
    listed: Listed,
}

/// Sessions, by id.
#[utoipa::path(get, path = "/ownerserve/v1/sessions", tag = "sessions", params(SessionFilter, PageQuery, FreshQuery),
    responses((
        status = 200, description = "A page of sessions, and where the next one begins.",
        body = Fresh<Sessions>)))]
pub(super) async fn sessions(
    Seen(view): Seen,
    Asked(filter): Asked<SessionFilter>,
    Asked(page): Asked<PageQuery>,
) -> Result<Fresh<Sessions>, Problem> {
    let page = page.page("sessions", &filter, view.applied())?;
    let named = match (&filter.key, &filter.model) {
        (None, _) => None,
        (Some(_), None) => {
            return Err(Problem::bad_query("key needs model, and tenant unless it is default"));
        }
        (Some(key), Some(model)) => {
            let tenant = filter.tenant.as_deref().map(|name| TenantId(name.into())).unwrap_or_default();
            Some(SessionId::of_key(&tenant, &ModelId::from(model.as_str()), key))
        }
    };
    let looking = view.clone();
    let list = move || {
        let line = |session: Session| {
            let lines = filter.accepts(&session).then(|| SessionLine::new(&looking, &session)).into_iter().collect();
            (session.id, lines)
        };
        match named {
            Some(id) => page.fill(looking.session(id).into_iter().map(line)),
            None => page.fill(looking.sessions_after(page.after).map(line)),
        }
    };
    let (sessions, listed) = super::apart(list).await?;
    Ok(Fresh::new(&view, Sessions { total: view.session_count(), sessions, listed }))
}

/// A session in the tree of its forks.
#[derive(Serialize, ToSchema)]
struct Branch {
    #[schema(value_type = SessionWord)]
    id: SessionId,
    /// The session that it was forked from, whether that is still open or not.
    #[schema(value_type = Option<SessionWord>)]
    parent: Option<SessionId>,
    /// How far below the first line it is.
    depth: usize,
    /// Who decodes it.
    owner: Option<OwnerLine>,
    /// Blocks of its deepest head.
    #[schema(value_type = u64)]
    blocks: Blocks,
    /// How many ends it has.
    heads: usize,
}

/// A session's family: its eldest open ancestor and everything forked from that.
#[derive(Serialize, ToSchema)]
pub(super) struct Tree {
    /// Parents before their children, children in the order of their ids.
    branches: Vec<Branch>,
    /// Whether there are more than fit into one answer.
    cut: bool,
}

/// A session's fork tree.
#[utoipa::path(get, path = "/ownerserve/v1/sessions/{id}/tree", tag = "sessions",
    params(("id" = SessionWord, Path), FreshQuery),
    responses((
        status = 200, description = "Its eldest open ancestor and everything forked from that.",
        body = Fresh<Tree>)))]
pub(super) async fn tree(Seen(view): Seen, Named(id): Named<SessionId>) -> Result<Fresh<Tree>, Problem> {
    known(&view, id)?;
    let looking: Arc<View> = view.clone();
    let tree = super::apart(move || family(&looking, id)).await?;
    Ok(Fresh::new(&view, tree))
}

/// Walks up to the eldest open ancestor, then down. Fork ids are hashes, so only a look at all sessions finds children.
fn family(view: &View, id: SessionId) -> Tree {
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
    let most = usize::from(MOST);
    while let Some((id, depth)) = open.pop() {
        let Some(session) = view.session(id).filter(|_| seen.insert(id)) else { continue };
        if branches.len() == most {
            return Tree { branches, cut: true };
        }
        branches.push(Branch {
            id,
            parent: session.parent,
            depth,
            owner: session.owner.map(|owner| OwnerLine::new(view, owner)),
            blocks: session.heads.iter().map(|head| head.point.blocks).max().unwrap_or_default(),
            heads: session.heads.len(),
        });
        open.extend(children.get(&id).into_iter().flatten().rev().map(|child| (*child, depth + 1)));
    }
    Tree { branches, cut: false }
}
