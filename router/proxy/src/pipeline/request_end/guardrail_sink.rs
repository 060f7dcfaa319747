//! Adds the step to the guardrail's comparison of the planner's actions with the bypass.

use std::sync::Arc;

use super::RequestEnd;
use crate::guardrail::{Guardrail, StepSample};
use crate::pipeline::guardrail_enforcement::enforce_guardrail;
use crate::receipt::{RequestOutcome, StepObservation, unix_ms};
use crate::routing::LiveRouting;

/// Compares steps, and disables an action that proved slower.
#[derive(Debug)]
pub(in crate::pipeline) struct GuardrailSink {
    pub(in crate::pipeline) guardrail: Arc<Guardrail>,
    pub(in crate::pipeline) routing: Arc<LiveRouting>,
}

impl GuardrailSink {
    /// Adds the step of a compared session. It counts for the action that was chosen first: that it failed and was
    /// replaced is part of its effect on the session.
    pub(in crate::pipeline) fn record(&self, end: &RequestEnd, observation: &StepObservation) {
        let (Some(arm), Some(action)) = (end.step.arm, end.first_action) else { return };
        if end.outcome != RequestOutcome::Complete {
            return;
        }
        let session = end.step.located.affinity_key;
        // No action is to blame for the wait.
        let latency = observation.ttft.unwrap_or(observation.duration) - end.admission_time();
        let sample = StepSample { action, session, arm, latency, at_unix_ms: unix_ms() };
        enforce_guardrail(&self.guardrail, &self.routing, &sample);
    }
}
