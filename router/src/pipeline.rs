//! The generation pipeline: takes one request from parsing to commit.
//!
//! Control flow only: each stage lives in its own file.

pub mod admission_queue;
mod batch;
mod blame;
pub mod commit;
pub mod conversation_fingerprint;
pub mod execute;
pub(crate) mod guardrail_enforcement;
pub mod identify;
mod knowledge;
pub mod kv_reservation;
pub mod legs;
pub mod liveness_watch;
pub mod locate;
pub mod offload_pool;
pub mod parse;
pub mod plan;
pub mod planning;
pub mod prompts;
pub mod receipt;
pub mod remote_prefill;
pub mod replicate;
pub mod request_end;
pub mod resume;
pub mod resume_blocker;
pub mod reverse_pull;
pub mod routing;
pub mod session_key;
pub mod session_resolution;
pub mod single_flight;
pub mod stream;
pub mod summary;
pub mod token_ids;

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use prefix::{ConvertedRequest, TokenCheckpoint};

use crate::app_state::AppState;
use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::error::ApiError;
use crate::memory_budget::MemoryReservation;
use crate::telemetry::metrics::Metrics;
use identify::{IdentificationResult, IdentifiedPrompt, IdentifiedRequest, UnidentifiedRequest};
use legs::Legs;
use offload_pool::OffloadTask;
use planning::Planning;

/// Serves one generation request: parse, identify, locate, classify, plan, execute, stream, commit.
pub async fn serve_generation(
    gateway: &Arc<AppState>,
    endpoint: GenerationEndpoint,
    incoming: ClientRequest,
) -> Result<Response, ApiError> {
    let mut clock = StageTimer::begin(&gateway.metrics);
    gateway.policies.retries.earn(&incoming.tenant);
    let salt = gateway.isolation.salt_of(&incoming.tenant);
    let request =
        OffloadTask::of(&incoming).run(&gateway.offload_pool, move || parse::parse(incoming, endpoint, salt)).await??;
    gateway.metrics.requests.count_stripped(request.body.stripped(&legs::leg_options(&request)));
    if let Some(reserved) = &request.incoming.token_reservation {
        reserved.take_answer(request.max_answer).await?;
    }
    clock.record_stage("parse");
    let (prefixed, chat) = identify(gateway, request).await?;
    clock.record_stage("identify");
    let located = locate::locate(gateway, prefixed, chat).await?;
    clock.record_stage("locate");
    let step = plan::classify(gateway, located);
    clock.record_stage("classify");
    let mut underway = Planning::new(gateway, step);
    loop {
        let planned = underway.plan_next(|step, excluded| plan::plan(gateway, step, excluded))?;
        clock.record_stage("plan");
        let Some((step, plan)) = planned else {
            underway.wait_for_turn(|step| plan::classify(gateway, locate::locate_waiting(gateway, step.located))).await;
            clock.skip_elapsed();
            continue;
        };
        commit::announce(&gateway.ledger, step, &plan);
        match execute::execute(gateway, (step, &plan), Legs::of(&gateway.workers, step)).await {
            Ok(answering) => {
                clock.record_stage("execute");
                let (opened, finish) = underway.start_answer(answering);
                let summary = summary::summary(&finish);
                // The stream commits the step when it ends.
                return Ok(summary::with_summary(stream::stream(opened, finish), summary));
            }
            Err(failed) => underway.record_failure(failed)?,
        }
    }
}

/// Identifies the request's prompt. A known conversation costs only its new part; any other prompt is tokenized as a
/// whole. The second value is the request as the engine converts it to chat, where that had to be computed.
async fn identify(
    gateway: &Arc<AppState>,
    request: parse::ParsedRequest,
) -> Result<(IdentifiedRequest, Option<ConvertedRequest>), ApiError> {
    let model = gateway.catalog().model(&request.model);
    let has_text = model.identifier.text().is_some();
    let remembered = &gateway.caches;
    // Freed after identification: JSON trees and rendered text.
    let mut derived = request.incoming.memory.as_deref().map(MemoryReservation::sibling);
    if let Some(derived) = &mut derived {
        derived.grow(request.body.derived_bytes())?;
    }
    let (request, found, derived) = extend_known(gateway, UnidentifiedRequest::new(request, model), derived).await?;
    let (request, found) = match found {
        Some(found) => {
            drop(derived);
            (request, found)
        }
        None => {
            let incoming = &request.request().incoming;
            let (tenant, size) = (incoming.tenant.clone(), incoming.body.len());
            let known = match has_text {
                true => remembered.checkpoints.lookup(&tenant, request.affinity_key, size).await,
                false => None,
            };
            compute_whole(gateway, (request, known), derived).await?
        }
    };
    let IdentificationResult { identified: prefixed, known_tokens: known, next_checkpoint: next, converted: chat } =
        request.with_prompt(found);
    remembered.record(&prefixed, known, next);
    Ok((prefixed, chat))
}

/// Identifies the prompt by extending a known conversation, after converting requests of other endpoints to chat.
/// Returns `None` for the prompt where it must be identified as a whole. The memory reservation moves into the work,
/// which may outlive its client.
async fn extend_known(
    gateway: &Arc<AppState>,
    request: UnidentifiedRequest,
    derived: Option<MemoryReservation>,
) -> Result<(UnidentifiedRequest, Option<IdentifiedPrompt>, Option<MemoryReservation>), ApiError> {
    let (load, trails) =
        (OffloadTask::of(&request.request().incoming), gateway.caches.prefix_cache.conversations.clone());
    let work = move || {
        let request = if request.needs_conversion() { request.converted() } else { request };
        let found = request.extend_known(&trails);
        (request, found, derived)
    };
    load.run(&gateway.offload_pool, work).await
}

async fn compute_whole(
    gateway: &Arc<AppState>,
    (request, known): (UnidentifiedRequest, Option<TokenCheckpoint>),
    derived: Option<MemoryReservation>,
) -> Result<(UnidentifiedRequest, IdentifiedPrompt), ApiError> {
    let (load, trails) =
        (OffloadTask::of(&request.request().incoming), gateway.caches.prefix_cache.conversations.clone());
    let work = move || {
        let found = request.compute_whole(&trails, known.as_ref());
        drop(derived);
        (request, found)
    };
    load.run(&gateway.offload_pool, work).await
}

/// Records the duration of each pipeline stage.
struct StageTimer<'a> {
    metrics: &'a Metrics,
    since: Instant,
}

impl<'a> StageTimer<'a> {
    fn begin(metrics: &'a Metrics) -> Self {
        Self { metrics, since: Instant::now() }
    }

    fn record_stage(&mut self, step: &str) {
        let now = Instant::now();
        self.metrics.plans.step.with_label_values(&[step]).observe((now - self.since).as_secs_f64());
        self.since = now;
    }

    /// Discards the elapsed time: it belongs to no stage.
    fn skip_elapsed(&mut self) {
        self.since = Instant::now();
    }
}

#[cfg(test)]
mod tests;
