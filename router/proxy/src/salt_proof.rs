//! Salt probes: test whether workers isolate prompts of different salts, once per incarnation, at each endpoint that
//! they serve, with requests of one prompt.
//!
//! An engine that ignores `cache_salt` lets tenants find out what others have sent. A probe never contains client data.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use http::StatusCode;
use planner::{Leg, LegRole, WorkerRank};
use prometheus::IntCounterVec;
use serde_json::{Value, json};
use vocabulary::{DpRank, Tokens, WorkerHealth, WorkerId, WorkerView};

use crate::client_request::GenerationEndpoint;
use crate::leg_outcome::LegError;
use crate::legs::Legs;
use crate::request_id::new_request_id;
use crate::tenant_isolation::{SaltSupport, TenantIsolation};
use crate::worker_client::WorkerClient;

/// Time between two searches for workers without a verdict.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Checks to skip after a probe without a result, because the worker failed.
const RETRY_AFTER_CHECKS: u32 = 30;
/// Length of the prompt in blocks; engines may leave out less than this at its end.
const PROMPT_BLOCKS: u64 = 4;
/// Bounds of the prompt's length in tokens.
const MIN_PROMPT_TOKENS: u64 = 64;
const MAX_PROMPT_TOKENS: u64 = 8192;

/// The handles that salt probes use.
#[derive(Clone, Debug)]
pub struct SaltProver {
    /// Client to the workers.
    pub workers: WorkerClient,
    /// Keeps the verdicts.
    pub isolation: TenantIsolation,
    /// Counts verdicts.
    pub proofs: IntCounterVec,
}

/// Tests every new worker. Never returns.
pub async fn follow(prover: SaltProver) {
    let mut failed: HashMap<WorkerId, u32> = HashMap::new();
    // Concurrent, so that a hanging worker does not delay the verdicts on others.
    let mut proofs: FuturesUnordered<BoxFuture<'static, (WorkerView, Option<SaltSupport>)>> = FuturesUnordered::new();
    let mut under_way = HashSet::new();
    let mut tick = tokio::time::interval(CHECK_INTERVAL);
    loop {
        tokio::select! {
            Some((view, verdict)) = proofs.next() => {
                under_way.remove(&view.id);
                match verdict {
                    Some(verdict) => record_verdict(&prover, &view, verdict),
                    None => drop(failed.insert(view.id, RETRY_AFTER_CHECKS)),
                }
                continue;
            }
            _ = tick.tick() => {}
        }
        if !prover.isolation.keys().has_several_tenants() {
            continue;
        }
        let workers = prover.workers.fleet().snapshot();
        prover.isolation.salt_support().retain(&workers);
        failed.retain(|_, rounds| {
            *rounds -= 1;
            *rounds > 0
        });
        let is_due = |view: &&WorkerView| {
            view.health == WorkerHealth::Ready
                && view.role.decodes()
                && view.link.as_ref().is_none_or(|link| link.carries.computes_prompts())
                && !prover.isolation.salt_support().has_verdict(view)
                && !failed.contains_key(&view.id)
                && !under_way.contains(&view.id)
        };
        let due: Vec<WorkerView> = workers.iter().filter(is_due).cloned().collect();
        for view in due {
            under_way.insert(view.id);
            let prover = prover.clone();
            let proof = async move {
                let verdict = prove(&prover, &view).await;
                (view, verdict)
            };
            proofs.push(proof.boxed());
        }
    }
}

fn record_verdict(prover: &SaltProver, view: &WorkerView, verdict: SaltSupport) {
    prover.proofs.with_label_values(&[verdict.as_ref()]).inc();
    prover.isolation.salt_support().record(view, verdict);
    let worker = &view.endpoint;
    match verdict {
        SaltSupport::Isolated => tracing::debug!(%worker, "prompts of different salts are kept apart"),
        SaltSupport::NotIsolated => tracing::warn!(
            %worker,
            "the engine ignores cache_salt, so that tenants would find out what others have sent: it serves no requests; update \
             the engine, or set auth.verify_cache_salt = false where tenants may share caches"
        ),
        SaltSupport::Unknown => tracing::warn!(
            %worker,
            "whether the engine honours cache_salt cannot be proven, so that tenants may find out what others have sent, because it does not tell cached tokens: start vLLM with \
             --enable-prompt-tokens-details"
        ),
    }
}

/// Returns the worst verdict over the endpoints that the worker serves; `None` where it failed, or lists no model.
async fn prove(prover: &SaltProver, view: &WorkerView) -> Option<SaltSupport> {
    let mut verdicts = Vec::new();
    for endpoint in [GenerationEndpoint::Completions, GenerationEndpoint::ChatCompletions, GenerationEndpoint::Messages]
    {
        verdicts.extend(prove_at(prover, view, endpoint).await?);
    }
    [SaltSupport::NotIsolated, SaltSupport::Unknown, SaltSupport::Isolated]
        .into_iter()
        .find(|verdict| verdicts.contains(verdict))
}

/// A worker's answer to a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CacheProbeAnswer {
    /// How much of it was in its cache, where it reports that.
    Found(Option<Tokens>),
    /// It does not serve this endpoint.
    Nothing,
}

/// One prompt that no cache has seen.
struct SaltProbe<'a> {
    prover: &'a SaltProver,
    view: &'a WorkerView,
    model: String,
    ids: Vec<u64>,
}

impl SaltProbe<'_> {
    fn body(&self, endpoint: GenerationEndpoint, salt: Option<&str>) -> Value {
        let mut body = json!({"model": self.model, "max_tokens": 1, "temperature": 0, "stream": false});
        match endpoint {
            GenerationEndpoint::Completions => body["prompt"] = json!(self.ids),
            _ => {
                let words: Vec<String> = self.ids.iter().map(u64::to_string).collect();
                body["messages"] = json!([{"role": "user", "content": words.join(" ")}]);
            }
        }
        if let Some(salt) = salt {
            body["cache_salt"] = json!(salt);
        }
        body
    }

    /// Sends the prompt to an endpoint; `None` where the worker failed.
    async fn ask(&self, endpoint: GenerationEndpoint, salt: Option<&str>) -> Option<CacheProbeAnswer> {
        let legs = Legs::without_client(&self.prover.workers);
        let computed_tokens = Tokens(self.ids.len() as u64);
        let at = WorkerRank { worker: self.view.id, rank: DpRank(0) };
        let leg = Leg { computed_tokens, ..Leg::new(LegRole::Serve, at) };
        let counted = legs.dispatch(&leg);
        let body = self.body(endpoint, salt).to_string();
        let answer = legs.send_whole(&leg, endpoint.path(), body.into()).await;
        drop(counted);
        match answer {
            Ok((_, answer)) => Some(CacheProbeAnswer::Found(answer.usage.and_then(|usage| usage.cached))),
            Err(LegError::Failed(status)) if status.is_client_error() || status == StatusCode::NOT_IMPLEMENTED => {
                Some(CacheProbeAnswer::Nothing)
            }
            Err(_) => None,
        }
    }
}

/// Tests one endpoint. `None` where the worker failed; no verdict where it does not serve this endpoint.
async fn prove_at(prover: &SaltProver, view: &WorkerView, endpoint: GenerationEndpoint) -> Option<Option<SaltSupport>> {
    let model = view.models.first()?.to_string();
    let tokens = (PROMPT_BLOCKS * view.capacity.block.0).clamp(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS);
    let seed = new_request_id().0;
    // Ids that every vocabulary has, in an order that no cache has seen.
    let ids = (0..tokens).map(|at| 100 + (seed.rotate_left(at as u32 * 7) as u64 ^ at) % 150).collect();
    let proof = SaltProbe { prover, view, model, ids };
    let [one, other] = ["one", "other"].map(|name| format!("proof-{name}-{}", new_request_id()));
    if proof.ask(endpoint, Some(&one)).await? == CacheProbeAnswer::Nothing {
        return Some(None);
    }
    let verdict = match proof.ask(endpoint, Some(&other)).await? {
        CacheProbeAnswer::Nothing => return Some(None),
        CacheProbeAnswer::Found(Some(Tokens::ZERO)) => SaltSupport::Isolated,
        CacheProbeAnswer::Found(Some(_)) => SaltSupport::NotIsolated,
        CacheProbeAnswer::Found(None) if endpoint == GenerationEndpoint::Messages => through_chat(&proof, &one).await?,
        CacheProbeAnswer::Found(None) => SaltSupport::Unknown,
    };
    Some(Some(verdict))
}

/// Tests the messages endpoint by a chat: vLLM reports no cached tokens for messages, but a chat with the same text
/// shows under which salt they were cached.
async fn through_chat(proof: &SaltProbe<'_>, salt: &str) -> Option<SaltSupport> {
    let found = |said| matches!(said, CacheProbeAnswer::Found(Some(cached)) if cached > Tokens::ZERO);
    if found(proof.ask(GenerationEndpoint::ChatCompletions, None).await?) {
        return Some(SaltSupport::NotIsolated);
    }
    let is_kept_apart = found(proof.ask(GenerationEndpoint::ChatCompletions, Some(salt)).await?);
    Some(if is_kept_apart { SaltSupport::Isolated } else { SaltSupport::Unknown })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::Request;
    use serde_json::json;
    use workers_shim::sim::{SimOptions, SimWorker};

    use crate::lab::sim_command::ModelTextCodec;
    use crate::testing::{StubWorker, get, send, start_router_at, wait_until};

    async fn engine(ignores_salts: bool) -> SimWorker {
        let options = SimOptions { ignores_salts, speed_up: 50.0, ..SimOptions::default() };
        SimWorker::start(options, Arc::new(ModelTextCodec::load(None).unwrap())).await.unwrap()
    }

    #[tokio::test]
    async fn an_engine_that_ignores_salts_serves_nobody_with_several_tenants() {
        let (well, ill) = (engine(false).await, engine(true).await);
        let urls = [&well, &ill].map(|engine| format!("http://{}", engine.address()));
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys.toml");
        std::fs::write(&keys, "[keys]\n\"k1\" = \"t1\"\n\"k2\" = \"t2\"").unwrap();
        let router = start_router_at(&urls, &[&format!("auth.keys_file={}", keys.display())]).await;
        let proofs = |verdict| router.gateway.metrics.requests.salt_support.with_label_values(&[verdict]).get();
        wait_until("both are proven", || proofs("isolated") == 1 && proofs("not_isolated") == 1).await;
        for number in 0..12 {
            for (path, field) in [("/v1/completions", "prompt"), ("/tokenize", "prompt")] {
                let body = json!({"model": "tiny", field: format!("question {number}"), "max_tokens": 1}).to_string();
                let request = Request::post(path).header("authorization", "Bearer k1");
                assert_eq!(send(router.proxy_address(), request, body).await.status, 200);
            }
        }
        let receipts = router.gateway.decisions.receipts.newest(100, |_| true);
        let id = vocabulary::WorkerId::of_endpoint(&urls[1]);
        assert!(receipts.iter().all(|receipt| receipt.attempts.iter().all(|attempt| attempt.target() != Some(id))));
        let ready = get(router.operator_address(), "/readyz").await.json();
        assert_eq!(
            (&ready["degraded"][0]["component"], &ready["degraded"][0]["reason"]),
            (&json!("workers"), &json!("salts_ignored"))
        );
        let workers = get(router.operator_address(), "/ownerserve/v1/workers").await.json();
        let line =
            workers["workers"].as_array().unwrap().iter().find(|line| line["endpoint"] == urls[1].as_str()).unwrap();
        assert!(
            line["kv_index_state"] == "degraded" && line["kv_index_reason"].as_str().unwrap().contains("cache_salt"),
            "{line}"
        );
    }

    #[tokio::test]
    async fn a_hanging_worker_delays_no_other_verdict_and_unknown_salt_support_is_reported() {
        let silent = StubWorker::start("one", "tiny").await;
        let well = engine(false).await;
        // Accepts connections and never answers.
        let hanging = StubWorker::start("hangs at proofs", "tiny").await;
        let urls = [format!("http://{}", well.address()), silent.url(), hanging.url()];
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys.toml");
        std::fs::write(&keys, "[keys]\n\"k1\" = \"t1\"\n\"k2\" = \"t2\"").unwrap();
        let router = start_router_at(&urls, &[&format!("auth.keys_file={}", keys.display())]).await;
        let proofs = |verdict| router.gateway.metrics.requests.salt_support.with_label_values(&[verdict]).get();
        wait_until("the others are judged", || proofs("isolated") == 1 && proofs("unknown") == 1).await;
        assert_eq!(hanging.active.count(), 1, "it still hangs");
        let ready = get(router.operator_address(), "/readyz").await.json();
        let told = ready["degraded"].as_array().unwrap().iter().find(|line| line["reason"] == "salt_untold").unwrap();
        assert!(told["detail"].as_str().unwrap().contains(&silent.url()), "{ready}");
        let workers = get(router.operator_address(), "/ownerserve/v1/workers").await.json();
        let line = workers["workers"].as_array().unwrap().iter().find(|line| line["endpoint"] == silent.url()).unwrap();
        assert!(line["kv_index_reason"].as_str().unwrap().contains("cache_salt"), "{line}");
    }

    #[tokio::test]
    async fn where_all_engines_ignore_salts_clients_and_probes_are_told_until_there_is_one_tenant() {
        let ill = engine(true).await;
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys.toml");
        std::fs::write(&keys, "[keys]\n\"k1\" = \"t1\"\n\"k2\" = \"t2\"").unwrap();
        let url = format!("http://{}", ill.address());
        let router = start_router_at(&[url], &[&format!("auth.keys_file={}", keys.display())]).await;
        wait_until("it is proven", || !router.gateway.isolation.barred_workers().is_empty()).await;
        let ask = async |path: &str, field: &str| {
            let body = json!({"model": "tiny", field: "x", "max_tokens": 1}).to_string();
            send(router.proxy_address(), Request::post(path).header("authorization", "Bearer k1"), body).await
        };
        for (path, field) in [("/v1/completions", "prompt"), ("/tokenize", "prompt")] {
            let response = ask(path, field).await;
            assert_eq!(response.status, 503, "{path}");
            assert_eq!(response.json()["error"]["code"], "cache_salt_ignored", "{path}");
        }
        let ready = get(router.operator_address(), "/readyz").await;
        assert_eq!(ready.status, 503);
        assert!(ready.json()["detail"].as_str().unwrap().contains("auth.verify_cache_salt"));
        std::fs::write(&keys, "[keys]\n\"k1\" = \"t1\"\n").unwrap();
        wait_until("there is one tenant", || !router.gateway.isolation.keys().has_several_tenants()).await;
        assert_eq!(ask("/v1/completions", "prompt").await.status, 200);
        assert_eq!(get(router.operator_address(), "/readyz").await.json()["degraded"], json!([]));
        let workers = get(router.operator_address(), "/ownerserve/v1/workers").await.json();
        assert!(
            !workers["workers"][0]["kv_index_reason"].as_str().unwrap_or_default().contains("cache_salt"),
            "{workers}"
        );
    }

    #[tokio::test]
    async fn a_single_tenant_needs_no_salt_proof() {
        let ill = engine(true).await;
        let router = start_router_at(&[format!("http://{}", ill.address())], &[]).await;
        let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 1}).to_string();
        let response = send(router.proxy_address(), Request::post("/v1/completions"), body).await;
        assert_eq!(response.status, 200);
        assert!(router.gateway.isolation.salt_support().barred().is_empty());
    }
}
