//! Asking one worker again and again whether it is there and what it does.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use vocabulary::{Health, Incarnation, ModelId, Tokens};

use super::config::Pace;
use super::member::{Member, Seen};
use super::{Alive, FleetError};
use crate::scrape::metrics::Scrape;

/// Longest answer that is read.
const MOST_BYTES: usize = 16 << 20;
/// How often the list of models is read again; adapters come and go.
const MODELS_EVERY: Duration = Duration::from_secs(5);

/// One pooled client for all probes, apart from the one that carries requests.
pub(super) fn client(pace: Pace) -> Result<reqwest::Client, FleetError> {
    // An error means that a provider is installed already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::Client::builder()
        .timeout(pace.patience)
        .connect_timeout(pace.patience)
        .pool_idle_timeout(Duration::from_secs(4))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy();
    Ok(builder.build()?)
}

/// Why a worker did not answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Silence {
    /// Nobody listens, or the connection broke.
    Refused,
    /// It took too long.
    TimedOut,
    /// It answered with an error.
    Unwell,
}

/// GET of a small text.
pub(crate) async fn get(client: &reqwest::Client, member: &Member, path: &str) -> Result<String, Silence> {
    let silence = |error: reqwest::Error| if error.is_timeout() { Silence::TimedOut } else { Silence::Refused };
    let mut request = client.get(format!("{}{path}", member.spec.endpoint));
    if let Some(key) = &member.spec.api_key {
        request = request.bearer_auth(key);
    }
    let mut answer = request.send().await.map_err(silence)?;
    if !answer.status().is_success() {
        return Err(Silence::Unwell);
    }
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(silence)? {
        if body.len() + chunk.len() > MOST_BYTES {
            return Err(Silence::Unwell);
        }
        body.extend_from_slice(&chunk);
    }
    String::from_utf8(body).map_err(|_| Silence::Unwell)
}

/// The process behind a worker, asked now.
pub(crate) async fn process_of(client: &reqwest::Client, member: &Member) -> Option<Incarnation> {
    Scrape::read(&get(client, member, "/metrics").await.ok()?).process
}

/// One worker's probes.
pub(super) struct Prober {
    pub(super) member: Arc<Member>,
    pub(super) client: reqwest::Client,
    pub(super) pace: Pace,
    pub(super) alive: Option<mpsc::Sender<Alive>>,
}

impl Prober {
    /// Runs until it is aborted.
    pub(super) async fn run(self) {
        let mut timeouts = 0;
        let mut wait = self.pace.again;
        let mut models_at: Option<Instant> = None;
        loop {
            let known = models_at.is_some_and(|at| at.elapsed() < MODELS_EVERY);
            match self.look(if known { Models::Known } else { Models::Asked }).await {
                Ok(seen) => {
                    if !known {
                        models_at = Some(Instant::now());
                    }
                    timeouts = 0;
                    wait = self.pace.again;
                    self.report(&seen);
                    self.member.see(seen);
                    self.pause(self.pace.every).await;
                }
                Err(silence) => {
                    timeouts += 1;
                    models_at = None;
                    if silence != Silence::TimedOut || timeouts >= self.pace.timeouts {
                        let seen = self.member.seen();
                        self.member.see(Seen { health: Health::Unreachable, ..(*seen).clone() });
                    }
                    self.pause(wait).await;
                    wait = (wait * 2).min(self.pace.every);
                }
            }
        }
    }

    async fn pause(&self, wait: Duration) {
        tokio::select! {
            () = sleep(wait) => {}
            () = self.member.hurry.notified() => {}
        }
    }

    fn report(&self, seen: &Seen) {
        if let Some(alive) = &self.alive {
            let ranks = seen.scrape.ranks.max(1);
            // A full queue means that nobody renews just now; the next probe reports again.
            let _ = alive.try_send(Alive { worker: self.member.id, incarnation: seen.incarnation, ranks });
        }
    }

    /// Looks once. Health and models must answer; figures are used where there are some.
    async fn look(&self, models: Models) -> Result<Seen, Silence> {
        let before = self.member.seen();
        let healthy = match get(&self.client, &self.member, "/health").await {
            Ok(_) => Ok(()),
            // Not every OpenAI-compatible server has it; the list of models decides then.
            Err(Silence::Unwell) => get(&self.client, &self.member, "/v1/models").await.map(drop),
            Err(silence) => Err(silence),
        };
        healthy?;
        let mark = self.member.desk.counters.mark();
        let scrape = match get(&self.client, &self.member, "/metrics").await {
            Ok(text) => Scrape::read(&text),
            Err(Silence::Unwell) => Scrape::default(),
            Err(silence) => return Err(silence),
        };
        let incarnation = scrape.process.unwrap_or_default();
        let mut seen = Seen { health: Health::Ready, incarnation, scrape: Arc::new(scrape), mark, ..(*before).clone() };
        if models == Models::Asked || incarnation != before.incarnation {
            self.identify(&mut seen).await?;
        }
        Ok(seen)
    }

    async fn identify(&self, seen: &mut Seen) -> Result<(), Silence> {
        let text = get(&self.client, &self.member, "/v1/models").await?;
        let list: ModelList = serde_json::from_str(&text).map_err(|_| Silence::Unwell)?;
        seen.context = Tokens(list.data.iter().filter_map(|model| model.max_model_len).min().unwrap_or(0));
        if self.member.spec.models.is_empty() {
            seen.models = list.data.iter().map(|model| ModelId::from(model.id.as_str())).collect();
        }
        if let Ok(text) = get(&self.client, &self.member, "/version").await
            && let Ok(version) = serde_json::from_str::<Version>(&text)
        {
            seen.version = version.version.into();
        }
        Ok(())
    }
}

/// Whether the list of models has to be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Models {
    Known,
    Asked,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
    #[serde(default)]
    max_model_len: Option<u64>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}
