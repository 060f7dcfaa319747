use serde_json::json;
use vocabulary::{KvIndexState, Micros, Tokens};

use crate::lab::sim_command::tests::{sim, url};
use crate::testing::{TestRouter, post, start_router_at, wait_until};

/// Sends a prompt of some hundred tokens that begins with this word, and returns the eviction cost in its receipt.
async fn eviction(router: &TestRouter, word: &str) -> Micros {
    let prompt = format!("{word} {}", "and a long history ".repeat(60));
    let body = json!({"model": "tiny", "max_tokens": 2, "prompt": prompt});
    assert_eq!(post(router.proxy_address(), "/v1/completions", body.to_string()).await.status, 200);
    let receipt = router.gateway.decisions.receipts.newest(1, |_| true).remove(0);
    receipt.decision.as_ref().unwrap().plan.rationale.cost_terms.eviction
}

#[tokio::test]
async fn a_receipt_names_the_sessions_a_step_evicts_but_never_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.toml");
    std::fs::write(&path, "num_gpu_blocks = 128\nmax_model_len = 2048").unwrap();
    let worker = sim(&["--speed-up=50", &format!("--profile={}", path.display())]).await;
    let front = start_router_at(&[url(&worker)], &["models.tiny.tokenizer_dir=builtin"]).await;
    let seen = |router: &TestRouter| {
        let view = &router.gateway.fleet().snapshot()[0];
        (view.capacity.kv, view.kv_index_state)
    };
    wait_until("its memory and its blocks are known", || seen(&front) == (Tokens(2_048), KvIndexState::Exact)).await;
    let mut cost_model = Vec::new();
    while cost_model.iter().filter(|price| **price > Micros::ZERO).count() < 2 {
        assert!(cost_model.len() < 30, "never full: {cost_model:?}");
        cost_model.push(eviction(&front, &format!("number {}", cost_model.len())).await);
    }
    assert_eq!(cost_model[0], Micros::ZERO, "nobody was there");
    let again = eviction(&front, &format!("number {}", cost_model.len() - 1)).await;
    assert!(
        again.0 * 10 < cost_model[cost_model.len() - 1].0,
        "nearly all that it needs is there: {cost_model:?}, {again}"
    );
}
