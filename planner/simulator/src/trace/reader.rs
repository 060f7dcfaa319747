//! From the text of files to one trace. It tells the forms apart by their content; nobody has to name them.

use std::collections::HashMap;

use engine_model::runs::{RunId, Runs};
use vocabulary::Tokens;

use super::agents::Decided;
use super::budget::Budget;
use super::error::{Fault, Place, TraceError};
use super::{Arrivals, Session, Trace, agents, azure, mooncake, text, transcripts};

/// How much of a file is looked at to recognise its form.
const OPENING: usize = 4_096;

/// A trace in the making, file by file.
#[derive(Default)]
pub struct Reader {
    pub(super) runs: Runs,
    pub(super) sessions: Vec<Session>,
    /// Runs of the tools that agent sessions begin with, which several sessions share.
    pub(super) preambles: HashMap<(u64, u32, u32), RunId>,
    /// Runs of texts: by the run before and the text's hash.
    pub(super) texts: HashMap<(Option<RunId>, u64), RunId>,
    /// What decision logs tell of sessions.
    pub(super) decided: Decided,
    /// Where the last line of a file was cut off.
    pub(super) torn: Vec<String>,
    /// How much more prompts may come to.
    pub(super) budget: Budget,
    kind: Option<(Arrivals, Tokens)>,
}

/// What a file turned out to be.
#[derive(Clone, Copy)]
enum Form {
    AgentDocument,
    AgentLines,
    Mooncake,
    Azure,
    Decisions,
    Lmcache,
    TauBench,
    Transcript,
}

impl Form {
    fn of(text: &str) -> Option<Self> {
        let start = text.trim_start();
        let opening = start.get(..OPENING).unwrap_or_else(|| {
            let end = (0..=OPENING.min(start.len())).rev().find(|at| start.is_char_boundary(*at));
            &start[..end.unwrap_or_default()]
        });
        let has = |field: &str| opening.contains(&format!("\"{field}\""));
        match opening.bytes().next()? {
            b'T' if opening.starts_with("TIMESTAMP") => Some(Self::Azure),
            b'[' if has("task_id") => Some(Self::TauBench),
            b'{' if transcripts::opens(has) => Some(Self::Transcript),
            b'{' if has("version") && has("policy") => Some(Self::Decisions),
            b'{' if has("reqs") => Some(Self::AgentLines),
            b'{' if has("requests") => Some(Self::AgentDocument),
            b'{' if has("input_length") => Some(Self::Mooncake),
            b'{' if has("input") => Some(Self::Lmcache),
            _ => None,
        }
    }

    fn arrivals(self) -> Arrivals {
        match self {
            Self::Mooncake | Self::Azure => Arrivals::Recorded,
            _ => Arrivals::AfterOthers,
        }
    }

    fn block(self) -> Tokens {
        Tokens(match self {
            Self::AgentDocument | Self::AgentLines => u64::from(agents::BLOCK),
            Self::Decisions => u64::from(agents::DECIDED_BLOCK),
            Self::Mooncake => u64::from(mooncake::BLOCK),
            Self::Azure | Self::Lmcache | Self::TauBench | Self::Transcript => u64::from(text::BLOCK),
        })
    }
}

impl Reader {
    /// Reads one more file, whose unpacked text this is.
    pub fn read(&mut self, file: &str, text: &str) -> Result<(), TraceError> {
        let place = Place { file, line: 1 };
        let form = Form::of(text).ok_or_else(|| {
            let empty = text.trim().is_empty();
            place.fault(if empty { Fault::Empty } else { Fault::UnknownForm })
        })?;
        let kind = (form.arrivals(), form.block());
        if let Some(before) = self.kind.replace(kind).filter(|before| *before != kind) {
            let other = match before.0 {
                Arrivals::AfterOthers => "steps that wait for others",
                Arrivals::Recorded => "requests at recorded times",
            };
            let value = format!("unlike the files before ({other}, blocks of {} tokens)", before.1);
            return Err(place.out_of_range("the form", value, "one form in all files of a trace"));
        }
        match form {
            Form::AgentDocument => agents::document(self, file, text),
            Form::AgentLines => agents::lines(self, file, text),
            Form::Mooncake => mooncake::read(self, file, text),
            Form::Azure => azure::read(self, file, text),
            Form::Decisions => agents::decisions(self, file, text),
            Form::Lmcache => text::lmcache(self, file, text),
            Form::TauBench => text::tau_bench(self, file, text),
            Form::Transcript => transcripts::read(self, file, text),
        }
    }

    /// The trace of all files that were read; none when there were none.
    pub fn finish(mut self) -> Result<Option<Trace>, TraceError> {
        let Some((arrivals, block)) = self.kind else { return Ok(None) };
        let told = std::mem::take(&mut self.decided).finish(&mut self)?;
        let notes = super::torn(&self.torn).into_iter().chain(told).collect();
        Ok(Some(Trace { arrivals, block, runs: self.runs, sessions: self.sessions, notes }))
    }
}
