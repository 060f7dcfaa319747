//! Version 1 of the decision log. A line is upgraded to the current version before it is parsed.
//!
//! In version 1 a plan has the fields `prefill`, `decode` and `handoff` in place of `sequence`, and an attempt has the
//! workers `prefill` and `decode` in place of `legs`. The header has settings under the names that they had then.

use serde_json::{Map, Value, json};

use super::FORMAT_VERSION;
use crate::config::renamed_keys::{ATTENTION_FILE, SETTINGS};

/// The version that this module reads.
pub(super) const VERSION: u32 = 1;

/// Returns a line of version 1, header or record, as the current version has it. A part that version 1 does not have
/// stays as it is, so that the parser reports it.
pub(super) fn upgraded(mut line: Value) -> Value {
    if let Some(version) = line.get_mut("version") {
        *version = FORMAT_VERSION.into();
    }
    if let Some(policy) = line.get_mut("policy") {
        *policy = SETTINGS.renamed("planner", policy.take());
    }
    for spec in line.get_mut("attention").and_then(Value::as_object_mut).into_iter().flat_map(Map::values_mut) {
        *spec = ATTENTION_FILE.renamed("", spec.take());
    }
    let Some(receipt) = line.get_mut("receipt") else { return line };
    if let Some(mode) = receipt.get_mut("mode") {
        *mode = SETTINGS.renamed("steering.mode", mode.take());
    }
    let decision = receipt.get_mut("decision").and_then(Value::as_object_mut);
    if let Some(decision) = decision {
        let [plan, candidates] = ["plan", "candidates"].map(|part| decision.remove(part));
        decision.extend(plan.map(|plan| ("plan".to_owned(), with_sequence(plan))));
        decision.extend(candidates.map(|all| ("candidates".to_owned(), each(all, with_sequence))));
    }
    if let Some(attempts) = receipt.get_mut("attempts") {
        *attempts = each(attempts.take(), with_legs);
    }
    line
}

fn each(all: Value, upgrade: fn(Value) -> Value) -> Value {
    match all {
        Value::Array(all) => all.into_iter().map(upgrade).collect(),
        other => other,
    }
}

/// Puts the legs and the handoff of a plan or a candidate into one sequence.
fn with_sequence(plan: Value) -> Value {
    let Value::Object(mut plan) = plan else { return plan };
    if let Some(sequence) = sequence(&plan) {
        plan.retain(|field, _| !["prefill", "decode", "handoff"].contains(&field.as_str()));
        plan.insert("sequence".into(), sequence);
    }
    if let Some(rule) = plan.get_mut("because").and_then(|because| because.get_mut("rule")) {
        *rule = SETTINGS.renamed("planner.rule", rule.take());
    }
    plan.into()
}

fn sequence(plan: &Map<String, Value>) -> Option<Value> {
    let [prefill, decode, handoff] = ["prefill", "decode", "handoff"].map(|field| plan.get(field));
    let (prefill, decode) = (prefill?, decode?);
    let target = place(&decode["worker"], &decode["rank"]);
    let Some(handoff) = handoff.filter(|handoff| !handoff.is_null()) else {
        return Some(json!([leg("serve", decode)]));
    };
    let bytes = &handoff["bytes"];
    match handoff["kind"].as_str()? {
        "replicate" => {
            let (source, blocks) = (place(&handoff["from"], &handoff["rank"]), &handoff["blocks"]);
            let moving = json!({
                "kind": "replicate", "source": source, "target": target, "blocks": blocks, "bytes": bytes,
            });
            Some(json!([{"handoff": moving}, leg("serve", decode)]))
        }
        "remote_prefill" => {
            let source = place(&prefill["worker"], &prefill["rank"]);
            let moving = json!({
                "kind": "remote_prefill", "source": source, "target": target, "blocks": null, "bytes": bytes,
            });
            Some(json!([leg("prefill", prefill), {"handoff": moving}, leg("decode", decode)]))
        }
        _ => None,
    }
}

fn place(worker: &Value, rank: &Value) -> Value {
    json!({"worker": worker, "rank": rank})
}

fn leg(role: &str, leg: &Value) -> Value {
    json!({"leg": {
        "role": role, "worker": leg["worker"], "rank": leg["rank"],
        "cached_tokens": leg["tokens_cached"], "computed_tokens": leg["tokens_computed"],
    }})
}

/// Puts the workers of an attempt into its legs.
fn with_legs(attempt: Value) -> Value {
    let Value::Object(mut attempt) = attempt else { return attempt };
    let [Some(prefill), Some(decode)] = ["prefill", "decode"].map(|field| attempt.get(field)) else {
        return attempt.into();
    };
    let legs = match prefill == decode {
        true => json!([{"role": "serve", "worker": decode}]),
        false => json!([{"role": "prefill", "worker": prefill}, {"role": "decode", "worker": decode}]),
    };
    attempt.retain(|field, _| !["prefill", "decode"].contains(&field.as_str()));
    attempt.insert("legs".into(), legs);
    attempt.into()
}

#[cfg(test)]
mod tests;
