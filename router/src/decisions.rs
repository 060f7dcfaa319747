//! The decision log: every receipt, with the question that the planner was asked, on disk within a bound.
//!
//! A step never waits for it: its record goes into a bounded queue, a thread of its own writes it down, and what finds no
//! room is counted and left out. Nothing is synced: the log explains and replays, nothing depends on it.

mod files;
mod filter;
mod reader;
mod writer;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use planner::{AttentionSpec, ParallelShape, PlanningCase, Policy};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use smart_default::SmartDefault;
use vocabulary::{ModelId, RequestId, WorkerId};

use crate::calibration::PredictionCalibration;
use crate::config::units::ByteCount;
use crate::guardrail::Guardrail;
use crate::pipeline::receipt::{Receipt, ReceiptBuffer};
use crate::telemetry::decisions::DecisionMetrics;
use crate::transfer_check::TransferChecks;
pub(crate) use files::LogSizeLimit;
pub(crate) use filter::DecisionFilter;
use reader::DecisionSearch;
pub(crate) use reader::{DecisionRecords, DecisionRecordsError, ReplayAttempt, ReplayRecord};
use writer::DecisionLogWriter;

/// Section `[decisions]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct DecisionsConfig {
    /// Most bytes of the decision log in the data directory, 1 MiB or more; 0 keeps none.
    #[default(ByteCount::mebibytes(256))]
    pub log: ByteCount,
}

impl DecisionsConfig {
    /// The least log that is one: a few files, so that the oldest can make room.
    const MIN_BYTES: ByteCount = ByteCount::mebibytes(1);

    /// What cannot be, and what is accepted.
    pub fn problem(self) -> Option<(&'static str, &'static str)> {
        let is_none = self.log == ByteCount(0);
        (!is_none && self.log < Self::MIN_BYTES)
            .then_some(("decisions.log", "accepted is 0, which keeps none, or 1MiB and more"))
    }
}

/// What every file of the log begins with: what its records were decided by.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct DecisionLogHeader {
    /// The form of the lines behind it.
    pub(crate) version: u32,
    pub(crate) release: String,
    pub(crate) policy: Policy,
    /// What else the planner is told and does not change.
    #[serde(flatten)]
    pub(crate) configured: StaticPlanningInputs,
}

/// What the planner knows from the configuration.
#[derive(Clone, PartialEq, Default, Serialize, Deserialize, Debug)]
pub struct StaticPlanningInputs {
    /// What the layers of each model keep, where that is known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attention: BTreeMap<ModelId, AttentionSpec>,
    /// Workers' parallel shapes where they are known, in the order of their ids.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shapes: Vec<(WorkerId, ParallelShape)>,
}

/// The form that this release writes and reads.
pub(crate) const FORMAT_VERSION: u32 = 1;

impl DecisionLogHeader {
    fn new(policy: Policy, configured: StaticPlanningInputs) -> Self {
        Self { version: FORMAT_VERSION, release: env!("CARGO_PKG_VERSION").into(), policy, configured }
    }
}

/// A step on its way into the log.
#[derive(Debug)]
struct DecisionRecord {
    receipt: Arc<Receipt>,
    case: Option<PlanningCase>,
}

impl DecisionRecord {
    /// How much there is to write: candidates, workers that were asked about, and who would be pushed out there.
    fn entry_count(&self) -> usize {
        let candidates = self.receipt.decision.as_ref().map_or(0, |decision| decision.candidates.len());
        let victims =
            |case: &PlanningCase| case.memory.iter().flatten().map(|told| 1 + told.victims.len()).sum::<usize>();
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
pub struct DecisionHistory {
    /// The newest.
    pub receipts: ReceiptBuffer,
    /// Whether first tokens come when prices say.
    pub calibration: PredictionCalibration,
    /// Whether actions make sessions slower than the bypass.
    pub guardrail: Guardrail,
    /// Whether KV arrives as what was sent.
    pub transfer_checks: TransferChecks,
    log: Option<DecisionLogWriter>,
    folder: PathBuf,
}

/// Where the log lies, and what its records are decided by.
#[derive(Debug)]
pub struct DecisionLogOptions<'a> {
    /// Its folder, made if missing.
    pub folder: &'a Path,
    /// The planner's policy.
    pub policy: &'a Policy,
    /// What else it is told and does not change.
    pub static_inputs: StaticPlanningInputs,
    /// Where records are counted.
    pub metrics: &'a DecisionMetrics,
}

#[derive(Debug)]
pub(crate) struct DecisionSearchResult {
    /// Receipts, the newest first.
    pub(crate) receipts: Vec<Box<RawValue>>,
    /// Whether everything that is kept was looked through, or enough was found before.
    pub(crate) complete: bool,
}

impl DecisionHistory {
    /// Goes on with the log on disk; `receipts` are those in memory.
    pub fn open(
        receipts: ReceiptBuffer,
        config: DecisionsConfig,
        log: DecisionLogOptions<'_>,
    ) -> Result<Self, DecisionLogError> {
        let DecisionLogOptions { folder, policy, static_inputs: configured, metrics } = log;
        let head = DecisionLogHeader::new(policy.clone(), configured);
        let open = |bound| DecisionLogWriter::open(folder, bound, (&head, metrics));
        let log = LogSizeLimit::of(config.log.0 as u64).map(open).transpose();
        let log = log.map_err(|source| DecisionLogError { folder: folder.to_owned(), source })?;
        let (foretelling, guardrail, correctness) = Default::default();
        Ok(Self {
            receipts,
            calibration: foretelling,
            guardrail,
            transfer_checks: correctness,
            log,
            folder: folder.to_owned(),
        })
    }

    /// Files a finished step. `case` is what the planner was asked, where it was asked.
    pub fn record(&self, receipt: Receipt, case: Option<PlanningCase>) {
        let receipt = Arc::new(receipt);
        self.receipts.push(receipt.clone());
        if let Some(log) = &self.log {
            log.write(DecisionRecord { receipt, case });
        }
    }

    /// The one of this request, if it is found. Blocks while the disk does.
    pub(crate) fn find_request(&self, request: RequestId) -> DecisionSearchResult {
        if let Some(receipt) = self.receipts.find_request(request) {
            return DecisionSearchResult {
                receipts: serde_json::value::to_raw_value(&*receipt).into_iter().collect(),
                complete: true,
            };
        }
        self.search(&DecisionFilter { request: Some(request), ..DecisionFilter::default() }, 1)
    }

    /// The newest `limit` that are wanted, newest first. Blocks while the disk does.
    pub(crate) fn search(&self, wanted: &DecisionFilter, limit: usize) -> DecisionSearchResult {
        let mut search = DecisionSearch::default();
        for receipt in self.receipts.newest(limit, |receipt| wanted.matches(&receipt.into())) {
            search.requests.insert(receipt.request);
            search.receipts.extend(serde_json::value::to_raw_value(&*receipt));
        }
        let is_over = search.receipts.len() >= limit || self.log.is_none();
        let complete = is_over || reader::search(&self.folder, (wanted, limit), &mut search);
        DecisionSearchResult { receipts: search.receipts, complete }
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
