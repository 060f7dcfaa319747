//! Alarms about members that are silent or lag.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::super::client::OperatorClient;
use super::super::cluster::is_leader_view;
use super::super::endpoints::query_all;
use super::super::output::OutputFormat;
use super::super::table::{cell_text, lines};
use super::alarm;

/// Time between two observations of the members' progress.
const OBSERVATION_INTERVAL: Duration = Duration::from_millis(1_500);
/// Maximum lag in entries of a member that makes progress; a learner that lags more cannot become a voter.
const MAX_LAG_ENTRIES: u64 = 5_000;

/// Every endpoint's view of the members, and a second view of the leader if a member that answers is behind: only the
/// second one shows whether it makes progress.
#[derive(Debug)]
pub(super) struct MemberObservations {
    first: Vec<Value>,
    later: Option<Value>,
}

pub(super) async fn observe_members(client: &OperatorClient) -> MemberObservations {
    let first = query_all(client, "cluster/members").await;
    let is_behind = |leader: &&Value| {
        let mut members = lines(&leader["answer"]["members"]).iter();
        members.any(|member| member["reachable"] == true && member["matched_index"].as_u64() < leader_log_index(leader))
    };
    let Some(leader) = leader_answer(&first).filter(is_behind).map(|leader| cell_text(leader.get("endpoint"))) else {
        return MemberObservations { first, later: None };
    };
    tokio::time::sleep(OBSERVATION_INTERVAL).await;
    let later = query_all(&client.only(&leader), "cluster/members").await.pop();
    MemberObservations { first, later: later.filter(|answer| answer["error"].is_null()) }
}

/// Returns the leader's response: only the leader knows who answers and how far each member is.
fn leader_answer(answers: &[Value]) -> Option<&Value> {
    answers.iter().find(|answer| answer["error"].is_null() && is_leader_view(&answer["answer"]))
}

fn leader_log_index(leader: &Value) -> Option<u64> {
    lines(&leader["answer"]["members"]).iter().find(|member| member["is_leader"] == true)?["matched_index"].as_u64()
}

/// Returns alarms for members that do not answer the leader, that lag, or that an endpoint cannot talk to. Only the
/// leader knows the first two, so it is searched among the endpoints.
pub(super) fn member_alarms(looks: &MemberObservations, output: OutputFormat) -> Vec<Value> {
    let leader = leader_answer(&looks.first);
    if leader.is_none() {
        output.note("no endpoint is the leader's, which alone knows whether all members answer: add its --endpoint");
    }
    let mut found = BTreeMap::new();
    for member in leader.into_iter().flat_map(|leader| lines(&leader["answer"]["members"])) {
        if member["reachable"] == false {
            let what = "the member does not answer the leader".to_owned();
            let what = member["last_error"].as_str().map_or(what.clone(), |trouble| format!("{what}: {trouble}"));
            found.insert(member_name(member), alarm(&member_name(member), "member_unresponsive", &what));
        }
    }
    if let (Some(first), Some(later)) = (leader, &looks.later) {
        found.extend(lagging_members(first, later));
    }
    for answer in looks.first.iter().filter(|answer| answer["error"].is_null()) {
        for member in lines(&answer["answer"]["members"]) {
            if let Some(trouble) = member["last_error"].as_str() {
                let what = format!("{} cannot connect to the member: {trouble}", cell_text(answer.get("endpoint")));
                found
                    .entry(member_name(member))
                    .or_insert_with(|| alarm(&member_name(member), "member_unreachable", &what));
            }
        }
    }
    found.into_values().collect()
}

/// Returns members that answer the leader but made no progress between two observations although there were new
/// entries, or that lag far behind.
fn lagging_members(first: &Value, second: &Value) -> Vec<(String, Value)> {
    let (Some(led), Some(leads)) = (leader_log_index(first), leader_log_index(second)) else { return Vec::new() };
    let matched = |member: &Value| member["matched_index"].as_u64();
    let before = |node: &Value| lines(&first["answer"]["members"]).iter().find(|member| member["node_id"] == *node);
    let mut found = Vec::new();
    for member in lines(&second["answer"]["members"]).iter().filter(|member| member["reachable"] == true) {
        // A member that is still receiving a snapshot has no matched index.
        let Some(now) = matched(member) else { continue };
        let was = before(&member["node_id"]).and_then(matched);
        let behind = leads.saturating_sub(now);
        let what = if was == Some(now) && now < led {
            format!(
                "the member answers but stayed at entry {now}, {behind} behind the leader at {leads}; if it does not \
                 advance, check its log and its disk"
            )
        } else if behind > MAX_LAG_ENTRIES {
            format!(
                "the member is at entry {now}, {behind} behind the leader at {leads}, and was at {}: it catches up, or its \
                 disk or network is too slow",
                was.unwrap_or_default()
            )
        } else {
            continue;
        };
        found.push((member_name(member), alarm(&member_name(member), "member_lagging", &what)));
    }
    found
}

fn member_name(member: &Value) -> String {
    format!("node {} ({})", cell_text(member.get("node_id")), cell_text(member.get("address")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn leader(matched: &[(u64, u64)], answers: bool) -> Value {
        let member = |(node, matched): &(u64, u64)| json!({"node_id": node, "address": "a:1", "is_leader": *node == 1, "reachable": *node == 1 || answers, "matched_index": matched});
        json!({"endpoint": "http://a", "answer": {"members": matched.iter().map(member).collect::<Vec<_>>()}})
    }

    fn alarms_between(first: &[(u64, u64)], second: &[(u64, u64)], answers: bool) -> Vec<(String, String)> {
        let looks = MemberObservations { first: vec![leader(first, answers)], later: Some(leader(second, answers)) };
        let found = member_alarms(&looks, OutputFormat::Table);
        found.iter().map(|alarm| (cell_text(alarm.get("alarm")), cell_text(alarm.get("message")))).collect()
    }

    #[test]
    fn stalled_member_alarm_includes_log_positions() {
        let found = alarms_between(&[(1, 100), (2, 40), (3, 99)], &[(1, 150), (2, 40), (3, 149)], true);
        assert_eq!((found.len(), &*found[0].0), (1, "member_lagging"), "{found:?}");
        assert!(found[0].1.contains("stayed at entry 40, 110 behind the leader at 150"), "{found:?}");
        assert_eq!(
            alarms_between(&[(1, 100), (2, 40)], &[(1, 100), (2, 40)], true).len(),
            1,
            "the leader has nothing new"
        );
        assert_eq!(
            alarms_between(&[(1, 100), (2, 100)], &[(1, 150), (2, 100)], true),
            [],
            "nothing was to take before"
        );
        assert_eq!(alarms_between(&[(1, 100), (2, 40)], &[(1, 150), (2, 41)], true), [], "it goes on");
        let far = alarms_between(&[(1, 9_000), (2, 40)], &[(1, 9_100), (2, 900)], true);
        assert!(
            far[0].0 == "member_lagging" && far[0].1.contains("8200 behind the leader at 9100, and was at 40"),
            "{far:?}"
        );
        assert_eq!(alarms_between(&[(1, 100), (2, 40)], &[(1, 150), (2, 40)], false)[0].0, "member_unresponsive");
    }
}
