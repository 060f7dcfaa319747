use serde_json::{Value, json};
use vocabulary::Knowledge;

use super::*;
use crate::pipeline::receipt::Receipt;
use crate::sim_command::tests::{sim, url};
use crate::telemetry::metrics::Metrics;
use crate::testing::{Front, Worker, front, front_of, get, post, until};

const CHAT: &str = "/v1/chat/completions";
const SETTINGS: [&str; 1] = ["models.tiny.text=builtin"];
const AGREES: Counts = Counts { computed: Tokens(9), counted: Tokens(9) };
const DISAGREES: Counts = Counts { computed: Tokens(9), counted: Tokens(8) };

fn agreement() -> (Agreement, ModelId) {
    (Agreement::new(Metrics::default().identity), ModelId::from("m"))
}

fn worker(id: u64, agreement: &Agreement, counts: &[Counts]) {
    let model = ModelId::from("m");
    for counts in counts {
        agreement.counted((&model, WorkerId(id)), Some(*counts), Instant::now());
    }
}

fn finds(told: u64, found: u64) -> Finds {
    Finds { told: Tokens(told), found: Tokens(found), block: Tokens(16) }
}

/// The worker's answers to prompts of which so much was told, and so much found.
fn found(id: u64, agreement: &Agreement, all: &[(u64, u64)]) {
    let at = (&ModelId::from("m"), WorkerId(id));
    for (told, found) in all {
        agreement.found(at, finds(*told, *found).telling(), Instant::now());
    }
}

#[test]
fn the_third_of_the_last_eight_answers_that_disagrees_makes_a_doubt() {
    let (all, model) = agreement();
    worker(1, &all, &[DISAGREES, DISAGREES]);
    worker(1, &all, &[AGREES; 6]);
    worker(1, &all, &[DISAGREES]);
    assert!(!all.doubts(&model, WorkerId(1)), "the first two of the three are long ago");
    worker(1, &all, &[AGREES, DISAGREES]);
    assert!(!all.doubts(&model, WorkerId(1)));
    worker(1, &all, &[DISAGREES]);
    assert!(all.doubts(&model, WorkerId(1)));
    assert!(!all.doubts(&"other".into(), WorkerId(1)));
}

#[test]
fn a_doubt_ends_with_the_worker_that_leaves_and_so_does_what_most_of_the_others_said() {
    let (all, model) = agreement();
    worker(1, &all, &[DISAGREES; 3]);
    worker(2, &all, &[DISAGREES; 3]);
    worker(3, &all, &[AGREES]);
    assert!(all.doubts(&model, WorkerId(3)), "most disagree");
    all.keep_only(|id| id != WorkerId(2));
    assert_eq!(all.all_doubts().iter().map(|doubt| &doubt.at[..]).collect::<Vec<_>>(), [[WorkerId(1)]]);
    assert!(!all.doubts(&model, WorkerId(3)) && all.doubts(&model, WorkerId(1)));
    all.keep_only(|id| id == WorkerId(3));
    assert_eq!(all.all_doubts(), []);
    assert!(!all.any.load(Ordering::Acquire), "nobody asks with the lock");
    worker(1, &all, &[DISAGREES; 2]);
    assert!(!all.doubts(&model, WorkerId(1)), "it begins anew where it comes back");
}

#[test]
fn a_doubt_ends_with_the_thirty_second_answer_in_a_row_that_agrees() {
    let (all, model) = agreement();
    worker(1, &all, &[DISAGREES; 3]);
    worker(1, &all, &[AGREES; 31]);
    worker(1, &all, &[DISAGREES]);
    worker(1, &all, &[AGREES; 31]);
    assert!(all.doubts(&model, WorkerId(1)));
    worker(1, &all, &[AGREES]);
    assert!(!all.doubts(&model, WorkerId(1)));
    assert_eq!(all.all_doubts(), []);
    worker(1, &all, &[DISAGREES; 2]);
    assert!(!all.doubts(&model, WorkerId(1)), "what was before is forgotten");
}

#[test]
fn one_odd_worker_is_doubted_alone_and_most_of_them_are_the_model() {
    let (all, model) = agreement();
    worker(1, &all, &[DISAGREES; 3]);
    assert_eq!(all.all_doubts()[0].reach, DoubtReach::Model, "nobody else has answered");
    worker(2, &all, &[AGREES]);
    let at = |id| all.doubts(&model, WorkerId(id));
    assert_eq!([at(1), at(2), at(3)], [true, false, false], "one of two is not most of them");
    let at_one = vec![WorkerId(1)];
    let odd = Doubt { model: model.clone(), sign: Sign::Counted, at: at_one, reach: DoubtReach::Workers };
    assert_eq!(all.all_doubts(), [odd]);
    worker(3, &all, &[DISAGREES; 3]);
    assert_eq!([at(1), at(2), at(3), at(4)], [true; 4], "two of three are");
}

#[test]
fn six_of_eight_answers_that_found_more_than_was_told_make_a_doubt_and_32_that_did_not_end_it() {
    let (all, model) = agreement();
    let is_doubted = || all.doubts(&model, WorkerId(1));
    found(1, &all, &[(0, 400); 5]);
    found(1, &all, &[(400, 400); 3]);
    found(1, &all, &[(0, 400)]);
    assert!(!is_doubted(), "the first of the six is long ago");
    found(1, &all, &[(0, 400); 4]);
    assert!(!is_doubted(), "five of eight");
    found(1, &all, &[(0, 400)]);
    assert!(is_doubted());
    let doubt = &all.all_doubts()[0];
    assert_eq!((doubt.sign, doubt.reach, doubt.sign.as_ref()), (Sign::Found, DoubtReach::Model, "cache_disagrees"));
    assert_eq!(all.doubted_models(), 1);
    found(1, &all, &[(400, 400); 31]);
    found(1, &all, &[(0, 0), (800, 0), (0, 16)]);
    assert!(is_doubted(), "what found no more than a block could only agree: it ends nothing");
    found(1, &all, &[(400, 400)]);
    assert_eq!((is_doubted(), all.doubted_models()), (false, 0));
}

#[test]
fn what_is_found_is_more_than_was_told_by_more_than_a_block_or_says_nothing_wrong() {
    for (told, found) in [(0, 17), (100, 117), (0, 8000)] {
        assert!(finds(told, found).telling().is_some_and(|finds| !finds.agree()), "{told} {found}");
    }
    for (told, found) in [(1, 17), (100, 116), (8000, 17)] {
        assert!(finds(told, found).telling().is_some_and(Finds::agree), "{told} {found}: less is evicted, or rounded");
    }
    for (told, found) in [(0, 0), (0, 16), (8000, 0)] {
        assert_eq!(finds(told, found).telling(), None, "{told} {found}");
    }
}

#[test]
fn counts_that_agree_do_not_end_a_doubt_of_what_is_found() {
    let (all, model) = agreement();
    found(1, &all, &[(0, 400); 6]);
    worker(1, &all, &[AGREES; 40]);
    assert!(all.doubts(&model, WorkerId(1)));
    worker(1, &all, &[DISAGREES; 3]);
    assert_eq!(all.all_doubts().iter().map(|doubt| doubt.sign).collect::<Vec<_>>(), [Sign::Counted, Sign::Found]);
    assert_eq!(all.doubted_models(), 1, "one model, however many signs");
}

#[test]
fn what_cannot_be_compared_is_counted_and_says_nothing() {
    let (all, model) = agreement();
    worker(1, &all, &[DISAGREES; 2]);
    assert_eq!(all.counted((&model, WorkerId(1)), None, Instant::now()), None);
    assert_eq!(all.counted((&model, WorkerId(1)), Some(AGREES), Instant::now()), None);
    assert_eq!(all.counted((&model, WorkerId(1)), Some(DISAGREES), Instant::now()), Some(DISAGREES));
    let counted = |result| all.metrics.counted_prompts.with_label_values(&[result]).get();
    assert_eq!(["agrees", "disagrees", "not_compared"].map(counted), [1, 3, 1]);
    assert!(all.doubts(&model, WorkerId(1)));
}

#[test]
fn disagreements_are_told_at_once_then_seldom_and_a_doubt_always() {
    let (all, model) = agreement();
    let start = Instant::now();
    let at =
        |seconds, counts| all.note((&model, WorkerId(1)), Said::Counts(counts), start + Duration::from_secs(seconds));
    assert_eq!([at(0, AGREES), at(0, DISAGREES), at(1, DISAGREES)], [None, Some(News::Disagrees), None]);
    let later = [at(2, DISAGREES), at(3, DISAGREES), at(61, DISAGREES)];
    assert_eq!(later, [Some(News::Doubted), None, Some(News::Disagrees)]);
    let healed: Vec<_> = (0..32).map(|_| at(62, AGREES)).collect();
    assert!(healed[..31].iter().all(Option::is_none));
    assert_eq!(healed[31], Some(News::Healed));
}

fn receipt(front: &Front) -> std::sync::Arc<Receipt> {
    front.gateway.decisions.receipts.newest(1, |_| true).remove(0)
}

/// A step whose engine says that it counted so many tokens; gives its receipt.
async fn step(front: &Front, path: &str, counted: u64, rest: Value) -> std::sync::Arc<Receipt> {
    let mut body = json!({"model": "tiny", "behave": "count", "counted": counted});
    body.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
    assert_eq!(post(front.proxy_address(), path, body.to_string()).await.status, 200);
    receipt(front)
}

fn said() -> Value {
    json!({"messages": [{"role": "user", "content": "Where is my bag?"}]})
}

#[tokio::test]
async fn an_engine_that_counts_other_tokens_is_told_by_receipts_readyz_alarms_and_metrics_until_it_agrees() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &SETTINGS).await;
    let computed = step(&front, CHAT, 0, said()).await.known.prompt;
    let seen = receipt(&front).seen.unwrap();
    assert_eq!(seen.engine_disagrees, None, "an engine that says nothing says nothing else");
    for _ in 0..3 {
        let told = step(&front, CHAT, computed.0 + 2, said()).await.seen.unwrap().engine_disagrees;
        assert_eq!(told, Some(Counts { computed, counted: computed + Tokens(2) }));
    }
    let ready = get(front.operator_address(), "/readyz").await.json();
    let line = &ready["degraded"][0];
    assert_eq!((&line["what"], &line["cause"]), (&json!("identity"), &json!("engine_disagrees")));
    let detail = line["detail"].as_str().unwrap();
    assert!(detail.contains(&worker.url()) && detail.contains("models.\"tiny\".text"), "{detail}");
    let metrics = get(front.operator_address(), "/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    assert!(metrics.contains("ownerserve_identity_doubted_models 1"));
    assert!(metrics.contains("ownerserve_identity_counted_prompts_total{result=\"disagrees\"} 3"));
    for _ in 0..32 {
        step(&front, CHAT, computed.0, said()).await;
    }
    assert_eq!(get(front.operator_address(), "/readyz").await.json()["degraded"], json!([]));
}

#[tokio::test]
async fn only_certain_counts_are_compared() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &SETTINGS).await;
    let image = json!([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]);
    for (path, body) in [
        (CHAT, json!({"messages": [{"role": "user", "content": image}]})),
        (CHAT, json!({"messages": said()["messages"], "n": 2})),
        ("/v1/completions", json!({"prompt": [1, 2, 3]})),
        ("/v1/completions", json!({"prompt": "a", "suffix": "b"})),
        ("/v1/completions", json!({"prompt": "a", "truncate_prompt_tokens": 5})),
        ("/v1/messages", json!({"messages": said()["messages"], "max_tokens": 3})),
    ] {
        let seen = step(&front, path, 777, body.clone()).await.seen.unwrap();
        assert_eq!(seen.engine_disagrees, None, "{path} {body}");
    }
    let seen = step(&front, "/v1/completions", 777, json!({"prompt": "a"})).await.seen.unwrap();
    assert!(seen.engine_disagrees.is_some());
}

#[tokio::test]
async fn steps_at_a_worker_that_follows_its_events_are_fallback_while_it_is_doubted() {
    let sim = sim(&["--speed-up=50"]).await;
    let front = front_of(&[url(&sim)], &SETTINGS).await;
    let known = || front.gateway.fleet().snapshot()[0].knowledge;
    until("its events are followed", || known() == Knowledge::Exact).await;
    let ask = async |stream: bool| {
        let body = json!({"model": "tiny", "max_tokens": 2, "stream": stream, "messages": said()["messages"]});
        assert_eq!(post(front.proxy_address(), CHAT, body.to_string()).await.status, 200);
        receipt(&front)
    };
    for stream in [false, true] {
        let exact = ask(stream).await;
        assert_eq!(exact.attempts[0].knowledge, Knowledge::Exact);
        assert_eq!(exact.seen.unwrap().engine_disagrees, None);
    }
    let counted = front.gateway.metrics.identity.counted_prompts.with_label_values(&["agrees"]);
    assert_eq!(counted.get(), 2, "whole answers and streams both tell");
    let at = (&ModelId::from("tiny"), front.gateway.fleet().snapshot()[0].id);
    for _ in 0..3 {
        front.gateway.remembered.identity.agreement.counted(at, Some(DISAGREES), Instant::now());
    }
    assert_eq!(ask(false).await.attempts[0].knowledge, Knowledge::Fallback);
    assert_eq!(known(), Knowledge::Exact, "its blocks are as well known as before");
}

/// The small model's template with this word before every conversation.
fn beginning(word: &str) -> tempfile::TempDir {
    let plain = include_str!("../../../../configs/models/tiny/chat_template.jinja");
    crate::catalog::tests::folder(&format!("{{{{- '{word}' -}}}}{plain}"))
}

/// A simulated worker with these flags, and a front door that follows its events and reads prompts as `folder` says.
async fn followed(flags: &[&str], folder: &tempfile::TempDir) -> (workers_shim::sim::SimWorker, Front) {
    let sim = sim(flags).await;
    let front = front_of(&[url(&sim)], &[&format!("models.tiny.text={:?}", folder.path())]).await;
    until("its events are followed", || front.gateway.fleet().snapshot()[0].knowledge == Knowledge::Exact).await;
    (sim, front)
}

async fn say(front: &Front, messages: &[Value]) -> std::sync::Arc<Receipt> {
    let body = json!({"model": "tiny", "max_tokens": 2, "messages": messages});
    assert_eq!(post(front.proxy_address(), CHAT, body.to_string()).await.status, 200);
    receipt(front)
}

#[tokio::test]
async fn a_template_that_gives_as_many_other_tokens_is_found_out_by_what_the_engine_finds() {
    let (theirs, ours) = (beginning("a"), beginning("b"));
    let (_sim, front) = followed(&["--speed-up=50", &format!("--text={}", theirs.path().display())], &ours).await;
    let mut messages = vec![json!({"role": "user", "content": "what is in the sea? ".repeat(60)})];
    let cold = say(&front, &messages).await;
    assert_eq!((cold.attempts[0].knowledge, cold.seen.unwrap().cache_disagrees), (Knowledge::Exact, None));
    for _ in 0..6 {
        messages.push(json!({"role": "user", "content": "what else? ".repeat(20)}));
        let step = say(&front, &messages).await;
        let seen = step.seen.unwrap();
        assert_eq!((step.attempts[0].knowledge, seen.engine_disagrees), (Knowledge::Exact, None), "they are as many");
        let finds = seen.cache_disagrees.unwrap();
        assert_eq!((finds.told, Some(finds.found)), (Tokens(0), seen.cached));
    }
    // It counts once late events had time to come.
    let agreement = &front.gateway.remembered.identity.agreement;
    assert_eq!(agreement.all_doubts(), []);
    until("it is doubted", || !agreement.all_doubts().is_empty()).await;
    assert_eq!(say(&front, &messages).await.attempts[0].knowledge, Knowledge::Fallback);
    let disagreeing = front.gateway.metrics.identity.found_prompts.with_label_values(&["disagrees"]);
    until("all are looked at", || disagreeing.get() == 7).await;
    let ready = get(front.operator_address(), "/readyz").await.json();
    let line = &ready["degraded"][0];
    assert_eq!((&line["what"], &line["cause"]), (&json!("identity"), &json!("cache_disagrees")), "{ready}");
    assert!(line["detail"].as_str().unwrap().contains("models.\"tiny\".text"), "{line}");
    let metrics = String::from_utf8(get(front.operator_address(), "/metrics").await.body.to_vec()).unwrap();
    for series in [
        "doubted_models 1",
        "found_prompts_total{result=\"disagrees\"} 7",
        "found_prompts_total{result=\"not_compared\"} 1",
    ] {
        assert!(metrics.contains(&format!("ownerserve_identity_{series}")), "{series} in {metrics}");
    }
}

#[tokio::test]
async fn what_is_found_says_nothing_where_it_is_not_certain_whose_prompt_it_was() {
    let (theirs, ours) = (beginning("a"), beginning("b"));
    let (_sim, front) = followed(&["--speed-up=50", &format!("--text={}", theirs.path().display())], &ours).await;
    let ask = async |path: &str, fields: Value| {
        let mut body = json!({"model": "tiny", "max_tokens": 2});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        assert_eq!(post(front.proxy_address(), path, body.to_string()).await.status, 200);
        receipt(&front).seen.unwrap()
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
        assert_eq!(ask(path, body.clone()).await.cache_disagrees, None, "{path} {body}");
    }
    let compared = |result| front.gateway.metrics.identity.found_prompts.with_label_values(&[result]).get();
    assert_eq!(["agrees", "disagrees", "not_compared"].map(compared), [0, 0, 7]);
    assert!(ask(CHAT, chat(json!({}))).await.cache_disagrees.is_some(), "the same, plainly");
    let plain = ask("/v1/completions", json!({"prompt": text})).await;
    assert_eq!((plain.cache_disagrees, compared("agrees")), (None, 1), "no template is in it: {plain:?}");
}

#[tokio::test]
async fn cold_starts_together_and_evictions_make_no_doubt() {
    let folder = beginning("a");
    let profile = folder.path().join("small.toml");
    std::fs::write(&profile, "blocks = 160\ncontext_tokens = 2560\nstep_tokens = 512").unwrap();
    let flags = [format!("--text={}", folder.path().display()), format!("--profile={}", profile.display())];
    let (sim, front) = followed(&["--speed-up=10", &flags[0], &flags[1]], &folder).await;
    for round in 0..8 {
        let shared = json!({"role": "system", "content": format!("{round} you know the sea. ").repeat(60)});
        let burst = (0..6).map(|fork| {
            let own = json!({"role": "user", "content": format!("{fork} what is in the sea? ").repeat(10)});
            let body = json!({"model": "tiny", "max_tokens": 8, "messages": [shared, own]});
            post(front.proxy_address(), CHAT, body.to_string())
        });
        assert!(futures::future::join_all(burst).await.iter().all(|answer| answer.status == 200));
    }
    let all = front.gateway.decisions.receipts.newest(100, |_| true);
    let is_foretold = |receipt: &&std::sync::Arc<Receipt>| {
        let seen = receipt.seen.unwrap();
        seen.cached.unwrap() <= seen.predicted_cached + Tokens(16)
    };
    let foretold = all.iter().filter(is_foretold).count();
    assert!(all.len() == 48 && foretold <= 24, "many were planned before the first of them was computed: {foretold}");
    assert!(all.iter().all(|receipt| receipt.attempts[0].knowledge == Knowledge::Exact));
    let agreement = &front.gateway.remembered.identity.agreement;
    assert_eq!(agreement.all_doubts(), []);
    let compared = |result| front.gateway.metrics.identity.found_prompts.with_label_values(&[result]).get();
    let all = || ["agrees", "disagrees", "not_compared"].map(compared).iter().sum::<u64>();
    until("all are looked at", || all() == 48).await;
    assert!(compared("agrees") >= 24 && compared("disagrees") < 4, "{} {}", compared("agrees"), compared("disagrees"));
    let held = front.gateway.index().read().blocks();
    assert!(held <= 160, "{held}: what was there before is evicted");
    drop(sim);
}
