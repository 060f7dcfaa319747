//! `/ownerserve/v1/cluster`: the nodes that replicate the ledger, and their shared state.

use std::sync::Arc;

use axum::extract::State;
use ownership::{LedgerView, MemberChange};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::blocking::run_blocking;
use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::exposure::ExposedListener;
use super::extractors::JsonBody;
use super::members::apply_change;
use super::problem::{Problem, ProblemKind};
use super::settings::OperatorSettings;
use super::sources::RoutingSources;
use super::writes::{EmptyBody, WriteResult};
use proxy::ledger_access::LedgerAccess;

/// Number of records in the ledger.
#[derive(Serialize, ToSchema)]
struct LedgerCounts {
    sessions: usize,
    artifacts: usize,
    workers: usize,
}

/// This node and its cluster.
#[derive(Serialize, ToSchema)]
#[schema(as = Cluster)]
pub(super) struct ClusterStatus {
    /// The cluster's id; a restore makes a new one.
    cluster_id: String,
    /// The node that answers.
    node_id: u64,
    /// Whether it was removed from the cluster and only has its last view.
    removed: bool,
    /// The cluster's feature level.
    feature_level: u32,
    /// How often the ledger was restored from a backup.
    restore_generation: u32,
    /// Records in the ledger.
    counts: LedgerCounts,
    /// Log entries that this node has received and not yet applied.
    apply_lag_entries: u64,
    /// Commands that wait to enter the log.
    commit_queue_depth: u64,
    /// Bytes of log on this node's disk.
    log_bytes: u64,
    /// Steps in this router's admission queue, which wait instead of evicting others' KV.
    admission_queue_depth: usize,
    /// Listeners of this router that strangers on the network can use or overhear.
    #[schema(inline)]
    exposed_listeners: Vec<ExposedListener>,
}

/// The cluster as this node sees it.
#[utoipa::path(get, path = "/ownerserve/v1/cluster", tag = "cluster", params(ConsistencyQuery),
    responses((
        status = 200, description = "The cluster, its feature level and its leader as this node sees them.",
        body = LedgerResponse<ClusterStatus>)))]
pub(super) async fn cluster(
    State(ledger): State<LedgerAccess>,
    State(routing): State<RoutingSources>,
    State(settings): State<Arc<OperatorSettings>>,
    ReadView(view): ReadView,
) -> LedgerResponse<ClusterStatus> {
    let directory = ledger.directory();
    let readings = directory.stats();
    let cluster = ClusterStatus {
        cluster_id: directory.cluster().to_string(),
        node_id: directory.node().0,
        removed: directory.is_removed(),
        feature_level: view.level(),
        restore_generation: view.generation(),
        counts: LedgerCounts {
            sessions: view.session_count(),
            artifacts: view.artifact_count(),
            workers: view.workers().count(),
        },
        apply_lag_entries: readings.apply_lag,
        commit_queue_depth: readings.queue_depth,
        log_bytes: readings.log_bytes,
        admission_queue_depth: routing.occupancy.queue_len(),
        exposed_listeners: settings.exposed_listeners.clone(),
    };
    LedgerResponse::new(&view, cluster)
}

/// The digest of a node's state.
#[derive(Serialize, ToSchema)]
#[schema(as = StateHash)]
pub(super) struct StateHashResponse {
    /// The cluster's id; states of different clusters have nothing in common.
    cluster_id: String,
    /// Digest of the whole state: equal on all nodes at the same revision.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    state_hash: String,
}

/// The digest of this node's state, for comparison with other nodes at the same revision.
#[utoipa::path(get, path = "/ownerserve/v1/cluster/state-hash", tag = "cluster", params(ConsistencyQuery),
    responses((status = 200, description = "The digest, and its revision.", body = LedgerResponse<StateHashResponse>)))]
pub(super) async fn state_hash(
    State(ledger): State<LedgerAccess>,
    ReadView(view): ReadView,
) -> Result<LedgerResponse<StateHashResponse>, Problem> {
    let looking: Arc<LedgerView> = view.clone();
    let hash = run_blocking(move || looking.state_hash()).await?;
    let cluster_id = ledger.directory().cluster().to_string();
    Ok(LedgerResponse::new(&view, StateHashResponse { cluster_id, state_hash: format!("{hash:032x}") }))
}

/// The feature level to reach.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FeatureLevelRequest {
    #[schema(minimum = 1)]
    feature_level: u32,
}

/// Raises the cluster's feature level. This cannot be undone: older releases cannot read the ledger any more.
#[utoipa::path(put, path = "/ownerserve/v1/cluster/feature-level", tag = "cluster", request_body = FeatureLevelRequest,
    responses((status = 200, description = "The cluster works at that level from now on.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn raise_feature_level(
    State(ledger): State<LedgerAccess>,
    JsonBody(body): JsonBody<FeatureLevelRequest>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    if body.feature_level == 0 {
        return Err(Problem::bad_body(
            "feature_level: accepted is 1 and more; GET /ownerserve/v1/cluster shows the present one",
        ));
    }
    let before = ledger.directory().view().level();
    let result = match body.feature_level <= before {
        true => format!("nothing was to do: the cluster is at feature level {before}"),
        false => format!("the cluster is at feature level {}", body.feature_level),
    };
    apply_change(&ledger, MemberChange::RaiseLevel(body.feature_level), &result).await
}

/// Writes a snapshot of this node's ledger to its disk now.
#[utoipa::path(post, path = "/ownerserve/v1/cluster/snapshot", tag = "cluster", request_body = EmptyBody,
    responses((status = 200, description = "The snapshot is on the disk of this node.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn snapshot(
    State(ledger): State<LedgerAccess>,
    JsonBody(EmptyBody {}): JsonBody<EmptyBody>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let written = ledger.directory().write_snapshot().await;
    written.map_err(|error| {
        tracing::error!(%error, "a snapshot that an operator asked for was not written");
        Problem::new(ProblemKind::NotReady, "The snapshot was not written; the log of this process says why.")
    })?;
    Ok(WriteResult::plain(&ledger, "a snapshot was written on this node"))
}
