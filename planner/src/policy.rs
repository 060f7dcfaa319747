//! Prices and switches of a deployment.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::{KvIndexState, Micros, Tokens};

use crate::{Action, AdmissionLimits, Thresholds};

/// Who chooses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum SelectionRule {
    /// The planner: the cheapest candidate.
    #[default]
    Own,
    /// Baseline: one leg, each decode-capable worker in turn.
    RoundRobin,
    /// Baseline and bypass: one leg, always at the same worker for a session while that worker is there.
    SessionPinning,
    /// Baseline: one leg, highest share of the prompt found minus relative load.
    MatchRateMinusLoad,
}

impl SelectionRule {
    /// The word for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// How the planner chooses. Weights that are negative or not finite count as zero.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Who chooses.
    #[default(SelectionRule::Own)]
    pub rule: SelectionRule,
    /// Where kinds of step begin.
    pub thresholds: Thresholds,
    /// Actions that are switched off. Colocated prefill cannot be: every step must be servable.
    pub disabled: Vec<Action>,
    /// `lambda`: microseconds for each MiB of device memory taken from others.
    #[default(200.0)]
    pub lambda: f64,
    /// `mu`: microseconds of price for each microsecond that answers, and prompts that come later, lose at the worker that answers.
    /// Where a prompt holds them up for long it tends to one, and what they lose at a handoff's source, and when they come back
    /// for what was pushed out, counts in full, with a `mu` of 0 as well.
    #[default(0.3)]
    pub mu: f64,
    /// Microseconds of price for each microsecond that others will spend on computing again what a step pushes out of
    /// device memory.
    #[default(0.7)]
    pub eviction: f64,
    /// The most that a session is expected to add where it is new, beyond the step itself; what it is expected to add is learnt.
    #[default(Tokens(35_000))]
    pub growth: Tokens,
    /// What transfers may take beyond their link's time.
    pub transfer: TransferRisk,
    /// When a source of a replicate sends.
    pub sources: SendTiming,
    /// How much of what is only believed counts.
    pub trust: ResidencyConfidence,
    /// When an owner is overloaded.
    pub overload: OverloadThresholds,
    /// What lies below device memory.
    pub tiers: LowerTiers,
    /// When steps wait rather than push out others' KV.
    pub admission: AdmissionLimits,
    /// Prefill rate of a worker whose rate is unknown, in tokens a second.
    #[default(2_000.0)]
    pub unknown_prefill_tokens_per_second: f64,
    /// Context at which a token costs twice as much to compute as the first one does; 0 takes every token as equal.
    pub attention_doubles_at: Tokens,
}

impl Policy {
    /// Whether `action` is switched on.
    pub fn allows(&self, action: Action) -> bool {
        action == Action::ColocatedPrefill || !self.disabled.contains(&action)
    }
}

/// What transfers may take beyond their link's time: links have queues of their own that nobody tells of.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct TransferRisk {
    /// Of any transfer.
    #[default(Micros(100_000))]
    pub fixed: Micros,
    /// Share of the time that the bytes take.
    #[default(0.5)]
    pub share: f64,
}

/// When a source sends what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum SendTiming {
    /// In a request of its own, which waits for its turn there.
    #[default]
    InTurn,
    /// At once, whatever it is doing.
    AtOnce,
}

/// The share of believed blocks that is expected to be found, by what is known of the worker. 0 to 1.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct ResidencyConfidence {
    /// Events were lost and not yet made good.
    #[default(0.9)]
    pub degraded: f64,
    /// Guessed from routing, ownership or another router's intent.
    #[default(0.8)]
    pub fallback: f64,
}

impl ResidencyConfidence {
    /// The share that counts for a worker of that knowledge; what is not between 0 and 1 counts as 0.
    pub fn share(&self, knowledge: KvIndexState) -> f64 {
        let share = match knowledge {
            KvIndexState::Exact => return 1.0,
            KvIndexState::Degraded => self.degraded,
            KvIndexState::Fallback => self.fallback,
        };
        if (0.0..=1.0).contains(&share) { share } else { 0.0 }
    }
}

/// Marks above which a session is moved away from its owner rather than lent.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct OverloadThresholds {
    /// Time that a step would wait there.
    #[default(Micros(2_000_000))]
    pub queue: Micros,
    /// KV blocks in use, 0 to 1.
    #[default(0.95)]
    pub kv_usage: f64,
}

/// What lies below device memory, and how fast blocks come back from there.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct LowerTiers {
    /// What a worker's host memory holds of what was evicted, in tokens; 0 where nothing falls into it.
    pub host_tokens: Tokens,
    /// From host memory.
    #[default(20e9)]
    pub host_bytes_per_second: f64,
    /// From disk or a shared store.
    #[default(3e9)]
    pub disk_bytes_per_second: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colocated_prefill_cannot_be_disabled() {
        let policy = Policy { disabled: Action::ALL.to_vec(), ..Policy::default() };
        assert!(policy.allows(Action::ColocatedPrefill));
        assert!(Action::ALL[1..].iter().all(|action| !policy.allows(*action)));
    }

    #[test]
    fn unknown_policy_field_is_rejected_and_missing_ones_use_defaults() {
        let partial: Policy = serde_json::from_str(r#"{"mu": 2.0, "disabled": ["artifact_fetch"]}"#).unwrap();
        assert_eq!(partial, Policy { mu: 2.0, disabled: vec![Action::ArtifactFetch], ..Policy::default() });
        for bad in [r#"{"lamda": 1.0}"#, r#"{"disabled": ["fetch"]}"#, r#"{"trust": {"exact": 1.0}}"#] {
            assert!(serde_json::from_str::<Policy>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn out_of_range_residency_confidence_counts_as_zero() {
        for odd in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let trust = ResidencyConfidence { degraded: odd, fallback: odd };
            assert_eq!(trust.share(KvIndexState::Degraded), 0.0);
            assert_eq!(trust.share(KvIndexState::Fallback), 0.0);
            assert_eq!(trust.share(KvIndexState::Exact), 1.0);
        }
    }
}
