//! `/ownerserve/v1/guardrail`: compares each action with the bypass, and lists actions disabled because of it.

use axum::Json;
use axum::extract::State;
use planner::Action;
use serde::Serialize;
use utoipa::ToSchema;

use super::sources::RoutingSources;
use proxy::guardrail::{ArmComparisonReport, can_be_disabled};
use proxy::routing::Percent;

/// How sessions are compared.
#[derive(Serialize, ToSchema)]
pub(super) struct GuardrailStatus {
    /// Percentage of sessions that the bypass serves for comparison; 0 compares nothing.
    #[schema(value_type = u8, maximum = 50)]
    control_percent: Percent,
    /// The comparison of each action.
    actions: Vec<ActionGuardrailStatus>,
}

/// Comparison of one action with the bypass, over steps for which the planner chose it.
#[derive(Serialize, ToSchema)]
struct ActionGuardrailStatus {
    /// The action, as `artifact_fetch`.
    #[schema(value_type = String)]
    action: Action,
    #[serde(flatten)]
    compared: ArmComparisonReport,
    /// Whether it is disabled when it is slower; other actions only raise an alarm.
    can_be_disabled: bool,
    /// Whether it was disabled because it is slower, and still is.
    disabled: bool,
}

/// Returns whether an action is disabled because it was slower.
pub(super) fn is_disabled(routing: &RoutingSources, action: Action, compared: &ArmComparisonReport) -> bool {
    let is_off = routing.live.get().disabled.contains(action);
    compared.slower_since.is_some() && can_be_disabled(action) && is_off
}

/// How each action compares with the bypass, over this router's sessions since it started.
///
/// `PUT /ownerserve/v1/routing` with `disabled_actions` that lack an action enables it again, and its comparison begins anew.
#[utoipa::path(get, path = "/ownerserve/v1/guardrail", tag = "routing",
    responses((status = 200, description = "The comparison of every action.", body = GuardrailStatus)))]
pub(super) async fn guardrail(State(routing): State<RoutingSources>) -> Json<GuardrailStatus> {
    let line = |action| {
        let compared = routing.guardrail.of(action);
        let disabled = is_disabled(&routing, action, &compared);
        ActionGuardrailStatus { action, compared, can_be_disabled: can_be_disabled(action), disabled }
    };
    let control_percent = routing.live.get().control_percent;
    Json(GuardrailStatus { control_percent, actions: Action::ALL.into_iter().map(line).collect() })
}

/// Describes each slower action: its reason in `/readyz`, and what it means.
pub(super) fn slower_action_details(routing: &RoutingSources) -> impl Iterator<Item = (&'static str, String)> {
    routing.guardrail.slower_actions().into_iter().map(|(action, compared)| {
        let ArmComparisonReport { treatment_sessions, control_sessions, .. } = compared;
        let figures = match (compared.ttft_ratio, compared.ttft_ratio_lower, compared.ttft_ratio_upper) {
            (Some(ratio), Some(low), Some(high)) => format!(
                "first tokens take {ratio:.2} times as long with it ({low:.2} to {high:.2}; {treatment_sessions} sessions, \
                 {control_sessions} of the control group)"
            ),
            _ => format!("{treatment_sessions} sessions of the last day, {control_sessions} of the control group, are too few to say more"),
        };
        if can_be_disabled(action) {
            let then = format!("it is disabled until `disabled_actions` of PUT /ownerserve/v1/routing lacks {action}");
            ("action_disabled", format!("{action} made sessions slower than the bypass does: {figures}; {then}"))
        } else {
            let then = "it cannot be disabled: lower rollout_percent, or set mode shadow";
            ("placement_slower", format!("{action} makes sessions slower than the bypass does: {figures}; {then}"))
        }
    })
}
