//! Tenant isolation: API keys with their tenants, the cache salts that keep tenants apart inside the engines, and the
//! verdicts on whether engines honour the salts.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::{Incarnation, TenantId, WorkerId, WorkerView};

use crate::auth::ApiKeys;
use crate::salts::CacheSalts;
use crate::worker_client::WorkerClient;

/// What keeps tenants apart. Clones share it.
#[derive(Clone, Debug)]
pub struct TenantIsolation {
    keys: Arc<ApiKeys>,
    salts: Arc<CacheSalts>,
    salt_support: Arc<WorkerSaltSupport>,
}

/// Why no worker may serve client requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotServingReason {
    /// No worker answers.
    NobodyAnswers,
    /// All workers that answer ignore cache salts, while tenants must be isolated.
    SaltsIgnored,
}

impl TenantIsolation {
    /// Returns the isolation of the tenants of `keys`, without verdicts on engines.
    pub fn new(keys: Arc<ApiKeys>, salts: CacheSalts) -> Self {
        Self { keys, salts: Arc::new(salts), salt_support: Arc::default() }
    }

    /// Returns the API keys and tenants.
    pub fn keys(&self) -> &Arc<ApiKeys> {
        &self.keys
    }

    /// Returns the cache salt of a tenant; `None` where tenants share the engines' caches.
    pub fn salt_of(&self, tenant: &TenantId) -> Option<Arc<str>> {
        self.salts.of(tenant)
    }

    /// Returns the verdicts on whether engines honour the salts.
    pub fn salt_support(&self) -> &WorkerSaltSupport {
        &self.salt_support
    }

    /// Returns workers that must not get client requests, because tenants would not be isolated there.
    pub fn barred_workers(&self) -> Vec<WorkerId> {
        if self.keys.has_several_tenants() { self.salt_support.barred() } else { Vec::new() }
    }

    /// Whether some worker answers and may get client requests.
    pub fn serving(&self, workers: &WorkerClient) -> Result<(), NotServingReason> {
        let (answering, barred) = (workers.pool().answering(workers.fleet()), self.barred_workers());
        match answering.iter().all(|worker| barred.contains(&worker.id)) {
            _ if answering.is_empty() => Err(NotServingReason::NobodyAnswers),
            true => Err(NotServingReason::SaltsIgnored),
            false => Ok(()),
        }
    }
}

/// Whether an engine keeps prompts of different salts apart: the verdict of two requests with different salts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum SaltSupport {
    /// The second found nothing of the first.
    Isolated,
    /// It found what was sent under another salt.
    NotIsolated,
    /// The engine does not tell what it finds in its cache.
    Unknown,
}

/// Which workers honour cache salts: the verdict on each incarnation.
#[derive(Debug, Default)]
pub struct WorkerSaltSupport {
    verdicts: Mutex<HashMap<WorkerId, (Incarnation, SaltSupport)>>,
}

impl WorkerSaltSupport {
    /// Returns workers that serve no requests while tenants must be isolated.
    pub(crate) fn barred(&self) -> Vec<WorkerId> {
        let verdicts = self.verdicts.lock();
        let ignoring = verdicts.iter().filter(|(_, (_, verdict))| *verdict == SaltSupport::NotIsolated);
        ignoring.map(|(worker, _)| *worker).collect()
    }

    /// Returns the problem of a worker that ignores salts, for a person.
    pub fn problem(&self, worker: WorkerId) -> Option<&'static str> {
        let is_ignoring = self.verdict(worker) == Some(SaltSupport::NotIsolated);
        is_ignoring.then_some(
            "Its engine ignores cache_salt, so that tenants would find out what others have sent: it serves no requests. \
             Update the engine, or set auth.verify_cache_salt = false where tenants may share caches.",
        )
    }

    /// Returns the warning for a worker whose salt support is unknown; it serves all the same.
    pub fn untold(&self, worker: WorkerId) -> Option<&'static str> {
        (self.verdict(worker) == Some(SaltSupport::Unknown)).then_some(
            "Whether its engine honours cache_salt is not proven, because it does not tell cached tokens: tenants may find out \
             what others have sent. Start vLLM with --enable-prompt-tokens-details.",
        )
    }

    fn verdict(&self, worker: WorkerId) -> Option<SaltSupport> {
        self.verdicts.lock().get(&worker).map(|(_, verdict)| *verdict)
    }

    /// Whether this incarnation of a worker has a verdict.
    pub(crate) fn has_verdict(&self, view: &WorkerView) -> bool {
        self.verdicts.lock().get(&view.id).is_some_and(|(life, _)| *life == view.incarnation)
    }

    /// Records the verdict on this incarnation of a worker.
    pub(crate) fn record(&self, view: &WorkerView, verdict: SaltSupport) {
        self.verdicts.lock().insert(view.id, (view.incarnation, verdict));
    }

    /// Forgets workers that are not in this list.
    pub(crate) fn retain(&self, workers: &[WorkerView]) {
        self.verdicts.lock().retain(|worker, _| workers.iter().any(|view| view.id == *worker));
    }
}
