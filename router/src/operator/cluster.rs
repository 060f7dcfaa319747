//! `/ownerserve/v1/cluster`: the nodes that replicate the ledger, and their shared state.

use std::sync::Arc;

use axum::extract::State;
use ownership::{LedgerView, MemberChange};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::extractors::JsonBody;
use super::members::apply_change;
use super::problem::{Problem, ProblemKind};
use super::writes::{EmptyBody, WriteResult};
use crate::app_state::AppState;
use crate::exposure::{ExposedListener, exposures};

/// What the ledger holds.
#[derive(Serialize, ToSchema)]
struct LedgerCounts {
    sessions: usize,
    artifacts: usize,
    workers: usize,
}

/// This node and its cluster.
#[derive(Serialize, ToSchema)]
pub(super) struct ClusterStatus {
    /// The cluster's id; a restore makes a new one.
    cluster: String,
    /// The node that answers.
    node: u64,
    /// Whether it was removed from the cluster, and only has its last view.
    removed: bool,
    /// The cluster's feature level.
    level: u32,
    /// How often the ledger was restored from a backup.
    generation: u32,
    holds: LedgerCounts,
    /// Log entries that this node has and has not yet applied.
    apply_lag: u64,
    /// Commands that wait to enter the log.
    queue: u64,
    /// Bytes of log on this node's disk.
    log_bytes: u64,
    /// Steps that wait at this router rather than push out others' KV.
    waiting: usize,
    /// Listeners of this router that strangers on the network can use or overhear.
    #[schema(inline)]
    exposed: Vec<ExposedListener>,
}

/// The cluster as this node sees it.
#[utoipa::path(get, path = "/ownerserve/v1/cluster", tag = "cluster", params(ConsistencyQuery),
    responses((
        status = 200, description = "The cluster, its level and its leader as this node sees them.",
        body = LedgerResponse<ClusterStatus>)))]
pub(super) async fn cluster(
    State(gateway): State<Arc<AppState>>,
    ReadView(view): ReadView,
) -> LedgerResponse<ClusterStatus> {
    let directory = gateway.directory();
    let readings = directory.stats();
    let cluster = ClusterStatus {
        cluster: directory.cluster().to_string(),
        node: directory.node().0,
        removed: directory.is_removed(),
        level: view.level(),
        generation: view.generation(),
        holds: LedgerCounts {
            sessions: view.session_count(),
            artifacts: view.artifact_count(),
            workers: view.workers().count(),
        },
        apply_lag: readings.apply_lag,
        queue: readings.queue_depth,
        log_bytes: readings.log_bytes,
        waiting: gateway.policies.occupancy().queue_len(),
        exposed: exposures(&gateway.config),
    };
    LedgerResponse::new(&view, cluster)
}

/// What the state is.
#[derive(Serialize, ToSchema)]
pub(super) struct StateHashResponse {
    /// The cluster's id; states of different ones have nothing in common.
    cluster: String,
    /// Digest of everything remembered: equal on all nodes at equal revision.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    hash: String,
}

/// The digest of this node's state at the answer's revision, to be compared with other nodes' at the same one.
#[utoipa::path(get, path = "/ownerserve/v1/cluster/hash", tag = "cluster", params(ConsistencyQuery),
    responses((status = 200, description = "The digest, and the revision that it is of.", body = LedgerResponse<StateHashResponse>)))]
pub(super) async fn hash(
    State(gateway): State<Arc<AppState>>,
    ReadView(view): ReadView,
) -> Result<LedgerResponse<StateHashResponse>, Problem> {
    let looking: Arc<LedgerView> = view.clone();
    let hash = super::run_blocking(move || looking.state_hash()).await?;
    let cluster = gateway.directory().cluster().to_string();
    Ok(LedgerResponse::new(&view, StateHashResponse { cluster, hash: format!("{hash:032x}") }))
}

/// The feature level to be reached.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LevelBody {
    #[schema(minimum = 1)]
    level: u32,
}

/// Raises the cluster's feature level. There is no way back: older releases cannot read it any more.
#[utoipa::path(put, path = "/ownerserve/v1/cluster/level", tag = "cluster", request_body = LevelBody,
    responses((status = 200, description = "The cluster works at that level from now on.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn raise_level(
    State(gateway): State<Arc<AppState>>,
    JsonBody(body): JsonBody<LevelBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    if body.level == 0 {
        return Err(Problem::bad_body(
            "level: accepted is 1 and more; GET /ownerserve/v1/cluster tells the present one",
        ));
    }
    let before = gateway.directory().view().level();
    let did = match body.level <= before {
        true => format!("nothing was to do: the cluster is at feature level {before}"),
        false => format!("the cluster is at feature level {}", body.level),
    };
    apply_change(&gateway, MemberChange::RaiseLevel(body.level), &did).await
}

/// Writes a snapshot of this node's ledger to its disk now.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/snapshot", tag = "cluster", request_body = EmptyBody,
    responses((status = 200, description = "The snapshot is on the disk of this node.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn snapshot(
    State(gateway): State<Arc<AppState>>,
    JsonBody(EmptyBody {}): JsonBody<EmptyBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let written = gateway.directory().write_snapshot().await;
    written.map_err(|error| {
        tracing::error!(%error, "a snapshot that an operator asked for was not written");
        Problem::new(ProblemKind::NotReady, "The snapshot was not written; the log of this process says why.")
    })?;
    Ok(WriteResult::plain(&gateway, "a snapshot was written on this node"))
}
