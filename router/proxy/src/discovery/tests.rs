use vocabulary::{WorkerHealth, WorkerId};

use super::*;
use crate::testing::{StubWorker, get, post, send, start_router_at, wait_until};
use vocabulary::TimeSpan;

fn worker(url: &str) -> WorkerConfig {
    WorkerConfig::from_url(url.parse().unwrap())
}

fn names(wanted: &[(WorkerSource, &[&str])]) -> (Vec<String>, usize) {
    let wanted =
        wanted.iter().map(|(source, urls)| ((*source, 0), urls.iter().map(|url| worker(url)).collect())).collect();
    let (listed, left_out) = merge_lists(&wanted);
    (listed.iter().map(|(source, worker)| format!("{} {}", source.as_ref(), worker.endpoint())).collect(), left_out)
}

#[test]
fn a_worker_listed_by_several_sources_belongs_to_the_first() {
    let (all, left_out) =
        names(&[(WorkerSource::File, &["http://b:1", "http://a:1#decode"]), (WorkerSource::Static, &["http://a:1"])]);
    assert_eq!((all, left_out), (vec!["static http://a:1".into(), "file http://b:1".into()], 0));
}

#[test]
fn workers_beyond_the_limit_are_dropped_and_counted() {
    let urls: Vec<String> = (0..MAX_WORKERS + 3).map(|number| format!("http://w{number}:1")).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let (all, left_out) = names(&[(WorkerSource::File, &urls), (WorkerSource::Static, &["http://own:1"])]);
    assert_eq!((all.len(), &*all[0], left_out), (MAX_WORKERS, "static http://own:1", 4));
}

fn listing(workers: &[&StubWorker]) -> String {
    let urls: Vec<String> = workers.iter().map(|worker| format!("{{url = {:?}}}", worker.url())).collect();
    format!("workers = [{}]", urls.join(", "))
}

#[tokio::test]
async fn a_registered_worker_is_listed_until_it_withdraws_or_expires() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router_at(&[], &["discovery.max_registrations=1"]).await;
    let (at, app_state, path) = (router.operator_address(), &router.gateway, "/ownerserve/v1/registrations");
    let id = WorkerId::of_endpoint(&worker.url());
    let ready = || app_state.fleet().snapshot().iter().any(|view| view.id == id && view.health == WorkerHealth::Ready);
    let body = |ttl: &str| format!("{{\"url\": \"{}\", \"ttl\": \"{ttl}\"}}", worker.url());
    let got = post(at, path, body("10m")).await;
    assert_eq!((got.status, got.json()["worker"].as_str()), (200, Some(&*id.to_string())), "{}", got.json());
    wait_until("it is there", ready).await;
    assert_eq!(get(at, "/ownerserve/v1/workers").await.json()["workers"][0]["source"], "api");
    let life = app_state.fleet().snapshot()[0].clone();
    assert_eq!(post(at, path, body("10m")).await.json()["result"], "the worker stays listed");
    assert_eq!(app_state.fleet().snapshot()[0].incarnation, life.incarnation);
    let listed = get(at, path).await.json()["registrations"].clone();
    assert!(
        listed.as_array().unwrap().len() == 1
            && listed[0]["expires_in"]
                .as_str()
                .is_some_and(|left| left.parse::<TimeSpan>().unwrap() > TimeSpan::seconds(500)),
        "{listed}"
    );
    let full = post(at, path, "{\"url\": \"http://other:1\"}").await;
    assert_eq!((full.status, full.json()["reason"].as_str()), (409, Some("registrations_full")));
    let of = format!("{path}/{id}");
    let withdraw = || send(at, http::Request::delete(&of).header("content-type", "application/json"), "{}");
    assert_eq!(withdraw().await.status, 200);
    wait_until("it left", || app_state.fleet().snapshot().is_empty()).await;
    assert_eq!(withdraw().await.status, 404);
    assert_eq!(post(at, path, body("1s")).await.status, 200);
    wait_until("it came back", || app_state.fleet().is_listed(id)).await;
    wait_until("it was silent for too long", || app_state.fleet().snapshot().is_empty()).await;
    for (wrong, told) in [
        ("{\"url\": \"a:1\"}", "accepted is http://HOST:PORT"),
        ("{\"url\": \"http://a:1\", \"ttl\": \"999ms\"}", "ttl: accepted is 1s to 1h"),
        ("{\"url\": \"http://a:1\", \"models\": [\"\"]}", "models: accepted are at most 64 names"),
        ("{\"url\": \"http://a:1\", \"api_key\": \"x\"}", "api_key"),
    ] {
        let response = post(at, path, wrong).await;
        assert!(
            response.status == 400 && response.json()["detail"].as_str().unwrap().contains(told),
            "{wrong}: {}",
            response.json()
        );
    }
}

#[tokio::test]
async fn the_fleet_follows_a_worker_file_and_a_broken_one_is_reported_unchanged() {
    let (one, two) = (StubWorker::start("one", "tiny").await, StubWorker::start("two", "tiny").await);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("workers.toml");
    // Replaced atomically, because the file may be read at any time.
    let write = |text: &str| {
        std::fs::write(folder.path().join("new"), text).unwrap();
        std::fs::rename(folder.path().join("new"), &path).unwrap();
    };
    write(&listing(&[&one]));
    let router = start_router_at(&[], &[&format!("discovery.workers_file={path:?}")]).await;
    let (at, app_state) = (router.operator_address(), &router.gateway);
    let ready = || {
        let views = app_state.fleet().snapshot();
        views.iter().filter(|view| view.health == WorkerHealth::Ready).map(|view| view.id).collect::<Vec<_>>()
    };
    let [a, b] = [&one, &two].map(|worker| WorkerId::of_endpoint(&worker.url()));
    wait_until("the first is there", || ready() == [a]).await;
    write(&listing(&[&two, &one]));
    wait_until("the second came", || ready() == [b, a]).await;
    write("[[workers]]\nurl = \"nonsense\"");
    wait_until("it is told", || !app_state.stale_files().reasons().is_empty()).await;
    assert_eq!(ready(), [b, a], "what was read before still is");
    let degraded = get(at, "/readyz").await.json()["degraded"][0].clone();
    assert_eq!((degraded["component"].as_str(), degraded["reason"].as_str()), (Some("files"), Some("workers")));
    assert!(degraded["detail"].as_str().unwrap().contains("accepted is [[workers]]"), "{degraded}");
    let shown = String::from_utf8(get(at, "/metrics").await.body.to_vec()).unwrap();
    let lines = [
        "ownerserve_discovery_up{source=\"file\"} 0",
        "ownerserve_discovery_workers{source=\"file\"} 2",
        "ownerserve_worker_changes_total{change=\"joined\"} 2",
    ];
    lines.iter().for_each(|line| assert!(shown.contains(line), "{line} in {shown}"));
    write(&listing(&[&two]));
    wait_until("the first left", || ready() == [b]).await;
    wait_until("it is gone", || app_state.fleet().leaving().is_empty()).await;
    assert_eq!(app_state.stale_files().reasons(), []);
    let listed = get(at, "/ownerserve/v1/workers").await.json()["workers"].clone();
    assert_eq!((listed.as_array().map(Vec::len), listed[0]["source"].as_str()), (Some(1), Some("file")));
    let response =
        post(router.proxy_address(), "/v1/completions", "{\"model\":\"tiny\",\"prompt\":\"on and on\"}").await;
    assert_eq!(response.status, 200);
    assert!(one.requests().is_empty() && two.requests().len() == 1, "nothing new goes to who left");
}
