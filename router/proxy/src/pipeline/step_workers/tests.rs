use std::sync::Arc;

use serde_json::{Value, json};
use vocabulary::{DpRank, KvIndexState, Tokens, WorkerId};

use crate::lab::sim_command::tests::{sim, url};
use crate::receipt::Receipt;
use crate::testing::{TestRouter, post, start_router_at, wait_until};

const PATH: &str = "/v1/chat/completions";

/// The workers' model with a chat template that fails, so that the engine's rendering of a conversation is unknown
/// here.
fn without_template() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/models/tiny");
    for file in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        std::fs::copy(format!("{model}/{file}"), folder.path().join(file)).unwrap();
    }
    std::fs::write(folder.path().join("chat_template.jinja"), "{{ raise_exception('not here') }}").unwrap();
    folder
}

/// Body of a conversation with this many turns.
fn conversation_of(turns: usize) -> Value {
    let said = |turn| json!({"role": "user", "content": format!("{turn} what is in the sea? ").repeat(300)});
    let messages: Vec<Value> = (0..turns).map(said).collect();
    json!({"model": "tiny", "max_tokens": 2, "messages": messages})
}

async fn ask(router: &TestRouter, path: &str, body: Value) -> Arc<Receipt> {
    let response = post(router.proxy_address(), path, body.to_string()).await;
    assert_eq!(response.status, 200, "{:?}", response.body);
    router.gateway.decisions.receipts.newest(1, |_| true).remove(0)
}

#[tokio::test]
async fn a_conversation_known_by_bytes_stays_at_its_worker_as_fallback() {
    let (one, two) = (sim(&["--speed-up=50"]).await, sim(&["--speed-up=50"]).await);
    let folder = without_template();
    let text = format!("models.tiny.tokenizer_dir={:?}", folder.path());
    let router = start_router_at(&[url(&one), url(&two)], &[&text]).await;
    let known = || router.gateway.fleet().snapshot().iter().map(|worker| worker.kv_index_state).collect::<Vec<_>>();
    wait_until("their events are followed", || known() == [KvIndexState::Exact; 2]).await;
    let first = ask(&router, PATH, conversation_of(1)).await;
    assert_eq!(
        (first.lookup.token_ids_unavailable, first.lookup.max_overlap_tokens),
        (Some("template_error"), Tokens::ZERO)
    );
    let at: WorkerId = first.attempts[0].target().unwrap();
    for turns in 2..5 {
        // Other load there makes the other worker look slightly cheaper.
        let _noise = router.gateway.fleet().dispatch(at, DpRank(0), Tokens(400));
        let next = ask(&router, PATH, conversation_of(turns)).await;
        assert!(next.lookup.max_overlap_tokens > Tokens(1_500), "{:?}", next.lookup);
        let attempt = &next.attempts[0];
        assert_eq!((attempt.target(), attempt.kv_index_state), (Some(at), KvIndexState::Approximate));
        assert_eq!((next.lookup.prompt_tokens_estimated, next.lookup.tier), (true, None));
        let priced = next.decision.as_ref().unwrap().plan.answer_leg().cached_tokens;
        assert!(priced < next.lookup.max_overlap_tokens, "not all of a guess is taken for granted");
    }
    assert_eq!(known(), [KvIndexState::Exact; 2], "the workers' own blocks are as well known as before");
    let plain = json!({"model": "tiny", "max_tokens": 2, "prompt": "what is in the sea? ".repeat(40)});
    let exact = ask(&router, "/v1/completions", plain).await;
    assert_eq!((exact.lookup.token_ids_unavailable, exact.attempts[0].kv_index_state), (None, KvIndexState::Exact));
    assert!(!exact.lookup.prompt_tokens_estimated);
    let written = serde_json::to_value(&*first).unwrap();
    assert_eq!(
        (&written["attempts"][0]["kv_index_state"], &written["lookup"]["prompt_tokens_estimated"]),
        (&json!("approximate"), &json!(true))
    );
}
