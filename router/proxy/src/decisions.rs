//! Decision log: every receipt with the planner's inputs, on disk and bounded in size.
//!
//! A step never waits for the log: its record goes into a bounded queue that a dedicated thread writes to disk;
//! records that do not fit are counted and dropped. Nothing is synced: the log serves explanation and replay, and
//! nothing depends on it.

mod files;
mod filter;
mod reader;
mod record;
mod version_1;
mod writer;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use planner::{Policy, RecordedPlanningInputs};
use serde::Deserialize;
use serde_json::value::RawValue;
use smart_default::SmartDefault;
use vocabulary::{ByteCount, RequestId};

use crate::calibration::PredictionDriftDetector;
use crate::guardrail::Guardrail;
use crate::receipt::{Receipt, ReceiptBuffer};
use crate::telemetry::decision_metrics::DecisionMetrics;
use crate::transfer_check::TransferCheckState;
pub(crate) use files::LogSizeLimit;
pub use filter::DecisionFilter;
use reader::DecisionMatches;
pub use reader::{DecisionRecords, DecisionRecordsError, ReplayRecord};
use record::DecisionRecord;
pub use record::StaticPlanningInputs;
pub use record::{DecisionLogHeader, ReplayAttempt};
use writer::DecisionLogWriter;

/// Section `[decision_log]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct DecisionLogConfig {
    /// Most bytes of the decision log in the data directory, 1 MiB or more; 0 keeps none.
    #[default(ByteCount::mebibytes(256))]
    pub max_size: ByteCount,
}

impl DecisionLogConfig {
    /// Minimum log size: room for a few files, so that the oldest can be deleted.
    const MIN_BYTES: ByteCount = ByteCount::mebibytes(1);

    /// Returns the invalid value and what is accepted instead.
    pub fn problem(self) -> Option<(&'static str, &'static str)> {
        let is_none = self.max_size == ByteCount(0);
        (!is_none && self.max_size < Self::MIN_BYTES)
            .then_some(("decision_log.max_size", "accepted is 0B, which keeps none, or 1MiB and more"))
    }
}

/// The decision log cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep the decision log in {}: {source}; with decision_log.max_size = \"0B\" none is kept", .folder.display())]
pub struct OpenDecisionLogError {
    folder: PathBuf,
    source: io::Error,
}

/// History of decisions: the newest in memory, older ones on disk.
#[derive(Debug)]
pub struct DecisionHistory {
    /// Newest receipts.
    pub receipts: ReceiptBuffer,
    /// Detector of drift between predicted and measured time to first token.
    pub calibration: Arc<PredictionDriftDetector>,
    /// Whether the planner's actions make sessions slower than the bypass.
    pub guardrail: Arc<Guardrail>,
    /// State of the transfer checks: which links are disabled, and when the next check is due.
    pub transfer_checks: Arc<TransferCheckState>,
    log: Option<DecisionLogWriter>,
    folder: PathBuf,
}

/// Location and fixed inputs of the log.
#[derive(Debug)]
pub struct DecisionLogParts<'a> {
    /// Folder of the log; created if missing.
    pub folder: &'a Path,
    /// The planner's policy.
    pub policy: &'a Policy,
    /// Other fixed inputs of the planner.
    pub static_inputs: StaticPlanningInputs,
    /// Metrics that count the records.
    pub metrics: &'a DecisionMetrics,
}

/// Receipts that a search of the decision log found.
#[derive(Debug)]
pub struct DecisionSearchResult {
    /// Receipts, newest first.
    pub receipts: Vec<Box<RawValue>>,
    /// Whether the whole history was searched, or enough receipts were found before.
    pub complete: bool,
}

impl DecisionHistory {
    /// Opens the history and continues the log on disk. `receipts` is the buffer in memory.
    pub fn open(
        receipts: ReceiptBuffer,
        config: DecisionLogConfig,
        log: DecisionLogParts<'_>,
    ) -> Result<Self, OpenDecisionLogError> {
        let DecisionLogParts { folder, policy, static_inputs, metrics } = log;
        let header = DecisionLogHeader::new(policy.clone(), static_inputs);
        let open = |size_limit| DecisionLogWriter::open(folder, size_limit, (&header, metrics));
        let log = LogSizeLimit::of(config.max_size.0 as u64).map(open).transpose();
        let log = log.map_err(|source| OpenDecisionLogError { folder: folder.to_owned(), source })?;
        let (calibration, guardrail, transfer_checks) = Default::default();
        Ok(Self { receipts, calibration, guardrail, transfer_checks, log, folder: folder.to_owned() })
    }

    /// Records a finished step. `inputs` are the planner's, if it was asked.
    pub fn record(&self, receipt: Receipt, inputs: Option<RecordedPlanningInputs>) {
        let receipt = Arc::new(receipt);
        self.receipts.push(receipt.clone());
        if let Some(log) = &self.log {
            log.write(DecisionRecord { receipt, case: inputs });
        }
    }

    /// Finds the decision of a request. Blocks on disk reads.
    pub fn find_request(&self, request: RequestId) -> DecisionSearchResult {
        if let Some(receipt) = self.receipts.find_request(request) {
            return DecisionSearchResult {
                receipts: serde_json::value::to_raw_value(&*receipt).into_iter().collect(),
                complete: true,
            };
        }
        self.search(&DecisionFilter { request: Some(request), ..DecisionFilter::default() }, 1)
    }

    /// Finds the newest `limit` matching decisions, newest first. Blocks on disk reads.
    pub fn search(&self, filter: &DecisionFilter, limit: usize) -> DecisionSearchResult {
        let mut search = DecisionMatches::default();
        for receipt in self.receipts.newest(limit, |receipt| filter.matches(&receipt.into())) {
            search.requests.insert(receipt.request_id);
            search.receipts.extend(serde_json::value::to_raw_value(&*receipt));
        }
        let is_done = search.receipts.len() >= limit || self.log.is_none();
        let complete = is_done || reader::search(&self.folder, (filter, limit), &mut search);
        DecisionSearchResult { receipts: search.receipts, complete }
    }

    /// Writes all queued records and stops the log.
    pub fn close(&self) {
        if let Some(log) = &self.log {
            log.close();
        }
    }
}

#[cfg(test)]
mod tests;
