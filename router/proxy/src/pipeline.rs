//! The generation pipeline: takes one request from parsing to commit.
//!
//! Control flow, the wiring of the stages, and the order in which a request's end is recorded; each stage has a file of
//! its own.

mod batch;
mod blame;
pub mod commit;
pub mod commit_retry;
pub mod conversation_fingerprint;
pub mod dispatched;
mod end_guard;
pub mod execute;
pub(crate) mod guardrail_enforcement;
pub mod identify;
pub mod locate;
pub mod parse;
pub mod plan;
pub mod planning;
pub mod remote_prefill;
pub mod replicate;
pub mod request_end;
mod request_span;
pub mod resume;
pub mod resume_blocker;
mod resume_config;
mod resume_recording;
pub mod reverse_pull;
pub mod session_resolution;
mod step_workers;
pub mod stream;
pub mod streaming;
pub mod summary;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use axum::response::Response;
use futures::TryFutureExt as _;
use planner::{Policy, SelectionRule};
use prometheus::Histogram;
use tracing::{Instrument as _, Span};
use vocabulary::{RequestId, WorkerId};
use workers_shim::events::SharedIndex;

use crate::caches::RouterCaches;
use crate::catalog::Catalog;
use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::decisions::DecisionHistory;
use crate::error::ApiError;
use crate::ledger_access::LedgerAccess;
use crate::legs::Legs;
use crate::offload_pool::OffloadPool;
use crate::prefix_mover::PrefixMover;
use crate::request_states::ClassifiedStep;
use crate::routing::LiveRouting;
use crate::telemetry::metrics::{Metrics, PipelineMetrics};
use crate::tenant_isolation::TenantIsolation;
use crate::transfer_checker::TransferChecker;
use crate::worker_client::WorkerClient;
use blame::OutlierReporter;
use end_guard::{EndGuard, RequestEndRecorder};
use execute::ExecuteStage;
use identify::IdentifyStage;
use locate::LocateStage;
use parse::ParseStage;
use plan::{ClassifyStage, PlanStage, PlannerState};
use planning::{PlanVerdict, Planning};
use request_end::{
    CommitSink, GuardrailSink, ImplausibleUsageFilter, MetricsSink, ObservationSink, OccupancySink, PromptSink,
    QuotaSink, ReceiptSink, RequestEnd,
};
use request_span::request_span;
pub use resume_config::ResumeConfig;
use reverse_pull::ReversePullStore;
use stream::StreamStage;

/// Serves one generation request: parse, identify, locate, classify, plan, execute, stream, commit.
pub async fn serve_generation(
    pipeline: &Pipeline,
    endpoint: GenerationEndpoint,
    incoming: ClientRequest,
) -> Result<Response, ApiError> {
    let mut stages = StageTimer::begin(incoming.id);
    let seconds = &pipeline.seconds;
    let request = stages.run(&seconds.parse, parse::parse_request(&pipeline.parse, endpoint, incoming)).await?;
    let (identified, chat) = stages.run(&seconds.identify, identify::identify(&pipeline.identify, request)).await?;
    let located = stages.run(&seconds.locate, locate::locate(&pipeline.locate, identified, chat)).await?;
    let step = stages.run_now(&seconds.classify, || Ok::<_, ApiError>(plan::classify(&pipeline.classify, located)))?;
    let (ends, reporter) = (&pipeline.ends, &pipeline.stream.reporter);
    let mut planning = EndGuard::new(Planning::first(step), ends);
    loop {
        let plan = |step: &ClassifiedStep, excluded: &[WorkerId]| plan::plan(&pipeline.plan, step, excluded);
        let verdict = stages
            .run_now(&seconds.plan, || planning.take().plan(&pipeline.plan, plan).map_err(|it| it.record(ends)))?;
        let dispatched = match verdict {
            PlanVerdict::Start(dispatched) => EndGuard::new(*dispatched, ends),
            PlanVerdict::Wait(held) => {
                let guard = EndGuard::new(*held, ends);
                guard.wait_for_turn().await;
                let again = |step: ClassifiedStep| {
                    plan::classify(&pipeline.classify, locate::locate_waiting(&pipeline.locate, step.located))
                };
                planning = EndGuard::new(guard.take().classified_again(again), ends);
                stages.skip_elapsed();
                continue;
            }
        };
        let (step, plan) = (&dispatched.step, &dispatched.planned.plan);
        commit::announce(&pipeline.execute.ledger, step, plan);
        let executed = execute::execute(&pipeline.execute, (step, plan), Legs::of(&pipeline.execute.client, step));
        match stages.run(&seconds.execute, executed).await {
            Ok(started) => {
                let (opened, streaming) = dispatched.take().started(reporter, started);
                let summary = summary::summary(&streaming);
                // The stream commits the step when it ends.
                let response = stream::stream(&pipeline.stream, opened, streaming, stages.span);
                return Ok(summary::with_summary(response, summary));
            }
            Err(failed) => {
                let failed = dispatched.take().failed(reporter, failed);
                planning = EndGuard::new(failed.map_err(|failed| failed.record(ends))?, ends);
            }
        }
    }
}

/// The stages of a request, in order, and the sinks of its end. Only this type sees all stages.
#[derive(Debug)]
pub struct Pipeline {
    parse: ParseStage,
    identify: IdentifyStage,
    pub(crate) locate: Arc<LocateStage>,
    pub(crate) classify: ClassifyStage,
    pub(crate) plan: Arc<PlanStage>,
    execute: Arc<ExecuteStage>,
    stream: Arc<StreamStage>,
    ends: Arc<dyn RequestEndRecorder>,
    seconds: StageSeconds,
}

/// Durations of the stages that a request waits for. Looked up once: a label costs as much as the observation.
#[derive(Debug)]
struct StageSeconds {
    parse: Histogram,
    identify: Histogram,
    locate: Histogram,
    classify: Histogram,
    plan: Histogram,
    execute: Histogram,
}

impl StageSeconds {
    fn of(plans: &PipelineMetrics) -> Self {
        let stage = |name: &str| plans.stage_seconds.with_label_values(&[name]);
        Self {
            parse: stage("parse"),
            identify: stage("identify"),
            locate: stage("locate"),
            classify: stage("classify"),
            plan: stage("plan"),
            execute: stage("execute"),
        }
    }
}

/// The handles that a request needs.
pub struct PipelineParts<'a> {
    /// The ledger.
    pub ledger: LedgerAccess,
    /// Client to the workers.
    pub workers: WorkerClient,
    /// What keeps tenants apart.
    pub isolation: TenantIsolation,
    /// The planner's policy, occupancy, outliers, retries and prefix replication.
    pub policies: &'a PlannerState,
    /// The rule for steps that the planner does not route.
    pub bypass: SelectionRule,
    /// Which broken streams resume at another worker.
    pub resume: ResumeConfig,
    /// The models.
    pub catalog: Arc<Catalog>,
    /// Which worker holds which blocks.
    pub index: SharedIndex,
    /// Caches of client data.
    pub caches: &'a RouterCaches,
    /// Receipts, predictions, the guardrail and transfer checks.
    pub decisions: Arc<DecisionHistory>,
    /// Mode and rollout.
    pub routing: Arc<LiveRouting>,
    /// Checks transfers.
    pub checker: TransferChecker,
    /// Moves prefixes.
    pub mover: PrefixMover,
    /// Runs long computations.
    pub offload_pool: Arc<OffloadPool>,
    /// All metrics, of which each stage takes its own.
    pub metrics: &'a Metrics,
}

impl Pipeline {
    /// Connects the stages.
    pub fn new(parts: PipelineParts<'_>) -> Self {
        let PipelineParts { ledger, workers, isolation, policies, caches, decisions, routing, metrics, .. } = &parts;
        let ends: Arc<dyn RequestEndRecorder> = Arc::new(RequestEndSinks::new(&parts));
        let locate = Arc::new(LocateStage {
            ledger: ledger.clone(),
            fleet: workers.fleet().clone(),
            index: parts.index.clone(),
            drift: caches.prefix_cache.tokenizer_drift.clone(),
            offload_pool: parts.offload_pool.clone(),
        });
        let plan = Arc::new(PlanStage {
            planner: policies.planner_policy().clone(),
            bypass: Policy { policy: parts.bypass, ..Policy::clone(policies.planner_policy()) },
            round_robin: AtomicU64::new(0),
            occupancy: policies.occupancy().clone(),
            outliers: policies.outliers.clone(),
            client: workers.clone(),
            isolation: isolation.clone(),
            retries: policies.retries.clone(),
            requests: metrics.requests.clone(),
            admission_wait: metrics.decisions.admission_wait.clone(),
        });
        let execute = Arc::new(ExecuteStage {
            client: workers.clone(),
            mover: parts.mover.clone(),
            reverse_pulls: ReversePullStore::default(),
            prompts: caches.prompts.clone(),
            pull_outcomes: metrics.plans.kv_movement.reverse_pulls.clone(),
            ledger: ledger.clone(),
        });
        let stream = Arc::new(StreamStage {
            client: workers.clone(),
            responses: caches.responses.clone(),
            offload_pool: parts.offload_pool.clone(),
            requests: metrics.requests.clone(),
            reporter: OutlierReporter { outliers: policies.outliers.clone(), isolation: isolation.clone() },
            ends: ends.clone(),
            locate: locate.clone(),
            plan: plan.clone(),
            execute: execute.clone(),
        });
        Self {
            parse: ParseStage {
                isolation: isolation.clone(),
                offload_pool: parts.offload_pool.clone(),
                retries: policies.retries.clone(),
                requests: metrics.requests.clone(),
                bodies: caches.prefix_cache.bodies.clone(),
            },
            identify: IdentifyStage {
                catalog: parts.catalog.clone(),
                prefix_cache: caches.prefix_cache.clone(),
                checkpoints: caches.checkpoints.clone(),
                offload_pool: parts.offload_pool.clone(),
                identified: metrics.shared_cache.identified.clone(),
            },
            locate,
            classify: ClassifyStage {
                planner: policies.planner_policy().clone(),
                occupancy: policies.occupancy().clone(),
                routing: routing.clone(),
                transfer_checks: decisions.transfer_checks.clone(),
                resume: parts.resume,
            },
            plan,
            execute,
            stream,
            ends,
            seconds: StageSeconds::of(&metrics.plans),
        }
    }
}

/// Every sink that takes the end of a request, in the order in which they run:
///
/// 1. `usage` drops implausible usage, which every other sink reads.
/// 2. `commit` runs early, because the session's next step has to find it: a client may send one after the last event.
/// 3. `occupancy` and `quota` give back what the request had reserved. They read only the end.
/// 4. `observation` judges the workers that failed, and makes the observation that all later sinks read.
/// 5. `guardrail` compares that observation.
/// 6. `prompt` moves token ids and block hashes out of the step, so it runs after all that read them.
/// 7. `metrics` counts.
/// 8. `receipt` comes last: it consumes the end, and with it the guards of load and trials.
#[derive(Debug)]
pub struct RequestEndSinks {
    usage: ImplausibleUsageFilter,
    commit: CommitSink,
    occupancy: OccupancySink,
    quota: QuotaSink,
    observation: ObservationSink,
    guardrail: GuardrailSink,
    prompt: PromptSink,
    metrics: MetricsSink,
    receipt: ReceiptSink,
}

impl RequestEndSinks {
    /// Connects the sinks.
    fn new(parts: &PipelineParts<'_>) -> Self {
        let PipelineParts { ledger, workers, isolation, policies, caches, decisions, metrics, .. } = parts;
        let (fleet, plans) = (workers.fleet(), &metrics.plans);
        Self {
            usage: ImplausibleUsageFilter { implausible: metrics.requests.implausible_usage.clone() },
            commit: CommitSink {
                ledger: ledger.clone(),
                fleet: fleet.clone(),
                hand_in_seconds: plans.stage_seconds.with_label_values(&["commit"]),
            },
            occupancy: OccupancySink,
            quota: QuotaSink,
            observation: ObservationSink {
                reporter: OutlierReporter { outliers: policies.outliers.clone(), isolation: isolation.clone() },
                drift: caches.prefix_cache.tokenizer_drift.clone(),
                fleet: fleet.clone(),
                index: parts.index.clone(),
                calibration: decisions.calibration.clone(),
                metrics: metrics.decisions.clone(),
            },
            guardrail: GuardrailSink { guardrail: decisions.guardrail.clone(), routing: parts.routing.clone() },
            prompt: PromptSink {
                checker: parts.checker.clone(),
                replicator: policies.prefix_replication.clone(),
                prompts: caches.prompts.clone(),
                metrics: plans.kv_movement.clone(),
            },
            metrics: MetricsSink::new(metrics.requests.clone(), plans.clone(), fleet.clone()),
            receipt: ReceiptSink { decisions: decisions.clone(), shared_cache: caches.shared_cache.clone() },
        }
    }
}

impl RequestEndRecorder for RequestEndSinks {
    /// Runs on the caller's thread: a session's next step has to find the commit handed in.
    fn record(&self, end: RequestEnd) {
        // A request that nobody waits for any more ends outside of its span.
        let is_outside = Span::current().is_none();
        let span = is_outside.then(|| request_span(end.step.located.identified.request.incoming.id));
        let _entered = span.map(Span::entered);
        let mut end = self.usage.without_implausible(end);
        self.commit.record(&end);
        self.occupancy.record(&mut end);
        self.quota.record(&end);
        let observation = self.observation.record(&mut end);
        self.guardrail.record(&end, &observation);
        self.prompt.record(&mut end, &observation);
        self.metrics.record(&end, &observation);
        self.receipt.record(end, observation);
    }
}

/// Records the duration of each pipeline stage, and runs it in the request's span.
struct StageTimer {
    span: Span,
    start: Instant,
}

impl StageTimer {
    fn begin(request: RequestId) -> Self {
        Self { span: request_span(request), start: Instant::now() }
    }

    /// Runs a stage. Its duration is recorded if it succeeds. No `async fn`: it would hold the stage's future twice.
    fn run<T, E>(
        &mut self,
        seconds: &Histogram,
        work: impl Future<Output = Result<T, E>>,
    ) -> impl Future<Output = Result<T, E>> {
        work.instrument(self.span.clone()).inspect_ok(move |_| self.record(seconds))
    }

    /// Runs a stage that waits for nothing.
    fn run_now<T, E>(&mut self, seconds: &Histogram, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let done = self.span.in_scope(work)?;
        self.record(seconds);
        Ok(done)
    }

    fn record(&mut self, seconds: &Histogram) {
        let now = Instant::now();
        seconds.observe((now - self.start).as_secs_f64());
        self.start = now;
    }

    /// Discards the elapsed time: it belongs to no stage.
    fn skip_elapsed(&mut self) {
        self.start = Instant::now();
    }
}

#[cfg(test)]
mod tests;
