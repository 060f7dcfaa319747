use futures::FutureExt as _;
use http::{HeaderMap, Method};
use serde_json::json;
use vocabulary::{Knowledge, TenantId, Tokens, WorkerId};
use workers_shim::sim::SimWorker;

use super::*;
use crate::incoming::{Endpoint, Incoming, new_request_id};
use crate::pipeline::plan::Classified;
use crate::pipeline::receipt::{Ending, Receipt};
use crate::pipeline::steering::{Mode, Percent};
use crate::pipeline::{identify, locate, parse, plan};
use crate::sim_command::tests::{sim, url};
use crate::testing::{Front, front_of, post, raw, request_bytes, until};

fn hold(turns: &mut Turns, step: u128, prompt: u64) -> Verdict {
    let asking = Asking { prompt: Tokens(prompt), costs_others: Micros(u64::MAX), now: Micros(1) };
    turns.admit(RequestId(step), asking)
}

fn start(turns: &mut Turns, step: u128) {
    let asking = Asking { prompt: Tokens(1), costs_others: Micros::ZERO, now: Micros(1) };
    assert!(matches!(turns.admit(RequestId(step), asking), Verdict::Start { .. }));
}

/// Who is called, of these.
fn called(turns: &Turns, steps: &[u128]) -> Vec<u128> {
    let is_called =
        |step: &u128| turns.bells.get(&RequestId(*step)).is_some_and(|bell| bell.notified().now_or_never().is_some());
    steps.iter().copied().filter(is_called).collect()
}

fn three() -> Turns {
    let mut turns = Turns::new(Admission::default());
    for (step, prompt) in [(1, 300), (2, 100), (3, 200)] {
        assert!(matches!(hold(&mut turns, step, prompt), Verdict::Hold { .. }));
    }
    turns
}

#[test]
fn they_are_called_one_after_the_other_short_prompts_first() {
    let mut turns = three();
    assert_eq!(called(&turns, &[1, 2, 3]), []);
    turns.stir(Micros(2));
    assert_eq!(called(&turns, &[1, 2, 3]), [2]);
    start(&mut turns, 2);
    assert_eq!(called(&turns, &[1, 3]), [3]);
    hold(&mut turns, 3, 200);
    assert_eq!(called(&turns, &[1, 3]), [1]);
    hold(&mut turns, 1, 300);
    assert_eq!((called(&turns, &[1, 3]), turns.len()), (vec![], 2), "the round is over");
}

#[test]
fn who_leaves_when_it_is_called_passes_its_turn_on_and_who_leaves_before_is_left_out() {
    let mut turns = three();
    turns.stir(Micros(2));
    turns.leave(RequestId(3), Micros(2));
    assert_eq!(called(&turns, &[1, 2]), [2]);
    turns.leave(RequestId(2), Micros(2));
    assert_eq!((called(&turns, &[1]), turns.len()), (vec![1], 1));
}

#[test]
fn what_ends_during_a_round_begins_another_and_a_new_step_asks_without_being_called() {
    let mut turns = three();
    turns.stir(Micros(2));
    assert_eq!(called(&turns, &[1, 2, 3]), [2]);
    turns.stir(Micros(3));
    hold(&mut turns, 4, 50);
    assert_eq!(called(&turns, &[1, 2, 3, 4]), [], "one at a time");
    for (step, next) in [(2, 3), (3, 1), (1, 4)] {
        hold(&mut turns, step, 100);
        assert_eq!(called(&turns, &[1, 2, 3, 4]), [next], "behind the last one the shortest of all");
    }
}

#[test]
fn where_nothing_ends_each_is_called_every_half_second() {
    let mut turns = three();
    turns.stir(Micros(10));
    for step in [2, 3, 1] {
        assert_eq!(called(&turns, &[step]), [step]);
        hold(&mut turns, step, 100);
    }
    turns.heard_nothing(Micros(500_009));
    assert_eq!(called(&turns, &[1, 2, 3]), []);
    turns.heard_nothing(Micros(500_010));
    assert_eq!(called(&turns, &[1, 2, 3]), [2]);
    turns.heard_nothing(Micros(9_000_000));
    assert_eq!(called(&turns, &[1, 2, 3]), [], "that round still goes on");
}

const PATH: &str = "/v1/completions";

fn body(word: &str) -> String {
    let prompt = format!("{word} {}", "and a long history ".repeat(60));
    json!({"model": "tiny", "max_tokens": 2, "prompt": prompt}).to_string()
}

/// A worker whose memory is full of what sessions had there just now, and a router that would rather wait for any of them.
async fn full(settings: &[&str]) -> (SimWorker, Front, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.toml");
    std::fs::write(&path, "blocks = 128\ncontext_tokens = 2048").unwrap();
    let worker = sim(&["--speed-up=50", &format!("--profile={}", path.display())]).await;
    let fixed = ["models.tiny.text=builtin", "planner.admission.tolerated=0"];
    let front = front_of(&[url(&worker)], &[&fixed, settings].concat()).await;
    until("its memory and its blocks are known", || {
        let view = &front.gateway.fleet().snapshot()[0];
        (view.capacity.kv, view.knowledge) == (Tokens(2_048), Knowledge::Exact)
    })
    .await;
    (worker, front, folder)
}

/// Sends prompts, in the shadow, where none waits, until one pushes another out.
async fn fill(front: &Front) {
    front.gateway.steering.turn(Mode::Shadow, Percent::ALL);
    for number in 0.. {
        assert!(number < 30, "never full");
        assert_eq!(post(front.proxy_address(), PATH, body(&format!("number {number}"))).await.status, 200);
        let receipt = newest(front);
        assert_eq!(receipt.waited, None);
        if receipt.decision.as_ref().unwrap().plan.because.terms.eviction > Micros::ZERO {
            break;
        }
    }
    front.gateway.steering.turn(Mode::Own, Percent::ALL);
}

async fn step(front: &Front, word: &str) -> Classified {
    let incoming = Incoming {
        id: new_request_id(),
        tenant: TenantId::default(),
        method: Method::POST,
        path: PATH.into(),
        headers: HeaderMap::new(),
        body: body(word).into(),
        arrived: Instant::now(),
        reserved: None,
        memory: None,
        adds: None,
    };
    let request = parse::parse(incoming, Endpoint::Completions, None).unwrap();
    let model = front.gateway.catalog().model(&request.model);
    let request = identify::Unnamed::new(request, model);
    let found = request.whole(&front.gateway.remembered.identity.trails, None);
    let named = request.named(found);
    plan::classify(&front.gateway, locate::locate(&front.gateway, named.prefixed, named.chat).await.unwrap())
}

fn newest(front: &Front) -> Arc<Receipt> {
    front.gateway.decisions.receipts.newest(1, |_| true).remove(0)
}

fn waited(front: &Front, until: Until) -> u64 {
    front.gateway.metrics.decisions.waited.with_label_values(&[until.as_ref()]).get_sample_count()
}

#[tokio::test]
async fn a_step_waits_for_the_longest_time_and_its_receipt_says_what_for() {
    let (_worker, front, _folder) = full(&["planner.admission.longest=700000"]).await;
    fill(&front).await;
    assert_eq!(post(front.proxy_address(), PATH, body("it waits")).await.status, 200);
    let receipt = newest(&front);
    let Some(Waited { time, costs_others, until }) = receipt.waited else { panic!("{receipt:?}") };
    assert!(until == Until::Longest && time >= Micros(700_000) && costs_others > Micros::ZERO, "{receipt:?}");
    assert!(receipt.seen.unwrap().first_token.unwrap_or(receipt.seen.unwrap().total) > time);
    assert_eq!((waited(&front, Until::Longest), front.gateway.policies.account().waiting()), (1, 0));
}

#[tokio::test]
async fn a_client_that_leaves_while_its_step_waits_leaves_the_queue_and_a_receipt() {
    let (worker, front, _folder) = full(&[]).await;
    fill(&front).await;
    let served = front.gateway.decisions.receipts.newest(100, |_| true).len();
    let account = front.gateway.policies.account();
    let client = raw(front.proxy_address(), &request_bytes(PATH, &body("it leaves"))).await;
    until("it waits", || account.waiting() == 1).await;
    drop(client);
    until("it is gone", || account.waiting() == 0).await;
    until("its receipt is there", || front.gateway.decisions.receipts.newest(100, |_| true).len() > served).await;
    let receipt = newest(&front);
    assert_eq!((receipt.seen.unwrap().ending, receipt.attempts.len()), (Ending::ClientLeft, 0));
    assert_eq!(receipt.waited.map(|waited| waited.until), Some(Until::Left));
    assert_eq!(waited(&front, Until::Left), 1);
    drop(worker);
}

#[tokio::test]
async fn who_waits_starts_when_the_planner_is_no_longer_asked() {
    let (_worker, front, _folder) = full(&[]).await;
    fill(&front).await;
    let (address, account) = (front.proxy_address(), front.gateway.policies.account().clone());
    let answer = tokio::spawn(async move { post(address, PATH, body("it waits")).await.status });
    until("it waits", || account.waiting() == 1).await;
    front.gateway.steering.turn(Mode::Sticky, Percent::ALL);
    assert_eq!(answer.await.unwrap(), 200);
    let receipt = newest(&front);
    assert_eq!((receipt.mode, receipt.waited.map(|waited| waited.until)), (Mode::Sticky, Some(Until::Room)));
}

#[tokio::test]
async fn a_step_that_failed_elsewhere_or_that_the_bypass_serves_or_whose_finds_are_guessed_does_not_wait() {
    let (_worker, front, _folder) = full(&[]).await;
    fill(&front).await;
    let plan = |step: &Classified, excluded: &[WorkerId]| plan::plan(&front.gateway, step, excluded).unwrap();
    let mut step = step(&front, "one more").await;
    assert!(!plan(&step, &[WorkerId(7)]).waits());
    step.mode = Mode::Shadow;
    let shadow = plan(&step, &[]);
    assert!(!shadow.waits() && shadow.decision.is_some());
    step.mode = Mode::Own;
    let exact = step.located.workers.clone();
    for knowledge in [Knowledge::Degraded, Knowledge::Fallback] {
        step.located.workers = exact.iter().map(|view| vocabulary::WorkerView { knowledge, ..view.clone() }).collect();
        assert!(!plan(&step, &[]).waits(), "{knowledge:?}");
    }
    step.located.workers = exact;
    assert!(plan(&step, &[]).waits());
}

#[tokio::test]
async fn what_finds_no_place_to_wait_in_starts_and_is_counted() {
    let (_worker, front, _folder) = full(&["planner.admission.most=0"]).await;
    for number in 0..12 {
        assert_eq!(post(front.proxy_address(), PATH, body(&format!("number {number}"))).await.status, 200);
    }
    let receipt = newest(&front);
    let Some(Waited { time, costs_others, until }) = receipt.waited else { panic!("{receipt:?}") };
    assert!((time, until) == (Micros::ZERO, Until::NoPlace) && costs_others > Micros::ZERO, "{receipt:?}");
    assert!(waited(&front, Until::NoPlace) > 0);
}
