//! Counts the request and the result of its plan.

use std::sync::Arc;

use prometheus::{Histogram, IntCounter};
use vocabulary::{Bytes, Tokens};
use workers_shim::fleet::Fleet;

use super::RequestEnd;
use crate::receipt::{RequestOutcome, StepObservation};
use crate::telemetry::metrics::{PipelineMetrics, RequestMetrics};

/// Updates the metrics of requests and plans.
#[derive(Debug)]
pub(in crate::pipeline) struct MetricsSink {
    requests: RequestMetrics,
    plans: PipelineMetrics,
    fleet: Arc<Fleet>,
    /// Of `plans`, looked up once: the duration of stage `stream`, and the prompt tokens by source.
    stream_seconds: Histogram,
    prompt_tokens: PromptTokenCounters,
}

#[derive(Debug)]
struct PromptTokenCounters {
    cached: IntCounter,
    computed: IntCounter,
    transferred: IntCounter,
}

impl MetricsSink {
    /// Creates a sink that updates these metrics.
    pub(in crate::pipeline) fn new(requests: RequestMetrics, plans: PipelineMetrics, fleet: Arc<Fleet>) -> Self {
        let tokens = |source: &str| plans.prompt_tokens.with_label_values(&[source]);
        let prompt_tokens = PromptTokenCounters {
            cached: tokens("cached"),
            computed: tokens("computed"),
            transferred: tokens("transferred"),
        };
        let stream_seconds = plans.stage_seconds.with_label_values(&["stream"]);
        Self { requests, plans, fleet, stream_seconds, prompt_tokens }
    }

    pub(in crate::pipeline) fn record(&self, end: &RequestEnd, observation: &StepObservation) {
        if let Some(at) = end.answer.first_byte {
            let duration = end.ended_at.saturating_duration_since(at);
            self.stream_seconds.observe(duration.as_secs_f64());
        }
        // The client left while the step was queued, so nothing was executed.
        if end.attempts.is_empty() {
            return;
        }
        let (plan, located) = (&end.planned.plan, &end.step.located);
        let kind = end.step.kind.as_str();
        if let Some(ttft) = observation.ttft {
            self.requests.first_token.with_label_values(&[kind]).observe(ttft.duration().as_secs_f64());
            // Observed only beside a measured value, so that the two can be compared.
            if let Some(predicted) = observation.predicted_ttft {
                self.plans.predicted.observe(predicted.duration().as_secs_f64());
            }
        }
        self.plans.actions.with_label_values(&[plan.action.as_str()]).inc();
        self.plans.kinds.with_label_values(&[kind]).inc();
        if let Some(owner) = located.session.owner {
            self.plans.owner_lookups.inc();
            self.plans.owner_hits.inc_by(u64::from(owner.worker == plan.target()));
        }
        for event in end.attempts.iter().flat_map(|attempt| &attempt.events) {
            self.plans.fallback.with_label_values(&[event.as_ref()]).inc();
        }
        if end.is_converted_by_guess(&self.fleet) {
            self.plans.fallback.with_label_values(&["unverified_conversion"]).inc();
        }
        if let Some(reason) = located.identified.fallback_reason() {
            self.plans.fallback.with_label_values(&[reason.as_ref()]).inc();
        }
        if end.outcome == RequestOutcome::Complete {
            self.count_tokens(end, observation);
        }
    }

    fn count_tokens(&self, end: &RequestEnd, observation: &StepObservation) {
        let plans = &self.plans;
        let prompt = end.step.request.prompt_tokens;
        let transferred = transferred_tokens(end);
        let cached = (observation.cached_tokens.unwrap_or(observation.predicted_cached_tokens) - transferred)
            .min(prompt - transferred);
        let computed = prompt - cached - transferred;
        self.prompt_tokens.cached.inc_by(cached.0);
        self.prompt_tokens.computed.inc_by(computed.0);
        self.prompt_tokens.transferred.inc_by(transferred.0);
        plans.overlap.observe(cached.0 as f64);
        plans.completion_tokens.inc_by(observation.output_tokens.unwrap_or_default().0);
        plans.moved_bytes.inc_by(observation.transferred_bytes.0);
    }
}

/// Prompt tokens whose KV came from another worker, as planned.
fn transferred_tokens(end: &RequestEnd) -> Tokens {
    let Bytes(token) = end.step.located.identified.model.kv_bytes_per_token;
    Tokens(end.planned_transfer_bytes().0 / token.max(1)).min(end.step.request.prompt_tokens)
}
