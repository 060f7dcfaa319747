//! Policies compared by the demo. Each is a setting of the same `serve`.

/// Who decides where a step goes, in the order in which they run.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum, strum::Display, strum::IntoStaticStr, strum::VariantArray,
)]
#[value(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ComparedPolicy {
    /// One worker after the other, decode and hybrid ones; each computes what it lacks.
    RoundRobin,
    /// A session stays where its first step went.
    SessionPinning,
    /// The planner and the ledger.
    Ownerserve,
}

impl ComparedPolicy {
    /// Settings for `serve`, in the syntax of `--set`.
    pub fn settings(self) -> &'static [&'static str] {
        match self {
            ComparedPolicy::RoundRobin => &["routing.mode=bypass", "routing.fallback_policy=round_robin"],
            ComparedPolicy::SessionPinning => &["routing.mode=bypass", "routing.fallback_policy=session_pinning"],
            ComparedPolicy::Ownerserve => &["routing.mode=active"],
        }
    }
}
