//! Cost of one way to serve a step, in microseconds:
//! `C = T_queue + T_compute + T_network + T_restore + lambda * M_hbm + mu * I_decode + T_eviction`.
//!
//! Each function is one formula. None of them chooses, and none may return NaN.

use vocabulary::{Bytes, KvLink, Micros, Tokens};

use crate::cached_prefix::CachedPrefix;
use crate::kv_occupancy::{EvictionVictim, SessionLookup};
use crate::micros::{micros, valid_or_zero};
use crate::worker_candidate::WorkerCandidate;
use crate::{AttentionSpec, CostTerms, LowerTiers, PlanningInputs, RequestProfile};

/// Share of decode throughput lost while a prefill chunk shares the batch: a running answer gets one token per chunk,
/// and a chunk of 2,048 tokens takes about ten decode steps.
const DECODE_LOSS_DURING_PREFILL: f64 = 0.9;
/// Share of an answer's decode time during which an answer that already runs is still running: it is half done on
/// average.
const CONCURRENT_DECODE_SHARE: f64 = 0.5;
/// Factor on the delay of prompts that arrive later and queue: each of them delays the ones behind it.
const QUEUED_PROMPT_DELAY_FACTOR: f64 = 1.5;
/// Prefill time at which the weight of the delay to others is half way between `mu` and 1: users notice it as a pause.
const NOTICEABLE_STALL_MICROS: f64 = 1e6;

/// Prices of the step: the request and the policy's weights, sanitized.
pub(crate) struct CostModel<'a> {
    pub(crate) inputs: &'a PlanningInputs<'a>,
    pub(crate) session_lookup: SessionLookup<'a>,
    request: &'a RequestProfile,
    attention: Option<&'a AttentionSpec>,
    /// `lambda`, in microseconds per byte.
    lambda: f64,
    mu: f64,
    /// Weight of the compute that evicted sessions repeat.
    pub(crate) eviction: f64,
    tiers: LowerTiers,
}

/// Part of a target's cost that all its candidates share.
pub(crate) struct SharedTargetCost {
    /// Bytes added to the target's device memory, times the share of its memory in use.
    displaced: f64,
    restore: Micros,
    /// Microseconds that a running answer loses to this answer.
    slowdown: f64,
    /// Microseconds that this answer loses to prompts that arrive later.
    stall: f64,
    eviction: Micros,
}

/// Properties of a candidate, besides the target, that the target's cost depends on.
#[derive(Clone, Copy)]
pub(crate) struct TargetCostInputs {
    /// Leading tokens cached at the target when the step's own computation begins.
    pub(crate) start: Tokens,
    /// Whether the target itself computes the rest of the prompt.
    pub(crate) missing_kv_source: MissingKvSource,
    /// Leading tokens that another worker keeps as well.
    pub(crate) duplicated_until: Tokens,
}

/// Whether the target computes the tokens it lacks or pulls them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissingKvSource {
    Here,
    Pulled,
}

impl<'a> CostModel<'a> {
    pub(crate) fn new(inputs: &'a PlanningInputs<'a>, session_lookup: SessionLookup<'a>) -> Self {
        const MIB: f64 = 1_048_576.0;
        let policy = inputs.policy;
        Self {
            inputs,
            session_lookup,
            request: inputs.request,
            attention: inputs.attention,
            lambda: valid_or_zero(policy.memory_cost_per_mib) / MIB,
            mu: valid_or_zero(policy.interference_weight),
            eviction: valid_or_zero(policy.eviction_weight),
            tiers: policy.tiers,
        }
    }

    /// Returns the bytes of the KV of tokens `from..to`.
    pub(crate) fn bytes(&self, at: &WorkerCandidate<'_>, from: Tokens, to: Tokens) -> Bytes {
        match self.attention {
            Some(spec) => spec.range_bytes(from, to),
            None => at.view.kv_bytes_per_token * (to - from).0,
        }
    }

    /// `T_network`: fixed cost of the link + fixed margin + bytes / its rate x (1 + proportional margin). The margins are
    /// the policy's (`TransferTimeMargin`). Depends on the target's link only, not on the source.
    pub(crate) fn transfer_time(&self, link: &KvLink, bytes: Bytes) -> Micros {
        let margin = &self.inputs.policy.transfer;
        let share = 1.0 + valid_or_zero(margin.proportional_overhead);
        link.fixed + margin.fixed_overhead + micros(bytes.0 as f64 * 1e6 * share / link.bytes_per_second)
    }

    /// Returns the target's own terms: queue, compute, restore, memory, interference and eviction.
    ///
    /// - `T_compute`: prompt tokens from `start` on; later tokens cost more, as the policy's `attention_cost_doubling_tokens`
    ///   says.
    /// - `T_restore`: bytes in slower tiers / their rate + the first decode step.
    /// - `M_hbm`: bytes stored here that another worker keeps too + bytes stored here x share of memory in use (with
    ///   that chance, each byte displaces one that its session would have reused).
    /// - `I_decode`: running answers x (compute time here + half of the answer x decode slowdown), plus what this
    ///   answer loses to prompts that arrive later, and what those lose to the computation here: see
    ///   `interference_cost`.
    /// - `T_eviction`: see `eviction_cost`.
    pub(crate) fn target_terms(&self, at: &WorkerCandidate<'_>, work: TargetCostInputs) -> CostTerms {
        let compute = match work.missing_kv_source {
            MissingKvSource::Here => at.speed.rate.span(work.start, self.request.prompt_tokens),
            MissingKvSource::Pulled => Micros::ZERO,
        };
        let base = at.base_cost.get_or_init(|| self.base_cost(at));
        let duplicated = self.bytes(at, at.prefix.believed, work.duplicated_until.min(self.request.prompt_tokens));
        CostTerms {
            queue: at.speed.queue,
            compute,
            network: Micros::ZERO,
            restore: base.restore,
            memory: self.memory_cost(duplicated, base.displaced),
            interference: self.interference_cost(at, compute, base),
            eviction: base.eviction,
        }
    }

    fn base_cost(&self, at: &WorkerCandidate<'_>) -> SharedTargetCost {
        let end = self.request.prompt_tokens + self.request.expected_output_tokens;
        SharedTargetCost {
            displaced: self.bytes(at, at.prefix.on_device(), end).0 as f64 * at.speed.usage,
            restore: self.restore_time(at) + at.speed.step,
            slowdown: CONCURRENT_DECODE_SHARE
                * at.view.speeds.decode_slowdown.0 as f64
                * self.request.expected_output_tokens.0 as f64,
            stall: self.stall_time(at),
            eviction: self.eviction_cost(at, end - at.prefix.on_device(), StoredKvKind::Resident),
        }
    }

    /// Returns the terms of a leg that computes the prompt up to `to` for another worker and keeps a copy of it.
    pub(crate) fn source_terms(&self, at: &WorkerCandidate<'_>, to: Tokens) -> CostTerms {
        CostTerms {
            eviction: self.eviction_cost(at, to - at.prefix.on_device(), StoredKvKind::Transfer),
            ..self.source_terms_without_eviction(at, to)
        }
    }

    /// Returns the earliest time at which a source has computed the prompt up to `to`: a lower bound of its total cost.
    pub(crate) fn earliest_finish(&self, at: &WorkerCandidate<'_>, to: Tokens) -> Micros {
        at.speed.queue + at.speed.rate.span(at.prefix.cached, to)
    }

    /// Returns the source's terms except for eviction, which is the most expensive to compute. Delay to others at this
    /// second worker is not weighted by `mu`, so that a handoff has to be worth it to them.
    pub(crate) fn source_terms_without_eviction(&self, at: &WorkerCandidate<'_>, to: Tokens) -> CostTerms {
        let compute = at.speed.rate.span(at.prefix.cached, to);
        let stored = self.bytes(at, at.prefix.on_device(), to);
        CostTerms {
            queue: at.speed.queue,
            compute,
            network: Micros::ZERO,
            restore: self.restore_time(at),
            memory: self.memory_cost(stored, stored.0 as f64 * at.speed.usage),
            interference: micros(self.delay_to_others(at, compute)),
            eviction: Micros::ZERO,
        }
    }

    /// `T_restore`: time to load the prefix that a worker holds in its own slower tiers; a `RestorablePrefix` is what
    /// another worker or a store has to bring.
    pub(crate) fn restore_time(&self, at: &WorkerCandidate<'_>) -> Micros {
        let CachedPrefix { host, disk, .. } = at.prefix;
        if host + disk == Tokens::ZERO {
            return Micros::ZERO;
        }
        let read = |from, to, rate: f64| match self.bytes(at, from, to) {
            Bytes::ZERO => 0.0,
            Bytes(bytes) => bytes as f64 * 1e6 / valid_or_zero(rate),
        };
        let on_host = at.prefix.cached - disk;
        let host = read(on_host - host, on_host, self.tiers.host_bandwidth);
        micros(host + read(on_host, at.prefix.cached, self.tiers.disk_bandwidth))
    }

    fn memory_cost(&self, duplicated: Bytes, displaced: f64) -> Micros {
        micros(self.lambda * (duplicated.0 as f64 + displaced))
    }

    /// Running answers wait for the computation and are slowed down afterwards, and so is this answer. The cost is
    /// `w x delays + mu x slowdown` with `w = mu + (1 - mu) x compute / (compute + 1 s)`; with `mu` of zero or above
    /// one, `w = mu`.
    fn interference_cost(&self, at: &WorkerCandidate<'_>, compute: Micros, base: &SharedTargetCost) -> Micros {
        let answers = at.speed.running_answers * base.slowdown + base.stall;
        let noticeable = compute.0 as f64 / (compute.0 as f64 + NOTICEABLE_STALL_MICROS);
        let extra_weight = if self.mu > 0.0 { (1.0 - self.mu).max(0.0) * noticeable } else { 0.0 };
        micros((self.mu + extra_weight) * self.delay_to_others(at, compute) + self.mu * answers)
    }

    /// Returns the microseconds that other requests wait for the computation: every running answer waits for all of it,
    /// and so does each prompt that arrives before it is done (`rate x (queue + compute)` prompts), times
    /// `QUEUED_PROMPT_DELAY_FACTOR`.
    fn delay_to_others(&self, at: &WorkerCandidate<'_>, compute: Micros) -> f64 {
        let (compute, queue) = (compute.0 as f64, at.speed.queue.0 as f64);
        compute
            * (at.speed.running_answers
                + QUEUED_PROMPT_DELAY_FACTOR * at.headroom.inflow.prompts_per_second * 1e-6 * (queue + compute))
    }

    /// Returns the microseconds that this answer loses to prompts that arrive later, at the recent arrival rate:
    /// `answer x step x h / (1 - h)`, where `h` is `DECODE_LOSS_DURING_PREFILL` x the share of time spent on prefill.
    fn stall_time(&self, at: &WorkerCandidate<'_>) -> f64 {
        let lost_share = DECODE_LOSS_DURING_PREFILL * at.headroom.inflow.utilization.clamp(0.0, 1.0);
        self.request.expected_output_tokens.0 as f64 * at.speed.step.0 as f64 * lost_share / (1.0 - lost_share)
    }
}

/// Adds the terms of both legs when they run one after the other: the target's queue drains while the source works.
pub(crate) fn sequential_terms(source: &CostTerms, target: &CostTerms) -> CostTerms {
    let meanwhile = source.queue + source.compute;
    CostTerms {
        queue: source.queue + (target.queue - meanwhile),
        compute: source.compute + target.compute,
        network: source.network + target.network,
        restore: source.restore + target.restore,
        memory: source.memory + target.memory,
        interference: source.interference + target.interference,
        eviction: source.eviction + target.eviction,
    }
}

/// Returns whether KV can be transferred over a link at all.
pub(crate) fn usable(link: &KvLink) -> bool {
    link.bytes_per_second.is_finite() && link.bytes_per_second > 0.0
}

/// When nothing can be evicted, the step waits for running answers to end: this many times the compute time of what
/// does not fit.
const UNEVICTABLE_WAIT_FACTOR: f64 = 20.0;
/// Most running answers that one recomputation is assumed to delay.
const MAX_STALLED_ANSWERS: f64 = 4.0;

/// Whether stored KV will grow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredKvKind {
    /// The session stays at the worker, and grows.
    Resident,
    /// A copy made for a transfer.
    Transfer,
}

impl CostModel<'_> {
    /// `T_eviction` of tokens that are stored at a worker. Each victim counts `chance to return soon x time to restore
    /// its KV x (1 + answers delayed by that)`; the sum is weighted by the policy's `eviction_weight`. KV is restored
    /// by recomputation, or from the host tier if it is still there. Zero when the tokens fit, and when the memory's
    /// size is unknown.
    ///
    /// A session that is new at the worker is expected to grow as others did, by at most the policy's
    /// `max_session_growth_tokens` and an eighth of the memory. Half of the active sessions count as delayed answers.
    /// The session's own stale KV is a victim that never returns. Tokens for which no victim can make room cost
    /// `UNEVICTABLE_WAIT_FACTOR` x their compute time.
    pub(crate) fn eviction_cost(&self, at: &WorkerCandidate<'_>, stored: Tokens, kind: StoredKvKind) -> Micros {
        if at.view.capacity.kv == Tokens::ZERO || self.eviction == 0.0 {
            return Micros::ZERO;
        }
        let growth = if kind == StoredKvKind::Resident { at.expected_growth(self.inputs) } else { Tokens::ZERO };
        match stored + growth - at.headroom.free {
            Tokens::ZERO => Micros::ZERO,
            missing => self.shortfall_cost(at, stored, missing),
        }
    }

    /// A separate function that is not inlined, so that the common case (the tokens fit) touches nothing else.
    #[inline(never)]
    fn shortfall_cost(&self, at: &WorkerCandidate<'_>, stored: Tokens, missing: Tokens) -> Micros {
        let headroom = &at.headroom;
        let stalled_answers = (f64::from(headroom.active) / 2.0).min(MAX_STALLED_ANSWERS);
        let recovery = self.victims_recovery_time(at, missing.min(headroom.evictable())) * (1.0 + stalled_answers);
        let unevictable = stored - headroom.free - headroom.evictable();
        let wait = at.speed.rate.span(Tokens::ZERO, unevictable).0 as f64 * UNEVICTABLE_WAIT_FACTOR;
        micros(self.eviction * (recovery + wait))
    }

    /// Returns the microseconds that victims are expected to spend on getting these tokens back. KV is evicted from its
    /// end; victims beyond those examined count as the average of these.
    fn victims_recovery_time(&self, at: &WorkerCandidate<'_>, tokens: Tokens) -> f64 {
        let extrapolate = |totals: &ExaminedVictimTotals| totals.recovery * tokens.0 as f64 / totals.tokens.0 as f64;
        if let Some(totals) = at.victim_totals.get().filter(|totals| totals.tokens < tokens) {
            return extrapolate(totals);
        }
        let (mut remaining, mut recovery) = (tokens, 0.0);
        for EvictionVictim { tokens: held, return_probability } in self.session_lookup.victims(&at.headroom) {
            if held >= remaining {
                return recovery + at.recovery_cost.span(held - remaining, held) * return_probability;
            }
            recovery += at.recovery_cost.first(held) * return_probability;
            remaining -= held;
        }
        match tokens - remaining {
            Tokens::ZERO => 0.0,
            examined => {
                extrapolate(at.victim_totals.get_or_init(|| ExaminedVictimTotals { tokens: examined, recovery }))
            }
        }
    }
}

/// Sums over all examined victims of a rank, cached once a request went beyond them.
pub(crate) struct ExaminedVictimTotals {
    tokens: Tokens,
    /// Microseconds that the victims are expected to spend on getting these tokens back.
    recovery: f64,
}
