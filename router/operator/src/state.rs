//! Shared state of the operator routes: handles of the router, settings, tokens, audit log, OpenAPI document.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::FromRef;

use super::access::{OperatorTokens, TokensFileError};
use super::audit::AuditLog;
use super::drain::DrainRegistry;
use super::idempotency::IdempotencyStore;
use super::openapi::OpenApiDocument;
use super::settings::OperatorSettings;
use super::sources::{FleetSources, OperatorParts, RoutingSources, SessionMover};
use super::watch::WatcherSlots;
use proxy::ledger_access::LedgerAccess;
use proxy::telemetry::metrics::Metrics;
use proxy::watched_files::ReloadReporter;

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
    pub(super) parts: Arc<OperatorParts>,
    pub(super) settings: Arc<OperatorSettings>,
    pub(super) tokens: Arc<OperatorTokens>,
    pub(super) audit: Arc<AuditLog>,
    pub(super) document: Arc<OpenApiDocument>,
    pub(super) idempotency: Arc<IdempotencyStore>,
    watchers: WatcherSlots,
    drains: Arc<DrainRegistry>,
    /// Whether this router is shutting down.
    shutting_down: Arc<AtomicBool>,
}

impl OperatorState {
    /// Checks that the tokens can be read and the audit log can be opened, before the ledger is.
    pub fn check(settings: &OperatorSettings) -> Result<(), OperatorStartError> {
        OperatorTokens::open(settings.tokens_file.as_deref())?;
        open_audit(settings, &Metrics::default()).map(drop)
    }

    /// Reads the tokens and opens the audit log.
    pub fn open(parts: OperatorParts, settings: OperatorSettings) -> Result<Self, OperatorStartError> {
        let audit = open_audit(&settings, &parts.metrics)?;
        Ok(Self {
            tokens: Arc::new(OperatorTokens::open(settings.tokens_file.as_deref())?),
            audit: Arc::new(audit),
            document: Arc::new(OpenApiDocument::default()),
            idempotency: Arc::default(),
            watchers: WatcherSlots::default(),
            drains: Arc::default(),
            shutting_down: Arc::default(),
            parts: Arc::new(parts),
            settings: Arc::new(settings),
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
        let followed = ReloadReporter { name: "operator_tokens", stale: self.parts.stale_files.clone() };
        self.tokens.clone().follow_file(Duration::from_secs(5), followed)
    }
}

fn open_audit(settings: &OperatorSettings, metrics: &Metrics) -> Result<AuditLog, OperatorStartError> {
    let folder = settings.audit_folder.clone();
    let audit = AuditLog::open(&folder, settings.max_audit_log_size, metrics.process.audit_failed.clone());
    audit.map_err(|source| OperatorStartError::Audit { folder, source })
}

/// Lets handlers extract a part of the state.
macro_rules! extracted_parts {
    ($($part:ty: |$state:ident| $value:expr;)*) => {$(
        impl FromRef<OperatorState> for $part {
            fn from_ref($state: &OperatorState) -> Self {
                $value.clone()
            }
        }
    )*};
}

extracted_parts! {
    Arc<OperatorParts>: |state| state.parts;
    LedgerAccess: |state| state.parts.ledger;
    FleetSources: |state| state.parts.fleet;
    RoutingSources: |state| state.parts.routing;
    SessionMover: |state| state.parts.sessions;
    Arc<OperatorSettings>: |state| state.settings;
    Arc<OperatorTokens>: |state| state.tokens;
    Arc<OpenApiDocument>: |state| state.document;
    WatcherSlots: |state| state.watchers;
    Arc<DrainRegistry>: |state| state.drains;
}
