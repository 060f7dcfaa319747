//! `ownerserve ctl decision explain`: prints one decision for people: what was known, every candidate with its cost, the
//! choice, and the result.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use vocabulary::{RequestId, TimeSpan};

use super::client::OperatorClient;
use super::error::CtlError;
use super::lists::fetch_all;
use super::output::OutputFormat;
use super::table::{aligned, cell_text, duration_text, field_list, row};

/// Prints why one step was served as it was.
pub(crate) async fn explain(client: &OperatorClient, request: RequestId, output: OutputFormat) -> Result<(), CtlError> {
    let receipt = client.get(&format!("decisions/{request}")).await?.json;
    let workers = match output {
        OutputFormat::Json => Vec::new(),
        // Without the list, workers are shown by their ids.
        OutputFormat::Table => fetch_all(client, ("workers", &[])).await.unwrap_or_default(),
    };
    output.print(&receipt, || render(&receipt, &WorkerUrls::of(&workers)));
    Ok(())
}

/// URLs of workers by id.
#[derive(Default)]
struct WorkerUrls(BTreeMap<String, String>);

impl WorkerUrls {
    fn of(workers: &[Value]) -> Self {
        Self(workers.iter().map(|worker| (cell_text(worker.get("id")), cell_text(worker.get("endpoint")))).collect())
    }

    /// Formats a leg or an end of a handoff: its worker, and its rank unless that is 0.
    fn leg(&self, leg: &Value) -> String {
        let rank = leg["rank"].as_u64().filter(|rank| *rank > 0).map(|rank| format!(" rank {rank}"));
        self.worker(&leg["worker"]) + &rank.unwrap_or_default()
    }

    fn worker(&self, id: &Value) -> String {
        let id = cell_text(Some(id));
        self.0.get(&id).cloned().unwrap_or(id)
    }
}

/// Formats the whole explanation.
fn render(receipt: &Value, urls: &WorkerUrls) -> String {
    let decision = &receipt["decision"];
    let parts = [
        Some(field_list(lookup_rows(receipt, urls))),
        decision.is_object().then(|| candidates(decision, urls)),
        Some(field_list(outcome(receipt, urls))),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

fn lookup_rows(receipt: &Value, urls: &WorkerUrls) -> Vec<(&'static str, String)> {
    let lookup = &receipt["lookup"];
    let tokens = format!(
        "{} tokens, {} of them sealed; the most that a worker holds is {}",
        cell_text(lookup.get("prompt_tokens")),
        cell_text(lookup.get("sealed_tokens")),
        cell_text(lookup.get("max_overlap_tokens")),
    );
    let by = match (&lookup["token_ids_unavailable"], &lookup["tier"]) {
        (Value::String(why), _) => format!("by its bytes only: {why}"),
        (_, Value::String(tier)) if tier == "miss" => "by token ids, and nothing of it recognised".to_owned(),
        (_, Value::String(tier)) => format!("by token ids, recognised by {tier}"),
        _ => "by token ids".into(),
    };
    let attempts = receipt["attempts"].as_array().map_or(&[][..], Vec::as_slice);
    let is_guess = lookup["token_ids_unavailable"].is_null()
        && attempts.iter().any(|tried| tried["kv_index_state"] == "approximate");
    let guess = "; what its worker holds is an estimate: REASON in `ctl worker list` says why";
    let by = if is_guess { by + guess } else { by };
    let owner = match &lookup["owner"] {
        Value::Null => "nobody".to_owned(),
        owner => urls.worker(&owner["worker"]),
    };
    let evidence = &lookup["evidence"];
    let mut view = vec![format!("{} view of the ledger", cell_text(evidence.get("ledger_view")))];
    view.extend(evidence["pending_commit"].as_bool().filter(|own| *own).map(|_| "a newer step of our own".to_owned()));
    view.extend(
        evidence["peer_intents"].as_u64().filter(|n| *n > 0).map(|n| format!("{n} steps under way at other routers")),
    );
    view.extend(
        evidence["cache_not_readable"]
            .as_str()
            .map(|why| format!("nothing that workers hold: {why} has all of it computed")),
    );
    let step = match receipt["decision"]["step_kind"].as_str() {
        Some(step) => format!("{step}, mode {}", cell_text(receipt.get("mode"))),
        None => format!("not planned, mode {}", cell_text(receipt.get("mode"))),
    };
    vec![
        ("request", cell_text(receipt.get("request_id"))),
        ("session", cell_text(lookup.get("session_id"))),
        ("asked by", format!("{}, for {}", cell_text(receipt.get("tenant")), cell_text(receipt.get("model")))),
        ("step", step),
        ("prompt", tokens),
        ("known", by),
        ("owner", owner),
        ("decided on", view.join(", ")),
    ]
}

/// Reads a duration; `None` where there is none.
fn span(value: &Value) -> Option<Duration> {
    value.as_str()?.parse().ok().map(|TimeSpan(span)| span)
}

/// Formats a duration for people, shortened.
fn span_text(value: &Value) -> String {
    span(value).map_or_else(|| "-".into(), duration_text)
}

/// Formats all candidates, cheapest first, disallowed ones last. A `*` marks the choice.
fn candidates(decision: &Value, urls: &WorkerUrls) -> String {
    let mut all: Vec<&Value> = decision["candidates"].as_array().into_iter().flatten().collect();
    all.sort_by_key(|one| (one["rejection"].is_string(), span(&one["total_cost"])));
    // The columns are the cost terms of this release.
    let terms: Vec<&String> =
        all.first().and_then(|one| one["cost_terms"].as_object()).into_iter().flat_map(|t| t.keys()).collect();
    let mut title = row(["", "ACTION", "WORKER", "SOURCE", "CACHED", "COMPUTED"]);
    title.extend(terms.iter().map(|term| term.to_uppercase()));
    title.extend(row(["TOTAL COST", "REJECTION"]));
    let mut rows = vec![title];
    let plan = &decision["plan"];
    for one in all {
        let is_chosen = ["action", "sequence"].iter().all(|part| one[*part] == plan[*part]);
        let sources: Vec<_> = parts(one, "handoff").map(|handoff| urls.leg(&handoff["source"])).collect();
        let from = if sources.is_empty() { "-".into() } else { sources.join(" and ") };
        let [first, last] = [parts(one, "leg").next(), parts(one, "leg").last()];
        let mut cells = row([
            if is_chosen { "*" } else { "" },
            &cell_text(one.get("action")),
            &last.map(|leg| urls.leg(leg)).unwrap_or_default(),
            &from,
            &cell_text(last.and_then(|leg| leg.get("cached_tokens"))),
            &cell_text(first.and_then(|leg| leg.get("computed_tokens"))),
        ]);
        let is_rejected = one["rejection"].is_string();
        let price = |price: &Value| if is_rejected { "-".to_owned() } else { span_text(price) };
        cells.extend(terms.iter().map(|term| price(&one["cost_terms"][term.as_str()])));
        cells.push(price(&one["total_cost"]));
        cells.push(if is_rejected { cell_text(one.get("rejection")) } else { String::new() });
        rows.push(cells);
    }
    aligned(&rows)
}

/// Returns the legs or the handoffs of a plan or a candidate, in order.
fn parts<'a>(plan: &'a Value, kind: &'static str) -> impl Iterator<Item = &'a Value> {
    plan["sequence"].as_array().into_iter().flatten().filter_map(move |part| part.get(kind))
}

fn outcome(receipt: &Value, urls: &WorkerUrls) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    let rationale = &receipt["decision"]["plan"]["rationale"];
    if rationale.is_object() {
        let next = match &rationale["runner_up"] {
            Value::Null => "nothing else was allowed".to_owned(),
            next => {
                let cost = |candidate: &Value| span(&candidate["total_cost"]).unwrap_or_default();
                let more = duration_text(cost(next).saturating_sub(cost(rationale)));
                let (action, worker) = (cell_text(next.get("action")), urls.worker(&next["worker"]));
                format!("next {action} at {worker}, {more} more")
            }
        };
        let (policy, price) = (cell_text(rationale.get("policy")), span_text(&rationale["total_cost"]));
        if receipt["mode"] == "shadow" {
            let plan = &receipt["decision"]["plan"];
            let at = parts(plan, "leg").last().map(|leg| urls.leg(leg)).unwrap_or_default();
            let what = format!("{} at {at} for {price}; {next}", cell_text(plan.get("action")));
            let why = match receipt["control_group"] == true {
                true => "Its session is of the guardrail's control group, so that the bypass served it:",
                false => "In mode shadow the bypass served it:",
            };
            rows.push(("would be", format!("{what}. {why}")));
        } else {
            rows.push(("chosen", format!("by {policy} for {price}; {next}")));
            let is_sent = receipt["attempts"].as_array().is_some_and(|attempts| !attempts.is_empty());
            let ownership = match is_sent {
                true => ownership_text(&receipt["decision"]["plan"]["ownership"]),
                false => "as it was: the step was never sent".to_owned(),
            };
            rows.push(("ownership", ownership));
        }
    }
    if receipt["admission_wait"].is_object() {
        rows.push(("waited", wait_text(&receipt["admission_wait"])));
    }
    rows.extend(attempts(receipt, urls));
    let observed = &receipt["observed"];
    if observed.is_object() {
        let beside = |what: &str, expected: &str| format!("{what} (expected {expected})");
        let optional = |value: &Value| if value.is_null() { "not known".to_owned() } else { cell_text(Some(value)) };
        let ttft = if observed["ttft"].is_null() { "not known".into() } else { span_text(&observed["ttft"]) };
        let (outcome, status) = (cell_text(observed.get("outcome")), cell_text(observed.get("http_status")));
        rows.push(("ended", format!("{outcome}, status {status}")));
        let ttft = match &observed["predicted_ttft"] {
            Value::Null => ttft,
            predicted => beside(&ttft, &span_text(predicted)),
        };
        rows.push(("TTFT", ttft));
        let expected = cell_text(observed.get("predicted_cached_tokens"));
        rows.push(("cached", beside(&optional(&observed["cached_tokens"]), &expected)));
        rows.extend(disagreement_rows(observed));
        rows.push((
            "answer",
            format!("{} tokens, {} in all", optional(&observed["output_tokens"]), span_text(&observed["duration"])),
        ));
        rows.push(("moved", format!("{} bytes", cell_text(observed.get("transferred_bytes")))));
    }
    rows
}

/// Rows for the attempts, in order.
fn attempts(receipt: &Value, urls: &WorkerUrls) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    for attempt in receipt["attempts"].as_array().into_iter().flatten() {
        let legs: Vec<_> =
            attempt["legs"].as_array().into_iter().flatten().map(|leg| urls.worker(&leg["worker"])).collect();
        let at = legs.join(" and ");
        let events = match attempt["events"].as_array().map(Vec::as_slice) {
            None | Some([]) => String::new(),
            Some(_) => format!("; {}", cell_text(attempt.get("events"))),
        };
        let resumed = match &attempt["resume"] {
            Value::Null => String::new(),
            resume => {
                let kept_tokens = cell_text(resume.get("kept_tokens"));
                format!("; resumed after {kept_tokens} tokens, in {}", span_text(&resume["duration"]))
            }
        };
        let (action, state) = (cell_text(attempt.get("action")), cell_text(attempt.get("kv_index_state")));
        let ejected: Vec<_> =
            attempt["ejected_workers"].as_array().into_iter().flatten().map(|id| urls.worker(id)).collect();
        let ejected = if ejected.is_empty() { String::new() } else { format!("; ejected was {}", ejected.join(", ")) };
        let broken = match &attempt["not_resumable_reason"] {
            Value::Null => String::new(),
            why => format!("; nobody could go on with it because {}", cell_text(Some(why))),
        };
        let how = format!("{action} at {at}, KV index {state}{ejected}{resumed}{events}{broken}");
        rows.push(("tried", how));
    }
    rows
}

fn wait_text(wait: &Value) -> String {
    let until = match wait["outcome"].as_str() {
        Some("admitted") => "until there was room",
        Some("max_wait_reached") => "until planner.admission.max_wait was over",
        Some("queue_full") => "as planner.admission.max_queue waited already",
        Some("abandoned") => "until its client left or it could not be served",
        _ => "",
    };
    let (time, cost) = (span_text(&wait["duration"]), span_text(&wait["displaced_compute"]));
    format!("{time}, {until}; starting at once would have cost others {cost}")
}

/// Rows for signs that the engine saw another prompt.
fn disagreement_rows(observed: &Value) -> Vec<(&'static str, String)> {
    let advice = "see that models.NAME.tokenizer_dir has the tokenizer and the template that the engine uses";
    let (counts, finds) = (&observed["token_count_mismatch"], &observed["cache_hit_mismatch"]);
    let mut parts = Vec::new();
    if counts.is_object() {
        let (counted, computed) = (cell_text(counts.get("engine")), cell_text(counts.get("router")));
        parts.push(format!("the engine counts {counted} prompt tokens where {computed} were computed here: {advice}"));
    }
    if finds.is_object() {
        let (found, told) = (cell_text(finds.get("cached_tokens")), cell_text(finds.get("reported")));
        parts.push(format!(
            "the engine found {found} prompt tokens in its cache where its events had told of {told} by then: they may be late; if \
             `ctl alarms list` shows `prefix_cache_cache_hit_mismatch`, {advice}"
        ));
    }
    parts.into_iter().map(|what| ("disagrees", what)).collect()
}

fn ownership_text(ownership: &Value) -> String {
    match ownership["kind"].as_str() {
        Some("keep") => "stays where it is".into(),
        Some("claim") => "nobody owned it: the target claims it".into(),
        Some("read_replica") => "stays; the target is a reader".into(),
        Some("move") => format!("moves to the target: {}", cell_text(ownership.get("reason"))),
        _ => cell_text(Some(&json!(ownership))),
    }
}

#[cfg(test)]
mod tests;
