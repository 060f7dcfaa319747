//! `ownerserve ctl decision explain`: prints one decision for people: what was known, every candidate with its cost, the
//! choice, and the result.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use vocabulary::RequestId;

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
fn render(receipt: &Value, names: &WorkerUrls) -> String {
    let decision = &receipt["decision"];
    let parts = [
        Some(field_list(lookup_rows(receipt, names))),
        decision.is_object().then(|| candidates(decision, names)),
        Some(field_list(outcome(receipt, names))),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

fn lookup_rows(receipt: &Value, names: &WorkerUrls) -> Vec<(&'static str, String)> {
    let known = &receipt["known"];
    let tokens = format!(
        "{} tokens, {} of them sealed; the most that a worker holds is {}",
        cell_text(known.get("prompt")),
        cell_text(known.get("sealed")),
        cell_text(known.get("deepest_overlap")),
    );
    let by = match (&known["fallback"], &known["rung"]) {
        (Value::String(why), _) => format!("by its bytes only: {why}"),
        (_, Value::String(rung)) if rung == "cold" => "by token ids, and nothing of it recognised".to_owned(),
        (_, Value::String(rung)) => format!("by token ids, recognised by {rung}"),
        _ => "by token ids".into(),
    };
    let attempts = receipt["attempts"].as_array().map_or(&[][..], Vec::as_slice);
    let is_guess = known["fallback"].is_null() && attempts.iter().any(|tried| tried["knowledge"] == "approximate");
    let guess = "; what its worker holds is an estimate: REASON in `ctl worker list` says why";
    let by = if is_guess { by + guess } else { by };
    let owner = match &known["owner"] {
        Value::Null => "nobody".to_owned(),
        owner => names.worker(&owner["worker"]),
    };
    let grounds = &known["grounds"];
    let mut view = vec![format!("{} view of the ledger", cell_text(grounds.get("view")))];
    view.extend(grounds["unapplied"].as_bool().filter(|own| *own).map(|_| "a newer step of our own".to_owned()));
    view.extend(
        grounds["promises"].as_u64().filter(|n| *n > 0).map(|n| format!("{n} steps under way at other routers")),
    );
    view.extend(
        grounds["unread"].as_str().map(|why| format!("nothing that workers hold: {why} has all of it computed")),
    );
    let step = match receipt["decision"]["step"].as_str() {
        Some(step) => format!("{step}, mode {}", cell_text(receipt.get("mode"))),
        None => format!("not planned, mode {}", cell_text(receipt.get("mode"))),
    };
    vec![
        ("request", cell_text(receipt.get("request"))),
        ("session", cell_text(known.get("session"))),
        ("asked by", format!("{}, for {}", cell_text(receipt.get("tenant")), cell_text(receipt.get("model")))),
        ("step", step),
        ("prompt", tokens),
        ("known", by),
        ("owner", owner),
        ("decided on", view.join(", ")),
    ]
}

/// Formats a number of microseconds as a duration.
fn micros_text(micros: &Value) -> String {
    micros.as_u64().map_or_else(|| "-".into(), |micros| duration_text(Duration::from_micros(micros)))
}

/// Formats all candidates, cheapest first, disallowed ones last. A `*` marks the choice.
fn candidates(decision: &Value, names: &WorkerUrls) -> String {
    let mut all: Vec<&Value> = decision["candidates"].as_array().into_iter().flatten().collect();
    all.sort_by_key(|one| (one["refused"].is_string(), one["total"].as_u64()));
    // The columns are the cost terms of this release.
    let terms: Vec<&String> =
        all.first().and_then(|one| one["terms"].as_object()).into_iter().flat_map(|t| t.keys()).collect();
    let mut title = row(["", "ACTION", "WORKER", "SOURCE", "CACHED", "COMPUTED"]);
    title.extend(terms.iter().map(|term| term.to_uppercase()));
    title.extend(row(["TOTAL COST", "REJECTION"]));
    let mut rows = vec![title];
    let plan = &decision["plan"];
    for one in all {
        let is_chosen = ["action", "sequence"].iter().all(|part| one[*part] == plan[*part]);
        let sources: Vec<_> = parts(one, "handoff").map(|handoff| names.leg(&handoff["source"])).collect();
        let from = if sources.is_empty() { "-".into() } else { sources.join(" and ") };
        let [first, last] = [parts(one, "leg").next(), parts(one, "leg").last()];
        let mut cells = row([
            if is_chosen { "*" } else { "" },
            &cell_text(one.get("action")),
            &last.map(|leg| names.leg(leg)).unwrap_or_default(),
            &from,
            &cell_text(last.and_then(|leg| leg.get("cached_tokens"))),
            &cell_text(first.and_then(|leg| leg.get("computed_tokens"))),
        ]);
        let is_refused = one["refused"].is_string();
        let price = |price: &Value| if is_refused { "-".to_owned() } else { micros_text(price) };
        cells.extend(terms.iter().map(|term| price(&one["terms"][term.as_str()])));
        cells.push(price(&one["total"]));
        cells.push(if is_refused { cell_text(one.get("refused")) } else { String::new() });
        rows.push(cells);
    }
    aligned(&rows)
}

/// Returns the legs or the handoffs of a plan or a candidate, in order.
fn parts<'a>(plan: &'a Value, kind: &'static str) -> impl Iterator<Item = &'a Value> {
    plan["sequence"].as_array().into_iter().flatten().filter_map(move |part| part.get(kind))
}

fn outcome(receipt: &Value, names: &WorkerUrls) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    let because = &receipt["decision"]["plan"]["because"];
    if because.is_object() {
        let next = match &because["runner_up"] {
            Value::Null => "nothing else was allowed".to_owned(),
            next => {
                let cost = |candidate: &Value| candidate["total"].as_u64().unwrap_or_default();
                let more = duration_text(Duration::from_micros(cost(next).saturating_sub(cost(because))));
                let (action, worker) = (cell_text(next.get("action")), names.worker(&next["worker"]));
                format!("next {action} at {worker}, {more} more")
            }
        };
        let (rule, price) = (cell_text(because.get("rule")), micros_text(&because["total"]));
        if receipt["mode"] == "shadow" {
            let plan = &receipt["decision"]["plan"];
            let at = parts(plan, "leg").last().map(|leg| names.leg(leg)).unwrap_or_default();
            let what = format!("{} at {at} for {price}; {next}", cell_text(plan.get("action")));
            let why = match receipt["control"] == true {
                true => "Its session is of the guardrail's control group, so that the bypass served it:",
                false => "In mode shadow the bypass served it:",
            };
            rows.push(("would be", format!("{what}. {why}")));
        } else {
            rows.push(("chosen", format!("by {rule} for {price}; {next}")));
            let is_sent = receipt["attempts"].as_array().is_some_and(|attempts| !attempts.is_empty());
            let claim = match is_sent {
                true => ownership_text(&receipt["decision"]["plan"]["claim"]),
                false => "as it was: the step was never sent".to_owned(),
            };
            rows.push(("ownership", claim));
        }
    }
    if receipt["waited"].is_object() {
        rows.push(("waited", wait_text(&receipt["waited"])));
    }
    rows.extend(attempts(receipt, names));
    let seen = &receipt["seen"];
    if seen.is_object() {
        let beside = |what: &str, expected: &str| format!("{what} (expected {expected})");
        let optional = |value: &Value| if value.is_null() { "not known".to_owned() } else { cell_text(Some(value)) };
        let first = if seen["first_token"].is_null() { "not known".into() } else { micros_text(&seen["first_token"]) };
        rows.push(("ended", format!("{}, status {}", cell_text(seen.get("ending")), cell_text(seen.get("status")))));
        let first = match &seen["predicted"] {
            Value::Null => first,
            predicted => beside(&first, &micros_text(predicted)),
        };
        rows.push(("TTFT", first));
        rows.push(("cached", beside(&optional(&seen["cached"]), &cell_text(seen.get("predicted_cached")))));
        rows.extend(disagreement_rows(seen));
        rows.push((
            "answer",
            format!("{} tokens, {} in all", optional(&seen["answered"]), micros_text(&seen["total"])),
        ));
        rows.push(("moved", format!("{} bytes", cell_text(seen.get("moved")))));
    }
    rows
}

/// Rows for the attempts, in order.
fn attempts(receipt: &Value, names: &WorkerUrls) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    for attempt in receipt["attempts"].as_array().into_iter().flatten() {
        let legs: Vec<_> =
            attempt["legs"].as_array().into_iter().flatten().map(|leg| names.worker(&leg["worker"])).collect();
        let at = legs.join(" and ");
        let remarks = match attempt["remarks"].as_array().map(Vec::as_slice) {
            None | Some([]) => String::new(),
            Some(_) => format!("; {}", cell_text(attempt.get("remarks"))),
        };
        let resumed = match &attempt["resumed"] {
            Value::Null => String::new(),
            resumed => {
                format!(
                    "; resumed after {} tokens, in {}",
                    cell_text(resumed.get("after")),
                    micros_text(&resumed["took"])
                )
            }
        };
        let (action, knowledge) = (cell_text(attempt.get("action")), cell_text(attempt.get("knowledge")));
        let ejected: Vec<_> = attempt["ejected"].as_array().into_iter().flatten().map(|id| names.worker(id)).collect();
        let ejected = if ejected.is_empty() { String::new() } else { format!("; ejected was {}", ejected.join(", ")) };
        let broken = match &attempt["unresumable"] {
            Value::Null => String::new(),
            why => format!("; nobody could go on with it because {}", cell_text(Some(why))),
        };
        let how = format!("{action} at {at}, {knowledge} knowledge{ejected}{resumed}{remarks}{broken}");
        rows.push(("tried", how));
    }
    rows
}

fn wait_text(waited: &Value) -> String {
    let until = match waited["until"].as_str() {
        Some("room") => "until there was room",
        Some("longest") => "until planner.admission.max_wait was over",
        Some("no_place") => "as planner.admission.max_queue waited already",
        Some("left") => "until its client left or it could not be served",
        _ => "",
    };
    let (time, cost) = (micros_text(&waited["time"]), micros_text(&waited["costs_others"]));
    format!("{time}, {until}; starting at once would have cost others {cost}")
}

/// Rows for signs that the engine saw another prompt.
fn disagreement_rows(seen: &Value) -> Vec<(&'static str, String)> {
    let advice = "see that models.NAME.tokenizer_dir has the tokenizer and the template that the engine uses";
    let (counts, finds) = (&seen["engine_disagrees"], &seen["cache_disagrees"]);
    let mut said = Vec::new();
    if counts.is_object() {
        let (counted, computed) = (cell_text(counts.get("counted")), cell_text(counts.get("computed")));
        said.push(format!("the engine counts {counted} prompt tokens where {computed} were computed here: {advice}"));
    }
    if finds.is_object() {
        let (found, told) = (cell_text(finds.get("found")), cell_text(finds.get("told")));
        said.push(format!(
            "the engine found {found} prompt tokens in its cache where its events had told of {told} by then: they may be late; if \
             `ctl alarms list` shows `prefix_cache_cache_hit_mismatch`, {advice}"
        ));
    }
    said.into_iter().map(|what| ("disagrees", what)).collect()
}

fn ownership_text(claim: &Value) -> String {
    match claim["kind"].as_str() {
        Some("keep") => "stays where it is".into(),
        Some("open") => "nobody owned it: the target claims it".into(),
        Some("borrow") => "stays; the target is a reader".into(),
        Some("move") => format!("moves to the target: {}", cell_text(claim.get("why"))),
        _ => cell_text(Some(&json!(claim))),
    }
}

#[cfg(test)]
mod tests;
