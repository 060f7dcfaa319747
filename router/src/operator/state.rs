//! Shared state of the operator routes: application state, tokens, audit log, OpenAPI document.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::FromRef;
use tokio::sync::Semaphore;

use super::access::{OperatorTokens, TokensFileError};
use super::audit::AuditLog;
use super::drain::DrainRegistry;
use super::idempotency::IdempotencyStore;
use super::openapi::OpenApiDocument;
use super::watch::MAX_WATCHERS;
use crate::app_state::AppState;
use crate::config::Config;
use crate::telemetry::metrics::Metrics;

/// The operator listener cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OperatorStartError {
    /// The tokens file was rejected.
    #[error(transparent)]
    Tokens(#[from] TokensFileError),
    /// The audit log cannot be opened.
    #[error("the audit log in {folder} cannot be opened: {source}", folder = folder.display())]
    Audit {
        /// Folder of the audit log.
        folder: std::path::PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

/// The state of the operators' routes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct OperatorState {
    pub(super) gateway: Arc<AppState>,
    pub(super) tokens: Arc<OperatorTokens>,
    pub(super) audit: Arc<AuditLog>,
    pub(super) document: Arc<OpenApiDocument>,
    pub(super) watchers: Arc<Semaphore>,
    pub(super) idempotency: Arc<IdempotencyStore>,
    pub(super) drains: Arc<DrainRegistry>,
    /// Whether this router is shutting down.
    shutting_down: Arc<AtomicBool>,
}

impl OperatorState {
    /// Checks that the tokens can be read and the audit log can be opened, before the ledger is.
    pub fn check(config: &Config) -> Result<(), OperatorStartError> {
        OperatorTokens::open(config.operator.tokens_file.as_deref())?;
        open_audit(config, &Metrics::default()).map(drop)
    }

    /// Reads the tokens and opens the audit log.
    pub fn open(gateway: &Arc<AppState>) -> Result<Self, OperatorStartError> {
        let config = &gateway.config;
        let audit = open_audit(config, &gateway.metrics)?;
        Ok(Self {
            gateway: gateway.clone(),
            tokens: Arc::new(OperatorTokens::open(config.operator.tokens_file.as_deref())?),
            audit: Arc::new(audit),
            document: Arc::new(OpenApiDocument::default()),
            watchers: Arc::new(Semaphore::new(MAX_WATCHERS)),
            idempotency: Arc::default(),
            drains: Arc::default(),
            shutting_down: Arc::default(),
        })
    }

    /// Marks this router as shutting down: `/readyz` fails from now on, so that load balancers move clients away.
    pub fn begin_shutdown(&self) {
        self.shutting_down.store(true, Ordering::Relaxed);
    }

    /// Returns whether this router is shutting down.
    pub(super) fn is_shutting_down(&self) -> bool {
        self.shutting_down.load(Ordering::Relaxed)
    }

    /// Follows changes of the tokens file forever.
    pub fn follow_tokens(&self) -> impl Future<Output = ()> + Send + use<> {
        self.tokens.clone().follow_file(Duration::from_secs(5), self.gateway.watched_files("operator_tokens"))
    }
}

fn open_audit(config: &Config, metrics: &Metrics) -> Result<AuditLog, OperatorStartError> {
    let folder = config.ledger.data_dir.join("audit");
    let audit =
        AuditLog::open(&folder, config.operator.max_audit_log_size.0 as u64, metrics.process.audit_failed.clone());
    audit.map_err(|source| OperatorStartError::Audit { folder, source })
}

impl FromRef<OperatorState> for Arc<AppState> {
    fn from_ref(desk: &OperatorState) -> Self {
        desk.gateway.clone()
    }
}
