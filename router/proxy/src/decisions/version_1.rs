//! Version 1 of the decision log. A line is upgraded to the current version before it is parsed.
//!
//! In version 1 a plan has the fields `prefill`, `decode` and `handoff` in place of `sequence`, and an attempt has the
//! workers `prefill` and `decode` in place of `legs`. Most fields and some values have other names, durations are
//! numbers of microseconds, and the time of arrival is a number of milliseconds since 1970.

use serde_json::{Map, Value, json};

use super::record::FORMAT_VERSION;
use crate::receipt::rfc3339;
use crate::renamed_keys::{ATTENTION_FILE, RenamedKeys, SETTINGS, key, micros, value};

/// The version that this module reads.
pub(super) const VERSION: u32 = 1;

/// A header or a record without its plans.
const LINE: RenamedKeys = RenamedKeys::of(
    &[
        key("policy", "planner"),
        key("shapes", "parallelism"),
        key("case", "planning_inputs"),
        key("case.facts", "planning_inputs.step"),
        key("case.ask", "planning_inputs.request"),
        key("case.excluded", "planning_inputs.failed_workers"),
        key("case.memory", "planning_inputs.kv_occupancy"),
        key("case.disabled", "planning_inputs.disabled_actions"),
        key("case.barred", "planning_inputs.disabled_links"),
        key("case.facts.prompt", "planning_inputs.step.prompt_tokens"),
        key("case.facts.reused", "planning_inputs.step.reused_tokens"),
        micros("case.facts.idle", "planning_inputs.step.idle"),
        key("case.ask.prompt", "planning_inputs.request.prompt_tokens"),
        key("case.ask.longest", "planning_inputs.request.longest_prompt_tokens"),
        key("case.ask.answer", "planning_inputs.request.expected_output_tokens"),
        key("case.ask.growth", "planning_inputs.request.expected_growth_tokens"),
        key("case.ask.block", "planning_inputs.request.block_size"),
        key("case.session.promises", "planning_inputs.session.peer_intents"),
        key("case.memory.free", "planning_inputs.kv_occupancy.free_tokens"),
        key("case.memory.own", "planning_inputs.kv_occupancy.session_tokens"),
        key("case.memory.idle", "planning_inputs.kv_occupancy.idle_tokens"),
        key("case.memory.active", "planning_inputs.kv_occupancy.active_sessions"),
        key("case.memory.inflow", "planning_inputs.kv_occupancy.prefill_load"),
        key("case.memory.inflow.share", "planning_inputs.kv_occupancy.prefill_load.utilization"),
        key("case.memory.inflow.rate", "planning_inputs.kv_occupancy.prefill_load.prompts_per_second"),
        key("case.memory.victims", "planning_inputs.kv_occupancy.eviction_candidates"),
        key("case.memory.victims.chance", "planning_inputs.kv_occupancy.eviction_candidates.return_probability"),
        key("receipt.request", "receipt.request_id"),
        key("receipt.at_unix_ms", "receipt.arrived_at"),
        key("receipt.known", "receipt.lookup"),
        key("receipt.control", "receipt.control_group"),
        key("receipt.soft_state", "receipt.shared_cache_state"),
        key("receipt.waited", "receipt.admission_wait"),
        key("receipt.seen", "receipt.observed"),
        key("receipt.known.session", "receipt.lookup.session_id"),
        key("receipt.known.named_by", "receipt.lookup.session_key_source"),
        key("receipt.known.fallback", "receipt.lookup.token_ids_unavailable"),
        key("receipt.known.rung", "receipt.lookup.tier"),
        key("receipt.known.distrusted", "receipt.lookup.disabled_by_spot_check"),
        key("receipt.known.prompt", "receipt.lookup.prompt_tokens"),
        key("receipt.known.estimated", "receipt.lookup.prompt_tokens_estimated"),
        key("receipt.known.sealed", "receipt.lookup.sealed_tokens"),
        key("receipt.known.deepest_overlap", "receipt.lookup.max_overlap_tokens"),
        key("receipt.known.grounds", "receipt.lookup.evidence"),
        key("receipt.known.grounds.view", "receipt.lookup.evidence.ledger_view"),
        key("receipt.known.grounds.unapplied", "receipt.lookup.evidence.pending_commit"),
        key("receipt.known.grounds.promises", "receipt.lookup.evidence.peer_intents"),
        key("receipt.known.grounds.routers", "receipt.lookup.evidence.peer_routers"),
        key("receipt.known.grounds.unread", "receipt.lookup.evidence.cache_not_readable"),
        key("receipt.decision.step", "receipt.decision.step_kind"),
        key("receipt.attempts.knowledge", "receipt.attempts.kv_index_state"),
        key("receipt.attempts.ejected", "receipt.attempts.ejected_workers"),
        key("receipt.attempts.resumed", "receipt.attempts.resume"),
        key("receipt.attempts.resumed.after", "receipt.attempts.resume.kept_tokens"),
        key("receipt.attempts.unresumable", "receipt.attempts.not_resumable_reason"),
        key("receipt.attempts.remarks", "receipt.attempts.events"),
        key("receipt.waited.until", "receipt.admission_wait.outcome"),
        key("receipt.seen.ending", "receipt.observed.outcome"),
        key("receipt.seen.status", "receipt.observed.http_status"),
        key("receipt.seen.predicted_cached", "receipt.observed.predicted_cached_tokens"),
        key("receipt.seen.cached", "receipt.observed.cached_tokens"),
        key("receipt.seen.answered", "receipt.observed.output_tokens"),
        key("receipt.seen.moved", "receipt.observed.transferred_bytes"),
        key("receipt.seen.repeated", "receipt.observed.idempotent_retry"),
        key("receipt.seen.engine_disagrees", "receipt.observed.token_count_mismatch"),
        key("receipt.seen.engine_disagrees.computed", "receipt.observed.token_count_mismatch.router"),
        key("receipt.seen.engine_disagrees.counted", "receipt.observed.token_count_mismatch.engine"),
        key("receipt.seen.cache_disagrees", "receipt.observed.cache_hit_mismatch"),
        key("receipt.seen.cache_disagrees.told", "receipt.observed.cache_hit_mismatch.reported"),
        key("receipt.seen.cache_disagrees.found", "receipt.observed.cache_hit_mismatch.cached_tokens"),
        key("receipt.seen.cache_disagrees.block", "receipt.observed.cache_hit_mismatch.block_size"),
        micros("receipt.attempts.resumed.took", "receipt.attempts.resume.duration"),
        micros("receipt.waited.time", "receipt.admission_wait.duration"),
        micros("receipt.waited.costs_others", "receipt.admission_wait.displaced_compute"),
        micros("receipt.seen.predicted", "receipt.observed.predicted_ttft"),
        micros("receipt.seen.first_token", "receipt.observed.ttft"),
        micros("receipt.seen.total", "receipt.observed.duration"),
    ],
    &[
        value(["case.facts.relation", "planning_inputs.step.relation"], ["leaves_mid_path", "diverges"]),
        value(
            ["case.ask.transfers.forbidden", "planning_inputs.request.transfers.forbidden"],
            ["unknown_tokens", "token_ids_unavailable"],
        ),
        value(
            ["receipt.known.grounds.unread", "receipt.lookup.evidence.cache_not_readable"],
            ["unknown_tokens", "token_ids_unavailable"],
        ),
        value(["receipt.attempts.knowledge", "receipt.attempts.kv_index_state"], ["fallback", "approximate"]),
        value(["case.workers.knowledge", "planning_inputs.workers.knowledge"], ["fallback", "approximate"]),
        value(["receipt.soft_state", "receipt.shared_cache_state"], ["gone", "unreachable"]),
        value(["receipt.mode", "receipt.mode"], ["own", "active"]),
        value(["receipt.mode", "receipt.mode"], ["sticky", "bypass"]),
        value(["receipt.known.rung", "receipt.lookup.tier"], ["cold", "miss"]),
        value(["receipt.attempts.remarks", "receipt.attempts.events"], ["decode_silent", "decode_lost"]),
        value(["receipt.attempts.remarks", "receipt.attempts.events"], ["broke_off", "stream_interrupted"]),
        value(["receipt.attempts.remarks", "receipt.attempts.events"], ["fell_silent", "stream_lost"]),
        value(["receipt.attempts.remarks", "receipt.attempts.events"], ["engine_failed", "engine_error"]),
        value(
            ["receipt.attempts.remarks", "receipt.attempts.events"],
            ["no_transfer_parameters", "missing_kv_transfer_params"],
        ),
        value(["receipt.attempts.remarks", "receipt.attempts.events"], ["no_room_to_encode", "encode_queue_full"]),
        value(["receipt.attempts.remarks", "receipt.attempts.events"], ["readback_failed", "reverse_pull_failed"]),
        value(["receipt.waited.until", "receipt.admission_wait.outcome"], ["room", "admitted"]),
        value(["receipt.waited.until", "receipt.admission_wait.outcome"], ["longest", "max_wait_reached"]),
        value(["receipt.waited.until", "receipt.admission_wait.outcome"], ["no_place", "queue_full"]),
        value(["receipt.waited.until", "receipt.admission_wait.outcome"], ["left", "abandoned"]),
        value(["receipt.seen.ending", "receipt.observed.outcome"], ["refused", "rejected"]),
        value(["receipt.seen.ending", "receipt.observed.outcome"], ["broken", "interrupted"]),
        value(["receipt.seen.ending", "receipt.observed.outcome"], ["client_left", "client_disconnected"]),
    ],
);

/// A plan or a candidate.
const PLAN: RenamedKeys = RenamedKeys::of(
    &[
        key("claim", "ownership"),
        key("claim.from", "ownership.previous_owner"),
        key("claim.why", "ownership.reason"),
        key("because", "rationale"),
        key("because.rule", "rationale.policy"),
        key("because.terms", "rationale.cost_terms"),
        key("terms", "cost_terms"),
        key("refused", "rejection"),
        micros("because.total", "rationale.total_cost"),
        micros("because.runner_up.total", "rationale.runner_up.total_cost"),
        micros("total", "total_cost"),
        micros("because.terms.queue", "rationale.cost_terms.queue"),
        micros("terms.queue", "cost_terms.queue"),
        micros("because.terms.compute", "rationale.cost_terms.compute"),
        micros("terms.compute", "cost_terms.compute"),
        micros("because.terms.network", "rationale.cost_terms.network"),
        micros("terms.network", "cost_terms.network"),
        micros("because.terms.restore", "rationale.cost_terms.restore"),
        micros("terms.restore", "cost_terms.restore"),
        micros("because.terms.memory", "rationale.cost_terms.memory"),
        micros("terms.memory", "cost_terms.memory"),
        micros("because.terms.interference", "rationale.cost_terms.interference"),
        micros("terms.interference", "cost_terms.interference"),
        micros("because.terms.eviction", "rationale.cost_terms.eviction"),
        micros("terms.eviction", "cost_terms.eviction"),
    ],
    &[
        value(["claim.kind", "ownership.kind"], ["open", "claim"]),
        value(["claim.kind", "ownership.kind"], ["borrow", "read_replica"]),
        value(["claim.why", "ownership.reason"], ["owner_excluded", "owner_failed_attempt"]),
        value(["claim.why", "ownership.reason"], ["state_is_there", "target_holds_more"]),
        value(["because.rule", "rationale.policy"], ["own", "lowest_cost"]),
        value(["refused", "rejection"], ["wrong_model", "model_not_served"]),
        value(["refused", "rejection"], ["excluded", "failed_earlier_attempt"]),
        value(["refused", "rejection"], ["too_long", "exceeds_context"]),
        value(["refused", "rejection"], ["does_not_fit", "exceeds_kv_capacity"]),
        value(["refused", "rejection"], ["other_fabric", "fabric_mismatch"]),
        value(["refused", "rejection"], ["other_shape", "parallelism_mismatch"]),
        value(["refused", "rejection"], ["barred_link", "link_disabled"]),
        value(["refused", "rejection"], ["needs_prefiller", "requires_prefill_worker"]),
        value(["refused", "rejection"], ["disabled", "action_disabled"]),
    ],
);

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
    if let Some(receipt) = line.get_mut("receipt") {
        upgrade_plans(receipt);
    }
    let mut line = LINE.renamed("", line);
    if let Some(arrived) = line.get_mut("receipt").and_then(|receipt| receipt.get_mut("arrived_at"))
        && let Some(unix_ms) = arrived.as_u64()
    {
        *arrived = rfc3339::text(unix_ms).into();
    }
    line
}

/// Upgrades the plan, the candidates and the legs of the attempts.
fn upgrade_plans(receipt: &mut Value) {
    let decision = receipt.get_mut("decision").and_then(Value::as_object_mut);
    if let Some(decision) = decision {
        let [plan, candidates] = ["plan", "candidates"].map(|part| decision.remove(part));
        decision.extend(plan.map(|plan| ("plan".to_owned(), with_sequence(plan))));
        decision.extend(candidates.map(|all| ("candidates".to_owned(), each(all, with_sequence))));
    }
    if let Some(attempts) = receipt.get_mut("attempts") {
        *attempts = each(attempts.take(), with_legs);
    }
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
    PLAN.renamed("", plan.into())
}

fn sequence(plan: &Map<String, Value>) -> Option<Value> {
    let [prefill, decode, handoff] = ["prefill", "decode", "handoff"].map(|field| plan.get(field));
    let (prefill, decode) = (prefill?, decode?);
    let target = worker_rank(&decode["worker"], &decode["rank"]);
    let Some(handoff) = handoff.filter(|handoff| !handoff.is_null()) else {
        return Some(json!([leg("serve", decode)]));
    };
    let bytes = &handoff["bytes"];
    match handoff["kind"].as_str()? {
        "replicate" => {
            let (source, blocks) = (worker_rank(&handoff["from"], &handoff["rank"]), &handoff["blocks"]);
            let moving = json!({
                "kind": "replicate", "source": source, "target": target, "blocks": blocks, "bytes": bytes,
            });
            Some(json!([{"handoff": moving}, leg("serve", decode)]))
        }
        "remote_prefill" => {
            let source = worker_rank(&prefill["worker"], &prefill["rank"]);
            let moving = json!({
                "kind": "remote_prefill", "source": source, "target": target, "blocks": null, "bytes": bytes,
            });
            Some(json!([leg("prefill", prefill), {"handoff": moving}, leg("decode", decode)]))
        }
        _ => None,
    }
}

fn worker_rank(worker: &Value, rank: &Value) -> Value {
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
