//! Section `[soft_state]`, and where Redis is: a secret as a whole, since it may hold a password.

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};
use serde::de::{Deserialize, Deserializer, Error};
use smart_default::SmartDefault;

use crate::auth::Secret;
use crate::config::units::{Size, Span};

/// Section `[soft_state]`.
#[derive(Clone, Debug, serde::Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct SoftStateConfig {
    /// Redis or Valkey that all routers share. Without one each router remembers for itself.
    pub redis: Option<RedisUrl>,
    /// What these routers' keys begin with; the cluster's id when missing. Routers share what they have in common here.
    pub namespace: Option<String>,
    /// Longest time that a request waits for Redis, each time it asks.
    #[default(Span::millis(30))]
    pub timeout: Span,
    /// Memory for it in each router.
    #[default(Size::mebibytes(256))]
    pub memory: Size,
    /// How long responses are remembered after they were made or last used.
    #[default(Span::seconds(24 * 3600))]
    pub ttl: Span,
    /// Largest transcript of one response that is kept; 0 keeps none.
    #[default(Size::mebibytes(1))]
    pub transcript: Size,
}

impl SoftStateConfig {
    /// What no single field can say: the path of the bad one, and what is accepted.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        let millis = self.timeout.0.as_millis();
        if !(1..=1000).contains(&millis) {
            return Some(("soft_state.timeout", "accepted is \"1ms\" to \"1s\""));
        }
        if self.ttl.0.as_secs() == 0 || self.ttl.0.as_secs() > 365 * 24 * 3600 {
            return Some(("soft_state.ttl", "accepted is \"1s\" to 365 days"));
        }
        let plain = |name: &str| {
            (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        if self.namespace.as_deref().is_some_and(|name| !plain(name)) {
            return Some(("soft_state.namespace", "accepted are 1 to 64 letters, digits, '-', '_' and '.'"));
        }
        if self.transcript.0 > 64 << 20 {
            return Some(("soft_state.transcript", "accepted is 0 to \"64MiB\""));
        }
        None
    }
}

/// Where Redis is.
#[derive(Clone, Debug)]
pub struct RedisUrl {
    url: Secret,
    place: String,
}

const ACCEPTED: &str =
    "accepted is redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// for TLS, or unix:///PATH";

impl RedisUrl {
    /// Reads a URL. An error never carries it: it may hold a password.
    pub fn parse(url: &str) -> Result<Self, &'static str> {
        let known = ["redis://", "rediss://", "unix://"].iter().any(|scheme| url.starts_with(scheme));
        let connection = known.then(|| url.into_connection_info().ok()).flatten().ok_or(ACCEPTED)?;
        let place = match connection.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => format!("{host}:{port}"),
            ConnectionAddr::Unix(path) => path.display().to_string(),
            _ => return Err(ACCEPTED),
        };
        Ok(Self { url: Secret::from(url), place })
    }

    /// Host and port, or a path: for the log.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// What the client connects to.
    pub(super) fn connection(&self) -> ConnectionInfo {
        self.url.expose().into_connection_info().expect("it was read when it was parsed")
    }
}

impl<'de> Deserialize<'de> for RedisUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let url = String::deserialize(deserializer)?;
        Self::parse(&url).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<SoftStateConfig, String> {
        toml::from_str(text).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn a_url_says_where_redis_is_and_keeps_its_password() {
        for (url, place) in [
            ("redis://h", "h:6379"),
            ("redis://u:hunter2@h:1/3", "h:1"),
            ("rediss://:hunter2@h:2", "h:2"),
            ("unix:///run/redis.sock", "/run/redis.sock"),
        ] {
            let config = read(&format!("redis = {url:?}")).unwrap();
            assert_eq!(config.redis.as_ref().unwrap().place(), place);
            assert!(!format!("{config:?}").contains("hunter2"), "{config:?}");
        }
    }

    #[test]
    fn a_bad_url_is_refused_without_being_printed() {
        for url in ["hunter2", "http://u:hunter2@h", "redis://u:hunter2@h:port", "redis://:hunter2@"] {
            let error = read(&format!("redis = {url:?}")).unwrap_err();
            assert!(error.contains("accepted is redis://") && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        assert_eq!(SoftStateConfig::default().problem(), None);
        for (text, path) in [
            ("timeout = 0", "soft_state.timeout"),
            ("timeout = \"5s\"", "soft_state.timeout"),
            ("ttl = 0", "soft_state.ttl"),
            ("namespace = \"a:b\"", "soft_state.namespace"),
            ("namespace = \"\"", "soft_state.namespace"),
            ("transcript = \"1GiB\"", "soft_state.transcript"),
        ] {
            assert_eq!(read(text).unwrap().problem().map(|(path, _)| path), Some(path), "{text}");
        }
    }
}
