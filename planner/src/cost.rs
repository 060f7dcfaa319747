//! What a way of serving costs, in microseconds:
//! `C = T_queue + T_compute + T_network + T_restore + lambda * M_hbm + mu * I_decode + T_eviction`.
//!
//! Each function is one formula. None of them chooses, and none may return something that is not a number.

use vocabulary::{Bytes, Link, Micros, Tokens};

use crate::holding::Holding;
use crate::micros::{ComputeRate, micros, weight};
use crate::pressure::Guest;
use crate::standing::Standing;
use crate::{Ask, AttentionSpec, Inputs, Terms, TierSpeeds};

/// The step's prices: the request and the policy's weights, made safe.
pub(crate) struct Prices<'a> {
    pub(crate) inputs: &'a Inputs<'a>,
    ask: &'a Ask,
    attention: Option<&'a AttentionSpec>,
    /// Microseconds a byte.
    lambda: f64,
    pub(crate) mu: f64,
    tiers: TierSpeeds,
    doubles_at: Tokens,
}

/// What the target's part of a candidate depends on besides the target.
#[derive(Clone, Copy)]
pub(crate) struct Serving {
    /// Leading tokens there when the step's own computing begins.
    pub(crate) start: Tokens,
    /// Tokens that the target itself computes.
    pub(crate) computed: Compute,
    /// Leading tokens that stay with another worker as well.
    pub(crate) elsewhere: Tokens,
}

/// Whether the target computes what it lacks or is sent it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compute {
    Here,
    Pulled,
}

impl<'a> Prices<'a> {
    pub(crate) fn new(inputs: &'a Inputs<'a>) -> Self {
        const MIB: f64 = 1_048_576.0;
        let policy = inputs.policy;
        Self {
            inputs,
            ask: inputs.ask,
            attention: inputs.attention,
            lambda: weight(policy.lambda) / MIB,
            mu: weight(policy.mu),
            tiers: policy.tiers,
            doubles_at: policy.attention_doubles_at,
        }
    }

    /// Bytes that lead a worker from `from` leading tokens to `to` of them.
    pub(crate) fn bytes(&self, at: &Standing<'_>, from: Tokens, to: Tokens) -> Bytes {
        match self.attention {
            Some(spec) => spec.range(from, to),
            None => at.view.kv_bytes_per_token * (to - from).0,
        }
    }

    /// `T_compute` of prompt tokens `from..to`, later ones dearer as the policy's `attention_doubles_at` says.
    pub(crate) fn compute(&self, at: &Standing<'_>, from: Tokens, to: Tokens) -> Micros {
        self.rate(at).span(from, to)
    }

    pub(crate) fn rate(&self, at: &Standing<'_>) -> ComputeRate {
        ComputeRate::new(at.pace.token, self.doubles_at)
    }

    /// `T_network`: the link's fixed cost + bytes / its rate x (1 + the policy's risk), and the risk's own fixed cost.
    pub(crate) fn network(&self, link: &Link, bytes: Bytes) -> Micros {
        let risk = &self.inputs.policy.transfer;
        let share = 1.0 + weight(risk.share);
        link.fixed + risk.fixed + micros(bytes.0 as f64 * 1e6 * share / link.bytes_per_second)
    }

    /// The target's own terms: compute, restore, memory and interference, and its queue.
    ///
    /// - `T_restore`: bytes in slower tiers / their rate + the first decode step.
    /// - `M_hbm`: bytes stored here that another worker keeps too + bytes stored here x share of memory in use (each
    ///   displaces, with that chance, one that somebody would have come back for).
    /// - `I_decode`: answers being generated x (time computed here + answer x decode slowdown), and the steps that come
    ///   meanwhile.
    /// - `T_eviction`: see `eviction`.
    pub(crate) fn target(&self, at: &Standing<'_>, serving: Serving) -> Terms {
        let compute = match serving.computed {
            Compute::Here => self.compute(at, serving.start, self.ask.prompt),
            Compute::Pulled => Micros::ZERO,
        };
        let holding = &at.holding;
        let stored = self.bytes(at, holding.cached, self.ask.prompt + self.ask.answer);
        let double = self.bytes(at, holding.held, serving.elsewhere.min(self.ask.prompt));
        let slowdown = at.view.speeds.decode_slowdown.0 as f64 * self.ask.answer.0 as f64;
        Terms {
            queue: at.pace.queue,
            compute,
            network: Micros::ZERO,
            restore: self.restore(at) + at.pace.step,
            memory: self.memory(at, double, stored),
            interference: self.interference(at, compute, slowdown),
            eviction: self.eviction(at, self.ask.prompt + self.ask.answer - holding.cached, Guest::Stays),
        }
    }

    /// The terms of a leg that computes the prompt up to `to` for another worker and keeps a copy of it.
    pub(crate) fn source(&self, at: &Standing<'_>, to: Tokens) -> Terms {
        let compute = self.compute(at, at.holding.cached, to);
        let stored = self.bytes(at, at.holding.cached, to);
        Terms {
            queue: at.pace.queue,
            compute,
            network: Micros::ZERO,
            restore: self.restore(at),
            memory: self.memory(at, stored, stored),
            interference: self.interference(at, compute, 0.0),
            eviction: self.eviction(at, to - at.holding.cached, Guest::Passes),
        }
    }

    fn restore(&self, at: &Standing<'_>) -> Micros {
        let Holding { host, disk, .. } = at.holding;
        if host + disk == Tokens::ZERO {
            return Micros::ZERO;
        }
        let read = |from, to, rate: f64| match self.bytes(at, from, to) {
            Bytes::ZERO => 0.0,
            Bytes(bytes) => bytes as f64 * 1e6 / weight(rate),
        };
        let on_host = at.holding.cached - disk;
        let host = read(on_host - host, on_host, self.tiers.host_bytes_per_second);
        micros(host + read(on_host, at.holding.cached, self.tiers.disk_bytes_per_second))
    }

    fn memory(&self, at: &Standing<'_>, double: Bytes, stored: Bytes) -> Micros {
        micros(self.lambda * (double.0 as f64 + stored.0 as f64 * at.pace.usage))
    }

    /// Answers wait for the computing and are slowed down besides; each active session's next step comes during the
    /// computing with chance `computing / step_every` and waits for half of it.
    fn interference(&self, at: &Standing<'_>, compute: Micros, slowdown: f64) -> Micros {
        let (compute, every) = (compute.0 as f64, self.inputs.policy.step_every.0 as f64);
        let share = if every > 0.0 { (compute / every).min(1.0) } else { 0.0 };
        let coming = f64::from(at.room.active) * share * compute * 0.5;
        micros(self.mu * (at.pace.decoding * (compute + slowdown) + coming))
    }
}

/// Both parts of a candidate, one after the other: the target's queue drains while the source works.
pub(crate) fn in_turn(source: &Terms, target: &Terms) -> Terms {
    let meanwhile = source.queue + source.compute;
    Terms {
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
pub(crate) fn usable(link: &Link) -> bool {
    link.bytes_per_second.is_finite() && link.bytes_per_second > 0.0
}
