//! What the operators' routes share: the gateway, the tokens, the audit log, the document.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::FromRef;
use tokio::sync::Semaphore;

use super::access::{Tokens, TokensError};
use super::audit::Audit;
use super::document::Document;
use super::emptying::Emptyings;
use super::repeats::Repeats;
use super::watch::WATCHERS;
use crate::config::Config;
use crate::gateway::Gateway;
use crate::telemetry::metrics::Metrics;

/// Why the operators' listener cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum DeskError {
    /// The tokens file was refused.
    #[error(transparent)]
    Tokens(#[from] TokensError),
    /// The audit log cannot be opened.
    #[error("the audit log in {folder} cannot be opened: {source}", folder = folder.display())]
    Audit {
        /// Which folder.
        folder: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// The state of the operators' routes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Desk {
    pub(super) gateway: Arc<Gateway>,
    pub(super) tokens: Arc<Tokens>,
    pub(super) audit: Arc<Audit>,
    pub(super) document: Arc<Document>,
    pub(super) watchers: Arc<Semaphore>,
    pub(super) repeats: Arc<Repeats>,
    pub(super) emptyings: Arc<Emptyings>,
    /// Whether this router was asked to end.
    ending: Arc<AtomicBool>,
}

impl Desk {
    /// Whether the tokens can be read and the audit log can be opened, before the ledger is.
    pub fn check(config: &Config) -> Result<(), DeskError> {
        Tokens::open(config.operator.tokens_file.as_deref())?;
        open_audit(config, &Metrics::default()).map(drop)
    }

    /// Reads the tokens and opens the audit log.
    pub fn open(gateway: &Arc<Gateway>) -> Result<Self, DeskError> {
        let config = &gateway.config;
        let audit = open_audit(config, &gateway.metrics)?;
        Ok(Self {
            gateway: gateway.clone(),
            tokens: Arc::new(Tokens::open(config.operator.tokens_file.as_deref())?),
            audit: Arc::new(audit),
            document: Arc::new(Document::default()),
            watchers: Arc::new(Semaphore::new(WATCHERS)),
            repeats: Arc::default(),
            emptyings: Arc::default(),
            ending: Arc::default(),
        })
    }

    /// This router ends: who looks at `/readyz` sends its clients elsewhere from now on.
    pub fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
    }

    /// Whether it does.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    /// Follows the tokens file for ever.
    pub fn follow_tokens(&self) -> impl Future<Output = ()> + Send + use<> {
        self.tokens.clone().follow_file(Duration::from_secs(5), self.gateway.followed("operator_tokens"))
    }
}

fn open_audit(config: &Config, metrics: &Metrics) -> Result<Audit, DeskError> {
    let folder = config.ledger.data_dir.join("audit");
    let audit = Audit::open(&folder, config.operator.audit_size.0 as u64, metrics.process.audit_failed.clone());
    audit.map_err(|source| DeskError::Audit { folder, source })
}

impl FromRef<Desk> for Arc<Gateway> {
    fn from_ref(desk: &Desk) -> Self {
        desk.gateway.clone()
    }
}
