//! Tests of the fleet over real sockets, with simulated workers and with faulty servers.

mod engine;
mod events;
mod probes;
mod router_peers;
mod sources;
mod turnover;
mod views;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine_model::EngineProfile;
use residency::{BlockMappingRules, RoutedBlockLimits};
use tokio::sync::mpsc;
use vocabulary::{
    HashSeed, ModelNamespace, Overlap, PrefixChain, PrefixId, RequestNamespace, Tokens, WorkerId, WorkerRole,
    WorkerView,
};

use super::*;
use crate::events::HashInputKind;
use crate::sim::{AddSpecialTokens, ConversationApi, SimOptions, SimWorker, TextCodec, TextCodecError};

/// A codec whose tokens are numbers written as text.
struct NumberCodec;

impl TextCodec for NumberCodec {
    fn encode_chat(&self, _: ConversationApi, _: &[u8]) -> Result<Vec<u32>, TextCodecError> {
        Err(TextCodecError("only token ids here".to_owned()))
    }

    fn encode_completion(&self, body: &[u8]) -> Result<Vec<Vec<u32>>, TextCodecError> {
        #[derive(serde::Deserialize)]
        struct TokenIdsPrompt {
            prompt: Vec<u32>,
        }
        let body: TokenIdsPrompt = serde_json::from_slice(body).map_err(|error| TextCodecError(error.to_string()))?;
        Ok(vec![body.prompt])
    }

    fn encode(&self, text: &str, _: AddSpecialTokens) -> Result<Vec<u32>, TextCodecError> {
        let number = |word: &str| word.parse().map_err(|_| TextCodecError(format!("{word} is no number")));
        text.split_whitespace().map(number).collect()
    }

    fn decode(&self, tokens: &[u32]) -> String {
        tokens.iter().map(|token| format!(" {token}")).collect()
    }

    fn vocabulary_size(&self) -> u32 {
        5_000
    }

    fn eos(&self) -> u32 {
        0
    }

    fn specials(&self) -> Vec<u32> {
        vec![0]
    }
}

const SEED: HashSeed = HashSeed(3);

fn namespace() -> ModelNamespace {
    ModelNamespace { model: "tiny".into(), revision: "".into(), tokenizer: "numbers".into() }
}

fn root() -> PrefixId {
    namespace().root(SEED, RequestNamespace::default())
}

fn served<'a>(prompts: &'a [&'a PrefixChain]) -> StepPromptChains<'a> {
    StepPromptChains { prompts, basis: HashInputKind::Tokens }
}

fn chain(tokens: &[u32]) -> PrefixChain {
    PrefixChain::over_tokens(root(), SEED, Tokens(4), tokens)
}

fn sim_options() -> SimOptions {
    let profile = EngineProfile { block_size: 8, num_gpu_blocks: 64, max_model_len: 400, ..EngineProfile::default() };
    SimOptions { profile, speed_up: 50.0, ..SimOptions::default() }
}

async fn sim(options: SimOptions) -> SimWorker {
    SimWorker::start(options, Arc::new(NumberCodec)).await.unwrap()
}

/// Starts a worker at an address whose previous owner's sockets may still be closing.
async fn sim_at_reused_address(options: SimOptions) -> SimWorker {
    for _ in 0..500 {
        if let Ok(worker) = SimWorker::start(options.clone(), Arc::new(NumberCodec)).await {
            return worker;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{} is never free", options.listen)
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}")
}

fn quick_probes() -> ProbeSettings {
    ProbeSettings { every: Duration::from_millis(50), again: Duration::from_millis(10), ..ProbeSettings::default() }
}

/// A fleet with short probe intervals, and its liveness reports.
struct FleetHarness {
    fleet: Arc<Fleet>,
    index: SharedIndex,
    alive: mpsc::Receiver<LivenessReport>,
}

impl FleetHarness {
    fn with_workers(workers: Vec<WorkerDefinition>) -> Self {
        Self::with_probe_settings(workers, quick_probes())
    }

    /// A fleet that can fetch snapshots from another router's.
    fn with_peer(other: &Self, worker: SocketAddr) -> Self {
        let spec = WorkerDefinition::at(&url(worker), WorkerRole::Hybrid);
        let neighbour: Arc<dyn SnapshotProvider> = Arc::new(router_peers::PeerRouter(other.fleet.clone()));
        Self::open(vec![spec], quick_probes(), Some(neighbour))
    }

    fn with_probe_settings(workers: Vec<WorkerDefinition>, settings: ProbeSettings) -> Self {
        Self::open(workers, settings, None)
    }

    fn open(
        workers: Vec<WorkerDefinition>,
        settings: ProbeSettings,
        imprints: Option<Arc<dyn SnapshotProvider>>,
    ) -> Self {
        Self::start((workers, settings, imprints), Fleet::start)
    }

    fn kept(workers: Vec<WorkerDefinition>, settings: ProbeSettings, supervise: TaskSupervisor) -> Self {
        Self::start((workers, settings, None), |options| Fleet::start_supervised(options, supervise))
    }

    fn start(
        (workers, pace, imprints): (Vec<WorkerDefinition>, ProbeSettings, Option<Arc<dyn SnapshotProvider>>),
        start: impl FnOnce(FleetOptions) -> Result<Fleet, FleetError>,
    ) -> Self {
        let index = SharedIndex::new();
        let (alive, reports) = mpsc::channel(64);
        let rules = BlockMappingRules::new(Tokens(4), SEED, namespace());
        let options = FleetOptions {
            workers,
            pace,
            index: index.clone(),
            rules: Arc::new(move |model| (&*model.0 == "tiny").then(|| rules.clone())),
            liveness: Some(alive),
            routed_limits: RoutedBlockLimits::default(),
            snapshots: imprints,
            extra_ranks: 16,
        };
        Self { fleet: Arc::new(start(options).unwrap()), index, alive: reports }
    }

    fn at(address: SocketAddr) -> Self {
        Self::with_workers(vec![WorkerDefinition::at(&url(address), WorkerRole::Hybrid)])
    }

    fn view(&self, at: usize) -> WorkerView {
        self.fleet.snapshot()[at].clone()
    }

    fn id(&self, at: usize) -> WorkerId {
        self.view(at).id
    }

    /// Why the first worker's blocks are not known exactly.
    fn inexact_reason(&self) -> String {
        self.fleet.inexact_reason(self.id(0)).map(|doubt| doubt.to_string()).unwrap_or_default()
    }

    fn overlaps(&self, tokens: &[u32]) -> Vec<Overlap> {
        self.index.overlaps_of_chain(&chain(tokens))
    }

    /// Number of chain blocks of a prompt that the first worker holds.
    fn depth(&self, tokens: &[u32]) -> u64 {
        let id = self.id(0);
        self.overlaps(tokens).iter().find(|overlap| overlap.worker == id).map_or(0, |overlap| overlap.blocks.0)
    }

    /// Waits until `holds`; panics with the last state if it never does.
    async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        for _ in 0..1_000 {
            if holds(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let events = self.fleet.events(self.id(0));
        panic!("never {what}: {:#?} {events:#?}", self.fleet.snapshot());
    }

    async fn until_exact(&self) {
        self.until("exact", |watch| watch.view(0).kv_index_state == KvIndexState::Exact).await;
    }
}

/// Returns a worker's answer to a prompt of token ids.
async fn ask(address: SocketAddr, prompt: &[u32], max_tokens: u32) -> serde_json::Value {
    let body = serde_json::json!({
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true
    });
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let answer = client.post(format!("{}/v1/completions", url(address))).json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.json().await.unwrap()
}

/// Returns a prompt that is unique to `number`.
fn prompt(number: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| 1 + (number * 977 + at * 13) % 4_900).collect()
}
