//! `/ownerserve/v1/owners`, `/replicas` and `/groups`: owners of sealed prefixes, replicas, and groups of artifacts.

use ownership::LedgerView;
use ownership::ledger::{Artifact, PrefixBoundary, Replica};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{ArtifactGroupId, ArtifactId, Blocks, Bytes, Epoch, ModelId, PrefixId, SessionId, TenantId, WorkerId};

use super::artifacts::{ArtifactFilter, OwnershipState, ReplicaResource};
use super::blocking::run_blocking;
use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::extractors::{PathId, QueryParams};
use super::paging::{MAX_LIMIT, PageMeta, PageQuery};
use super::problem::Problem;
use super::schemas::{
    ArtifactIdSchema, EpochSchema, GroupIdSchema, OwnerResource, PrefixIdSchema, SessionIdSchema, TenantIdSchema,
    WorkerIdSchema,
};

/// A sealed prefix and who has it.
#[derive(Serialize, ToSchema)]
pub(super) struct OwnedPrefix {
    #[schema(value_type = PrefixIdSchema)]
    prefix: PrefixId,
    /// Blocks from the start.
    #[schema(value_type = u64)]
    blocks: Blocks,
    /// The grant that sealed it.
    #[schema(value_type = EpochSchema)]
    seal_epoch: Epoch,
    /// The artifact that ends with it or contains it.
    #[schema(value_type = ArtifactIdSchema)]
    artifact: ArtifactId,
    #[schema(value_type = TenantIdSchema)]
    tenant: TenantId,
    #[schema(value_type = String)]
    model: ModelId,
    state: OwnershipState,
    /// Who has it; where the owner is gone, the replica or the store that has it.
    owner: Option<OwnerResource>,
    /// Epoch of the grant to the owner.
    #[schema(value_type = EpochSchema)]
    epoch: Epoch,
    /// Replicas that cover the prefix.
    replicas: Vec<OwnerResource>,
    /// Sessions with a head in the artifact.
    #[schema(value_type = Vec<SessionIdSchema>)]
    sessions: Vec<SessionId>,
    /// Bytes of the whole artifact.
    #[schema(value_type = u64)]
    bytes: Bytes,
}

impl OwnedPrefix {
    fn new(view: &LedgerView, artifact: &Artifact, boundary: &PrefixBoundary) -> Self {
        let status = view.ownership_status(artifact);
        let reaching = artifact.replicas.iter().filter(|replica| replica.upto.blocks >= boundary.point.blocks);
        Self {
            prefix: boundary.point.id,
            blocks: boundary.point.blocks,
            seal_epoch: boundary.epoch,
            artifact: artifact.id,
            tenant: artifact.origin.tenant.clone(),
            model: artifact.origin.model.clone(),
            state: status.into(),
            owner: status.owner().map(|owner| OwnerResource::new(view, owner)),
            epoch: artifact.epoch,
            replicas: reaching.map(|replica| OwnerResource::new(view, replica.holder)).collect(),
            sessions: artifact.sessions.iter().take(usize::from(MAX_LIMIT)).collect(),
            bytes: artifact.bytes(),
        }
    }
}

/// Owners of a prefix: one for each tenant and KV format in which it is sealed.
#[derive(Serialize, ToSchema)]
pub(super) struct PrefixOwners {
    owners: Vec<OwnedPrefix>,
}

/// Owners of a prefix.
#[utoipa::path(get, path = "/ownerserve/v1/owners/{prefix}", tag = "artifacts",
    params(("prefix" = PrefixIdSchema, Path), ConsistencyQuery),
    responses((
        status = 200, description = "Everyone who has the prefix sealed, with replicas.",
        body = LedgerResponse<PrefixOwners>)))]
pub(super) async fn owners_of(
    ReadView(view): ReadView,
    PathId(prefix): PathId<PrefixId>,
) -> Result<LedgerResponse<PrefixOwners>, Problem> {
    let looking = view.clone();
    // There is no index by prefix alone, because only operators need it: all artifacts are scanned.
    let owned = move |artifact: Artifact| {
        let boundary = artifact.boundaries.iter().find(|boundary| boundary.point.id == prefix)?;
        Some(OwnedPrefix::new(&looking, &artifact, boundary))
    };
    let searched = view.clone();
    let list = move || searched.artifacts().filter_map(owned).take(usize::from(MAX_LIMIT)).collect::<Vec<_>>();
    let owners = run_blocking(list).await?;
    if owners.is_empty() {
        let detail = "No artifact keeps that prefix as a boundary. It was never sealed, was merged into a longer extent, or is gone.";
        return Err(Problem::not_found(detail));
    }
    Ok(LedgerResponse::new(&view, PrefixOwners { owners }))
}

/// Owners of the end of each artifact.
#[derive(Serialize, ToSchema)]
pub(super) struct OwnedPrefixPage {
    owners: Vec<OwnedPrefix>,
    #[serde(flatten)]
    listed: PageMeta,
}

/// Owners of sealed prefixes, by artifact.
#[utoipa::path(get, path = "/ownerserve/v1/owners", tag = "artifacts", params(ArtifactFilter, PageQuery, ConsistencyQuery),
    responses((
        status = 200, description = "A page of owners, and where the next one begins.",
        body = LedgerResponse<OwnedPrefixPage>)))]
pub(super) async fn owners(
    ReadView(view): ReadView,
    QueryParams(filter): QueryParams<ArtifactFilter>,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<OwnedPrefixPage>, Problem> {
    let page = page.page("owners", &filter, view.applied())?;
    let looking = view.clone();
    let list = move || {
        let line = |artifact: Artifact| {
            let end = artifact.boundaries.last().filter(|_| filter.matches(&looking, &artifact));
            (artifact.id, end.map(|end| OwnedPrefix::new(&looking, &artifact, end)).into_iter().collect())
        };
        page.fill(looking.artifacts_after(page.after).map(line))
    };
    let (owners, listed) = run_blocking(list).await?;
    Ok(LedgerResponse::new(&view, OwnedPrefixPage { owners, listed }))
}

/// Filter of replicas.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ReplicaFilter {
    /// At this worker.
    #[param(value_type = Option<WorkerIdSchema>)]
    worker: Option<WorkerId>,
    /// Of this artifact.
    #[param(value_type = Option<ArtifactIdSchema>)]
    artifact: Option<ArtifactId>,
}

/// Read-only replicas, by artifact.
#[derive(Serialize, ToSchema)]
pub(super) struct ArtifactReplicaPage {
    replicas: Vec<ReplicaResource>,
    #[serde(flatten)]
    listed: PageMeta,
}

/// Read-only replicas, by artifact. Those of one artifact stay on one page.
#[utoipa::path(get, path = "/ownerserve/v1/replicas", tag = "artifacts", params(ReplicaFilter, PageQuery, ConsistencyQuery),
    responses((
        status = 200, description = "A page of replicas, and where the next one begins.",
        body = LedgerResponse<ArtifactReplicaPage>)))]
pub(super) async fn replicas(
    ReadView(view): ReadView,
    QueryParams(filter): QueryParams<ReplicaFilter>,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<ArtifactReplicaPage>, Problem> {
    let page = page.page("replicas", &filter, view.applied())?;
    let looking = view.clone();
    let list = move || {
        let lines = |artifact: Artifact| {
            let is_selected = |replica: &&Replica| filter.worker.is_none_or(|worker| replica.holder.worker == worker);
            let copies = artifact.replicas.iter().filter(is_selected);
            (artifact.id, copies.map(|copy| ReplicaResource::new(&looking, &artifact, copy)).collect())
        };
        match filter.artifact {
            Some(id) => page.fill(looking.artifact(id).into_iter().map(lines)),
            None => page.fill(looking.artifacts_after(page.after).map(lines)),
        }
    };
    let (replicas, listed) = run_blocking(list).await?;
    Ok(LedgerResponse::new(&view, ArtifactReplicaPage { replicas, listed }))
}

/// A group of artifacts: a repository, a document.
#[derive(Serialize, ToSchema)]
struct ArtifactGroupResource {
    #[schema(value_type = GroupIdSchema)]
    id: ArtifactGroupId,
    /// Number of artifacts in it.
    artifacts: usize,
    /// Bytes of all of them.
    #[schema(value_type = u64)]
    bytes: Bytes,
}

/// Groups, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct ArtifactGroupPage {
    groups: Vec<ArtifactGroupResource>,
    #[serde(flatten)]
    listed: PageMeta,
}

/// Groups, by id. `artifacts?group=` lists what is in one.
#[utoipa::path(get, path = "/ownerserve/v1/groups", tag = "artifacts", params(PageQuery, ConsistencyQuery),
    responses((status = 200, description = "A page of groups, and where the next one begins.", body = LedgerResponse<ArtifactGroupPage>)))]
pub(super) async fn groups(
    ReadView(view): ReadView,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<ArtifactGroupPage>, Problem> {
    let page = page.page("groups", &(), view.applied())?;
    let looking = view.clone();
    let list = move || {
        let line = |id: ArtifactGroupId| {
            let (artifacts, bytes) = looking
                .group(id)
                .fold((0, Bytes::ZERO), |(count, bytes), artifact| (count + 1, bytes + artifact.bytes()));
            (id, vec![ArtifactGroupResource { id, artifacts, bytes }])
        };
        page.fill(looking.groups_after(page.after).map(line))
    };
    let (groups, listed) = run_blocking(list).await?;
    Ok(LedgerResponse::new(&view, ArtifactGroupPage { groups, listed }))
}
