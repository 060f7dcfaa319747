//! Weights, limits and switches of a deployment.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::{KvIndexState, Micros, Tokens};

use crate::{Action, ClassificationThresholds};

/// Rule that selects a candidate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum SelectionRule {
    /// The planner: selects the cheapest candidate.
    #[default]
    LowestCost,
    /// Baseline: one leg, each decode-capable worker in turn.
    RoundRobin,
    /// Baseline and bypass: one leg, always at the same worker for a session as long as that worker is available.
    SessionPinning,
    /// Baseline: one leg, at the worker with the highest cached share of the prompt minus its relative load.
    MatchRateMinusLoad,
}

impl SelectionRule {
    /// Returns the rule's name for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Limits of the admission queue.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionLimits {
    /// Most displaced compute that a step may cause and still start at once.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(3_000_000))]
    pub max_displaced_compute: Micros,
    /// Longest time in the queue, whatever the step costs other sessions; 0 turns queueing off.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(300_000_000))]
    pub max_wait: Micros,
    /// Most steps in the queue; a step that arrives when it is full starts at once.
    #[default(1_024)]
    pub max_queue: usize,
}

/// Settings of the planner. Weights that are negative or not finite count as zero.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Rule that selects a candidate.
    #[default(SelectionRule::LowestCost)]
    pub policy: SelectionRule,
    /// Thresholds between the kinds of step.
    pub thresholds: ClassificationThresholds,
    /// Disabled actions. Colocated prefill cannot be disabled: every step must be servable.
    pub disabled_actions: Vec<Action>,
    /// `lambda`: cost of each MiB of device memory taken from other sessions, in microseconds.
    #[serde(with = "vocabulary::micros_f64_with_unit")]
    #[default(200.0)]
    pub memory_cost_per_mib: f64,
    /// `mu`: cost per microsecond that running answers and later prompts lose at the decode worker. The weight rises
    /// towards one for a prefill that delays them for long. Delay at a handoff's source and the recomputation of
    /// evicted KV always count in full, even with a weight of 0.
    #[default(0.3)]
    pub interference_weight: f64,
    /// Cost per microsecond that other sessions will spend on recomputing the KV that a step evicts from device memory.
    #[default(0.7)]
    pub eviction_weight: f64,
    /// Upper bound on the expected growth of a session at a worker where it is new, beyond the step itself; the
    /// expectation is learnt.
    #[default(Tokens(35_000))]
    pub max_session_growth_tokens: Tokens,
    /// Time that transfers may take beyond that of their link.
    pub transfer: TransferTimeMargin,
    /// When the source of a replicate sends.
    pub replicate_dispatch: ReplicateSendTiming,
    /// Share of believed blocks that is expected to be found.
    pub kv_index_confidence: ResidencyConfidence,
    /// Thresholds above which an owner is overloaded.
    pub overload: OverloadThresholds,
    /// Memory tiers below device memory.
    pub tiers: LowerTiers,
    /// Admission control: when a step queues instead of evicting the KV of others.
    pub admission: AdmissionLimits,
    /// Prefill rate of a worker whose rate is unknown, in tokens per second.
    #[default(2_000.0)]
    pub default_prefill_tokens_per_second: f64,
    /// Context length at which a token costs twice as much to compute as the first one; 0 makes every token cost the
    /// same.
    pub attention_cost_doubling_tokens: Tokens,
}

impl Policy {
    /// Returns whether `action` is enabled.
    pub fn allows(&self, action: Action) -> bool {
        action == Action::ColocatedPrefill || !self.disabled_actions.contains(&action)
    }
}

/// Time that transfers may take beyond that of their link: links have queues that nothing reports.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct TransferTimeMargin {
    /// Fixed extra time of any transfer.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(100_000))]
    pub fixed_overhead: Micros,
    /// Extra time as a share of the time that the bytes take.
    #[default(0.5)]
    pub proportional_overhead: f64,
}

/// When the source of a replicate sends the KV.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum ReplicateSendTiming {
    /// In a request of its own, which queues at the source.
    #[default]
    Queued,
    /// At once, whatever the source is doing.
    Immediate,
}

/// Share of believed blocks that is expected to be found, 0 to 1, by what is known of the worker.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct ResidencyConfidence {
    /// KV events were lost and not yet recovered.
    #[default(0.9)]
    pub degraded: f64,
    /// Residency was guessed from routing, ownership or another router's intent.
    #[default(0.8)]
    pub approximate: f64,
}

impl ResidencyConfidence {
    /// Returns the share for a worker whose KV index is in that state; a value outside 0 to 1 counts as 0.
    pub fn share(&self, index_state: KvIndexState) -> f64 {
        let share = match index_state {
            KvIndexState::Exact => return 1.0,
            KvIndexState::Degraded => self.degraded,
            KvIndexState::Approximate => self.approximate,
        };
        if (0.0..=1.0).contains(&share) { share } else { 0.0 }
    }
}

/// Thresholds above which a session is moved away from its owner instead of served by a read-only replica
/// (`OwnershipEffect::ReadReplica`).
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct OverloadThresholds {
    /// Expected queueing time at the owner.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(2_000_000))]
    pub max_queue_time: Micros,
    /// Share of KV blocks in use, 0 to 1.
    #[default(0.95)]
    pub max_kv_cache_usage: f64,
}

/// Memory tiers below device memory, and how fast blocks are loaded from them.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct LowerTiers {
    /// Evicted tokens that a worker's host memory holds; 0 when there is no host tier.
    pub host_tokens: Tokens,
    /// Bytes per second from host memory.
    #[serde(with = "vocabulary::bandwidth_with_unit")]
    #[default(20e9)]
    pub host_bandwidth: f64,
    /// Bytes per second from disk or a shared store.
    #[serde(with = "vocabulary::bandwidth_with_unit")]
    #[default(3e9)]
    pub disk_bandwidth: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colocated_prefill_cannot_be_disabled() {
        let policy = Policy { disabled_actions: Action::ALL.to_vec(), ..Policy::default() };
        assert!(policy.allows(Action::ColocatedPrefill));
        assert!(Action::ALL[1..].iter().all(|action| !policy.allows(*action)));
    }

    #[test]
    fn unknown_policy_field_is_rejected_and_missing_ones_use_defaults() {
        let partial: Policy =
            serde_json::from_str(r#"{"interference_weight": 2.0, "disabled_actions": ["artifact_fetch"]}"#).unwrap();
        assert_eq!(
            partial,
            Policy { interference_weight: 2.0, disabled_actions: vec![Action::ArtifactFetch], ..Policy::default() }
        );
        for bad in
            [r#"{"lambda": 1.0}"#, r#"{"disabled_actions": ["fetch"]}"#, r#"{"kv_index_confidence": {"exact": 1.0}}"#]
        {
            assert!(serde_json::from_str::<Policy>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn out_of_range_residency_confidence_counts_as_zero() {
        for odd in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let trust = ResidencyConfidence { degraded: odd, approximate: odd };
            assert_eq!(trust.share(KvIndexState::Degraded), 0.0);
            assert_eq!(trust.share(KvIndexState::Approximate), 0.0);
            assert_eq!(trust.share(KvIndexState::Exact), 1.0);
        }
    }
}
