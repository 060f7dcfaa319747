//! What a way of serving costs, in microseconds:
//! `C = T_queue + T_compute + T_network + T_restore + lambda * M_hbm + mu * I_decode + T_eviction`.
//!
//! Each function is one formula. None of them chooses, and none may return something that is not a number.

use vocabulary::{Bytes, KvLink, Micros, Tokens};

use crate::cached_prefix::CachedPrefix;
use crate::kv_occupancy::SessionLookup;
use crate::micros::{micros, valid_or_zero};
use crate::pressure::CopyKind;
use crate::worker_candidate::WorkerCandidate;
use crate::{AttentionSpec, CostTerms, LowerTiers, PlanningInputs, PlanningRequest};

/// Beside a prompt an answer gets a token with each chunk: so much of its time is lost meanwhile. A chunk of 2,048 tokens takes
/// ten decode steps or so.
const DECODE_LOSS_DURING_PREFILL: f64 = 0.9;
/// Of the time for which an answer is generated, the part in which one that runs already still runs: it has come to its middle.
const CONCURRENT_DECODE_SHARE: f64 = 0.5;
/// A prompt that comes later and waits lets others wait that come after it: each one so many times.
const QUEUED_PROMPT_DELAY_FACTOR: f64 = 1.5;
/// A prompt that takes so long to compute holds others up half way between what `mu` says and in full: that is seen as a pause.
const NOTICEABLE_STALL_MICROS: f64 = 1e6;

/// The step's prices: the request and the policy's weights, made safe.
pub(crate) struct CostModel<'a> {
    pub(crate) inputs: &'a PlanningInputs<'a>,
    pub(crate) session_lookup: SessionLookup<'a>,
    request: &'a PlanningRequest,
    attention: Option<&'a AttentionSpec>,
    /// Microseconds a byte.
    lambda: f64,
    mu: f64,
    /// The weight of what others compute again.
    pub(crate) eviction: f64,
    tiers: LowerTiers,
}

/// The part of a target's price that all its candidates share.
pub(crate) struct TargetBaseCost {
    /// Bytes that are stored there in the end and are not there now, by the share of memory in use.
    displaced: f64,
    restore: Micros,
    /// Microseconds that an answer loses beside this one.
    slowdown: f64,
    /// Microseconds that this one loses beside the prompts to come.
    stall: f64,
    eviction: Micros,
}

/// What the target's part of a candidate depends on besides the target.
#[derive(Clone, Copy)]
pub(crate) struct TargetWork {
    /// Leading tokens there when the step's own computing begins.
    pub(crate) start: Tokens,
    /// Tokens that the target itself computes.
    pub(crate) compute_site: ComputeSite,
    /// Leading tokens that stay with another worker as well.
    pub(crate) duplicated_until: Tokens,
}

/// Whether the target computes what it lacks or is sent it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ComputeSite {
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
            lambda: valid_or_zero(policy.lambda) / MIB,
            mu: valid_or_zero(policy.mu),
            eviction: valid_or_zero(policy.eviction),
            tiers: policy.tiers,
        }
    }

    /// Bytes that lead a worker from `from` leading tokens to `to` of them.
    pub(crate) fn bytes(&self, at: &WorkerCandidate<'_>, from: Tokens, to: Tokens) -> Bytes {
        match self.attention {
            Some(spec) => spec.range_bytes(from, to),
            None => at.view.kv_bytes_per_token * (to - from).0,
        }
    }

    /// `T_network`: the link's fixed cost + bytes / its rate x (1 + the policy's risk), and the risk's own fixed cost.
    pub(crate) fn network(&self, link: &KvLink, bytes: Bytes) -> Micros {
        let risk = &self.inputs.policy.transfer;
        let share = 1.0 + valid_or_zero(risk.share);
        link.fixed + risk.fixed + micros(bytes.0 as f64 * 1e6 * share / link.bytes_per_second)
    }

    /// The target's own terms: compute, restore, memory, interference and eviction, and its queue.
    ///
    /// - `T_compute`: prompt tokens from `start` on, later ones dearer as the policy's `attention_doubles_at` says.
    /// - `T_restore`: bytes in slower tiers / their rate + the first decode step.
    /// - `M_hbm`: bytes stored here that another worker keeps too + bytes stored here x share of memory in use (each
    ///   displaces, with that chance, one that somebody would have come back for).
    /// - `I_decode`: answers being generated x (time computed here + half of the answer x decode slowdown), what the answer
    ///   itself loses to prompts that come later, and these to what is computed here: see `interference`.
    /// - `T_eviction`: see `eviction`.
    pub(crate) fn target_terms(&self, at: &WorkerCandidate<'_>, serving: TargetWork) -> CostTerms {
        let compute = match serving.compute_site {
            ComputeSite::Here => at.speed.rate.span(serving.start, self.request.prompt),
            ComputeSite::Pulled => Micros::ZERO,
        };
        let fixed = at.base_cost.get_or_init(|| self.fixed(at));
        let double = self.bytes(at, at.prefix.believed, serving.duplicated_until.min(self.request.prompt));
        CostTerms {
            queue: at.speed.queue,
            compute,
            network: Micros::ZERO,
            restore: fixed.restore,
            memory: self.memory_cost(double, fixed.displaced),
            interference: self.interference_cost(at, compute, fixed),
            eviction: fixed.eviction,
        }
    }

    fn fixed(&self, at: &WorkerCandidate<'_>) -> TargetBaseCost {
        let end = self.request.prompt + self.request.answer;
        TargetBaseCost {
            displaced: self.bytes(at, at.prefix.on_device(), end).0 as f64 * at.speed.usage,
            restore: self.restore_time(at) + at.speed.step,
            slowdown: CONCURRENT_DECODE_SHARE * at.view.speeds.decode_slowdown.0 as f64 * self.request.answer.0 as f64,
            stall: self.stall_time(at),
            eviction: self.eviction_cost(at, end - at.prefix.on_device(), CopyKind::Stays),
        }
    }

    /// The terms of a leg that computes the prompt up to `to` for another worker and keeps a copy of it.
    pub(crate) fn source_terms(&self, at: &WorkerCandidate<'_>, to: Tokens) -> CostTerms {
        CostTerms {
            eviction: self.eviction_cost(at, to - at.prefix.on_device(), CopyKind::Passes),
            ..self.source_terms_without_eviction(at, to)
        }
    }

    /// When a source has computed the prompt up to `to` at the earliest: never more than its terms together.
    pub(crate) fn earliest_finish(&self, at: &WorkerCandidate<'_>, to: Tokens) -> Micros {
        at.speed.queue + at.speed.rate.span(at.prefix.cached, to)
    }

    /// The same where nobody would be pushed out: all terms but one, which takes the longest to work out. What others lose at a
    /// second worker is not weighed by `mu`, so that a handoff has to be worth it to them.
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

    /// `T_restore` of what a worker has in slower tiers.
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
        let host = read(on_host - host, on_host, self.tiers.host_bytes_per_second);
        micros(host + read(on_host, at.prefix.cached, self.tiers.disk_bytes_per_second))
    }

    fn memory_cost(&self, double: Bytes, displaced: f64) -> Micros {
        micros(self.lambda * (double.0 as f64 + displaced))
    }

    /// Answers wait for the computing and are slowed down besides, as this one will be. With `w = mu + (1 - mu) x computing /
    /// (computing + 1 s)` that is `w x delays + mu x slowdown`; with a `mu` of zero or above one, `mu` of both.
    fn interference_cost(&self, at: &WorkerCandidate<'_>, compute: Micros, fixed: &TargetBaseCost) -> Micros {
        let answers = at.speed.running_answers * fixed.slowdown + fixed.stall;
        let long = compute.0 as f64 / (compute.0 as f64 + NOTICEABLE_STALL_MICROS);
        let dearer = if self.mu > 0.0 { (1.0 - self.mu).max(0.0) * long } else { 0.0 };
        micros((self.mu + dearer) * self.delay_to_others(at, compute) + self.mu * answers)
    }

    /// Microseconds that others wait for what is computed: each answer that is being generated all of it, and so does each
    /// prompt that comes until it is done, of which there are `rate x (queue + compute)`, `QUEUED_PROMPT_DELAY_FACTOR` times.
    fn delay_to_others(&self, at: &WorkerCandidate<'_>, compute: Micros) -> f64 {
        let (compute, queue) = (compute.0 as f64, at.speed.queue.0 as f64);
        compute
            * (at.speed.running_answers
                + QUEUED_PROMPT_DELAY_FACTOR * at.headroom.inflow.rate * 1e-6 * (queue + compute))
    }

    /// Microseconds that an answer waits for prompts that come later, if as many come as did: `answer x step x h / (1 - h)`,
    /// where `h` is `DECODE_LOSS_DURING_PREFILL` of the share of time in which there is one.
    fn stall_time(&self, at: &WorkerCandidate<'_>) -> f64 {
        let held_up = DECODE_LOSS_DURING_PREFILL * at.headroom.inflow.share.clamp(0.0, 1.0);
        self.request.answer.0 as f64 * at.speed.step.0 as f64 * held_up / (1.0 - held_up)
    }
}

/// Both parts of a candidate, one after the other: the target's queue drains while the source works.
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

/// Whether KV can be expected to arrive over a link at all.
pub(crate) fn usable(link: &KvLink) -> bool {
    link.bytes_per_second.is_finite() && link.bytes_per_second > 0.0
}
