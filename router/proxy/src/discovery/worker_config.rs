//! Which engines there are: `[[workers]]` in the file, `--worker URL#role` on the command line.

use std::collections::HashSet;
use std::sync::Arc;

use planner::ParallelShape;
use serde::Deserialize;
use vocabulary::{WorkerRole, WorkerUrl};
use workers_shim::fleet::WorkerProfile;

use crate::auth::bearer;
use vocabulary::Secret;

/// One engine.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// Base URL, `http://host:port`, with `#prefill`, `#decode` or `#hybrid` behind it where it is not a hybrid.
    pub url: WorkerUrl,
    /// What it is for; goes before the URL's.
    pub role: Option<WorkerRole>,
    /// The models it serves; asked from the engine (`GET /v1/models`) when empty.
    #[serde(default)]
    pub models: Vec<String>,
    /// Sent to the engine as `Authorization: Bearer ...`, in place of the client's.
    pub api_key: Option<Secret>,
    /// ZMQ endpoint of its KV events (`tcp://host:5557`); asked from the engine (`GET /kv_event_sources`) when missing.
    pub kv_events_endpoint: Option<String>,
    /// ZMQ endpoint for replaying them.
    pub kv_events_replay_endpoint: Option<String>,
    /// Tensor- and pipeline-parallel size of one of its replicas (`{ tensor = 4, pipeline = 1 }`): KV moves only between
    /// shapes whose ranks can read from each other. Those of workers without it are taken to match.
    pub parallelism: Option<ParallelShape>,
    /// What is assumed of it until it was measured.
    #[serde(default)]
    pub profile: WorkerProfile,
}

impl WorkerConfig {
    /// An engine of which nothing but the URL is known.
    pub fn from_url(url: WorkerUrl) -> Self {
        Self {
            url,
            role: None,
            models: Vec::new(),
            api_key: None,
            kv_events_endpoint: None,
            kv_events_replay_endpoint: None,
            parallelism: None,
            profile: WorkerProfile::default(),
        }
    }

    /// Scheme, host and port.
    pub fn endpoint(&self) -> &Arc<str> {
        &self.url.endpoint
    }

    /// What it is for.
    pub fn role(&self) -> WorkerRole {
        self.role.or(self.url.role).unwrap_or_default()
    }
}

/// Of a key that a header cannot hold.
pub(super) const UNSENDABLE: &str =
    "it holds a line break or another control character; accepted is what can stand in a header";

/// What no worker of a list can say alone, and where.
pub fn problem(workers: &[WorkerConfig]) -> Option<(String, String)> {
    let mut seen = HashSet::new();
    if let Some(worker) = workers.iter().find(|worker| !seen.insert(worker.endpoint())) {
        return Some(("workers".into(), format!("{} is listed twice", worker.endpoint())));
    }
    // A key that cannot stand in a header would be left out in silence.
    let is_unsendable = |worker: &WorkerConfig| worker.api_key.is_some() && bearer(worker.api_key.as_ref()).is_none();
    if let Some(index) = workers.iter().position(is_unsendable) {
        return Some((format!("workers[{index}].api_key"), UNSENDABLE.into()));
    }
    let no_ranks =
        |worker: &WorkerConfig| worker.parallelism.is_some_and(|shape| shape.tensor == 0 || shape.pipeline == 0);
    let index = workers.iter().position(no_ranks)?;
    Some((format!("workers[{index}].parallelism"), "accepted are sizes of 1 or more".into()))
}
