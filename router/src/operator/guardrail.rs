//! `/ownerserve/v1/guardrail`: compares each action with the bypass, and lists actions disabled because of it.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use planner::Action;
use serde::Serialize;
use utoipa::ToSchema;

use crate::app_state::AppState;
use crate::guardrail::{ComparisonReport, can_be_disabled};
use crate::pipeline::routing::Percent;

/// How sessions are compared.
#[derive(Serialize, ToSchema)]
pub(super) struct GuardrailStatus {
    /// The share of sessions that the bypass serves so that others can be compared with them; 0 compares nothing.
    #[schema(value_type = u8, maximum = 50)]
    control_percent: Percent,
    /// Each action once.
    actions: Vec<ActionGuardrail>,
}

/// One action beside the bypass, over steps for which the planner chose it.
#[derive(Serialize, ToSchema)]
struct ActionGuardrail {
    /// As `artifact_fetch`.
    #[schema(value_type = String)]
    action: Action,
    #[serde(flatten)]
    compared: ComparisonReport,
    /// Whether it is switched off when it is slower; others are told as an alarm.
    can_be_reverted: bool,
    /// Whether it was switched off because it is slower, and still is off.
    reverted: bool,
}

/// Returns whether an action is disabled because it was slower.
pub(super) fn is_reverted(gateway: &AppState, action: Action, compared: &ComparisonReport) -> bool {
    let is_off = gateway.routing.get().disabled.contains(action);
    compared.slower_since_unix_ms.is_some() && can_be_disabled(action) && is_off
}

/// How each action compares with the bypass, over this router's sessions since it started.
///
/// `PUT /ownerserve/v1/mode` with a `disabled` that lacks an action switches it on again, and its comparison begins anew.
#[utoipa::path(get, path = "/ownerserve/v1/guardrail", tag = "steering",
    responses((status = 200, description = "The comparison of every action.", body = GuardrailStatus)))]
pub(super) async fn guardrail(State(gateway): State<Arc<AppState>>) -> Json<GuardrailStatus> {
    let line = |action| {
        let compared = gateway.decisions.guardrail.of(action);
        let reverted = is_reverted(&gateway, action, &compared);
        ActionGuardrail { action, compared, can_be_reverted: can_be_disabled(action), reverted }
    };
    let control_percent = gateway.routing.get().control_percent;
    Json(GuardrailStatus { control_percent, actions: Action::ALL.into_iter().map(line).collect() })
}

/// Describes each slower action: its cause for `/readyz`, and what it means.
pub(super) fn reverted_action_details(gateway: &AppState) -> impl Iterator<Item = (&'static str, String)> {
    gateway.decisions.guardrail.slower_actions().into_iter().map(|(action, compared)| {
        let ComparisonReport { own_sessions, control_sessions, .. } = compared;
        let figures = match (compared.ratio, compared.ratio_low, compared.ratio_high) {
            (Some(ratio), Some(low), Some(high)) => format!(
                "first tokens take {ratio:.2} times as long with it ({low:.2} to {high:.2}; {own_sessions} sessions, \
                 {control_sessions} of the control group)"
            ),
            _ => format!("{own_sessions} sessions of the last day, {control_sessions} of the control group, are too few to say more"),
        };
        if can_be_disabled(action) {
            let then = format!("it is switched off until `disabled` of PUT /ownerserve/v1/mode lacks {action}");
            ("action_slower", format!("{action} made sessions slower than the bypass does: {figures}; {then}"))
        } else {
            let then = "it cannot be switched off: lower rollout_percent, or set mode shadow";
            ("placement_slower", format!("{action} makes sessions slower than the bypass does: {figures}; {then}"))
        }
    })
}
