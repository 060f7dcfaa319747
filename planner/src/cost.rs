//! What a way of serving costs, in microseconds:
//! `C = T_queue + T_compute + T_network + T_restore + lambda * M_hbm + mu * I_decode + T_eviction`.
//!
//! Each function is one formula. None of them chooses, and none may return something that is not a number.

use vocabulary::{Bytes, Link, Micros, Tokens};

use crate::holding::Holding;
use crate::micros::{micros, weight};
use crate::pressure::Guest;
use crate::standing::Standing;
use crate::tenancy::Visit;
use crate::{Ask, AttentionSpec, Inputs, Terms, Tiers};

/// Beside a prompt an answer gets a token with each chunk: so much of its time is lost meanwhile. A chunk of 2,048 tokens takes
/// ten decode steps or so.
const HELD_UP: f64 = 0.9;
/// Of the time for which an answer is generated, the part in which one that runs already still runs: it has come to its middle.
const TOGETHER: f64 = 0.5;
/// A prompt that comes later and waits lets others wait that come after it: each one so many times.
const COMING: f64 = 1.5;
/// A prompt that takes so long to compute holds others up half way between what `mu` says and in full: that is seen as a pause.
const PAUSE: f64 = 1e6;

/// The step's prices: the request and the policy's weights, made safe.
pub(crate) struct Prices<'a> {
    pub(crate) inputs: &'a Inputs<'a>,
    pub(crate) visit: Visit<'a>,
    ask: &'a Ask,
    attention: Option<&'a AttentionSpec>,
    /// Microseconds a byte.
    lambda: f64,
    mu: f64,
    /// The weight of what others compute again.
    pub(crate) eviction: f64,
    tiers: Tiers,
}

/// The part of a target's price that all its candidates share.
pub(crate) struct Fixed {
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
    pub(crate) fn new(inputs: &'a Inputs<'a>, visit: Visit<'a>) -> Self {
        const MIB: f64 = 1_048_576.0;
        let policy = inputs.policy;
        Self {
            inputs,
            visit,
            ask: inputs.ask,
            attention: inputs.attention,
            lambda: weight(policy.lambda) / MIB,
            mu: weight(policy.mu),
            eviction: weight(policy.eviction),
            tiers: policy.tiers,
        }
    }

    /// Bytes that lead a worker from `from` leading tokens to `to` of them.
    pub(crate) fn bytes(&self, at: &Standing<'_>, from: Tokens, to: Tokens) -> Bytes {
        match self.attention {
            Some(spec) => spec.range(from, to),
            None => at.view.kv_bytes_per_token * (to - from).0,
        }
    }

    /// `T_network`: the link's fixed cost + bytes / its rate x (1 + the policy's risk), and the risk's own fixed cost.
    pub(crate) fn network(&self, link: &Link, bytes: Bytes) -> Micros {
        let risk = &self.inputs.policy.transfer;
        let share = 1.0 + weight(risk.share);
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
    pub(crate) fn target(&self, at: &Standing<'_>, serving: Serving) -> Terms {
        let compute = match serving.computed {
            Compute::Here => at.pace.rate.span(serving.start, self.ask.prompt),
            Compute::Pulled => Micros::ZERO,
        };
        let fixed = at.fixed.get_or_init(|| self.fixed(at));
        let double = self.bytes(at, at.holding.held, serving.elsewhere.min(self.ask.prompt));
        Terms {
            queue: at.pace.queue,
            compute,
            network: Micros::ZERO,
            restore: fixed.restore,
            memory: self.memory(double, fixed.displaced),
            interference: self.interference(at, compute, fixed),
            eviction: fixed.eviction,
        }
    }

    fn fixed(&self, at: &Standing<'_>) -> Fixed {
        let end = self.ask.prompt + self.ask.answer;
        Fixed {
            displaced: self.bytes(at, at.holding.on_device(), end).0 as f64 * at.pace.usage,
            restore: self.restore(at) + at.pace.step,
            slowdown: TOGETHER * at.view.speeds.decode_slowdown.0 as f64 * self.ask.answer.0 as f64,
            stall: self.stall(at),
            eviction: self.eviction(at, end - at.holding.on_device(), Guest::Stays),
        }
    }

    /// The terms of a leg that computes the prompt up to `to` for another worker and keeps a copy of it.
    pub(crate) fn source(&self, at: &Standing<'_>, to: Tokens) -> Terms {
        Terms {
            eviction: self.eviction(at, to - at.holding.on_device(), Guest::Passes),
            ..self.source_in_free_room(at, to)
        }
    }

    /// When a source has computed the prompt up to `to` at the earliest: never more than its terms together.
    pub(crate) fn soonest(&self, at: &Standing<'_>, to: Tokens) -> Micros {
        at.pace.queue + at.pace.rate.span(at.holding.cached, to)
    }

    /// The same where nobody would be pushed out: all terms but one, which takes the longest to work out. What others lose at a
    /// second worker is not weighed by `mu`, so that a handoff has to be worth it to them.
    pub(crate) fn source_in_free_room(&self, at: &Standing<'_>, to: Tokens) -> Terms {
        let compute = at.pace.rate.span(at.holding.cached, to);
        let stored = self.bytes(at, at.holding.on_device(), to);
        Terms {
            queue: at.pace.queue,
            compute,
            network: Micros::ZERO,
            restore: self.restore(at),
            memory: self.memory(stored, stored.0 as f64 * at.pace.usage),
            interference: micros(self.delays(at, compute)),
            eviction: Micros::ZERO,
        }
    }

    /// `T_restore` of what a worker has in slower tiers.
    pub(crate) fn restore(&self, at: &Standing<'_>) -> Micros {
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

    fn memory(&self, double: Bytes, displaced: f64) -> Micros {
        micros(self.lambda * (double.0 as f64 + displaced))
    }

    /// Answers wait for the computing and are slowed down besides, as this one will be. With `w = mu + (1 - mu) x computing /
    /// (computing + 1 s)` that is `w x delays + mu x slowdown`; with a `mu` of zero or above one, `mu` of both.
    fn interference(&self, at: &Standing<'_>, compute: Micros, fixed: &Fixed) -> Micros {
        let answers = at.pace.decoding * fixed.slowdown + fixed.stall;
        let long = compute.0 as f64 / (compute.0 as f64 + PAUSE);
        let dearer = if self.mu > 0.0 { (1.0 - self.mu).max(0.0) * long } else { 0.0 };
        micros((self.mu + dearer) * self.delays(at, compute) + self.mu * answers)
    }

    /// Microseconds that others wait for what is computed: each answer that is being generated all of it, and so does each
    /// prompt that comes until it is done, of which there are `rate x (queue + compute)`, `COMING` times.
    fn delays(&self, at: &Standing<'_>, compute: Micros) -> f64 {
        let (compute, queue) = (compute.0 as f64, at.pace.queue.0 as f64);
        compute * (at.pace.decoding + COMING * at.room.inflow.rate * 1e-6 * (queue + compute))
    }

    /// Microseconds that an answer waits for prompts that come later, if as many come as did: `answer x step x h / (1 - h)`,
    /// where `h` is `HELD_UP` of the share of time in which there is one.
    fn stall(&self, at: &Standing<'_>) -> f64 {
        let held_up = HELD_UP * at.room.inflow.share.clamp(0.0, 1.0);
        self.ask.answer.0 as f64 * at.pace.step.0 as f64 * held_up / (1.0 - held_up)
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
