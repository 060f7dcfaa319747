//! Reads files into one trace. The format is recognized by the content.

use vocabulary::Tokens;

use super::TraceBuilder;
use super::error::{TraceError, TraceFault, TraceLocation};
use super::{ArrivalProcess, Trace, agents, azure, mooncake, text, transcripts};

/// Bytes of a file that are examined to recognize its format.
const SNIFF_BYTES: usize = 4_096;

/// Reader that builds a trace file by file.
#[derive(Default)]
pub struct TraceLoader {
    builder: TraceBuilder,
    kind: Option<(ArrivalProcess, Tokens)>,
}

/// Format of a file.
#[derive(Clone, Copy)]
enum TraceFormat {
    AgentDocument,
    AgentLines,
    Mooncake,
    Azure,
    DecisionLog,
    Lmcache,
    TauBench,
    Transcript,
}

impl TraceFormat {
    fn of(text: &str) -> Option<Self> {
        let start = text.trim_start();
        let opening = start.get(..SNIFF_BYTES).unwrap_or_else(|| {
            let end = (0..=SNIFF_BYTES.min(start.len())).rev().find(|at| start.is_char_boundary(*at));
            &start[..end.unwrap_or_default()]
        });
        let has = |field: &str| opening.contains(&format!("\"{field}\""));
        match opening.bytes().next()? {
            b'T' if opening.starts_with("TIMESTAMP") => Some(Self::Azure),
            b'[' if has("task_id") => Some(Self::TauBench),
            b'{' if transcripts::is_transcript(has) => Some(Self::Transcript),
            b'{' if has("version") && (has("planner") || has("policy")) => Some(Self::DecisionLog),
            b'{' if has("reqs") => Some(Self::AgentLines),
            b'{' if has("requests") => Some(Self::AgentDocument),
            b'{' if has("input_length") => Some(Self::Mooncake),
            b'{' if has("input") => Some(Self::Lmcache),
            _ => None,
        }
    }

    fn arrivals(self) -> ArrivalProcess {
        match self {
            Self::Mooncake | Self::Azure => ArrivalProcess::Recorded,
            _ => ArrivalProcess::AfterDependencies,
        }
    }

    fn block(self) -> Tokens {
        Tokens(match self {
            Self::AgentDocument | Self::AgentLines => u64::from(agents::BLOCK),
            Self::DecisionLog => u64::from(agents::DECIDED_BLOCK),
            Self::Mooncake => u64::from(mooncake::BLOCK),
            Self::Azure | Self::Lmcache | Self::TauBench | Self::Transcript => u64::from(text::BLOCK),
        })
    }
}

impl TraceLoader {
    /// Reads one more file, given its uncompressed text.
    pub fn read(&mut self, file: &str, text: &str) -> Result<(), TraceError> {
        let place = TraceLocation { file, line: 1 };
        let form = TraceFormat::of(text).ok_or_else(|| {
            let empty = text.trim().is_empty();
            place.fault(if empty { TraceFault::Empty } else { TraceFault::UnknownFormat })
        })?;
        let kind = (form.arrivals(), form.block());
        if let Some(before) = self.kind.replace(kind).filter(|before| *before != kind) {
            let other = match before.0 {
                ArrivalProcess::AfterDependencies => "steps that wait for others",
                ArrivalProcess::Recorded => "requests at recorded times",
            };
            let value = format!("unlike the files before ({other}, blocks of {} tokens)", before.1);
            return Err(place.out_of_range("the form", value, "one form in all files of a trace"));
        }
        let builder = &mut self.builder;
        match form {
            TraceFormat::AgentDocument => agents::document(builder, file, text),
            TraceFormat::AgentLines => agents::read_delta_lines(builder, file, text),
            TraceFormat::Mooncake => mooncake::read(builder, file, text),
            TraceFormat::Azure => azure::read(builder, file, text),
            TraceFormat::DecisionLog => agents::decisions(builder, file, text),
            TraceFormat::Lmcache => text::lmcache(builder, file, text),
            TraceFormat::TauBench => text::tau_bench(builder, file, text),
            TraceFormat::Transcript => transcripts::read(builder, file, text),
        }
    }

    /// Returns the trace of all files; none if there were none.
    pub fn finish(self) -> Result<Option<Trace>, TraceError> {
        let Some((arrivals, block)) = self.kind else { return Ok(None) };
        let mut builder = self.builder;
        let logs = std::mem::take(&mut builder.decision_logs).finish(&mut builder)?;
        let notes = super::truncation_note(&builder.truncated).into_iter().chain(logs).collect();
        Ok(Some(Trace { arrivals, block, runs: builder.runs, sessions: builder.sessions, notes }))
    }
}
