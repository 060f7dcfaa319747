//! Kubernetes discovery: the endpoints of a service, from its EndpointSlices, which are listed once and then watched.
//!
//! An unreachable API server changes nothing; its answers take effect at once, even if there are no endpoints.

mod slices;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use reqwest::{Certificate, Client, Response, StatusCode, Url};
use serde::de::DeserializeOwned;
use tokio::time::{sleep, timeout};

use self::slices::{KubernetesStatus, ServiceSlices, SliceList, UnusableSlicesError, WatchEvent};
use super::{WorkerDiscovery, WorkerSource};
use crate::discovery::{KubernetesConfig, WorkerConfig};
use vocabulary::WorkerUrl;

/// Where a pod finds its namespace, its token and the CA certificates.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Timeout for an answer to begin, and for a list to arrive.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Duration of one watch, in seconds. The API server ends it then.
const WATCH_SECONDS: u64 = 240;
/// Idle time after which a watch counts as dead; longer than a watch lasts.
const WATCH_IDLE_TIMEOUT: Duration = Duration::from_secs(WATCH_SECONDS + 30);
/// Pause after a failed request: the first one, and the longest.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
const MAX_LIST_BYTES: usize = 32 << 20;
/// Largest line of a watch, in bytes.
const MAX_LINE_BYTES: usize = 4 << 20;
/// Largest token, certificate or namespace file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Why the service's endpoints are unknown.
#[derive(Debug, thiserror::Error)]
enum KubernetesError {
    #[error(
        "{} cannot be read: {source}; outside of a pod set `api_server`, `namespace`, `token_file` and `ca_file` of [[discovery.kubernetes]]",
        .path.display()
    )]
    File { path: PathBuf, source: io::Error },
    #[error(
        "no API server is known: KUBERNETES_SERVICE_HOST is not set here; outside of a pod set `api_server` of [[discovery.kubernetes]]"
    )]
    NoServer,
    #[error("discovery.kubernetes.api_server is no URL: {0}; accepted is https://HOST:PORT")]
    Address(String),
    #[error("the API server cannot be asked: {}", root_cause(.0))]
    Unreachable(#[from] reqwest::Error),
    #[error("the API server does not answer within {} s", RESPONSE_TIMEOUT.as_secs())]
    Late,
    #[error("the API server says {status}: {message}{}", hint(*.status))]
    Refused { status: u16, message: String },
    #[error("what the API server says is not understood: {0}")]
    Unreadable(#[from] serde_json::Error),
    #[error("the API server says more than {0} bytes at once")]
    TooLong(usize),
    #[error("service {service} has no EndpointSlice in namespace {namespace}")]
    NoSlice { service: String, namespace: String },
    #[error("service {service}: {problem}")]
    Slices { service: String, problem: UnusableSlicesError },
}

/// Returns the chain of causes of a network error.
fn root_cause(error: &reqwest::Error) -> String {
    let first: &dyn std::error::Error = error;
    let causes: Vec<_> = std::iter::successors(Some(first), |error| error.source()).map(ToString::to_string).collect();
    causes.join(": ")
}

fn hint(status: u16) -> &'static str {
    match status {
        401 => " (the token is not accepted)",
        403 => " (its service account needs the verbs list and watch on endpointslices of discovery.k8s.io)",
        _ => "",
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum WatchRestart {
    /// The watch ended in time. The next one continues after this version.
    ResumeAt(String),
    /// The API server no longer knows that version: everything must be listed again.
    VersionExpired,
}

/// Publishes the service's endpoints whenever they change. Never returns.
pub async fn follow(discovery: Arc<WorkerDiscovery>, (at, config): (usize, KubernetesConfig)) {
    let mut pause = RETRY_BACKOFF.0;
    let mut service = ServiceWatch { discovery, index: at, config, published: None, is_working: false };
    loop {
        match service.list_and_watch().await {
            Ok(()) => pause = RETRY_BACKOFF.0,
            Err(error) => {
                // The first failure after a long watch starts with the shortest pause.
                if std::mem::take(&mut service.is_working) {
                    pause = RETRY_BACKOFF.0;
                }
                service.discovery.mark_failing((WorkerSource::Kubernetes, at), error.to_string());
                pause = (pause * 2).min(RETRY_BACKOFF.1);
            }
        }
        sleep(pause).await;
    }
}

/// One service, and what was published of it.
struct ServiceWatch {
    discovery: Arc<WorkerDiscovery>,
    index: usize,
    config: KubernetesConfig,
    published: Option<BTreeSet<WorkerUrl>>,
    /// Whether endpoints were published since the last failure.
    is_working: bool,
}

impl ServiceWatch {
    /// Lists the service's slices and watches them until the version is too old.
    async fn list_and_watch(&mut self) -> Result<(), KubernetesError> {
        let server = KubernetesApi::of(&self.config).await?;
        let list: SliceList = server.list().await?;
        let mut version = list.metadata.resource_version;
        let mut slices = ServiceSlices::of(list.items).map_err(|problem| self.slices_error(problem))?;
        if slices.is_empty() {
            let (service, namespace) = (self.config.service.clone(), server.namespace.clone());
            return Err(KubernetesError::NoSlice { service, namespace });
        }
        self.publish(&slices)?;
        loop {
            match self.watch(&server, &mut slices, version).await? {
                WatchRestart::ResumeAt(newest) => version = newest,
                WatchRestart::VersionExpired => return Ok(()),
            }
            // The pause protects a server that ends each watch at once.
            sleep(RETRY_BACKOFF.0).await;
        }
    }

    /// Applies changes until the watch ends.
    async fn watch(
        &mut self,
        server: &KubernetesApi,
        slices: &mut ServiceSlices,
        version: String,
    ) -> Result<WatchRestart, KubernetesError> {
        let mut version = version;
        let mut lines = match server.watch(&version).await {
            Err(KubernetesError::Refused { status: 410, .. }) => return Ok(WatchRestart::VersionExpired),
            lines => lines?,
        };
        while let Some(line) = lines.next().await? {
            match serde_json::from_slice(&line)? {
                WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                    version.clone_from(&slice.metadata.resource_version);
                    slices.put(slice).map_err(|problem| self.slices_error(problem))?;
                }
                WatchEvent::Deleted(slice) => {
                    version.clone_from(&slice.metadata.resource_version);
                    slices.remove(&slice);
                }
                WatchEvent::Bookmark(mark) => {
                    version = mark.metadata.resource_version;
                    continue;
                }
                WatchEvent::Error(status) if status.code == 410 => return Ok(WatchRestart::VersionExpired),
                WatchEvent::Error(status) => {
                    return Err(KubernetesError::Refused { status: status.code, message: status.message });
                }
            }
            self.publish(slices)?;
        }
        Ok(WatchRestart::ResumeAt(version))
    }

    fn publish(&mut self, slices: &ServiceSlices) -> Result<(), KubernetesError> {
        let (list, config) = ((WorkerSource::Kubernetes, self.index), &self.config);
        let ready = slices.ready_endpoints(config.port.as_ref()).map_err(|problem| self.slices_error(problem))?;
        if self.published.as_ref() != Some(&ready) {
            let worker = |url: &WorkerUrl| WorkerConfig {
                role: config.role,
                models: config.models.clone(),
                api_key: config.api_key.clone(),
                ..WorkerConfig::from_url(url.clone())
            };
            self.discovery.update_list(list, ready.iter().map(worker).collect());
            self.published = Some(ready);
        }
        self.discovery.mark_working(list);
        self.is_working = true;
        Ok(())
    }

    fn slices_error(&self, problem: UnusableSlicesError) -> KubernetesError {
        KubernetesError::Slices { service: self.config.service.clone(), problem }
    }
}

/// The API server, and the service to query.
struct KubernetesApi {
    client: Client,
    slices: String,
    service: String,
    namespace: String,
    token: PathBuf,
    needs_token: bool,
}

impl KubernetesApi {
    /// Builds the client from the configuration or the pod's environment. Certificates are read again each time.
    async fn of(config: &KubernetesConfig) -> Result<Self, KubernetesError> {
        let beside = |name: &str| Path::new(SERVICE_ACCOUNT).join(name);
        let api = match &config.api_server {
            Some(api) => api.trim_end_matches('/').to_owned(),
            None => in_pod(|name| std::env::var(name).ok())?,
        };
        let namespace = match &config.namespace {
            Some(namespace) => namespace.clone(),
            None => read(&beside("namespace")).await?.trim().to_owned(),
        };
        // reqwest has no crypto provider of its own here. One that was installed before is fine, too.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut client = Client::builder().no_proxy().connect_timeout(RESPONSE_TIMEOUT);
        let is_secure = api.starts_with("https://");
        if is_secure {
            let path = config.ca_file.clone().unwrap_or_else(|| beside("ca.crt"));
            client = client.tls_certs_only(Certificate::from_pem_bundle(read(&path).await?.as_bytes())?);
        } else {
            client = client.tls_certs_only([]);
        }
        Ok(Self {
            client: client.build()?,
            slices: format!("{api}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"),
            service: config.service.clone(),
            namespace,
            token: config.token_file.clone().unwrap_or_else(|| beside("token")),
            needs_token: is_secure || config.token_file.is_some(),
        })
    }

    async fn list(&self) -> Result<SliceList, KubernetesError> {
        let answer = timeout(RESPONSE_TIMEOUT, async {
            let mut answer = self.request(&[]).await?;
            read_body(&mut answer, MAX_LIST_BYTES).await
        });
        parse_json(&answer.await.map_err(|_| KubernetesError::Late)??)
    }

    async fn watch(&self, version: &str) -> Result<WatchLines, KubernetesError> {
        let seconds = WATCH_SECONDS.to_string();
        let how = [
            ("watch", "1"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", seconds.as_str()),
        ];
        let answer = timeout(RESPONSE_TIMEOUT, self.request(&how)).await.map_err(|_| KubernetesError::Late)??;
        Ok(WatchLines { answer, partial_line: BytesMut::new() })
    }

    /// Sends a request; returns an answer with status 200, else the refusal.
    async fn request(&self, how: &[(&str, &str)]) -> Result<Response, KubernetesError> {
        let selector = format!("kubernetes.io/service-name={}", self.service);
        let how = how.iter().copied().chain([("labelSelector", selector.as_str())]);
        let url =
            Url::parse_with_params(&self.slices, how).map_err(|error| KubernetesError::Address(error.to_string()))?;
        let mut request = self.client.get(url);
        if self.needs_token {
            // The token file is renewed in place.
            request = request.bearer_auth(read(&self.token).await?.trim());
        }
        let mut answer = request.send().await?;
        if answer.status() == StatusCode::OK {
            return Ok(answer);
        }
        let (status, body) = (answer.status().as_u16(), read_body(&mut answer, MAX_FILE_BYTES as usize).await?);
        let message = parse_json::<KubernetesStatus>(&body).map(|status| status.message).unwrap_or_default();
        Err(KubernetesError::Refused { status, message })
    }
}

/// Returns the API server that the pod's environment names.
fn in_pod(variable: impl Fn(&str) -> Option<String>) -> Result<String, KubernetesError> {
    let host = variable("KUBERNETES_SERVICE_HOST").filter(|host| !host.is_empty()).ok_or(KubernetesError::NoServer)?;
    let port = variable("KUBERNETES_SERVICE_PORT").unwrap_or_else(|| "443".into());
    Ok(if host.contains(':') { format!("https://[{host}]:{port}") } else { format!("https://{host}:{port}") })
}

async fn read(path: &Path) -> Result<String, KubernetesError> {
    let text = async {
        if tokio::fs::metadata(path).await?.len() > MAX_FILE_BYTES {
            return Err(io::Error::other(format!("it has more than {MAX_FILE_BYTES} bytes")));
        }
        tokio::fs::read_to_string(path).await
    };
    text.await.map_err(|source| KubernetesError::File { path: path.to_owned(), source })
}

async fn read_body(answer: &mut Response, most: usize) -> Result<BytesMut, KubernetesError> {
    let mut body = BytesMut::new();
    while let Some(chunk) = answer.chunk().await? {
        if body.len() + chunk.len() > most {
            return Err(KubernetesError::TooLong(most));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, KubernetesError> {
    Ok(serde_json::from_slice(body)?)
}

struct WatchLines {
    answer: Response,
    partial_line: BytesMut,
}

impl WatchLines {
    /// Returns the next line; `None` where the watch is over.
    async fn next(&mut self) -> Result<Option<BytesMut>, KubernetesError> {
        loop {
            if let Some(end) = self.partial_line.iter().position(|byte| *byte == b'\n') {
                let line = self.partial_line.split_to(end + 1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return Ok(Some(line));
            }
            let chunk = timeout(WATCH_IDLE_TIMEOUT, self.answer.chunk()).await.map_err(|_| KubernetesError::Late)??;
            let Some(chunk) = chunk else { return Ok(None) };
            if self.partial_line.len() + chunk.len() > MAX_LINE_BYTES {
                return Err(KubernetesError::TooLong(MAX_LINE_BYTES));
            }
            self.partial_line.extend_from_slice(&chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_finds_its_api_server_in_the_environment() {
        let found = |host: Option<&str>, port: Option<&str>| {
            in_pod(|name| if name.ends_with("HOST") { host } else { port }.map(str::to_owned))
                .map_err(|it| it.to_string())
        };
        assert_eq!(found(Some("10.96.0.1"), Some("6443")).unwrap(), "https://10.96.0.1:6443");
        assert_eq!(found(Some("fd00::1"), None).unwrap(), "https://[fd00::1]:443");
        for host in [None, Some("")] {
            assert!(found(host, None).unwrap_err().contains("set `api_server`"));
        }
    }

    #[test]
    fn a_forbidden_request_names_the_missing_permission() {
        let refused =
            KubernetesError::Refused { status: 403, message: "endpointslices is forbidden".into() }.to_string();
        assert!(
            refused.contains("403: endpointslices is forbidden (its service account needs the verbs list and watch"),
            "{refused}"
        );
    }
}
