//! Submissions on their way into a log entry, and what comes back.

use ledger::{Outcome, Submission};
use tokio::sync::oneshot;

/// Submissions that become one entry.
#[derive(Debug)]
pub(crate) struct ProposalBatch {
    pub(crate) submissions: Vec<Submission>,
    pub(crate) answer: oneshot::Sender<ProposalResult>,
}

/// One outcome per submission, or the submissions back.
pub(crate) type ProposalResult = Result<Vec<Outcome>, ReturnedSubmissions>;

/// Submissions that may not have become an entry. Submitting them again executes them only once.
#[derive(Debug)]
pub(crate) struct ReturnedSubmissions {
    pub(crate) submissions: Vec<Submission>,
    pub(crate) fate: SubmissionFate,
}

/// What is known of unanswered submissions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SubmissionFate {
    /// They entered no log.
    NotAccepted,
    /// They may still be executed.
    Unknown,
}
