//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use serde_json::{Value, json};

use super::SimState;
use super::chat::prompt_of;
use super::completions::prompts_of;
use super::errors::ErrorResponse;
use super::request_fields::{RequestFields, token_ids, wrong};

/// Converts text or a chat to tokens.
pub(crate) async fn tokenize(State(app): State<Arc<SimState>>, body: Bytes) -> Result<Json<Value>, ErrorResponse> {
    let fields = RequestFields::parse(&body)?;
    app.adapter_of(fields.text("model")?.unwrap_or(&app.model))?;
    let tokens = match fields.text("prompt")? {
        Some(_) => prompts_of(&app, &fields)?.concat(),
        None => prompt_of(&app, &fields)?,
    };
    let strings = fields.flag("return_token_strs")?;
    let texts = strings.then(|| tokens.iter().map(|id| app.codec.decode(&[*id])).collect::<Vec<_>>());
    Ok(Json(json!({
        "count": tokens.len(), "max_model_len": app.profile.max_model_len, "tokens": tokens, "token_strs": texts,
    })))
}

pub(crate) async fn detokenize(State(app): State<Arc<SimState>>, body: Bytes) -> Result<Json<Value>, ErrorResponse> {
    let fields = RequestFields::parse(&body)?;
    app.adapter_of(fields.text("model")?.unwrap_or(&app.model))?;
    let list = fields.list("tokens")?.ok_or_else(|| wrong("tokens", "Field required"))?;
    let tokens = app.check_vocabulary(token_ids(list, "tokens")?)?;
    Ok(Json(json!({"prompt": app.codec.decode(&tokens)})))
}
