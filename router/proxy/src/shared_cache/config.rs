//! Section `[shared_cache]`, and the address of Redis: treated as a secret as a whole, since it may hold a password.

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};
use serde::de::{Deserialize, Deserializer, Error};
use smart_default::SmartDefault;
use vocabulary::{ByteCount, TimeSpan};

use vocabulary::Secret;

/// Section `[shared_cache]`.
#[derive(Clone, Debug, serde::Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct SharedCacheConfig {
    /// Redis or Valkey that all routers share. Without it each router has a cache of its own.
    pub redis_url: Option<RedisUrl>,
    /// Secret of at least 16 characters from which the key is derived that encrypts values in Redis; the same at every
    /// router. Required with Redis: transcripts and token checkpoints are people's texts.
    pub encryption_secret: Option<Secret>,
    /// Stores values in Redis unencrypted, readable for everybody who reaches it, instead of a secret.
    pub allow_plaintext: bool,
    /// Namespace of these routers' keys; defaults to the cluster's id. Routers with the same namespace share their
    /// values.
    pub key_prefix: Option<String>,
    /// Maximum time that a request waits for Redis, per call.
    #[default(TimeSpan::millis(30))]
    pub timeout: TimeSpan,
    /// Memory for the local cache in each router.
    #[default(ByteCount::mebibytes(256))]
    pub memory_limit: ByteCount,
    /// How long values are kept after they were stored or last used.
    #[default(TimeSpan::seconds(24 * 3600))]
    pub ttl: TimeSpan,
    /// Largest transcript of one response that is kept; 0 keeps none.
    #[default(ByteCount::mebibytes(1))]
    pub max_transcript_size: ByteCount,
}

impl SharedCacheConfig {
    /// Returns the path of a setting that is invalid in context, and what is accepted.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        let millis = self.timeout.0.as_millis();
        if !(1..=1000).contains(&millis) {
            return Some(("shared_cache.timeout", "accepted is \"1ms\" to \"1s\""));
        }
        if self.ttl.0.as_secs() == 0 || self.ttl.0.as_secs() > 365 * 24 * 3600 {
            return Some(("shared_cache.ttl", "accepted is \"1s\" to 365 days"));
        }
        let plain = |name: &str| {
            (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        if self.key_prefix.as_deref().is_some_and(|name| !plain(name)) {
            return Some(("shared_cache.key_prefix", "accepted are 1 to 64 letters, digits, '-', '_' and '.'"));
        }
        if self.max_transcript_size.0 > 64 << 20 {
            return Some(("shared_cache.max_transcript_size", "accepted is 0 to \"64MiB\""));
        }
        match (&self.redis_url, &self.encryption_secret, self.allow_plaintext) {
            (_, Some(secret), _) if secret.is_short() => Some(("shared_cache.encryption_secret", SECRET_ACCEPTED)),
            (_, Some(_), true) => Some((
                "shared_cache.allow_plaintext",
                "accepted is true only without shared_cache.encryption_secret: values are encrypted or they are not",
            )),
            (Some(_), None, false) => Some(("shared_cache.encryption_secret", SECRET_ACCEPTED)),
            _ => None,
        }
    }
}

const SECRET_ACCEPTED: &str = "accepted are 16 characters or more, the same at every router. The secret encrypts what the \
    routers store in Redis, clients' messages included. To store it unencrypted, set shared_cache.allow_plaintext = true";

/// The address of Redis, which may hold a password.
#[derive(Clone, Debug)]
pub struct RedisUrl {
    url: Secret,
    address: String,
    is_exposed: bool,
    has_password: bool,
}

const ACCEPTED: &str =
    "accepted is redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// for TLS, or unix:///PATH";

impl RedisUrl {
    /// Parses a URL. The error never contains it, since it may hold a password.
    pub fn parse(url: &str) -> Result<Self, &'static str> {
        let known = ["redis://", "rediss://", "unix://"].iter().any(|scheme| url.starts_with(scheme));
        let connection = known.then(|| url.into_connection_info().ok()).flatten().ok_or(ACCEPTED)?;
        let address = match connection.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => format!("{host}:{port}"),
            ConnectionAddr::Unix(path) => path.display().to_string(),
            _ => return Err(ACCEPTED),
        };
        let exposed = matches!(connection.addr(), ConnectionAddr::Tcp(host, _) if !is_loopback(host));
        let has_password = connection.redis_settings().password().is_some();
        Ok(Self { url: Secret::from(url), address, is_exposed: exposed, has_password })
    }

    /// Returns host and port, or a path: for the log.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether the URL contains a password.
    pub fn has_password(&self) -> bool {
        self.has_password
    }

    /// Whether the connection crosses a network unencrypted.
    pub(super) fn is_exposed(&self) -> bool {
        self.is_exposed
    }

    /// Returns the connection parameters for the client.
    pub(super) fn connection(&self) -> ConnectionInfo {
        self.url.expose().into_connection_info().expect("it was read when it was parsed")
    }
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
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

    fn read(text: &str) -> Result<SharedCacheConfig, String> {
        toml::from_str(text).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn a_redis_url_shows_its_address_and_hides_its_password() {
        for (url, address) in [
            ("redis://h", "h:6379"),
            ("redis://u:hunter2@h:1/3", "h:1"),
            ("rediss://:hunter2@h:2", "h:2"),
            ("unix:///run/redis.sock", "/run/redis.sock"),
        ] {
            let config = read(&format!("redis_url = {url:?}")).unwrap();
            assert_eq!(config.redis_url.as_ref().unwrap().address(), address);
            assert!(!format!("{config:?}").contains("hunter2"), "{config:?}");
        }
    }

    #[test]
    fn redis_requires_a_secret_unless_plaintext_is_set() {
        let problem = |text: &str| read(text).unwrap().problem().map(|(path, _)| path);
        let redis = "redis_url = \"redis://h\"\n";
        assert_eq!(problem(redis), Some("shared_cache.encryption_secret"));
        assert_eq!(
            problem(&format!("{redis}encryption_secret = \"123456789012345\"")),
            Some("shared_cache.encryption_secret")
        );
        assert_eq!(problem(&format!("{redis}encryption_secret = \"1234567890123456\"")), None);
        assert_eq!(problem(&format!("{redis}allow_plaintext = true")), None);
        assert_eq!(
            problem(
                "allow_plaintext = true
encryption_secret = \"1234567890123456\""
            ),
            Some("shared_cache.allow_plaintext")
        );
        assert_eq!(problem(""), None);
    }

    #[test]
    fn only_loopback_and_tls_connections_are_private() {
        for (url, exposed) in [
            ("redis://10.0.0.1", true),
            ("redis://cache.example:1", true),
            ("redis://127.0.0.2:1", false),
            ("redis://localhost", false),
            ("redis://[::1]:1", false),
            ("rediss://cache.example", false),
            ("unix:///run/redis.sock", false),
        ] {
            assert_eq!(RedisUrl::parse(url).unwrap().is_exposed(), exposed, "{url}");
        }
    }

    #[test]
    fn an_invalid_redis_url_is_rejected_without_being_printed() {
        for url in ["hunter2", "http://u:hunter2@h", "redis://u:hunter2@h:port", "redis://:hunter2@"] {
            let error = read(&format!("redis_url = {url:?}")).unwrap_err();
            assert!(error.contains("accepted is redis://") && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_setting_out_of_range_is_named() {
        assert_eq!(SharedCacheConfig::default().problem(), None);
        for (text, path) in [
            ("timeout = \"0s\"", "shared_cache.timeout"),
            ("timeout = \"5s\"", "shared_cache.timeout"),
            ("ttl = \"0s\"", "shared_cache.ttl"),
            ("key_prefix = \"a:b\"", "shared_cache.key_prefix"),
            ("key_prefix = \"\"", "shared_cache.key_prefix"),
            ("max_transcript_size = \"1GiB\"", "shared_cache.max_transcript_size"),
        ] {
            assert_eq!(read(text).unwrap().problem().map(|(path, _)| path), Some(path), "{text}");
        }
    }
}
