//! HTTP server of the simulated worker, compatible with vLLM's OpenAI server.

mod adapters;
mod admin;
mod chat;
mod choice;
mod completions;
mod errors;
mod generate;
mod generation_params;
mod messages;
mod metrics;
mod pooling;
mod request_fields;
mod responses;
mod sim_state;
mod sse_writer;
mod tokenize;
mod transfer_fields;
mod transfer_service;
mod usage;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;

pub(crate) use adapters::AdapterNames;
pub(crate) use sim_state::{MutableSimState, SimState};
pub(crate) use transfer_fields::SideChannelIdentity;
pub(crate) use transfer_service::KvTransferResolver;

pub(crate) fn routes(state: Arc<SimState>, body_limit: usize) -> Router {
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
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize));
    let routes = Router::new()
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
    served
        .merge(routes)
        .merge(administered)
        .fallback(unknown)
        .layer(DefaultBodyLimit::max(body_limit))
        .with_state(state)
}

async fn unknown() -> Response {
    (StatusCode::NOT_FOUND, axum::Json(json!({"detail": "Not Found"}))).into_response()
}
