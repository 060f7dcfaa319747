use http::Request;
use vocabulary::{ModelId, SessionId, TenantId};

use crate::testing::{Front, Worker, front, post, send, until};

const PATH: &str = "/v1/completions";

fn session(name: &str) -> SessionId {
    SessionId::of_key(&TenantId::default(), &ModelId::from("tiny"), name)
}

async fn with_a_lease(settings: &[&str]) -> (std::sync::Arc<Worker>, Front) {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], settings).await;
    let live = || front.gateway.directory().view().workers().any(|worker| worker.is_live());
    until("the worker has a lease", live).await;
    (worker, front)
}

#[tokio::test]
async fn a_choice_that_is_cut_off_is_confessed_although_another_one_finished() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[]).await;
    let ask = async |n: u8| {
        let body =
            format!("{{\"model\":\"tiny\",\"prompt\":\"\",\"stream\":true,\"behave\":\"finish one\",\"n\":{n}}}");
        String::from_utf8(post(front.proxy_address(), PATH, body).await.body.to_vec()).unwrap()
    };
    assert!(!ask(1).await.contains("event: error"), "the only choice is complete");
    assert!(ask(2).await.ends_with("\n\n") && ask(2).await.contains("event: error"));
}

#[tokio::test]
async fn a_session_that_was_spawned_from_another_says_so_in_the_ledger() {
    let (_worker, front) = with_a_lease(&[]).await;
    let body = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", "a long history ".repeat(40));
    let request = Request::post(PATH).header("x-session-id", "child").header("x-parent-session-id", "mother");
    assert_eq!(send(front.proxy_address(), request, body).await.status, 200);
    let parent = || front.gateway.directory().view().session(session("child")).map(|child| child.parent);
    until("the session is known", || parent().is_some()).await;
    assert_eq!(parent().flatten(), Some(session("mother")));
}

#[tokio::test]
async fn steps_go_on_where_the_last_one_was_when_the_ledger_is_gone() {
    let workers = [Worker::start("one", "tiny").await, Worker::start("two", "tiny").await];
    let front = front(&[&workers[0], &workers[1]], &[]).await;
    let both = || front.gateway.directory().view().workers().filter(|worker| worker.is_live()).count() == 2;
    until("both workers have a lease", both).await;
    front.gateway.directory().close().await.unwrap();
    let mut history = "a long history ".repeat(40);
    for session in ["a", "b", "c", "d"] {
        let mut served = Vec::new();
        for step in 0..4 {
            history.push_str(&format!("{session} said {step} ").repeat(30));
            let body = format!("{{\"model\":\"tiny\",\"prompt\":{history:?}}}");
            let got = send(front.proxy_address(), Request::post(PATH).header("x-session-id", session), body).await;
            assert_eq!(got.status, 200);
            served.push(got.json()["served_by"].clone());
            let receipt = front.gateway.receipts.newest(1, |_| true).remove(0);
            assert_eq!(receipt.known.grounds.unapplied, step > 0, "step {step} of {session}");
            assert_eq!(receipt.known.owner.is_some(), step > 0, "step {step} of {session}");
        }
        assert!(served.iter().all(|by| *by == served[0]), "{session} was served by {served:?}");
    }
    assert_eq!(front.gateway.unapplied().untold(), 4, "one step a session waits for a quorum");
}

#[tokio::test]
async fn a_bypassed_step_leaves_nothing_in_the_ledger_and_a_shadowed_one_what_was_served() {
    for (mode, known) in [("sticky", false), ("shadow", true)] {
        let (_worker, front) = with_a_lease(&[&format!("steering.mode={mode}")]).await;
        let body = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", "a long history ".repeat(40));
        let request = Request::post(PATH).header("x-session-id", "s");
        assert_eq!(send(front.proxy_address(), request, body).await.status, 200);
        let before = front.gateway.directory().readings().commands;
        let is_known = || front.gateway.directory().view().session(session("s")).is_some();
        match known {
            true => until("the session is known", is_known).await,
            false => {
                // Whatever the step had said would be in the log before this.
                until("the ledger goes on", || front.gateway.directory().readings().commands > before).await;
                assert!(!is_known());
            }
        }
        let receipt = front.gateway.receipts.newest(1, |_| true).remove(0);
        assert_eq!(receipt.decision.is_some(), known, "{mode}: priced or not");
    }
}

#[tokio::test]
async fn a_prompt_that_is_known_to_be_too_long_is_refused_and_a_guessed_one_is_the_engines_to_judge() {
    let guessed = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", "a long history ".repeat(20_000));
    let (_worker, by_bytes) = with_a_lease(&[]).await;
    assert_eq!(post(by_bytes.proxy_address(), PATH, guessed).await.status, 200);

    let known = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", vec![5; 60_000]);
    let (_worker, by_tokens) = with_a_lease(&["models.tiny.text=builtin"]).await;
    let got = post(by_tokens.proxy_address(), PATH, known).await;
    assert_eq!((got.status, got.error_code().as_str()), (400, "context_length_exceeded"));
    let message = got.json()["error"]["message"].to_string();
    assert!(message.contains("50000") && message.contains("60000 input tokens"), "{message}");
}
