//! Submits writes to the ledger and converts its refusals to problems.

use std::sync::Arc;
use std::time::Duration;

use ownership::ledger::{Command, Outcome, Refusal};
use ownership::{Consistency, LedgerView};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{Blocks, Bytes, DpRank, Epoch, Incarnation, Owner, WorkerId};

use super::consistency::LedgerResponse;
use super::entity_tags::EntityTag;
use super::problem::{Problem, ProblemKind};
use super::schemas::{EpochSchema, WorkerIdSchema};
use proxy::ledger_access::LedgerAccess;
use vocabulary::TimeSpan;

/// Maximum wait for a command's outcome; after that the outcome is unknown.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Result of a write.
#[derive(Serialize, ToSchema)]
pub(super) struct WriteResult {
    /// What was done, in words.
    result: String,
    /// Epoch of the grant that the write made or found: the fencing token from now on.
    #[schema(value_type = Option<EpochSchema>)]
    epoch: Option<Epoch>,
    /// The transfer between workers that it needed; null without one.
    transfer: Option<KvTransferReport>,
}

/// A transfer of blocks from one worker to another.
#[derive(Serialize, ToSchema)]
pub(super) struct KvTransferReport {
    /// The worker that sent them, and still has them.
    #[schema(value_type = WorkerIdSchema)]
    pub(super) source: WorkerId,
    /// The worker that received them.
    #[schema(value_type = WorkerIdSchema)]
    pub(super) target: WorkerId,
    /// Blocks from the start of the prefix.
    #[schema(value_type = u64)]
    pub(super) blocks: Blocks,
    /// Bytes of KV.
    #[schema(value_type = u64)]
    pub(super) bytes: Bytes,
    /// How long the transfer took.
    pub(super) duration: TimeSpan,
    /// Whether the source computed again what it was believed to hold.
    pub(super) source_recomputed: bool,
}

impl WriteResult {
    /// Result of a write without a grant.
    pub(super) fn plain(ledger: &LedgerAccess, result: impl Into<String>) -> LedgerResponse<WriteResult> {
        LedgerResponse::new(&ledger.directory().view(), Self { result: result.into(), epoch: None, transfer: None })
    }

    /// Result of a write that granted `epoch`.
    pub(super) fn granted(
        ledger: &LedgerAccess,
        result: impl Into<String>,
        epoch: Epoch,
    ) -> LedgerResponse<WriteResult> {
        Self { result: result.into(), epoch: Some(epoch), transfer: None }.into_response(ledger)
    }

    /// Result of a write that transferred blocks, if necessary.
    pub(super) fn with(result: impl Into<String>, epoch: Option<Epoch>, transfer: Option<KvTransferReport>) -> Self {
        Self { result: result.into(), epoch, transfer }
    }

    /// Converts to a response, tagged with the granted epoch.
    pub(super) fn into_response(self, ledger: &LedgerAccess) -> LedgerResponse<WriteResult> {
        let tag = self.epoch.map(EntityTag::of_grant);
        let answer = LedgerResponse::new(&ledger.directory().view(), self);
        match tag {
            Some(tag) => answer.with_tag(tag),
            None => answer,
        }
    }
}

/// An empty object.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EmptyBody {}

/// What the write was based on.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "describes the header that `IfMatch` reads")]
pub(super) struct RequiredIfMatchSchema {
    /// The ETag of what was read, or `*` for the present state. Its epoch fences the command: the ledger refuses the command after another grant.
    #[param(rename = "If-Match", pattern = r#"^(\*|"[0-9]{1,9}\.[0-9]{1,18}\.[0-9]{1,9}(-[0-9a-f]{16})?")$"#)]
    if_match: String,
}

/// What the write may have been based on.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "describes the header that `IfMatch` reads")]
pub(super) struct OptionalIfMatchSchema {
    /// The ETag of what was read; the write is refused after another grant. Without it the write is not fenced.
    #[param(rename = "If-Match", pattern = r#"^(\*|"[0-9]{1,9}\.[0-9]{1,18}\.[0-9]{1,9}(-[0-9a-f]{16})?")$"#)]
    if_match: Option<String>,
}

/// A worker that is to own or hold something: its present incarnation, unless another is named.
#[derive(Clone, Copy, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct OwnerTarget {
    #[schema(value_type = WorkerIdSchema)]
    worker: WorkerId,
    /// Data-parallel rank; 0 when left out.
    #[serde(default)]
    rank: u16,
    /// Incarnation; the present one when left out.
    incarnation: Option<u64>,
}

impl OwnerTarget {
    /// Returns the owner as the ledger identifies it.
    pub(super) fn owner(self, view: &LedgerView) -> Result<Owner, Problem> {
        let record = view.worker(self.worker).ok_or_else(|| refusal_problem(&Refusal::UnknownWorker))?;
        let incarnation = self.incarnation.map_or(record.incarnation, Incarnation);
        // The ledger's own refusal would not tell the valid ranks.
        if incarnation == record.incarnation && self.rank >= record.spec.ranks {
            let (rank, last) = (self.rank, record.spec.ranks.saturating_sub(1));
            let detail = format!("Nothing was changed: the worker has no rank {rank}; its ranks are 0 to {last}.");
            return Err(Problem::new(ProblemKind::Conflict, detail).with_reason("unknown_rank"));
        }
        Ok(Owner { worker: self.worker, incarnation, rank: DpRank(self.rank) })
    }
}

/// Submits a command to the ledger and waits for its outcome.
pub(super) async fn commit(ledger: &LedgerAccess, command: Command) -> Result<Outcome, Problem> {
    if ledger.directory().view().quorum().stale {
        return Err(Problem::no_quorum());
    }
    let ticket = ledger.directory().submit(command)?;
    let outcome = tokio::time::timeout(COMMIT_TIMEOUT, ticket).await.map_err(|_| Problem::unknown_outcome())??;
    match outcome {
        Outcome::Refused(refusal) => Err(refusal_problem(&refusal)),
        Outcome::Batch(ref all) if let Some(refusal) = outcome.refusals().first().filter(|_| !all.is_empty()) => {
            Err(refusal_problem(refusal))
        }
        Outcome::Forgotten => Err(Problem::unknown_outcome()),
        outcome => {
            // Makes sure that the response's revision includes the write, wherever the leader is. The write stands
            // even if this fails.
            let _ = ledger.directory().read(Consistency::Linearizable).await;
            Ok(outcome)
        }
    }
}

/// Returns a linearizable view to decide a write on. Without a quorum no write is decided, not even one without
/// effect.
pub(super) async fn linearizable_view(ledger: &LedgerAccess) -> Result<Arc<LedgerView>, Problem> {
    if ledger.directory().view().quorum().stale {
        return Err(Problem::no_quorum());
    }
    ledger.directory().read(Consistency::Linearizable).await.map_err(|_| Problem::no_quorum())
}

/// Returns the epoch that a command was granted.
pub(super) fn granted_epoch(outcome: &Outcome) -> Epoch {
    match outcome {
        Outcome::Granted { epoch } | Outcome::Opened { epoch } | Outcome::Sealed { epoch, .. } => *epoch,
        _ => Epoch::default(),
    }
}

/// Converts a refusal of the ledger to a problem with advice.
pub(super) fn refusal_problem(refusal: &Refusal) -> Problem {
    let kind = match refusal {
        Refusal::StaleEpoch { .. } | Refusal::LeaseChanged => ProblemKind::PreconditionFailed,
        Refusal::UnknownSession | Refusal::UnknownArtifact => ProblemKind::NotFound,
        Refusal::InvalidBlockRange | Refusal::InvalidBatch | Refusal::InvalidAddress | Refusal::InvalidLimits => {
            ProblemKind::Unprocessable
        }
        _ => ProblemKind::Conflict,
    };
    let problem = Problem::new(kind, format!("Nothing was changed: {refusal}. {}", refusal_advice(refusal)))
        .with_reason(refusal.reason());
    match refusal {
        Refusal::StaleEpoch { current } => problem.with_epoch(*current),
        Refusal::AlreadyOwned { by, epoch } => problem.with_epoch(*epoch).with_owner(*by),
        _ => problem,
    }
}

fn refusal_advice(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::StaleIncarnation => "GET /ownerserve/v1/leases/WORKER tells its present incarnation and ranks.",
        Refusal::UnknownWorker => "GET /ownerserve/v1/leases lists the workers that the ledger knows.",
        Refusal::LeaseExpired => "A router registers the worker again once it reaches it.",
        Refusal::LeaseChanged | Refusal::StaleEpoch { .. } => "Read it again, and decide on what is there now.",
        Refusal::AlreadyOwned { .. } => "Migrate it, or wait until its owner's lease is over.",
        Refusal::UnknownSession => "GET /ownerserve/v1/sessions lists the open ones.",
        Refusal::SessionScopeMismatch => "Check tenant and model.",
        Refusal::UnknownArtifact => "GET /ownerserve/v1/artifacts lists those that there are.",
        Refusal::UnknownPrefix => "It was never sealed, was merged into a longer artifact, or is gone.",
        Refusal::InvalidBlockRange | Refusal::InvalidBatch => "This is an error of the router; its log has it.",
        Refusal::UnknownClient => "Send it again.",
        Refusal::LedgerFull => {
            "Evict artifacts, close sessions, retire workers, or take back quotas, whichever this was one more of."
        }
        Refusal::FeatureLevelTooLow { .. } => {
            "PUT /ownerserve/v1/cluster/feature-level raises it; there is no way back."
        }
        Refusal::QuotaExceeded { .. } => "Raise the tenant's quota, or evict what it does not need.",
        Refusal::WorkerDraining => "Choose another worker, or end the drain.",
        Refusal::Pinned => "PUT /ownerserve/v1/artifacts/ID/pin with {\"pinned\": false} takes it back.",
        Refusal::Referenced => "Close the sessions first, or let them go idle.",
        Refusal::UnknownNode | Refusal::NodeRemoved { .. } => "GET /ownerserve/v1/cluster lists the nodes.",
        Refusal::InvalidAddress => "Give HOST:PORT.",
        Refusal::InvalidLimits => "Give bounds that are at least the present ones.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_includes_the_current_epoch_and_a_remedy() {
        let current = Epoch { generation: 0, index: 9, position: 1 };
        let stale = refusal_problem(&Refusal::StaleEpoch { current });
        assert_eq!(stale, refusal_problem(&Refusal::StaleEpoch { current }).with_epoch(current));
        assert_eq!(stale.kind(), ProblemKind::PreconditionFailed);
        let by = Owner { worker: WorkerId(1), incarnation: Incarnation(2), rank: DpRank(0) };
        assert_eq!(refusal_problem(&Refusal::AlreadyOwned { by, epoch: current }).kind(), ProblemKind::Conflict);
        assert_eq!(refusal_problem(&Refusal::UnknownSession).kind(), ProblemKind::NotFound);
    }
}
