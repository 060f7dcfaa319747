//! Address of a worker, with its role.

use std::str::FromStr;
use std::sync::Arc;

use serde::Deserialize;

use crate::WorkerRole;
use crate::untrusted_text::truncated;

/// `http://host:port#role`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct WorkerUrl {
    /// Scheme, host and port, without a trailing slash.
    pub endpoint: Arc<str>,
    /// What stands behind `#`.
    pub role: Option<WorkerRole>,
}

/// A text that names no worker.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{text:?} {why}; accepted is http://HOST:PORT or https://HOST:PORT, optionally #prefill, #decode or #hybrid behind it"
)]
pub struct WorkerUrlError {
    text: String,
    why: &'static str,
}

impl FromStr for WorkerUrl {
    type Err = WorkerUrlError;

    fn from_str(text: &str) -> Result<Self, WorkerUrlError> {
        // A password stands before the host, and keys in a query.
        let shown = text.rsplit_once('@').map_or_else(|| text.to_owned(), |(_, host)| format!("...@{host}"));
        let shown = shown.split('?').next().unwrap_or_default();
        let refused = |why| Err(WorkerUrlError { text: truncated(shown), why });
        let (url, role) = match text.trim().split_once('#') {
            None => (text.trim(), None),
            Some((url, "prefill")) => (url, Some(WorkerRole::Prefill)),
            Some((url, "decode")) => (url, Some(WorkerRole::Decode)),
            Some((url, "hybrid")) => (url, Some(WorkerRole::Hybrid)),
            Some((_, _)) => return refused("has an unknown role"),
        };
        // People copy the base URL of an OpenAI client.
        let url = url.trim_end_matches('/');
        let url = url.strip_suffix("/v1").unwrap_or(url);
        let Ok(uri) = url.parse::<http::Uri>() else { return refused("is not a URL") };
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return refused("has no scheme or no host");
        };
        if !matches!(scheme, "http" | "https") {
            return refused("is neither http nor https");
        }
        if authority.as_str().contains('@') || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return refused("has more than scheme, host and port");
        }
        Ok(Self { endpoint: format!("{scheme}://{authority}").to_ascii_lowercase().into(), role })
    }
}

impl<'de> Deserialize<'de> for WorkerUrl {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
