use serde_json::{Value, json};
use vocabulary::{KvIndexState, Tokens};

use super::*;
use crate::lab::sim_command::tests::{sim, url};
use crate::receipt::Receipt;
use crate::telemetry::metrics::Metrics;
use crate::testing::{StubWorker, TestRouter, get, post, start_router, start_router_at, wait_until};

const CHAT: &str = "/v1/chat/completions";
const SETTINGS: [&str; 1] = ["models.tiny.tokenizer_dir=builtin"];
const AGREES: PromptTokenCounts = PromptTokenCounts { router: Tokens(9), engine: Tokens(9) };
const DISAGREES: PromptTokenCounts = PromptTokenCounts { router: Tokens(9), engine: Tokens(8) };

fn agreement() -> (TokenizerDrift, ModelId) {
    (TokenizerDrift::new(Metrics::default().prefix_cache), ModelId::from("m"))
}

fn answer_token_counts(id: u64, agreement: &TokenizerDrift, counts: &[PromptTokenCounts]) {
    let model = ModelId::from("m");
    for counts in counts {
        agreement.record_token_count((&model, WorkerId(id)), Some(*counts), Instant::now());
    }
}

fn cache_hit_check(told: u64, found: u64) -> CacheHitCheck {
    CacheHitCheck { reported: Tokens(told), cached_tokens: Tokens(found), block_size: Tokens(16) }
}

/// Records the worker's answers to prompts of which `told` was reported and `found` was cached.
fn answer_cache_hits(id: u64, agreement: &TokenizerDrift, all: &[(u64, u64)]) {
    let at = (&ModelId::from("m"), WorkerId(id));
    for (told, found) in all {
        agreement.record_cache_hit(at, cache_hit_check(*told, *found).conclusive(), Instant::now());
    }
}

#[test]
fn three_disagreements_in_eight_answers_suspect_a_mismatch() {
    let (all, model) = agreement();
    answer_token_counts(1, &all, &[DISAGREES, DISAGREES]);
    answer_token_counts(1, &all, &[AGREES; 6]);
    answer_token_counts(1, &all, &[DISAGREES]);
    assert!(!all.is_suspected_mismatch(&model, WorkerId(1)), "the first two of the three are long ago");
    answer_token_counts(1, &all, &[AGREES, DISAGREES]);
    assert!(!all.is_suspected_mismatch(&model, WorkerId(1)));
    answer_token_counts(1, &all, &[DISAGREES]);
    assert!(all.is_suspected_mismatch(&model, WorkerId(1)));
    assert!(!all.is_suspected_mismatch(&"other".into(), WorkerId(1)));
}

#[test]
fn a_mismatch_ends_when_its_worker_leaves() {
    let (all, model) = agreement();
    answer_token_counts(1, &all, &[DISAGREES; 3]);
    answer_token_counts(2, &all, &[DISAGREES; 3]);
    answer_token_counts(3, &all, &[AGREES]);
    assert!(all.is_suspected_mismatch(&model, WorkerId(3)), "most disagree");
    all.retain_workers(|id| id != WorkerId(2));
    assert_eq!(all.suspected_mismatches().iter().map(|doubt| &doubt.workers[..]).collect::<Vec<_>>(), [[WorkerId(1)]]);
    assert!(!all.is_suspected_mismatch(&model, WorkerId(3)) && all.is_suspected_mismatch(&model, WorkerId(1)));
    all.retain_workers(|id| id == WorkerId(3));
    assert_eq!(all.suspected_mismatches(), []);
    assert!(!all.any_suspected.load(Ordering::Acquire), "nobody asks with the lock");
    answer_token_counts(1, &all, &[DISAGREES; 2]);
    assert!(!all.is_suspected_mismatch(&model, WorkerId(1)), "it begins anew where it comes back");
}

#[test]
fn a_mismatch_ends_after_thirty_two_agreeing_answers_in_a_row() {
    let (all, model) = agreement();
    answer_token_counts(1, &all, &[DISAGREES; 3]);
    answer_token_counts(1, &all, &[AGREES; 31]);
    answer_token_counts(1, &all, &[DISAGREES]);
    answer_token_counts(1, &all, &[AGREES; 31]);
    assert!(all.is_suspected_mismatch(&model, WorkerId(1)));
    answer_token_counts(1, &all, &[AGREES]);
    assert!(!all.is_suspected_mismatch(&model, WorkerId(1)));
    assert_eq!(all.suspected_mismatches(), []);
    answer_token_counts(1, &all, &[DISAGREES; 2]);
    assert!(!all.is_suspected_mismatch(&model, WorkerId(1)), "what was before is forgotten");
}

#[test]
fn one_mismatched_worker_stays_local_and_a_majority_covers_the_model() {
    let (all, model) = agreement();
    answer_token_counts(1, &all, &[DISAGREES; 3]);
    assert_eq!(all.suspected_mismatches()[0].scope, MismatchScope::Model, "nobody else has answered");
    answer_token_counts(2, &all, &[AGREES]);
    let at = |id| all.is_suspected_mismatch(&model, WorkerId(id));
    assert_eq!([at(1), at(2), at(3)], [true, false, false], "one of two is not most of them");
    let at_one = vec![WorkerId(1)];
    let odd = TokenizerMismatch {
        model: model.clone(),
        signal: DriftSignal::TokenCount,
        workers: at_one,
        scope: MismatchScope::Workers,
    };
    assert_eq!(all.suspected_mismatches(), [odd]);
    answer_token_counts(3, &all, &[DISAGREES; 3]);
    assert_eq!([at(1), at(2), at(3), at(4)], [true; 4], "two of three are");
}

#[test]
fn six_unexplained_cache_hits_in_eight_suspect_a_mismatch_until_32_agree() {
    let (all, model) = agreement();
    let is_doubted = || all.is_suspected_mismatch(&model, WorkerId(1));
    answer_cache_hits(1, &all, &[(0, 400); 5]);
    answer_cache_hits(1, &all, &[(400, 400); 3]);
    answer_cache_hits(1, &all, &[(0, 400)]);
    assert!(!is_doubted(), "the first of the six is long ago");
    answer_cache_hits(1, &all, &[(0, 400); 4]);
    assert!(!is_doubted(), "five of eight");
    answer_cache_hits(1, &all, &[(0, 400)]);
    assert!(is_doubted());
    let doubt = &all.suspected_mismatches()[0];
    assert_eq!(
        (doubt.signal, doubt.scope, doubt.signal.as_ref()),
        (DriftSignal::CacheHit, MismatchScope::Model, "cache_hit_mismatch")
    );
    assert_eq!(all.suspected_model_count(), 1);
    answer_cache_hits(1, &all, &[(400, 400); 31]);
    answer_cache_hits(1, &all, &[(0, 0), (800, 0), (0, 16)]);
    assert!(is_doubted(), "what found no more than a block could only agree: it ends nothing");
    answer_cache_hits(1, &all, &[(400, 400)]);
    assert_eq!((is_doubted(), all.suspected_model_count()), (false, 0));
}

#[test]
fn a_cache_hit_disagrees_only_beyond_one_block_of_what_events_reported() {
    for (told, found) in [(0, 17), (100, 117), (0, 8000)] {
        assert!(cache_hit_check(told, found).conclusive().is_some_and(|finds| !finds.agree()), "{told} {found}");
    }
    for (told, found) in [(1, 17), (100, 116), (8000, 17)] {
        assert!(
            cache_hit_check(told, found).conclusive().is_some_and(CacheHitCheck::agree),
            "{told} {found}: less is evicted, or rounded"
        );
    }
    for (told, found) in [(0, 0), (0, 16), (8000, 0)] {
        assert_eq!(cache_hit_check(told, found).conclusive(), None, "{told} {found}");
    }
}

#[test]
fn agreeing_token_counts_do_not_clear_a_cache_hit_mismatch() {
    let (all, model) = agreement();
    answer_cache_hits(1, &all, &[(0, 400); 6]);
    answer_token_counts(1, &all, &[AGREES; 40]);
    assert!(all.is_suspected_mismatch(&model, WorkerId(1)));
    answer_token_counts(1, &all, &[DISAGREES; 3]);
    assert_eq!(
        all.suspected_mismatches().iter().map(|doubt| doubt.signal).collect::<Vec<_>>(),
        [DriftSignal::TokenCount, DriftSignal::CacheHit]
    );
    assert_eq!(all.suspected_model_count(), 1, "one model, however many signs");
}

#[test]
fn incomparable_answers_are_counted_without_a_verdict() {
    let (all, model) = agreement();
    answer_token_counts(1, &all, &[DISAGREES; 2]);
    assert_eq!(all.record_token_count((&model, WorkerId(1)), None, Instant::now()), None);
    assert_eq!(all.record_token_count((&model, WorkerId(1)), Some(AGREES), Instant::now()), None);
    assert_eq!(all.record_token_count((&model, WorkerId(1)), Some(DISAGREES), Instant::now()), Some(DISAGREES));
    let counted = |result| all.metrics.token_count_checks.with_label_values(&[result]).get();
    assert_eq!(["match", "mismatch", "not_comparable"].map(counted), [1, 3, 1]);
    assert!(all.is_suspected_mismatch(&model, WorkerId(1)));
}

#[test]
fn disagreement_warnings_are_rate_limited_and_mismatches_always_reported() {
    let (all, model) = agreement();
    let start = Instant::now();
    let at = |seconds, counts| {
        all.record((&model, WorkerId(1)), DriftObservation::TokenCount(counts), start + Duration::from_secs(seconds))
    };
    assert_eq!([at(0, AGREES), at(0, DISAGREES), at(1, DISAGREES)], [None, Some(DriftTransition::Disagrees), None]);
    let later = [at(2, DISAGREES), at(3, DISAGREES), at(61, DISAGREES)];
    assert_eq!(later, [Some(DriftTransition::Suspected), None, Some(DriftTransition::Disagrees)]);
    let healed: Vec<_> = (0..32).map(|_| at(62, AGREES)).collect();
    assert!(healed[..31].iter().all(Option::is_none));
    assert_eq!(healed[31], Some(DriftTransition::Cleared));
}

fn receipt(router: &TestRouter) -> std::sync::Arc<Receipt> {
    router.gateway.decisions.receipts.newest(1, |_| true).remove(0)
}

/// Sends a step whose engine claims to have counted this many tokens; returns its receipt.
async fn step(router: &TestRouter, path: &str, counted: u64, rest: Value) -> std::sync::Arc<Receipt> {
    let mut body = json!({"model": "tiny", "behave": "count", "counted": counted});
    body.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
    assert_eq!(post(router.proxy_address(), path, body.to_string()).await.status, 200);
    receipt(router)
}

fn conversation() -> Value {
    json!({"messages": [{"role": "user", "content": "Where is my bag?"}]})
}

#[tokio::test]
async fn a_token_count_mismatch_shows_in_receipts_readyz_alarms_and_metrics() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &SETTINGS).await;
    let computed = step(&router, CHAT, 0, conversation()).await.lookup.prompt_tokens;
    let seen = receipt(&router).observed.unwrap();
    assert_eq!(seen.token_count_mismatch, None, "an engine that says nothing says nothing else");
    for _ in 0..3 {
        let told = step(&router, CHAT, computed.0 + 2, conversation()).await.observed.unwrap().token_count_mismatch;
        assert_eq!(told, Some(PromptTokenCounts { router: computed, engine: computed + Tokens(2) }));
    }
    let ready = get(router.operator_address(), "/readyz").await.json();
    let line = &ready["degraded"][0];
    assert_eq!((&line["component"], &line["reason"]), (&json!("prefix_cache"), &json!("token_count_mismatch")));
    let detail = line["detail"].as_str().unwrap();
    assert!(detail.contains(&worker.url()) && detail.contains("models.\"tiny\".tokenizer_dir"), "{detail}");
    let metrics = get(router.operator_address(), "/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    assert!(metrics.contains("ownerserve_tokenizer_drift_models 1"));
    assert!(metrics.contains("ownerserve_prompt_token_count_checks_total{outcome=\"mismatch\"} 3"));
    for _ in 0..32 {
        step(&router, CHAT, computed.0, conversation()).await;
    }
    assert_eq!(get(router.operator_address(), "/readyz").await.json()["degraded"], json!([]));
}

#[tokio::test]
async fn only_exact_token_counts_are_compared() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &SETTINGS).await;
    let image = json!([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]);
    for (path, body) in [
        (CHAT, json!({"messages": [{"role": "user", "content": image}]})),
        (CHAT, json!({"messages": conversation()["messages"], "n": 2})),
        ("/v1/completions", json!({"prompt": [1, 2, 3]})),
        ("/v1/completions", json!({"prompt": "a", "suffix": "b"})),
        ("/v1/completions", json!({"prompt": "a", "truncate_prompt_tokens": 5})),
        ("/v1/messages", json!({"messages": conversation()["messages"], "max_tokens": 3})),
    ] {
        let seen = step(&router, path, 777, body.clone()).await.observed.unwrap();
        assert_eq!(seen.token_count_mismatch, None, "{path} {body}");
    }
    let seen = step(&router, "/v1/completions", 777, json!({"prompt": "a"})).await.observed.unwrap();
    assert!(seen.token_count_mismatch.is_some());
}

#[tokio::test]
async fn steps_fall_back_while_their_worker_is_a_suspected_mismatch() {
    let sim = sim(&["--speed-up=50"]).await;
    let router = start_router_at(&[url(&sim)], &SETTINGS).await;
    let known = || router.gateway.fleet().snapshot()[0].kv_index_state;
    wait_until("its events are followed", || known() == KvIndexState::Exact).await;
    let ask = async |stream: bool| {
        let body = json!({"model": "tiny", "max_tokens": 2, "stream": stream, "messages": conversation()["messages"]});
        assert_eq!(post(router.proxy_address(), CHAT, body.to_string()).await.status, 200);
        receipt(&router)
    };
    for stream in [false, true] {
        let exact = ask(stream).await;
        assert_eq!(exact.attempts[0].kv_index_state, KvIndexState::Exact);
        assert_eq!(exact.observed.unwrap().token_count_mismatch, None);
    }
    let counted = router.gateway.metrics.prefix_cache.token_count_checks.with_label_values(&["match"]);
    assert_eq!(counted.get(), 2, "whole answers and streams both tell");
    let at = (&ModelId::from("tiny"), router.gateway.fleet().snapshot()[0].id);
    for _ in 0..3 {
        router.gateway.caches.prefix_cache.tokenizer_drift.record_token_count(at, Some(DISAGREES), Instant::now());
    }
    assert_eq!(ask(false).await.attempts[0].kv_index_state, KvIndexState::Approximate);
    assert_eq!(known(), KvIndexState::Exact, "its blocks are as well known as before");
}

/// The small model's chat template, with this word before every conversation.
fn template_with_first_word(word: &str) -> tempfile::TempDir {
    let plain = include_str!("../../../../../configs/models/tiny/chat_template.jinja");
    crate::catalog::tests::folder_with_template(&format!("{{{{- '{word}' -}}}}{plain}"))
}

/// A simulated worker with these flags, and a router that follows its events and renders prompts with the template in
/// `folder`.
async fn followed_worker(flags: &[&str], folder: &tempfile::TempDir) -> (workers_shim::sim::SimWorker, TestRouter) {
    let sim = sim(flags).await;
    let router = start_router_at(&[url(&sim)], &[&format!("models.tiny.tokenizer_dir={:?}", folder.path())]).await;
    wait_until("its events are followed", || {
        router.gateway.fleet().snapshot()[0].kv_index_state == KvIndexState::Exact
    })
    .await;
    (sim, router)
}

async fn ask_chat(router: &TestRouter, messages: &[Value]) -> std::sync::Arc<Receipt> {
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": messages});
    assert_eq!(post(router.proxy_address(), CHAT, body.to_string()).await.status, 200);
    receipt(router)
}

#[tokio::test]
async fn cache_hits_reveal_a_template_that_differs_at_equal_token_counts() {
    let (theirs, ours) = (template_with_first_word("a"), template_with_first_word("b"));
    let (_sim, router) =
        followed_worker(&["--speed-up=50", &format!("--tokenizer-dir={}", theirs.path().display())], &ours).await;
    let mut messages = vec![json!({"role": "user", "content": "what is in the sea? ".repeat(60)})];
    let cold = ask_chat(&router, &messages).await;
    assert_eq!(
        (cold.attempts[0].kv_index_state, cold.observed.unwrap().cache_hit_mismatch),
        (KvIndexState::Exact, None)
    );
    for _ in 0..6 {
        messages.push(json!({"role": "user", "content": "what else? ".repeat(20)}));
        let step = ask_chat(&router, &messages).await;
        let seen = step.observed.unwrap();
        assert_eq!(
            (step.attempts[0].kv_index_state, seen.token_count_mismatch),
            (KvIndexState::Exact, None),
            "they are as many"
        );
        let finds = seen.cache_hit_mismatch.unwrap();
        assert_eq!((finds.reported, Some(finds.cached_tokens)), (Tokens(0), seen.cached_tokens));
    }
    // It counts only after late events had time to arrive.
    let agreement = &router.gateway.caches.prefix_cache.tokenizer_drift;
    assert_eq!(agreement.suspected_mismatches(), []);
    wait_until("it is doubted", || !agreement.suspected_mismatches().is_empty()).await;
    assert_eq!(ask_chat(&router, &messages).await.attempts[0].kv_index_state, KvIndexState::Approximate);
    let disagreeing = router.gateway.metrics.prefix_cache.cache_hit_checks.with_label_values(&["mismatch"]);
    wait_until("all are looked at", || disagreeing.get() == 7).await;
    let ready = get(router.operator_address(), "/readyz").await.json();
    let line = &ready["degraded"][0];
    assert_eq!(
        (&line["component"], &line["reason"]),
        (&json!("prefix_cache"), &json!("cache_hit_mismatch")),
        "{ready}"
    );
    assert!(line["detail"].as_str().unwrap().contains("models.\"tiny\".tokenizer_dir"), "{line}");
    let metrics = String::from_utf8(get(router.operator_address(), "/metrics").await.body.to_vec()).unwrap();
    for series in [
        "tokenizer_drift_models 1",
        "cache_hit_checks_total{outcome=\"mismatch\"} 7",
        "cache_hit_checks_total{outcome=\"not_comparable\"} 1",
    ] {
        assert!(metrics.contains(&format!("ownerserve_{series}")), "{series} in {metrics}");
    }
}

#[tokio::test]
async fn cache_hits_of_ambiguous_prompts_are_not_compared() {
    let (theirs, ours) = (template_with_first_word("a"), template_with_first_word("b"));
    let (_sim, router) =
        followed_worker(&["--speed-up=50", &format!("--tokenizer-dir={}", theirs.path().display())], &ours).await;
    let ask = async |path: &str, fields: Value| {
        let mut body = json!({"model": "tiny", "max_tokens": 2});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        assert_eq!(post(router.proxy_address(), path, body.to_string()).await.status, 200);
        receipt(&router).observed.unwrap()
    };
    let (text, ids) = ("what is in the sea? ".repeat(60), vec![7; 200]);
    let chat = |fields: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": text}]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        body
    };
    for (path, body) in [
        (CHAT, chat(json!({}))),
        (CHAT, chat(json!({"n": 2}))),
        (CHAT, chat(json!({"prompt_logprobs": 1}))),
        ("/v1/completions", json!({"prompt": ids})),
        ("/v1/completions", json!({"prompt": ids})),
        ("/v1/completions", json!({"prompt": [text, text]})),
        ("/v1/completions", json!({"prompt": [text, text]})),
    ] {
        assert_eq!(ask(path, body.clone()).await.cache_hit_mismatch, None, "{path} {body}");
    }
    let compared = |result| router.gateway.metrics.prefix_cache.cache_hit_checks.with_label_values(&[result]).get();
    assert_eq!(["match", "mismatch", "not_comparable"].map(compared), [0, 0, 7]);
    assert!(ask(CHAT, chat(json!({}))).await.cache_hit_mismatch.is_some(), "the same, plainly");
    let plain = ask("/v1/completions", json!({"prompt": text})).await;
    assert_eq!((plain.cache_hit_mismatch, compared("match")), (None, 1), "no template is in it: {plain:?}");
}

#[tokio::test]
async fn concurrent_cold_starts_and_evictions_suspect_no_mismatch() {
    let folder = template_with_first_word("a");
    let profile = folder.path().join("small.toml");
    std::fs::write(&profile, "num_gpu_blocks = 160\nmax_model_len = 2560\nmax_num_batched_tokens = 512").unwrap();
    let flags = [format!("--tokenizer-dir={}", folder.path().display()), format!("--profile={}", profile.display())];
    let (sim, router) = followed_worker(&["--speed-up=10", &flags[0], &flags[1]], &folder).await;
    for round in 0..8 {
        let shared = json!({"role": "system", "content": format!("{round} you know the sea. ").repeat(60)});
        let burst = (0..6).map(|fork| {
            let own = json!({"role": "user", "content": format!("{fork} what is in the sea? ").repeat(10)});
            let body = json!({"model": "tiny", "max_tokens": 8, "messages": [shared, own]});
            post(router.proxy_address(), CHAT, body.to_string())
        });
        assert!(futures::future::join_all(burst).await.iter().all(|answer| answer.status == 200));
    }
    let all = router.gateway.decisions.receipts.newest(100, |_| true);
    let is_foretold = |receipt: &&std::sync::Arc<Receipt>| {
        let seen = receipt.observed.unwrap();
        seen.cached_tokens.unwrap() <= seen.predicted_cached_tokens + Tokens(16)
    };
    let foretold = all.iter().filter(is_foretold).count();
    assert!(all.len() == 48 && foretold <= 24, "many were planned before the first of them was computed: {foretold}");
    assert!(all.iter().all(|receipt| receipt.attempts[0].kv_index_state == KvIndexState::Exact));
    let agreement = &router.gateway.caches.prefix_cache.tokenizer_drift;
    assert_eq!(agreement.suspected_mismatches(), []);
    let compared = |result| router.gateway.metrics.prefix_cache.cache_hit_checks.with_label_values(&[result]).get();
    let all = || ["match", "mismatch", "not_comparable"].map(compared).iter().sum::<u64>();
    wait_until("all are looked at", || all() == 48).await;
    assert!(compared("match") >= 24 && compared("mismatch") < 4, "{} {}", compared("match"), compared("mismatch"));
    let held = router.gateway.index().read().blocks();
    assert!(held <= 160, "{held}: what was there before is evicted");
    drop(sim);
}
