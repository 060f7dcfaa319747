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

use crate::auth::{Keys, KeysError, Secret};
use crate::catalog::Catalog;
use crate::config::Config;
use crate::decisions::{Configured, DecisionLog, DecisionLogError, Decisions};
use crate::exchange::prompts;
use crate::exchange::trouble::Trouble;
use crate::exchange::unapplied::{Reach, Unapplied};
use crate::following::{Followed, Untaken};
use crate::host_check::remove_credentials;
use crate::membership::Membership;
use crate::memory::{MemoryBudget, MemoryLimits};
use crate::models::ModelList;
use crate::pipeline::aside::Aside;
use crate::pipeline::plan::Policies;
use crate::pipeline::receipt::{Receipts, Remark};
use crate::pipeline::replicate::Flight;
use crate::pipeline::single_flight::SingleFlight;
use crate::pipeline::steering::LiveSteering;
use crate::remembered::Remembered;
use crate::retries::Share;
use crate::rooms::{Rooms, RoomsError};
use crate::roster::{Member, Roster};
use crate::salt_proof::SaltProofs;
use crate::salts::Salts;
use crate::soft_state::{SoftState, SoftStateError};
use crate::telemetry::metrics::Metrics;
use crate::upstream::{Upstream, request_headers};

/// Memory for bodies of operators' writes: a full one for each of their connections.
const OPERATOR_MEMORY: usize = 16 << 20;

/// The front door's shared state; one a process, or one a server in tests.
#[derive(Debug)]
pub struct Gateway {
    /// As loaded at start.
    pub config: Config,
    /// The client to the workers.
    pub upstream: Upstream,
    /// API keys and tenants.
    pub keys: Arc<Keys>,
    /// All metrics.
    pub metrics: Metrics,
    /// Mode and rollout, changeable at run time.
    pub steering: LiveSteering,
    /// The workers, for requests that no plan is made for.
    pub roster: Arc<Roster>,
    /// What the workers serve, for clients that ask.
    pub models: ModelList,
    /// Soft state, and what it is used for.
    pub remembered: Remembered,
    /// Memory of the requests in work.
    pub memory: Arc<MemoryBudget>,
    /// The same for operators, whom no tenant leaves without any.
    pub operator_memory: Arc<MemoryBudget>,
    /// Where work that takes long is done.
    pub aside: Aside,
    rooms: Rooms,
    /// What keeps tenants apart inside the engines.
    pub salts: Salts,
    /// Whether it does.
    pub(crate) salt_proofs: SaltProofs,
    /// The planner's policy, its account of whose KV lies where, and the bypass.
    pub policies: Policies,
    /// Prefixes on their way between workers.
    pub replicates: SingleFlight<Flight, Option<Remark>>,
    /// Why steps were served as they were, and whether prices foretell first tokens.
    pub decisions: Arc<Decisions>,
}

/// Why no worker may be asked for something of a client's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotServing {
    NobodyAnswers,
    /// Of those that answer every one ignores cache salts, while tenants must be kept apart.
    SaltsIgnored,
}

/// Receipts kept in memory.
const RECEIPTS: usize = 10_000;

/// Why there is no gateway.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The keys file was refused.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// Models, ledger or workers.
    #[error(transparent)]
    Rooms(#[from] RoomsError),
    /// Redis as it is configured.
    #[error(transparent)]
    SoftState(#[from] SoftStateError),
    /// The folder of the decision log.
    #[error(transparent)]
    Decisions(#[from] DecisionLogError),
}

impl Gateway {
    /// Reads the keys, opens the ledger and starts to watch the workers. Listens nowhere.
    pub async fn open(config: Config) -> Result<Self, GatewayError> {
        let keys = Arc::new(Keys::open(&config.auth)?);
        keys.warn_without_key(config.tenants.keys().map(String::as_str));
        let metrics = Metrics::default();
        SoftState::check(&config.soft_state)?;
        let rooms = Rooms::open(&config, &metrics).await?;
        let salts = match &config.auth.keys_file {
            Some(_) => Salts::separate(config.auth.salt_secret.as_ref()),
            None => Salts::none(),
        };
        let is_shared = keys.required();
        let total = config.proxy.memory.0;
        let tenant = if is_shared { total / 2 } else { total };
        let memory = MemoryBudget::new(MemoryLimits { total, tenant }, &metrics.memory);
        let operators = MemoryLimits { total: OPERATOR_MEMORY, tenant: OPERATOR_MEMORY };
        let operator_memory = MemoryBudget::unshown(operators, &metrics.memory);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let aside = Aside::new(2 * cores, if is_shared { cores } else { 2 * cores });
        let cluster = rooms.directory.cluster().to_string();
        let remembered = Remembered::start(&config, (&cluster, rooms.directory.supervision()), &metrics)?;
        let policies = Policies::new(&config, if is_shared { Share::Half } else { Share::All });
        let log = DecisionLog {
            folder: &config.ledger.data_dir.join("decisions"),
            policy: policies.own(),
            configured: Configured { attention: rooms.catalog.attention(), shapes: rooms.roster.shapes().to_vec() },
            metrics: &metrics.decisions,
        };
        let decisions = Arc::new(Decisions::open(Receipts::new(RECEIPTS), config.decisions, log)?);
        prompts::lend(&rooms.directory, remembered.prompts.clone(), metrics.exchange.clone());
        Ok(Self {
            roster: rooms.roster.clone(),
            rooms,
            salts,
            salt_proofs: SaltProofs::default(),
            policies,
            replicates: SingleFlight::default(),
            decisions,
            upstream: Upstream::new(config.upstream.clone()),
            keys,
            metrics,
            steering: LiveSteering::new(config.steering()),
            remembered,
            memory,
            operator_memory,
            aside,
            models: ModelList::default(),
            config,
        })
    }

    /// Files that are followed, and where it is told that they could not be taken.
    pub(crate) fn followed(&self, what: &'static str) -> Followed {
        Followed { what, untaken: self.rooms.untaken.clone() }
    }

    /// Those that changed and are not used.
    pub(crate) fn untaken(&self) -> &Untaken {
        &self.rooms.untaken
    }

    /// Sessions, owners and leases: the view of the ledger, and the way to write to it.
    pub fn directory(&self) -> &Directory {
        &self.rooms.directory
    }

    /// The workers as they look now.
    pub fn fleet(&self) -> &Fleet {
        &self.rooms.fleet
    }

    /// Who holds what.
    pub fn index(&self) -> &SharedIndex {
        &self.rooms.index
    }

    /// Steps that were served and that the ledger's view does not show yet. Hold it briefly, never across an await.
    pub fn unapplied(&self) -> MutexGuard<'_, Unapplied> {
        self.rooms.unapplied.lock()
    }

    /// What is wrong with the ledger. Steps are served all the same.
    pub fn troubles(&self) -> Vec<Trouble> {
        self.rooms.watch.troubles(self.directory()).collect()
    }

    /// The ledger has stopped for good.
    pub fn ledger_failed(&self, error: &OwnershipError) {
        self.rooms.watch.failed(error);
    }

    /// The models.
    pub fn catalog(&self) -> &Catalog {
        &self.rooms.catalog
    }

    /// Workers that may not be asked for anything of a client's, because tenants would not be apart there.
    pub(crate) fn barred(&self) -> Vec<WorkerId> {
        if self.keys.are_several() { self.salt_proofs.barred() } else { Vec::new() }
    }

    /// Whether some worker answers and may be asked for something of a client's.
    pub(crate) fn serving(&self) -> Result<(), NotServing> {
        let (answering, barred) = (self.roster.answering(self.fleet()), self.barred());
        match answering.iter().all(|worker| barred.contains(&worker.id)) {
            _ if answering.is_empty() => Err(NotServing::NobodyAnswers),
            true => Err(NotServing::SaltsIgnored),
            false => Ok(()),
        }
    }

    /// How a worker is reached, also one that is leaving.
    pub fn worker(&self, id: WorkerId) -> Option<Arc<Member>> {
        self.roster.member(id)
    }

    /// Who lists workers.
    pub(crate) fn membership(&self) -> &Arc<Membership> {
        &self.rooms.membership
    }

    /// Writes out what the ledger has taken and closes it.
    pub async fn close(&self) {
        let decisions = self.decisions.clone();
        // It waits for the disk; a task that died has nothing left to write.
        drop(tokio::task::spawn_blocking(move || decisions.close()).await);
        self.rooms.close().await;
    }

    /// This router, as the ledger knows it.
    pub fn node(&self) -> NodeId {
        self.directory().node()
    }

    /// Whether the ledger can be told anything, as far as this node knows.
    pub fn reach(&self) -> Reach {
        if self.directory().view().quorum().stale { Reach::Nobody } else { Reach::Quorum }
    }

    /// Hands advice to the ledger without waiting for anything; the ledger counts outcomes, and what it did not take.
    /// Without a quorum there is nobody to advise: it would only stand in the way of what must not be lost.
    pub fn submit_advice(&self, command: Command) {
        if self.reach() == Reach::Quorum {
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
    pub fn headers_for(&self, worker: &Member, client: &HeaderMap) -> HeaderMap {
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
    use crate::membership::Source;

    async fn sent(worker_key: Option<&str>, keys_file: Option<&str>) -> (Option<String>, bool) {
        sent_to(Source::Static, worker_key, keys_file).await
    }

    async fn sent_to(source: Source, worker_key: Option<&str>, keys_file: Option<&str>) -> (Option<String>, bool) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        std::fs::write(&path, keys_file.unwrap_or_default()).unwrap();
        let auth = AuthConfig { keys_file: keys_file.map(|_| path), ..AuthConfig::default() };
        let ledger = LedgerConfig { data_dir: folder.path().join("ledger"), ..LedgerConfig::default() };
        let gateway = Gateway::open(Config { auth, ledger, ..Config::default() }).await.unwrap();
        let mut config = WorkerConfig::at("http://a:1".parse().unwrap());
        config.api_key = worker_key.map(Secret::from);
        let worker = Member { id: WorkerId::of_endpoint(config.endpoint()), source, config };
        let client = HeaderMap::from_iter([
            (AUTHORIZATION, HeaderValue::from_static("Bearer client")),
            (http::HeaderName::from_static("x-api-key"), HeaderValue::from_static("client")),
        ]);
        let headers = gateway.headers_for(&worker, &client);
        (headers.get(AUTHORIZATION).map(|v| v.to_str().unwrap().to_owned()), headers.contains_key("x-api-key"))
    }

    #[tokio::test]
    async fn a_clients_key_stays_here_unless_nobody_here_wants_one() {
        let file = Some("[keys]\n\"client\" = \"a\"");
        assert_eq!(sent(None, None).await, (Some("Bearer client".into()), true));
        assert_eq!(sent(None, file).await, (None, false));
        assert_eq!(sent(Some("worker"), file).await, (Some("Bearer worker".into()), false));
        assert_eq!(sent(Some("worker"), None).await, (Some("Bearer worker".into()), false));
    }

    #[tokio::test]
    async fn a_clients_key_goes_to_no_worker_that_registered_itself() {
        for source in [Source::Static, Source::File, Source::Dns, Source::Kubernetes] {
            assert_eq!(sent_to(source, None, None).await, (Some("Bearer client".into()), true), "{source:?}");
        }
        assert_eq!(sent_to(Source::Api, None, None).await, (None, false));
    }
}
