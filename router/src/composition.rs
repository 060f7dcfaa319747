//! Composition: opens and connects the subsystems, which are the ledger's directory, the fleet with its KV index, and
//! the models.
//!
//! They do not know each other. Whatever one tells another passes through here: for example, probe results become
//! leases.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use ownership::ledger::{Command, Outcome, RegisterWorker, WorkerKind, WorkerSpec as LedgerSpec};
use ownership::{LedgerNodeError, Options, OwnershipDirectory, RequestedLedgerLimits};
use residency::{BlockMappingRules, RoutedBlockLimits};
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio::task::JoinHandle;
use vocabulary::{Micros, ModelId};
use workers_shim::events::SharedIndex;
use workers_shim::fleet::{
    BlockMappingResolver, Fleet, FleetError, FleetOptions, LivenessReport, ProbeSettings, TaskSupervisor,
};

use crate::config::Config;
use proxy::catalog::{Catalog, CatalogError};
use proxy::discovery::{WorkerDiscovery, WorkerFileError, WorkerFileWatcher, WorkerSource, dns, kubernetes};
use proxy::drains;
use proxy::peer_exchange::{PeerExchange, RouterPeers, SnapshotClient};
use proxy::server::descriptors;
use proxy::telemetry::metrics::Metrics;
use proxy::watched_files::{ReloadReporter, StaleFiles};
use proxy::worker_pool::WorkerPool;

/// Limit of queued probe reports.
const MAX_QUEUED_REPORTS: usize = 1024;

/// Why the subsystems could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SubsystemsError {
    /// A model's files are invalid.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The ledger cannot be opened.
    #[error("the ledger in {folder} cannot be opened: {source}")]
    Ledger {
        /// Its data directory.
        folder: PathBuf,
        /// Why.
        source: LedgerNodeError,
    },
    /// The workers are invalid.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// The worker file is invalid.
    #[error(transparent)]
    WorkerFile(#[from] WorkerFileError),
}

/// The subsystems that a request reads and writes.
#[derive(Debug)]
pub struct Subsystems {
    /// The ledger's view, and the way to write to it.
    pub directory: Arc<OwnershipDirectory>,
    /// Current state of the workers.
    pub fleet: Arc<Fleet>,
    /// How the workers are reached.
    pub pool: Arc<WorkerPool>,
    /// The sources that list the workers.
    pub discovery: Arc<WorkerDiscovery>,
    /// Which worker holds which blocks.
    pub index: SharedIndex,
    /// The models.
    pub catalog: Arc<Catalog>,
    /// Watched files that changed and could not be reloaded.
    pub(crate) stale_files: Arc<StaleFiles>,
    tasks: Vec<JoinHandle<()>>,
}

impl Subsystems {
    /// Opens the ledger and starts to watch the workers.
    pub async fn open(config: &Config, metrics: &Metrics) -> Result<Self, SubsystemsError> {
        let catalog = Arc::new(Catalog::load(&config.models)?);
        let file = config.discovery.workers_file.as_deref().map(WorkerFileWatcher::open).transpose()?;
        let directory = Arc::new(open_directory(config).await?);
        let index = SharedIndex::new();
        let router_peers: Arc<dyn RouterPeers> = Arc::new(directory.peers().clone());
        let (liveness, liveness_reports) = mpsc::channel(MAX_QUEUED_REPORTS);
        let supervision = directory.supervision();
        let fleet_supervision = supervision.clone();
        let task_supervisor: TaskSupervisor = Arc::new(move |name, begin| fleet_supervision.kept(name, begin).boxed());
        let options = FleetOptions {
            workers: Vec::new(),
            pace: ProbeSettings::default(),
            index: index.clone(),
            rules: event_rules(catalog.clone()),
            liveness: Some(liveness),
            routed_limits: RoutedBlockLimits::default(),
            snapshots: Some(Arc::new(SnapshotClient::new(router_peers.clone(), metrics.exchange.clone()))),
            extra_ranks: descriptors::extra_event_ranks(descriptors::limit()),
        };
        let fleet = Arc::new(Fleet::start_supervised(options, task_supervisor)?);
        let (pool, stale_files) = (Arc::new(WorkerPool::default()), Arc::new(StaleFiles::default()));
        let discovery_options = (&config.discovery, metrics.process.discovery.clone());
        let discovery =
            Arc::new(WorkerDiscovery::new((fleet.clone(), pool.clone()), directory.clone(), discovery_options));
        discovery.update_list((WorkerSource::Static, 0), config.workers.clone());
        let exchange = PeerExchange::new(fleet.clone(), router_peers, metrics.exchange.clone());
        exchange.serve(&directory);
        let leases = (directory.clone(), pool.clone(), Arc::new(AsyncMutex::new(liveness_reports)));
        let drains = (directory.clone(), Arc::downgrade(&fleet));
        let mut tasks = vec![
            supervision.supervise("leases", move || {
                let (directory, pool, reports) = leases.clone();
                async move { register_or_report_alive(directory, pool, &mut *reports.lock().await).await }
            }),
            supervision.supervise("drains", move || drains::follow(drains.0.clone(), drains.1.clone())),
            supervision.supervise("exchange", move || exchange.clone().run()),
        ];
        if let Some((file, workers)) = file {
            discovery.update_list((WorkerSource::File, 0), workers);
            let watched = ReloadReporter { name: "workers", stale: stale_files.clone() };
            let discovery = discovery.clone();
            let follow = move || file.clone().follow(discovery.clone(), watched.clone());
            tasks.push(supervision.supervise("workers_file", follow));
        }
        discovery.reconcile()?;
        let (reconciled, expired) = (discovery.clone(), discovery.clone());
        tasks.push(supervision.supervise_forever("discovery", move || reconciled.clone().run()));
        tasks
            .push(supervision.supervise_forever("registrations", move || expired.clone().drop_expired_registrations()));
        for name in config.discovery.dns.iter().cloned().enumerate() {
            let discovery = discovery.clone();
            tasks.push(supervision.supervise_forever("dns", move || dns::follow(discovery.clone(), name.clone())));
        }
        for service in config.discovery.kubernetes.iter().cloned().enumerate() {
            let discovery = discovery.clone();
            let follow = move || kubernetes::follow(discovery.clone(), service.clone());
            tasks.push(supervision.supervise("kubernetes", follow));
        }
        Ok(Self { directory, fleet, pool, discovery, index, catalog, stale_files, tasks })
    }

    /// Flushes the ledger and closes it.
    pub async fn close(&self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        if let Err(error) = self.directory.close().await {
            tracing::error!(%error, "the ledger did not close cleanly; its log is replayed at the next start");
        }
    }
}

async fn open_directory(config: &Config) -> Result<OwnershipDirectory, SubsystemsError> {
    let folder = config.ledger.data_dir.clone();
    let options = Options {
        lease: config.ledger.lease_duration.0,
        desired_limits: RequestedLedgerLimits {
            artifacts: config.ledger.max_artifacts,
            sessions: config.ledger.max_sessions,
        },
        peering: config.cluster.peering(),
        max_level: config.cluster.max_feature_level,
        ..Options::new(folder.clone())
    };
    OwnershipDirectory::open(options).await.map_err(|source| SubsystemsError::Ledger { folder, source })
}

/// Returns the rules that turn a worker's events into chain blocks, for models with a tokenizer.
fn event_rules(catalog: Arc<Catalog>) -> BlockMappingResolver {
    Arc::new(move |name| {
        let model = catalog.configured_model(name).filter(|model| model.identifier.text().is_some());
        if model.is_none() {
            tracing::warn!(model = %name, "no tokenizer is configured (models.NAME.tokenizer_dir): prompts are known by their bytes");
        }
        let model = model?;
        let identifier = &model.identifier;
        Some(BlockMappingRules::new(identifier.block(), identifier.seed(), identifier.namespace().clone()))
    })
}

/// Registers each incarnation of a worker when it is first reached, and reports it alive, which renews its lease, while
/// it is reachable.
async fn register_or_report_alive(
    directory: Arc<OwnershipDirectory>,
    pool: Arc<WorkerPool>,
    reports: &mut mpsc::Receiver<LivenessReport>,
) {
    while let Some(report) = reports.recv().await {
        let view = directory.view();
        let is_registered = view.worker(report.worker).is_some_and(|worker| {
            worker.incarnation == report.incarnation && worker.is_live() && worker.spec.ranks == report.ranks
        });
        if is_registered {
            directory.report_alive(report.worker, report.incarnation);
        } else if let Some(command) = registration_command(&pool, report, directory.lease_duration()) {
            register(&directory, report, command).await;
        }
    }
}

async fn register(directory: &OwnershipDirectory, report: LivenessReport, command: Command) {
    let Ok(ticket) = directory.submit(command) else { return };
    match ticket.await {
        Ok(Outcome::Refused(refusal)) => {
            tracing::warn!(worker = %report.worker, %refusal, "a worker was not registered")
        }
        Ok(_) => tracing::info!(worker = %report.worker, incarnation = report.incarnation.0, "a worker is registered"),
        Err(error) => tracing::warn!(worker = %report.worker, %error, "a worker could not be registered"),
    }
}

fn registration_command(pool: &WorkerPool, report: LivenessReport, lease: Duration) -> Option<Command> {
    let member = pool.member(report.worker)?;
    let config = &member.config;
    Some(Command::RegisterWorker(RegisterWorker {
        worker: report.worker,
        incarnation: report.incarnation,
        spec: LedgerSpec {
            endpoint: config.endpoint().clone(),
            role: config.role(),
            kind: WorkerKind::Engine,
            models: config.models.iter().map(|name| ModelId::from(name.as_str())).collect(),
            ranks: report.ranks,
        },
        ttl: Micros::of(lease),
    }))
}

#[cfg(test)]
mod tests {
    use ownership::ledger::{DrainFlag, DrainWorker};
    use vocabulary::{WorkerHealth, WorkerId};

    use super::*;
    use crate::testing::{StubWorker, wait_until};
    use proxy::discovery::WorkerConfig;
    use proxy::discovery::worker_definition;

    #[tokio::test]
    async fn drain_recorded_by_a_peer_applies_without_another_probe() {
        let (worker, data) = (StubWorker::start("one", "tiny").await, tempfile::tempdir().unwrap());
        let directory = Arc::new(OwnershipDirectory::open(Options::new(data.path())).await.unwrap());
        let config = WorkerConfig::from_url(worker.url().parse().unwrap());
        let id = WorkerId::of_endpoint(config.endpoint());
        let (liveness, mut reports) = mpsc::channel(MAX_QUEUED_REPORTS);
        // Probed when it starts, but not again during this test.
        let pace = ProbeSettings { every: Duration::from_secs(3600), ..ProbeSettings::default() };
        let fleet = Fleet::start(FleetOptions {
            workers: vec![worker_definition(&config)],
            pace,
            index: SharedIndex::new(),
            rules: Arc::new(|_| None),
            liveness: Some(liveness),
            routed_limits: RoutedBlockLimits::default(),
            snapshots: None,
            extra_ranks: 16,
        });
        let fleet = Arc::new(fleet.unwrap());
        let pool = Arc::new(WorkerPool::default());
        pool.add(vec![(WorkerSource::Static, config)]);
        let tasks = [
            tokio::spawn({
                let directory = directory.clone();
                async move { register_or_report_alive(directory, pool, &mut reports).await }
            }),
            tokio::spawn(drains::follow(directory.clone(), Arc::downgrade(&fleet))),
        ];
        wait_until("the worker is registered", || directory.view().worker(id).is_some()).await;
        let health = || fleet.snapshot().iter().find(|worker| worker.id == id).map(|worker| worker.health);
        for (draining, wanted) in [(DrainFlag::Yes, WorkerHealth::Draining), (DrainFlag::No, WorkerHealth::Ready)] {
            let outcome = directory.submit(Command::DrainWorker(DrainWorker { worker: id, draining })).unwrap().await;
            assert_eq!(outcome, Ok(Outcome::Done));
            wait_until("it is obeyed", || health() == Some(wanted)).await;
        }
        tasks.iter().for_each(JoinHandle::abort);
        directory.close().await.unwrap();
    }
}
