//! The mode of routing.

use serde::{Deserialize, Serialize};
use strum::AsRefStr;

/// Who decides where a step goes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default, AsRefStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
pub enum RoutingMode {
    /// Plans are made and recorded; the fallback policy routes.
    Shadow,
    /// The fallback policy routes; nothing is planned and the ledger is not asked.
    Bypass,
    /// The planner routes.
    #[default]
    Active,
}
