//! The decision log: every receipt, with the question that the planner was asked, on disk within a bound.
//!
//! A step never waits for it: its record goes into a bounded queue, a thread of its own writes it down, and what finds no
//! room is counted and left out. Nothing is synced: the log explains and replays, nothing depends on it.

mod files;
mod reading;
mod wanted;
mod writer;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use planner::{AttentionSpec, Case, ParallelShape, Policy};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use smart_default::SmartDefault;
use vocabulary::{ModelId, RequestId, WorkerId};

use crate::config::units::Size;
use crate::correctness::Correctness;
use crate::foretelling::Foretelling;
use crate::guardrail::Guardrail;
use crate::pipeline::receipt::{Receipt, Receipts};
use crate::telemetry::decisions::DecisionMetrics;
pub(crate) use files::Bound;
use reading::Search;
pub(crate) use reading::{Entry, Records, RecordsError, Tried};
pub(crate) use wanted::Wanted;
use writer::Writer;

/// Section `[decisions]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct DecisionsConfig {
    /// Most bytes of the decision log in the data directory, 1 MiB or more; 0 keeps none.
    #[default(Size::mebibytes(256))]
    pub log: Size,
}

impl DecisionsConfig {
    /// The least log that is one: a few files, so that the oldest can make room.
    const LEAST: Size = Size::mebibytes(1);

    /// What cannot be, and what is accepted.
    pub fn problem(self) -> Option<(&'static str, &'static str)> {
        let is_none = self.log == Size(0);
        (!is_none && self.log < Self::LEAST)
            .then_some(("decisions.log", "accepted is 0, which keeps none, or 1MiB and more"))
    }
}

/// What every file of the log begins with: what its records were decided by.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Head {
    /// The form of the lines behind it.
    pub(crate) version: u32,
    pub(crate) release: String,
    pub(crate) policy: Policy,
    /// What else the planner is told and does not change.
    #[serde(flatten)]
    pub(crate) configured: Configured,
}

/// What the planner knows from the configuration.
#[derive(Clone, PartialEq, Default, Serialize, Deserialize, Debug)]
pub struct Configured {
    /// What the layers of each model keep, where that is known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attention: BTreeMap<ModelId, AttentionSpec>,
    /// Workers' parallel shapes where they are known, in the order of their ids.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shapes: Vec<(WorkerId, ParallelShape)>,
}

/// The form that this release writes and reads.
pub(crate) const VERSION: u32 = 1;

impl Head {
    fn new(policy: Policy, configured: Configured) -> Self {
        Self { version: VERSION, release: env!("CARGO_PKG_VERSION").into(), policy, configured }
    }
}

/// A step on its way into the log.
#[derive(Debug)]
struct Record {
    receipt: Arc<Receipt>,
    case: Option<Case>,
}

impl Record {
    /// How much there is to write: candidates, workers that were asked about, and who would be pushed out there.
    fn parts(&self) -> usize {
        let candidates = self.receipt.decision.as_ref().map_or(0, |decision| decision.candidates.len());
        let victims = |case: &Case| case.memory.iter().flatten().map(|told| 1 + told.victims.len()).sum::<usize>();
        1 + candidates + self.case.as_ref().map_or(0, |case| case.workers.len() + case.overlaps.len() + victims(case))
    }
}

/// Why there is no decision log.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep the decision log in {}: {source}; with decisions.log = 0 none is kept", .folder.display())]
pub struct DecisionLogError {
    folder: PathBuf,
    source: io::Error,
}

/// Why steps were served as they were: the newest in memory, older ones on disk.
#[derive(Debug)]
pub struct Decisions {
    /// The newest.
    pub receipts: Receipts,
    /// Whether first tokens come when prices say.
    pub foretelling: Foretelling,
    /// Whether actions make sessions slower than the bypass.
    pub guardrail: Guardrail,
    /// Whether KV arrives as what was sent.
    pub correctness: Correctness,
    log: Option<Writer>,
    folder: PathBuf,
}

/// Where the log lies, and what its records are decided by.
#[derive(Debug)]
pub struct DecisionLog<'a> {
    /// Its folder, made if missing.
    pub folder: &'a Path,
    /// The planner's policy.
    pub policy: &'a Policy,
    /// What else it is told and does not change.
    pub configured: Configured,
    /// Where records are counted.
    pub metrics: &'a DecisionMetrics,
}

#[derive(Debug)]
pub(crate) struct Found {
    /// Receipts, the newest first.
    pub(crate) receipts: Vec<Box<RawValue>>,
    /// Whether everything that is kept was looked through, or enough was found before.
    pub(crate) complete: bool,
}

impl Decisions {
    /// Goes on with the log on disk; `receipts` are those in memory.
    pub fn open(receipts: Receipts, config: DecisionsConfig, log: DecisionLog<'_>) -> Result<Self, DecisionLogError> {
        let DecisionLog { folder, policy, configured, metrics } = log;
        let head = Head::new(policy.clone(), configured);
        let open = |bound| Writer::open(folder, bound, (&head, metrics));
        let log = Bound::of(config.log.0 as u64).map(open).transpose();
        let log = log.map_err(|source| DecisionLogError { folder: folder.to_owned(), source })?;
        let (foretelling, guardrail, correctness) = Default::default();
        Ok(Self { receipts, foretelling, guardrail, correctness, log, folder: folder.to_owned() })
    }

    /// Files a finished step. `case` is what the planner was asked, where it was asked.
    pub fn file(&self, receipt: Receipt, case: Option<Case>) {
        let receipt = Arc::new(receipt);
        self.receipts.file(receipt.clone());
        if let Some(log) = &self.log {
            log.write(Record { receipt, case });
        }
    }

    /// The one of this request, if it is found. Blocks while the disk does.
    pub(crate) fn of(&self, request: RequestId) -> Found {
        if let Some(receipt) = self.receipts.of(request) {
            return Found {
                receipts: serde_json::value::to_raw_value(&*receipt).into_iter().collect(),
                complete: true,
            };
        }
        self.search(&Wanted { request: Some(request), ..Wanted::default() }, 1)
    }

    /// The newest `limit` that are wanted, newest first. Blocks while the disk does.
    pub(crate) fn search(&self, wanted: &Wanted, limit: usize) -> Found {
        let mut search = Search::default();
        for receipt in self.receipts.newest(limit, |receipt| wanted.accepts(&receipt.into())) {
            search.requests.insert(receipt.request);
            search.receipts.extend(serde_json::value::to_raw_value(&*receipt));
        }
        let is_over = search.receipts.len() >= limit || self.log.is_none();
        let complete = is_over || reading::search(&self.folder, (wanted, limit), &mut search);
        Found { receipts: search.receipts, complete }
    }

    /// Writes out what is in the queue.
    pub fn close(&self) {
        if let Some(log) = &self.log {
            log.close();
        }
    }
}

#[cfg(test)]
mod tests;
