//! Probes one worker periodically. Every response has a time and a size limit, and none is trusted.

use std::sync::Arc;
use std::time::Duration;

use reqwest::{StatusCode, redirect};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use vocabulary::{Incarnation, ModelId, Tokens};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::endpoint_discovery::discover_endpoint;
use super::error::FleetError;
use super::probe_round::{Adapter, ProbeFailure, ProbeReplies, ProbeReply, ServedModels};
use super::worker_definition::ProbeSettings;
use super::worker_handle::{LivenessReport, WorkerHandle};
use crate::scrape::{EngineKind, MAX_BYTES, Scrape};

/// Maximum number of models and adapters kept per worker, and the maximum length of a name.
const MAX_MODELS: usize = 1024;
const MAX_NAME: usize = 256;
/// Minimum pause between probes, however often they are requested.
const MIN_PAUSE: Duration = Duration::from_millis(20);

/// Creates the pooled client for all probes, separate from the one for client requests. No proxy and no redirects.
pub(super) fn client(settings: ProbeSettings) -> Result<reqwest::Client, FleetError> {
    // An error means that a provider is already installed, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = || {
        reqwest::Client::builder()
            .timeout(settings.patience)
            .connect_timeout(settings.patience)
            // Below the engines' own keep-alive timeout (uvicorn: 5 s), or probes would hit closed connections.
            .pool_idle_timeout(Duration::from_secs(4))
            .pool_max_idle_per_host(4)
            .redirect(redirect::Policy::none())
            .no_proxy()
    };
    // A machine without trusted certificates can still reach workers over http.
    Ok(builder().build().or_else(|_| builder().tls_certs_only([]).build())?)
}

/// GETs a small text from the worker.
pub(crate) async fn get(client: &reqwest::Client, worker: &WorkerHandle, path: &str) -> ProbeReply<String> {
    get_url(client, &format!("{}{path}", worker.spec.endpoint), worker.spec.api_key.as_ref()).await
}

/// GETs a small text, optionally with an API key.
pub(super) async fn get_url(client: &reqwest::Client, url: &str, key: Option<&Arc<str>>) -> ProbeReply<String> {
    let failure = |error: reqwest::Error| match error.is_connect() && !error.is_timeout() || error.is_builder() {
        true => ProbeFailure::Refused,
        false => ProbeFailure::Unanswered,
    };
    let mut request = client.get(url);
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    let mut answer = request.send().await.map_err(failure)?;
    match answer.status() {
        StatusCode::NOT_IMPLEMENTED => return Err(ProbeFailure::Absent),
        status if status.is_server_error() => return Err(ProbeFailure::Unhealthy),
        status if !status.is_success() => return Err(ProbeFailure::Absent),
        _ => {}
    }
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(failure)? {
        if body.len() + chunk.len() > MAX_BYTES {
            return Err(ProbeFailure::Absent);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(String::from_utf8_lossy(&body).into_owned())
}

/// Fetches the worker's current process identity.
pub(crate) async fn current_incarnation(client: &reqwest::Client, worker: &WorkerHandle) -> Option<Incarnation> {
    Scrape::read(&get(client, worker, "/metrics").await.ok()?).process
}

/// The prober of one worker.
#[derive(Clone)]
pub(super) struct Prober {
    pub(super) member: Arc<WorkerHandle>,
    pub(super) client: reqwest::Client,
    pub(super) pace: ProbeSettings,
    pub(super) liveness: Option<mpsc::Sender<LivenessReport>>,
}

impl Prober {
    /// Runs until the worker has left and none of this router's requests remain. A worker that left is not reported as
    /// alive.
    pub(super) async fn run(self) {
        for round in 0_u64.. {
            if self.member.is_finished() {
                return;
            }
            let round_result = self.probe_all().await;
            let report = self.member.apply_probe(&round_result, self.pace);
            let report = report.filter(|_| !self.member.has_left());
            if let (Some(report), Some(liveness)) = (report, &self.liveness) {
                // If the queue is full, this report is dropped; the next probe sends another one.
                let _ = liveness.try_send(report);
            }
            sleep(MIN_PAUSE).await;
            let chance = xxh3_64_with_seed(&round.to_le_bytes(), self.member.id.0);
            let wait = pause(self.pace, self.member.failures(), chance).saturating_sub(MIN_PAUSE);
            // Whether woken or timed out: the next probe is due.
            let _ = timeout(wait, self.member.probe_now.notified()).await;
        }
    }

    /// Sends all requests of a probe at once.
    async fn probe_all(&self) -> ProbeReplies {
        let (counters_at_start, failure_reports) = self.member.probe_start();
        let get = |path| get(&self.client, &self.member, path);
        let metrics = async { (get("/metrics").await, self.member.probe_start().0) };
        let (health, models, (metrics, counters_at_response)) =
            tokio::join!(get("/health"), get("/v1/models"), metrics);
        let counters = counters_at_start.with_response(counters_at_response);
        let metrics = metrics.and_then(|page| read_metrics(&page));
        let version = match &metrics {
            Ok(scrape) if self.member.needs_version(scrape) => {
                get("/version").await.ok().and_then(|text| read_version(&text))
            }
            _ => None,
        };
        let connector = match &metrics {
            Ok(scrape) if self.member.needs_endpoint(scrape) => {
                Some(discover_endpoint(&self.client, &self.member, scrape).await)
            }
            Err(ProbeFailure::Absent) => Some(discover_endpoint(&self.client, &self.member, &Scrape::default()).await),
            _ => None,
        };
        let models = models.and_then(|text| read_models(&text));
        ProbeReplies { counters, failure_reports, health: health.map(drop), models, metrics, version, connector }
    }
}

/// Returns the pause until the next probe: `every` +/- 10 %; after failures `again`, doubled for each one, up to
/// `every`.
fn pause(settings: ProbeSettings, failures: u32, chance: u64) -> Duration {
    let jitter = 0.9 + 0.2 * (chance % 1000) as f64 / 1000.0;
    let interval = match failures {
        0 => settings.every,
        failures => settings.again.saturating_mul(1 << (failures - 1).min(16)).min(settings.every),
    };
    interval.mul_f64(jitter)
}

#[derive(Deserialize)]
struct ModelsResponse {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
    /// The base model of an adapter.
    parent: Option<String>,
    max_model_len: Option<u64>,
}

fn read_models(text: &str) -> ProbeReply<ServedModels> {
    let list: ModelsResponse = serde_json::from_str(text).map_err(|_| ProbeFailure::Absent)?;
    let with_short_name = list.data.into_iter().filter(|entry| entry.id.len() <= MAX_NAME);
    let mut entries: Vec<ModelEntry> = with_short_name.take(MAX_MODELS).collect();
    entries.sort_by_key(|entry| entry.parent.is_some());
    let context = entries.iter().filter_map(|entry| entry.max_model_len).filter(|length| *length > 0).min();
    let adapter = |entry: &ModelEntry| {
        let base = entry.parent.as_deref().filter(|base| base.len() <= MAX_NAME)?;
        Some(Adapter { name: entry.id.as_str().into(), base: base.into() })
    };
    Ok(ServedModels {
        adapters: entries.iter().filter_map(adapter).collect(),
        names: entries.iter().map(|entry| ModelId::from(entry.id.as_str())).collect(),
        context: Tokens(context.unwrap_or(0)),
    })
}

/// Parses metrics. A page that identifies neither an engine nor a process is not a metrics page.
fn read_metrics(page: &str) -> ProbeReply<Arc<Scrape>> {
    let scrape = Scrape::read(page);
    let is_metrics_page = scrape.engine != EngineKind::Other || scrape.process.is_some();
    if is_metrics_page { Ok(Arc::new(scrape)) } else { Err(ProbeFailure::Absent) }
}

#[derive(Deserialize)]
struct VersionResponse {
    version: String,
}

fn read_version(text: &str) -> Option<Arc<str>> {
    serde_json::from_str::<VersionResponse>(text).ok().map(|version| version.version.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_speed_up_after_a_failure_and_slow_down_again() {
        let pace = ProbeSettings::default();
        let pauses: Vec<u128> = (0..8).map(|failures| pause(pace, failures, 500).as_millis()).collect();
        assert_eq!(pauses, [1000, 100, 200, 400, 800, 1000, 1000, 1000]);
        assert_eq!(pause(pace, u32::MAX, 500), pace.every);
    }

    #[test]
    fn probe_times_are_jittered_by_a_fifth_of_the_interval() {
        let spread: Vec<u128> =
            (0..1000).map(|chance| pause(ProbeSettings::default(), 0, chance).as_millis()).collect();
        assert_eq!((spread.iter().min(), spread.iter().max()), (Some(&900), Some(&1099)));
    }

    #[test]
    fn base_models_precede_adapters_and_the_shortest_context_counts() {
        let text =
            r#"{"data":[{"id":"lora","parent":"base","max_model_len":4096},{"id":"base","max_model_len":8192}]}"#;
        let (base, lora) = (ModelId::from("base"), ModelId::from("lora"));
        let adapters = [Adapter { name: lora.clone(), base: base.clone() }].into();
        let expected = ServedModels { names: [base, lora].into(), adapters, context: Tokens(4096) };
        assert_eq!(read_models(text), Ok(expected));
    }

    #[test]
    fn invalid_model_list_is_refused_and_a_long_one_bounded() {
        for text in ["", "<html>", "{}", r#"{"data":[{"name":"x"}]}"#, r#"{"data":7}"#, "[[[["] {
            assert_eq!(read_models(text), Err(ProbeFailure::Absent), "{text}");
        }
        let endless = format!(r#"{{"data":[{}{{"id":"b"}}]}}"#, r#"{"id":"a"},"#.repeat(5000));
        assert_eq!(read_models(&endless).unwrap().names.len(), MAX_MODELS);
    }

    #[test]
    fn page_without_engine_or_process_is_no_metrics_page() {
        for page in ["http_requests_total 4\n", "<html>welcome</html>", ""] {
            assert_eq!(read_metrics(page), Err(ProbeFailure::Absent), "{page}");
        }
        assert_eq!(read_metrics("process_start_time_seconds 1.5\n").unwrap().process, Some(Incarnation(1_500_000)));
        assert_eq!(read_metrics("vllm:num_requests_running 2\n").unwrap().running, 2);
    }
}
