//! Why a trace was refused: which file, which line, and what would have been accepted.

/// A trace that cannot be replayed as it is. The fault is the file's; the line says where to mend it.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
#[error("{file}:{line}: {fault}")]
pub struct TraceError {
    /// The file's name as it was given.
    pub file: String,
    /// From 1.
    pub line: usize,
    /// What is wrong.
    pub fault: TraceFault,
}

/// What is wrong with a trace.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
pub enum TraceFault {
    /// Not one of the forms that are read.
    #[error(
        "not a trace that is known here; accepted are agent sessions (a JSON document with `requests`, or JSON lines \
         with `reqs`), Mooncake (JSON lines with `timestamp`, `input_length`, `output_length`, `hash_ids`), Azure \
         (CSV: TIMESTAMP,ContextTokens,GeneratedTokens), lmcache (JSON lines with `timestamp`, `session_id`, `input`, \
         `output`), Claude Code (JSON lines with `uuid`, `parentUuid`, `message`), tau_bench (a JSON list of dialogues \
         with `traj`) and a router's decision log (its folder `decisions`), \
         each plain or gzipped"
    )]
    UnknownFormat,
    /// Not well-formed, or with fields that this form does not have.
    #[error("{why}; accepted: {accepted}")]
    Malformed {
        /// What the parser says.
        why: String,
        /// What such a line looks like.
        accepted: &'static str,
    },
    /// A number that no real trace holds.
    #[error("`{field}` is {value}; accepted: {accepted}")]
    OutOfRange {
        /// Which field.
        field: &'static str,
        /// What it holds.
        value: String,
        /// What it may hold.
        accepted: &'static str,
    },
    /// Nothing to replay.
    #[error("holds no request; accepted: at least one")]
    Empty,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct TraceLocation<'a> {
    pub(crate) file: &'a str,
    pub(crate) line: usize,
}

impl TraceLocation<'_> {
    pub(crate) fn fault(&self, fault: TraceFault) -> TraceError {
        TraceError { file: self.file.to_owned(), line: self.line, fault }
    }

    pub(crate) fn out_of_range(&self, field: &'static str, value: impl ToString, accepted: &'static str) -> TraceError {
        self.fault(TraceFault::OutOfRange { field, value: value.to_string(), accepted })
    }
}
