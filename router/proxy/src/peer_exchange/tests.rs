//! Several routers over simulated workers, with function calls between them instead of a network.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use residency::{BlockMappingRules, RoutedBlockLimits};
use tokio::task::JoinHandle;
use vocabulary::{
    Blocks, DpRank, HashSeed, ModelNamespace, PrefixChain, RequestNamespace, Tokens, WorkerId, WorkerRole,
};
use workers_shim::events::SharedIndex;
use workers_shim::fleet::{FleetOptions, ProbeSettings, WorkerDefinition};
use workers_shim::sim::{EngineProfile, EventOptions, SimOptions, SimWorker};

use super::*;
use crate::lab::sim_command::ModelTextCodec;
use crate::telemetry::metrics::Metrics;
use crate::testing::{post, wait_until};

/// The reachable routers.
#[derive(Default)]
struct InProcessNetwork(Mutex<BTreeMap<NodeId, Arc<PeerExchange>>>);

/// The network as one router sees it.
struct NetworkEndpoint {
    network: Arc<InProcessNetwork>,
    me: NodeId,
}

impl RouterPeers for NetworkEndpoint {
    fn peers(&self) -> Vec<NodeId> {
        self.network.0.lock().keys().copied().filter(|node| *node != self.me).collect()
    }

    fn call(&self, node: NodeId, topic: RouterTopic, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
        match self.network.0.lock().get(&node) {
            Some(exchange) => exchange.answer(topic, self.me, question),
            None => std::future::ready(Err(PeerError::Unknown(node))).boxed(),
        }
    }
}

struct TestPeer {
    fleet: Arc<Fleet>,
    index: SharedIndex,
    metrics: Metrics,
    task: JoinHandle<()>,
}

impl Drop for TestPeer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl TestPeer {
    fn open(street: &Arc<InProcessNetwork>, me: u64, workers: &[SimWorker]) -> Self {
        let (me, index, metrics) = (NodeId(me), SharedIndex::new(), Metrics::default());
        let peers: Arc<dyn RouterPeers> = Arc::new(NetworkEndpoint { network: street.clone(), me });
        let options = FleetOptions {
            workers: workers.iter().map(|worker| WorkerDefinition::at(&url(worker), WorkerRole::Hybrid)).collect(),
            pace: ProbeSettings::default(),
            index: index.clone(),
            rules: Arc::new(|_| Some(BlockMappingRules::new(Tokens(16), HashSeed(1), namespace()))),
            liveness: None,
            routed_limits: RoutedBlockLimits::default(),
            snapshots: Some(Arc::new(SnapshotClient::new(peers.clone(), metrics.exchange.clone()))),
            extra_ranks: 16,
        };
        let fleet = Arc::new(Fleet::start(options).unwrap());
        let exchange = PeerExchange::new(fleet.clone(), peers, metrics.exchange.clone());
        street.0.lock().insert(me, exchange.clone());
        Self { fleet, index, metrics, task: tokio::spawn(exchange.run()) }
    }

    fn is_exact(&self) -> bool {
        self.fleet.snapshot().iter().all(|worker| worker.kv_index_state == KvIndexState::Exact)
    }

    /// Returns how many blocks of a prompt a worker holds.
    fn depth(&self, worker: &SimWorker, prompt: &[u32]) -> Blocks {
        let root = namespace().root(HashSeed(1), RequestNamespace::default());
        let chain = PrefixChain::over_tokens(root, HashSeed(1), Tokens(16), prompt);
        let overlaps = self.index.overlaps_of_chain(&chain);
        let there = overlaps.iter().find(|overlap| overlap.worker == WorkerId::of_endpoint(&url(worker)));
        there.map_or(Blocks::ZERO, |overlap| overlap.blocks)
    }

    fn count(&self, outcome: &str) -> u64 {
        self.metrics.exchange.residency_snapshots.with_label_values(&[outcome]).get()
    }
}

fn namespace() -> ModelNamespace {
    ModelNamespace { model: "tiny".into(), revision: "".into(), tokenizer: "t".into() }
}

fn url(worker: &SimWorker) -> String {
    format!("http://{}", worker.address())
}

/// Workers that replay only their last message.
async fn workers(count: usize) -> Vec<SimWorker> {
    let codec = Arc::new(ModelTextCodec::load(None).unwrap());
    let mut workers = Vec::new();
    for _ in 0..count {
        let events = EventOptions { buffer: 1, ..EventOptions::default() };
        let profile = EngineProfile { block_size: 16, ..EngineProfile::default() };
        let options = SimOptions { events, profile, speed_up: 100.0, ..SimOptions::default() };
        workers.push(SimWorker::start(options, codec.clone()).await.unwrap());
    }
    workers
}

fn prompt(number: u32) -> Vec<u32> {
    (0..96).map(|place| 100 + (number * 31 + place * 7) % 400).collect()
}

async fn compute(worker: &SimWorker, prompt: &[u32]) {
    let body = serde_json::json!({"model": "tiny", "prompt": prompt, "max_tokens": 1});
    let response = post(worker.address(), "/v1/completions", body.to_string()).await;
    assert_eq!(response.status, 200, "{response:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starting_router_copies_residency_that_engines_no_longer_replay() {
    let (street, workers) = (Arc::new(InProcessNetwork::default()), workers(6).await);
    let first = TestPeer::open(&street, 1, &workers);
    wait_until("the first one knows all", || first.is_exact()).await;
    for (number, worker) in (0..).zip(&workers) {
        for more in 0..3 {
            compute(worker, &prompt(number + 10 * more)).await;
        }
        wait_until("the first one heard of it", || first.depth(worker, &prompt(number + 20)) == Blocks(6)).await;
    }
    let second = TestPeer::open(&street, 2, &workers);
    wait_until("the second one knows all", || second.is_exact()).await;
    for (number, worker) in (0..).zip(&workers) {
        for more in 0..3 {
            assert_eq!(second.depth(worker, &prompt(number + 10 * more)), Blocks(6), "worker {number}, prompt {more}");
        }
    }
    assert_eq!((first.count("sent"), second.count("received")), (6, 6));
    wait_until("it is noted how long that took", || second.metrics.exchange.exact_seconds.get() > 0.0).await;
    // A third router, whose only peers have moved away.
    let alone = TestPeer::open(&Arc::default(), 3, &workers);
    wait_until("it heard of the last prompt", || alone.depth(&workers[5], &prompt(25)) == Blocks(6)).await;
    assert!(!alone.is_exact() && alone.depth(&workers[5], &prompt(5)) == Blocks::ZERO);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_count_peer_requests_until_the_peer_leaves() {
    let (street, workers) = (Arc::new(InProcessNetwork::default()), workers(1).await);
    let (a, b) = (TestPeer::open(&street, 1, &workers), TestPeer::open(&street, 2, &workers));
    let at = WorkerId::of_endpoint(&url(&workers[0]));
    let in_flight = a.fleet.dispatch(at, DpRank(0), Tokens(700));
    let backlog = |router: &TestPeer| router.fleet.snapshot()[0].load.backlog;
    wait_until("b counts it", || backlog(&b) == Tokens(700) && b.fleet.peer_count() == 1).await;
    let more = b.fleet.dispatch(at, DpRank(0), Tokens(50));
    wait_until("both count both", || backlog(&a) == Tokens(750) && backlog(&b) == Tokens(750)).await;
    street.0.lock().remove(&NodeId(1));
    drop(a);
    wait_until("b counts its own", || backlog(&b) == Tokens(50) && b.fleet.peer_count() == 0).await;
    drop((in_flight, more));
}

#[tokio::test]
async fn malformed_messages_are_rejected_and_counted() {
    let street = Arc::new(InProcessNetwork::default());
    let router = TestPeer::open(&street, 1, &[]);
    let exchange = street.0.lock()[&NodeId(1)].clone();
    for topic in [RouterTopic::Exchange, RouterTopic::Residency] {
        for message in [&b""[..], b"\x01", b"\x02\x00", b"nonsense"] {
            let answer = exchange.answer(topic, NodeId(2), Bytes::copy_from_slice(message)).await;
            assert!(matches!(answer, Err(PeerError::Garbled(_))), "{topic:?} {message:?}");
        }
    }
    assert_eq!(router.metrics.exchange.tables.with_label_values(&["malformed"]).get(), 4);
}
