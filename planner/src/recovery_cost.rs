//! Cost to a session of getting KV back that was evicted from device memory: recomputing it, or loading it from the
//! host tier if it is still there.

use vocabulary::{Tokens, WorkerView};

use crate::micros::{PrefillTimeModel, valid_or_zero};
use crate::{AttentionSpec, LowerTiers};

/// Cost of getting evicted tokens back at one worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecoveryCostModel {
    rate: PrefillTimeModel,
    /// Chance that evicted KV is still in the host tier when it is needed.
    host_retention: f64,
    /// Microseconds to load one token from the host tier.
    load_per_token: f64,
}

impl RecoveryCostModel {
    /// Estimates the costs for a worker. Evicted KV stays in the host tier until as many tokens as the tier holds were
    /// evicted after it. The chance that a token is still there is `host / (host + device)`: the tier also holds copies
    /// that nobody needs.
    pub(crate) fn of(
        (view, rate): (&WorkerView, PrefillTimeModel),
        tiers: &LowerTiers,
        attention: Option<&AttentionSpec>,
    ) -> Self {
        let bytes_per_second = valid_or_zero(tiers.host_bandwidth);
        if tiers.host_tokens == Tokens::ZERO || bytes_per_second == 0.0 {
            return Self { rate, host_retention: 0.0, load_per_token: 0.0 };
        }
        let (host, device) = (tiers.host_tokens.0 as f64, view.capacity.kv.0 as f64);
        let token = attention.map_or(view.kv_bytes_per_token, AttentionSpec::bytes_per_token);
        Self { rate, host_retention: host / (host + device), load_per_token: token.0 as f64 * 1e6 / bytes_per_second }
    }

    /// Returns the microseconds to restore tokens `from..to`.
    pub(crate) fn span(&self, from: Tokens, to: Tokens) -> f64 {
        self.recompute_or_reload(self.rate.span(from, to).0 as f64, to - from)
    }

    /// Returns the microseconds to restore the first `to` tokens.
    pub(crate) fn first(&self, to: Tokens) -> f64 {
        self.recompute_or_reload(self.rate.first(to), to)
    }

    fn recompute_or_reload(&self, computing: f64, tokens: Tokens) -> f64 {
        if self.host_retention == 0.0 {
            return computing;
        }
        let loading = (self.load_per_token * tokens.0 as f64).min(computing);
        computing + self.host_retention * (loading - computing)
    }
}
