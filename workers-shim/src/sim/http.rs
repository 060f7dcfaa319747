//! HTTP server of the simulated worker, compatible with vLLM's OpenAI server.

mod adapters;
mod admin;
mod chat;
mod choice;
mod completions;
mod errors;
mod fields;
mod generate;
mod generation_params;
mod messages;
mod metrics;
mod metrics_sglang;
mod pooling;
mod responses;
mod sse;
mod text;
mod transfer_fields;
mod transfer_service;
mod usage;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use engine_model::EngineProfile;
use parking_lot::Mutex;
use serde_json::json;

use super::clock::EngineClock;
use super::codec::TextCodec;
use super::driver::EngineDriver;
use super::publisher::EventEndpoints;

pub(crate) use adapters::AdapterNames;
use errors::ErrorResponse;
pub(crate) use transfer_fields::SideChannelIdentity;
pub(crate) use transfer_service::TransferService;

/// What all routes share.
pub(crate) struct SimState {
    pub(crate) transfers: Arc<TransferService>,
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
    pub(crate) state: AdminState,
}

/// State that admin calls and requests change.
pub(crate) struct AdminState {
    adapters: Mutex<AdapterNames>,
    responses: Mutex<responses::ResponseStore>,
    asleep: AtomicBool,
    admin_requests: AtomicU64,
    next_id: AtomicU64,
}

impl AdminState {
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

    fn count_admin_request(&self) {
        self.state.admin_requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a pseudo-random number that is unique within this process.
    fn next_number(&self) -> u64 {
        let number = self.state.next_id.fetch_add(1, Ordering::Relaxed);
        xxhash_rust::xxh3::xxh3_64_with_seed(&number.to_le_bytes(), self.started.to_bits())
    }

    fn unix_seconds(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }

    fn system_fingerprint(&self) -> String {
        let id = &self.identity.engine;
        format!("vllm-{}-{}", admin::VERSION, id.get(..8).unwrap_or(id))
    }

    /// Returns the adapter for a model name; None for the base model.
    fn adapter_of(&self, model: &str) -> Result<Option<Arc<str>>, ErrorResponse> {
        if model == self.model {
            return Ok(None);
        }
        match self.state.adapters.lock().serves(model) {
            true => Ok(Some(Arc::from(model))),
            false => Err(ErrorResponse::not_found(format!("The model `{model}` does not exist."), Some("model"))),
        }
    }

    fn check_vocabulary(&self, tokens: Vec<u32>) -> Result<Vec<u32>, ErrorResponse> {
        let size = self.codec.vocabulary_size();
        match tokens.iter().find(|id| **id >= size) {
            Some(id) => Err(ErrorResponse::bad_request(format!("Token id {id} is out of vocabulary"), Some("prompt"))),
            None => Ok(tokens),
        }
    }

    fn check_awake(&self) -> Result<(), ErrorResponse> {
        match self.state.asleep.load(Ordering::Relaxed) {
            true => Err(ErrorResponse::unavailable("The engine is asleep.")),
            false => Ok(()),
        }
    }
}

pub(crate) fn routes(app: Arc<SimState>, body_limit: usize) -> Router {
    let served = Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/{id}", get(responses::retrieve_response))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/embeddings", post(pooling::embeddings))
        .route("/v1/rerank", post(pooling::rerank))
        .route("/rerank", post(pooling::rerank))
        .route("/v1/score", post(pooling::score))
        .route("/score", post(pooling::score))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize));
    let told = Router::new()
        .route("/health", get(admin::health))
        .route("/ping", get(admin::health).post(admin::health))
        .route("/version", get(admin::version))
        .route("/server_info", get(admin::server_info))
        .route("/load", get(admin::load))
        .route("/metrics", get(metrics::metrics))
        .route("/v1/models", get(admin::models))
        .route("/kv_event_sources", get(admin::kv_event_sources))
        .route("/is_sleeping", get(admin::is_sleeping));
    let administered = Router::new()
        .route("/sleep", post(admin::sleep))
        .route("/wake_up", post(admin::wake_up))
        .route("/reset_prefix_cache", post(admin::reset_prefix_cache))
        .route("/v1/load_lora_adapter", post(admin::load_adapter))
        .route("/v1/unload_lora_adapter", post(admin::unload_adapter));
    served.merge(told).merge(administered).fallback(unknown).layer(DefaultBodyLimit::max(body_limit)).with_state(app)
}

async fn unknown() -> Response {
    (StatusCode::NOT_FOUND, axum::Json(json!({"detail": "Not Found"}))).into_response()
}
