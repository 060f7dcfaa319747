//! Alarms: everything in the cluster that needs an operator's attention.

mod members;

use std::collections::BTreeSet;

use clap::Subcommand;
use serde_json::{Value, json};

use super::client::OperatorClient;
use super::endpoints::{CLUSTER_MISMATCH, clusters, query_all};
use super::error::CtlError;
use super::lists::fetch_all;
use super::output::OutputFormat;
use super::table::{cell_text, table};
use members::{member_alarms, observe_members};

/// Alarms: everything that needs an operator's attention.
#[derive(Clone, Copy, Debug, Subcommand)]
pub(crate) enum AlarmsCommand {
    /// Lists the alarms of all endpoints, each with what to do; exit code 5 if there are any.
    List,
}

impl AlarmsCommand {
    pub(crate) async fn run(self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        let Self::List = self;
        list(client, output).await
    }
}

/// Prints all alarms.
async fn list(client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
    let found = collect_alarms(client, output).await?;
    output.print(&found, || match found.as_slice() {
        [] => "no alarms\n".into(),
        found => table("TARGET /target, ALARM /alarm, MESSAGE /message", found),
    });
    if found.is_empty() { Ok(()) } else { Err(CtlError::Alarms(found.len())) }
}

/// Collects alarms: endpoints of different clusters or with problems of their own, members that are silent or lag,
/// workers that are gone, draining or without exact KV state. All endpoints are queried at once, so that a hanging
/// one delays none.
async fn collect_alarms(client: &OperatorClient, output: OutputFormat) -> Result<Vec<Value>, CtlError> {
    let expired = [("state", "expired".to_owned())];
    let (nodes, ready, members, workers, leases) = futures::join!(
        query_all(client, "cluster"),
        query_all(client, "/readyz"),
        observe_members(client),
        fetch_all(client, ("workers", &[])),
        fetch_all(client, ("leases", &expired)),
    );
    let workers = match workers {
        // No endpoint answers at all.
        Err(error) if nodes.iter().all(|node| node["error"].is_string()) => return Err(error),
        workers => workers,
    };
    let mut found = cluster_mismatch_alarms(&nodes);
    let leader = nodes.iter().filter(|node| node["answer"]["stale"] == false);
    let leader = leader.filter_map(|node| node["answer"]["leader"].as_u64()).next();
    for (node, ready) in nodes.iter().zip(&ready) {
        found.extend(node_alarms(node, ready, leader));
    }
    found.extend(member_alarms(&members, output));
    let workers = list_or_alarm("workers", workers, &mut found);
    found.extend(workers.iter().filter_map(worker_alarm));
    for lease in list_or_alarm("leases", leases, &mut found) {
        let endpoint = cell_text(lease.get("endpoint"));
        let what = format!(
            "no router reached the worker before its lease expired, so that others may take what it owned: start it, or \
             run `ctl worker retire {endpoint}` if it is gone for good"
        );
        found.push(alarm(&endpoint, "lease_expired", &what));
    }
    Ok(found)
}

const UNREACHABLE: &str =
    "the worker does not answer health probes: check that the engine runs and that this router reaches its URL";

/// Returns the worst alarm of a worker.
fn worker_alarm(worker: &Value) -> Option<Value> {
    let of = cell_text(worker.get("endpoint"));
    let doubt = worker["kv_index_reason"].as_str().unwrap_or("the reason is not known yet; list the alarms again");
    let sources = &worker["kv_event_sources"];
    let is_heard = sources["connected"].as_u64() >= sources["configured"].as_u64();
    Some(match (worker["health"].as_str(), worker["kv_index_state"].as_str()) {
        (Some("unreachable"), _) => alarm(&of, "worker_unreachable", UNREACHABLE),
        _ if worker["ejection"].is_object() => {
            let why = format!(
                "requests at the worker fail ({}), so that it gets only probes: check its log and its accelerator",
                cell_text(worker["ejection"].get("reason"))
            );
            alarm(&of, "worker_ejected", &why)
        }
        (Some("draining"), _) => {
            let what = format!("an operator drains the worker; `ctl worker undrain {of}` takes it back into service");
            alarm(&of, "worker_draining", &what)
        }
        (_, Some("degraded")) if !is_heard => alarm(&of, "kv_events_disconnected", doubt),
        (_, Some("degraded")) => alarm(&of, "kv_index_degraded", doubt),
        (_, Some("approximate")) => {
            alarm(&of, "kv_index_approximate", &format!("its blocks are estimated from routed requests: {doubt}"))
        }
        _ => return cost_drift_alarm(&of, &worker["ttft_prediction"]),
    })
}

/// Returns the alarm of a worker whose time to first token differs from its prediction.
fn cost_drift_alarm(of: &str, prediction: &Value) -> Option<Value> {
    let drift = prediction["drift"].as_str()?;
    let what = format!(
        "its times to first token are {:.1} times the predicted ones ({drift}). Check whether others use the worker, its \
         GPU clocks were lowered, or its profile is another GPU's; predictions adapt meanwhile",
        prediction["ratio"].as_f64().unwrap_or_default()
    );
    Some(alarm(of, "worker_cost_drift", &what))
}

/// Returns a list's items. A failed list becomes an alarm itself and does not hide other alarms.
fn list_or_alarm(name: &str, answer: Result<Vec<Value>, CtlError>, found: &mut Vec<Value>) -> Vec<Value> {
    answer.unwrap_or_else(|error| {
        found.push(alarm(name, "list_failed", &error.to_string()));
        Vec::new()
    })
}

/// Returns the alarms of one endpoint's node from its own report: its view of the cluster and its readiness.
fn node_alarms(node: &Value, ready: &Value, leader: Option<u64>) -> Vec<Value> {
    let of = cell_text(node.get("endpoint"));
    if let Some(error) = node["error"].as_str() {
        return vec![alarm(&of, "endpoint_unreachable", error)];
    }
    if let Some(degraded) = ready["answer"]["degraded"].as_array() {
        // A node with a failed log hears no leader, even if the others have one.
        let ends = |line: &Value| {
            line["component"] == "ledger"
                && ["log_write_failed", "log_entries_lost", "data_dir_missing"]
                    .contains(&&*cell_text(line.get("reason")))
        };
        let has_failed = degraded.iter().any(ends);
        let shown = degraded.iter().filter(|line| !(has_failed && line["reason"] == "no_quorum"));
        return shown.map(|line| degradation_alarm(&of, line, leader)).collect();
    }
    let mut found = Vec::new();
    match ready["error"].as_str() {
        Some(error) if ready["word"] == "not_ready" => found.push(alarm(&of, "not_ready", error)),
        Some(error) => found.push(alarm(&of, "endpoint_unreachable", error)),
        None => {}
    }
    let ledger = |reason: &str, detail: &str| json!({"component": "ledger", "reason": reason, "detail": detail});
    if node["answer"]["removed"] == true {
        let detail = "the node was removed from the cluster and only serves its last view; stop it, or start it with an \
                      empty data directory and --join";
        found.push(degradation_alarm(&of, &ledger("removed_from_cluster", detail), leader));
    } else if node["answer"]["stale"] == true {
        found.push(degradation_alarm(
            &of,
            &ledger("no_quorum", "requests are served with the last view of the ledger"),
            leader,
        ));
    }
    found
}

/// Returns the alarm for one degradation that a node reports, with advice.
fn degradation_alarm(of: &str, line: &Value, leader: Option<u64>) -> Value {
    let (component, reason, detail) =
        (cell_text(line.get("component")), cell_text(line.get("reason")), cell_text(line.get("detail")));
    let name = match (&*component, &*reason) {
        ("ledger", "no_quorum" | "removed_from_cluster") => reason.clone(),
        _ => format!("{component}_{reason}"),
    };
    let advice = match (&*component, &*reason) {
        ("ledger", "no_quorum") => match leader {
            Some(leader) => &*format!(
                "node {leader} leads other nodes, but this one does not reach it: check the network between them"
            ),
            None => "no leader is known: check that most voters run and reach each other",
        },
        ("ledger", "log_write_failed") => {
            "check that its disk works and has space; the log of the process has the reason"
        }
        ("shared_cache", "other_secret") => {
            "give all routers the same secret; the alarm ends a minute after the change"
        }
        ("shared_cache", _) => {
            "until it answers, each router has only its own limits and cache: check that Redis runs and that \
             `shared_cache.redis_url` is its URL"
        }
        ("workers", "ejected") => {
            "check the log and the accelerator of each: they answer health probes, and their requests fail"
        }
        ("files", _) => "correct the file; it is read again every few seconds",
        ("audit_log", _) => "free space in its data directory; writes of operators are refused until then",
        ("prefix_cache", "disabled_by_verification") => {
            "responses stay correct and cost more; keep the log of the process and report the error"
        }
        _ => "",
    };
    let what = if advice.is_empty() { detail } else { format!("{detail}; {advice}") };
    alarm(of, &name, &what)
}

/// Returns alarms for endpoints that belong to another cluster than the first one.
fn cluster_mismatch_alarms(answers: &[Value]) -> Vec<Value> {
    let found = clusters(answers);
    if found.len() < 2 {
        return Vec::new();
    }
    let what = |cluster: &String| {
        format!("it belongs to cluster {cluster}, and other endpoints to another one: they share nothing")
    };
    let of = |(cluster, endpoints): (&String, &BTreeSet<String>)| {
        endpoints.iter().map(|endpoint| alarm(endpoint, CLUSTER_MISMATCH, &what(cluster))).collect::<Vec<_>>()
    };
    found.iter().flat_map(of).collect()
}

fn alarm(target: &str, alarm: &str, message: &str) -> Value {
    json!({"target": target, "alarm": alarm, "message": message})
}

#[cfg(test)]
mod tests {
    use vocabulary::TimeSpan;

    use super::super::client::{ClientTimeouts, OperatorClientOptions};
    use super::*;
    use crate::testing::{StubWorker, TestRouter, post, start_router_at, wait_until};

    fn alarm_names(found: &[Value]) -> Vec<String> {
        found.iter().map(|alarm| cell_text(alarm.get("alarm"))).collect()
    }

    #[test]
    fn failed_log_is_reported_instead_of_a_missing_leader() {
        let node = json!({"endpoint": "http://a", "answer": {"stale": true, "leader": null}});
        let line =
            |component: &str, reason: &str| json!({"component": component, "reason": reason, "detail": "so it is"});
        let ready = |all: &[Value]| json!({"endpoint": "http://a", "answer": {"degraded": all}});
        let found =
            node_alarms(&node, &ready(&[line("ledger", "no_quorum"), line("ledger", "log_write_failed")]), Some(2));
        assert_eq!(alarm_names(&found), ["ledger_log_write_failed"]);
        assert!(cell_text(found[0].get("message")).contains("disk"), "{found:?}");
        let found = node_alarms(&node, &ready(&[line("ledger", "no_quorum"), line("shared_cache", "slow")]), Some(2));
        assert_eq!(alarm_names(&found), ["no_quorum", "shared_cache_slow"]);
        assert!(cell_text(found[0].get("message")).contains("node 2 leads other nodes"), "{found:?}");
        let found = node_alarms(&node, &ready(&[line("ledger", "no_quorum")]), None);
        assert!(cell_text(found[0].get("message")).contains("no leader is known"), "{found:?}");
        let silent =
            json!({"endpoint": "http://a", "error": "Not ready (not_ready): No worker answers.", "word": "not_ready"});
        assert_eq!(alarm_names(&node_alarms(&node, &silent, None)), ["not_ready", "no_quorum"]);
    }

    #[test]
    fn inexact_worker_alarm_includes_a_remedy() {
        let worker = |health: &str, knowledge: &str, connected: u64| {
            json!({"endpoint": "http://a", "health": health, "kv_index_state": knowledge, "kv_index_reason": "see to it",
                   "kv_event_sources": {"configured": 2, "connected": connected}})
        };
        let told = |worker| {
            worker_alarm(&worker).map(|found| (cell_text(found.get("alarm")), cell_text(found.get("message"))))
        };
        let is = |name: &str, what: &str| Some((name.to_owned(), what.to_owned()));
        assert_eq!(told(worker("ready", "exact", 2)), None);
        assert_eq!(told(worker("ready", "degraded", 2)), is("kv_index_degraded", "see to it"));
        assert_eq!(told(worker("ready", "degraded", 1)), is("kv_events_disconnected", "see to it"));
        let guessed = "its blocks are estimated from routed requests: see to it";
        assert_eq!(told(worker("ready", "approximate", 0)), is("kv_index_approximate", guessed));
        let gone = UNREACHABLE;
        assert_eq!(told(worker("unreachable", "degraded", 1)), is("worker_unreachable", gone));
    }

    #[test]
    fn unavailable_list_does_not_hide_other_alarms() {
        let mut found = vec![alarm("a", "kv_index_degraded", "so it is")];
        assert!(list_or_alarm("leases", Err(CtlError::EndpointsUnanswered("http://a".into())), &mut found).is_empty());
        assert_eq!(alarm_names(&found), ["kv_index_degraded", "list_failed"]);
        assert!(cell_text(found[1].get("message")).contains("http://a"));
    }

    fn client(router: &TestRouter) -> OperatorClient {
        let endpoints = vec![format!("http://{}", router.operator_address())];
        let waits = ClientTimeouts::with_timeout(TimeSpan::seconds(30));
        OperatorClient::new(OperatorClientOptions { endpoints, token: None, timeouts: waits, cacert: None }).unwrap()
    }

    #[tokio::test]
    async fn faulty_template_raises_an_alarm_about_fallback_prompts() {
        let worker = StubWorker::start("one", "tiny").await;
        let folder = proxy::catalog::tests::folder_with_template("You are kind.");
        let router =
            start_router_at(&[worker.url()], &[&format!("models.tiny.tokenizer_dir={:?}", folder.path())]).await;
        let found = collect_alarms(&client(&router), OutputFormat::Json).await.unwrap();
        assert_eq!(alarm_names(&found)[0], "prefix_cache_chat_template_invalid", "{found:?}");
        let what = cell_text(found[0].get("message"));
        assert!(
            what.contains("chat_template.jinja, renders nothing of what is said")
                && what.contains("start the router again")
        );
        let body = r#"{"model":"tiny","messages":[{"role":"user","content":"otter"}]}"#;
        assert_eq!(post(router.proxy_address(), "/v1/chat/completions", body).await.status, 200);
        assert_eq!(
            router.gateway.decisions.receipts.newest(1, |_| true)[0].lookup.token_ids_unavailable,
            Some("template_error")
        );
    }

    #[tokio::test]
    async fn reverted_action_raises_an_alarm_with_the_restore_command() {
        let worker = StubWorker::start("one", "tiny").await;
        let router = start_router_at(&[worker.url()], &[]).await;
        let alarms = async || {
            let found = collect_alarms(&client(&router), OutputFormat::Json).await.unwrap();
            let guarded = found.iter().filter(|alarm| cell_text(alarm.get("alarm")).starts_with("guardrail"));
            guarded.cloned().collect::<Vec<_>>()
        };
        assert!(alarms().await.is_empty());
        crate::testing::slow_down_action(&router.gateway, planner::Action::ArtifactFetch);
        let found = alarms().await;
        let what = cell_text(found[0].get("message"));
        assert_eq!(alarm_names(&found), ["guardrail_action_disabled"]);
        assert!(
            what.contains("artifact_fetch made sessions slower") && what.contains("`disabled_actions` of PUT"),
            "{what}"
        );
    }

    #[tokio::test]
    async fn readyz_degradations_become_alarms_with_remedies() {
        let worker = StubWorker::start("one", "tiny").await;
        let data = tempfile::tempdir().unwrap();
        let folder = format!("ledger.data_dir={:?}", data.path().join("ledger"));
        let redis = ["shared_cache.redis_url=\"redis://127.0.0.1:9\"", "shared_cache.allow_plaintext=true"];
        let router = start_router_at(&[worker.url()], &[&folder, redis[0], redis[1]]).await;
        std::fs::remove_dir_all(data.path().join("ledger")).unwrap();
        let redis = || router.gateway.caches.shared_cache.degraded_health().is_some();
        wait_until("it is noticed", || {
            router.gateway.ledger.ledger_problems().iter().any(|trouble| trouble.as_ref() == "data_dir_missing")
                && redis()
        })
        .await;
        let found = collect_alarms(&client(&router), OutputFormat::Json).await.unwrap();
        let whats: Vec<_> = found.iter().map(|alarm| cell_text(alarm.get("message"))).collect();
        assert_eq!(alarm_names(&found)[0], "ledger_data_dir_missing", "{found:?}");
        assert!(
            alarm_names(&found)[1].starts_with("shared_cache_") && whats[1].contains("shared_cache.redis_url"),
            "{found:?}"
        );
    }
}
