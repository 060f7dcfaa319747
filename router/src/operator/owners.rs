//! `/ownerserve/v1/owners`, `/replicas` and `/groups`: who has sealed prefixes, and what belongs together.

use ownership::View;
use ownership::ledger::{Artifact, Boundary, Replica};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{ArtifactId, Blocks, Bytes, Epoch, GroupId, ModelId, PrefixId, SessionId, TenantId, WorkerId};

use super::artifacts::{ArtifactFilter, ReplicaLine, StandingWord};
use super::fresh::{Fresh, FreshQuery, Seen};
use super::input::{Asked, Named};
use super::paging::{Listed, MOST, PageQuery};
use super::problem::Problem;
use super::words::{ArtifactWord, EpochWord, GroupWord, OwnerLine, PrefixWord, SessionWord, TenantWord, WorkerWord};

/// A sealed prefix and who has it.
#[derive(Serialize, ToSchema)]
pub(super) struct OwnedPrefix {
    #[schema(value_type = PrefixWord)]
    prefix: PrefixId,
    /// Blocks from the start.
    #[schema(value_type = u64)]
    blocks: Blocks,
    /// The grant that sealed it.
    #[schema(value_type = EpochWord)]
    sealed_at: Epoch,
    /// The artifact that keeps it.
    #[schema(value_type = ArtifactWord)]
    artifact: ArtifactId,
    #[schema(value_type = TenantWord)]
    tenant: TenantId,
    #[schema(value_type = String)]
    model: ModelId,
    standing: StandingWord,
    /// Who has it; where the owner is gone, who stands in.
    owner: Option<OwnerLine>,
    /// When the owner was granted.
    #[schema(value_type = EpochWord)]
    epoch: Epoch,
    /// Who has copies that reach this far.
    replicas: Vec<OwnerLine>,
    /// Sessions with a head in the artifact.
    #[schema(value_type = Vec<SessionWord>)]
    sessions: Vec<SessionId>,
    /// Of the whole artifact.
    #[schema(value_type = u64)]
    bytes: Bytes,
}

impl OwnedPrefix {
    fn new(view: &View, artifact: &Artifact, boundary: &Boundary) -> Self {
        let standing = view.standing(artifact);
        let reaching = artifact.replicas.iter().filter(|replica| replica.upto.blocks >= boundary.point.blocks);
        Self {
            prefix: boundary.point.id,
            blocks: boundary.point.blocks,
            sealed_at: boundary.epoch,
            artifact: artifact.id,
            tenant: artifact.origin.tenant.clone(),
            model: artifact.origin.model.clone(),
            standing: standing.into(),
            owner: standing.owner().map(|owner| OwnerLine::new(view, owner)),
            epoch: artifact.epoch,
            replicas: reaching.map(|replica| OwnerLine::new(view, replica.holder)).collect(),
            sessions: artifact.sessions.iter().take(usize::from(MOST)).collect(),
            bytes: artifact.bytes(),
        }
    }
}

/// Who has a prefix: one for each tenant and format that has it sealed as a boundary.
#[derive(Serialize, ToSchema)]
pub(super) struct Owners {
    owners: Vec<OwnedPrefix>,
}

/// Who has a prefix.
#[utoipa::path(get, path = "/ownerserve/v1/owners/{prefix}", tag = "artifacts",
    params(("prefix" = PrefixWord, Path), FreshQuery),
    responses((
        status = 200, description = "Everyone who has it sealed as a boundary, with copies.",
        body = Fresh<Owners>)))]
pub(super) async fn owners_of(Seen(view): Seen, Named(prefix): Named<PrefixId>) -> Result<Fresh<Owners>, Problem> {
    let looking = view.clone();
    // Nothing but an operator asks by prefix alone, so there is no index for it: every artifact is looked at.
    let owned = move |artifact: Artifact| {
        let boundary = artifact.boundaries.iter().find(|boundary| boundary.point.id == prefix)?;
        Some(OwnedPrefix::new(&looking, &artifact, boundary))
    };
    let searched = view.clone();
    let list = move || searched.artifacts().filter_map(owned).take(usize::from(MOST)).collect::<Vec<_>>();
    let owners = super::apart(list).await?;
    if owners.is_empty() {
        let detail = "No artifact keeps that prefix as a boundary. It was never sealed, was merged into a longer extent, or is gone.";
        return Err(Problem::not_found(detail));
    }
    Ok(Fresh::new(&view, Owners { owners }))
}

/// Who has the end of each artifact.
#[derive(Serialize, ToSchema)]
pub(super) struct OwnersList {
    owners: Vec<OwnedPrefix>,
    #[serde(flatten)]
    listed: Listed,
}

/// Owners of sealed prefixes, by artifact.
#[utoipa::path(get, path = "/ownerserve/v1/owners", tag = "artifacts", params(ArtifactFilter, PageQuery, FreshQuery),
    responses((
        status = 200, description = "A page of owners, and where the next one begins.",
        body = Fresh<OwnersList>)))]
pub(super) async fn owners(
    Seen(view): Seen,
    Asked(filter): Asked<ArtifactFilter>,
    Asked(page): Asked<PageQuery>,
) -> Result<Fresh<OwnersList>, Problem> {
    let page = page.page("owners", &filter, view.applied())?;
    let looking = view.clone();
    let list = move || {
        let line = |artifact: Artifact| {
            let end = artifact.boundaries.last().filter(|_| filter.accepts(&looking, &artifact));
            (artifact.id, end.map(|end| OwnedPrefix::new(&looking, &artifact, end)).into_iter().collect())
        };
        page.fill(looking.artifacts_after(page.after).map(line))
    };
    let (owners, listed) = super::apart(list).await?;
    Ok(Fresh::new(&view, OwnersList { owners, listed }))
}

/// Which copies are asked for.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ReplicaFilter {
    /// At this worker.
    #[param(value_type = Option<WorkerWord>)]
    worker: Option<WorkerId>,
    /// Of this artifact.
    #[param(value_type = Option<ArtifactWord>)]
    artifact: Option<ArtifactId>,
}

/// Read-only copies, by artifact.
#[derive(Serialize, ToSchema)]
pub(super) struct Replicas {
    replicas: Vec<ReplicaLine>,
    #[serde(flatten)]
    listed: Listed,
}

/// Read-only copies, by artifact. Those of one artifact stay on one page.
#[utoipa::path(get, path = "/ownerserve/v1/replicas", tag = "artifacts", params(ReplicaFilter, PageQuery, FreshQuery),
    responses((
        status = 200, description = "A page of copies, and where the next one begins.",
        body = Fresh<Replicas>)))]
pub(super) async fn replicas(
    Seen(view): Seen,
    Asked(filter): Asked<ReplicaFilter>,
    Asked(page): Asked<PageQuery>,
) -> Result<Fresh<Replicas>, Problem> {
    let page = page.page("replicas", &filter, view.applied())?;
    let looking = view.clone();
    let list = move || {
        let lines = |artifact: Artifact| {
            let wanted = |copy: &&Replica| filter.worker.is_none_or(|worker| copy.holder.worker == worker);
            let copies = artifact.replicas.iter().filter(wanted);
            (artifact.id, copies.map(|copy| ReplicaLine::new(&looking, &artifact, copy)).collect())
        };
        match filter.artifact {
            Some(id) => page.fill(looking.artifact(id).into_iter().map(lines)),
            None => page.fill(looking.artifacts_after(page.after).map(lines)),
        }
    };
    let (replicas, listed) = super::apart(list).await?;
    Ok(Fresh::new(&view, Replicas { replicas, listed }))
}

/// A group of artifacts: a repository, a document.
#[derive(Serialize, ToSchema)]
struct GroupLine {
    #[schema(value_type = GroupWord)]
    id: GroupId,
    /// How many artifacts are in it.
    artifacts: usize,
    /// Of all of them.
    #[schema(value_type = u64)]
    bytes: Bytes,
}

/// Groups, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct Groups {
    groups: Vec<GroupLine>,
    #[serde(flatten)]
    listed: Listed,
}

/// Groups, by id. `artifacts?group=` lists what is in one.
#[utoipa::path(get, path = "/ownerserve/v1/groups", tag = "artifacts", params(PageQuery, FreshQuery),
    responses((status = 200, description = "A page of groups, and where the next one begins.", body = Fresh<Groups>)))]
pub(super) async fn groups(Seen(view): Seen, Asked(page): Asked<PageQuery>) -> Result<Fresh<Groups>, Problem> {
    let page = page.page("groups", &(), view.applied())?;
    let looking = view.clone();
    let list = move || {
        let line = |id: GroupId| {
            let (artifacts, bytes) = looking
                .group(id)
                .fold((0, Bytes::ZERO), |(count, bytes), artifact| (count + 1, bytes + artifact.bytes()));
            (id, vec![GroupLine { id, artifacts, bytes }])
        };
        page.fill(looking.groups_after(page.after).map(line))
    };
    let (groups, listed) = super::apart(list).await?;
    Ok(Fresh::new(&view, Groups { groups, listed }))
}
