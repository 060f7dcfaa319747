//! The way of one request, from bytes to bytes. Control flow only: what each step does lives in its own file.

pub mod receipt;
pub mod session_key;
pub mod single_flight;
pub mod steering;

use std::sync::Arc;

use axum::response::Response;

use crate::error::ApiError;
use crate::forward::{Learn, Where, forward};
use crate::gateway::Gateway;
use crate::incoming::{Endpoint, Envelope, Incoming};

/// Serves one generation request.
pub async fn serve_generation(
    gateway: &Arc<Gateway>,
    _endpoint: Endpoint,
    request: Incoming,
) -> Result<Response, ApiError> {
    let envelope = Envelope::read(&request.body)?;
    forward(gateway, &request, Where::Model(envelope.model.as_deref()), Learn::Nothing).await
}
