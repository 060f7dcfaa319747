//! Cost of a candidate by term.

use serde::{Deserialize, Serialize};
use vocabulary::Micros;

/// Cost of one candidate. All terms are durations, so that they can be added and compared.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
pub struct CostTerms {
    /// `T_queue`: time until the workers of the legs start on it.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub queue: Micros,
    /// `T_compute`: computing the prompt tokens that are not cached where they are needed.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub compute: Micros,
    /// `T_network`: moving KV between workers.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub network: Micros,
    /// `T_restore`: loading KV from slower tiers, and the first decode step.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub restore: Micros,
    /// `lambda * M_hbm`: device memory taken from other sessions.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub memory: Micros,
    /// `mu * I_decode`: time that other requests lose.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub interference: Micros,
    /// `T_eviction`: recomputation of the KV that this step evicts from device memory.
    #[serde(default, with = "vocabulary::micros_with_unit")]
    pub eviction: Micros,
}

impl CostTerms {
    /// Predicted time to first token: the sum of the terms that are this step's own time.
    pub fn time_to_first_token(&self) -> Micros {
        self.queue + self.compute + self.network + self.restore
    }

    /// Total cost: the sum of all terms, saturating.
    pub fn total(&self) -> Micros {
        self.queue + self.compute + self.network + self.restore + self.memory + self.interference + self.eviction
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_cost_saturates() {
        let terms = CostTerms { queue: Micros(u64::MAX), compute: Micros(1), ..CostTerms::default() };
        assert_eq!(terms.total(), Micros(u64::MAX));
    }
}
