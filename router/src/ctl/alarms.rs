//! `ownerserve ctl alarm`: what is not as it should be.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::client::Client;
use super::cluster::{knows_all, lines};
use super::endpoints::{DIFFERENT_CLUSTERS, ask_all, clusters};
use super::error::CtlError;
use super::lists::pretty;
use super::table::{table, word};
use super::{Output, say};

/// Endpoints of different clusters, nodes without a quorum, members that are silent, workers that are gone, drained or not
/// exactly known.
pub(crate) async fn alarms(client: &Client, output: Output) -> Result<(), CtlError> {
    let mut found = Vec::new();
    let nodes = ask_all(client, "cluster").await;
    found.extend(different_clusters(&nodes));
    for answer in nodes {
        let of = word(answer.get("endpoint"));
        if let Some(error) = answer["error"].as_str() {
            found.push(alarm(&of, "unreachable", error));
        } else if answer["answer"]["removed"] == true {
            let what = "it was removed from the cluster and only serves its last view; stop it, or start it with an empty \
                        data directory and --join";
            found.push(alarm(&of, "removed", what));
        } else if answer["answer"]["stale"] == true {
            found.push(alarm(&of, "no_quorum", "no leader is known; serving goes on with the last view"));
        }
    }
    found.extend(member_alarms(client, output).await);
    let workers = client.get("workers?limit=1000").await?;
    for worker in lines(&workers.json["workers"]) {
        let of = word(worker.get("endpoint"));
        match (worker["health"].as_str(), worker["knowledge"].as_str()) {
            (Some("unreachable"), _) => found.push(alarm(&of, "worker_unreachable", "it does not answer its probes")),
            (Some("draining"), _) => found.push(alarm(&of, "worker_draining", "an operator drains it")),
            (_, Some("degraded")) => found.push(alarm(&of, "degraded", "events were lost and not yet made good")),
            (_, Some("fallback")) => {
                found.push(alarm(&of, "fallback", "its blocks are guessed from what was routed there"))
            }
            _ => {}
        }
    }
    for lease in lines(&client.get("leases?limit=1000&state=expired").await?.json["leases"]) {
        found.push(alarm(&word(lease.get("endpoint")), "lease_expired", "no router reached it within its lease"));
    }
    match output {
        Output::Json => say(&format!("{}\n", pretty(&json!(found)))),
        Output::Table if found.is_empty() => say("nothing\n"),
        Output::Table => say(&table(&[("OF", "/of"), ("ALARM", "/alarm"), ("WHAT", "/what")], &found)),
    }
    if found.is_empty() { Ok(()) } else { Err(CtlError::Alarms(found.len())) }
}

/// Endpoints that belong to another cluster than the first one does.
fn different_clusters(answers: &[Value]) -> Vec<Value> {
    let found = clusters(answers);
    if found.len() < 2 {
        return Vec::new();
    }
    let what = |cluster: &String| {
        format!("it belongs to {cluster}, and other endpoints to another cluster: they share nothing")
    };
    let of = |(cluster, endpoints): (&String, &BTreeSet<String>)| {
        endpoints.iter().map(|endpoint| alarm(endpoint, DIFFERENT_CLUSTERS, &what(cluster))).collect::<Vec<_>>()
    };
    found.iter().flat_map(of).collect()
}

/// Members that the leader does not hear, or that an endpoint cannot talk with. The first only the leader knows, so it is
/// looked for among the endpoints.
async fn member_alarms(client: &Client, output: Output) -> Vec<Value> {
    let answers = ask_all(client, "cluster/members").await;
    let told: Vec<&Value> = answers.iter().filter(|answer| answer["error"].is_null()).collect();
    let leader = told.iter().find(|answer| knows_all(&answer["answer"]));
    if leader.is_none() {
        output.note("no endpoint is the leader's, which knows whether all members answer; give its --endpoint, too");
    }
    let of = |member: &Value| format!("node {} ({})", word(member.get("node")), word(member.get("address")));
    let mut found = BTreeMap::new();
    let members = |answer: &Value| lines(&answer["answer"]["members"]).to_vec();
    for member in leader.into_iter().flat_map(|answer| members(answer)).filter(|member| member["answers"] == false) {
        let what = "it does not answer the leader".to_owned();
        let what = member["trouble"].as_str().map_or(what.clone(), |trouble| format!("{what}: {trouble}"));
        found.insert(of(&member), alarm(&of(&member), "member_silent", &what));
    }
    for answer in told {
        for member in members(answer) {
            if let Some(trouble) = member["trouble"].as_str() {
                let what = format!("{} cannot talk with it: {trouble}", word(answer.get("endpoint")));
                found.entry(of(&member)).or_insert_with(|| alarm(&of(&member), "member_unreachable", &what));
            }
        }
    }
    found.into_values().collect()
}

fn alarm(of: &str, alarm: &str, what: &str) -> Value {
    json!({"of": of, "alarm": alarm, "what": what})
}
