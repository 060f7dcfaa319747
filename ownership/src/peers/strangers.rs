//! Callers that TLS kept out: counted, and told of in the log now and then.

use std::net::SocketAddr;
use std::time::Instant;

use crate::peers::seldom::Seldom;

/// Callers that did not come in.
#[derive(Debug, Default)]
pub(crate) struct Strangers(Seldom);

impl Strangers {
    pub(crate) fn count(&self) -> u64 {
        self.0.count()
    }

    pub(crate) fn came(&self, from: SocketAddr, why: &str) {
        if let Some(unsaid) = self.0.note(Instant::now()) {
            tracing::warn!(%from, why, unsaid, "a caller did not come in as another node: TLS refused it");
        }
    }
}
