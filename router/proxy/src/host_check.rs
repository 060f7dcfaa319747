//! Host and Origin checks of both listeners: they keep web pages of other sites away from what only loopback protects.
//!
//! A page that rebinds its name to 127.0.0.1 is same-origin to its browser and sends its own name as `Host`. A page of
//! another site sends its `Origin` with every POST, and browsers send `text/plain` without a preflight request. The
//! checks use headers only, and never look at a token or a key.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Version, header};
use serde::Deserialize;

use vocabulary::truncated;

/// Section `[server]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// Host names by which clients may call a listener without keys or tokens, in addition to IP addresses and
    /// `localhost`.
    pub allowed_hosts: Vec<HostName>,
    /// Origins of web pages and applications that may send requests to both listeners, in addition to the listener's
    /// own.
    pub allowed_origins: Vec<WebOrigin>,
}

/// Name of a host in lower case, without a port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostName(Box<str>);

/// Scheme, host and port of a web page, as RFC 6454 compares them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WebOrigin {
    scheme: Box<str>,
    host: Box<str>,
    /// `None` where the scheme has no default port.
    port: Option<u16>,
}

/// A setting that is not a host name.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no host name; accepted is a name without scheme and port, in full (no wildcards), for example router.internal"
)]
pub struct NotAHost(String);

/// A setting that is not an origin.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no origin; accepted is SCHEME://HOST or SCHEME://HOST:PORT, for example https://ui.example")]
pub struct NotAnOrigin(String);

/// Splits `HOST[:PORT]`; the host is in lower case, an IPv6 address in brackets.
fn split_host_port(authority: &str) -> Option<HostPort> {
    let parsed = authority.parse::<Authority>().ok().filter(|_| !authority.contains('@'))?;
    let host = parsed.host();
    let port = match authority.strip_prefix(host)? {
        "" | ":" => None,
        rest => Some(rest.strip_prefix(':')?.parse().ok()?),
    };
    (!host.is_empty()).then(|| (host.to_ascii_lowercase().into(), port))
}

impl FromStr for HostName {
    type Err = NotAHost;

    fn from_str(text: &str) -> Result<Self, NotAHost> {
        match split_host_port(text) {
            Some((host, None)) if !text.ends_with(':') && !text.contains('*') => Ok(Self(host)),
            _ => Err(NotAHost(truncated(text))),
        }
    }
}

impl FromStr for WebOrigin {
    type Err = NotAnOrigin;

    fn from_str(text: &str) -> Result<Self, NotAnOrigin> {
        let parts = text.split_once("://").and_then(|(scheme, authority)| Some((scheme, split_host_port(authority)?)));
        let is_scheme = |scheme: &str| {
            scheme.starts_with(|first: char| first.is_ascii_alphabetic())
                && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
        };
        match parts {
            Some((scheme, (host, port))) if is_scheme(scheme) && !host.contains('*') => {
                Ok(Self::new(scheme, host, port))
            }
            _ => Err(NotAnOrigin(truncated(text))),
        }
    }
}

impl WebOrigin {
    fn new(scheme: &str, host: Box<str>, port: Option<u16>) -> Self {
        let scheme = scheme.to_ascii_lowercase();
        let usual = match scheme.as_str() {
            "http" => Some(80),
            "https" => Some(443),
            _ => None,
        };
        Self { scheme: scheme.into(), host, port: port.or(usual) }
    }
}

macro_rules! from_text {
    ($type:ty) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
from_text!(HostName);
from_text!(WebOrigin);

/// Whether callers of a listener authenticate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallerAuthentication {
    /// Each sends a key or a token, which no web page of another site has.
    Authenticated,
    /// No caller does; `setting` would require it.
    Anonymous {
        /// Name of the setting.
        setting: &'static str,
    },
}

/// What one listener accepts.
#[derive(Clone, Debug)]
pub struct HostRules {
    /// Names and origins.
    pub config: ServerConfig,
    /// Whether its callers authenticate.
    pub callers: CallerAuthentication,
    /// How URLs of the listener begin.
    pub scheme: &'static str,
}

/// Checks of one listener.
#[derive(Clone, Copy, Debug)]
pub struct HostCheck<'a> {
    config: &'a ServerConfig,
    callers: CallerAuthentication,
    scheme: &'static str,
}

/// Why a request was refused before its path was examined.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HostRefusal {
    /// HTTP/1.1 requires a `Host` header (RFC 9112, section 3.2).
    #[error("The request has no Host header, which HTTP/1.1 requires. Send one.")]
    NoHost,
    /// There are several, or it is not a valid host.
    #[error(
        "The Host header must be one host, optionally with a port. Send it once, for example 'Host: localhost:8080'."
    )]
    BadHost,
    /// A name that this listener does not accept.
    #[error(
        "The Host '{host}' is not accepted: without {setting} it must be an IP address, localhost or one of server.allowed_hosts. Add the name to server.allowed_hosts, or set {setting}."
    )]
    ForeignHost {
        /// As sent, truncated.
        host: String,
        /// The setting that would make callers authenticate.
        setting: &'static str,
    },
    /// Sent by a web page of another site.
    #[error(
        "The Origin '{origin}' is not accepted: it is neither this listener's own nor one of server.allowed_origins. Add it there if its pages may send requests."
    )]
    ForeignOrigin {
        /// As sent, truncated.
        origin: String,
    },
}

impl<'a> HostCheck<'a> {
    /// Returns the checks by these rules.
    pub fn new(rules: &'a HostRules) -> Self {
        Self { config: &rules.config, callers: rules.callers, scheme: rules.scheme }
    }

    /// Whether the request's `Host` and `Origin` are accepted.
    pub fn check(&self, head: &Parts) -> Result<(), HostRefusal> {
        let host = requested_host(head)?;
        if let CallerAuthentication::Anonymous { setting } = self.callers
            && let Some((name, _)) = &host
            && !is_ip_or_localhost(name)
            && !self.config.allowed_hosts.iter().any(|allowed| allowed.0 == *name)
        {
            return Err(HostRefusal::ForeignHost { host: truncated(name), setting });
        }
        let mut origins = head.headers.get_all(header::ORIGIN).iter();
        let Some(origin) = origins.next() else { return Ok(()) };
        let own = host.map(|(name, port)| WebOrigin::new(self.scheme, name, port));
        let text = String::from_utf8_lossy(origin.as_bytes());
        let is_accepted = |sent: &WebOrigin| own.as_ref() == Some(sent) || self.config.allowed_origins.contains(sent);
        match text.parse() {
            Ok(sent) if origins.next().is_none() && is_accepted(&sent) => Ok(()),
            _ => Err(HostRefusal::ForeignOrigin { origin: truncated(&text) }),
        }
    }
}

/// A host, with its port if given.
type HostPort = (Box<str>, Option<u16>);

/// Returns the host and port that the client called: those of an absolute target, else of `Host`. `None` for HTTP/1.0
/// without either.
fn requested_host(head: &Parts) -> Result<Option<HostPort>, HostRefusal> {
    let mut hosts = head.headers.get_all(header::HOST).iter();
    let sent = match (hosts.next(), hosts.next()) {
        (_, Some(_)) => return Err(HostRefusal::BadHost),
        (Some(sent), None) => Some(sent.to_str().ok().and_then(split_host_port).ok_or(HostRefusal::BadHost)?),
        (None, None) if head.version < Version::HTTP_11 => None,
        (None, None) => return Err(HostRefusal::NoHost),
    };
    match head.uri.authority() {
        Some(authority) => split_host_port(authority.as_str()).map(Some).ok_or(HostRefusal::BadHost),
        None => Ok(sent),
    }
}

/// Whether the host resolves without a name service.
fn is_ip_or_localhost(host: &str) -> bool {
    let in_brackets = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match in_brackets {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => matches!(host, "localhost" | "localhost.") || host.parse::<Ipv4Addr>().is_ok(),
    }
}

/// Headers that carry a client's credentials.
const CREDENTIALS: [HeaderName; 4] =
    [header::AUTHORIZATION, header::COOKIE, HeaderName::from_static("x-api-key"), HeaderName::from_static("api-key")];

/// Removes a client's credentials.
pub(crate) fn remove_credentials(headers: &mut HeaderMap<HeaderValue>) {
    CREDENTIALS.iter().for_each(|name| drop(headers.remove(name)));
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn config() -> ServerConfig {
        let text = "allowed_hosts = [\"Router.internal\"]\nallowed_origins = [\"https://ui.example\", \"app://desk\"]";
        toml::from_str(text).unwrap()
    }

    fn check(callers: CallerAuthentication, version: Version, headers: &[(&str, &str)]) -> Result<(), &'static str> {
        let mut request = Request::post("/v1/completions").version(version);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (head, ()) = request.body(()).unwrap().into_parts();
        let config = config();
        HostCheck { config: &config, callers, scheme: "http" }.check(&head).map_err(|refusal| match refusal {
            HostRefusal::NoHost => "no host",
            HostRefusal::BadHost => "bad host",
            HostRefusal::ForeignHost { .. } => "host",
            HostRefusal::ForeignOrigin { .. } => "origin",
        })
    }

    const ANONYMOUS: CallerAuthentication = CallerAuthentication::Anonymous { setting: "auth.keys_file" };

    #[test]
    fn without_keys_only_ips_localhost_and_configured_hosts_are_accepted() {
        let check = |callers, host| check(callers, Version::HTTP_11, &[("host", host)]);
        for host in [
            "127.0.0.1:8080",
            "10.0.0.7",
            "[::1]:8080",
            "[fd00::7]",
            "localhost",
            "LOCALHOST:1",
            "localhost.:8080",
            "router.INTERNAL:8080",
        ] {
            assert_eq!(check(ANONYMOUS, host), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "router.internal.evil.example",
            "notlocalhost",
            "0x7f.1",
            "2130706433",
            "127.0.0.1.",
            "localhost..",
            "[v1.x]",
        ] {
            assert!(check(ANONYMOUS, host).is_err(), "{host}");
            let with_keys = check(CallerAuthentication::Authenticated, host);
            assert!(with_keys == Ok(()) || with_keys == Err("bad host"), "{host}: {with_keys:?}");
        }
    }

    #[test]
    fn http_1_1_requires_exactly_one_host_header() {
        for callers in [ANONYMOUS, CallerAuthentication::Authenticated] {
            assert_eq!(check(callers, Version::HTTP_11, &[]), Err("no host"));
            assert_eq!(check(callers, Version::HTTP_10, &[]), Ok(()), "a load balancer's probe");
            let twice = [("host", "localhost"), ("host", "localhost")];
            assert_eq!(check(callers, Version::HTTP_11, &twice), Err("bad host"));
            for bad in ["", "a b", "user@localhost", "localhost:port", "localhost:99999", "localhost/x"] {
                assert_eq!(check(callers, Version::HTTP_11, &[("host", bad)]), Err("bad host"), "{bad}");
            }
        }
    }

    #[test]
    fn an_absolute_target_overrides_the_host_header() {
        let refused = |target: &str| {
            let request = Request::get(target).header("host", "127.0.0.1").body(()).unwrap();
            let config = config();
            let check = HostCheck { config: &config, callers: ANONYMOUS, scheme: "http" };
            check.check(&request.into_parts().0).is_err()
        };
        assert!(refused("http://evil.example/livez") && !refused("http://127.0.0.1/livez"));
    }

    #[test]
    fn only_the_listeners_own_or_a_configured_origin_is_accepted() {
        let check = |host, origin| check(ANONYMOUS, Version::HTTP_11, &[("host", host), ("origin", origin)]);
        for (host, origin) in [
            ("127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("localhost", "http://localhost"),
            ("localhost:80", "http://localhost"),
            ("[::1]:8080", "http://[::1]:8080"),
            ("127.0.0.1:8080", "https://ui.example"),
            ("127.0.0.1:8080", "https://UI.example:443"),
            ("127.0.0.1:8080", "app://desk"),
        ] {
            assert_eq!(check(host, origin), Ok(()), "{host} {origin}");
        }
        for (host, origin) in [
            ("127.0.0.1:8080", "http://evil.example"),
            ("127.0.0.1:8080", "null"),
            ("127.0.0.1:8080", ""),
            ("127.0.0.1:8080", "http://127.0.0.1:8081"),
            ("127.0.0.1:8080", "https://127.0.0.1:8080"),
            ("127.0.0.1:8080", "http://localhost:8080"),
            ("127.0.0.1:8080", "http://ui.example"),
            ("127.0.0.1:8080", "https://ui.example.evil.example"),
            ("localhost", "http://localhost/"),
        ] {
            assert_eq!(check(host, origin), Err("origin"), "{host} {origin}");
        }
    }

    #[test]
    fn origins_are_checked_even_when_callers_authenticate() {
        let check = |headers: &[_]| check(CallerAuthentication::Authenticated, Version::HTTP_11, headers);
        assert_eq!(check(&[("host", "a.example"), ("origin", "http://a.example")]), Ok(()));
        assert_eq!(check(&[("host", "a.example"), ("origin", "http://b.example")]), Err("origin"));
        let twice = [("host", "a.example"), ("origin", "http://a.example"), ("origin", "http://b.example")];
        assert_eq!(check(&twice), Err("origin"));
        let old = super::tests::check(
            CallerAuthentication::Authenticated,
            Version::HTTP_10,
            &[("origin", "http://a.example")],
        );
        assert_eq!(old, Err("origin"), "without a host nothing is its own");
    }

    #[test]
    fn an_invalid_host_or_origin_setting_names_what_is_accepted() {
        for bad in ["http://a", "a:1", "a:", "", "a/b", "u@a", "*", "*.corp"] {
            let message = bad.parse::<HostName>().unwrap_err().to_string();
            assert!(message.contains("accepted is a name without scheme and port"), "{message}");
        }
        for bad in ["a", "null", "*", "http://", "http://a/b", "http://a/", "://a", "http://u@a"] {
            let told = bad.parse::<WebOrigin>().unwrap_err().to_string();
            assert!(told.contains("accepted is SCHEME://HOST"), "{told}");
        }
    }

    #[test]
    fn a_rejected_request_names_the_setting() {
        let host = HostRefusal::ForeignHost { host: "evil.example".into(), setting: "auth.keys_file" }.to_string();
        assert!(host.contains("evil.example") && host.contains("server.allowed_hosts"), "{host}");
        assert!(host.contains("auth.keys_file"), "{host}");
        let origin = HostRefusal::ForeignOrigin { origin: "null".into() }.to_string();
        assert!(origin.contains("'null'") && origin.contains("server.allowed_origins"), "{origin}");
    }
}
