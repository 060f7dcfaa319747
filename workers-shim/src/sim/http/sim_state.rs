//! State that all routes of the simulated worker share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use engine_model::EngineProfile;
use parking_lot::Mutex;

use super::adapters::AdapterNames;
use super::errors::ErrorResponse;
use super::responses::ResponseStore;
use super::transfer_fields::SideChannelIdentity;
use super::transfer_service::KvTransferResolver;
use crate::sim::clock::EngineClock;
use crate::sim::codec::TextCodec;
use crate::sim::driver::EngineDriver;
use crate::sim::publisher::EventEndpoints;

/// The vLLM version that is simulated.
pub(crate) const VERSION: &str = "0.32.0";

/// What all routes share.
pub(crate) struct SimState {
    pub(crate) transfers: Arc<KvTransferResolver>,
    pub(crate) driver: EngineDriver,
    pub(crate) codec: Arc<dyn TextCodec>,
    pub(crate) identity: SideChannelIdentity,
    pub(crate) model: String,
    pub(crate) ignores_salts: bool,
    pub(crate) profile: Arc<EngineProfile>,
    pub(crate) endpoints: EventEndpoints,
    pub(crate) clock: EngineClock,
    /// Start time of this process, in seconds since the epoch.
    pub(crate) started: f64,
    pub(crate) state: MutableSimState,
}

/// State that admin calls and requests change.
pub(crate) struct MutableSimState {
    pub(super) adapters: Mutex<AdapterNames>,
    pub(super) responses: Mutex<ResponseStore>,
    pub(super) asleep: AtomicBool,
    pub(super) admin_requests: AtomicU64,
    pub(super) next_id: AtomicU64,
}

impl MutableSimState {
    pub(crate) fn with_adapters(adapters: AdapterNames) -> Self {
        Self {
            adapters: Mutex::new(adapters),
            responses: Mutex::default(),
            asleep: AtomicBool::new(false),
            admin_requests: AtomicU64::new(0),
            next_id: AtomicU64::new(0),
        }
    }
}

impl SimState {
    /// Returns the number of admin requests.
    pub(crate) fn admin_requests(&self) -> u64 {
        self.state.admin_requests.load(Ordering::Relaxed)
    }

    pub(super) fn count_admin_request(&self) {
        self.state.admin_requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a pseudo-random number that is unique within this process.
    pub(super) fn next_number(&self) -> u64 {
        let number = self.state.next_id.fetch_add(1, Ordering::Relaxed);
        xxhash_rust::xxh3::xxh3_64_with_seed(&number.to_le_bytes(), self.started.to_bits())
    }

    pub(super) fn unix_seconds(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }

    pub(super) fn system_fingerprint(&self) -> String {
        let id = &self.identity.engine;
        format!("vllm-{}-{}", VERSION, id.get(..8).unwrap_or(id))
    }

    /// Returns the adapter for a model name; None for the base model.
    pub(super) fn adapter_of(&self, model: &str) -> Result<Option<Arc<str>>, ErrorResponse> {
        if model == self.model {
            return Ok(None);
        }
        match self.state.adapters.lock().serves(model) {
            true => Ok(Some(Arc::from(model))),
            false => Err(ErrorResponse::not_found(format!("The model `{model}` does not exist."), Some("model"))),
        }
    }

    pub(super) fn check_vocabulary(&self, tokens: Vec<u32>) -> Result<Vec<u32>, ErrorResponse> {
        let size = self.codec.vocabulary_size();
        match tokens.iter().find(|id| **id >= size) {
            Some(id) => Err(ErrorResponse::bad_request(format!("Token id {id} is out of vocabulary"), Some("prompt"))),
            None => Ok(tokens),
        }
    }

    pub(super) fn check_awake(&self) -> Result<(), ErrorResponse> {
        match self.state.asleep.load(Ordering::Relaxed) {
            true => Err(ErrorResponse::unavailable("The engine is asleep.")),
            false => Ok(()),
        }
    }
}
