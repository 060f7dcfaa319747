//! The generation pipeline: takes one request from parsing to commit.
//!
//! Control flow only: each stage lives in its own file.

pub mod admission_queue;
mod batch;
mod blame;
pub mod commit;
pub mod conversation_fingerprint;
pub mod dispatched;
mod end_guard;
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
pub mod streaming;
pub mod summary;
pub mod token_ids;

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use prefix::{ConvertedRequest, TokenCheckpoint};
use tracing::{Instrument as _, Span};
use vocabulary::{RequestId, WorkerId};
use workers_shim::events::SharedIndex;

use crate::app_state::AppState;
use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::decisions::DecisionHistory;
use crate::error::ApiError;
use crate::ledger_access::LedgerAccess;
use crate::memory_budget::MemoryReservation;
use crate::outliers::OutlierTracker;
use crate::prefix_cache::tokenizer_drift::TokenizerDrift;
use crate::prefix_replication::PrefixReplicator;
use crate::shared_cache::SharedCache;
use crate::telemetry::decisions::DecisionMetrics;
use crate::telemetry::metrics::{Metrics, PlanMetrics, RequestMetrics};
use crate::tenant_isolation::TenantIsolation;
use crate::transfer_checker::TransferChecker;
use crate::worker_client::WorkerClient;
use blame::OutlierReporter;
use end_guard::EndGuard;
use identify::{IdentificationResult, IdentifiedPrompt, IdentifiedRequest, UnidentifiedRequest};
use legs::Legs;
use offload_pool::OffloadTask;
use parse::ParsedRequest;
use plan::ClassifiedStep;
use planning::{FailedStep, PlanVerdict, Planning, PlanningContext};
use prompts::PromptStore;
use request_end::{
    CalibrationSink, CommitSink, GuardrailSink, MetricsSink, OccupancySink, QuotaSink, ReceiptSink, RequestEnd,
    UsageFilter, VerificationSink,
};
use routing::LiveRouting;

/// Serves one generation request: parse, identify, locate, classify, plan, execute, stream, commit.
pub async fn serve_generation(
    gateway: &Arc<AppState>,
    endpoint: GenerationEndpoint,
    incoming: ClientRequest,
) -> Result<Response, ApiError> {
    let mut stages = StageTimer::begin(&gateway.metrics, incoming.id);
    let request = stages.run("parse", parse(gateway, endpoint, incoming)).await?;
    let (prefixed, chat) = stages.run("identify", identify(gateway, request)).await?;
    let located = stages.run("locate", locate::locate(gateway, prefixed, chat)).await?;
    let step = stages.run_now("classify", || Ok::<_, ApiError>(plan::classify(gateway, located)))?;
    let (ends, reporter) = (&gateway.request_ends, OutlierReporter::of(gateway));
    let mut planning = EndGuard::new(Planning::first(step), ends);
    loop {
        let context = PlanningContext::of(gateway);
        let plan = |step: &ClassifiedStep, excluded: &[WorkerId]| plan::plan(gateway, step, excluded);
        let verdict = stages.run_now("plan", || planning.take().plan(&context, plan).map_err(|it| ends.fail(it)))?;
        let dispatched = match verdict {
            PlanVerdict::Start(dispatched) => EndGuard::new(*dispatched, ends),
            PlanVerdict::Wait(held) => {
                let held = EndGuard::new(*held, ends);
                held.wait_for_turn().await;
                let again =
                    |step: ClassifiedStep| plan::classify(gateway, locate::locate_waiting(gateway, step.located));
                planning = EndGuard::new(held.take().classified_again(again), ends);
                stages.skip_elapsed();
                continue;
            }
        };
        let (step, plan) = (&dispatched.step, &dispatched.planned.plan);
        commit::announce(&gateway.ledger, step, plan);
        let executed = execute::execute(gateway, (step, plan), Legs::of(&gateway.workers, step));
        match stages.run("execute", executed).await {
            Ok(started) => {
                let (opened, streaming) = dispatched.take().started(&reporter, started);
                let summary = summary::summary(&streaming);
                // The stream commits the step when it ends.
                return Ok(summary::with_summary(stream::stream(gateway, opened, streaming), summary));
            }
            Err(failed) => {
                let failed = dispatched.take().failed(&reporter, failed);
                planning = EndGuard::new(failed.map_err(|failed| ends.fail(failed))?, ends);
            }
        }
    }
}

/// The handles that the pipeline needs.
pub struct PipelineParts {
    /// The ledger.
    pub ledger: LedgerAccess,
    /// Client to the workers.
    pub workers: WorkerClient,
    /// What keeps tenants apart.
    pub isolation: TenantIsolation,
    /// Workers whose requests fail.
    pub outliers: OutlierTracker,
    /// Which worker holds which blocks.
    pub index: SharedIndex,
    /// Compares token counts with those of the engines.
    pub drift: Arc<TokenizerDrift>,
    /// Receipts, predictions and the guardrail.
    pub decisions: Arc<DecisionHistory>,
    /// Mode and rollout.
    pub routing: Arc<LiveRouting>,
    /// Checks transfers.
    pub checker: TransferChecker,
    /// Copies prefixes between two steps of a session.
    pub replicator: Arc<PrefixReplicator>,
    /// Prompts with their token ids.
    pub prompts: Arc<PromptStore>,
    /// Cache shared with other routers.
    pub shared_cache: Arc<SharedCache>,
    /// Metrics of requests.
    pub requests: RequestMetrics,
    /// Metrics of plans.
    pub plans: PlanMetrics,
    /// Metrics of decisions.
    pub decision_metrics: DecisionMetrics,
}

/// Every sink that takes the end of a request.
#[derive(Debug)]
pub struct RequestEnds {
    usage: UsageFilter,
    commit: CommitSink,
    occupancy: OccupancySink,
    quota: QuotaSink,
    calibration: CalibrationSink,
    guardrail: GuardrailSink,
    verification: VerificationSink,
    metrics: MetricsSink,
    receipt: ReceiptSink,
}

impl RequestEnds {
    /// Connects the sinks.
    pub fn new(parts: PipelineParts) -> Self {
        let PipelineParts { ledger, workers, isolation, outliers, index, drift, decisions, .. } = parts;
        let PipelineParts { routing, checker, replicator, prompts, shared_cache, .. } = parts;
        let PipelineParts { requests, plans, decision_metrics, .. } = parts;
        let fleet = workers.fleet().clone();
        let (calibration, guardrail) = (decisions.calibration.clone(), decisions.guardrail.clone());
        let (seconds, kv_movement) = (plans.step.with_label_values(&["commit"]), plans.kv_movement.clone());
        let reporter = OutlierReporter { outliers, isolation };
        Self {
            usage: UsageFilter { implausible: requests.implausible_usage.clone() },
            commit: CommitSink { ledger, fleet: fleet.clone(), seconds },
            occupancy: OccupancySink,
            quota: QuotaSink,
            calibration: CalibrationSink {
                reporter,
                drift,
                fleet: fleet.clone(),
                index,
                calibration,
                metrics: decision_metrics,
            },
            guardrail: GuardrailSink { guardrail, routing },
            verification: VerificationSink { checker, replicator, prompts, metrics: kv_movement },
            metrics: MetricsSink { requests, plans, fleet },
            receipt: ReceiptSink { decisions, shared_cache },
        }
    }

    /// Takes the end of a request, once for each, however it ended. It runs on the caller's thread, so that a session's
    /// next step finds the commit handed in.
    pub fn take(&self, end: RequestEnd) {
        let _entered = stage_span(end.step.located.identified.request.incoming.id, "commit").entered();
        let mut end = self.usage.believed(end);
        self.commit.take(&end);
        self.occupancy.take(&mut end);
        self.quota.take(&end);
        let seen = self.calibration.take(&mut end);
        self.guardrail.take(&end, &seen);
        self.verification.take(&mut end, &seen);
        self.metrics.take(&end, &seen);
        self.receipt.take(end, seen);
    }

    /// Takes the end of a step that gets no answer, where it has one. Returns the error for the client.
    fn fail(&self, failed: FailedStep) -> ApiError {
        if let Some(end) = failed.end {
            self.take(*end);
        }
        failed.error
    }
}

/// Parses the request, and reserves the answer from the tenant's quota.
async fn parse(
    gateway: &AppState,
    endpoint: GenerationEndpoint,
    incoming: ClientRequest,
) -> Result<ParsedRequest, ApiError> {
    gateway.policies.retries.earn(&incoming.tenant);
    let salt = gateway.isolation.salt_of(&incoming.tenant);
    let load = OffloadTask::of(&incoming);
    let request = load.run(&gateway.offload_pool, move || parse::parse(incoming, endpoint, salt)).await??;
    gateway.metrics.requests.count_stripped(request.body.stripped(&legs::leg_options(&request)));
    if let Some(reserved) = &request.incoming.token_reservation {
        reserved.take_answer(request.max_answer).await?;
    }
    Ok(request)
}

/// Identifies the request's prompt. A known conversation costs only its new part; any other prompt is tokenized as a
/// whole. The second value is the request as the engine converts it to chat, where that had to be computed.
async fn identify(
    gateway: &Arc<AppState>,
    request: ParsedRequest,
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

/// Records the duration of each pipeline stage, and gives it a span with the request's id.
struct StageTimer<'a> {
    metrics: &'a Metrics,
    request: RequestId,
    since: Instant,
}

impl<'a> StageTimer<'a> {
    fn begin(metrics: &'a Metrics, request: RequestId) -> Self {
        Self { metrics, request, since: Instant::now() }
    }

    /// Runs a stage. Its duration is recorded if it succeeds.
    async fn run<T, E>(&mut self, stage: &'static str, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let done = work.instrument(stage_span(self.request, stage)).await?;
        self.record_stage(stage);
        Ok(done)
    }

    /// Runs a stage that waits for nothing.
    fn run_now<T, E>(&mut self, stage: &'static str, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let done = stage_span(self.request, stage).in_scope(work)?;
        self.record_stage(stage);
        Ok(done)
    }

    fn record_stage(&mut self, stage: &str) {
        let now = Instant::now();
        self.metrics.plans.step.with_label_values(&[stage]).observe((now - self.since).as_secs_f64());
        self.since = now;
    }

    /// Discards the elapsed time: it belongs to no stage.
    fn skip_elapsed(&mut self) {
        self.since = Instant::now();
    }
}

/// Returns the span of one stage of a request.
fn stage_span(request: RequestId, stage: &'static str) -> Span {
    tracing::info_span!("stage", %request, stage)
}

#[cfg(test)]
mod tests;
