//! Gauges of state kept elsewhere, set when metrics are scraped.

use std::time::Instant;

use ownership::MemberRole;
use ownership::ledger::WorkerLease;
use planner::Action;
use strum::VariantArray as _;
use vocabulary::{KvIndexState, WorkerHealth, WorkerView};
use workers_shim::events::EventSourceCount;

use super::guardrail::is_disabled;
use super::sources::OperatorParts;
use proxy::calibration::DriftDirection;
use proxy::discovery::WorkerSource;
use proxy::guardrail::ComparisonArm;
use proxy::peer_exchange::ledger_health::LedgerFault;
use vocabulary::RoutingMode;

pub(super) fn refresh(parts: &OperatorParts) {
    process(parts);
    ledger(parts);
    cluster(parts);
    parts.metrics.shared_cache.memory_bytes.set(to_i64(parts.shared_cache.bytes() as u64));
    identity(parts);
    guarded(parts);
    parts.metrics.decisions.waiting.set(to_i64(parts.routing.occupancy.queue_len() as u64));
    parts.metrics.decisions.disabled_links.set(to_i64(parts.routing.transfer_checks.disabled_links().len() as u64));
    workers(parts);
    exchange(parts);
}

fn workers(parts: &OperatorParts) {
    let metrics = &parts.metrics.workers;
    metrics.reset();
    parts.metrics.decisions.reset();
    for view in parts.fleet.workers.fleet().snapshot().iter() {
        worker(parts, view);
    }
    discovery(parts);
    metrics.distinct_blocks.set(to_i64(parts.index.read().blocks() as u64));
    metrics.assumed_blocks.set(to_i64(parts.index.assumed_blocks() as u64));
}

fn discovery(parts: &OperatorParts) {
    let up = &parts.metrics.process.discovery.up;
    let is_stale = parts.stale_files.reasons().iter().any(|(what, _)| *what == "workers");
    let failures = parts.fleet.discovery.failures();
    for source in WorkerSource::VARIANTS.iter().copied() {
        let fails =
            failures.iter().any(|(failing, _)| *failing == source) || (is_stale && source == WorkerSource::File);
        up.with_label_values(&[source.as_ref()]).set((!fails).into());
    }
}

fn worker(parts: &OperatorParts, view: &WorkerView) {
    let metrics = &parts.metrics.workers;
    // Prometheus calls host and port an instance.
    let name = view.endpoint.split("://").last().unwrap_or_default();
    metrics.up.with_label_values(&[name, view.role.as_str()]).set(i64::from(view.health == WorkerHealth::Ready));
    metrics.running.with_label_values(&[name]).set(view.load.running.into());
    metrics.waiting.with_label_values(&[name]).set(view.load.waiting.into());
    metrics.backlog.with_label_values(&[name]).set(to_i64(view.load.backlog.0));
    metrics.kv_usage.with_label_values(&[name]).set(view.load.kv_usage);
    for state in [KvIndexState::Exact, KvIndexState::Degraded, KvIndexState::Approximate] {
        metrics.kv_index_state.with_label_values(&[name, state.as_str()]).set(i64::from(state == view.kv_index_state));
    }
    let EventSourceCount { configured, connected } =
        parts.fleet.workers.fleet().event_sources(view.id).unwrap_or_default();
    for (state, count) in [("connected", connected), ("disconnected", configured - connected)] {
        metrics.event_sources.with_label_values(&[name, state]).set(to_i64(count as u64));
    }
    let cost_model = &parts.metrics.decisions;
    cost_model.prefill_speed.with_label_values(&[name]).set(view.speeds.prefill_tokens_per_second);
    let drift = parts.fleet.calibration.of(view.id).and_then(|prediction| prediction.drift);
    for way in [DriftDirection::Slower, DriftDirection::Faster] {
        cost_model.cost_drift.with_label_values(&[name, way.as_ref()]).set(i64::from(drift == Some(way)));
    }
    let ejected = parts.fleet.outliers.lock().ejection(view);
    cost_model.outliers.ejected.with_label_values(&[name]).set(i64::from(ejected.is_some()));
    let events = parts.fleet.workers.fleet().events(view.id).unwrap_or_default();
    metrics.events.with_label_values(&[name]).inc_by(events.events);
    metrics.event_gaps.with_label_values(&[name]).inc_by(events.gaps);
    metrics.event_lag.with_label_values(&[name]).set(events.lag.duration().as_secs_f64());
    metrics.blocks.with_label_values(&[name]).set(to_i64(events.blocks * chain_blocks(parts, view)));
}

/// Chain blocks per engine block, so that all workers' blocks are counted in the same unit.
fn chain_blocks(parts: &OperatorParts, view: &WorkerView) -> u64 {
    let Some(model) = view.models.iter().find_map(|name| parts.catalog.configured_model(name)) else { return 1 };
    view.capacity.block.whole_blocks(model.identifier.block()).0.max(1)
}

fn exchange(parts: &OperatorParts) {
    let metrics = &parts.metrics.exchange;
    metrics.table_age.reset();
    for (router, age) in parts.fleet.workers.fleet().peer_ages(Instant::now()) {
        metrics.table_age.with_label_values(&[&router.to_string()]).set(age.as_secs_f64());
    }
    let troubles = parts.ledger.ledger_problems();
    for trouble in LedgerFault::VARIANTS {
        let is_there = i64::from(troubles.contains(trouble));
        metrics.ledger_faults.with_label_values(&[trouble.as_ref()]).set(is_there);
    }
    let pending = parts.ledger.pending_commits();
    metrics.pending_commits.set(to_i64(pending.pending_count() as u64));
    // No race: the lock is held, so only one scrape runs at a time.
    metrics.dropped_commits.inc_by(pending.dropped_count().saturating_sub(metrics.dropped_commits.get()));
}

fn identity(parts: &OperatorParts) {
    let (metrics, conversations) = (&parts.metrics.prefix_cache, &parts.prefix_cache.conversations);
    metrics.conversations.set(to_i64(conversations.len() as u64));
    metrics.memory_bytes.set(to_i64(conversations.memory_bytes().0));
    metrics.disabled_models.set(to_i64(parts.catalog.disabled_by_spot_check().count() as u64));
    metrics.suspected_models.set(to_i64(parts.prefix_cache.tokenizer_drift.suspected_model_count() as u64));
}

fn guarded(parts: &OperatorParts) {
    let metrics = &parts.metrics.decisions;
    for action in Action::ALL {
        let compared = parts.routing.guardrail.of(action);
        let name = action.as_str();
        metrics.guard_ratio.with_label_values(&[name]).set(compared.ttft_ratio.unwrap_or_default());
        for (arm, count) in [
            (ComparisonArm::Control, compared.control_sessions),
            (ComparisonArm::Treatment, compared.treatment_sessions),
        ] {
            metrics.guard_sessions.with_label_values(&[name, arm.as_ref()]).set(to_i64(count as u64));
        }
        metrics.reverted.with_label_values(&[name]).set(i64::from(is_disabled(&parts.routing, action, &compared)));
    }
}

fn process(parts: &OperatorParts) {
    let process = &parts.metrics.process;
    let routing = parts.routing.live.get();
    for mode in [RoutingMode::Shadow, RoutingMode::Bypass, RoutingMode::Active] {
        process.mode.with_label_values(&[mode.as_ref()]).set(i64::from(mode == routing.mode));
    }
    process.rollout.set(f64::from(u8::from(routing.rollout_percent)) / 100.0);
}

fn ledger(parts: &OperatorParts) {
    let metrics = &parts.metrics.ledger;
    let view = parts.ledger.directory().view();
    let quorum = view.quorum();
    metrics.applied.set(to_i64(view.applied()));
    metrics.term.set(to_i64(quorum.term));
    metrics.stale.set(i64::from(quorum.stale));
    metrics.sessions.set(to_i64(view.session_count() as u64));
    let mut leases = [0, 0, 0];
    for worker in view.workers() {
        leases[match worker.lease {
            WorkerLease::Held { .. } => 0,
            WorkerLease::Expired { .. } => 1,
            WorkerLease::Retired { .. } => 2,
        }] += 1;
    }
    for (state, count) in ["held", "expired", "retired"].into_iter().zip(leases) {
        metrics.leases.with_label_values(&[state]).set(count);
    }
    let readings = parts.ledger.directory().stats();
    metrics.queue.set(to_i64(readings.queue_depth));
    let process = &parts.metrics.process;
    process.shortages.reset();
    process.shortages.inc_by(readings.shortage_retries);
    process.tasks_ended.reset();
    for task in parts.ledger.directory().supervision().tasks() {
        let times = readings.tasks_ended.get(task).copied().unwrap_or(0);
        process.tasks_ended.with_label_values(&[task]).inc_by(times);
    }
    let refused: u64 = readings.refusals.values().sum();
    // The directory keeps the count; a counter can be set only by resetting it.
    metrics.commits.reset();
    metrics.commits.with_label_values(&["applied"]).inc_by(readings.commands.saturating_sub(refused));
    for (cause, count) in readings.refusals.iter().chain(&readings.failures) {
        metrics.commits.with_label_values(&[cause]).inc_by(*count);
    }
}

fn cluster(parts: &OperatorParts) {
    let (metrics, directory) = (&parts.metrics.cluster, parts.ledger.directory());
    let members = directory.members();
    let leads = members.iter().any(|member| member.is_leader && member.node == directory.node());
    metrics.is_leader.set(i64::from(leads));
    metrics.level.set(i64::from(directory.view().level()));
    metrics.tls_refused.reset();
    let readings = directory.stats();
    metrics.tls_refused.inc_by(readings.tls_refusals);
    metrics.refused.reset();
    for (reason, times) in [("not_a_member", readings.non_member_calls), ("invalid_term", readings.implausible)] {
        metrics.refused.with_label_values(&[reason]).inc_by(times);
    }
    for (standing, word) in [(MemberRole::Voter, "voter"), (MemberRole::Learner, "learner")] {
        let count = members.iter().filter(|member| member.role == standing).count();
        metrics.members.with_label_values(&[word]).set(to_i64(count as u64));
    }
    // Members come and go; only the leader knows the others' progress.
    metrics.lag.reset();
    let last = members.iter().filter_map(|member| member.matched_index).max().unwrap_or(0);
    for member in members.iter().filter(|_| leads) {
        let lag = last.saturating_sub(member.matched_index.unwrap_or(0));
        metrics.lag.with_label_values(&[&member.node.to_string()]).set(to_i64(lag));
    }
}

fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
