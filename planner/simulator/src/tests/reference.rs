//! Compares our figures with another implementation: a discrete-event model in plain Python, from which the engine's
//! formulas and these policies' rules are taken, run on the committed sessions. `reference.json` is its output.

use serde::Deserialize;
use vocabulary::Tokens;

use super::readers::sessions;
use crate::policies::PolicyKind;
use crate::report::RunStats;
use crate::trace::ReplayLimits;
use crate::{HardwareProfile, Simulation, SimulationSetup};

#[derive(Deserialize, Debug)]
struct ReferenceResult {
    policy: String,
    sessions: f64,
    host_tokens: u64,
    steps: usize,
    first_token_mean: f64,
    first_token_p95: f64,
    step_mean: f64,
    session_mean: f64,
    prefill_tokens: u64,
    hit_rate: f64,
    owner_hit_rate: f64,
    kv_bytes: u64,
    token_mean: f64,
    decode_stall_share: f64,
    prefill_utilization: f64,
    duplicate_factor: f64,
    restored: u64,
}

impl ReferenceResult {
    fn ours(&self, trace: &crate::trace::Trace) -> RunStats {
        let mut spec = HardwareProfile::H100_8B;
        (spec.sizes.device, spec.sizes.host) = (Tokens(200_000), Tokens(self.host_tokens));
        let setup = SimulationSetup { workers: 3, spec, load: self.sessions, seed: 1 };
        let kind = match self.policy.parse().unwrap() {
            // The reference counts evictable cache as used memory, which no engine reports.
            PolicyKind::Llmd => PolicyKind::LlmdCachedCounts,
            kind => kind,
        };
        Simulation::new(trace, kind, setup).unwrap().run(&mut |_, _| {})
    }

    /// Returns name, our value and theirs.
    fn pairs(&self, ours: &RunStats) -> [(&'static str, f64, f64); 14] {
        let tokens = |tokens: u64| tokens as f64;
        [
            ("first token mean", ours.ttft.mean, self.first_token_mean),
            ("first token p95", ours.ttft.p95, self.first_token_p95),
            ("step mean", ours.step.mean, self.step_mean),
            ("session mean", ours.session.mean, self.session_mean),
            ("time per token", ours.tpot.mean, self.token_mean),
            ("prefill tokens", tokens(ours.reuse.prefill_tokens), tokens(self.prefill_tokens)),
            ("hit rate", ours.reuse.cache_hit_rate, self.hit_rate),
            // In the reference, a step of which no worker holds anything any more counts as a full hit.
            ("owner hit rate", ours.reuse.best_holder_hit_rate, self.owner_hit_rate),
            ("restored tokens", tokens(ours.reuse.restored_tokens), tokens(self.restored)),
            ("KV bytes moved", tokens(ours.memory.kv_transfer_bytes), tokens(self.kv_bytes)),
            ("duplicate factor", ours.memory.duplicate_factor, self.duplicate_factor),
            ("decode stall", ours.service.decode_stall_share, self.decode_stall_share),
            ("prefill utilization", ours.service.prefill_utilization, self.prefill_utilization),
            ("steps", ours.steps as f64, self.steps as f64),
        ]
    }
}

#[test]
fn baseline_figures_match_the_reference_implementation() {
    let cells: Vec<ReferenceResult> = serde_json::from_str(include_str!("reference.json")).unwrap();
    let trace = sessions().apply_limits(&ReplayLimits::default());
    assert_eq!((cells.len(), trace.sessions.len()), (40, 35));
    let mut apart = Vec::new();
    for cell in &cells {
        let ours = cell.ours(&trace);
        assert_eq!(ours.unserved, 0, "{cell:?}");
        for (name, seen, expected) in cell.pairs(&ours) {
            if (seen - expected).abs() > 1e-3 * expected.abs().max(1e-3) {
                let ReferenceResult { policy, sessions, host_tokens, .. } = cell;
                apart.push(format!("{policy} {sessions} {host_tokens}: {name} is {seen}, there {expected}"));
            }
        }
    }
    assert_eq!(apart, Vec::<String>::new());
}
