//! `/ownerserve/v1/artifacts`: sealed ranges of blocks and their owners.

use ownership::LedgerView;
use ownership::ledger::{Artifact, ArtifactPinFlag, OwnershipStatus, Replica};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{
    ArtifactGroupId, ArtifactId, Blocks, Bytes, Epoch, ModelId, PrefixId, SessionId, TenantId, Tokens, WorkerId,
};

use super::blocking::run_blocking;
use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::entity_tags::EntityTag;
use super::extractors::{PathId, QueryParams};
use super::paging::{PageMeta, PageQuery};
use super::problem::Problem;
use super::schemas::{
    ArtifactIdSchema, EpochSchema, GroupIdSchema, OwnerResource, PrefixIdSchema, SessionIdSchema, TenantIdSchema,
    WorkerIdSchema, ledger_span,
};
use vocabulary::TimeSpan;

/// Whether anybody has the artifact, by the ledger and with a live lease.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, Debug)]
#[serde(rename_all = "snake_case")]
pub(super) enum OwnershipState {
    /// Its owner has it.
    Owned,
    /// The owner is gone; a read-only replica has it.
    ReplicaOnly,
    /// Only a store has it.
    StoreOnly,
    /// Nobody has it.
    Unowned,
}

impl From<OwnershipStatus> for OwnershipState {
    fn from(status: OwnershipStatus) -> Self {
        match status {
            OwnershipStatus::Owned(_) => Self::Owned,
            OwnershipStatus::Replicated(_) => Self::ReplicaOnly,
            OwnershipStatus::InStore(_) => Self::StoreOnly,
            OwnershipStatus::Unowned => Self::Unowned,
        }
    }
}

/// Tenant, model and position of an artifact.
#[derive(Serialize, ToSchema)]
struct ArtifactRange {
    #[schema(value_type = TenantIdSchema)]
    tenant: TenantId,
    /// The model whose KV it is.
    #[schema(value_type = String)]
    model: ModelId,
    /// The artifact that it extends.
    #[schema(value_type = Option<ArtifactIdSchema>)]
    parent: Option<ArtifactId>,
    /// Index of its first block: blocks before it.
    #[schema(value_type = u64)]
    first_block: Blocks,
    /// Blocks of the prefix that ends where it ends.
    #[schema(value_type = u64)]
    prefix_blocks: Blocks,
    /// Tokens of that prefix.
    #[schema(value_type = u64)]
    prefix_tokens: Tokens,
    /// The prefix that ends where it ends.
    #[schema(value_type = PrefixIdSchema)]
    prefix: PrefixId,
}

/// A sealed range of blocks that has one owner.
#[derive(Serialize, ToSchema)]
#[schema(as = Artifact)]
pub(super) struct ArtifactResource {
    #[schema(value_type = ArtifactIdSchema)]
    id: ArtifactId,
    #[serde(flatten)]
    origin: ArtifactRange,
    state: OwnershipState,
    /// Who has it; where the owner is gone, the replica or the store that has it.
    owner: Option<OwnerResource>,
    /// Epoch of the grant to the owner.
    #[schema(value_type = EpochSchema)]
    epoch: Epoch,
    /// Read-only replicas.
    replicas: Vec<ReplicaResource>,
    /// Sessions with a head in it.
    sessions: usize,
    /// Artifacts that extend it.
    children: usize,
    #[schema(value_type = Option<GroupIdSchema>)]
    group: Option<ArtifactGroupId>,
    /// Whether it is never evicted or collected.
    pinned: bool,
    /// Bytes of its own blocks.
    #[schema(value_type = u64)]
    bytes: Bytes,
    /// Time since it was last written, on the ledger's clock.
    idle: TimeSpan,
}

/// A read-only replica.
#[derive(Serialize, ToSchema)]
#[schema(as = Replica)]
pub(super) struct ReplicaResource {
    /// The artifact.
    #[schema(value_type = ArtifactIdSchema)]
    artifact: ArtifactId,
    /// Who has it.
    worker: OwnerResource,
    /// Blocks of the prefix that it covers.
    #[schema(value_type = u64)]
    prefix_blocks: Blocks,
    /// That prefix.
    #[schema(value_type = PrefixIdSchema)]
    prefix: PrefixId,
    /// Time until it is forgotten, on the ledger's clock.
    expires_in: TimeSpan,
}

impl ReplicaResource {
    pub(super) fn new(view: &LedgerView, artifact: &Artifact, replica: &Replica) -> Self {
        Self {
            artifact: artifact.id,
            worker: OwnerResource::new(view, replica.holder),
            prefix_blocks: replica.upto.blocks,
            prefix: replica.upto.id,
            expires_in: ledger_span(view.now(), replica.expires),
        }
    }
}

impl ArtifactResource {
    fn new(view: &LedgerView, artifact: &Artifact) -> Self {
        let (end, status) = (artifact.end(), view.ownership_status(artifact));
        let origin = ArtifactRange {
            tenant: artifact.origin.tenant.clone(),
            model: artifact.origin.model.clone(),
            parent: artifact.parent.map(|parent| parent.artifact),
            first_block: artifact.from(),
            prefix_blocks: end.blocks,
            prefix_tokens: end.blocks.tokens(artifact.origin.shape.block),
            prefix: end.id,
        };
        Self {
            id: artifact.id,
            origin,
            state: status.into(),
            owner: status.owner().map(|owner| OwnerResource::new(view, owner)),
            epoch: artifact.epoch,
            replicas: artifact.replicas.iter().map(|replica| ReplicaResource::new(view, artifact, replica)).collect(),
            sessions: artifact.sessions.len(),
            children: artifact.children.len(),
            group: artifact.group,
            pinned: artifact.pinned == ArtifactPinFlag::Yes,
            bytes: artifact.bytes(),
            idle: ledger_span(artifact.touched, view.now()),
        }
    }

    fn tag(&self) -> EntityTag {
        let copies: Vec<_> = self.replicas.iter().map(|copy| (&copy.worker, copy.prefix_blocks)).collect();
        let settled = (&self.owner, &self.origin, copies, self.sessions, self.children, (self.group, self.pinned));
        EntityTag::of(self.epoch, &settled)
    }
}

/// One artifact.
#[derive(Serialize, ToSchema)]
pub(super) struct ArtifactResponse {
    artifact: ArtifactResource,
}

pub(super) fn find_artifact(view: &LedgerView, id: ArtifactId) -> Result<Artifact, Problem> {
    view.artifact(id).ok_or_else(|| Problem::not_found(format!("No artifact {id} is in the ledger.")))
}

/// One artifact.
#[utoipa::path(get, path = "/ownerserve/v1/artifacts/{id}", tag = "artifacts",
    params(("id" = ArtifactIdSchema, Path), ConsistencyQuery),
    responses((
        status = 200, description = "The artifact, with its owner, its replicas and what references it.",
        body = LedgerResponse<ArtifactResponse>, headers(("etag" = String, description = "Its fencing tag.")))))]
pub(super) async fn artifact(
    ReadView(view): ReadView,
    PathId(id): PathId<ArtifactId>,
) -> Result<LedgerResponse<ArtifactResponse>, Problem> {
    let artifact = ArtifactResource::new(&view, &find_artifact(&view, id)?);
    let tag = artifact.tag();
    Ok(LedgerResponse::new(&view, ArtifactResponse { artifact }).with_tag(tag))
}

/// Filter of artifacts; all conditions must hold.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ArtifactFilter {
    /// Of this tenant.
    tenant: Option<String>,
    /// Of this model's KV.
    model: Option<String>,
    /// Owned by this worker, live or not.
    #[param(value_type = Option<WorkerIdSchema>)]
    worker: Option<WorkerId>,
    /// In this group.
    #[param(value_type = Option<GroupIdSchema>)]
    group: Option<ArtifactGroupId>,
    /// Whether anybody has it now.
    #[param(inline)]
    state: Option<OwnershipState>,
    /// With a head of this session in it.
    #[param(value_type = Option<SessionIdSchema>)]
    session: Option<SessionId>,
}

impl ArtifactFilter {
    pub(super) fn matches(&self, view: &LedgerView, artifact: &Artifact) -> bool {
        self.tenant.as_deref().is_none_or(|tenant| &*artifact.origin.tenant.0 == tenant)
            && self.model.as_deref().is_none_or(|model| &*artifact.origin.model.0 == model)
            && self.worker.is_none_or(|worker| artifact.owner.is_some_and(|owner| owner.worker == worker))
            && self.group.is_none_or(|group| artifact.group == Some(group))
            && self.session.is_none_or(|session| artifact.sessions.contains(session))
            && self.state.is_none_or(|state| state == view.ownership_status(artifact).into())
    }
}

/// Artifacts, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct ArtifactPage {
    /// Number of all artifacts, whatever the filter.
    total: usize,
    artifacts: Vec<ArtifactResource>,
    #[serde(flatten)]
    listed: PageMeta,
}

/// Artifacts, by id.
#[utoipa::path(get, path = "/ownerserve/v1/artifacts", tag = "artifacts",
    params(ArtifactFilter, PageQuery, ConsistencyQuery),
    responses((
        status = 200, description = "A page of artifacts, and where the next one begins.",
        body = LedgerResponse<ArtifactPage>)))]
pub(super) async fn artifacts(
    ReadView(view): ReadView,
    QueryParams(filter): QueryParams<ArtifactFilter>,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<ArtifactPage>, Problem> {
    let page = page.page("artifacts", &filter, view.applied())?;
    let looking = view.clone();
    let list = move || {
        let line = |artifact: Artifact| {
            let accepted = filter.matches(&looking, &artifact);
            (artifact.id, accepted.then(|| ArtifactResource::new(&looking, &artifact)).into_iter().collect())
        };
        page.fill(looking.artifacts_after(page.after).map(line))
    };
    let (artifacts, listed) = run_blocking(list).await?;
    Ok(LedgerResponse::new(&view, ArtifactPage { total: view.artifact_count(), artifacts, listed }))
}
