//! Endpoints for operators: version, health and load, and the admin calls that no router may forward.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use vocabulary::WorkerRole;

use super::SimState;
use super::errors::ErrorResponse;
use super::request_fields::{RequestFields, wrong};
use super::sim_state::VERSION;
use crate::engine_api::KvConnector;

/// Returns whether the engine is alive, without a body.
pub(crate) async fn health(State(app): State<Arc<SimState>>) -> StatusCode {
    if app.driver.is_dead() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}

/// SGLang's `/server_info`.
pub(crate) async fn server_info(State(app): State<Arc<SimState>>) -> Response {
    if app.transfers.connector != KvConnector::Sglang {
        return (StatusCode::NOT_FOUND, Json(json!({"detail": "Not Found"}))).into_response();
    }
    let mode = if app.transfers.role == WorkerRole::Hybrid { "null" } else { app.transfers.role.as_str() };
    let port = app.transfers.bootstrap.port();
    Json(json!({"disaggregation_mode": mode, "disaggregation_bootstrap_port": port, "dp_size": 1})).into_response()
}

/// Returns the number of running requests.
pub(crate) async fn load(State(app): State<Arc<SimState>>) -> Json<Value> {
    let (stats, _) = app.driver.stats_and_latencies();
    Json(json!({"server_load": stats.running + stats.waiting + stats.pulling}))
}

pub(crate) async fn models(State(app): State<Arc<SimState>>) -> Json<Value> {
    let mut data = vec![model(&app, &app.model, Value::Null)];
    data.extend(app.state.adapters.lock().names().map(|name| model(&app, name, json!(app.model))));
    Json(json!({"object": "list", "data": data}))
}

fn model(state: &SimState, name: &str, parent: Value) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": state.started as u64,
        "owned_by": "vllm",
        "root": name,
        "parent": parent,
        "max_model_len": state.profile.max_model_len,
        "permission": [],
    })
}

pub(crate) async fn kv_event_sources(State(app): State<Arc<SimState>>) -> Json<Value> {
    Json(json!({"0": {
        "enable_kv_cache_events": true,
        "publisher": "zmq",
        "endpoint": app.endpoints.events,
        "replay_endpoint": app.endpoints.replay,
        "topic": &*app.endpoints.topic,
    }}))
}

pub(crate) async fn reset_prefix_cache(State(app): State<Arc<SimState>>) -> Response {
    app.count_admin_request();
    let cleared = app.driver.with_engine(|engine, _| engine.reset_prefix_cache());
    tracing::info!(cleared, "prefix cache reset asked for");
    Json(json!({"success": cleared})).into_response()
}

/// Discards all KV and serves no requests until woken.
pub(crate) async fn sleep(State(app): State<Arc<SimState>>) -> StatusCode {
    app.count_admin_request();
    app.state.asleep.store(true, Ordering::Relaxed);
    app.driver.with_engine(|engine, _| engine.reset_prefix_cache());
    StatusCode::OK
}

/// Ends sleep mode.
pub(crate) async fn wake_up(State(app): State<Arc<SimState>>) -> StatusCode {
    app.count_admin_request();
    app.state.asleep.store(false, Ordering::Relaxed);
    StatusCode::OK
}

pub(crate) async fn is_sleeping(State(app): State<Arc<SimState>>) -> Json<Value> {
    Json(json!({"is_sleeping": app.state.asleep.load(Ordering::Relaxed)}))
}

/// Adds an adapter.
pub(crate) async fn load_adapter(State(app): State<Arc<SimState>>, body: Bytes) -> Result<String, ErrorResponse> {
    app.count_admin_request();
    let name = adapter_name(&body)?;
    let added = app.state.adapters.lock().add(name.clone());
    added.map_err(|_| wrong("lora_name", "the name is taken, too long, or too many adapters are loaded"))?;
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

/// Removes an adapter.
pub(crate) async fn unload_adapter(State(app): State<Arc<SimState>>, body: Bytes) -> Result<String, ErrorResponse> {
    app.count_admin_request();
    let name = adapter_name(&body)?;
    match app.state.adapters.lock().remove(&name) {
        true => Ok(format!("Success: LoRA adapter '{name}' removed successfully.")),
        false => {
            Err(ErrorResponse::not_found(format!("The lora adapter '{name}' cannot be found."), Some("lora_name")))
        }
    }
}

fn adapter_name(body: &Bytes) -> Result<String, ErrorResponse> {
    let fields = RequestFields::parse(body)?;
    let name = fields.text("lora_name")?.filter(|name| !name.is_empty());
    name.map(str::to_owned).ok_or_else(|| wrong("lora_name", "Field required"))
}
