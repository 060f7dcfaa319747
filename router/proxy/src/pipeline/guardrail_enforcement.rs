//! Acts on the guardrail's findings at the end of a step: disables actions, and logs.

use crate::guardrail::{ArmComparisonReport, Guardrail, GuardrailEvent, StepSample, can_be_disabled};
use crate::routing::LiveRouting;

/// Adds a complete step of a compared session to the guardrail's comparison, and disables an action that proved slower.
pub(crate) fn enforce_guardrail(guardrail: &Guardrail, routing: &LiveRouting, step: &StepSample) {
    let Some(found) = guardrail.add(step) else { return };
    let action = step.action;
    let (GuardrailEvent::Slower(compared) | GuardrailEvent::Recovered(compared)) = found;
    let ArmComparisonReport { control_sessions, treatment_sessions, .. } = compared;
    let [ratio, low, high] = [compared.ttft_ratio, compared.ttft_ratio_lower, compared.ttft_ratio_upper]
        .map(|figure| figure.map_or_else(|| "unknown".to_owned(), |figure| format!("{figure:.2}")));
    match found {
        GuardrailEvent::Slower(_) if can_be_disabled(action) => {
            routing.disable(action);
            tracing::warn!(%action, %ratio, %low, %high, treatment_sessions, control_sessions,
                "it makes sessions slower than the bypass does, so that it is disabled; PUT /ownerserve/v1/routing without it in \
                 `disabled_actions` enables it again");
        }
        GuardrailEvent::Slower(_) => {
            tracing::warn!(%action, %ratio, %low, %high, treatment_sessions, control_sessions,
                "the action makes sessions slower than the bypass does, and it cannot be disabled: lower \
                 rollout_percent, or set mode shadow");
        }
        GuardrailEvent::Recovered(_) => {
            tracing::info!(%action, %ratio, treatment_sessions, control_sessions,
                "the action no longer makes sessions slower than the bypass does");
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
