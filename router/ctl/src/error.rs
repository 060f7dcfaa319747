//! Errors of `ctl`: advice for people, and codes for programs.

use std::path::PathBuf;

/// Sessions of a draining worker that could not be moved.
#[derive(Clone, Debug)]
pub(crate) struct StuckSessions {
    /// Endpoint of the worker.
    pub(crate) endpoint: String,
    pub(crate) sessions: u64,
    pub(crate) reason: String,
}

fn stuck_sessions_text(workers: &[StuckSessions]) -> String {
    let lines = workers
        .iter()
        .map(|StuckSessions { endpoint, sessions, reason: why }| format!("{sessions} at {endpoint} ({why})"));
    lines.collect::<Vec<_>>().join(", ")
}

/// Errors of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CtlError {
    /// No endpoint could be reached; nothing was changed.
    #[error(
        "{endpoint} cannot be reached: {detail}; set the address of a router with --endpoint URL or OWNERSERVE_ENDPOINT"
    )]
    Unreachable { endpoint: String, detail: String },
    /// TLS failed, or was missing where required; nothing was changed.
    #[error("{endpoint}: {advice} ({detail})")]
    Tls { endpoint: String, advice: &'static str, detail: String },
    /// One of several endpoints refused.
    #[error("{0}")]
    Refused(String),
    /// One of several endpoints did not answer a write.
    #[error("{0}")]
    UnknownOutcome(String),
    /// Only some of several endpoints carried out a write.
    #[error("done at {done}, but not at every endpoint: {error}; repeat the command to do it everywhere")]
    PartlyDone { done: String, error: String },
    /// A worker was drained, but not all of its sessions moved.
    #[error(
        "sessions could not be moved from drained workers: {}; if such a worker stops, their KV is lost and their next \
         steps compute it again elsewhere. --keep-sessions drains a worker without moving any",
        stuck_sessions_text(workers)
    )]
    SessionsStuck { workers: Vec<StuckSessions> },
    /// Not all of several endpoints answered.
    #[error("not every endpoint answered: {0}")]
    EndpointsUnanswered(String),
    /// A write was sent but not answered.
    #[error(
        "{endpoint} did not answer: {detail}; the write may or may not have been done: read the state, then repeat the command"
    )]
    WriteUnanswered { endpoint: String, detail: String },
    /// A read was sent but not answered.
    #[error(
        "{endpoint} did not answer: {detail}; it was only a read: try again with a longer --timeout or another --endpoint"
    )]
    ReadUnanswered { endpoint: String, detail: String },
    /// The requested check was answered and found problems.
    #[error("there are alarms: {0}")]
    Alarms(usize),
    /// Digests of different revisions cannot be compared.
    #[error(
        "the nodes could not be compared: their state hashes were of different revisions each time, because the ledger \
         changes quickly or a node does not advance; try again, and look at REVISION"
    )]
    DigestsNotCompared,
    /// The token is missing or wrong.
    #[error("{endpoint} rejected the token, or none was given: set OWNERSERVE_TOKEN or --token-file FILE ({detail})")]
    Unauthorized { endpoint: String, detail: String },
    /// The API returned a problem.
    #[error("{title} ({word}): {detail}")]
    Problem { title: String, word: String, detail: String, reason: Option<String> },
    /// The server at this endpoint is not the operator API.
    #[error(
        "{endpoint} does not speak the operator API: {detail}; give the address of operator.listen, not of proxy.listen"
    )]
    ForeignResponse { endpoint: String, detail: String },
    /// The command line is invalid.
    #[error("{0}")]
    Usage(String),
    /// A file operation failed.
    #[error("{path}: {source}")]
    File { path: String, source: std::io::Error },
    /// A snapshot is damaged.
    #[error("{} is not a valid snapshot: {detail}; nothing was changed. Use another snapshot", path.display())]
    Damaged { path: PathBuf, detail: String },
    /// The ledger's files cannot be read or written.
    #[error(transparent)]
    Ownership(#[from] ownership::LedgerNodeError),
}

impl CtlError {
    /// Creates a refusal of `ctl` itself.
    pub(crate) fn refusal(title: &str, word: &str, detail: String) -> Self {
        Self::Problem { title: title.into(), word: word.into(), detail, reason: None }
    }

    /// Exit codes: 1 refused, 2 usage error (as clap's), 3 not all answered and nothing was changed, 4 outcome
    /// unknown, 5 alarms, 6 done at some endpoints or with some sessions only, 7 nothing could be compared.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Unreachable { .. }
            | Self::Tls { .. }
            | Self::ReadUnanswered { .. }
            | Self::EndpointsUnanswered(_) => 3,
            Self::Alarms(_) => 5,
            Self::WriteUnanswered { .. } | Self::UnknownOutcome(_) => 4,
            Self::PartlyDone { .. } | Self::SessionsStuck { .. } => 6,
            Self::DigestsNotCompared => 7,
            Self::Problem { word, .. } if word == "unknown_outcome" => 4,
            _ => 1,
        }
    }

    /// Returns whether a read may succeed a moment later, or at another endpoint.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::ReadUnanswered { .. } => true,
            Self::Problem { word, .. } => {
                matches!(word.as_str(), "too_many_requests" | "not_ready" | "commit_queue_full")
            }
            _ => false,
        }
    }

    /// Returns the API's reason of a refusal, if it has one.
    pub(crate) fn reason(&self) -> Option<&str> {
        match self {
            Self::Problem { reason, .. } => reason.as_deref(),
            _ => None,
        }
    }

    /// Returns the error code for programs: the API's own word for a problem, or one of these.
    pub(crate) fn error_code(&self) -> &str {
        match self {
            Self::Unreachable { .. } => "unreachable",
            Self::Tls { .. } => "tls",
            Self::Refused(_) => "refused",
            Self::UnknownOutcome(_) | Self::WriteUnanswered { .. } => "unknown_outcome",
            Self::PartlyDone { .. } | Self::SessionsStuck { .. } => "partly_done",
            Self::EndpointsUnanswered(_) | Self::ReadUnanswered { .. } => "unanswered",
            Self::Alarms(_) => "alarms",
            Self::DigestsNotCompared => "not_compared",
            Self::Unauthorized { .. } => "unauthorized",
            Self::Problem { word, .. } => word,
            Self::ForeignResponse { .. } => "not_the_operator_api",
            Self::Usage(_) => "usage",
            Self::File { .. } => "file",
            Self::Damaged { .. } => "damaged",
            Self::Ownership(_) => "ledger",
        }
    }
}
