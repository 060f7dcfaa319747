//! The client to the operator API: endpoints in turn, a token, and errors that say what to do.

use std::path::PathBuf;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, ETAG, IF_MATCH};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use serde_json::Value;

use crate::auth::Secret;
use crate::config::units::Span;
use crate::gateway::bearer;
use crate::server::tls::certificates;
use crate::upstream::{Outgoing, Upstream, UpstreamConfig, UpstreamError, WorkerBody};

/// Largest answer that is read as a whole.
const LARGEST: usize = 64 << 20;

/// Why a command came to nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CtlError {
    /// Nobody could be reached; nothing was changed.
    #[error("{endpoint} cannot be reached: {detail}; give --endpoint http://HOST:PORT or set OWNERSERVE_ENDPOINT")]
    Unreachable {
        /// The last one that was tried.
        endpoint: String,
        /// Why.
        detail: String,
    },
    /// TLS came to nothing, or was not spoken where it should be; nothing was changed.
    #[error("{endpoint}: {advice} ({detail})")]
    Tls {
        /// Who.
        endpoint: String,
        /// What is wrong, and what to do.
        advice: &'static str,
        /// As the library has it.
        detail: String,
    },
    /// Of several that were asked, one said no.
    #[error("{0}")]
    Refused(String),
    /// Of several that were to change something, one did not answer.
    #[error("{0}")]
    Unknown(String),
    /// Of several that were to change something, some did.
    #[error("it was done at {done} and stays so there, but not everywhere: {error}")]
    Partly {
        /// At whom.
        done: String,
        /// What became of another one.
        error: String,
    },
    /// Of several that were asked, not all answered.
    #[error("not every endpoint answered: {0}")]
    Silent(String),
    /// A write was sent, and no answer came.
    #[error("{endpoint} did not answer: {detail}; the write may or may not have been done: read, then repeat it")]
    NoAnswer {
        /// Who.
        endpoint: String,
        /// How it ended.
        detail: String,
    },
    /// A read was sent, and no answer came.
    #[error(
        "{endpoint} did not answer: {detail}; it was only a read: try again, longer (--timeout) or at another --endpoint"
    )]
    Unanswered {
        /// Who.
        endpoint: String,
        /// How it ended.
        detail: String,
    },
    /// What was asked for was answered, and it is not well.
    #[error("there are alarms: {0}")]
    Alarms(usize),
    /// A token is missing, or wrong.
    #[error(
        "{endpoint} lets nobody in without a token it knows: set OWNERSERVE_TOKEN or give --token-file FILE ({detail})"
    )]
    NotLetIn {
        /// Who.
        endpoint: String,
        /// What the API said.
        detail: String,
    },
    /// The API said no.
    #[error("{title} ({word}): {detail}")]
    Problem {
        /// The problem's title.
        title: String,
        /// The last part of its type.
        word: String,
        /// What to do.
        detail: String,
    },
    /// It is not the operator API that answers there.
    #[error("{endpoint} does not speak the operator API: {detail}; is it the operators' address, not the clients'?")]
    NotOurs {
        /// Who.
        endpoint: String,
        /// What came.
        detail: String,
    },
    /// What was given on the command line cannot be.
    #[error("{0}")]
    Usage(String),
    /// A file.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A snapshot that does not hold what was written.
    #[error("{} is no sound snapshot: {detail}; nothing was changed, take another one", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where in it and how.
        detail: String,
    },
    /// The ledger's files.
    #[error(transparent)]
    Ownership(#[from] ownership::OwnershipError),
}

impl CtlError {
    /// 1: refused. 2: bad usage, as clap's. 3: not all answered, nothing was changed. 4: the outcome is not known. 5: there
    /// are alarms. 6: done at some endpoints and not at others.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Unreachable { .. } | Self::Tls { .. } | Self::Unanswered { .. } | Self::Silent(_) => 3,
            Self::Alarms(_) => 5,
            Self::NoAnswer { .. } | Self::Unknown(_) => 4,
            Self::Partly { .. } => 6,
            Self::Problem { word, .. } if word == "unknown_outcome" => 4,
            _ => 1,
        }
    }

    /// What programs look at: the API's own word where it said no, or one of these.
    pub(crate) fn word(&self) -> &str {
        match self {
            Self::Unreachable { .. } => "unreachable",
            Self::Tls { .. } => "tls",
            Self::Refused(_) => "refused",
            Self::Unknown(_) | Self::NoAnswer { .. } => "unknown_outcome",
            Self::Partly { .. } => "partly_done",
            Self::Silent(_) | Self::Unanswered { .. } => "unanswered",
            Self::Alarms(_) => "alarms",
            Self::NotLetIn { .. } => "unauthorized",
            Self::Problem { word, .. } => word,
            Self::NotOurs { .. } => "not_the_operator_api",
            Self::Usage(_) => "usage",
            Self::File { .. } => "file",
            Self::Damaged { .. } => "damaged",
            Self::Ownership(_) => "ledger",
        }
    }
}

/// Whom to ask, and how.
#[derive(Debug)]
pub(crate) struct ClientOptions {
    pub(crate) endpoints: Vec<String>,
    pub(crate) token: Option<Secret>,
    /// Longest time until an answer begins.
    pub(crate) timeout: Span,
    /// The authorities whose certificates are trusted, in place of the operating system's.
    pub(crate) cacert: Option<PathBuf>,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Got {
    pub(crate) json: Value,
    pub(crate) tag: Option<String>,
}

/// Talks to the first endpoint that can be reached.
#[derive(Debug)]
pub(crate) struct Client {
    upstream: Upstream,
    pub(crate) endpoints: Vec<String>,
    token: Option<Secret>,
}

impl Client {
    pub(crate) fn new(options: ClientOptions) -> Result<Self, CtlError> {
        let ClientOptions { endpoints, token, timeout, cacert } = options;
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
            connect_timeout: timeout.min(Span::seconds(3)),
            answer_timeout: timeout,
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
        Ok(Self { upstream, endpoints, token })
    }

    /// Only this endpoint.
    pub(crate) fn at(&self, endpoint: &str) -> Self {
        Self { upstream: self.upstream.clone(), endpoints: vec![endpoint.to_owned()], token: self.token.clone() }
    }

    /// Reads. `path` is what comes after `/ownerserve/v1/`.
    pub(crate) async fn get(&self, path: &str) -> Result<Got, CtlError> {
        self.ask(Method::GET, path, (None, None)).await
    }

    /// Writes `body`, fenced by `tag` where one is given.
    pub(crate) async fn write(
        &self,
        (method, path): (Method, &str),
        body: &Value,
        tag: Option<&str>,
    ) -> Result<Got, CtlError> {
        self.ask(method, path, (Some(body), tag)).await
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        (body, tag): (Option<&Value>, Option<&str>),
    ) -> Result<Got, CtlError> {
        let asked = method.clone();
        let (endpoint, answer) = self.open(method, path, (body, tag)).await?;
        let tag = answer.headers().get(ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
        let whole = Limited::new(answer.into_body(), LARGEST).collect().await;
        let whole = whole.map_err(|error| no_answer(&asked, endpoint.clone(), error.to_string()))?;
        let json = serde_json::from_slice(&whole.to_bytes());
        let json = json.map_err(|error| CtlError::NotOurs { endpoint, detail: error.to_string() })?;
        Ok(Got { json, tag })
    }

    /// Sends a request and returns the answer as it begins, from the first endpoint that can be reached.
    pub(crate) async fn open(
        &self,
        method: Method,
        path: &str,
        (body, tag): (Option<&Value>, Option<&str>),
    ) -> Result<(String, http::Response<WorkerBody>), CtlError> {
        let mut last = CtlError::Usage("no endpoint is given".into());
        for endpoint in &self.endpoints {
            let request = Outgoing {
                method: method.clone(),
                path: format!("/ownerserve/v1/{path}"),
                headers: self.headers((body, tag))?,
                body: body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string())),
            };
            let endpoint = endpoint.clone();
            match self.upstream.send(&endpoint, request).await {
                Ok(answer) if answer.status().is_success() => return Ok((endpoint, answer)),
                Ok(answer) => return Err(problem(endpoint, answer).await),
                Err(UpstreamError::Connect(detail) | UpstreamError::Broken(detail))
                    if let Some(advice) = advice(&endpoint, &detail) =>
                {
                    last = CtlError::Tls { endpoint, advice, detail };
                }
                Err(UpstreamError::Connect(detail)) => last = CtlError::Unreachable { endpoint, detail },
                Err(UpstreamError::Unsendable(detail)) => return Err(CtlError::Usage(detail)),
                // A read may be asked of the next one; a write may have been done.
                Err(error) if method == Method::GET => last = no_answer(&method, endpoint, error.to_string()),
                Err(error) => return Err(no_answer(&method, endpoint, error.to_string())),
            }
        }
        Err(last)
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

/// What to do about a handshake that failed, or a server that does not speak what the endpoint says; none where neither is
/// to blame. Either way no request was read there.
fn advice(endpoint: &str, detail: &str) -> Option<&'static str> {
    let says = |any: &[&str]| any.iter().any(|text| detail.contains(text));
    if !endpoint.starts_with("https://") {
        // What answers there begins with bytes of TLS: its word for a request that was none.
        let is_tls = says(&["invalid HTTP version", "invalid HTTP status-code"]);
        return is_tls.then_some("it does not speak plain HTTP there: give --endpoint https://HOST:PORT");
    }
    const ADVICE: [(&[&str], &str); 6] = [
        (
            &["UnknownIssuer", "BadSignature", "unknown issuer", "UnknownCA", "CaUsedAsEndEntity", "not trusted"],
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
            &["tls handshake eof", "unexpected EOF during handshake", "unexpected end of file"],
            "it hung up during the TLS handshake: is it the operators' address, and is operator.tls set there?",
        ),
    ];
    ADVICE.iter().find(|(texts, _)| says(texts)).map(|(_, advice)| *advice)
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
        (Some(word), Some(title), Some(detail)) => CtlError::Problem { title, word, detail },
        _ if status == StatusCode::NOT_FOUND => CtlError::NotOurs { endpoint, detail: "404".into() },
        _ => CtlError::NotOurs { endpoint, detail: status.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tls_or_its_lack_broke_comes_with_what_to_do() {
        let told = |endpoint: &str, detail: &str| advice(endpoint, detail).unwrap_or_default();
        let https = |detail: &str| told("https://a:1", detail);
        assert!(https("invalid peer certificate: UnknownIssuer").contains("--cacert"));
        assert!(https("certificate not valid for name \"a\"").contains("does not name this host"));
        assert!(https("received fatal alert: CertificateRequired").contains("cluster.listen"));
        assert!(https("received corrupt message of type InvalidContentType").contains("http://"));
        assert!(told("http://a:1", "invalid HTTP version parsed").contains("https://"));
        for plain in ["tcp connect error: Connection refused", "dns error: no such host"] {
            assert_eq!((advice("https://a:1", plain), advice("http://a:1", plain)), (None, None));
        }
    }
}
