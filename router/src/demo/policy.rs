//! The policies that the demo compares. Each is a setting of the same `serve`.

use std::fmt;

/// Who decides where a step goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// One worker after the other, decode and hybrid ones; each computes what it lacks.
    RoundRobin,
    /// A session stays where its first step went.
    SessionPinning,
    /// The planner and the ledger.
    Ownerserve,
}

impl Policy {
    /// In the order in which they run.
    pub const ALL: [Policy; 3] = [Policy::RoundRobin, Policy::SessionPinning, Policy::Ownerserve];

    /// The word in reports and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Policy::RoundRobin => "round_robin",
            Policy::SessionPinning => "session_pinning",
            Policy::Ownerserve => "ownerserve",
        }
    }

    /// What `serve` is started with, as `--set` takes it.
    pub fn settings(self) -> &'static [&'static str] {
        match self {
            Policy::RoundRobin => &["steering.mode=sticky", "steering.bypass=round_robin"],
            Policy::SessionPinning => &["steering.mode=sticky", "steering.bypass=session_pinning"],
            Policy::Ownerserve => &["steering.mode=own"],
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
