//! What every request can reach: configuration, the workers and the way to them, keys, metrics, the dial.

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
use crate::decisions::{DecisionHistory, DecisionLogError, DecisionLogOptions, StaticPlanningInputs};
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
use crate::worker_pool::{WorkerEntry, WorkerPool};

/// Memory for bodies of operators' writes: a full one for each of their connections.
const OPERATOR_MEMORY: usize = 16 << 20;

/// The front door's shared state; one a process, or one a server in tests.
#[derive(Debug)]
pub struct AppState {
    /// As loaded at start.
    pub config: Config,
    /// The client to the workers.
    pub upstream: Upstream,
    /// API keys and tenants.
    pub keys: Arc<ApiKeys>,
    /// All metrics.
    pub metrics: Metrics,
    /// Mode and rollout, changeable at run time.
    pub routing: LiveRouting,
    /// The workers, for requests that no plan is made for.
    pub worker_pool: Arc<WorkerPool>,
    /// What the workers serve, for clients that ask.
    pub model_list: ModelListCache,
    /// Soft state, and what it is used for.
    pub caches: RouterCaches,
    /// Memory of the requests in work.
    pub memory_budget: Arc<MemoryBudget>,
    /// The same for operators, whom no tenant leaves without any.
    pub operator_memory: Arc<MemoryBudget>,
    /// Where work that takes long is done.
    pub offload_pool: OffloadPool,
    composition: Subsystems,
    /// What keeps tenants apart inside the engines.
    pub salts: Salts,
    /// Whether it does.
    pub(crate) salt_proofs: SaltProofs,
    /// The planner's policy, its account of whose KV lies where, and the bypass.
    pub policies: RoutingPolicies,
    /// Prefixes on their way between workers.
    pub replications: SingleFlight<ReplicationKey, Option<AttemptEvent>>,
    /// Why steps were served as they were, and whether prices foretell first tokens.
    pub decisions: Arc<DecisionHistory>,
}

/// Why no worker may be asked for something of a client's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotServing {
    NobodyAnswers,
    /// Of those that answer every one ignores cache salts, while tenants must be kept apart.
    SaltsIgnored,
}

/// Receipts kept in memory.
const RECEIPT_CAPACITY: usize = 10_000;

/// Why there is no gateway.
#[derive(Debug, thiserror::Error)]
pub enum AppStateError {
    /// The keys file was refused.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// Models, ledger or workers.
    #[error(transparent)]
    Rooms(#[from] SubsystemsError),
    /// Redis as it is configured.
    #[error(transparent)]
    SoftState(#[from] SharedCacheError),
    /// The folder of the decision log.
    #[error(transparent)]
    Decisions(#[from] DecisionLogError),
}

impl AppState {
    /// Reads the keys, opens the ledger and starts to watch the workers. Listens nowhere.
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

    /// Files that are followed, and where it is told that they could not be taken.
    pub(crate) fn watched_files(&self, what: &'static str) -> WatchedFiles {
        WatchedFiles { name: what, stale: self.composition.stale_files.clone() }
    }

    /// Those that changed and are not used.
    pub(crate) fn stale_files(&self) -> &StaleFiles {
        &self.composition.stale_files
    }

    /// Sessions, owners and leases: the view of the ledger, and the way to write to it.
    pub fn directory(&self) -> &Directory {
        &self.composition.directory
    }

    /// The workers as they look now.
    pub fn fleet(&self) -> &Fleet {
        &self.composition.fleet
    }

    /// Who holds what.
    pub fn index(&self) -> &SharedIndex {
        &self.composition.index
    }

    /// Steps that were served and that the ledger's view does not show yet. Hold it briefly, never across an await.
    pub fn pending_commits(&self) -> MutexGuard<'_, PendingCommits> {
        self.composition.pending_commits.lock()
    }

    /// What is wrong with the ledger. Steps are served all the same.
    pub fn ledger_problems(&self) -> Vec<LedgerFault> {
        self.composition.ledger_health.active_faults(self.directory()).collect()
    }

    /// The ledger has stopped for good.
    pub fn ledger_failed(&self, error: &OwnershipError) {
        self.composition.ledger_health.record_failure(error);
    }

    /// The models.
    pub fn catalog(&self) -> &Catalog {
        &self.composition.catalog
    }

    /// Workers that may not be asked for anything of a client's, because tenants would not be apart there.
    pub(crate) fn barred_workers(&self) -> Vec<WorkerId> {
        if self.keys.has_several_tenants() { self.salt_proofs.barred() } else { Vec::new() }
    }

    /// Whether some worker answers and may be asked for something of a client's.
    pub(crate) fn serving(&self) -> Result<(), NotServing> {
        let (answering, barred) = (self.worker_pool.answering(self.fleet()), self.barred_workers());
        match answering.iter().all(|worker| barred.contains(&worker.id)) {
            _ if answering.is_empty() => Err(NotServing::NobodyAnswers),
            true => Err(NotServing::SaltsIgnored),
            false => Ok(()),
        }
    }

    /// How a worker is reached, also one that is leaving.
    pub fn worker(&self, id: WorkerId) -> Option<Arc<WorkerEntry>> {
        self.worker_pool.member(id)
    }

    /// Who lists workers.
    pub(crate) fn discovery(&self) -> &Arc<WorkerDiscovery> {
        &self.composition.discovery
    }

    /// Writes out what the ledger has taken and closes it.
    pub async fn close(&self) {
        let decisions = self.decisions.clone();
        // It waits for the disk; a task that died has nothing left to write.
        drop(tokio::task::spawn_blocking(move || decisions.close()).await);
        self.composition.close().await;
    }

    /// This router, as the ledger knows it.
    pub fn node_id(&self) -> NodeId {
        self.directory().node()
    }

    /// Whether the ledger can be told anything, as far as this node knows.
    pub fn ledger_reach(&self) -> QuorumReachability {
        if self.directory().view().quorum().stale { QuorumReachability::NoQuorum } else { QuorumReachability::Quorum }
    }

    /// Hands advice to the ledger without waiting for anything; the ledger counts outcomes, and what it did not take.
    /// Without a quorum there is nobody to advise: it would only stand in the way of what must not be lost.
    pub fn submit_advice(&self, command: Command) {
        if self.ledger_reach() == QuorumReachability::Quorum {
            drop(self.directory().submit(command));
        }
    }

    /// Hands a command to the ledger now, so that commands stay in order. The future is its outcome; `None` when it was
    /// not taken or nothing is known of it.
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

    /// A client's headers as they go to this worker: end to end, and with the worker's key in place of the client's.
    ///
    /// A client's key for *us* never leaves: it goes to a worker only where we ask for none and the worker has none. A worker that
    /// registered itself gets none at all: whoever reaches the operator API could collect keys that way.
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

/// `Bearer KEY`, marked so that nothing prints it. A key that cannot stand in a header is left out.
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
