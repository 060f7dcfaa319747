//! Errors of the fleet.

use std::sync::Arc;

/// Why a fleet cannot be started or changed.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// The HTTP client could not be created.
    #[error("no HTTP client for probes: {0}")]
    Client(#[from] reqwest::Error),
    /// An endpoint is listed twice.
    #[error("the worker {0} is listed twice")]
    DuplicateWorker(Arc<str>),
}
