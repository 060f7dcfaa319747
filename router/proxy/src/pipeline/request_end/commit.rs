//! Tells the ledger what the step did, and the fleet which prompt was routed where.

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
    /// Duration of stage `commit`.
    pub(in crate::pipeline) seconds: Histogram,
}

impl CommitSink {
    pub(in crate::pipeline) fn record(&self, end: &RequestEnd) {
        let (located, plan) = (&end.step.located, &end.planned.plan);
        match (end.step.mode, end.outcome) {
            // In this mode the ledger is not asked, and so not told either.
            (RoutingMode::Bypass, _) => {}
            // The step was not announced.
            _ if end.attempts.is_empty() => {}
            (_, RequestOutcome::Complete) => {
                let since = Instant::now();
                commit(&self.ledger, located, plan);
                self.seconds.observe(since.elapsed().as_secs_f64());
            }
            _ => withdraw(&self.ledger, located),
        }
        if end.outcome == RequestOutcome::Complete {
            let leg = plan.answer_leg();
            let by = located.identified.fallback_reason().map_or(HashInputKind::Tokens, |_| HashInputKind::Bytes);
            let prompts: Vec<_> = located.identified.chains().collect();
            self.fleet.note_routed(leg.worker, leg.rank, StepPromptChains { prompts: &prompts, basis: by });
        }
    }
}
