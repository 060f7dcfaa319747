//! `/ownerserve/v1/sessions` and `/owners`: the ledger as this router last applied it, and how fresh that is.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use ownership::View;
use ownership::ledger::{Artifact, Head, Session, Standing};
use serde::{Deserialize, Serialize};
use vocabulary::{
    ArtifactId, Blocks, Bytes, DpRank, Epoch, Incarnation, ModelId, NodeId, Owner, PrefixId, SessionId, TenantId,
    Tokens, WorkerId,
};

use super::Problem;
use crate::gateway::Gateway;

/// Most sessions in one answer.
const MOST: usize = 1000;

/// How fresh an answer is; part of every answer from the ledger.
#[derive(Serialize)]
pub(super) struct Fresh<T> {
    revision: u64,
    term: u64,
    leader: Option<NodeId>,
    stale: bool,
    #[serde(flatten)]
    body: T,
}

impl<T> Fresh<T> {
    pub(super) fn new(view: &View, body: T) -> Json<Self> {
        let quorum = view.quorum();
        let (term, leader, stale) = (quorum.term, quorum.leader, quorum.stale);
        Json(Self { revision: view.applied(), term, leader, stale, body })
    }
}

/// An owner, and whether it still lives.
#[derive(Serialize)]
struct OwnerLine {
    worker: WorkerId,
    endpoint: Option<Arc<str>>,
    incarnation: Incarnation,
    rank: DpRank,
    live: bool,
}

impl OwnerLine {
    fn new(view: &View, owner: Owner) -> Self {
        let Owner { worker, incarnation, rank } = owner;
        let endpoint = view.worker(worker).map(|record| record.spec.endpoint.clone());
        Self { worker, endpoint, incarnation, rank, live: view.is_live(owner) }
    }
}

#[derive(Serialize)]
pub(super) struct SessionLine {
    id: SessionId,
    tenant: TenantId,
    model: ModelId,
    parent: Option<SessionId>,
    owner: Option<OwnerLine>,
    epoch: Epoch,
    heads: Vec<HeadLine>,
    steps_on_their_way: usize,
    idle_ms: u64,
}

#[derive(Serialize)]
struct HeadLine {
    prefix: PrefixId,
    blocks: Blocks,
    tokens: Option<Tokens>,
    artifact: ArtifactId,
}

impl SessionLine {
    fn new(view: &View, session: &Session) -> Self {
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
}

#[derive(Serialize)]
pub(super) struct OneSession {
    session: SessionLine,
}

/// `GET /ownerserve/v1/sessions/{id}`.
pub(super) async fn session(
    State(gateway): State<Arc<Gateway>>,
    Path(id): Path<String>,
) -> Result<Json<Fresh<OneSession>>, Problem> {
    let id: SessionId = id.parse().map_err(|error| Problem::bad_id(&error))?;
    let view = gateway.directory().view();
    let session = view.session(id).ok_or_else(|| Problem::not_found(format!("No session {id} is in the ledger.")))?;
    Ok(Fresh::new(&view, OneSession { session: SessionLine::new(&view, session) }))
}

/// Which sessions are asked for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SessionQuery {
    limit: Option<usize>,
    tenant: Option<String>,
    model: Option<String>,
    key: Option<String>,
}

#[derive(Serialize)]
pub(super) struct Sessions {
    total: usize,
    sessions: Vec<SessionLine>,
}

/// `GET /ownerserve/v1/sessions?limit=&tenant=&model=&key=`. `key` is what the client calls its session; it needs
/// `model`, and `tenant` where that is not `default`.
pub(super) async fn sessions(
    State(gateway): State<Arc<Gateway>>,
    query: Result<Query<SessionQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Json<Fresh<Sessions>>, Problem> {
    let Query(query) = query.map_err(|error| Problem::bad_query(error.body_text()))?;
    let view = gateway.directory().view();
    let tenant = query.tenant.map(|name| TenantId(name.into()));
    let model = query.model.as_deref().map(ModelId::from);
    let sessions = match (&query.key, &model) {
        (Some(key), Some(model)) => {
            let id = SessionId::of_key(&tenant.unwrap_or_default(), model, key);
            view.session(id).into_iter().map(|session| SessionLine::new(&view, session)).collect()
        }
        (Some(_), None) => return Err(Problem::bad_query("key needs model, and tenant unless it is default")),
        (None, _) => view
            .sessions()
            .filter(|session| tenant.as_ref().is_none_or(|tenant| session.tenant == *tenant))
            .filter(|session| model.as_ref().is_none_or(|model| session.model == *model))
            .take(query.limit.unwrap_or(100).min(MOST))
            .map(|session| SessionLine::new(&view, session))
            .collect(),
    };
    Ok(Fresh::new(&view, Sessions { total: view.session_count(), sessions }))
}

#[derive(Serialize)]
struct OwnedPrefix {
    prefix: PrefixId,
    blocks: Blocks,
    sealed_at: Epoch,
    artifact: ArtifactId,
    tenant: TenantId,
    model: ModelId,
    standing: &'static str,
    owner: Option<OwnerLine>,
    epoch: Epoch,
    replicas: Vec<OwnerLine>,
    sessions: Vec<SessionId>,
    /// Of the whole artifact.
    bytes: Bytes,
}

#[derive(Serialize)]
pub(super) struct Owners {
    owners: Vec<OwnedPrefix>,
}

/// `GET /ownerserve/v1/owners/{prefix}`: one for each tenant and format that has it sealed as a boundary.
pub(super) async fn owners(
    State(gateway): State<Arc<Gateway>>,
    Path(prefix): Path<String>,
) -> Result<Json<Fresh<Owners>>, Problem> {
    let prefix: PrefixId = prefix.parse().map_err(|error| Problem::bad_id(&error))?;
    let view = gateway.directory().view();
    let looking = view.clone();
    // Nothing but an operator asks by prefix alone, so there is no index for it: every artifact is looked at.
    let owners = tokio::task::spawn_blocking(move || {
        looking.artifacts().filter_map(|artifact| owned(&looking, artifact, prefix)).take(MOST).collect::<Vec<_>>()
    });
    let owners = owners.await.map_err(|_| Problem::not_ready("the ledger could not be searched"))?;
    if owners.is_empty() {
        let detail = "No artifact keeps that prefix as a boundary. It was never sealed, was merged into a longer extent, or is gone.";
        return Err(Problem::not_found(detail));
    }
    Ok(Fresh::new(&view, Owners { owners }))
}

fn owned(view: &View, artifact: &Artifact, prefix: PrefixId) -> Option<OwnedPrefix> {
    let boundary = artifact.boundaries.iter().find(|boundary| boundary.point.id == prefix)?;
    let standing = view.standing(artifact);
    let word = match standing {
        Standing::Owned(_) => "owned",
        Standing::Copied(_) => "copied",
        Standing::Stored(_) => "stored",
        Standing::Unowned => "unowned",
    };
    let reaching = artifact.replicas.iter().filter(|replica| replica.upto.blocks >= boundary.point.blocks);
    Some(OwnedPrefix {
        prefix,
        blocks: boundary.point.blocks,
        sealed_at: boundary.epoch,
        artifact: artifact.id,
        tenant: artifact.origin.tenant.clone(),
        model: artifact.origin.model.clone(),
        standing: word,
        owner: standing.owner().map(|owner| OwnerLine::new(view, owner)),
        epoch: artifact.epoch,
        replicas: reaching.map(|replica| OwnerLine::new(view, replica.holder)).collect(),
        sessions: artifact.sessions.iter().take(MOST).collect(),
        bytes: artifact.bytes(),
    })
}
