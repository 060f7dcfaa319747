//! Tests of the simulated worker over real sockets.

mod bootstrap;
mod events;
mod lifecycle;
mod openai;
mod other_apis;
mod transfers;
mod vocabulary;

use std::sync::Arc;
use std::time::Duration;

use engine_model::EngineProfile;
use serde_json::{Value, json};

use super::{SimOptions, SimWorker};
use vocabulary::TinyTokenizer;

/// A fast profile with 512 blocks of eight tokens.
pub(super) fn profile() -> EngineProfile {
    EngineProfile {
        prefill_tokens_per_second: 200_000.0,
        step_overhead: ::vocabulary::Micros(0),
        decode_step: ::vocabulary::Micros(1_000),
        decode_step_per_request: ::vocabulary::Micros(10),
        block_size: 8,
        num_gpu_blocks: 512,
        max_model_len: 4_000,
        link_latency: ::vocabulary::Micros(1_000),
        ..EngineProfile::default()
    }
}

pub(super) fn options() -> SimOptions {
    SimOptions { profile: profile(), ..SimOptions::default() }
}

pub(super) async fn start(options: SimOptions) -> SimWorker {
    SimWorker::start(options, Arc::new(TinyTokenizer)).await.unwrap()
}

pub(super) fn client() -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().timeout(Duration::from_secs(20)).build().unwrap()
}

/// One worker and a client for it.
pub(super) struct SimWorkerFixture {
    pub(super) worker: SimWorker,
    pub(super) client: reqwest::Client,
}

impl SimWorkerFixture {
    pub(super) async fn new() -> Self {
        Self::with(options()).await
    }

    pub(super) async fn with(options: SimOptions) -> Self {
        Self { worker: start(options).await, client: client() }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.worker.address())
    }

    pub(super) async fn send(&self, path: &str, body: &Value) -> reqwest::Response {
        self.client.post(self.url(path)).json(body).send().await.unwrap()
    }

    pub(super) async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self.send(path, &body).await;
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Returns the body of a successful response.
    pub(super) async fn ask(&self, path: &str, body: Value) -> Value {
        let (status, body) = self.post(path, body).await;
        assert_eq!(status, 200, "{body}");
        body
    }

    pub(super) async fn get(&self, path: &str) -> (u16, String) {
        let response = self.client.get(self.url(path)).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    /// Returns the value of the first metrics line that begins with `name`.
    pub(super) async fn metric(&self, name: &str) -> f64 {
        let (_, page) = self.get("/metrics").await;
        let line = page.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {page}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }

    /// Waits until the metric has this value.
    pub(super) async fn until(&self, name: &str, value: f64) {
        for _ in 0..200 {
            if self.metric(name).await == value {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{name} is {} and not {value}", self.metric(name).await);
    }
}

pub(super) fn words(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|at| vocabulary::FIRST_WORD + (seed * 89 + at * 31) % vocabulary::WORDS).collect()
}

pub(super) fn completion(prompt: &[u32], max_tokens: u32) -> Value {
    json!({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

pub(super) fn text(body: &Value) -> String {
    let choice = &body["choices"][0];
    choice["text"].as_str().or(choice["message"]["content"].as_str()).expect("a text").to_owned()
}

/// Returns the answer of a worker that has served nothing before.
pub(super) async fn answer_of_fresh_worker(prompt: &[u32], max_tokens: u32) -> String {
    text(&SimWorkerFixture::new().await.ask("/v1/completions", completion(prompt, max_tokens)).await)
}

/// Returns the JSON payloads of an event stream without `[DONE]`.
pub(super) fn payloads(stream: &str) -> Vec<Value> {
    let data = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter(|line| *line != "[DONE]").map(|line| serde_json::from_str(line).unwrap()).collect()
}
