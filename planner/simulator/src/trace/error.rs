//! Errors of trace parsing: file, line, and what would be accepted.

/// Why a trace cannot be replayed. The fault of the file; the line says where to fix it.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
#[error("{file}:{line}: {fault}")]
pub struct TraceError {
    /// Name of the file, as given.
    pub file: String,
    /// Line number, from 1.
    pub line: usize,
    /// What is wrong.
    pub fault: TraceFault,
}

/// What is wrong with a trace.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
pub enum TraceFault {
    /// The format is not recognized.
    #[error(
        "not a trace that is known here; accepted are agent sessions (a JSON document with `requests`, or JSON lines \
         with `reqs`), Mooncake (JSON lines with `timestamp`, `input_length`, `output_length`, `hash_ids`), Azure \
         (CSV: TIMESTAMP,ContextTokens,GeneratedTokens), lmcache (JSON lines with `timestamp`, `session_id`, `input`, \
         `output`), Claude Code (JSON lines with `uuid`, `parentUuid`, `message`), tau_bench (a JSON list of dialogues \
         with `traj`) and a router's decision log (its folder `decisions`), \
         each plain or gzipped"
    )]
    UnknownFormat,
    /// Not well-formed, or with unexpected fields.
    #[error("{why}; accepted: {accepted}")]
    Malformed {
        /// Message of the parser.
        why: String,
        /// Example of an accepted record.
        accepted: &'static str,
    },
    /// A number outside the accepted range.
    #[error("`{field}` is {value}; accepted: {accepted}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// Accepted values.
        accepted: &'static str,
    },
    /// The trace is empty.
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
