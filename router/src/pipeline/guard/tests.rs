use http::Request;
use planner::{Action, Actions};
use serde_json::{Value, json};
use vocabulary::{Micros, ModelId, SessionId, TenantId};

use super::*;
use crate::guardrail::Arm;
use crate::pipeline::steering::Mode;
use crate::testing::{Front, Worker, front, front_of, get, send, until};

/// Twenty sessions of either arm, those that `action` served ten times as slow.
pub(crate) fn make_slow(gateway: &Gateway, action: Action) {
    for session in 0..40 {
        let (arm, took) = if session % 2 == 0 { (Arm::Control, 100_000) } else { (Arm::Own, 1_000_000) };
        guard(gateway, &Step { action, session: SessionId(session), arm, took: Micros(took), at_unix_ms: 1 });
    }
}

async fn line(front: &Front, action: Action) -> Value {
    let got = get(front.operator_address(), "/ownerserve/v1/guardrail").await.json();
    let lines = got["actions"].as_array().unwrap();
    assert_eq!(lines.len(), Action::ALL.len());
    lines.iter().find(|line| line["action"] == action.as_str()).unwrap().clone()
}

async fn causes(front: &Front) -> Vec<String> {
    let ready = get(front.operator_address(), "/readyz").await.json();
    let degraded = ready["degraded"].as_array().unwrap().iter().filter(|line| line["what"] == "guardrail");
    degraded.map(|line| line["cause"].as_str().unwrap().to_owned()).collect()
}

async fn metrics(front: &Front) -> String {
    String::from_utf8(get(front.operator_address(), "/metrics").await.body.to_vec()).unwrap()
}

#[tokio::test]
async fn an_action_that_makes_sessions_slower_is_switched_off_until_an_operator_switches_it_on() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[]).await;
    let action = Action::StateMigration;
    let reverted = |count| format!("ownerserve_guardrail_reverted{{action=\"{action}\"}} {count}\n");
    assert!(metrics(&front).await.contains(&reverted(0)));
    make_slow(&front.gateway, action);
    assert_eq!(front.gateway.steering.get().disabled, Actions::NONE.with(action));
    let told = line(&front, action).await;
    assert_eq!((&told["reverted"], &told["slower_since_unix_ms"]), (&json!(true), &json!(1)), "{told}");
    assert_eq!((&told["control_sessions"], &told["own_sessions"]), (&json!(20), &json!(20)));
    assert!(told["ratio"].as_f64() > Some(6.9) && told["ratio_low"].as_f64() > Some(5.0), "{told}");
    assert_eq!(line(&front, Action::RemotePrefill).await["reverted"], false);
    assert_eq!(causes(&front).await, ["action_slower"]);
    let text = metrics(&front).await;
    let sessions = format!("ownerserve_guardrail_sessions{{action=\"{action}\",arm=\"control\"}} 20\n");
    assert!(text.contains(&reverted(1)) && text.contains(&sessions), "{text}");
    let put = |body: &'static str| {
        let request = Request::put("/ownerserve/v1/mode").header("content-type", "application/json");
        send(front.operator_address(), request, body)
    };
    put(r#"{"disabled":["state_migration","artifact_fetch"]}"#).await;
    assert_eq!(line(&front, action).await["reverted"], true, "it was left off");
    put(r#"{"disabled":[]}"#).await;
    let told = line(&front, action).await;
    assert_eq!((&told["reverted"], &told["own_sessions"], &told["ratio"]), (&json!(false), &json!(0), &Value::Null));
    assert!(causes(&front).await.is_empty() && metrics(&front).await.contains(&reverted(0)));
}

#[tokio::test]
async fn a_control_session_is_planned_and_bypassed_and_slower_placement_is_told_and_not_switched_off() {
    let worker = Worker::start("one", "tiny").await;
    let front = front_of(&[worker.url()], &["guardrail.control_percent=50"]).await;
    let steering = front.gateway.steering.get();
    let action = Action::ColocatedPrefill;
    let id = |name: &String| SessionId::of_key(&TenantId::default(), &ModelId::from("tiny"), name);
    let names = |arm| {
        let all = (0..).map(|n| format!("session {n}")).filter(move |name| steering.arm_of(id(name)) == Some(arm));
        all.take(20)
    };
    let ask = async |name: String, behave: &str| {
        let body = format!("{{\"model\":\"tiny\",\"prompt\":\"x\",\"behave\":{behave:?}}}");
        let request = Request::post("/v1/completions").header("x-session-id", name);
        assert_eq!(send(front.proxy_address(), request, body).await.status, 200);
    };
    for name in names(Arm::Control) {
        ask(name, "answer").await;
    }
    futures::future::join_all(names(Arm::Own).map(|name| ask(name, "late"))).await;
    let receipts = || front.gateway.decisions.receipts.newest(100, |_| true);
    until("all receipts are filed", || receipts().len() == 40).await;
    for receipt in receipts() {
        let arm = steering.arm_of(receipt.known.session);
        let expected = if arm == Some(Arm::Own) { Mode::Own } else { Mode::Shadow };
        assert_eq!((receipt.mode, receipt.control), (expected, arm == Some(Arm::Control)));
        assert_eq!(receipt.decision.as_ref().map(|decision| decision.plan.action), Some(action));
        assert_eq!(serde_json::to_value(&*receipt).unwrap()["control"] == true, receipt.control);
    }
    let told = line(&front, action).await;
    assert_eq!((&told["control_sessions"], &told["own_sessions"]), (&json!(20), &json!(20)), "{told}");
    assert!(told["ratio_low"].as_f64() > Some(1.0) && told["slower_since_unix_ms"].is_u64(), "{told}");
    assert_eq!((&told["reverted"], &told["can_be_reverted"]), (&json!(false), &json!(false)));
    assert_eq!(front.gateway.steering.get().disabled, Actions::NONE);
    assert_eq!(causes(&front).await, ["placement_slower"]);
}

#[tokio::test]
async fn a_step_counts_for_what_was_chosen_first_although_something_else_served_it() {
    let (one, two) = (Worker::start("one", "tiny").await, Worker::start("two", "tiny").await);
    let front = front(&[&one, &two], &["guardrail.control_percent=50", "models.tiny.text=builtin"]).await;
    let live = || front.gateway.directory().view().workers().filter(|worker| worker.is_live()).count() == 2;
    until("both have a lease", live).await;
    let id = |name: &str| SessionId::of_key(&TenantId::default(), &ModelId::from("tiny"), name);
    let ask = async |name: &str, behave: &str| {
        let prompt = format!("the long history of {name} ").repeat(40);
        let body = format!("{{\"model\":\"tiny\",\"prompt\":{prompt:?},\"behave\":{behave:?}}}");
        let request = Request::post("/v1/completions").header("x-session-id", name);
        let got = send(front.proxy_address(), request, body).await;
        got.json()["served_by"].as_str().unwrap().to_owned()
    };
    let own = (0..).map(|n| format!("session {n}"));
    let mut own = own.filter(|name| front.gateway.steering.get().arm_of(id(name)) == Some(Arm::Own));
    let name = loop {
        let name = own.next().unwrap();
        if ask(&name, "answer").await == "one" {
            break name;
        }
    };
    let is_known = || front.gateway.directory().view().session(id(&name)).is_some_and(|one| !one.heads.is_empty());
    until("the session is known", is_known).await;
    assert_eq!(ask(&name, "fail at one").await, "two");
    let compared = || front.gateway.decisions.guardrail.of(Action::DecodeContinuation);
    until("the step is over", || compared() != Compared::default()).await;
    assert_eq!((compared().own_sessions, compared().control_sessions), (1, 0));
    let actions = front.gateway.decisions.receipts.newest(1, |_| true)[0]
        .attempts
        .iter()
        .map(|tried| tried.action)
        .collect::<Vec<_>>();
    assert_eq!(actions, [Action::DecodeContinuation, Action::ColocatedPrefill]);
}
