//! Client of the operator API: fails over between endpoints, authenticates, and classifies connection failures.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::header::{AUTHORIZATION, CONTENT_TYPE, ETAG, IF_MATCH};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use reqwest::Body;
use reqwest::redirect::Policy;
use reqwest::tls::Certificate;
use serde_json::Value;
use vocabulary::{Secret, TimeSpan};

use super::error::CtlError;

/// Maximum size of a response that is read as a whole.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Timeout of a read until its response begins; then the next endpoint is tried.
pub(super) const READ_TIMEOUT: TimeSpan = TimeSpan::seconds(5);
/// Maximum time until a connection is made.
const MAX_CONNECT_TIME: TimeSpan = TimeSpan::seconds(3);
/// Maximum pause within a response: an idle watch sends three heartbeats in this time.
const MAX_PAUSE: TimeSpan = TimeSpan::seconds(30);

/// Options of the client.
#[derive(Debug)]
pub(crate) struct OperatorClientOptions {
    pub(crate) endpoints: Vec<String>,
    pub(crate) token: Option<Secret>,
    /// Timeouts of requests.
    pub(crate) timeouts: ClientTimeouts,
    /// CA certificates to trust instead of the operating system's.
    pub(crate) cacert: Option<PathBuf>,
}

/// Timeouts until a response begins, and within it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ClientTimeouts {
    /// Of a read, which may be retried at the next endpoint.
    pub(crate) read_timeout: TimeSpan,
    /// Of the command's main request.
    pub(crate) request_timeout: TimeSpan,
    /// Between two pieces of a response.
    pub(crate) max_pause: TimeSpan,
}

impl ClientTimeouts {
    /// Returns the timeouts of a command with this default.
    pub(crate) fn for_command(request_timeout: TimeSpan) -> Self {
        Self { read_timeout: READ_TIMEOUT, request_timeout, max_pause: MAX_PAUSE }
    }

    /// Returns the timeouts as requested by the user.
    pub(crate) fn with_timeout(timeout: TimeSpan) -> Self {
        Self { read_timeout: timeout, request_timeout: timeout, max_pause: MAX_PAUSE }
    }
}

#[derive(Debug)]
pub(crate) struct ApiResponse {
    pub(crate) json: Value,
    pub(crate) tag: Option<String>,
}

/// Client that uses the first reachable endpoint.
#[derive(Clone, Debug)]
pub(crate) struct OperatorClient {
    http: reqwest::Client,
    pub(crate) endpoints: Vec<String>,
    /// Index of the endpoint that answered last. It is tried first, so that a write goes to the endpoint of the read
    /// before it.
    last_answered: Arc<AtomicUsize>,
    /// Value of the header `Authorization`.
    token: Option<HeaderValue>,
    timeouts: ClientTimeouts,
}

impl OperatorClient {
    pub(crate) fn new(options: OperatorClientOptions) -> Result<Self, CtlError> {
        let OperatorClientOptions { endpoints, token, timeouts: waits, cacert } = options;
        let endpoints = parse_endpoints(&endpoints)?;
        let scheme = |endpoint: &&String| !endpoint.starts_with("http://") && !endpoint.starts_with("https://");
        if let Some(bad) = endpoints.iter().find(scheme) {
            return Err(CtlError::Usage(format!(
                "--endpoint {bad}: accepted is http://HOST:PORT or https://HOST:PORT"
            )));
        }
        let token = token.map(|token| bearer(&token)).transpose()?;
        let http = http_client(waits, cacert.as_deref())?;
        Ok(Self { http, endpoints, last_answered: Arc::default(), token, timeouts: waits })
    }

    /// Returns a client for this endpoint only.
    pub(crate) fn only(&self, endpoint: &str) -> Self {
        Self { endpoints: vec![endpoint.to_owned()], last_answered: Arc::default(), ..self.clone() }
    }

    /// Returns a client that tries the endpoint after `endpoint` first and `endpoint` last.
    pub(crate) fn starting_after(mut self, endpoint: &str) -> Self {
        let (count, position) = (self.endpoints.len(), self.endpoints.iter().position(|one| one == endpoint));
        self.endpoints.rotate_left(position.map_or(0, |at| (at + 1) % count));
        Self { last_answered: Arc::default(), ..self }
    }

    /// Reads a resource. `path` follows `/ownerserve/v1/`, unless it starts with a slash.
    pub(crate) async fn get(&self, path: &str) -> Result<ApiResponse, CtlError> {
        self.request((Method::GET, path), (None, None), self.timeouts.read_timeout.0).await
    }

    /// Writes `body`, fenced by `tag` if given.
    pub(crate) async fn write(
        &self,
        asked: (Method, &str),
        body: &Value,
        tag: Option<&str>,
    ) -> Result<ApiResponse, CtlError> {
        self.request(asked, (Some(body), tag), self.timeouts.request_timeout.0).await
    }

    /// Reads a resource as a stream from the first reachable endpoint; returns that endpoint, too.
    pub(crate) async fn open(&self, path: &str) -> Result<(String, http::Response<Body>), CtlError> {
        self.send((Method::GET, path), (None, None), self.timeouts.request_timeout.0).await
    }

    async fn request(
        &self,
        (method, path): (Method, &str),
        said: (Option<&Value>, Option<&str>),
        wait: Duration,
    ) -> Result<ApiResponse, CtlError> {
        let (endpoint, answer) = self.send((method.clone(), path), said, wait).await?;
        let tag = answer.headers().get(ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
        let whole = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        let whole = whole.map_err(|error| no_answer_error(&method, endpoint.clone(), error.to_string()))?;
        let json = serde_json::from_slice(&whole.to_bytes());
        let json = json.map_err(|error| CtlError::ForeignResponse { endpoint, detail: error.to_string() })?;
        Ok(ApiResponse { json, tag })
    }

    async fn send(
        &self,
        (method, path): (Method, &str),
        said: (Option<&Value>, Option<&str>),
        wait: Duration,
    ) -> Result<(String, http::Response<Body>), CtlError> {
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/ownerserve/v1/{path}") };
        let mut last = CtlError::Usage("no endpoint is given".into());
        let (count, first) = (self.endpoints.len(), self.last_answered.load(Ordering::Relaxed));
        for index in (first..first + count).map(|number| number % count) {
            let endpoint = self.endpoints[index].clone();
            let request = self.http.request(method.clone(), format!("{endpoint}{path}")).headers(self.headers(said)?);
            let request = match said.0 {
                Some(body) => request.body(body.to_string()),
                None => request,
            };
            let error = match tokio::time::timeout(wait, request.send()).await {
                Err(_) => SendError::Unanswered(format!("no answer within {wait:?}")),
                Ok(Err(error)) => SendError::from(error),
                Ok(Ok(answer)) => {
                    self.last_answered.store(index, Ordering::Relaxed);
                    let answer = http::Response::from(answer);
                    return if answer.status().is_success() {
                        Ok((endpoint, answer))
                    } else {
                        Err(problem_error(endpoint, answer).await)
                    };
                }
            };
            match error {
                SendError::Unsendable(detail) => return Err(CtlError::Usage(detail)),
                SendError::Connect(detail) | SendError::Broken(detail)
                    if let Some(advice) = tls_advice(&endpoint, &detail) =>
                {
                    last = CtlError::Tls { endpoint, advice, detail };
                }
                SendError::Connect(detail) if let Some(advice) = closed_during_handshake(&endpoint, &detail) => {
                    last = CtlError::Tls { endpoint, advice, detail };
                }
                // An endpoint that was reached but did not answer tells more about the cluster than an unreachable
                // one.
                SendError::Connect(_) if matches!(last, CtlError::ReadUnanswered { .. }) => {}
                SendError::Connect(detail) => last = CtlError::Unreachable { endpoint, detail },
                SendError::Broken(detail) | SendError::Unanswered(detail) => {
                    let error = no_answer_error(&method, endpoint, detail);
                    // A read may be retried at the next endpoint; a write may already have been executed.
                    if method != Method::GET {
                        return Err(error);
                    }
                    last = error;
                }
            }
        }
        Err(last)
    }

    /// Fails if the token would go to another host in plain text.
    pub(crate) fn check_token_confidentiality(&self) -> Result<(), CtlError> {
        let Some(overheard) = self.endpoints.iter().find(|endpoint| is_remote_plaintext(endpoint)) else {
            return Ok(());
        };
        Err(CtlError::Usage(format!(
            "--endpoint {overheard}: the token would go there as plain text; give --endpoint https://HOST:PORT (operator.tls at \
             the router), or --insecure-plain-http where the network is trusted"
        )))
    }

    fn headers(&self, (body, tag): (Option<&Value>, Option<&str>)) -> Result<HeaderMap, CtlError> {
        let mut headers = HeaderMap::new();
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, token.clone());
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

/// Why an endpoint gave no answer. Each text ends with the innermost cause.
enum SendError {
    /// There was no connection: the endpoint has read no request.
    Connect(String),
    /// The connection broke before an answer began.
    Broken(String),
    /// The answer did not begin in time.
    Unanswered(String),
    /// The request cannot be put into HTTP.
    Unsendable(String),
}

impl From<reqwest::Error> for SendError {
    fn from(error: reqwest::Error) -> Self {
        // The outermost text only repeats the URL.
        let causes = std::iter::successors(std::error::Error::source(&error), |cause| cause.source());
        let detail = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        if error.is_builder() {
            return Self::Unsendable(error.to_string());
        }
        if error.is_connect() { Self::Connect(detail) } else { Self::Broken(detail) }
    }
}

/// Builds the HTTP client, which reaches the endpoints directly and follows no redirect.
fn http_client(timeouts: ClientTimeouts, cacert: Option<&Path>) -> Result<reqwest::Client, CtlError> {
    // Fails where another part of the process has chosen it already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let ClientTimeouts { read_timeout, request_timeout, max_pause } = timeouts;
    let mut builder = reqwest::Client::builder()
        .no_proxy()
        .redirect(Policy::none())
        .connect_timeout(read_timeout.min(MAX_CONNECT_TIME).0)
        // It counts until the response begins, too.
        .read_timeout(max_pause.max(read_timeout).max(request_timeout).0);
    if let Some(path) = cacert {
        let refused = |why: &dyn std::fmt::Display| CtlError::Usage(format!("--cacert {}: {why}", path.display()));
        let text = std::fs::read(path).map_err(|error| refused(&error))?;
        let authorities = Certificate::from_pem_bundle(&text).map_err(|error| refused(&error))?;
        if authorities.is_empty() {
            return Err(refused(&"there is no certificate in it"));
        }
        builder = builder.tls_certs_only(authorities);
    }
    builder.build().map_err(|error| CtlError::Usage(format!("no HTTP client can be built: {error}")))
}

/// Returns the header of a token.
fn bearer(token: &Secret) -> Result<HeaderValue, CtlError> {
    let mut value = HeaderValue::from_str(&format!("Bearer {}", token.expose()))
        .map_err(|_| CtlError::Usage("--token: it cannot stand in a header".into()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Returns whether others on the network can read what is sent to this endpoint.
fn is_remote_plaintext(endpoint: &str) -> bool {
    let uri = endpoint.parse::<http::Uri>().unwrap_or_default();
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let is_here = host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback());
    endpoint.starts_with("http://") && !is_here
}

/// Trims the endpoints and drops empty ones, as after a trailing comma.
fn parse_endpoints(endpoints: &[String]) -> Result<Vec<String>, CtlError> {
    let named = endpoints.iter().map(|endpoint| endpoint.trim()).filter(|endpoint| !endpoint.is_empty());
    let named: Vec<_> = named.map(str::to_owned).collect();
    if named.is_empty() {
        let what = "--endpoint or OWNERSERVE_ENDPOINT is given and empty; accepted is http://HOST:PORT or https://HOST:PORT, \
                    and without either http://127.0.0.1:9464 is asked";
        return Err(CtlError::Usage(what.into()));
    }
    Ok(named)
}

/// Returns advice for a failed TLS handshake, or for a server that does not speak the endpoint's scheme; `None`
/// otherwise. In these cases the server has read no request.
fn tls_advice(endpoint: &str, detail: &str) -> Option<&'static str> {
    let says = |any: &[&str]| any.iter().any(|text| detail.contains(text));
    if !endpoint.starts_with("https://") {
        // The response begins with TLS bytes: an alert about a request that was not TLS.
        let is_tls = says(&["invalid HTTP version", "invalid HTTP status-code"]);
        return is_tls.then_some("it does not speak plain HTTP there: give --endpoint https://HOST:PORT");
    }
    const TLS_ADVICE: [(&[&str], &str); 7] = [
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
            &["certificate expired", "certificate not valid yet", "certificate: Expired", "certificate: NotValidYet"],
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
            // Nothing was sent: with TLS 1.3, a server that requires a client certificate rejects its absence after
            // the handshake.
            &["connection was not ready"],
            "it hung up right after the TLS handshake: is it the address for other nodes (cluster.listen)? The operators' \
             one (operator.listen) asks for a token",
        ),
    ];
    TLS_ADVICE.iter().find(|(texts, _)| says(texts)).map(|(_, advice)| *advice)
}

/// Returns advice for a connection closed while it was being established. Later the server may have read a request.
fn closed_during_handshake(endpoint: &str, detail: &str) -> Option<&'static str> {
    let ends = ["tls handshake eof", "unexpected EOF during handshake", "unexpected end of file"];
    let is_end = endpoint.starts_with("https://") && ends.iter().any(|end| detail.contains(end));
    is_end
        .then_some("it hung up during the TLS handshake: is it the operators' address, and is operator.tls set there?")
}

fn no_answer_error(method: &Method, endpoint: String, detail: String) -> CtlError {
    match *method {
        Method::GET => CtlError::ReadUnanswered { endpoint, detail },
        _ => CtlError::WriteUnanswered { endpoint, detail },
    }
}

/// Returns the error of an unsuccessful response.
async fn problem_error(endpoint: String, answer: http::Response<Body>) -> CtlError {
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES)
        .collect()
        .await
        .map(|body| body.to_bytes())
        .unwrap_or_default();
    let document: Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = |name: &str| document[name].as_str().map(str::to_owned);
    let word = text("type").and_then(|kind| kind.strip_prefix("urn:ownerserve:problem:").map(str::to_owned));
    match (word, text("title"), text("detail")) {
        (Some(_), _, Some(detail)) if status == StatusCode::UNAUTHORIZED => CtlError::Unauthorized { endpoint, detail },
        (Some(word), Some(title), Some(detail)) => CtlError::Problem { title, word, detail, reason: text("reason") },
        _ if status == StatusCode::NOT_FOUND => CtlError::ForeignResponse { endpoint, detail: "404".into() },
        _ => CtlError::ForeignResponse { endpoint, detail: status.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_list_allows_a_trailing_comma_but_not_an_empty_entry() {
        let split = |text: &str| parse_endpoints(&text.split(',').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(split("http://a:1, http://b:2,").unwrap(), ["http://a:1", "http://b:2"]);
        for empty in ["", ",", " , "] {
            let error = split(empty).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains("OWNERSERVE_ENDPOINT"), "{error}");
        }
    }

    #[test]
    fn token_over_plain_http_is_sent_only_to_loopback() {
        let check = |endpoints: &[&str]| {
            let endpoints = endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect();
            let client = OperatorClient::new(OperatorClientOptions {
                endpoints,
                token: None,
                timeouts: ClientTimeouts::for_command(READ_TIMEOUT),
                cacert: None,
            });
            client.unwrap().check_token_confidentiality()
        };
        for here in
            ["http://127.0.0.1:9464", "http://localhost:1", "http://[::1]:1", "http://LOCALHOST", "https://router-1:1"]
        {
            assert!(check(&[here]).is_ok(), "{here}");
        }
        for there in ["http://10.0.0.7:9464", "http://router-1:9464", "http://localhost.example", "http://[fd00::1]:1"]
        {
            let error = check(&["http://127.0.0.1:1", there]).unwrap_err();
            let message = error.to_string();
            assert!(
                error.exit_code() == 2 && message.contains(there) && message.contains("--insecure-plain-http"),
                "{message}"
            );
            assert!(!message.contains("  "), "{message}");
        }
    }

    #[tokio::test]
    async fn reads_fail_over_from_a_hung_endpoint_but_writes_do_not() {
        let hung = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let router = crate::testing::start_router_at(&[], &[]).await;
        let endpoints =
            vec![format!("http://{}", hung.local_addr().unwrap()), format!("http://{}", router.operator_address())];
        let waits = ClientTimeouts {
            read_timeout: TimeSpan::millis(200),
            request_timeout: TimeSpan::millis(200),
            max_pause: MAX_PAUSE,
        };
        let client =
            OperatorClient::new(OperatorClientOptions { endpoints, token: None, timeouts: waits, cacert: None })
                .unwrap();
        assert!(client.get("cluster").await.unwrap().json["node_id"].is_u64());
        let (turn, unasked) =
            (serde_json::json!({"mode": "shadow"}), OperatorClient { last_answered: Arc::default(), ..client.clone() });
        let error = unasked.write((Method::PUT, "routing"), &turn, None).await.unwrap_err();
        assert_eq!((error.exit_code(), error.error_code()), (4, "unknown_outcome"), "{error}");
        assert_eq!(client.clone().starting_after(&client.endpoints[0]).endpoints[1], client.endpoints[0]);
        client.write((Method::PUT, "routing"), &turn, None).await.expect("it goes where the look was answered");
        let nobody = client.only("http://127.0.0.1:9").get("cluster").await.unwrap_err();
        assert!(matches!(nobody, CtlError::Unreachable { .. }), "{nobody}");
        let endpoints = vec![client.endpoints[0].clone(), "http://127.0.0.1:9".into()];
        let silent = OperatorClient { endpoints, last_answered: Arc::default(), ..client.clone() }
            .get("cluster")
            .await
            .unwrap_err();
        assert!(matches!(silent, CtlError::ReadUnanswered { .. }), "{silent}");
        let each = super::super::endpoints::query_all(&client, "cluster").await;
        assert!(each[0]["error"].is_string() && each[1]["answer"]["node_id"].is_u64(), "{each:?}");
    }

    #[test]
    fn tls_mismatch_errors_include_a_remedy() {
        let told = |endpoint: &str, detail: &str| tls_advice(endpoint, detail).unwrap_or_default();
        let https = |detail: &str| told("https://a:1", detail);
        assert!(https("invalid peer certificate: UnknownIssuer").contains("--cacert"));
        assert!(
            https("invalid peer certificate: Other(OtherError(CaUsedAsEndEntity))").contains("this authority signed")
        );
        assert!(https("invalid peer certificate: Expired").contains("renewed"));
        assert!(https("invalid peer certificate: NotValidYet").contains("clock"));
        assert!(https("certificate not valid for name \"a\"").contains("does not name this host"));
        assert!(https("received fatal alert: CertificateRequired").contains("cluster.listen"));
        assert!(https("operation was canceled: connection was not ready").contains("cluster.listen"));
        assert!(https("received corrupt message of type InvalidContentType").contains("http://"));
        assert!(told("http://a:1", "invalid HTTP version parsed").contains("https://"));
        let eof = "tls handshake eof";
        assert_eq!(
            (tls_advice("https://a:1", eof), closed_during_handshake("http://a:1", eof)),
            (None, None),
            "a request may be cut off so"
        );
        assert!(closed_during_handshake("https://a:1", eof).unwrap().contains("operator.tls"));
        for plain in ["tcp connect error: Connection refused", "dns error: no such host"] {
            assert_eq!((tls_advice("https://a:1", plain), tls_advice("http://a:1", plain)), (None, None));
        }
    }
}
