//! Hands the prompt of a complete step to those that need it: the check of its transfer, the prefix replication, which
//! acts while the session waits for its next step, and the store for later moves.

use std::sync::Arc;

use planner::TransferPermission;
use vocabulary::Bytes;

use super::RequestEnd;
use crate::prefix_replication::PrefixReplicator;
use crate::prompts::{RetainedPrompt, RetainedPromptStore};
use crate::receipt::{RequestOutcome, StepObservation};
use crate::telemetry::metrics::InterStepKvMetrics;
use crate::transfer_checker::{CompletedTransfer, TransferChecker};

/// Stores the prompts of complete steps, and checks their transfers.
#[derive(Debug)]
pub(in crate::pipeline) struct PromptSink {
    pub(in crate::pipeline) checker: TransferChecker,
    pub(in crate::pipeline) replicator: Arc<PrefixReplicator>,
    pub(in crate::pipeline) prompts: Arc<RetainedPromptStore>,
    pub(in crate::pipeline) metrics: InterStepKvMetrics,
}

impl PromptSink {
    /// Takes the prompt's token ids and block hashes out of the step.
    pub(in crate::pipeline) fn record(&self, end: &mut RequestEnd, observation: &StepObservation) {
        if end.outcome != RequestOutcome::Complete || end.step.request.transfers != TransferPermission::Allowed {
            return;
        }
        let session = end.step.located.session.id;
        let Some(prompt) = RetainedPrompt::of(&mut end.step).map(Arc::new) else { return };
        if let Some(transfer) =
            CompletedTransfer::of(&end.planned.plan).filter(|_| observation.transferred_bytes > Bytes::ZERO)
        {
            self.checker.check_if_due(transfer, &prompt);
        }
        let served = (end.target(), end.answer.usage);
        self.replicator.record_step_end(&self.metrics, (&end.step, &prompt), served);
        self.prompts.insert(session, prompt);
    }
}
