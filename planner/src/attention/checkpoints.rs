//! Window checkpoints: how often the sliding windows of a sequence are stored with its blocks. A prefix can be
//! restored without recomputation only where its windows are stored; elsewhere everything after the last checkpoint is
//! recomputed.

use serde::{Deserialize, Serialize};
use vocabulary::Tokens;

use super::{AttentionSpec, SpecError};
use crate::lcm::lcm;
use crate::micros::valid_or_zero;

/// How often windows are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum WindowCheckpointInterval {
    /// At every token, as in engines that keep windows in blocks like all other KV.
    #[default]
    Full,
    /// At every multiple of this many tokens.
    EveryTokens(Tokens),
    /// Never: a restore recomputes the last n_win x L tokens.
    None,
}

/// Costs of storing and restoring windows. Negative or non-finite values count as zero.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WindowCheckpointCosts {
    /// Microseconds to write a byte.
    pub write: f64,
    /// Microseconds to load a byte.
    pub load: f64,
    /// Microseconds to compute a token.
    pub compute: f64,
    /// Restores of a sequence per token that it grows by.
    pub restores: f64,
}

impl WindowCheckpointInterval {
    /// Returns the last position up to `tokens`, a multiple of `unit`, whose windows are stored.
    pub fn last_stored(self, tokens: Tokens, unit: Tokens) -> Tokens {
        let unit = match self {
            Self::Full => unit,
            Self::EveryTokens(period) => Tokens(lcm(period.0, unit.0)),
            Self::None => return Tokens::ZERO,
        };
        tokens.whole_blocks(unit).tokens(unit)
    }

    /// Returns the cheapest interval for a model whose sequences can be stored at every multiple of `unit`, with its
    /// cost in microseconds per token. Among equal costs the interval that stores more wins.
    ///
    /// With W bytes of windows, w of them per token, and h restores per token, the cost per token is
    /// `write w + h load W` when all are stored, `write W / p + h (load W + compute (p - unit) / 2)` with a checkpoint
    /// every p tokens, and `h compute n_win L` with none. The second is lowest at `p = sqrt(2 write W / (h compute))`.
    pub fn choose(spec: &AttentionSpec, unit: Tokens, costs: &WindowCheckpointCosts) -> (Self, f64) {
        let unit = Tokens(lcm(unit.0, spec.block().0));
        let p = costs.best_period(spec) / unit.0 as f64;
        let periods = [p.floor(), p.ceil()]
            .map(|n| Self::EveryTokens(unit * (n as u64).clamp(1, (MAX_PERIOD / unit.0.max(1)).max(1))));
        let all = [Self::Full, periods[0], periods[1], Self::None];
        let priced = all.map(|policy| (policy, costs.cost_per_token(spec, unit, policy)));
        priced.into_iter().reduce(|best, next| if next.1 < best.1 { next } else { best }).unwrap_or_default()
    }

    /// Checks that the interval is valid for a model.
    pub(super) fn check(self, spec: &AttentionSpec) -> Result<(), SpecError> {
        match self {
            Self::EveryTokens(Tokens(period)) if period == 0 || period > MAX_PERIOD || period % spec.block().0 != 0 => {
                let accepted = format!("a multiple of {} tokens, up to {MAX_PERIOD}", spec.block());
                Err(SpecError::field("window_checkpoints.every_tokens", period, accepted))
            }
            _ => Ok(()),
        }
    }
}

/// Longest interval, in tokens.
const MAX_PERIOD: u64 = 1 << 24;

impl WindowCheckpointCosts {
    fn best_period(&self, spec: &AttentionSpec) -> f64 {
        let computing = valid_or_zero(self.restores) * valid_or_zero(self.compute);
        let writing = valid_or_zero(self.write) * full_window_bytes(spec);
        if computing > 0.0 { (2.0 * writing / computing).sqrt() } else { MAX_PERIOD as f64 }
    }

    pub(super) fn cost_per_token(&self, spec: &AttentionSpec, unit: Tokens, policy: WindowCheckpointInterval) -> f64 {
        let [write, load, compute, restores] = [self.write, self.load, self.compute, self.restores].map(valid_or_zero);
        let windows = full_window_bytes(spec);
        match policy {
            WindowCheckpointInterval::Full => {
                write * spec.window_bytes_per_token().0 as f64 + restores * load * windows
            }
            WindowCheckpointInterval::EveryTokens(period) => {
                let again = (period - unit).0 as f64 / 2.0;
                write * windows / period.0.max(1) as f64 + restores * (load * windows + compute * again)
            }
            WindowCheckpointInterval::None => restores * compute * spec.window_depth().0 as f64,
        }
    }
}

/// Returns the bytes of all windows when full.
fn full_window_bytes(spec: &AttentionSpec) -> f64 {
    spec.window_bytes(Tokens(u64::MAX)).0 as f64
}
