use http::Request;
use planner::{Action, ActionSet};
use serde_json::{Value, json};
use vocabulary::{Micros, ModelId, SessionId, TenantId};

use super::*;
use crate::app_state::AppState;
use crate::guardrail::ComparisonArm;
use crate::testing::{StubWorker, TestRouter, get, send, start_router, start_router_at, wait_until};
use vocabulary::RoutingMode;

/// Adds twenty sessions to each arm; those served by `action` are ten times as slow.
pub(crate) fn slow_down_action(app_state: &AppState, action: Action) {
    for session in 0..40 {
        let (arm, took) =
            if session % 2 == 0 { (ComparisonArm::Control, 100_000) } else { (ComparisonArm::Treatment, 1_000_000) };
        enforce_guardrail(
            &app_state.decisions.guardrail,
            &app_state.routing,
            &StepSample { action, session: SessionId(session), arm, latency: Micros(took), at_unix_ms: 1 },
        );
    }
}

async fn guardrail_line(router: &TestRouter, action: Action) -> Value {
    let response = get(router.operator_address(), "/ownerserve/v1/guardrail").await.json();
    let lines = response["actions"].as_array().unwrap();
    assert_eq!(lines.len(), Action::ALL.len());
    lines.iter().find(|line| line["action"] == action.as_str()).unwrap().clone()
}

async fn reasons(router: &TestRouter) -> Vec<String> {
    let ready = get(router.operator_address(), "/readyz").await.json();
    let degraded = ready["degraded"].as_array().unwrap().iter().filter(|line| line["component"] == "guardrail");
    degraded.map(|line| line["reason"].as_str().unwrap().to_owned()).collect()
}

async fn metrics(router: &TestRouter) -> String {
    String::from_utf8(get(router.operator_address(), "/metrics").await.body.to_vec()).unwrap()
}

#[tokio::test]
async fn a_slower_action_is_disabled_until_an_operator_enables_it() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let action = Action::StateMigration;
    let disabled = |count| format!("ownerserve_guardrail_action_disabled{{action=\"{action}\"}} {count}\n");
    assert!(metrics(&router).await.contains(&disabled(0)));
    slow_down_action(&router.gateway, action);
    assert_eq!(router.gateway.routing.get().disabled, ActionSet::NONE.with(action));
    let told = guardrail_line(&router, action).await;
    assert_eq!(
        (&told["disabled"], &told["slower_since"]),
        (&json!(true), &json!("1970-01-01T00:00:00.001Z")),
        "{told}"
    );
    assert_eq!((&told["control_sessions"], &told["treatment_sessions"]), (&json!(20), &json!(20)));
    assert!(told["ttft_ratio"].as_f64() > Some(6.9) && told["ttft_ratio_lower"].as_f64() > Some(5.0), "{told}");
    assert_eq!(guardrail_line(&router, Action::RemotePrefill).await["disabled"], false);
    assert_eq!(reasons(&router).await, ["action_disabled"]);
    let text = metrics(&router).await;
    let sessions = format!("ownerserve_guardrail_sessions{{action=\"{action}\",arm=\"control\"}} 20\n");
    assert!(text.contains(&disabled(1)) && text.contains(&sessions), "{text}");
    let put = |body: &'static str| {
        let request = Request::put("/ownerserve/v1/routing").header("content-type", "application/json");
        send(router.operator_address(), request, body)
    };
    put(r#"{"disabled_actions":["state_migration","artifact_fetch"]}"#).await;
    assert_eq!(guardrail_line(&router, action).await["disabled"], true, "it was left off");
    put(r#"{"disabled_actions":[]}"#).await;
    let told = guardrail_line(&router, action).await;
    assert_eq!(
        (&told["disabled"], &told["treatment_sessions"], &told["ttft_ratio"]),
        (&json!(false), &json!(0), &Value::Null)
    );
    assert!(reasons(&router).await.is_empty() && metrics(&router).await.contains(&disabled(0)));
}

#[tokio::test]
async fn control_sessions_bypass_the_plan_and_slow_placement_only_raises_an_alarm() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router_at(&[worker.url()], &["guardrail.control_percent=50"]).await;
    let routing = router.gateway.routing.get();
    let action = Action::ColocatedPrefill;
    let id = |name: &String| SessionId::of_key(&TenantId::default(), &ModelId::from("tiny"), name);
    let names = |arm| {
        let all = (0..).map(|n| format!("session {n}")).filter(move |name| routing.arm_of(id(name)) == Some(arm));
        all.take(20)
    };
    let ask = async |name: String, behave: &str| {
        let body = format!("{{\"model\":\"tiny\",\"prompt\":\"x\",\"behave\":{behave:?}}}");
        let request = Request::post("/v1/completions").header("x-session-id", name);
        assert_eq!(send(router.proxy_address(), request, body).await.status, 200);
    };
    for name in names(ComparisonArm::Control) {
        ask(name, "answer").await;
    }
    futures::future::join_all(names(ComparisonArm::Treatment).map(|name| ask(name, "late"))).await;
    let receipts = || router.gateway.decisions.receipts.newest(100, |_| true);
    wait_until("all receipts are filed", || receipts().len() == 40).await;
    for receipt in receipts() {
        let arm = routing.arm_of(receipt.lookup.session_id);
        let expected = if arm == Some(ComparisonArm::Treatment) { RoutingMode::Active } else { RoutingMode::Shadow };
        assert_eq!((receipt.mode, receipt.control_group), (expected, arm == Some(ComparisonArm::Control)));
        assert_eq!(receipt.decision.as_ref().map(|decision| decision.plan.action), Some(action));
        assert_eq!(serde_json::to_value(&*receipt).unwrap()["control_group"] == true, receipt.control_group);
    }
    let told = guardrail_line(&router, action).await;
    assert_eq!((&told["control_sessions"], &told["treatment_sessions"]), (&json!(20), &json!(20)), "{told}");
    assert!(told["ttft_ratio_lower"].as_f64() > Some(1.0) && told["slower_since"].is_string(), "{told}");
    assert_eq!((&told["disabled"], &told["can_be_disabled"]), (&json!(false), &json!(false)));
    assert_eq!(router.gateway.routing.get().disabled, ActionSet::NONE);
    assert_eq!(reasons(&router).await, ["placement_slower"]);
}

#[tokio::test]
async fn a_retried_step_counts_for_the_action_chosen_first() {
    let (one, two) = (StubWorker::start("one", "tiny").await, StubWorker::start("two", "tiny").await);
    let router =
        start_router(&[&one, &two], &["guardrail.control_percent=50", "models.tiny.tokenizer_dir=builtin"]).await;
    let live = || router.gateway.directory().view().workers().filter(|worker| worker.is_live()).count() == 2;
    wait_until("both have a lease", live).await;
    let id = |name: &str| SessionId::of_key(&TenantId::default(), &ModelId::from("tiny"), name);
    let ask = async |name: &str, behave: &str| {
        let prompt = format!("the long history of {name} ").repeat(40);
        let body = format!("{{\"model\":\"tiny\",\"prompt\":{prompt:?},\"behave\":{behave:?}}}");
        let request = Request::post("/v1/completions").header("x-session-id", name);
        let response = send(router.proxy_address(), request, body).await;
        response.json()["served_by"].as_str().unwrap().to_owned()
    };
    let own = (0..).map(|n| format!("session {n}"));
    let mut own = own.filter(|name| router.gateway.routing.get().arm_of(id(name)) == Some(ComparisonArm::Treatment));
    let name = loop {
        let name = own.next().unwrap();
        if ask(&name, "answer").await == "one" {
            break name;
        }
    };
    let is_known = || router.gateway.directory().view().session(id(&name)).is_some_and(|one| !one.heads.is_empty());
    wait_until("the session is known", is_known).await;
    assert_eq!(ask(&name, "fail at one").await, "two");
    let compared = || router.gateway.decisions.guardrail.of(Action::DecodeContinuation);
    wait_until("the step is over", || compared() != ArmComparisonReport::default()).await;
    assert_eq!((compared().treatment_sessions, compared().control_sessions), (1, 0));
    let actions = router.gateway.decisions.receipts.newest(1, |_| true)[0]
        .attempts
        .iter()
        .map(|tried| tried.action)
        .collect::<Vec<_>>();
    assert_eq!(actions, [Action::DecodeContinuation, Action::ColocatedPrefill]);
}
