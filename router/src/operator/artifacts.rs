//! `/ownerserve/v1/artifacts`: sealed ranges of blocks, and who has them.

use ownership::View;
use ownership::ledger::{Artifact, Pinned, Replica, Standing};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{ArtifactId, Blocks, Bytes, Epoch, GroupId, ModelId, PrefixId, SessionId, TenantId, Tokens, WorkerId};

use super::fresh::{Fresh, FreshQuery, Seen};
use super::input::{Asked, Named};
use super::paging::{Listed, PageQuery};
use super::problem::Problem;
use super::tags::Tag;
use super::words::{ArtifactWord, EpochWord, GroupWord, OwnerLine, PrefixWord, SessionWord, TenantWord, WorkerWord};

/// Who has it, by decision and with live leases.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum StandingWord {
    /// Its owner.
    Owned,
    /// The owner is gone; a read-only copy stands in.
    Copied,
    /// Only a store has it.
    Stored,
    /// Nobody.
    Unowned,
}

impl From<Standing> for StandingWord {
    fn from(standing: Standing) -> Self {
        match standing {
            Standing::Owned(_) => Self::Owned,
            Standing::Copied(_) => Self::Copied,
            Standing::Stored(_) => Self::Stored,
            Standing::Unowned => Self::Unowned,
        }
    }
}

/// Whose it is and where it lies on its chain.
#[derive(Serialize, ToSchema)]
struct Origin {
    #[schema(value_type = TenantWord)]
    tenant: TenantId,
    /// Whose KV.
    #[schema(value_type = String)]
    model: ModelId,
    /// The artifact that it extends.
    #[schema(value_type = Option<ArtifactWord>)]
    parent: Option<ArtifactId>,
    /// Blocks before it.
    #[schema(value_type = u64)]
    from: Blocks,
    /// Blocks from the start to its end.
    #[schema(value_type = u64)]
    blocks: Blocks,
    /// Tokens from the start to its end.
    #[schema(value_type = u64)]
    tokens: Tokens,
    /// The prefix that ends where it ends.
    #[schema(value_type = PrefixWord)]
    prefix: PrefixId,
}

/// A sealed range of blocks that has one owner.
#[derive(Serialize, ToSchema)]
pub(super) struct ArtifactLine {
    #[schema(value_type = ArtifactWord)]
    id: ArtifactId,
    #[serde(flatten)]
    origin: Origin,
    standing: StandingWord,
    /// Who has it; where the owner is gone, who stands in.
    owner: Option<OwnerLine>,
    /// When the owner was granted.
    #[schema(value_type = EpochWord)]
    epoch: Epoch,
    /// Read-only copies.
    replicas: Vec<ReplicaLine>,
    /// Sessions with a head in it.
    sessions: usize,
    /// Artifacts that hang on it.
    children: usize,
    #[schema(value_type = Option<GroupWord>)]
    group: Option<GroupId>,
    /// Whether it is never evicted or collected.
    pinned: bool,
    /// Of its own blocks.
    #[schema(value_type = u64)]
    bytes: Bytes,
    /// Time since it was last written, on the ledger's clock.
    idle_ms: u64,
}

/// A read-only copy.
#[derive(Serialize, ToSchema)]
pub(super) struct ReplicaLine {
    /// Of what.
    #[schema(value_type = ArtifactWord)]
    artifact: ArtifactId,
    /// Who has it.
    holder: OwnerLine,
    /// How far it reaches, from the start.
    #[schema(value_type = u64)]
    blocks: Blocks,
    /// The prefix up to there.
    #[schema(value_type = PrefixWord)]
    prefix: PrefixId,
    /// Until it is forgotten, on the ledger's clock.
    left_ms: u64,
}

impl ReplicaLine {
    pub(super) fn new(view: &View, artifact: &Artifact, replica: &Replica) -> Self {
        Self {
            artifact: artifact.id,
            holder: OwnerLine::new(view, replica.holder),
            blocks: replica.upto.blocks,
            prefix: replica.upto.id,
            left_ms: replica.expires.0.saturating_sub(view.now().0) / 1000,
        }
    }
}

impl ArtifactLine {
    fn new(view: &View, artifact: &Artifact) -> Self {
        let (end, standing) = (artifact.end(), view.standing(artifact));
        let origin = Origin {
            tenant: artifact.origin.tenant.clone(),
            model: artifact.origin.model.clone(),
            parent: artifact.parent.map(|parent| parent.artifact),
            from: artifact.from(),
            blocks: end.blocks,
            tokens: end.blocks.tokens(artifact.origin.shape.block),
            prefix: end.id,
        };
        Self {
            id: artifact.id,
            origin,
            standing: standing.into(),
            owner: standing.owner().map(|owner| OwnerLine::new(view, owner)),
            epoch: artifact.epoch,
            replicas: artifact.replicas.iter().map(|replica| ReplicaLine::new(view, artifact, replica)).collect(),
            sessions: artifact.sessions.len(),
            children: artifact.children.len(),
            group: artifact.group,
            pinned: artifact.pinned == Pinned::Yes,
            bytes: artifact.bytes(),
            idle_ms: view.now().0.saturating_sub(artifact.touched.0) / 1000,
        }
    }

    fn tag(&self) -> Tag {
        let copies: Vec<_> = self.replicas.iter().map(|copy| (&copy.holder, copy.blocks)).collect();
        let settled = (&self.owner, &self.origin, copies, self.sessions, self.children, (self.group, self.pinned));
        Tag::of(self.epoch, &settled)
    }
}

/// One artifact.
#[derive(Serialize, ToSchema)]
pub(super) struct OneArtifact {
    artifact: ArtifactLine,
}

pub(super) fn known(view: &View, id: ArtifactId) -> Result<Artifact, Problem> {
    view.artifact(id).ok_or_else(|| Problem::not_found(format!("No artifact {id} is in the ledger.")))
}

/// One artifact.
#[utoipa::path(get, path = "/ownerserve/v1/artifacts/{id}", tag = "artifacts",
    params(("id" = ArtifactWord, Path), FreshQuery),
    responses((
        status = 200, description = "The artifact, with its owner, its copies and what references it.",
        body = Fresh<OneArtifact>, headers(("etag" = String, description = "Its fencing tag.")))))]
pub(super) async fn artifact(Seen(view): Seen, Named(id): Named<ArtifactId>) -> Result<Fresh<OneArtifact>, Problem> {
    let artifact = ArtifactLine::new(&view, &known(&view, id)?);
    let tag = artifact.tag();
    Ok(Fresh::new(&view, OneArtifact { artifact }).tagged(tag))
}

/// Which artifacts are asked for.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ArtifactFilter {
    /// Of this tenant.
    tenant: Option<String>,
    /// Of this model's KV.
    model: Option<String>,
    /// Owned by this worker, live or not.
    #[param(value_type = Option<WorkerWord>)]
    worker: Option<WorkerId>,
    /// In this group.
    #[param(value_type = Option<GroupWord>)]
    group: Option<GroupId>,
    /// Who has it now.
    #[param(inline)]
    standing: Option<StandingWord>,
    /// With a head of this session in it.
    #[param(value_type = Option<SessionWord>)]
    session: Option<SessionId>,
}

impl ArtifactFilter {
    pub(super) fn accepts(&self, view: &View, artifact: &Artifact) -> bool {
        self.tenant.as_deref().is_none_or(|tenant| &*artifact.origin.tenant.0 == tenant)
            && self.model.as_deref().is_none_or(|model| &*artifact.origin.model.0 == model)
            && self.worker.is_none_or(|worker| artifact.owner.is_some_and(|owner| owner.worker == worker))
            && self.group.is_none_or(|group| artifact.group == Some(group))
            && self.session.is_none_or(|session| artifact.sessions.contains(session))
            && self.standing.is_none_or(|standing| standing == view.standing(artifact).into())
    }
}

/// Artifacts, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct Artifacts {
    /// All there are, whatever the filter.
    total: usize,
    artifacts: Vec<ArtifactLine>,
    #[serde(flatten)]
    listed: Listed,
}

/// Artifacts, by id.
#[utoipa::path(get, path = "/ownerserve/v1/artifacts", tag = "artifacts",
    params(ArtifactFilter, PageQuery, FreshQuery),
    responses((
        status = 200, description = "A page of artifacts, and where the next one begins.",
        body = Fresh<Artifacts>)))]
pub(super) async fn artifacts(
    Seen(view): Seen,
    Asked(filter): Asked<ArtifactFilter>,
    Asked(page): Asked<PageQuery>,
) -> Result<Fresh<Artifacts>, Problem> {
    let page = page.page("artifacts", &filter, view.applied())?;
    let looking = view.clone();
    let list = move || {
        let line = |artifact: Artifact| {
            let accepted = filter.accepts(&looking, &artifact);
            (artifact.id, accepted.then(|| ArtifactLine::new(&looking, &artifact)).into_iter().collect())
        };
        page.fill(looking.artifacts_after(page.after).map(line))
    };
    let (artifacts, listed) = super::apart(list).await?;
    Ok(Fresh::new(&view, Artifacts { total: view.artifact_count(), artifacts, listed }))
}
