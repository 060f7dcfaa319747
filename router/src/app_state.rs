//! State that every request can reach: configuration, workers and the client to them, keys, metrics, routing mode.

use std::sync::Arc;
use std::time::Instant;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use ownership::ledger::{Command, Outcome};
use ownership::{Directory, OwnershipError};
use parking_lot::MutexGuard;
use vocabulary::{NodeId, WorkerId};
use workers_shim::events::SharedIndex;
use workers_shim::fleet::Fleet;

use crate::auth::{ApiKeys, KeysError, Secret};
use crate::caches::RouterCaches;
use crate::catalog::Catalog;
use crate::composition::{Subsystems, SubsystemsError};
use crate::config::Config;
use crate::decisions::{DecisionHistory, DecisionLogOptions, OpenDecisionLogError, StaticPlanningInputs};
use crate::discovery::WorkerDiscovery;
use crate::host_check::remove_credentials;
use crate::memory_budget::{MemoryBudget, MemoryLimits};
use crate::model_list::ModelListCache;
use crate::peer_exchange::ledger_health::LedgerFault;
use crate::peer_exchange::pending_commits::{PendingCommits, QuorumReachability};
use crate::peer_exchange::prompts;
use crate::pipeline::offload_pool::OffloadPool;
use crate::pipeline::plan::RoutingPolicies;
use crate::pipeline::receipt::{AttemptEvent, ReceiptBuffer};
use crate::pipeline::replicate::ReplicationKey;
use crate::pipeline::routing::LiveRouting;
use crate::pipeline::single_flight::SingleFlight;
use crate::retries::TenantShare;
use crate::salt_proof::SaltProofs;
use crate::salts::Salts;
use crate::shared_cache::{SharedCache, SharedCacheError};
use crate::telemetry::metrics::Metrics;
use crate::upstream::{Upstream, request_headers};
use crate::watched_files::{StaleFiles, WatchedFiles};
use crate::worker_pool::{ListedWorkers, WorkerEntry};

/// Memory for bodies of operators' writes: enough for a full one on each of their connections.
const OPERATOR_MEMORY: usize = 16 << 20;

/// Shared state of the router; one per process, or one per server in tests.
#[derive(Debug)]
pub struct AppState {
    /// The configuration, as loaded at start.
    pub config: Config,
    /// HTTP client for the workers.
    pub upstream: Upstream,
    /// API keys and tenants.
    pub keys: Arc<ApiKeys>,
    /// All metrics.
    pub metrics: Metrics,
    /// Mode and rollout, changeable at run time.
    pub routing: LiveRouting,
    /// The workers, for requests that are not planned.
    pub worker_pool: Arc<ListedWorkers>,
    /// Cached list of the models that the workers serve.
    pub model_list: ModelListCache,
    /// The shared cache and its users.
    pub caches: RouterCaches,
    /// Memory budget for requests in progress.
    pub memory_budget: Arc<MemoryBudget>,
    /// Separate memory budget for operators, which tenants cannot use up.
    pub operator_memory: Arc<MemoryBudget>,
    /// Runs long computations off the async threads.
    pub offload_pool: OffloadPool,
    composition: Subsystems,
    /// Cache salts that isolate tenants inside the engines.
    pub salts: Salts,
    /// Verdicts on whether engines honour the salts.
    pub(crate) salt_proofs: SaltProofs,
    /// The planner's and the bypass policy, with the occupancy model.
    pub policies: RoutingPolicies,
    /// Replications of prefixes in progress.
    pub replications: SingleFlight<ReplicationKey, Option<AttemptEvent>>,
    /// Receipts and prediction calibration.
    pub decisions: Arc<DecisionHistory>,
}

/// Why no worker may serve client requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotServing {
    NobodyAnswers,
    /// All workers that answer ignore cache salts, while tenants must be isolated.
    SaltsIgnored,
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
    Rooms(#[from] SubsystemsError),
    /// The configured Redis cannot be used.
    #[error(transparent)]
    SoftState(#[from] SharedCacheError),
    /// The directory of the decision log cannot be used.
    #[error(transparent)]
    Decisions(#[from] OpenDecisionLogError),
}

impl AppState {
    /// Reads the keys, opens the ledger and starts to watch the workers. Opens no listener.
    pub async fn open(config: Config) -> Result<Self, AppStateError> {
        let keys = Arc::new(ApiKeys::open(&config.auth)?);
        keys.warn_tenants_without_key(config.tenants.keys().map(String::as_str));
        let metrics = Metrics::default();
        SharedCache::check(&config.soft_state)?;
        let rooms = Subsystems::open(&config, &metrics).await?;
        let salts = match &config.auth.keys_file {
            Some(_) => Salts::per_tenant(config.auth.salt_secret.as_ref()),
            None => Salts::none(),
        };
        let is_shared = keys.required();
        let total = config.proxy.memory.0;
        let tenant = if is_shared { total / 2 } else { total };
        let memory = MemoryBudget::new(MemoryLimits { total, tenant }, &metrics.memory);
        let operators = MemoryLimits { total: OPERATOR_MEMORY, tenant: OPERATOR_MEMORY };
        let operator_memory = MemoryBudget::unshown(operators, &metrics.memory);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let aside = OffloadPool::new(2 * cores, if is_shared { cores } else { 2 * cores });
        let cluster = rooms.directory.cluster().to_string();
        let remembered = RouterCaches::start(&config, (&cluster, rooms.directory.supervision()), &metrics)?;
        let policies = RoutingPolicies::new(&config, if is_shared { TenantShare::Half } else { TenantShare::All });
        let log = DecisionLogOptions {
            folder: &config.ledger.data_dir.join("decisions"),
            policy: policies.planner_policy(),
            static_inputs: StaticPlanningInputs {
                attention: rooms.catalog.attention(),
                shapes: rooms.pool.shapes().to_vec(),
            },
            metrics: &metrics.decisions,
        };
        let decisions = Arc::new(DecisionHistory::open(ReceiptBuffer::new(RECEIPT_CAPACITY), config.decisions, log)?);
        prompts::serve_prompts(&rooms.directory, remembered.prompts.clone(), metrics.exchange.clone());
        Ok(Self {
            worker_pool: rooms.pool.clone(),
            composition: rooms,
            salts,
            salt_proofs: SaltProofs::default(),
            policies,
            replications: SingleFlight::default(),
            decisions,
            upstream: Upstream::new(config.upstream.clone()),
            keys,
            metrics,
            routing: LiveRouting::new(config.initial_routing()),
            caches: remembered,
            memory_budget: memory,
            operator_memory,
            offload_pool: aside,
            model_list: ModelListCache::default(),
            config,
        })
    }

    /// Returns a handle for watched files, through which a failed reload is reported.
    pub(crate) fn watched_files(&self, what: &'static str) -> WatchedFiles {
        WatchedFiles { name: what, stale: self.composition.stale_files.clone() }
    }

    /// Returns the watched files that changed and could not be reloaded.
    pub(crate) fn stale_files(&self) -> &StaleFiles {
        &self.composition.stale_files
    }

    /// Returns the ledger with sessions, owners and leases: its view, and the way to write to it.
    pub fn directory(&self) -> &Directory {
        &self.composition.directory
    }

    /// Returns the fleet of workers.
    pub fn fleet(&self) -> &Fleet {
        &self.composition.fleet
    }

    /// Returns the KV index: which worker holds which blocks.
    pub fn index(&self) -> &SharedIndex {
        &self.composition.index
    }

    /// Locks the steps that were served and that the ledger's view does not show yet. Hold it briefly, never across an
    /// await.
    pub fn pending_commits(&self) -> MutexGuard<'_, PendingCommits> {
        self.composition.pending_commits.lock()
    }

    /// Returns the faults of the ledger. Steps are served all the same.
    pub fn ledger_problems(&self) -> Vec<LedgerFault> {
        self.composition.ledger_health.active_faults(self.directory()).collect()
    }

    /// Records that the ledger has stopped for good.
    pub fn ledger_failed(&self, error: &OwnershipError) {
        self.composition.ledger_health.record_failure(error);
    }

    /// Returns the models.
    pub fn catalog(&self) -> &Catalog {
        &self.composition.catalog
    }

    /// Returns workers that must not get client requests, because tenants would not be isolated there.
    pub(crate) fn barred_workers(&self) -> Vec<WorkerId> {
        if self.keys.has_several_tenants() { self.salt_proofs.barred() } else { Vec::new() }
    }

    /// Whether some worker answers and may get client requests.
    pub(crate) fn serving(&self) -> Result<(), NotServing> {
        let (answering, barred) = (self.worker_pool.answering(self.fleet()), self.barred_workers());
        match answering.iter().all(|worker| barred.contains(&worker.id)) {
            _ if answering.is_empty() => Err(NotServing::NobodyAnswers),
            true => Err(NotServing::SaltsIgnored),
            false => Ok(()),
        }
    }

    /// Returns how a worker is reached, even if it is leaving.
    pub fn worker(&self, id: WorkerId) -> Option<Arc<WorkerEntry>> {
        self.worker_pool.member(id)
    }

    /// Returns the worker discovery.
    pub(crate) fn discovery(&self) -> &Arc<WorkerDiscovery> {
        &self.composition.discovery
    }

    /// Flushes the ledger and closes it.
    pub async fn close(&self) {
        let decisions = self.decisions.clone();
        // It waits for the disk; a task that panicked has nothing left to write.
        drop(tokio::task::spawn_blocking(move || decisions.close()).await);
        self.composition.close().await;
    }

    /// Returns this router's node id in the ledger.
    pub fn node_id(&self) -> NodeId {
        self.directory().node()
    }

    /// Whether the ledger accepts commits, as far as this node knows.
    pub fn ledger_reach(&self) -> QuorumReachability {
        if self.directory().view().quorum().stale { QuorumReachability::NoQuorum } else { QuorumReachability::Quorum }
    }

    /// Submits advice to the ledger without waiting; the ledger counts the outcomes. Without a quorum advice is
    /// useless, and would only delay commands that must not be lost.
    pub fn submit_advice(&self, command: Command) {
        if self.ledger_reach() == QuorumReachability::Quorum {
            drop(self.directory().submit(command));
        }
    }

    /// Submits a command at once, so that commands stay in order. The future returns its outcome; `None` when it was
    /// not accepted, or the outcome is unknown.
    pub fn commit(&self, command: Command) -> impl Future<Output = Option<Outcome>> + Send + 'static {
        let begun = Instant::now();
        let ticket = self.directory().submit(command);
        let seconds = self.metrics.ledger.commit_seconds.clone();
        async move {
            let outcome = ticket.ok()?.await.ok()?;
            seconds.observe(begun.elapsed().as_secs_f64());
            Some(outcome)
        }
    }

    /// Builds the headers for this worker from a client's: end-to-end only, with the worker's key instead of the
    /// client's.
    ///
    /// A client's key for *us* is never forwarded: its header goes to a worker only where neither we nor the worker
    /// need a key. A worker that registered itself never gets it: a caller of the operator API could collect keys that
    /// way.
    pub fn headers_for(&self, worker: &WorkerEntry, client: &HeaderMap) -> HeaderMap {
        let mut headers = request_headers(client);
        let key = bearer(worker.config.api_key.as_ref());
        if key.is_some() || self.keys.required() || !worker.source.is_configured() {
            remove_credentials(&mut headers);
        }
        if let Some(key) = key {
            headers.insert(AUTHORIZATION, key);
        }
        headers
    }
}

/// Returns `Bearer KEY`, marked as sensitive so that it is not printed; `None` for a key that is not valid in a header.
pub(crate) fn bearer(key: Option<&Secret>) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", key?.expose())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::AuthConfig;
    use crate::config::{LedgerConfig, WorkerConfig};
    use crate::discovery::WorkerSource;

    async fn sent_authorization(worker_key: Option<&str>, keys_file: Option<&str>) -> (Option<String>, bool) {
        sent_authorization_for(WorkerSource::Static, worker_key, keys_file).await
    }

    async fn sent_authorization_for(
        source: WorkerSource,
        worker_key: Option<&str>,
        keys_file: Option<&str>,
    ) -> (Option<String>, bool) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        std::fs::write(&path, keys_file.unwrap_or_default()).unwrap();
        let auth = AuthConfig { keys_file: keys_file.map(|_| path), ..AuthConfig::default() };
        let ledger = LedgerConfig { data_dir: folder.path().join("ledger"), ..LedgerConfig::default() };
        let gateway = AppState::open(Config { auth, ledger, ..Config::default() }).await.unwrap();
        let mut config = WorkerConfig::from_url("http://a:1".parse().unwrap());
        config.api_key = worker_key.map(Secret::from);
        let worker = WorkerEntry { id: WorkerId::of_endpoint(config.endpoint()), source, config };
        let client = HeaderMap::from_iter([
            (AUTHORIZATION, HeaderValue::from_static("Bearer client")),
            (http::HeaderName::from_static("x-api-key"), HeaderValue::from_static("client")),
        ]);
        let headers = gateway.headers_for(&worker, &client);
        (headers.get(AUTHORIZATION).map(|v| v.to_str().unwrap().to_owned()), headers.contains_key("x-api-key"))
    }

    #[tokio::test]
    async fn client_keys_reach_workers_only_when_the_router_checks_none() {
        let file = Some("[keys]\n\"client\" = \"a\"");
        assert_eq!(sent_authorization(None, None).await, (Some("Bearer client".into()), true));
        assert_eq!(sent_authorization(None, file).await, (None, false));
        assert_eq!(sent_authorization(Some("worker"), file).await, (Some("Bearer worker".into()), false));
        assert_eq!(sent_authorization(Some("worker"), None).await, (Some("Bearer worker".into()), false));
    }

    #[tokio::test]
    async fn client_keys_do_not_reach_self_registered_workers() {
        for source in [WorkerSource::Static, WorkerSource::File, WorkerSource::Dns, WorkerSource::Kubernetes] {
            assert_eq!(
                sent_authorization_for(source, None, None).await,
                (Some("Bearer client".into()), true),
                "{source:?}"
            );
        }
        assert_eq!(sent_authorization_for(WorkerSource::Api, None, None).await, (None, false));
    }
}
