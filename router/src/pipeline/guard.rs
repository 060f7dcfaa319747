//! What the guardrail finds at the end of a step is put in force, and told.

use crate::gateway::Gateway;
use crate::guardrail::{Compared, Found, Step, can_be_reverted};

/// Holds a complete step of a compared session against those of the other arm. An action that is slower is switched off.
pub(crate) fn guard(gateway: &Gateway, step: &Step) {
    let Some(found) = gateway.decisions.guardrail.add(step) else { return };
    let action = step.action;
    let (Found::Slower(compared) | Found::NoLonger(compared)) = found;
    let Compared { control_sessions, own_sessions, .. } = compared;
    let [ratio, low, high] = [compared.ratio, compared.ratio_low, compared.ratio_high]
        .map(|figure| figure.map_or_else(|| "unknown".to_owned(), |figure| format!("{figure:.2}")));
    match found {
        Found::Slower(_) if can_be_reverted(action) => {
            gateway.steering.switch_off(action);
            tracing::warn!(%action, %ratio, %low, %high, own_sessions, control_sessions,
                "it makes sessions slower than the bypass does, so that it is switched off; PUT /ownerserve/v1/mode without it \
                 in `disabled` switches it on again");
        }
        Found::Slower(_) => {
            tracing::warn!(%action, %ratio, %low, %high, own_sessions, control_sessions,
                "sessions that are placed so are slower than with the bypass, and it cannot be switched off: lower \
                 rollout_percent, or set mode shadow");
        }
        Found::NoLonger(_) => {
            tracing::info!(%action, %ratio, own_sessions, control_sessions,
                "sessions that are placed so are not slower than with the bypass any more");
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
