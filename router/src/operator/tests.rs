use bytes::Bytes;
use http::Request;

use crate::testing::{Worker, front, front_of, get, post, send};

#[tokio::test]
async fn the_dial_turns_at_run_time_and_shows_in_the_metrics() {
    let front = front_of(&[], &["steering.mode=shadow"]).await;
    let at = front.operator_address();
    let path = "/ownerserve/v1/mode";
    let json = |request: http::request::Builder| request.header("content-type", "application/json");
    assert_eq!(get(at, path).await.json(), serde_json::json!({"mode": "shadow", "rollout_percent": 100}));
    let got = send(at, json(Request::put(path)), "{\"mode\":\"own\",\"rollout_percent\":5}").await;
    assert_eq!((got.status, got.json()["rollout_percent"].as_u64()), (200, Some(5)));
    let got = send(at, json(Request::patch(path)), "{\"rollout_percent\":20}").await;
    assert_eq!(got.json(), serde_json::json!({"mode": "own", "rollout_percent": 20}));
    let text = get(at, "/metrics").await.body;
    let text = std::str::from_utf8(&text).unwrap();
    assert!(
        text.contains("ownerserve_mode{mode=\"own\"} 1") && text.contains("ownerserve_rollout_ratio 0.2"),
        "{text}"
    );
    for body in ["{\"mode\":\"fast\"}", "{\"rollout_percent\":101}", "{\"x\":1}", "nonsense"] {
        let got = send(at, json(Request::put(path)), body).await;
        assert_eq!((got.status, got.headers["content-type"].to_str().unwrap()), (400, "application/problem+json"));
        assert!(got.json()["detail"].as_str().unwrap().contains("accepted is"), "{body}");
    }
    let form = Request::put(path).header("content-type", "text/plain");
    assert_eq!(send(at, form, "{\"mode\":\"sticky\"}").await.status, 415, "what any web page could send is refused");
    assert_eq!(get(at, path).await.json()["mode"], "own");
}

#[tokio::test]
async fn readiness_follows_the_workers_and_liveness_does_not() {
    let nobody = front_of(&[], &[]).await;
    assert_eq!(get(nobody.operator_address(), "/readyz").await.status, 503);
    assert_eq!(get(nobody.operator_address(), "/livez").await.status, 200);
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[]).await;
    assert_eq!(get(front.operator_address(), "/readyz").await.status, 200);
    let lines = get(front.operator_address(), "/ownerserve/v1/workers").await.json();
    assert_eq!(lines["workers"][0]["endpoint"], worker.url());
    assert_eq!(lines["workers"][0]["health"], "ready");
    assert_eq!(lines["workers"][0]["models"][0], "tiny");
}

#[tokio::test]
async fn unknown_paths_and_methods_are_problems_and_the_client_api_is_not_here() {
    let front = front_of(&[], &[]).await;
    let at = front.operator_address();
    for (request, status) in
        [(Request::post("/v1/chat/completions"), 404), (Request::get("/"), 404), (Request::delete("/metrics"), 405)]
    {
        let got = send(at, request, Bytes::new()).await;
        assert_eq!((got.status, got.json()["status"].as_u64()), (status, Some(u64::from(status))));
    }
    assert_eq!(post(at, "/ownerserve/v1/workers", "{}").await.status, 405);
}
