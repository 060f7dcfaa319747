//! State that every request can reach: configuration, workers and the client to them, keys, metrics, routing mode;
//! and the parts and settings of the operator API.

use std::sync::Arc;

use ownership::OwnershipDirectory;
use proxy::auth::{ApiKeys, KeysError};
use proxy::caches::RouterCaches;
use proxy::catalog::Catalog;
use proxy::decisions::{DecisionHistory, DecisionLogParts, OpenDecisionLogError, StaticPlanningInputs};
use proxy::discovery::WorkerDiscovery;
use proxy::forward::{ForwardEndSinks, UnplannedForwarder};
use proxy::front_door::{FrontDoor, FrontDoorParts};
use proxy::host_check::{CallerAuthentication, HostRules};
use proxy::ledger_access::LedgerAccess;
use proxy::memory_budget::{MemoryBudget, MemoryLimits};
use proxy::offload_pool::OffloadPool;
use proxy::outliers::SharedOutlierDetector;
use proxy::peer_exchange::prompt_exchange;
use proxy::pipeline::plan::PlannerState;
use proxy::pipeline::{Pipeline, PipelineParts};
use proxy::prefix_mover::PrefixMover;
use proxy::prefix_replication::ReplicationParts;
use proxy::receipt::ReceiptBuffer;
use proxy::retries::TenantShare;
use proxy::routing::LiveRouting;
use proxy::salt_proof::SaltProver;
use proxy::salts::CacheSalts;
use proxy::server::BodyLimits;
use proxy::shared_cache::{RedisUrlError, SharedCache};
use proxy::telemetry::metrics::Metrics;
use proxy::tenant_isolation::TenantIsolation;
use proxy::transfer_checker::TransferChecker;
use proxy::upstream::Upstream;
use proxy::watched_files::{ReloadReporter, StaleFiles};
use proxy::worker_client::{CredentialPolicy, WorkerClient};
use proxy::worker_pool::WorkerPool;
use workers_shim::events::SharedIndex;
use workers_shim::fleet::Fleet;

use crate::composition::{Subsystems, SubsystemsError};
use crate::config::{Config, parts};
use crate::exposure::exposures;
use crate::operator::{FleetSources, OperatorParts, OperatorSettings, RoutingSources, SessionMover};

/// Memory for bodies of operators' writes: enough for a full one on each of their connections.
const OPERATOR_MEMORY: usize = 16 << 20;

/// Shared state of the router; one per process, or one per server in tests.
#[derive(Debug)]
pub struct AppState {
    /// The configuration, as loaded at start.
    pub config: Config,
    /// The ledger.
    pub ledger: LedgerAccess,
    /// Client to the workers.
    pub workers: WorkerClient,
    /// API keys, tenants, and what keeps tenants apart inside the engines.
    pub isolation: TenantIsolation,
    /// All metrics.
    pub metrics: Arc<Metrics>,
    /// Mode and rollout, changeable at run time.
    pub routing: Arc<LiveRouting>,
    /// The workers, for requests that are not planned.
    pub worker_pool: Arc<WorkerPool>,
    /// The shared cache and its users.
    pub caches: RouterCaches,
    /// Memory budget for requests in progress.
    pub memory_budget: Arc<MemoryBudget>,
    /// Separate memory budget for operators, which tenants cannot use up.
    pub operator_memory: Arc<MemoryBudget>,
    /// Runs long computations off the async threads.
    pub offload_pool: Arc<OffloadPool>,
    composition: Subsystems,
    /// The planner's policy, and the state that it keeps between steps.
    pub policies: PlannerState,
    /// Moves prefixes between workers.
    pub prefix_mover: PrefixMover,
    /// Serves generation requests.
    pub pipeline: Arc<Pipeline>,
    /// What serves the clients' listener.
    pub(crate) front_door: Arc<FrontDoor>,
    /// Receipts, prediction drift, the guardrail and transfer checks.
    pub decisions: Arc<DecisionHistory>,
}

/// Number of receipts kept in memory.
const RECEIPT_CAPACITY: usize = 10_000;

/// Why the state could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum AppStateError {
    /// The keys file was rejected.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// Models, ledger or workers could not be opened.
    #[error(transparent)]
    Subsystems(#[from] SubsystemsError),
    /// The configured Redis cannot be used.
    #[error(transparent)]
    SharedCache(#[from] RedisUrlError),
    /// The directory of the decision log cannot be used.
    #[error(transparent)]
    Decisions(#[from] OpenDecisionLogError),
}

impl AppState {
    /// Reads the keys, opens the ledger and starts to watch the workers. Opens no listener.
    pub async fn open(config: Config) -> Result<Self, AppStateError> {
        let keys = Arc::new(ApiKeys::open(&config.auth)?);
        keys.warn_tenants_without_key(config.tenants.keys().map(String::as_str));
        let metrics = Arc::new(Metrics::default());
        SharedCache::check(&config.shared_cache)?;
        let subsystems = Subsystems::open(&config, &metrics).await?;
        let salts = match &config.auth.keys_file {
            Some(_) => CacheSalts::per_tenant(config.auth.cache_salt_secret.as_ref()),
            None => CacheSalts::none(),
        };
        let is_shared = keys.required();
        let isolation = TenantIsolation::new(keys, salts);
        let total = config.proxy.request_memory_limit.0;
        let tenant = if is_shared { total / 2 } else { total };
        let memory = MemoryBudget::new(MemoryLimits { total, tenant }, &metrics.memory);
        let operators = MemoryLimits { total: OPERATOR_MEMORY, tenant: OPERATOR_MEMORY };
        let operator_memory = MemoryBudget::unshown(operators, &metrics.memory);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let aside = Arc::new(OffloadPool::new(2 * cores, if is_shared { cores } else { 2 * cores }));
        let credentials = if is_shared { CredentialPolicy::Remove } else { CredentialPolicy::PassOn };
        let workers = WorkerClient::new(
            (subsystems.fleet.clone(), subsystems.pool.clone()),
            Upstream::new(config.upstream.clone()),
            aside.clone(),
            credentials,
        );
        let cluster = subsystems.directory.cluster().to_string();
        let remembered = RouterCaches::start(
            parts::cache_settings(&config),
            (&cluster, subsystems.directory.supervision()),
            &metrics,
        )?;
        let outliers =
            SharedOutlierDetector::new(config.outliers, subsystems.fleet.clone(), metrics.decisions.outliers.clone());
        let share = if is_shared { TenantShare::Half } else { TenantShare::All };
        let policies = PlannerState::new(parts::routing_policy_settings(&config), share, outliers);
        let log = DecisionLogParts {
            folder: &config.ledger.data_dir.join("decisions"),
            policy: policies.planner_policy(),
            static_inputs: StaticPlanningInputs {
                attention: subsystems.catalog.attention(),
                shapes: subsystems.pool.shapes().to_vec(),
            },
            metrics: &metrics.decisions,
        };
        let decisions =
            Arc::new(DecisionHistory::open(ReceiptBuffer::new(RECEIPT_CAPACITY), config.decision_log, log)?);
        let stored_prompts = remembered.prompts.clone();
        let checker = TransferChecker::new(
            (decisions.transfer_checks.clone(), metrics.decisions.checks.clone()),
            workers.clone(),
            stored_prompts.clone(),
            config.transfer_check,
        );
        let prefix_mover = PrefixMover::new(workers.clone(), stored_prompts, checker.clone());
        let routing = Arc::new(LiveRouting::new(config.initial_routing()));
        let ledger = LedgerAccess::new(subsystems.directory.clone(), metrics.ledger.commit_seconds.clone());
        let pipeline = Arc::new(Pipeline::new(PipelineParts {
            ledger: ledger.clone(),
            workers: workers.clone(),
            isolation: isolation.clone(),
            policies: &policies,
            bypass: config.routing.fallback_policy,
            resume: config.resume,
            catalog: subsystems.catalog.clone(),
            index: subsystems.index.clone(),
            caches: &remembered,
            decisions: decisions.clone(),
            routing: routing.clone(),
            checker,
            mover: prefix_mover.clone(),
            offload_pool: aside.clone(),
            metrics: &metrics,
        }));
        let forward_ends = Arc::new(ForwardEndSinks::new(
            ledger.clone(),
            routing.clone(),
            (decisions.clone(), remembered.shared_cache.clone()),
            metrics.requests.implausible_usage.clone(),
        ));
        let forwarder = UnplannedForwarder {
            workers: workers.clone(),
            listed_workers: subsystems.pool.clone(),
            isolation: isolation.clone(),
            outliers: policies.outliers.clone(),
            offload_pool: aside.clone(),
            responses: remembered.responses.clone(),
            ends: forward_ends,
            metrics: metrics.clone(),
        };
        let front_door = Arc::new(FrontDoor::new(FrontDoorParts {
            pipeline: pipeline.clone(),
            forwarder,
            shared_cache: remembered.shared_cache.clone(),
            quotas: remembered.quotas.clone(),
            memory_budget: memory.clone(),
            body_limits: BodyLimits::from(&config.proxy),
            host_rules: parts::client_host_rules(&config),
        }));
        prompt_exchange::serve_prompts(&subsystems.directory, remembered.prompts.clone(), metrics.exchange.clone());
        Ok(Self {
            worker_pool: subsystems.pool.clone(),
            ledger,
            workers,
            isolation,
            composition: subsystems,
            policies,
            prefix_mover,
            pipeline,
            front_door,
            decisions,
            metrics,
            routing,
            caches: remembered,
            memory_budget: memory,
            operator_memory,
            offload_pool: aside,
            config,
        })
    }

    /// Returns the reporter of failed reloads for these files.
    pub(crate) fn watched_files(&self, what: &'static str) -> ReloadReporter {
        ReloadReporter { name: what, stale: self.composition.stale_files.clone() }
    }

    /// Returns the watched files that changed and could not be reloaded.
    pub(crate) fn stale_files(&self) -> &Arc<StaleFiles> {
        &self.composition.stale_files
    }

    /// Returns the ledger with sessions, owners and leases: its view, and the way to write to it.
    pub fn directory(&self) -> &OwnershipDirectory {
        self.ledger.directory()
    }

    /// Returns the fleet of workers.
    pub fn fleet(&self) -> &Arc<Fleet> {
        self.workers.fleet()
    }

    /// Returns the KV index: which worker holds which blocks.
    pub fn index(&self) -> &SharedIndex {
        &self.composition.index
    }

    /// Returns the models.
    pub fn catalog(&self) -> &Arc<Catalog> {
        &self.composition.catalog
    }

    /// Returns the worker discovery.
    pub(crate) fn discovery(&self) -> &Arc<WorkerDiscovery> {
        &self.composition.discovery
    }

    /// Returns the handles of prefix replication.
    pub fn replication_task(&self) -> Arc<ReplicationParts> {
        Arc::new(ReplicationParts {
            replicator: self.policies.prefix_replication.clone(),
            bandwidth: self.config.prefix_replication.bandwidth.0 as u64,
            planner: self.policies.planner_policy().clone(),
            occupancy: self.policies.occupancy().clone(),
            outliers: self.policies.outliers.clone(),
            routing: self.routing.clone(),
            ledger: self.ledger.clone(),
            fleet: self.fleet().clone(),
            listed_workers: self.worker_pool.clone(),
            catalog: self.composition.catalog.clone(),
            index: self.composition.index.clone(),
            transfer_checks: self.decisions.transfer_checks.clone(),
            mover: self.prefix_mover.clone(),
            metrics: self.metrics.plans.kv_movement.clone(),
        })
    }

    /// Returns the handles of salt probes.
    pub fn salt_prover(&self) -> SaltProver {
        SaltProver {
            workers: self.workers.clone(),
            isolation: self.isolation.clone(),
            proofs: self.metrics.requests.salt_support.clone(),
        }
    }

    /// Flushes the ledger and closes it.
    pub async fn close(&self) {
        let decisions = self.decisions.clone();
        // It waits for the disk; a task that panicked has nothing left to write.
        drop(tokio::task::spawn_blocking(move || decisions.close()).await);
        self.composition.close().await;
    }
}

/// Returns the settings of the operator API.
pub(crate) fn operator_settings(config: &Config) -> OperatorSettings {
    let callers = match &config.operator.tokens_file {
        Some(_) => CallerAuthentication::Authenticated,
        None => CallerAuthentication::Anonymous { setting: "operator.tokens_file" },
    };
    OperatorSettings {
        tokens_file: config.operator.tokens_file.clone(),
        audit_folder: config.ledger.data_dir.join("audit"),
        max_audit_log_size: config.operator.max_audit_log_size.0 as u64,
        drain_bandwidth: config.drain.bandwidth.0 as u64,
        transfer_check_sampling: config.transfer_check.sample_every,
        tenants: config.tenants.keys().cloned().collect(),
        exposed_listeners: exposures(config),
        host_rules: HostRules { config: config.server.clone(), callers, scheme: config.operator_scheme() },
    }
}

impl AppState {
    /// Returns the handles of the operator API.
    pub(crate) fn operator_parts(&self) -> OperatorParts {
        let (ledger, composition, decisions) = (&self.ledger, &self.composition, &self.decisions);
        OperatorParts {
            ledger: ledger.clone(),
            fleet: FleetSources {
                workers: self.workers.clone(),
                discovery: self.discovery().clone(),
                outliers: self.policies.outliers.clone(),
                isolation: self.isolation.clone(),
                tokenizer_drift: self.caches.prefix_cache.tokenizer_drift.clone(),
                calibration: decisions.calibration.clone(),
            },
            routing: RoutingSources {
                live: self.routing.clone(),
                decisions: decisions.clone(),
                guardrail: decisions.guardrail.clone(),
                transfer_checks: decisions.transfer_checks.clone(),
                occupancy: self.policies.occupancy().clone(),
            },
            sessions: SessionMover {
                ledger: ledger.clone(),
                fleet: composition.fleet.clone(),
                catalog: composition.catalog.clone(),
                prompts: self.caches.prompts.clone(),
                prefixes: self.prefix_mover.clone(),
                transfer_checks: decisions.transfer_checks.clone(),
                exchange_metrics: self.metrics.exchange.clone(),
                discovery_metrics: self.metrics.process.discovery.clone(),
            },
            catalog: composition.catalog.clone(),
            index: composition.index.clone(),
            prefix_cache: self.caches.prefix_cache.clone(),
            shared_cache: self.caches.shared_cache.clone(),
            stale_files: self.stale_files().clone(),
            memory_budget: self.operator_memory.clone(),
            offload_pool: self.offload_pool.clone(),
            metrics: self.metrics.clone(),
        }
    }
}
