//! Handles that the operator API gets from the router, in the groups that its handlers use.

use std::sync::Arc;

use workers_shim::events::SharedIndex;
use workers_shim::fleet::Fleet;

use proxy::calibration::PredictionDriftDetector;
use proxy::catalog::Catalog;
use proxy::decisions::DecisionHistory;
use proxy::discovery::WorkerDiscovery;
use proxy::guardrail::Guardrail;
use proxy::kv_reservation::OccupancyTracker;
use proxy::ledger_access::LedgerAccess;
use proxy::memory_budget::MemoryBudget;
use proxy::offload_pool::OffloadPool;
use proxy::outliers::SharedOutlierDetector;
use proxy::prefix_cache::PrefixCache;
use proxy::prefix_cache::tokenizer_drift::TokenizerDrift;
use proxy::prefix_mover::PrefixMover;
use proxy::prompts::RetainedPromptStore;
use proxy::routing::LiveRouting;
use proxy::shared_cache::SharedCache;
use proxy::telemetry::discovery_metrics::DiscoveryMetrics;
use proxy::telemetry::metrics::Metrics;
use proxy::telemetry::peer_exchange_metrics::ExchangeMetrics;
use proxy::tenant_isolation::TenantIsolation;
use proxy::transfer_check::TransferCheckState;
use proxy::watched_files::StaleFiles;
use proxy::worker_client::WorkerClient;

/// All handles of the operator API.
#[derive(Debug)]
pub struct OperatorParts {
    /// The ledger.
    pub ledger: LedgerAccess,
    /// The workers.
    pub fleet: FleetSources,
    /// Routing and its comparisons.
    pub routing: RoutingSources,
    /// Moves sessions between workers.
    pub sessions: SessionMover,
    /// The models.
    pub catalog: Arc<Catalog>,
    /// Which worker holds which blocks.
    pub index: SharedIndex,
    /// What conversations have left for their next step.
    pub prefix_cache: Arc<PrefixCache>,
    /// Cache shared with other routers.
    pub shared_cache: Arc<SharedCache>,
    /// Watched files that changed and could not be reloaded.
    pub stale_files: Arc<StaleFiles>,
    /// Memory for bodies of operators' writes, which tenants cannot use up.
    pub memory_budget: Arc<MemoryBudget>,
    /// Runs long computations off the async threads.
    pub offload_pool: Arc<OffloadPool>,
    /// All metrics.
    pub metrics: Arc<Metrics>,
}

/// The workers, and what is known about each.
#[derive(Clone, Debug)]
pub struct FleetSources {
    /// Client to the workers.
    pub workers: WorkerClient,
    /// The sources that list the workers.
    pub discovery: Arc<WorkerDiscovery>,
    /// Detector of workers whose requests fail.
    pub outliers: SharedOutlierDetector,
    /// API keys, and whether engines keep tenants apart.
    pub isolation: TenantIsolation,
    /// Compares token counts with those of the engines.
    pub tokenizer_drift: Arc<TokenizerDrift>,
    /// Detector of drift between predicted and measured time to first token.
    pub calibration: Arc<PredictionDriftDetector>,
}

/// The routing, and what came of it.
#[derive(Clone, Debug)]
pub struct RoutingSources {
    /// Mode and rollout, changeable at run time.
    pub live: Arc<LiveRouting>,
    /// Receipts.
    pub decisions: Arc<DecisionHistory>,
    /// Whether the planner's actions make sessions slower than the bypass.
    pub guardrail: Arc<Guardrail>,
    /// Whether transferred KV equals what was sent.
    pub transfer_checks: Arc<TransferCheckState>,
    /// The occupancy tracker, which includes the admission queue.
    pub occupancy: OccupancyTracker,
}

/// Moves sessions with their blocks between workers.
#[derive(Clone, Debug)]
pub struct SessionMover {
    /// The ledger, which records the moves.
    pub ledger: LedgerAccess,
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// The models.
    pub catalog: Arc<Catalog>,
    /// Retained prompts, with their token ids.
    pub prompts: Arc<RetainedPromptStore>,
    /// Moves prefixes between workers.
    pub prefixes: PrefixMover,
    /// Whether transferred KV equals what was sent.
    pub transfer_checks: Arc<TransferCheckState>,
    /// Counts prompts that were asked of other routers.
    pub exchange_metrics: ExchangeMetrics,
    /// Counts sessions that were moved away from draining workers.
    pub discovery_metrics: DiscoveryMetrics,
}
