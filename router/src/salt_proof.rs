//! Whether workers keep prompts of different salts apart: proven once in each of their lives, with two requests of one prompt.
//!
//! An engine that takes no `cache_salt` lets tenants find out what others have sent. Nothing of a client's goes into a proof.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use planner::Leg;
use serde_json::json;
use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::{DpRank, Health, Incarnation, Tokens, WorkerId, WorkerView};

use crate::gateway::Gateway;
use crate::incoming::{Endpoint, new_request_id};
use crate::pipeline::legs::Legs;

/// How often it is looked for workers without a verdict.
const EVERY: Duration = Duration::from_secs(1);
/// How long after a proof that told nothing, because the worker failed, the next one begins.
const AGAIN: u32 = 30;
/// Blocks of the prompt; what an engine rounds away at its end is less.
const BLOCKS: u64 = 4;
/// Bounds of the prompt's tokens.
const SHORTEST: u64 = 64;
const LONGEST: u64 = 8192;

/// What two requests with different salts have shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Verdict {
    /// The second found nothing of the first.
    Honoured,
    /// It found what was sent under another salt.
    Ignored,
    /// The engine does not tell what it finds in its cache.
    Untold,
}

/// The verdicts on all workers.
#[derive(Debug, Default)]
pub(crate) struct SaltProofs {
    verdicts: Mutex<HashMap<WorkerId, (Incarnation, Verdict)>>,
}

impl SaltProofs {
    /// Workers that serve no requests while tenants must be apart.
    pub(crate) fn barred(&self) -> Vec<WorkerId> {
        let verdicts = self.verdicts.lock();
        let ignoring = verdicts.iter().filter(|(_, (_, verdict))| *verdict == Verdict::Ignored);
        ignoring.map(|(worker, _)| *worker).collect()
    }

    /// What is wrong with a worker, for a person.
    pub(crate) fn doubt(&self, worker: WorkerId) -> Option<&'static str> {
        let is_ignoring = self.verdicts.lock().get(&worker).is_some_and(|(_, verdict)| *verdict == Verdict::Ignored);
        is_ignoring.then_some(
            "Its engine ignores cache_salt, so that tenants would find out what others have sent: it serves no requests. \
             Update the engine, or set auth.prove_salts = false where tenants may share caches.",
        )
    }

    fn is_known(&self, view: &WorkerView) -> bool {
        self.verdicts.lock().get(&view.id).is_some_and(|(life, _)| *life == view.incarnation)
    }

    fn retain(&self, workers: &[WorkerView]) {
        self.verdicts.lock().retain(|worker, _| workers.iter().any(|view| view.id == *worker));
    }
}

/// Proves every worker that comes, for as long as it is asked to.
pub(crate) async fn follow(gateway: Arc<Gateway>) {
    let mut failed: HashMap<WorkerId, u32> = HashMap::new();
    let mut tick = tokio::time::interval(EVERY);
    loop {
        tick.tick().await;
        if !gateway.keys.are_several() {
            continue;
        }
        let workers = gateway.fleet().snapshot();
        gateway.salt_proofs.retain(&workers);
        failed.retain(|_, rounds| {
            *rounds -= 1;
            *rounds > 0
        });
        let is_due = |view: &&WorkerView| {
            view.health == Health::Ready
                && view.role.decodes()
                && view.link.as_ref().is_none_or(|link| link.carries.serves_alone())
                && !gateway.salt_proofs.is_known(view)
                && !failed.contains_key(&view.id)
        };
        let due: Vec<&WorkerView> = workers.iter().filter(is_due).collect();
        let proofs = futures::future::join_all(due.iter().map(|view| prove(&gateway, view))).await;
        for (view, verdict) in due.into_iter().zip(proofs) {
            match verdict {
                Some(verdict) => judge(&gateway, view, verdict),
                None => drop(failed.insert(view.id, AGAIN)),
            }
        }
    }
}

fn judge(gateway: &Gateway, view: &WorkerView, verdict: Verdict) {
    gateway.metrics.requests.salt_proofs.with_label_values(&[verdict.as_ref()]).inc();
    gateway.salt_proofs.verdicts.lock().insert(view.id, (view.incarnation, verdict));
    let worker = &view.endpoint;
    match verdict {
        Verdict::Honoured => tracing::debug!(%worker, "prompts of different salts are kept apart"),
        Verdict::Ignored => tracing::warn!(
            %worker,
            "the engine ignores cache_salt, so that tenants would find out what others have sent: it serves no requests; update \
             the engine, or set auth.prove_salts = false where tenants may share caches"
        ),
        Verdict::Untold => tracing::info!(
            %worker,
            "whether the engine honours cache_salt cannot be proven, because it does not tell cached tokens: start vLLM with \
             --enable-prompt-tokens-details"
        ),
    }
}

/// None where the worker failed, or lists no model.
async fn prove(gateway: &Arc<Gateway>, view: &WorkerView) -> Option<Verdict> {
    let model = view.models.first()?;
    let tokens = (BLOCKS * view.capacity.block.0).clamp(SHORTEST, LONGEST);
    let seed = new_request_id().0;
    // Ids that every vocabulary has, in an order that no cache has seen.
    let prompt: Vec<u64> = (0..tokens).map(|at| 100 + (seed.rotate_left(at as u32 * 7) as u64 ^ at) % 150).collect();
    let ask = async |salt: String| {
        let body = json!({
            "model": model.to_string(), "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": false, "cache_salt": salt,
        });
        let legs = Legs::unasked(gateway);
        let leg =
            Leg { worker: view.id, rank: DpRank(0), tokens_cached: Tokens::ZERO, tokens_computed: Tokens(tokens) };
        let counted = legs.dispatch(&leg);
        let answer = legs.whole_answer(&leg, Endpoint::Completions.path(), body.to_string().into()).await;
        drop(counted);
        Some(answer.ok()?.1.usage.and_then(|usage| usage.cached))
    };
    let salt = |name: &str| format!("proof-{name}-{}", new_request_id());
    ask(salt("one")).await?;
    Some(match ask(salt("other")).await? {
        None => Verdict::Untold,
        Some(Tokens::ZERO) => Verdict::Honoured,
        Some(_) => Verdict::Ignored,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::Request;
    use serde_json::json;
    use workers_shim::sim::{SimOptions, SimWorker};

    use crate::sim_command::ModelCodec;
    use crate::testing::{front_of, get, send, until};

    async fn engine(ignores_salts: bool) -> SimWorker {
        let options = SimOptions { ignores_salts, speed_up: 50.0, ..SimOptions::default() };
        SimWorker::start(options, Arc::new(ModelCodec::load(None).unwrap())).await.unwrap()
    }

    #[tokio::test]
    async fn an_engine_that_ignores_salts_serves_nobody_while_there_are_several_tenants() {
        let (well, ill) = (engine(false).await, engine(true).await);
        let urls = [&well, &ill].map(|engine| format!("http://{}", engine.address()));
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys.toml");
        std::fs::write(&keys, "[keys]\n\"k1\" = \"t1\"\n\"k2\" = \"t2\"").unwrap();
        let front = front_of(&urls, &[&format!("auth.keys_file={}", keys.display())]).await;
        let proofs = |verdict| front.gateway.metrics.requests.salt_proofs.with_label_values(&[verdict]).get();
        until("both are proven", || proofs("honoured") == 1 && proofs("ignored") == 1).await;
        for number in 0..12 {
            for (path, field) in [("/v1/completions", "prompt"), ("/tokenize", "prompt")] {
                let body = json!({"model": "tiny", field: format!("question {number}"), "max_tokens": 1}).to_string();
                let request = Request::post(path).header("authorization", "Bearer k1");
                assert_eq!(send(front.proxy_address(), request, body).await.status, 200);
            }
        }
        let receipts = front.gateway.decisions.receipts.newest(100, |_| true);
        let id = vocabulary::WorkerId::of_endpoint(&urls[1]);
        assert!(receipts.iter().all(|receipt| receipt.attempts.iter().all(|attempt| attempt.decode != id)));
        let workers = get(front.operator_address(), "/ownerserve/v1/workers").await.json();
        let line =
            workers["workers"].as_array().unwrap().iter().find(|line| line["endpoint"] == urls[1].as_str()).unwrap();
        assert!(line["knowledge"] == "degraded" && line["doubt"].as_str().unwrap().contains("cache_salt"), "{line}");
    }

    #[tokio::test]
    async fn one_tenant_needs_no_proof() {
        let ill = engine(true).await;
        let front = front_of(&[format!("http://{}", ill.address())], &[]).await;
        let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 1}).to_string();
        let got = send(front.proxy_address(), Request::post("/v1/completions"), body).await;
        assert_eq!(got.status, 200);
        assert!(front.gateway.salt_proofs.barred().is_empty());
    }
}
