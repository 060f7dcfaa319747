//! Cluster commands: status, state hashes, members.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use clap::Subcommand;
use serde_json::{Value, json};

use super::client::OperatorClient;
use super::endpoints::{check_one_cluster, print_responses, query_all, worst_failure};
use super::error::CtlError;
use super::output::{ColorSupport, OutputFormat, note, print_text};
use super::table::{TableColumns, cell_text, lines, table};
use super::watch::{WatchArgs, watch};
use super::writes::{self, delete, post, put};

/// Members: the nodes of the cluster.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum MemberCommand {
    /// Lists the members.
    List,
    /// Prints the command with which a new node joins. It gets its id from the ledger and joins as a learner.
    JoinCommand,
    /// Promotes learners to voters, all in one membership change: one voter and two learners become three voters.
    Promote {
        /// Node ids of the learners.
        #[arg(required = true)]
        nodes: Vec<u64>,
    },
    /// Demotes voters to learners, all in one membership change.
    Demote {
        /// Node ids of the voters.
        #[arg(required = true)]
        nodes: Vec<u64>,
    },
    /// Replaces a voter by a learner in one membership change, as after the loss of a voter.
    Replace {
        /// Node id of the voter.
        old: u64,
        /// Node id of the learner.
        new: u64,
    },
    /// Removes a node for good; its id is never used again.
    Remove {
        /// Its node id.
        node: u64,
    },
    /// Transfers the leadership to another voter.
    TransferLeader {
        /// Node id of the new leader.
        node: u64,
    },
}

/// The cluster as a whole.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Shows every endpoint's view of the cluster.
    Status,
    /// Compares the state hashes of all endpoints; at one revision they are equal.
    Verify,
    /// Prints changes as they happen.
    Watch(WatchArgs),
    /// Raises the feature level of the cluster; it cannot be lowered again.
    RaiseFeatureLevel {
        /// The level.
        #[arg(value_parser = clap::value_parser!(u32).range(1..))]
        level: u32,
    },
}

impl ClusterCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        match self {
            Self::Status => status(client, output).await,
            Self::Verify => verify(client, output).await,
            Self::Watch(args) => watch(client, args, output).await,
            Self::RaiseFeatureLevel { level } => {
                writes::run(client, put("cluster/feature-level", json!({"feature_level": level})), output).await
            }
        }
    }
}

const MEMBER_COLUMNS: TableColumns = "NODE /node_id, ADDRESS /address, ROLE /role, LEADER /is_leader, \
        REACHABLE /reachable, FEATURE LEVEL MIN /feature_levels/min, MAX /feature_levels/max, \
        MATCHED INDEX /matched_index, CLUSTER /cluster_id, LAST ERROR /last_error";

impl MemberCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        let request = match self {
            Self::List => return list(client, output).await,
            Self::JoinCommand => return join_command(client, output).await,
            Self::Promote { nodes } => post("cluster/members/promote", json!({"nodes": nodes})),
            Self::Demote { nodes } => post("cluster/members/demote", json!({"nodes": nodes})),
            Self::Replace { old, new } => post("cluster/members/replace", json!({"old": old, "new": new})),
            Self::Remove { node } => delete(format!("cluster/members/{node}")),
            Self::TransferLeader { node } => post("cluster/leader", json!({"node": node})),
        };
        writes::run(client, request, output).await
    }
}

/// Prints the members of each cluster, from its leader's endpoint or else from the first that answers.
async fn list(client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
    let answers = query_all(client, "cluster/members").await;
    let (told, silent): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer["error"].is_null());
    if let (true, Some(error)) = (told.is_empty(), worst_failure(&answers)) {
        return Err(error);
    }
    for answer in silent {
        output.note(&format!("no answer: {}", cell_text(answer.get("error"))));
    }
    let mut best = BTreeMap::<String, &Value>::new();
    for answer in told {
        let known = best.entry(cell_text(answer.pointer("/answer/cluster_id"))).or_insert(answer);
        if is_leader_view(&answer["answer"]) && !is_leader_view(&known["answer"]) {
            *known = answer;
        }
    }
    let all: Vec<_> = best.values().collect();
    let whole = match all[..] {
        [one] => one["answer"].clone(),
        _ => json!(all),
    };
    output.print(&whole, || {
        let mut members = Vec::new();
        for (cluster, answer) in &best {
            for member in lines(&answer["answer"]["members"]) {
                let mut member = member.clone();
                member["cluster_id"] = json!(cluster);
                members.push(member);
            }
        }
        table(MEMBER_COLUMNS, &members)
    });
    if output == OutputFormat::Table && !all.iter().all(|answer| is_leader_view(&answer["answer"])) {
        note("REACHABLE and MATCHED INDEX are known to the leader only: add its --endpoint");
    }
    check_one_cluster(&answers)
}

/// Returns whether this is the leader's response: only the leader knows whether the others answer.
pub(crate) fn is_leader_view(answer: &Value) -> bool {
    lines(&answer["members"]).iter().all(|member| !member["reachable"].is_null())
}

async fn join_command(client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
    let response = client.get("cluster/members").await?;
    let members = lines(&response.json["members"]);
    let reachable = |member: &&Value| member["address"].as_str().is_some_and(|address| address.contains(':'));
    let Some(member) = members.iter().find(reachable) else {
        let detail =
            "no node of this cluster can be reached by others: restart this one with --cluster-listen ADDR".into();
        return Err(CtlError::refusal("Nothing to join", "alone", detail));
    };
    let command = format!(
        "ownerserve serve --join {} --cluster-listen ADDR --data-dir EMPTY_DIR",
        cell_text(member.get("address"))
    );
    output.print(&json!({"join": member["address"], "command": command}), || format!("{command}\n"));
    if output == OutputFormat::Table {
        note(
            "ADDR is the address at which the other nodes reach the new one. It joins as a learner; `ownerserve ctl member \
             list` shows its id, and `ownerserve ctl member promote` makes learners voters: 3 or 5 voters in all",
        );
    }
    Ok(())
}

const STATUS_COLUMNS: TableColumns = "ENDPOINT /endpoint, NODE /answer/node_id, LEADER /answer/leader, TERM /answer/term, \
        REVISION /answer/revision, STALE /answer/stale, FEATURE LEVEL /answer/feature_level, \
        SESSIONS /answer/counts/sessions, ARTIFACTS /answer/counts/artifacts, LOG BYTES /answer/log_bytes, \
        ADMISSION QUEUE /answer/admission_queue_depth, CLUSTER /answer/cluster_id";

/// Prints every endpoint's view of the cluster.
async fn status(client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
    let answers = query_all(client, "cluster").await;
    let printed = print_responses(&answers, STATUS_COLUMNS, output);
    if output == OutputFormat::Table {
        let colour = ColorSupport::of_stdout();
        exposure_lines(&answers).iter().for_each(|line| print_text(&colour.red(line)));
    }
    check_one_cluster(&answers).and(printed)
}

/// Returns a line for each listener that others on the network can use or eavesdrop on.
fn exposure_lines(answers: &[Value]) -> Vec<String> {
    let of_endpoint = |answer: &Value| {
        let endpoint = cell_text(answer.get("endpoint"));
        let found = lines(&answer["answer"]["exposed_listeners"]).to_vec();
        found.into_iter().map(move |exposure| format!("{endpoint}: {}\n", cell_text(exposure.get("detail"))))
    };
    answers.iter().flat_map(of_endpoint).collect()
}

const HASH_COLUMNS: TableColumns =
    "ENDPOINT /endpoint, REVISION /answer/revision, TERM /answer/term, STATE HASH /answer/state_hash";

/// Maximum number of rounds until every endpoint has a digest at a revision that another one has, too; and the pause
/// between them.
const MAX_ROUNDS: u32 = 10;
const ROUND_INTERVAL: Duration = Duration::from_millis(300);

/// Prints every endpoint's state digest; digests at the same revision must be equal.
async fn verify(client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
    let mut seen = StateDigests::default();
    let mut answers = query_all(client, "cluster/state-hash").await;
    for _ in 1..MAX_ROUNDS {
        if seen.record(&answers).is_err() || worst_failure(&answers).is_some() || check_one_cluster(&answers).is_err() {
            break;
        }
        if seen.are_compared() {
            break;
        }
        tokio::time::sleep(ROUND_INTERVAL).await;
        answers = query_all(client, "cluster/state-hash").await;
    }
    let printed = print_responses(&answers, HASH_COLUMNS, output);
    check_one_cluster(&answers).and(printed)?;
    seen.record(&answers)?;
    if !seen.are_compared() {
        return Err(CtlError::DigestsNotCompared);
    }
    let last: BTreeSet<_> = answers.iter().map(|answer| answer["answer"]["revision"].as_u64()).collect();
    if last.len() > 1 {
        output.note("the ledger changed during the comparison; the state hashes are equal at every revision that two endpoints had");
    }
    Ok(())
}

/// Digests collected over several rounds: the digest of a revision never changes.
#[derive(Debug, Default)]
struct StateDigests {
    by_revision: BTreeMap<u64, String>,
    by_endpoint: BTreeMap<String, BTreeSet<u64>>,
}

impl StateDigests {
    /// Records one round. Fails if two nodes differ at the same revision.
    fn record(&mut self, answers: &[Value]) -> Result<(), CtlError> {
        for answer in answers {
            let Some(revision) = answer["answer"]["revision"].as_u64() else { continue };
            let hash = cell_text(answer.pointer("/answer/state_hash"));
            if *self.by_revision.entry(revision).or_insert_with(|| hash.clone()) != hash {
                let detail = format!(
                    "nodes differ at revision {revision}: stop the one that differs, keep its data directory for analysis, and \
                     let it join again with an empty one"
                );
                return Err(CtlError::refusal("States differ", "diverged", detail));
            }
            self.by_endpoint.entry(cell_text(answer.get("endpoint"))).or_default().insert(revision);
        }
        Ok(())
    }

    /// Returns whether all endpoints were compared with each other, directly or through others.
    fn are_compared(&self) -> bool {
        let mut alone: Vec<_> = self.by_endpoint.values().collect();
        let mut met = alone.pop().cloned().unwrap_or_default();
        while let Some(at) = alone.iter().position(|revisions| !met.is_disjoint(revisions)) {
            met.extend(alone.swap_remove(at));
        }
        alone.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(endpoint: &str, revision: u64, hash: &str) -> Value {
        json!({"endpoint": endpoint, "answer": {"revision": revision, "state_hash": hash}})
    }

    #[test]
    fn digests_are_compared_at_equal_revisions_across_rounds() {
        let mut seen = StateDigests::default();
        seen.record(&[at("a", 7, "x"), at("b", 8, "y"), at("c", 8, "y")]).unwrap();
        assert!(!seen.are_compared(), "a is at a revision of its own");
        seen.record(&[at("a", 8, "y"), at("b", 9, "z"), at("c", 10, "w")]).unwrap();
        assert!(seen.are_compared());
        let error = seen.record(&[at("c", 9, "other")]).unwrap_err();
        assert_eq!((error.error_code(), error.exit_code()), ("diverged", 1));
        assert!(error.to_string().contains("revision 9"), "{error}");
    }

    #[test]
    fn status_shows_an_exposed_listener_in_red() {
        let exposed_at = |endpoint: &str, detail: &str| json!({"endpoint": endpoint, "answer": {"exposed_listeners": [{"listener": "clients", "reason": "unauthenticated", "detail": detail}]}});
        let silent = json!({"endpoint": "http://c:1", "error": "it does not answer"});
        let answers = [exposed_at("http://a:1", "ANYBODY\u{1b}[0m"), at("http://b:1", 7, "x"), silent];
        assert_eq!(exposure_lines(&answers), ["http://a:1: ANYBODY?[0m\n"], "nothing else drives the terminal");
        assert_eq!(ColorSupport::Ansi.red("told\n"), "\u{1b}[31mtold\u{1b}[0m\n");
        assert_eq!(ColorSupport::None.red("told\n"), "told\n");
    }

    #[test]
    fn single_node_needs_no_comparison() {
        let mut seen = StateDigests::default();
        seen.record(&[at("a", 7, "x")]).unwrap();
        assert!(seen.are_compared());
        assert_eq!(
            (CtlError::DigestsNotCompared.exit_code(), CtlError::DigestsNotCompared.error_code()),
            (7, "not_compared")
        );
    }
}
