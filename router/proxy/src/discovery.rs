//! Worker discovery: merges the worker lists of all sources, and applies the result to the fleet and the worker pool
//! while requests are served.
//!
//! A source always gives its complete list. A worker in several lists belongs to the first source, in the order of
//! [`WorkerSource`]. Health plays no role here: a worker that does not answer stays listed.

pub mod dns;
mod file;
pub mod kubernetes;
mod registrations;
mod settings;
mod worker_config;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ownership::OwnershipDirectory;
use parking_lot::Mutex;
use serde::Serialize;
use strum::{AsRefStr, IntoStaticStr, VariantArray};
use tokio::sync::Notify;
use utoipa::ToSchema;
use vocabulary::{ModelId, WorkerId};
use workers_shim::fleet::{EventSourceSetting, Fleet, FleetChangeCounts, FleetError, WorkerDefinition};

use crate::drains;
use crate::telemetry::discovery_metrics::DiscoveryMetrics;
use crate::worker_pool::WorkerPool;
pub use file::WorkerFileError;
pub use file::WorkerFileWatcher;
use registrations::RegistrationTable;
pub use registrations::{RegistrationOutcome, RegistrationsFull, WorkerRegistration};
pub use settings::{DiscoveryConfig, DnsConfig, KubernetesConfig, MAX_WORKERS, PortSelector};
pub use worker_config::WorkerConfig;
pub use worker_config::problem as workers_problem;

/// Minimum time between two changes of the fleet, however often sources change.
const MIN_UPDATE_INTERVAL: Duration = Duration::from_millis(200);

/// Who lists workers.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, ToSchema, AsRefStr, IntoStaticStr, VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
#[schema(as = WorkerSource)]
pub enum WorkerSource {
    /// `[[workers]]` and `--worker`.
    Static,
    /// The file `discovery.workers_file`.
    File,
    /// Names of `[[discovery.dns]]`.
    Dns,
    /// Services of `[[discovery.kubernetes]]`.
    Kubernetes,
    /// Registrations over the operators' API: what is told at run time takes nothing from what is configured.
    Api,
}

impl WorkerSource {
    /// Whether the list comes from the configuration, and not from callers of the operator API.
    pub fn is_configured(self) -> bool {
        self < Self::Api
    }
}

/// Key of one worker list: its source, and its index within the source.
pub(crate) type WorkerListKey = (WorkerSource, usize);

/// The workers that the sources list, and where they are applied.
#[derive(Debug)]
pub struct WorkerDiscovery {
    lists: Mutex<BTreeMap<WorkerListKey, Vec<WorkerConfig>>>,
    registered: Mutex<RegistrationTable>,
    /// Why a list cannot be read.
    failures: Mutex<BTreeMap<WorkerListKey, String>>,
    changed: Notify,
    fleet: Arc<Fleet>,
    pool: Arc<WorkerPool>,
    directory: Arc<OwnershipDirectory>,
    metrics: DiscoveryMetrics,
}

impl WorkerDiscovery {
    /// Creates the discovery without any list.
    pub fn new(
        (fleet, pool): (Arc<Fleet>, Arc<WorkerPool>),
        directory: Arc<OwnershipDirectory>,
        (config, metrics): (&DiscoveryConfig, DiscoveryMetrics),
    ) -> Self {
        let registered = Mutex::new(RegistrationTable::new(config.max_registrations));
        let (lists, failures) = Default::default();
        Self { lists, registered, failures, changed: Notify::new(), fleet, pool, directory, metrics }
    }

    /// Replaces a list. It takes effect shortly afterwards.
    pub fn update_list(&self, source: WorkerListKey, workers: Vec<WorkerConfig>) {
        self.lists.lock().insert(source, workers);
        self.changed.notify_one();
    }

    /// Records that a list cannot be read; its last content stays in force. Logged once until it can be read again.
    pub(crate) fn mark_failing(&self, list: WorkerListKey, why: String) {
        if self.failures.lock().insert(list, why.clone()).as_ref() != Some(&why) {
            tracing::error!(source = list.0.as_ref(), reason = %why, "a source of workers cannot be read (see reason); its last list stays in force");
        }
    }

    /// Records that a list can be read.
    pub(crate) fn mark_working(&self, list: WorkerListKey) {
        if self.failures.lock().remove(&list).is_some() {
            tracing::info!(source = list.0.as_ref(), "workers are looked up again");
        }
    }

    /// Returns the sources that cannot be read, with the reason.
    pub fn failures(&self) -> Vec<(WorkerSource, String)> {
        self.failures.lock().iter().map(|((source, _), why)| (*source, why.clone())).collect()
    }

    /// Registers a worker, or renews its registration, for `ttl`.
    pub fn register(&self, worker: WorkerConfig, ttl: Duration) -> Result<RegistrationOutcome, RegistrationsFull> {
        let mut registered = self.registered.lock();
        let came = registered.register(worker, ttl, Instant::now())?;
        if came != RegistrationOutcome::Renewed {
            self.update_registered(&registered);
        }
        Ok(came)
    }

    /// Withdraws a registration; returns whether the worker was registered.
    pub fn withdraw(&self, worker: WorkerId) -> bool {
        let mut registered = self.registered.lock();
        let was_there = registered.withdraw(worker);
        self.update_registered(&registered);
        was_there
    }

    /// Returns a value for each registration, by id.
    pub fn registered<T>(&self, line: impl FnMut(&WorkerRegistration) -> T) -> Vec<T> {
        self.registered.lock().all().map(line).collect()
    }

    /// Removes expired registrations. Never returns.
    pub async fn drop_expired_registrations(self: Arc<Self>) {
        loop {
            tokio::time::sleep(MIN_UPDATE_INTERVAL).await;
            let mut registered = self.registered.lock();
            let gone = registered.expire(Instant::now());
            if !gone.is_empty() {
                self.update_registered(&registered);
            }
            gone.iter()
                .for_each(|worker| tracing::warn!(worker = %worker.endpoint(), "the worker's registration expired; it gets no new steps until it registers again"));
        }
    }

    fn update_registered(&self, registered: &RegistrationTable) {
        self.update_list((WorkerSource::Api, 0), registered.all().map(|it| it.worker.clone()).collect());
    }

    /// Applies changes of the lists. Never returns.
    pub async fn run(self: Arc<Self>) {
        loop {
            self.changed.notified().await;
            if let Err(error) = self.reconcile() {
                tracing::error!(%error, "the workers could not be changed");
            }
            tokio::time::sleep(MIN_UPDATE_INTERVAL).await;
        }
    }

    /// Applies the lists now. Must not run concurrently.
    pub fn reconcile(&self) -> Result<(), FleetError> {
        let (listed, left_out) = merge_lists(&self.lists.lock());
        self.metrics.left_out.set(left_out as i64);
        for source in WorkerSource::VARIANTS.iter().copied() {
            let count = listed.iter().filter(|(by, _)| *by == source).count();
            self.metrics.workers.with_label_values(&[source.as_ref()]).set(count as i64);
        }
        let specs = listed.iter().map(|(_, worker)| worker_definition(worker)).collect();
        // The pool is a superset of the fleet at all times, so that every planned worker has a known address.
        self.pool.add(listed);
        let turnover = self.fleet.set_workers(specs)?;
        let is_here = |id| self.fleet.is_listed(id) || self.fleet.leaving().contains(&id);
        self.pool.retain(is_here);
        self.record_turnover(turnover);
        Ok(())
    }

    fn record_turnover(&self, turnover: FleetChangeCounts) {
        if turnover == FleetChangeCounts::default() {
            return;
        }
        let FleetChangeCounts { joined, changed, left } = turnover;
        tracing::info!(joined, changed, left, "the workers changed");
        for (change, count) in [("joined", joined), ("changed", changed), ("left", left)] {
            self.metrics.changes.with_label_values(&[change]).inc_by(count as u64);
        }
        // A worker that has joined may have been drained before.
        for view in self.fleet.snapshot().iter() {
            drains::apply(&self.directory, &self.fleet, view.id);
        }
    }
}

/// Returns every worker once, by the first source that lists it, and the number beyond [`MAX_WORKERS`].
fn merge_lists(wanted: &BTreeMap<WorkerListKey, Vec<WorkerConfig>>) -> (Vec<(WorkerSource, WorkerConfig)>, usize) {
    let mut seen = HashSet::new();
    let all = wanted.iter().flat_map(|((source, _), workers)| workers.iter().map(|worker| (*source, worker)));
    let mut listed: Vec<_> = all
        .filter(|(_, worker)| seen.insert(worker.endpoint().clone()))
        .map(|(source, worker)| (source, worker.clone()))
        .collect();
    let left_out = listed.len().saturating_sub(MAX_WORKERS);
    if left_out > 0 {
        tracing::error!(left_out, limit = MAX_WORKERS, "more workers are listed than a router can have");
    }
    listed.truncate(MAX_WORKERS);
    (listed, left_out)
}

/// Converts a configured worker into the fleet's definition.
pub(crate) fn worker_definition(worker: &WorkerConfig) -> WorkerDefinition {
    WorkerDefinition {
        models: worker.models.iter().map(|name| ModelId::from(name.as_str())).collect(),
        api_key: worker.api_key.as_ref().map(|key| key.expose().into()),
        events: match &worker.kv_events_endpoint {
            Some(live) => {
                EventSourceSetting::Configured { live: live.clone(), replay: worker.kv_events_replay_endpoint.clone() }
            }
            None => EventSourceSetting::Discovered,
        },
        profile: worker.profile.clone(),
        ..WorkerDefinition::at(worker.endpoint(), worker.role())
    }
}

#[cfg(test)]
mod tests;
