//! Why a command came to nothing: what to do about it, and what programs look at.

use std::path::PathBuf;

/// Sessions that a worker was to hand on and did not.
#[derive(Clone, Debug)]
pub(crate) struct StuckSessions {
    /// The worker's.
    pub(crate) endpoint: String,
    pub(crate) sessions: u64,
    pub(crate) reason: String,
}

fn stuck_sessions_text(workers: &[StuckSessions]) -> String {
    let told = workers
        .iter()
        .map(|StuckSessions { endpoint, sessions, reason: why }| format!("{sessions} at {endpoint} ({why})"));
    told.collect::<Vec<_>>().join(", ")
}

/// Why a command came to nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CtlError {
    /// Nobody could be reached; nothing was changed.
    #[error("{endpoint} cannot be reached: {detail}; --endpoint URL or OWNERSERVE_ENDPOINT says whom to ask")]
    Unreachable { endpoint: String, detail: String },
    /// TLS came to nothing, or was not spoken where it should be; nothing was changed.
    #[error("{endpoint}: {advice} ({detail})")]
    Tls { endpoint: String, advice: &'static str, detail: String },
    /// Of several that were asked, one said no.
    #[error("{0}")]
    Refused(String),
    /// Of several that were to change something, one did not answer.
    #[error("{0}")]
    UnknownOutcome(String),
    /// Of several that were to change something, some did.
    #[error("it was done at {done} and stays so there, but not everywhere: {error}")]
    PartlyDone { done: String, error: String },
    /// A worker was drained, and not all of its sessions moved.
    #[error(
        "sessions stay at who was drained: {}; stopped all the same, it takes their KV along, and their next steps compute it \
         anew elsewhere; --stay drains a worker without moving any",
        stuck_sessions_text(workers)
    )]
    SessionsStuck { workers: Vec<StuckSessions> },
    /// Of several that were asked, not all answered.
    #[error("not every endpoint answered: {0}")]
    EndpointsUnanswered(String),
    /// A write was sent, and no answer came.
    #[error("{endpoint} did not answer: {detail}; the write may or may not have been done: read, then repeat it")]
    WriteUnanswered { endpoint: String, detail: String },
    /// A read was sent, and no answer came.
    #[error(
        "{endpoint} did not answer: {detail}; it was only a read: try again, longer (--timeout) or at another --endpoint"
    )]
    ReadUnanswered { endpoint: String, detail: String },
    /// What was asked for was answered, and it is not well.
    #[error("there are alarms: {0}")]
    Alarms(usize),
    /// Digests of different revisions say nothing of each other.
    #[error(
        "nothing is known of whether the nodes are equal: their digests were of different revisions each time, because \
         the ledger changes quickly or one of them stands still; ask again, and look at REVISION"
    )]
    DigestsNotCompared,
    /// A token is missing, or wrong.
    #[error(
        "{endpoint} lets nobody in without a token it knows: set OWNERSERVE_TOKEN or give --token-file FILE ({detail})"
    )]
    Unauthorized { endpoint: String, detail: String },
    /// The API said no.
    #[error("{title} ({word}): {detail}")]
    Problem { title: String, word: String, detail: String, cause: Option<String> },
    /// It is not the operator API that answers there.
    #[error("{endpoint} does not speak the operator API: {detail}; is it the operators' address, not the clients'?")]
    ForeignResponse { endpoint: String, detail: String },
    /// What was given on the command line cannot be.
    #[error("{0}")]
    Usage(String),
    /// A file.
    #[error("{path}: {source}")]
    File { path: String, source: std::io::Error },
    /// A snapshot that does not hold what was written.
    #[error("{} is no sound snapshot: {detail}; nothing was changed, take another one", path.display())]
    Damaged { path: PathBuf, detail: String },
    /// The ledger's files.
    #[error(transparent)]
    Ownership(#[from] ownership::OwnershipError),
}

impl CtlError {
    /// What ctl itself says no to.
    pub(crate) fn refusal(title: &str, word: &str, detail: String) -> Self {
        Self::Problem { title: title.into(), word: word.into(), detail, cause: None }
    }

    /// 1: refused. 2: bad usage, as clap's. 3: not all answered, nothing was changed. 4: the outcome is not known. 5: there
    /// are alarms. 6: done at some endpoints and not at others, or with some sessions. 7: nothing could be compared.
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

    /// Whether a look may be answered a moment later, or elsewhere.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::ReadUnanswered { .. } => true,
            Self::Problem { word, .. } => matches!(word.as_str(), "too_many" | "not_ready" | "overloaded"),
            _ => false,
        }
    }

    /// The API's word for why it said no, where it has one.
    pub(crate) fn cause(&self) -> Option<&str> {
        match self {
            Self::Problem { cause, .. } => cause.as_deref(),
            _ => None,
        }
    }

    /// What programs look at: the API's own word where it said no, or one of these.
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
