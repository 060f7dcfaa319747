use std::sync::Arc;

use http::Request;
use ownership::ledger::Ledger;
use vocabulary::{Knowledge, ModelId, SessionId, TenantId};

use crate::pipeline::receipt::{Ending, Receipt, Remark};
use crate::testing::{Front, Worker, front, post, raw, send, until};

const PATH: &str = "/v1/completions";

fn body(behave: &str) -> String {
    format!("{{\"model\":\"tiny\",\"prompt\":{:?},\"behave\":{behave:?}}}", "a long history ".repeat(40))
}

fn receipts(front: &Front) -> Vec<Arc<Receipt>> {
    front.gateway.receipts.newest(10, |_| true)
}

fn ending(receipt: &Receipt) -> (Ending, u16) {
    let seen = receipt.seen.unwrap();
    (seen.ending, seen.status)
}

#[tokio::test]
async fn a_worker_without_room_is_told_as_such_when_there_is_no_other() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[]).await;
    let got = post(front.proxy_address(), PATH, body("busy")).await;
    assert_eq!((got.status, got.error_code().as_str()), (429, "overloaded"));
    assert_eq!(got.headers["retry-after"], "1");
    let [receipt] = &receipts(&front)[..] else { panic!("one receipt") };
    assert_eq!(ending(receipt), (Ending::Failed, 429));
    assert_eq!(receipt.attempts.len(), 1);
    assert_eq!(receipt.attempts[0].remarks, [Remark::DecodeBusy]);
    assert_eq!(receipt.attempts[0].knowledge, Knowledge::Fallback, "it tells no events");
    let text = String::from_utf8(front.gateway.metrics.render()).unwrap();
    assert!(!text.contains("ownerserve_retries_total"), "nothing was tried again");
    assert!(text.contains("ownerserve_fallback_total{cause=\"decode_busy\"} 1"), "{text}");
}

#[tokio::test]
async fn a_step_that_fails_everywhere_leaves_a_receipt_with_every_try() {
    let (one, two) = (Worker::start("one", "tiny").await, Worker::start("two", "tiny").await);
    let front = front(&[&one, &two], &[]).await;
    until("both are ready", || front.gateway.roster.ready(front.gateway.fleet()).len() == 2).await;
    let got = post(front.proxy_address(), PATH, body("fail")).await;
    assert_eq!((got.status, got.error_code().as_str()), (502, "worker_failed"));
    assert_eq!((one.seen().len(), two.seen().len()), (1, 1), "each was tried once");
    let [receipt] = &receipts(&front)[..] else { panic!("one receipt") };
    assert_eq!(ending(receipt), (Ending::Failed, 502));
    assert!(receipt.attempts.iter().all(|attempt| attempt.remarks == [Remark::DecodeFailed]));
    assert_eq!(receipt.attempts.len(), 2);
    let retries = front.gateway.metrics.requests.retries.with_label_values(&["decode_failed"]).get();
    assert_eq!(retries, 1, "the second try was the only retry");
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_leaves_a_receipt_and_no_intent() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[]).await;
    let session = SessionId::of_key(&TenantId::default(), &ModelId::from("tiny"), "s");
    let ledger = |ask: &dyn Fn(&Ledger) -> bool| ask(&front.gateway.directory().view());
    let live = |ledger: &Ledger| ledger.workers().any(|worker| worker.is_live());
    until("the worker has a lease", || ledger(&live)).await;
    let request = Request::post(PATH).header("x-session-id", "s");
    assert_eq!(send(front.proxy_address(), request, body("answer")).await.status, 200);
    until("the session is known", || ledger(&|ledger| ledger.session(session).is_some_and(|s| !s.heads.is_empty())))
        .await;

    let body = body("hang");
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: x\r\nx-session-id: s\r\ncontent-length: {}\r\n\r\n", body.len());
    let client = raw(front.proxy_address(), format!("{head}{body}").as_bytes()).await;
    until("the step is announced", || ledger(&|ledger| ledger.intents(session).count() == 1)).await;
    drop(client);
    until("the announcement is taken back", || ledger(&|ledger| ledger.intents(session).count() == 0)).await;
    let newest = receipts(&front).remove(0);
    assert_eq!(ending(&newest), (Ending::ClientLeft, 499));
    assert_eq!(newest.attempts.len(), 1);
}
