//! Reports to the ledger what the step did, and to the fleet which prompt was routed where.

use std::sync::Arc;
use std::time::Instant;

use prometheus::Histogram;
use workers_shim::events::{HashInputKind, StepPromptChains};
use workers_shim::fleet::Fleet;

use super::RequestEnd;
use crate::ledger_access::LedgerAccess;
use crate::pipeline::commit::{commit, withdraw};
use crate::receipt::RequestOutcome;
use vocabulary::RoutingMode;

/// Commits a complete step; withdraws the intent of any other.
#[derive(Debug)]
pub(in crate::pipeline) struct CommitSink {
    pub(in crate::pipeline) ledger: LedgerAccess,
    pub(in crate::pipeline) fleet: Arc<Fleet>,
    /// Time to hand a commit in, which is stage `commit`; the quorum is not waited for.
    pub(in crate::pipeline) hand_in_seconds: Histogram,
}

impl CommitSink {
    pub(in crate::pipeline) fn record(&self, end: &RequestEnd) {
        let (located, plan) = (&end.step.located, &end.planned.plan);
        match (end.step.mode, end.outcome) {
            // This mode neither reads nor writes the ledger.
            (RoutingMode::Bypass, _) => {}
            // The step was not announced.
            _ if end.attempts.is_empty() => {}
            (_, RequestOutcome::Complete) => {
                let start = Instant::now();
                commit(&self.ledger, located, plan);
                self.hand_in_seconds.observe(start.elapsed().as_secs_f64());
            }
            _ => withdraw(&self.ledger, located),
        }
        if end.outcome == RequestOutcome::Complete {
            let leg = plan.answer_leg();
            let basis = located.identified.fallback_reason().map_or(HashInputKind::Tokens, |_| HashInputKind::Bytes);
            let prompts: Vec<_> = located.identified.chains().collect();
            self.fleet.note_routed(leg.worker, leg.rank, StepPromptChains { prompts: &prompts, basis });
        }
    }
}
