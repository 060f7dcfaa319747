//! The cluster: status, digests, alarms, members.

use std::collections::BTreeSet;

use clap::Subcommand;
use http::Method;
use serde_json::{Value, json};

use super::client::{Client, CtlError, Got};
use super::lists::pretty;
use super::table::{Column, table, word};
use super::writes::{FenceFrom, Request};
use super::{Output, note, say};

/// What is done with members.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum MemberCommand {
    /// Lists the nodes.
    List,
    /// Prints how a new node joins. Nothing has to be prepared: it gets its id from the ledger and begins as a learner.
    Add,
    /// Makes learners voters, all in one step: one voter and two learners make a cluster of three.
    Promote {
        /// Their node ids.
        #[arg(required = true)]
        nodes: Vec<u64>,
    },
    /// Makes voters learners, all in one step.
    Demote {
        /// Their node ids.
        #[arg(required = true)]
        nodes: Vec<u64>,
    },
    /// Puts a learner into a voter's place, in one step: how a lost voter is replaced.
    Replace {
        /// The voter's node id.
        old: u64,
        /// The learner's node id.
        new: u64,
    },
    /// Takes a node out for good; its id never comes back.
    Remove {
        /// Its node id.
        node: u64,
    },
}

const MEMBERS: [Column; 8] = [
    ("NODE", "/node"),
    ("ADDRESS", "/address"),
    ("STANDING", "/standing"),
    ("LEADER", "/is_leader"),
    ("ANSWERS", "/answers"),
    ("LEVEL FROM", "/levels/lowest"),
    ("TO", "/levels/highest"),
    ("MATCHED", "/matched"),
];

pub(crate) fn free(method: Method, path: impl Into<String>, body: Value) -> Request {
    Request { method, path: path.into(), body, fence: FenceFrom::Nowhere }
}

pub(crate) async fn member(client: &Client, command: &MemberCommand, output: Output) -> Result<(), CtlError> {
    let request = match command {
        MemberCommand::List => return list(client, output).await,
        MemberCommand::Add => return how_to_join(client, output).await,
        MemberCommand::Promote { nodes } => free(Method::POST, "cluster/members/promote", json!({"nodes": nodes})),
        MemberCommand::Demote { nodes } => free(Method::POST, "cluster/members/demote", json!({"nodes": nodes})),
        MemberCommand::Replace { old, new } => {
            free(Method::POST, "cluster/members/replace", json!({"old": old, "new": new}))
        }
        MemberCommand::Remove { node } => free(Method::DELETE, format!("cluster/members/{node}"), json!({})),
    };
    super::writes::run(client, request, output).await
}

async fn list(client: &Client, output: Output) -> Result<(), CtlError> {
    let got = client.get("cluster/members").await?;
    match output {
        Output::Json => say(&format!("{}\n", pretty(&got.json))),
        Output::Table => {
            say(&table(&MEMBERS, lines(&got.json["members"])));
            if lines(&got.json["members"]).iter().any(|member| member["answers"].is_null()) {
                note("who answers and how far it is, only the leader knows: give its --endpoint");
            }
        }
    }
    Ok(())
}

fn lines(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

async fn how_to_join(client: &Client, output: Output) -> Result<(), CtlError> {
    let got = client.get("cluster/members").await?;
    let members = lines(&got.json["members"]);
    let reachable = |member: &&Value| member["address"].as_str().is_some_and(|address| address.contains(':'));
    let Some(member) = members.iter().find(reachable) else {
        let detail =
            "no node of this cluster can be reached by others: start this one again with --node-listen ADDR".into();
        return Err(CtlError::Problem { title: "Nothing to join".into(), word: "alone".into(), detail });
    };
    let command =
        format!("ownerserve serve --join {} --node-listen ADDR --data-dir EMPTY_FOLDER", word(member.get("address")));
    match output {
        Output::Json => say(&format!("{}\n", pretty(&json!({"join": member["address"], "command": command})))),
        Output::Table => {
            say(&format!("{command}\n"));
            note(
                "ADDR is where the others reach the new node. It joins as a learner, and `ownerserve ctl member list` shows its \
                 id; `ownerserve ctl member promote` makes learners voters: 3 or 5 voters in all",
            );
        }
    }
    Ok(())
}

/// What one endpoint says, or why it says nothing, with the exit code that stands for it.
async fn ask_all(client: &Client, path: &str) -> Vec<Value> {
    let ask = |endpoint: &String| {
        let client = client.at(endpoint);
        async move { said(&client.endpoints[0], client.get(path).await) }
    };
    futures::future::join_all(client.endpoints.iter().map(ask)).await
}

/// An endpoint's answer, as a line.
pub(crate) fn said(endpoint: &str, got: Result<Got, CtlError>) -> Value {
    match got {
        Ok(got) => json!({"endpoint": endpoint, "answer": got.json}),
        Err(error) => json!({"endpoint": endpoint, "error": error.to_string(), "code": error.code()}),
    }
}

/// Prints what was answered; fails when an endpoint did not.
pub(crate) fn tell(answers: &[Value], columns: &[Column], output: Output) -> Result<(), CtlError> {
    match output {
        Output::Json => say(&format!("{}\n", pretty(&json!(answers)))),
        Output::Table => say(&table(columns, answers)),
    }
    // One that says no has answered: that is a refusal, whoever else is silent.
    let failed = |code: Option<u64>| {
        let mut failed = answers.iter().filter(|answer| answer["error"].is_string());
        let found = failed.find(|answer| code.is_none_or(|code| answer["code"].as_u64() == Some(code)))?;
        found["error"].as_str().map(str::to_owned)
    };
    match (failed(Some(1)), failed(None)) {
        (Some(error), _) => Err(CtlError::Refused(error)),
        (None, Some(error)) => Err(CtlError::Silent(error)),
        (None, None) => Ok(()),
    }
}

const STATUS: [Column; 10] = [
    ("ENDPOINT", "/endpoint"),
    ("NODE", "/answer/node"),
    ("LEADER", "/answer/leader"),
    ("TERM", "/answer/term"),
    ("REVISION", "/answer/revision"),
    ("STALE", "/answer/stale"),
    ("LEVEL", "/answer/level"),
    ("SESSIONS", "/answer/holds/sessions"),
    ("ARTIFACTS", "/answer/holds/artifacts"),
    ("LOG BYTES", "/answer/log_bytes"),
];

/// Every endpoint's view of the cluster.
pub(crate) async fn status(client: &Client, output: Output) -> Result<(), CtlError> {
    tell(&ask_all(client, "cluster").await, &STATUS, output)
}

const HASHES: [Column; 4] =
    [("ENDPOINT", "/endpoint"), ("REVISION", "/answer/revision"), ("TERM", "/answer/term"), ("HASH", "/answer/hash")];

/// Every endpoint's digest; those at one revision have to be equal.
pub(crate) async fn hashkv(client: &Client, output: Output) -> Result<(), CtlError> {
    let answers = ask_all(client, "cluster/hash").await;
    tell(&answers, &HASHES, output)?;
    let at = |answer: &Value| (answer["answer"]["revision"].as_u64(), word(answer.pointer("/answer/hash")));
    let told: BTreeSet<_> = answers.iter().map(at).collect();
    let revisions: BTreeSet<_> = told.iter().map(|(revision, _)| revision).collect();
    if revisions.len() < told.len() {
        let detail = "nodes differ at one revision: stop the one that differs, keep its folder, and let it join anew";
        return Err(CtlError::Problem {
            title: "States differ".into(),
            word: "diverged".into(),
            detail: detail.into(),
        });
    }
    if answers.len() > 1 && revisions.len() > 1 {
        note("the nodes were asked at different revisions; ask again for a comparison");
    }
    Ok(())
}

/// What is not as it should be: nodes without a quorum, members that are silent, workers that are gone, drained or not exactly known.
pub(crate) async fn alarms(client: &Client, output: Output) -> Result<(), CtlError> {
    let mut found = Vec::new();
    for answer in ask_all(client, "cluster").await {
        let of = word(answer.get("endpoint"));
        if let Some(error) = answer["error"].as_str() {
            found.push(alarm(&of, "unreachable", error));
        } else if answer["answer"]["stale"] == true {
            found.push(alarm(&of, "no_quorum", "no leader is known; serving goes on with the last view"));
        }
    }
    found.extend(silent_members(client).await);
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

/// Members that the leader does not hear; only it knows, so it is looked for among the endpoints.
async fn silent_members(client: &Client) -> Vec<Value> {
    let answers = ask_all(client, "cluster/members").await;
    let knows = |answer: &&Value| lines(&answer["answer"]["members"]).iter().all(|member| !member["answers"].is_null());
    let Some(leader) = answers.iter().filter(|answer| answer["error"].is_null()).find(knows) else {
        note("no endpoint is the leader's, which knows whether all members answer; give its --endpoint, too");
        return Vec::new();
    };
    let silent = lines(&leader["answer"]["members"]).iter().filter(|member| member["answers"] == false);
    let of = |member: &Value| format!("node {} ({})", word(member.get("node")), word(member.get("address")));
    silent.map(|member| alarm(&of(member), "member_silent", "it does not answer the leader")).collect()
}

fn alarm(of: &str, alarm: &str, what: &str) -> Value {
    json!({"of": of, "alarm": alarm, "what": what})
}
