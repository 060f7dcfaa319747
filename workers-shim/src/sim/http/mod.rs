//! The worker's HTTP face: vLLM's OpenAI server.

mod adapters;
mod admin;
mod ask;
mod chat;
mod choice;
mod completions;
mod errors;
mod fields;
mod generate;
mod meeting;
mod messages;
mod metrics;
mod metrics_sglang;
mod pooling;
mod responses;
mod sse;
mod text;
mod totals;
mod transfer_fields;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use engine_model::Profile;
use parking_lot::Mutex;
use serde_json::json;

use super::clock::Clock;
use super::codec::TextCodec;
use super::driver::Driver;
use super::publisher::Endpoints;

pub(crate) use adapters::Adapters;
use errors::Fault;
pub(crate) use meeting::Handing;
pub(crate) use transfer_fields::Identity;

/// What all routes share.
pub(crate) struct App {
    pub(crate) handing: Arc<Handing>,
    pub(crate) driver: Driver,
    pub(crate) codec: Arc<dyn TextCodec>,
    pub(crate) identity: Identity,
    pub(crate) model: String,
    pub(crate) ignores_salts: bool,
    pub(crate) profile: Arc<Profile>,
    pub(crate) endpoints: Endpoints,
    pub(crate) clock: Clock,
    /// When this life began, in seconds since the epoch.
    pub(crate) started: f64,
    pub(crate) state: Changing,
}

/// What administration and use change.
pub(crate) struct Changing {
    adapters: Mutex<Adapters>,
    responses: Mutex<responses::Store>,
    asleep: AtomicBool,
    administered: AtomicU64,
    numbers: AtomicU64,
}

impl Changing {
    pub(crate) fn with(adapters: Adapters) -> Self {
        Self {
            adapters: Mutex::new(adapters),
            responses: Mutex::default(),
            asleep: AtomicBool::new(false),
            administered: AtomicU64::new(0),
            numbers: AtomicU64::new(0),
        }
    }
}

impl App {
    /// How often administration was asked for.
    pub(crate) fn administrations(&self) -> u64 {
        self.state.administered.load(Ordering::Relaxed)
    }

    fn administered(&self) {
        self.state.administered.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that no other answer of this life has, without a pattern.
    fn next_number(&self) -> u64 {
        let number = self.state.numbers.fetch_add(1, Ordering::Relaxed);
        xxhash_rust::xxh3::xxh3_64_with_seed(&number.to_le_bytes(), self.started.to_bits())
    }

    fn unix_seconds(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }

    fn fingerprint(&self) -> String {
        let id = &self.identity.engine;
        format!("vllm-{}-{}", admin::VERSION, id.get(..8).unwrap_or(id))
    }

    /// The adapter that a model name means; none for the model itself.
    fn adapter_of(&self, model: &str) -> Result<Option<Arc<str>>, Fault> {
        if model == self.model {
            return Ok(None);
        }
        match self.state.adapters.lock().serves(model) {
            true => Ok(Some(Arc::from(model))),
            false => Err(Fault::not_found(format!("The model `{model}` does not exist."), Some("model"))),
        }
    }

    fn known(&self, tokens: Vec<u32>) -> Result<Vec<u32>, Fault> {
        let size = self.codec.vocabulary_size();
        match tokens.iter().find(|id| **id >= size) {
            Some(id) => Err(Fault::bad_request(format!("Token id {id} is out of vocabulary"), Some("prompt"))),
            None => Ok(tokens),
        }
    }

    fn awake(&self) -> Result<(), Fault> {
        match self.state.asleep.load(Ordering::Relaxed) {
            true => Err(Fault::unavailable("The engine is asleep.")),
            false => Ok(()),
        }
    }
}

pub(crate) fn routes(app: Arc<App>, body_limit: usize) -> Router {
    let served = Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/{id}", get(responses::kept))
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
