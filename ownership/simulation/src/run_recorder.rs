//! Recorder of a run with global knowledge: what was applied, promised and acknowledged, and the first violation.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use consensus::{
    AppliedEntry, ApplyObserver, ChangeCursor, ChangeEvent, ChangeFeed, SupportedLevels, UnsupportedLevel,
};
use ledger::{Command, Ledger, Outcome};
use vocabulary::{Incarnation, LedgerTime, WorkerId};

use crate::checks::agreement::AgreementCheck;
use crate::checks::fencing_tokens::FencingTokenCheck;
use crate::checks::leases::LeaseExpiryCheck;
use crate::checks::levels;
use crate::checks::log_order::{LeaderProcessCheck, TermLeader};
use crate::checks::node_ids::NodeIdCheck;
use crate::checks::serials::ExactlyOnceCheck;
use crate::checks::staleness::{AcknowledgedIndexes, StalenessClaim};
use crate::checks::watches::{ChangeHistory, WatchProgress};
use crate::process::Pid;
use crate::property::{PropertyResult, PropertyViolation};
use crate::runtime::{SimulatedRuntime, true_time};

/// Maximum number of log lines.
const MAX_LOG_LINES: usize = 200_000;

#[derive(Debug, Default)]
struct RecorderState {
    /// Event log, if it is enabled.
    log: Option<Vec<String>>,
    first_violation: Option<PropertyViolation>,
    counts: BTreeMap<&'static str, u64>,
    agreement: AgreementCheck,
    serials: ExactlyOnceCheck,
    tokens: FencingTokenCheck,
    leases: LeaseExpiryCheck,
    leaders: LeaderProcessCheck,
    ids: NodeIdCheck,
    history: ChangeHistory,
    acknowledged: AcknowledgedIndexes,
}

/// The recorder. Clones share one record.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunRecorder(Arc<Mutex<RecorderState>>);

impl RunRecorder {
    fn lock(&self) -> MutexGuard<'_, RecorderState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the result of a check; the first failure counts.
    pub(crate) fn record_result(&self, checked: PropertyResult) {
        if let Err(broken) = checked {
            self.lock().first_violation.get_or_insert(broken);
        }
    }

    /// Returns the first violation.
    pub(crate) fn first_violation(&self) -> Option<PropertyViolation> {
        self.lock().first_violation.clone()
    }

    /// Creates a recorder with an event log.
    pub(crate) fn with_log() -> Self {
        let book = Self::default();
        book.lock().log = Some(Vec::new());
        book
    }

    /// Logs an event, if the log is enabled.
    pub(crate) fn log(&self, what: impl FnOnce() -> String) {
        if let Some(story) = &mut self.lock().log
            && story.len() < MAX_LOG_LINES
        {
            story.push(format!("{:>12.6} {}", true_time().as_secs_f64(), what()));
        }
    }

    pub(crate) fn log_lines(&self) -> Vec<String> {
        self.lock().log.clone().unwrap_or_default()
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.lock().counts.entry(what).or_default() += 1;
    }

    pub(crate) fn tally(&self) -> BTreeMap<&'static str, u64> {
        self.lock().counts.clone()
    }

    /// Called when an entry with this time is proposed in this leadership.
    pub(crate) fn on_entry_proposed(&self, time: LedgerTime, term_leader: TermLeader) {
        self.lock().leases.on_entry_proposed(time, term_leader);
    }

    /// Called when a leader in this leadership records a liveness report.
    pub(crate) fn on_liveness_report(&self, (worker, incarnation): (WorkerId, Incarnation), term_leader: TermLeader) {
        self.log(|| format!("{worker} {incarnation:?} noted in term {} by node {}", term_leader.0, term_leader.1));
        self.lock().leases.on_liveness_report((worker, incarnation), term_leader);
    }

    pub(crate) fn on_leadership(&self, leadership: TermLeader, process: Pid) {
        let checked = self.lock().leaders.check(leadership, process);
        self.record_result(checked);
    }

    /// Called when a leader proposes the expiry of a lease.
    pub(crate) fn on_expiry_proposed(&self, worker: WorkerId) {
        self.log(|| format!("the end of {worker}'s lease is proposed"));
        self.lock().leases.on_expiry_proposed(worker);
    }

    /// Called when a client is told that this entry is applied.
    pub(crate) fn on_acknowledged(&self, index: u64) {
        let mut pages = self.lock();
        pages.acknowledged.add(true_time(), index);
        *pages.counts.entry("acknowledged entries").or_default() += 1;
    }

    /// Returns the highest index that was acknowledged to any client.
    pub(crate) fn last_acknowledged(&self) -> u64 {
        self.lock().acknowledged.last()
    }

    /// Returns the highest index that any node applied.
    pub(crate) fn last_applied(&self) -> u64 {
        self.lock().agreement.last()
    }

    /// Checks a node's claim, made at the given true time, about a view that shows `applied`.
    pub(crate) fn check_staleness(&self, node: u64, claim: (StalenessClaim, Duration), applied: u64) {
        let checked = self.lock().acknowledged.check(node, claim, applied);
        self.record_result(checked);
    }

    /// Checks changes that a watcher received; returns false if one should not have been sent.
    pub(crate) fn on_changes_delivered(
        &self,
        reader: &str,
        progress: &mut WatchProgress,
        changes: &[ChangeEvent],
    ) -> bool {
        let mut pages = self.lock();
        let checked = changes.iter().try_for_each(|change| pages.history.check_change(reader, progress, change));
        let checked = checked.and_then(|()| pages.history.check_whole_revision(reader, progress));
        *pages.counts.entry("changes told").or_default() += changes.len() as u64;
        drop(pages);
        let is_fine = checked.is_ok();
        self.record_result(checked);
        is_fine
    }

    /// Returns whether a watcher received all changes up to `index`.
    pub(crate) fn has_received_all(&self, progress: WatchProgress, index: u64) -> bool {
        self.lock().history.has_received_all(progress, index)
    }

    pub(crate) fn digest(&self) -> u128 {
        self.lock().agreement.digest()
    }
}

impl RecorderState {
    fn on_applied(&mut self, node: u64, applied: &AppliedEntry<'_>) -> PropertyResult {
        let is_first = self.agreement.on_applied(node, applied)?;
        self.history.on_applied(node, applied.id.index, applied.changes)?;
        if !is_first {
            return Ok(());
        }
        *self.counts.entry("entries").or_default() += 1;
        let Some(entry) = applied.entry else { return Ok(()) };
        self.leases.before_apply(entry, applied.ledger.now())?;
        for (submission, outcome) in entry.submissions.iter().zip(applied.outcomes) {
            *self.counts.entry("operations").or_default() += 1;
            let is_replay = self.serials.on_applied(submission, outcome)?;
            if is_replay {
                *self.counts.entry("replayed serials").or_default() += 1;
                continue;
            }
            for (command, outcome) in flatten(&submission.command, outcome) {
                self.tokens.on_granted(command, outcome)?;
                self.ids.on_applied(command, outcome)?;
                self.leases.on_applied(command, outcome)?;
                if matches!((command, outcome), (Command::RaiseLevel(_), Outcome::Done)) {
                    *self.counts.entry("levels raised").or_default() += 1;
                }
                if matches!((command, outcome), (Command::ExpireLease(_), Outcome::Done)) {
                    *self.counts.entry("leases ended").or_default() += 1;
                }
            }
        }
        Ok(())
    }
}

/// Splits a command into its parts, each with its own outcome.
fn flatten<'a>(command: &'a Command, outcome: &'a Outcome) -> Vec<(&'a Command, &'a Outcome)> {
    match (command, outcome) {
        (Command::Batch(commands), Outcome::Batch(outcomes)) => commands.iter().zip(outcomes).collect(),
        single => vec![single],
    }
}

/// Observer of one node's state machine.
#[derive(Debug)]
pub(crate) struct RecordingObserver {
    node: u64,
    /// Feature levels that the node's release supports.
    levels: SupportedLevels,
    book: RunRecorder,
    feed: Arc<ChangeFeed<SimulatedRuntime>>,
    /// Position of a reader that reads every published change at once.
    feed_reader: Mutex<Option<(ChangeCursor, WatchProgress)>>,
}

impl RecordingObserver {
    /// Creates the observer of a node with these feature levels.
    pub(crate) fn new(
        node: u64,
        levels: SupportedLevels,
        (book, feed): (RunRecorder, Arc<ChangeFeed<SimulatedRuntime>>),
    ) -> Self {
        Self { node, levels, book, feed, feed_reader: Mutex::default() }
    }

    /// Checks that the changes just published can be read by watchers.
    fn check_published_changes(&self, index: u64) -> PropertyResult {
        let mut feed_reader = self.feed_reader.lock().unwrap_or_else(PoisonError::into_inner);
        let restart = || self.feed.cursor(index + 1).ok().map(|cursor| (cursor, WatchProgress::starting_at(index + 1)));
        let Some((cursor, progress)) = feed_reader.as_mut() else {
            *feed_reader = restart();
            return Ok(());
        };
        let reader = format!("who reads along at node {}", self.node);
        loop {
            match self.feed.read(cursor) {
                Ok(changes) if changes.is_empty() => break,
                Ok(changes) if self.book.on_changes_delivered(&reader, progress, &changes) => {}
                Ok(_) => break,
                Err(_) => {
                    *feed_reader = restart();
                    return Ok(());
                }
            }
        }
        self.book.lock().history.check_published(&reader, *progress, index)
    }
}

impl ApplyObserver for RecordingObserver {
    fn on_applied(&self, applied: &AppliedEntry<'_>) {
        self.book.log(|| match applied.entry {
            Some(entry) => format!("node {} applies {} {entry:?} -> {:?}", self.node, applied.id, applied.outcomes),
            None => format!("node {} applies {}", self.node, applied.id),
        });
        let readable = applied.entry.map_or(Ok(()), |entry| levels::check_entry(self.node, self.levels, entry));
        self.book.record_result(readable);
        let checked = self.book.lock().on_applied(self.node, applied);
        self.book.record_result(checked);
        self.feed.on_applied(applied);
    }

    fn on_installed(&self, ledger: &Ledger) {
        self.book.log(|| format!("node {} installs a snapshot at {}", self.node, ledger.applied()));
        self.book.record_result(levels::check_state(self.node, self.levels, ledger));
        let checked = self.book.lock().agreement.on_installed(self.node, ledger);
        self.book.record_result(checked);
        self.book.count("snapshots installed");
        self.feed.on_installed(ledger);
    }

    fn on_unreadable(&self, level_error: UnsupportedLevel) {
        self.book.record_result(levels::unreadable_violation(self.node, level_error));
    }

    fn on_published(&self, ledger: &Ledger) {
        self.feed.on_published(ledger);
        let checked = self.check_published_changes(ledger.applied());
        self.book.record_result(checked);
    }
}
