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
use ownership::{Directory, Options, OwnershipError, RequestedLedgerLimits};
use residency::{RoutedBlockLimits, SourceRules};
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio::task::JoinHandle;
use vocabulary::{Micros, ModelId};
use workers_shim::events::SharedIndex;
use workers_shim::fleet::{
    Fleet, FleetError, FleetOptions, LivenessReport, ProbeSettings, SourceRulesResolver, SuperviseTask,
};

use crate::config::Config;
use proxy::catalog::{Catalog, CatalogError};
use proxy::discovery::{WorkerDiscovery, WorkerFile, WorkerFileError, WorkerSource, dns, kubernetes};
use proxy::drains;
use proxy::peer_exchange::{PeerExchange, RouterPeers, SnapshotClient};
use proxy::telemetry::metrics::Metrics;
use proxy::watched_files::{StaleFiles, WatchedFiles};
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
        source: OwnershipError,
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
    pub directory: Arc<Directory>,
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
        let file = config.discovery.workers_file.as_deref().map(WorkerFile::open).transpose()?;
        let directory = Arc::new(open_directory(config).await?);
        let index = SharedIndex::new();
        let neighbours: Arc<dyn RouterPeers> = Arc::new(directory.peers().clone());
        let (alive, reports) = mpsc::channel(MAX_QUEUED_REPORTS);
        let supervision = directory.supervision().clone();
        let keep: SuperviseTask = Arc::new(move |name, begin| supervision.kept(name, begin).boxed());
        let options = FleetOptions {
            workers: Vec::new(),
            pace: ProbeSettings::default(),
            index: index.clone(),
            rules: event_rules(catalog.clone()),
            liveness: Some(alive),
            routed_limits: RoutedBlockLimits::default(),
            snapshots: Some(Arc::new(SnapshotClient::new(neighbours.clone(), metrics.exchange.clone()))),
        };
        let fleet = Arc::new(Fleet::start_supervised(options, keep)?);
        let (listed_workers, untaken) = (Arc::new(WorkerPool::default()), Arc::new(StaleFiles::default()));
        let discovery = (&config.discovery, metrics.process.discovery.clone());
        let membership = WorkerDiscovery::new((fleet.clone(), listed_workers.clone()), directory.clone(), discovery);
        let membership = Arc::new(membership);
        membership.update_list((WorkerSource::Static, 0), config.workers.clone());
        let exchange = PeerExchange::new(fleet.clone(), neighbours, metrics.exchange.clone());
        exchange.serve(&directory);
        let tasks = directory.supervision();
        let leases = (directory.clone(), listed_workers.clone(), Arc::new(AsyncMutex::new(reports)));
        let drained = (directory.clone(), Arc::downgrade(&fleet));
        let mut running = vec![
            tasks.supervise("leases", move || {
                let (directory, listed_workers, reports) = leases.clone();
                async move { keep_leases(directory, listed_workers, &mut *reports.lock().await).await }
            }),
            tasks.supervise("drains", move || drains::follow(drained.0.clone(), drained.1.clone())),
            tasks.supervise("exchange", move || exchange.clone().run()),
        ];
        if let Some((file, workers)) = file {
            membership.update_list((WorkerSource::File, 0), workers);
            let (followed, told) = (WatchedFiles { name: "workers", stale: untaken.clone() }, membership.clone());
            running.push(tasks.supervise("workers_file", move || file.clone().follow(told.clone(), followed.clone())));
        }
        membership.reconcile()?;
        let (kept, expired) = (membership.clone(), membership.clone());
        running.push(tasks.supervise_forever("membership", move || kept.clone().run()));
        running.push(tasks.supervise_forever("registrations", move || expired.clone().expire()));
        for name in config.discovery.dns.iter().cloned().enumerate() {
            let told = membership.clone();
            running.push(tasks.supervise_forever("dns", move || dns::follow(told.clone(), name.clone())));
        }
        for service in config.discovery.kubernetes.iter().cloned().enumerate() {
            let told = membership.clone();
            running.push(tasks.supervise("kubernetes", move || kubernetes::follow(told.clone(), service.clone())));
        }
        Ok(Self {
            directory,
            fleet,
            pool: listed_workers,
            discovery: membership,
            index,
            catalog,
            stale_files: untaken,
            tasks: running,
        })
    }

    /// Flushes the ledger and closes it.
    pub async fn close(&self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        if let Err(error) = self.directory.close().await {
            tracing::error!(%error, "the ledger did not close cleanly; its log is replayed at the next start");
        }
    }
}

async fn open_directory(config: &Config) -> Result<Directory, SubsystemsError> {
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
    Directory::open(options).await.map_err(|source| SubsystemsError::Ledger { folder, source })
}

/// Returns the rules that turn a worker's events into chain blocks, for models with a tokenizer.
fn event_rules(catalog: Arc<Catalog>) -> SourceRulesResolver {
    Arc::new(move |name| {
        let model = catalog.configured_model(name).filter(|model| model.identifier.text().is_some());
        if model.is_none() {
            tracing::warn!(model = %name, "no tokenizer is configured (models.NAME.tokenizer_dir): prompts are known by their bytes");
        }
        let model = model?;
        let identifier = &model.identifier;
        Some(SourceRules::new(identifier.block(), identifier.seed(), identifier.namespace().clone()))
    })
}

/// Registers each incarnation of a worker when it is first reached, and renews its lease while it is reachable.
async fn keep_leases(
    directory: Arc<Directory>,
    listed_workers: Arc<WorkerPool>,
    reports: &mut mpsc::Receiver<LivenessReport>,
) {
    while let Some(alive) = reports.recv().await {
        let view = directory.view();
        let registered = view.worker(alive.worker).is_some_and(|worker| {
            worker.incarnation == alive.incarnation && worker.is_live() && worker.spec.ranks == alive.ranks
        });
        if registered {
            directory.report_alive(alive.worker, alive.incarnation);
        } else if let Some(command) = registration_command(&listed_workers, alive, directory.lease_duration()) {
            register(&directory, alive, command).await;
        }
    }
}

async fn register(directory: &Directory, alive: LivenessReport, command: Command) {
    let Ok(ticket) = directory.submit(command) else { return };
    match ticket.await {
        Ok(Outcome::Refused(refusal)) => {
            tracing::warn!(worker = %alive.worker, %refusal, "a worker was not registered")
        }
        Ok(_) => tracing::info!(worker = %alive.worker, incarnation = alive.incarnation.0, "a worker is registered"),
        Err(error) => tracing::warn!(worker = %alive.worker, %error, "a worker could not be registered"),
    }
}

fn registration_command(listed_workers: &WorkerPool, alive: LivenessReport, lease: Duration) -> Option<Command> {
    let member = listed_workers.member(alive.worker)?;
    let config = &member.config;
    Some(Command::RegisterWorker(RegisterWorker {
        worker: alive.worker,
        incarnation: alive.incarnation,
        spec: LedgerSpec {
            endpoint: config.endpoint().clone(),
            role: config.role(),
            kind: WorkerKind::Engine,
            models: config.models.iter().map(|name| ModelId::from(name.as_str())).collect(),
            ranks: alive.ranks,
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
    use proxy::discovery::fleet_spec;

    #[tokio::test]
    async fn drain_recorded_by_a_peer_applies_without_another_probe() {
        let (worker, data) = (StubWorker::start("one", "tiny").await, tempfile::tempdir().unwrap());
        let directory = Arc::new(Directory::open(Options::new(data.path())).await.unwrap());
        let config = WorkerConfig::from_url(worker.url().parse().unwrap());
        let id = WorkerId::of_endpoint(config.endpoint());
        let (alive, mut reports) = mpsc::channel(MAX_QUEUED_REPORTS);
        // Probed when it starts, but not again during this test.
        let pace = ProbeSettings { every: Duration::from_secs(3600), ..ProbeSettings::default() };
        let fleet = Fleet::start(FleetOptions {
            workers: vec![fleet_spec(&config)],
            pace,
            index: SharedIndex::new(),
            rules: Arc::new(|_| None),
            liveness: Some(alive),
            routed_limits: RoutedBlockLimits::default(),
            snapshots: None,
        });
        let fleet = Arc::new(fleet.unwrap());
        let listed_workers = Arc::new(WorkerPool::default());
        listed_workers.add(vec![(WorkerSource::Static, config)]);
        let tasks = [
            tokio::spawn({
                let directory = directory.clone();
                async move { keep_leases(directory, listed_workers, &mut reports).await }
            }),
            tokio::spawn(drains::follow(directory.clone(), Arc::downgrade(&fleet))),
        ];
        wait_until("the worker is registered", || directory.view().worker(id).is_some()).await;
        let health = || fleet.snapshot().iter().find(|worker| worker.id == id).map(|worker| worker.health);
        for (draining, wanted) in [(DrainFlag::Yes, WorkerHealth::Draining), (DrainFlag::No, WorkerHealth::Ready)] {
            let said = directory.submit(Command::DrainWorker(DrainWorker { worker: id, draining })).unwrap().await;
            assert_eq!(said, Ok(Outcome::Done));
            wait_until("it is obeyed", || health() == Some(wanted)).await;
        }
        tasks.iter().for_each(JoinHandle::abort);
        directory.close().await.unwrap();
    }
}
