//! What it costs a session to have again what was pushed out of device memory: computing it, or loading it from the host
//! tier that it fell into.

use vocabulary::{Tokens, WorkerView};

use crate::micros::{ComputeRate, valid_or_zero};
use crate::{AttentionSpec, LowerTiers};

/// One worker's price of having tokens again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvictionCost {
    rate: ComputeRate,
    /// The chance that what was pushed out still lies in the host tier when it is wanted.
    host_retention: f64,
    /// Microseconds to load a token from there.
    load_per_token: f64,
}

impl EvictionCost {
    /// What is evicted stays in the host tier until as much as that tier holds was evicted after it. Of what does not fit
    /// into device memory any more the tier is taken to keep its share of both: copies that nobody wants lie in it as well.
    pub(crate) fn of(
        (view, rate): (&WorkerView, ComputeRate),
        tiers: &LowerTiers,
        attention: Option<&AttentionSpec>,
    ) -> Self {
        let bytes_per_second = valid_or_zero(tiers.host_bytes_per_second);
        if tiers.host_tokens == Tokens::ZERO || bytes_per_second == 0.0 {
            return Self { rate, host_retention: 0.0, load_per_token: 0.0 };
        }
        let (host, device) = (tiers.host_tokens.0 as f64, view.capacity.kv.0 as f64);
        let token = attention.map_or(view.kv_bytes_per_token, AttentionSpec::bytes_per_token);
        Self { rate, host_retention: host / (host + device), load_per_token: token.0 as f64 * 1e6 / bytes_per_second }
    }

    /// Microseconds for tokens `from..to`.
    pub(crate) fn span(&self, from: Tokens, to: Tokens) -> f64 {
        self.recompute_or_reload(self.rate.span(from, to).0 as f64, to - from)
    }

    /// For the first `to` tokens.
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
