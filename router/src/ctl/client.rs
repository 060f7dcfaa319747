//! The client to the operator API: endpoints in turn, a token, and what a way that broke means.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, ETAG, IF_MATCH};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use serde_json::Value;

use super::error::CtlError;
use crate::auth::Secret;
use crate::config::units::Span;
use crate::gateway::bearer;
use crate::server::tls::certificates;
use crate::upstream::{Outgoing, Upstream, UpstreamConfig, UpstreamError, WorkerBody};

/// Largest answer that is read as a whole.
const LARGEST: usize = 64 << 20;
/// How long the answer to a look may take to begin, before the next endpoint is asked.
pub(super) const LOOK: Span = Span::seconds(5);
/// Longest pause inside an answer: a quiet watch gives three signs of life in it.
const PAUSE: Span = Span::seconds(30);

/// Whom to ask, and how.
#[derive(Debug)]
pub(crate) struct ClientOptions {
    pub(crate) endpoints: Vec<String>,
    pub(crate) token: Option<Secret>,
    /// Longest waits for an answer to begin.
    pub(crate) waits: Waits,
    /// The authorities whose certificates are trusted, in place of the operating system's.
    pub(crate) cacert: Option<PathBuf>,
}

/// Longest waits for an answer to begin, and inside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Waits {
    /// Of a look, which may be asked of the next endpoint.
    pub(crate) look: Span,
    /// Of what the command is about.
    pub(crate) act: Span,
    /// Between two pieces of an answer.
    pub(crate) pause: Span,
}

impl Waits {
    /// Of a command whose own request may take so long.
    pub(crate) fn of(act: Span) -> Self {
        Self { look: LOOK, act, pause: PAUSE }
    }

    /// As a person asked for.
    pub(crate) fn within(timeout: Span) -> Self {
        Self { look: timeout, act: timeout, pause: PAUSE }
    }
}

#[derive(Debug)]
pub(crate) struct Got {
    pub(crate) json: Value,
    pub(crate) tag: Option<String>,
}

/// Talks to the first endpoint that can be reached.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    upstream: Upstream,
    pub(crate) endpoints: Vec<String>,
    /// The place of the endpoint that answered last: it is asked first, also with the write that follows a look.
    answered: Arc<AtomicUsize>,
    token: Option<Secret>,
    waits: Waits,
}

impl Client {
    pub(crate) fn new(options: ClientOptions) -> Result<Self, CtlError> {
        let ClientOptions { endpoints, token, waits, cacert } = options;
        let endpoints = named(&endpoints)?;
        let scheme = |endpoint: &&String| !endpoint.starts_with("http://") && !endpoint.starts_with("https://");
        if let Some(bad) = endpoints.iter().find(scheme) {
            return Err(CtlError::Usage(format!(
                "--endpoint {bad}: accepted is http://HOST:PORT or https://HOST:PORT"
            )));
        }
        if token.as_ref().is_some_and(|token| bearer(Some(token)).is_none()) {
            return Err(CtlError::Usage("--token: it cannot stand in a header".into()));
        }
        let config = UpstreamConfig {
            connect_timeout: waits.look.min(Span::seconds(3)),
            answer_timeout: waits.look.max(waits.act),
            pause_timeout: waits.pause,
            ..UpstreamConfig::default()
        };
        let upstream = match cacert {
            None => Upstream::new(config),
            Some(path) => {
                let refused = |error: &dyn std::fmt::Display| CtlError::Usage(format!("--cacert {error}"));
                let authority = certificates(&path).map_err(|error| refused(&error))?;
                Upstream::trusting(config, authority)
                    .map_err(|error| refused(&format!("{}: {error}", path.display())))?
            }
        };
        Ok(Self { upstream, endpoints, answered: Arc::default(), token, waits })
    }

    /// Only this endpoint.
    pub(crate) fn at(&self, endpoint: &str) -> Self {
        Self { endpoints: vec![endpoint.to_owned()], answered: Arc::default(), ..self.clone() }
    }

    /// The same endpoints, the one behind `endpoint` first and that one last.
    pub(crate) fn past(mut self, endpoint: &str) -> Self {
        let (count, place) = (self.endpoints.len(), self.endpoints.iter().position(|one| one == endpoint));
        self.endpoints.rotate_left(place.map_or(0, |at| (at + 1) % count));
        Self { answered: Arc::default(), ..self }
    }

    /// Reads. `path` is what comes after `/ownerserve/v1/`, or begins with a slash.
    pub(crate) async fn get(&self, path: &str) -> Result<Got, CtlError> {
        self.ask((Method::GET, path), (None, None), self.waits.look.0).await
    }

    /// Writes `body`, fenced by `tag` where one is given.
    pub(crate) async fn write(&self, asked: (Method, &str), body: &Value, tag: Option<&str>) -> Result<Got, CtlError> {
        self.ask(asked, (Some(body), tag), self.waits.act.0).await
    }

    /// Reads, and returns the answer as it begins, from the first endpoint that can be reached.
    pub(crate) async fn open(&self, path: &str) -> Result<(String, http::Response<WorkerBody>), CtlError> {
        self.send((Method::GET, path), (None, None), self.waits.act.0).await
    }

    async fn ask(
        &self,
        (method, path): (Method, &str),
        said: (Option<&Value>, Option<&str>),
        wait: Duration,
    ) -> Result<Got, CtlError> {
        let (endpoint, answer) = self.send((method.clone(), path), said, wait).await?;
        let tag = answer.headers().get(ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
        let whole = Limited::new(answer.into_body(), LARGEST).collect().await;
        let whole = whole.map_err(|error| no_answer(&method, endpoint.clone(), error.to_string()))?;
        let json = serde_json::from_slice(&whole.to_bytes());
        let json = json.map_err(|error| CtlError::NotOurs { endpoint, detail: error.to_string() })?;
        Ok(Got { json, tag })
    }

    async fn send(
        &self,
        (method, path): (Method, &str),
        said: (Option<&Value>, Option<&str>),
        wait: Duration,
    ) -> Result<(String, http::Response<WorkerBody>), CtlError> {
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/ownerserve/v1/{path}") };
        let mut last = CtlError::Usage("no endpoint is given".into());
        let (count, first) = (self.endpoints.len(), self.answered.load(Ordering::Relaxed));
        for place in (first..first + count).map(|place| place % count) {
            let endpoint = self.endpoints[place].clone();
            let request = Outgoing {
                method: method.clone(),
                path: path.clone(),
                headers: self.headers(said)?,
                body: said.0.map_or_else(Bytes::new, |body| Bytes::from(body.to_string())),
            };
            let answer = tokio::time::timeout(wait, self.upstream.send(&endpoint, request)).await;
            if let Ok(Ok(_)) = answer {
                self.answered.store(place, Ordering::Relaxed);
            }
            match answer.unwrap_or(Err(UpstreamError::Timeout(wait))) {
                Ok(answer) if answer.status().is_success() => return Ok((endpoint, answer)),
                Ok(answer) => return Err(problem(endpoint, answer).await),
                Err(UpstreamError::Connect(detail) | UpstreamError::Broken(detail))
                    if let Some(advice) = advice(&endpoint, &detail) =>
                {
                    last = CtlError::Tls { endpoint, advice, detail };
                }
                Err(UpstreamError::Connect(detail)) if let Some(advice) = hung_up(&endpoint, &detail) => {
                    last = CtlError::Tls { endpoint, advice, detail };
                }
                // Who was reached and did not answer says more of the cluster than who is not there.
                Err(UpstreamError::Connect(_)) if matches!(last, CtlError::Unanswered { .. }) => {}
                Err(UpstreamError::Connect(detail)) => last = CtlError::Unreachable { endpoint, detail },
                Err(UpstreamError::Unsendable(detail)) => return Err(CtlError::Usage(detail)),
                // A read may be asked of the next one; a write may have been done.
                Err(error) if method == Method::GET => last = no_answer(&method, endpoint, error.to_string()),
                Err(error) => return Err(no_answer(&method, endpoint, error.to_string())),
            }
        }
        Err(last)
    }

    /// Refuses endpoints to which a token would go as plain text over the network.
    pub(crate) fn check_that_nobody_overhears(&self) -> Result<(), CtlError> {
        let Some(overheard) = self.endpoints.iter().find(|endpoint| is_overheard(endpoint)) else { return Ok(()) };
        Err(CtlError::Usage(format!(
            "--endpoint {overheard}: the token would go there as plain text; give --endpoint https://HOST:PORT (operator.tls at \
             the router), or --insecure-plain-http where the network is trusted"
        )))
    }

    fn headers(&self, (body, tag): (Option<&Value>, Option<&str>)) -> Result<HeaderMap, CtlError> {
        let mut headers = HeaderMap::new();
        if let Some(token) = bearer(self.token.as_ref()) {
            headers.insert(AUTHORIZATION, token);
        }
        if body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(tag) = tag {
            let value = HeaderValue::from_str(tag).map_err(|_| CtlError::Usage(format!("not an epoch: {tag}")))?;
            headers.insert(IF_MATCH, value);
        }
        Ok(headers)
    }
}

/// Whether others on the network can read what is sent there.
fn is_overheard(endpoint: &str) -> bool {
    let uri = endpoint.parse::<http::Uri>().unwrap_or_default();
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let is_here = host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback());
    endpoint.starts_with("http://") && !is_here
}

/// The endpoints without what stands around them: a comma at the end names none.
fn named(endpoints: &[String]) -> Result<Vec<String>, CtlError> {
    let named = endpoints.iter().map(|endpoint| endpoint.trim()).filter(|endpoint| !endpoint.is_empty());
    let named: Vec<_> = named.map(str::to_owned).collect();
    if named.is_empty() {
        let what = "--endpoint or OWNERSERVE_ENDPOINT is given and empty; accepted is http://HOST:PORT or https://HOST:PORT, \
                    and without either http://127.0.0.1:9464 is asked";
        return Err(CtlError::Usage(what.into()));
    }
    Ok(named)
}

/// What to do about a handshake that failed, or a server that does not speak what the endpoint says; none where neither is
/// to blame. Either way no request was read there.
fn advice(endpoint: &str, detail: &str) -> Option<&'static str> {
    let says = |any: &[&str]| any.iter().any(|text| detail.contains(text));
    if !endpoint.starts_with("https://") {
        // What answers there begins with bytes of TLS: its word for a request that was none.
        let is_tls = says(&["invalid HTTP version", "invalid HTTP status-code"]);
        return is_tls.then_some("it does not speak plain HTTP there: give --endpoint https://HOST:PORT");
    }
    const ADVICE: [(&[&str], &str); 7] = [
        (
            &["CaUsedAsEndEntity"],
            "it shows the certificate of an authority itself (CA:TRUE): make a certificate for the router that this \
             authority signed and that names the host, and keep the authority's for --cacert",
        ),
        (
            &["UnknownIssuer", "BadSignature", "unknown issuer", "UnknownCA", "not trusted"],
            "its certificate was not signed by an authority that is trusted here: give --cacert FILE (or \
             OWNERSERVE_CACERT) with that authority's certificate",
        ),
        (
            &["not valid for name", "NotValidForName"],
            "its certificate does not name this host: dial it by a name that it has, or let one be made that names it",
        ),
        (
            &["certificate expired", "certificate not valid yet"],
            "its certificate does not hold at this time: let it be renewed, or set this machine's clock",
        ),
        (
            &["CertificateRequired", "HandshakeFailure", "BadCertificate", "CertificateUnknown"],
            "it asks for a client's certificate, of which ctl has none: is it the address for other nodes \
             (cluster.listen)? The operators' one (operator.listen) asks for a token",
        ),
        (
            &["InvalidContentType", "InvalidMessage", "corrupt message", "wrong version"],
            "it does not speak TLS there: give --endpoint http://HOST:PORT, or set operator.tls at the router",
        ),
        (
            // Nothing was sent: with TLS 1.3 whoever misses a client's certificate says so behind the handshake.
            &["connection was not ready"],
            "it hung up right after the TLS handshake: is it the address for other nodes (cluster.listen)? The operators' \
             one (operator.listen) asks for a token",
        ),
    ];
    ADVICE.iter().find(|(texts, _)| says(texts)).map(|(_, advice)| *advice)
}

/// What to do about an end that came while a connection was being made. Later it may have cut a request off that was read.
fn hung_up(endpoint: &str, detail: &str) -> Option<&'static str> {
    let ends = ["tls handshake eof", "unexpected EOF during handshake", "unexpected end of file"];
    let is_end = endpoint.starts_with("https://") && ends.iter().any(|end| detail.contains(end));
    is_end
        .then_some("it hung up during the TLS handshake: is it the operators' address, and is operator.tls set there?")
}

fn no_answer(method: &Method, endpoint: String, detail: String) -> CtlError {
    match *method {
        Method::GET => CtlError::Unanswered { endpoint, detail },
        _ => CtlError::NoAnswer { endpoint, detail },
    }
}

/// What an answer that is no success says.
async fn problem(endpoint: String, answer: http::Response<WorkerBody>) -> CtlError {
    let status = answer.status();
    let body =
        Limited::new(answer.into_body(), LARGEST).collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let document: Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = |name: &str| document[name].as_str().map(str::to_owned);
    let word = text("type").and_then(|kind| kind.strip_prefix("urn:ownerserve:problem:").map(str::to_owned));
    match (word, text("title"), text("detail")) {
        (Some(_), _, Some(detail)) if status == StatusCode::UNAUTHORIZED => CtlError::NotLetIn { endpoint, detail },
        (Some(word), Some(title), Some(detail)) => CtlError::Problem { title, word, detail, cause: text("cause") },
        _ if status == StatusCode::NOT_FOUND => CtlError::NotOurs { endpoint, detail: "404".into() },
        _ => CtlError::NotOurs { endpoint, detail: status.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_endpoints_may_end_in_a_comma_and_an_empty_one_is_told() {
        let split = |text: &str| named(&text.split(',').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(split("http://a:1, http://b:2,").unwrap(), ["http://a:1", "http://b:2"]);
        for empty in ["", ",", " , "] {
            let error = split(empty).unwrap_err();
            assert!(error.code() == 2 && error.to_string().contains("OWNERSERVE_ENDPOINT"), "{error}");
        }
    }

    #[test]
    fn a_token_goes_over_plain_http_only_to_this_machine() {
        let check = |endpoints: &[&str]| {
            let endpoints = endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect();
            let client = Client::new(ClientOptions { endpoints, token: None, waits: Waits::of(LOOK), cacert: None });
            client.unwrap().check_that_nobody_overhears()
        };
        for here in
            ["http://127.0.0.1:9464", "http://localhost:1", "http://[::1]:1", "http://LOCALHOST", "https://router-1:1"]
        {
            assert!(check(&[here]).is_ok(), "{here}");
        }
        for there in ["http://10.0.0.7:9464", "http://router-1:9464", "http://localhost.example", "http://[fd00::1]:1"]
        {
            let error = check(&["http://127.0.0.1:1", there]).unwrap_err();
            let told = error.to_string();
            assert!(error.code() == 2 && told.contains(there) && told.contains("--insecure-plain-http"), "{told}");
            assert!(!told.contains("  "), "{told}");
        }
    }

    #[tokio::test]
    async fn a_look_at_a_hung_endpoint_is_asked_of_the_next_one_and_a_write_is_not() {
        let hung = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let front = crate::testing::front_of(&[], &[]).await;
        let endpoints =
            vec![format!("http://{}", hung.local_addr().unwrap()), format!("http://{}", front.operator_address())];
        let waits = Waits { look: Span::millis(200), act: Span::millis(200), pause: PAUSE };
        let client = Client::new(ClientOptions { endpoints, token: None, waits, cacert: None }).unwrap();
        assert!(client.get("cluster").await.unwrap().json["node"].is_u64());
        let (turn, unasked) =
            (serde_json::json!({"mode": "shadow"}), Client { answered: Arc::default(), ..client.clone() });
        let error = unasked.write((Method::PUT, "mode"), &turn, None).await.unwrap_err();
        assert_eq!((error.code(), error.word()), (4, "unknown_outcome"), "{error}");
        assert_eq!(client.clone().past(&client.endpoints[0]).endpoints[1], client.endpoints[0]);
        client.write((Method::PUT, "mode"), &turn, None).await.expect("it goes where the look was answered");
        let nobody = client.at("http://127.0.0.1:9").get("cluster").await.unwrap_err();
        assert!(matches!(nobody, CtlError::Unreachable { .. }), "{nobody}");
        let endpoints = vec![client.endpoints[0].clone(), "http://127.0.0.1:9".into()];
        let silent = Client { endpoints, answered: Arc::default(), ..client.clone() }.get("cluster").await.unwrap_err();
        assert!(matches!(silent, CtlError::Unanswered { .. }), "{silent}");
        let each = crate::ctl::endpoints::ask_all(&client, "cluster").await;
        assert!(each[0]["error"].is_string() && each[1]["answer"]["node"].is_u64(), "{each:?}");
    }

    #[test]
    fn what_tls_or_its_lack_broke_comes_with_what_to_do() {
        let told = |endpoint: &str, detail: &str| advice(endpoint, detail).unwrap_or_default();
        let https = |detail: &str| told("https://a:1", detail);
        assert!(https("invalid peer certificate: UnknownIssuer").contains("--cacert"));
        assert!(
            https("invalid peer certificate: Other(OtherError(CaUsedAsEndEntity))").contains("this authority signed")
        );
        assert!(https("certificate not valid for name \"a\"").contains("does not name this host"));
        assert!(https("received fatal alert: CertificateRequired").contains("cluster.listen"));
        assert!(https("operation was canceled: connection was not ready").contains("cluster.listen"));
        assert!(https("received corrupt message of type InvalidContentType").contains("http://"));
        assert!(told("http://a:1", "invalid HTTP version parsed").contains("https://"));
        let eof = "tls handshake eof";
        assert_eq!(
            (advice("https://a:1", eof), hung_up("http://a:1", eof)),
            (None, None),
            "a request may be cut off so"
        );
        assert!(hung_up("https://a:1", eof).unwrap().contains("operator.tls"));
        for plain in ["tcp connect error: Connection refused", "dns error: no such host"] {
            assert_eq!((advice("https://a:1", plain), advice("http://a:1", plain)), (None, None));
        }
    }
}
