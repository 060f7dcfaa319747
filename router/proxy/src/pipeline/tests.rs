use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use http::{HeaderMap, Method, Request};
use planner::{Action, ActionSet};
use serde_json::{Value, json};
use vocabulary::{Blocks, KvIndexState, ModelId, SessionId, TenantId, Tokens};

use super::conversation_fingerprint::shared_prefix_blocks;
use super::identify::IdentificationInput;
use super::{identify, locate, plan};
use crate::app_state::AppState;
use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::decisions::DecisionRecords;
use crate::lab::sim_command::tests::{sim, url};
use crate::request_id::new_request_id;
use crate::request_parser::parse;
use crate::request_states::ClassifiedStep;
use crate::testing::{StubWorker, TestRouter, get, post, send, start_router, start_router_at, wait_until};

const PATH: &str = "/v1/completions";

fn session(name: &str) -> SessionId {
    SessionId::of_key(&TenantId::default(), &ModelId::from("tiny"), name)
}

async fn router_with_lease(settings: &[&str]) -> (Arc<StubWorker>, TestRouter) {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], settings).await;
    let live = || router.gateway.directory().view().workers().any(|worker| worker.is_live());
    wait_until("the worker has a lease", live).await;
    (worker, router)
}

#[tokio::test]
async fn a_truncated_choice_ends_with_an_error_event_even_if_another_finished() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let ask = async |n: u8| {
        let body =
            format!("{{\"model\":\"tiny\",\"prompt\":\"\",\"stream\":true,\"behave\":\"finish one\",\"n\":{n}}}");
        String::from_utf8(post(router.proxy_address(), PATH, body).await.body.to_vec()).unwrap()
    };
    assert!(!ask(1).await.contains("event: error"), "the only choice is complete");
    assert!(ask(2).await.ends_with("\n\n") && ask(2).await.contains("event: error"));
}

#[tokio::test]
async fn a_small_body_whose_tree_needs_more_memory_than_there_is_is_refused() {
    let worker = StubWorker::start("one", "tiny").await;
    let settings = ["proxy.body_limit=\"64KiB\"", "proxy.request_memory_limit=\"512KiB\""];
    let router = start_router(&[&worker], &settings).await;
    let ask = async |lists: usize| {
        let body = format!("{{\"model\":\"tiny\",\"prompt\":\"x\",\"extra\":[{}0]}}", "[0],".repeat(lists));
        post(router.proxy_address(), PATH, body).await.status
    };
    assert_eq!((ask(10).await, ask(5_000).await), (200, 413));
    assert_eq!(router.gateway.metrics.memory.reserved.get(), 0, "nothing stays reserved");
}

#[tokio::test]
async fn a_spawned_session_records_its_parent_in_the_ledger() {
    let (_worker, router) = router_with_lease(&[]).await;
    let body = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", "a long history ".repeat(40));
    let request = Request::post(PATH).header("x-session-id", "child").header("x-parent-session-id", "mother");
    assert_eq!(send(router.proxy_address(), request, body).await.status, 200);
    let parent = || router.gateway.directory().view().session(session("child")).map(|child| child.parent);
    wait_until("the session is known", || parent().is_some()).await;
    assert_eq!(parent().flatten(), Some(session("mother")));
}

#[tokio::test]
async fn a_disabled_action_is_not_planned_and_replays_from_the_decision_log() {
    let (_worker, router) = router_with_lease(&["models.tiny.tokenizer_dir=builtin"]).await;
    let body = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", "a long history ".repeat(40));
    let ask = async || {
        let request = Request::post(PATH).header("x-session-id", "again");
        assert_eq!(send(router.proxy_address(), request, body.clone()).await.status, 200);
        router.gateway.decisions.receipts.newest(1, |_| true)[0].attempts[0].action
    };
    ask().await;
    let is_known =
        || router.gateway.directory().view().session(session("again")).is_some_and(|one| !one.heads.is_empty());
    wait_until("the session is known", is_known).await;
    assert_eq!(ask().await, Action::DecodeContinuation);
    router.gateway.routing.disable(Action::DecodeContinuation);
    assert_eq!(ask().await, Action::ColocatedPrefill);
    router.gateway.routing.set_disabled(ActionSet::NONE);
    assert_eq!(ask().await, Action::DecodeContinuation);
    router.gateway.decisions.close();
    let mut records = DecisionRecords::open(&router.gateway.config.ledger.data_dir).unwrap();
    let entries = records.next_file().unwrap().unwrap();
    let off: Vec<_> = entries.iter().map(|entry| entry.case.as_ref().unwrap().disabled_actions.iter().next()).collect();
    assert_eq!(off, [None, None, Some(Action::DecodeContinuation), None]);
    for entry in &entries {
        let planned = entry.case.as_ref().unwrap().plan(&entry.head.policy, (None, &[])).unwrap();
        assert_eq!(Some(planned.plan), entry.receipt.decision.as_ref().map(|decision| decision.plan));
    }
}

/// One step of a conversation in the format of each of these endpoints.
fn bodies_by_endpoint(system: &str, said: &str) -> [(&'static str, Value); 3] {
    let user = json!({"role": "user", "content": said});
    let chat = json!({"model": "tiny", "messages": [{"role": "system", "content": system}, user]});
    let messages = json!({"model": "tiny", "max_tokens": 9, "system": system, "messages": [user]});
    let responses = json!({"model": "tiny", "instructions": system, "input": [user]});
    [("/v1/chat/completions", chat), ("/v1/messages", messages), ("/v1/responses", responses)]
}

#[tokio::test]
async fn conversations_that_share_a_system_prompt_are_not_forks() {
    let (_worker, router) = router_with_lease(&["models.tiny.tokenizer_dir=builtin"]).await;
    let said = ["Where is my bag?", "What is in the sea?"].map(|said| said.repeat(30));
    for at in 0..3 {
        let system = format!("You are kind, for the {at}. time. ").repeat(60);
        let mut sessions = Vec::new();
        for said in &said {
            let (path, body) = &bodies_by_endpoint(&system, said)[at];
            assert_eq!(post(router.proxy_address(), path, body.to_string()).await.status, 200, "{path}");
            let session = router.gateway.decisions.receipts.newest(1, |_| true)[0].lookup.session_id;
            let known = || router.gateway.directory().view().session(session).map(|session| session.parent);
            wait_until("the session is known", || known().is_some()).await;
            assert_eq!(known().flatten(), None, "{path}");
            sessions.push(session);
        }
        assert_ne!(sessions[0], sessions[1]);
    }
}

#[tokio::test]
async fn every_fork_of_a_conversation_is_in_its_tree() {
    let (_worker, router) = router_with_lease(&[]).await;
    let history = "a long history ".repeat(2_000);
    let mut family = Vec::new();
    for said in ["what was first", "another way", "a third way", "a fourth way"] {
        let body = json!({"model": "tiny", "prompt": format!("{history}{}", said.repeat(100))});
        assert_eq!(post(router.proxy_address(), PATH, body.to_string()).await.status, 200);
        let session = router.gateway.decisions.receipts.newest(1, |_| true)[0].lookup.session_id;
        wait_until("the session is known", || router.gateway.directory().view().session(session).is_some()).await;
        family.push(session.to_string());
    }
    let path = format!("/ownerserve/v1/sessions/{}/tree", family[3]);
    let tree = get(router.operator_address(), &path).await.json();
    let branches = tree["branches"].as_array().unwrap();
    assert_eq!(branches[0]["id"], family[0]);
    let children: BTreeSet<_> = branches[1..].iter().map(|branch| branch["id"].as_str().unwrap()).collect();
    assert_eq!(children, family[1..].iter().map(String::as_str).collect(), "{tree}");
    assert!(branches[1..].iter().all(|branch| branch["parent"] == family[0] && branch["depth"] == 1), "{tree}");
}

/// A step's chat request with this body, of a session by this name.
fn chat_request(body: String, session: Option<&'static str>) -> ClientRequest {
    let name = session.map(|name| ("x-session-id".parse().unwrap(), name.parse().unwrap()));
    ClientRequest {
        id: new_request_id(),
        tenant: TenantId::default(),
        method: Method::POST,
        path: "/v1/chat/completions".to_owned(),
        headers: name.into_iter().collect::<HeaderMap>(),
        body: body.into(),
        arrived: Instant::now(),
        token_reservation: None,
        memory: None,
        addition: None,
    }
}

#[tokio::test]
async fn the_next_body_of_a_session_is_read_from_where_it_grew() {
    let (_worker, router) = router_with_lease(&[]).await;
    let pipeline = &router.gateway.pipeline;
    let message = json!({"role": "user", "content": "What is in the bag? ".repeat(20)});
    // A step with so many messages: the length of its body, how much of it was read, and its block hashes.
    let step = async |session: Option<&'static str>, messages: usize| {
        let body = json!({"model": "tiny", "messages": vec![&message; messages], "max_tokens": 1}).to_string();
        let incoming = chat_request(body, session);
        let size = incoming.body.len();
        let parsed =
            super::parse::parse_request(&pipeline.parse, GenerationEndpoint::ChatCompletions, incoming).await.unwrap();
        let read = parsed.lineage.new_bytes(size);
        let (identified, _) = identify::identify(&pipeline.identify, parsed).await.unwrap();
        (size, read, identified.prompt.chain)
    };
    for session in [Some("named"), None] {
        let (size, read, _) = step(session, 40).await;
        assert_eq!(read, size, "{session:?}: nothing is known");
        let (size, read, chain) = step(session, 42).await;
        assert!(read < size / 10, "{session:?}: {read} of {size} bytes were read");
        let (size, read, whole) = step(Some(if session.is_some() { "other" } else { "another" }), 42).await;
        assert_eq!((read, chain), (size, whole), "{session:?}");
    }
    router.gateway.caches.prefix_cache.bodies.erase(&TenantId::default());
    let (size, read, _) = step(Some("named"), 43).await;
    assert_eq!(read, size, "the bodies were erased");
}

/// What scanning, validating, comparing and looking up fields visit, from the parser to the body that a worker gets.
#[cfg(feature = "count-bytes")]
#[tokio::test]
async fn a_body_is_visited_once_and_a_grown_one_compared_once() {
    use vocabulary::visited_bytes;
    let (_worker, router) = router_with_lease(&[]).await;
    let pipeline = &router.gateway.pipeline;
    let message = |role: &str| json!({"role": role, "content": "What is in the \"bag\"?\n".repeat(40)});
    let tools = vec![json!({"type": "function", "function": {"name": "look", "parameters": {}}}); 100];
    let body = |messages: usize| {
        let messages: Vec<_> = ["user", "assistant"].into_iter().cycle().map(message).take(messages).collect();
        json!({"max_tokens": 1, "messages": messages, "model": "tiny", "stream": true, "tools": tools}).to_string()
    };
    let step = async |body: String| {
        let (size, before) = (body.len(), visited_bytes());
        let incoming = chat_request(body, Some("counted"));
        let parsed =
            super::parse::parse_request(&pipeline.parse, GenerationEndpoint::ChatCompletions, incoming).await.unwrap();
        let (identified, _) = identify::identify(&pipeline.identify, parsed).await.unwrap();
        let sent = identified.request.body.plain(&Default::default());
        assert!(!sent.into_bytes().is_empty());
        (size, (visited_bytes() - before) as usize)
    };
    // Names of fields are looked up many times, which does not depend on the body's length.
    const LOOKUPS: usize = 2 << 10;
    let (size, visited) = step(body(200)).await;
    assert!(visited <= size + size / 10, "{visited} of {size} bytes");
    let (grown, visited) = step(body(202)).await;
    // Strings beyond ASCII are validated where they end, which visits them once more.
    let foreign = vec![json!({"role": "user", "content": "日本語".repeat(400)}); 20];
    let (length, foreign_visited) = step(json!({"model": "tiny", "messages": foreign}).to_string()).await;
    assert!(foreign_visited <= 2 * length + length / 10, "{foreign_visited} of {length} bytes");
    // The tools follow the conversation, so they are scanned with what is new, and compared.
    let tools = serde_json::to_string(&tools).unwrap().len();
    assert!(visited <= size + (grown - size) + 2 * tools + LOOKUPS, "{visited} of {grown} bytes");
}

#[tokio::test]
async fn the_shared_prefix_is_found_in_converted_requests_without_reconverting() {
    let (_worker, router) = router_with_lease(&["models.tiny.tokenizer_dir=builtin"]).await;
    let model = router.gateway.catalog().model(&"tiny".into());
    let named = |(path, body): &(&str, Value), endpoint: GenerationEndpoint| {
        let incoming = ClientRequest {
            id: new_request_id(),
            tenant: TenantId::default(),
            method: Method::POST,
            path: (*path).to_owned(),
            headers: HeaderMap::new(),
            body: body.to_string().into(),
            arrived: Instant::now(),
            token_reservation: None,
            memory: None,
            addition: None,
        };
        let request = IdentificationInput::new(parse(incoming, endpoint, None).unwrap(), model.clone()).converted();
        let found = request.compute_whole(&router.gateway.caches.prefix_cache.conversations, None);
        request.with_prompt(found)
    };
    let [chat, messages, responses] = bodies_by_endpoint(&"You are kind. ".repeat(60), "Where is my bag?");
    let chat = named(&chat, GenerationEndpoint::ChatCompletions);
    assert!(chat.converted.is_none());
    let blocks = shared_prefix_blocks(&chat.identified, None);
    assert!(blocks > Blocks::ZERO);
    for (step, endpoint) in [(messages, GenerationEndpoint::Messages), (responses, GenerationEndpoint::Responses)] {
        let named = named(&step, endpoint);
        assert_eq!(shared_prefix_blocks(&named.identified, named.converted.as_ref()), blocks, "{endpoint:?}");
        assert_eq!(
            shared_prefix_blocks(&named.identified, None),
            Blocks::ZERO,
            "{endpoint:?}: nobody converts it here"
        );
    }
}

#[tokio::test]
async fn sessions_stay_at_their_worker_without_a_ledger() {
    let workers = [StubWorker::start("one", "tiny").await, StubWorker::start("two", "tiny").await];
    let router = start_router(&[&workers[0], &workers[1]], &[]).await;
    let both = || router.gateway.directory().view().workers().filter(|worker| worker.is_live()).count() == 2;
    wait_until("both workers have a lease", both).await;
    router.gateway.directory().close().await.unwrap();
    let mut history = "a long history ".repeat(40);
    for session in ["a", "b", "c", "d"] {
        let mut served = Vec::new();
        for step in 0..4 {
            history.push_str(&format!("{session} said {step} ").repeat(30));
            let body = format!("{{\"model\":\"tiny\",\"prompt\":{history:?}}}");
            let response =
                send(router.proxy_address(), Request::post(PATH).header("x-session-id", session), body).await;
            assert_eq!(response.status, 200);
            served.push(response.json()["served_by"].clone());
            let receipt = router.gateway.decisions.receipts.newest(1, |_| true).remove(0);
            assert_eq!(receipt.lookup.evidence.pending_commit, step > 0, "step {step} of {session}");
            assert_eq!(receipt.lookup.owner.is_some(), step > 0, "step {step} of {session}");
        }
        assert!(served.iter().all(|by| *by == served[0]), "{session} was served by {served:?}");
    }
    assert_eq!(router.gateway.ledger.pending_commits().pending_count(), 4, "one step a session waits for a quorum");
}

#[tokio::test]
async fn a_bypassed_step_leaves_the_ledger_empty_and_a_shadowed_one_is_recorded() {
    for (mode, known) in [("bypass", false), ("shadow", true)] {
        let (_worker, router) = router_with_lease(&[&format!("routing.mode={mode}")]).await;
        let body = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", "a long history ".repeat(40));
        let request = Request::post(PATH).header("x-session-id", "s");
        assert_eq!(send(router.proxy_address(), request, body).await.status, 200);
        let before = router.gateway.directory().stats().commands;
        let is_known = || router.gateway.directory().view().session(session("s")).is_some();
        match known {
            true => wait_until("the session is known", is_known).await,
            false => {
                // Commands of the step would be in the log before this point.
                wait_until("the ledger goes on", || router.gateway.directory().stats().commands > before).await;
                assert!(!is_known());
            }
        }
        let receipt = router.gateway.decisions.receipts.newest(1, |_| true).remove(0);
        assert_eq!(receipt.decision.is_some(), known, "{mode}: priced or not");
    }
}

#[tokio::test]
async fn a_prompt_known_to_exceed_the_context_is_refused_and_an_estimate_is_not() {
    let guessed = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", "a long history ".repeat(20_000));
    let (_worker, by_bytes) = router_with_lease(&[]).await;
    assert_eq!(post(by_bytes.proxy_address(), PATH, guessed).await.status, 200);

    let text = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", vec![5; 60_000]);
    let (_worker, by_tokens) = router_with_lease(&["models.tiny.tokenizer_dir=builtin"]).await;
    let response = post(by_tokens.proxy_address(), PATH, text).await;
    assert_eq!((response.status, response.error_code().as_str()), (400, "context_length_exceeded"));
    let message = response.json()["error"]["message"].to_string();
    assert!(message.contains("50000") && message.contains("60000 input tokens"), "{message}");
}

#[tokio::test]
async fn a_step_that_bypasses_the_prefix_cache_is_planned_as_cold() {
    let (one, two) = (sim(&["--speed-up=50"]).await, sim(&["--speed-up=50"]).await);
    let router = start_router_at(&[url(&one), url(&two)], &["models.tiny.tokenizer_dir=builtin"]).await;
    let is_exact =
        || router.gateway.fleet().snapshot().iter().all(|worker| worker.kv_index_state == KvIndexState::Exact);
    wait_until("their events are followed", is_exact).await;
    // A worker without a lease owns nothing, so its step would leave no trace in the ledger.
    let both = || router.gateway.directory().view().workers().filter(|worker| worker.is_live()).count() == 2;
    wait_until("both workers have a lease", both).await;
    let ask = async |fields: Value| {
        let mut body = json!({"model": "tiny", "max_tokens": 2, "prompt": "what is in the sea? ".repeat(100)});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let request = Request::post(PATH).header("x-session-id", "one").header("content-type", "application/json");
        assert_eq!(send(router.proxy_address(), request, body.to_string()).await.status, 200);
        router.gateway.decisions.receipts.newest(1, |_| true).remove(0)
    };
    let cold = ask(json!({})).await;
    let owner = cold.attempts[0].target();
    let view = || router.gateway.directory().view().session(session("one")).and_then(|one| one.owner);
    wait_until("it is owned", || view().is_some_and(|at| Some(at.worker) == owner)).await;
    let most = cold.lookup.prompt_tokens - Tokens(16);
    let is_told = || router.gateway.index().read().blocks() as u64 >= most.0 / 16;
    wait_until("its blocks are told", is_told).await;
    let warm = ask(json!({})).await;
    assert!(
        warm.observed.unwrap().predicted_cached_tokens >= most && warm.lookup.evidence.cache_not_readable.is_none()
    );
    for fields in [json!({"prompt_logprobs": 1}), json!({"echo": true, "logprobs": 1})] {
        let whole = ask(fields.clone()).await;
        let seen = whole.observed.unwrap();
        assert_eq!((seen.predicted_cached_tokens, seen.cached_tokens), (Tokens::ZERO, Some(Tokens::ZERO)), "{fields}");
        let candidates = &whole.decision.as_ref().unwrap().candidates;
        assert!(candidates.iter().all(|one| one.sequence.answer_leg().cached_tokens == Tokens::ZERO), "{candidates:?}");
        assert_eq!((whole.lookup.sealed_tokens, whole.lookup.max_overlap_tokens), (Tokens::ZERO, Tokens::ZERO));
        let written = serde_json::to_value(&*whole).unwrap();
        assert_eq!(written["lookup"]["evidence"]["cache_not_readable"], "prompt_logprobs");
    }
    assert_eq!(view().map(|at| at.worker), owner, "who owns it goes on owning it");
    let again = ask(json!({})).await;
    assert!(again.observed.unwrap().cached_tokens >= Some(most), "{:?}", again.observed);
    assert_eq!(again.attempts[0].target(), owner);
}

/// Returns the step that a client's request with this body is, before it is planned.
pub(super) async fn classified_step(
    app_state: &Arc<AppState>,
    endpoint: GenerationEndpoint,
    body: &Value,
) -> ClassifiedStep {
    let incoming = ClientRequest {
        id: new_request_id(),
        tenant: TenantId::default(),
        method: Method::POST,
        path: endpoint.path().into(),
        headers: HeaderMap::new(),
        body: body.to_string().into(),
        arrived: Instant::now(),
        token_reservation: None,
        memory: None,
        addition: None,
    };
    let request = parse(incoming, endpoint, None).unwrap();
    let model = app_state.catalog().model(&request.model);
    let request = identify::IdentificationInput::new(request, model);
    let found = request.compute_whole(&app_state.caches.prefix_cache.conversations, None);
    let named = request.with_prompt(found);
    let located = locate::locate(&app_state.pipeline.locate, named.identified, named.converted).await.unwrap();
    plan::classify(&app_state.pipeline.classify, located)
}
