//! When the windows of a sequence are stored beside its blocks. A prefix comes back whole only where they are; elsewhere
//! what follows the last place where they are is computed again.

use serde::{Deserialize, Serialize};
use vocabulary::Tokens;

use super::{AttentionSpec, SpecError};
use crate::lcm::lcm;
use crate::micros::weight;

/// How often windows are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum Checkpoints {
    /// Every token's, as engines do that keep windows in blocks like everything else.
    #[default]
    Full,
    /// Those at every so many tokens.
    Every(Tokens),
    /// Never: the last n_win x L tokens are computed again.
    None,
}

/// What storing and restoring costs. Negative or not finite counts as zero.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CheckpointCosts {
    /// Microseconds to write a byte.
    pub write: f64,
    /// Microseconds to load a byte.
    pub load: f64,
    /// Microseconds to compute a token.
    pub compute: f64,
    /// How many times a sequence is restored for each token that it grows by.
    pub restores: f64,
}

impl Checkpoints {
    /// The last place up to `tokens` whose windows are stored, at a multiple of `unit`.
    pub fn last(self, tokens: Tokens, unit: Tokens) -> Tokens {
        let unit = match self {
            Self::Full => unit,
            Self::Every(period) => Tokens(lcm(period.0, unit.0)),
            Self::None => return Tokens::ZERO,
        };
        tokens.whole_blocks(unit).tokens(unit)
    }

    /// The cheapest for a model whose sequences can be stored at every multiple of `unit`, with its cost in microseconds
    /// a token. Of equal ones the one that stores more.
    ///
    /// With W bytes of windows, w of them a token, and h restores a token, a token costs
    /// `write w + h load W` with all of them stored, `write W / p + h (load W + compute (p - unit) / 2)` at every p
    /// tokens, and `h compute n_win L` with none. The middle one is least at `p = sqrt(2 write W / (h compute))`.
    pub fn choose(spec: &AttentionSpec, unit: Tokens, costs: &CheckpointCosts) -> (Self, f64) {
        let unit = Tokens(lcm(unit.0, spec.block().0));
        let p = costs.best_period(spec) / unit.0 as f64;
        let periods =
            [p.floor(), p.ceil()].map(|n| Self::Every(unit * (n as u64).clamp(1, (LONGEST / unit.0.max(1)).max(1))));
        let all = [Self::Full, periods[0], periods[1], Self::None];
        let priced = all.map(|policy| (policy, costs.of_a_token(spec, unit, policy)));
        priced.into_iter().reduce(|best, next| if next.1 < best.1 { next } else { best }).unwrap_or_default()
    }

    /// Whether it can be kept up for a model.
    pub(super) fn check(self, spec: &AttentionSpec) -> Result<(), SpecError> {
        match self {
            Self::Every(Tokens(period)) if period == 0 || period > LONGEST || period % spec.block().0 != 0 => {
                let accepted = format!("a multiple of {} tokens, up to {LONGEST}", spec.block());
                Err(SpecError::field("checkpoints.every", period, accepted))
            }
            _ => Ok(()),
        }
    }
}

/// The longest period, in tokens.
const LONGEST: u64 = 1 << 24;

impl CheckpointCosts {
    fn best_period(&self, spec: &AttentionSpec) -> f64 {
        let computing = weight(self.restores) * weight(self.compute);
        let writing = weight(self.write) * all_windows(spec);
        if computing > 0.0 { (2.0 * writing / computing).sqrt() } else { LONGEST as f64 }
    }

    pub(super) fn of_a_token(&self, spec: &AttentionSpec, unit: Tokens, policy: Checkpoints) -> f64 {
        let [write, load, compute, restores] = [self.write, self.load, self.compute, self.restores].map(weight);
        let windows = all_windows(spec);
        match policy {
            Checkpoints::Full => write * spec.window_token().0 as f64 + restores * load * windows,
            Checkpoints::Every(period) => {
                let again = (period - unit).0 as f64 / 2.0;
                write * windows / period.0.max(1) as f64 + restores * (load * windows + compute * again)
            }
            Checkpoints::None => restores * compute * spec.window_depth().0 as f64,
        }
    }
}

/// Bytes of the windows of a long sequence.
fn all_windows(spec: &AttentionSpec) -> f64 {
    spec.windows(Tokens(u64::MAX)).0 as f64
}
