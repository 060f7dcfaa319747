//! Filter for decisions.

use planner::{Action, StepKind};
use serde::Deserialize;
use vocabulary::{Micros, ModelId, RequestId, SessionId, TenantId, WorkerId};

use super::record::{ReplayAttempt, ReplayLookup};
use crate::receipt::{self, Attempt, Receipt, RequestOutcome, rfc3339};
use vocabulary::RoutingMode;

/// Conditions on a decision; `None` matches anything.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DecisionFilter {
    /// Id of the request.
    pub request: Option<RequestId>,
    /// Session of the step.
    pub session: Option<SessionId>,
    /// Tenant that sent it.
    pub tenant: Option<TenantId>,
    /// Model that it asked for.
    pub model: Option<ModelId>,
    /// Routing mode at the time.
    pub mode: Option<RoutingMode>,
    /// Kind of the step.
    pub step: Option<StepKind>,
    /// Action that served the step.
    pub action: Option<Action>,
    /// Worker in one of its legs.
    pub worker: Option<WorkerId>,
    /// How the request ended.
    pub outcome: Option<RequestOutcome>,
    /// Earliest arrival, in milliseconds since 1970.
    pub since: Option<u64>,
    /// Latest arrival, in milliseconds since 1970.
    pub until: Option<u64>,
    /// Minimum time to first token, exclusive; or total time if there was no first token (not streamed, or no
    /// response).
    pub slower_than: Option<Micros>,
}

/// Receipt fields that filters look at, in memory or on disk.
#[derive(Deserialize, Debug)]
pub(crate) struct ReceiptFields {
    pub(crate) request_id: RequestId,
    #[serde(with = "rfc3339")]
    pub(crate) arrived_at: u64,
    tenant: TenantId,
    model: ModelId,
    lookup: ReplayLookup,
    mode: RoutingMode,
    decision: Option<DecisionFields>,
    attempts: Vec<ReplayAttempt>,
    observed: Option<ObservationFields>,
}

#[derive(Deserialize, Debug)]
struct DecisionFields {
    step_kind: StepKind,
}

#[derive(Deserialize, Debug)]
struct ObservationFields {
    outcome: RequestOutcome,
    #[serde(with = "vocabulary::optional_micros_with_unit")]
    ttft: Option<Micros>,
    #[serde(with = "vocabulary::micros_with_unit")]
    duration: Micros,
}

impl ObservationFields {
    /// Time until the client had something to read.
    fn perceived_latency(&self) -> Micros {
        self.ttft.unwrap_or(self.duration)
    }
}

impl From<&Receipt> for ReceiptFields {
    fn from(receipt: &Receipt) -> Self {
        let tried = |attempt: &Attempt| ReplayAttempt { action: attempt.action, legs: attempt.legs.clone() };
        Self {
            request_id: receipt.request_id,
            arrived_at: receipt.arrived_at,
            tenant: receipt.tenant.clone(),
            model: receipt.model.clone(),
            lookup: ReplayLookup { session_id: receipt.lookup.session_id },
            mode: receipt.mode,
            decision: receipt.decision.as_ref().map(|decision| DecisionFields { step_kind: decision.step_kind }),
            attempts: receipt.attempts.last().map(tried).into_iter().collect(),
            observed: receipt.observed.map(|receipt::StepObservation { outcome, ttft, duration, .. }| {
                ObservationFields { outcome, ttft, duration }
            }),
        }
    }
}

fn is<T: PartialEq>(wanted: Option<&T>, is: Option<&T>) -> bool {
    wanted.is_none_or(|wanted| is == Some(wanted))
}

impl DecisionFilter {
    /// Returns whether a decision that arrived in this range, both ends included, can match.
    pub(super) fn may_match(&self, first: u64, last: u64) -> bool {
        self.since.is_none_or(|since| since <= last) && self.until.is_none_or(|until| first <= until)
    }

    /// Returns whether a decision matches.
    pub(crate) fn matches(&self, facts: &ReceiptFields) -> bool {
        let (served, seen) = (facts.attempts.last(), facts.observed.as_ref());
        is(self.request.as_ref(), Some(&facts.request_id))
            && is(self.session.as_ref(), Some(&facts.lookup.session_id))
            && is(self.tenant.as_ref(), Some(&facts.tenant))
            && is(self.model.as_ref(), Some(&facts.model))
            && is(self.mode.as_ref(), Some(&facts.mode))
            && is(self.step.as_ref(), facts.decision.as_ref().map(|decision| &decision.step_kind))
            && is(self.action.as_ref(), served.map(|served| &served.action))
            && self.worker.is_none_or(|worker| served.is_some_and(|by| by.legs.iter().any(|leg| leg.worker == worker)))
            && is(self.outcome.as_ref(), seen.map(|seen| &seen.outcome))
            && self.may_match(facts.arrived_at, facts.arrived_at)
            && self.slower_than.is_none_or(|span| seen.is_some_and(|seen| seen.perceived_latency() > span))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::receipt::testing::receipt;

    /// Fields of a receipt with this observation, as read from disk.
    fn fields_with_observation(seen: serde_json::Value) -> ReceiptFields {
        let mut line = serde_json::to_value(receipt(1)).unwrap();
        line["observed"] = seen;
        serde_json::from_value(line).unwrap()
    }

    #[test]
    fn slower_than_uses_total_time_for_answers_that_did_not_stream() {
        let slower = |facts: &ReceiptFields, span| {
            DecisionFilter { slower_than: Some(Micros(span)), ..DecisionFilter::default() }.matches(facts)
        };
        let streamed = fields_with_observation(json!({"outcome": "complete", "ttft": "100us", "duration": "900us"}));
        assert_eq!([99, 100, 500].map(|span| slower(&streamed, span)), [true, false, false]);
        let whole = fields_with_observation(json!({"outcome": "complete", "ttft": null, "duration": "900us"}));
        assert_eq!([100, 899, 900].map(|span| slower(&whole, span)), [true, true, false]);
        let failed = fields_with_observation(json!({"outcome": "failed", "ttft": null, "duration": "900us"}));
        assert_eq!([899, 900].map(|span| slower(&failed, span)), [true, false]);
        assert!(!slower(&fields_with_observation(json!(null)), 0));
    }
}
