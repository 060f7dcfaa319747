//! The book that an all-knowing observer keeps: what was applied, promised and acknowledged, and the first thing that
//! must not be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use consensus::{Applied, Change, Cursor, Feed, Levels, Unreadable, Witness};
use ledger::{Command, Ledger, Outcome};
use vocabulary::{Incarnation, LedgerTime, WorkerId};

use crate::checks::agreement::Agreement;
use crate::checks::ids::Ids;
use crate::checks::leases::Leases;
use crate::checks::levels;
use crate::checks::order::{Leaders, Leadership};
use crate::checks::serials::Serials;
use crate::checks::staleness::{Acknowledged, Claim};
use crate::checks::tokens::Tokens;
use crate::checks::watches::{History, Told};
use crate::process::Pid;
use crate::runtime::{Sim, true_time};

/// A property that does not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Broken {
    /// Its name.
    pub check: &'static str,
    /// Where and how.
    pub detail: String,
}

pub(crate) type Checked = Result<(), Broken>;

/// Fails a check unless something holds.
#[macro_export]
macro_rules! ensure {
    ($holds:expr, $check:expr, $($detail:tt)+) => {
        match $holds {
            true => Ok(()),
            false => Err($crate::book::Broken { check: $check, detail: format!($($detail)+) }),
        }
    };
}

/// Lines of a story at most.
const STORY: usize = 200_000;

#[derive(Debug, Default)]
struct Pages {
    /// What happened, line by line, where somebody wants to read it.
    story: Option<Vec<String>>,
    broken: Option<Broken>,
    tally: BTreeMap<&'static str, u64>,
    agreement: Agreement,
    serials: Serials,
    tokens: Tokens,
    leases: Leases,
    leaders: Leaders,
    ids: Ids,
    history: History,
    acknowledged: Acknowledged,
}

/// The book. Clones are the same book.
#[derive(Clone, Debug, Default)]
pub(crate) struct Book(Arc<Mutex<Pages>>);

impl Book {
    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what a check says; the first that fails counts.
    pub(crate) fn note(&self, checked: Checked) {
        if let Err(broken) = checked {
            self.lock().broken.get_or_insert(broken);
        }
    }

    /// The first property that did not hold.
    pub(crate) fn broken(&self) -> Option<Broken> {
        self.lock().broken.clone()
    }

    /// A book that tells the whole story.
    pub(crate) fn telling() -> Self {
        let book = Self::default();
        book.lock().story = Some(Vec::new());
        book
    }

    /// Tells what happened just now, if anybody wants to read it.
    pub(crate) fn tell(&self, what: impl FnOnce() -> String) {
        if let Some(story) = &mut self.lock().story
            && story.len() < STORY
        {
            story.push(format!("{:>12.6} {}", true_time().as_secs_f64(), what()));
        }
    }

    pub(crate) fn story(&self) -> Vec<String> {
        self.lock().story.clone().unwrap_or_default()
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.lock().tally.entry(what).or_default() += 1;
    }

    pub(crate) fn tally(&self) -> BTreeMap<&'static str, u64> {
        self.lock().tally.clone()
    }

    /// An entry with this time is on its way, in this office.
    pub(crate) fn proposed(&self, time: LedgerTime, office: Leadership) {
        self.lock().leases.proposed(time, office);
    }

    /// A leader noted a sign of life in this office.
    pub(crate) fn reported(&self, (worker, incarnation): (WorkerId, Incarnation), office: Leadership) {
        self.tell(|| format!("{worker} {incarnation:?} noted in term {} by node {}", office.0, office.1));
        self.lock().leases.reported((worker, incarnation), office);
    }

    pub(crate) fn leads(&self, leadership: Leadership, process: Pid) {
        let checked = self.lock().leaders.check(leadership, process);
        self.note(checked);
    }

    /// A leader proposes the end of a lease.
    pub(crate) fn ending(&self, worker: WorkerId) {
        self.tell(|| format!("the end of {worker}'s lease is proposed"));
        self.lock().leases.ending(worker);
    }

    /// Somebody is told that this entry is applied.
    pub(crate) fn acknowledged(&self, index: u64) {
        let mut pages = self.lock();
        pages.acknowledged.add(true_time(), index);
        *pages.tally.entry("acknowledged entries").or_default() += 1;
    }

    /// The highest index that anybody was told is applied.
    pub(crate) fn last_acknowledged(&self) -> u64 {
        self.lock().acknowledged.last()
    }

    /// The highest index that any node applied.
    pub(crate) fn last_applied(&self) -> u64 {
        self.lock().agreement.last()
    }

    /// A node claims something of a view that shows `applied`, seen from a true time.
    pub(crate) fn claims(&self, node: u64, claim: (Claim, Duration), applied: u64) {
        let checked = self.lock().acknowledged.check(node, claim, applied);
        self.note(checked);
    }

    /// Somebody is told changes; false when one was not to be told.
    pub(crate) fn tells(&self, who: &str, told: &mut Told, changes: &[Change]) -> bool {
        let mut pages = self.lock();
        let checked = changes.iter().try_for_each(|change| pages.history.tell(who, told, change));
        let checked = checked.and_then(|()| pages.history.pause(who, told));
        *pages.tally.entry("changes told").or_default() += changes.len() as u64;
        drop(pages);
        let is_fine = checked.is_ok();
        self.note(checked);
        is_fine
    }

    /// Whether somebody was told all that happened up to `index`.
    pub(crate) fn is_told(&self, told: Told, index: u64) -> bool {
        self.lock().history.is_told(told, index)
    }

    pub(crate) fn digest(&self) -> u128 {
        self.lock().agreement.digest()
    }
}

impl Pages {
    fn applied(&mut self, node: u64, applied: &Applied<'_>) -> Checked {
        let is_first = self.agreement.applied(node, applied)?;
        self.history.applied(node, applied.id.index, applied.changes)?;
        if !is_first {
            return Ok(());
        }
        *self.tally.entry("entries").or_default() += 1;
        let Some(entry) = applied.entry else { return Ok(()) };
        self.leases.applying(entry, applied.ledger.now())?;
        for (submission, outcome) in entry.submissions.iter().zip(applied.outcomes) {
            *self.tally.entry("operations").or_default() += 1;
            let is_replay = self.serials.applied(submission, outcome)?;
            if is_replay {
                *self.tally.entry("replayed serials").or_default() += 1;
                continue;
            }
            for (command, outcome) in flat(&submission.command, outcome) {
                self.tokens.granted(command, outcome)?;
                self.ids.applied(command, outcome)?;
                self.leases.applied(command, outcome)?;
                if matches!((command, outcome), (Command::RaiseLevel(_), Outcome::Done)) {
                    *self.tally.entry("levels raised").or_default() += 1;
                }
                if matches!((command, outcome), (Command::Expire(_), Outcome::Done)) {
                    *self.tally.entry("leases ended").or_default() += 1;
                }
            }
        }
        Ok(())
    }
}

/// A command's parts, each with its own outcome.
fn flat<'a>(command: &'a Command, outcome: &'a Outcome) -> Vec<(&'a Command, &'a Outcome)> {
    match (command, outcome) {
        (Command::Batch(commands), Outcome::Batch(outcomes)) => commands.iter().zip(outcomes).collect(),
        single => vec![single],
    }
}

/// One node's pen.
#[derive(Debug)]
pub(crate) struct Probe {
    node: u64,
    /// What the node's release can read.
    levels: Levels,
    book: Book,
    feed: Arc<Feed<Sim>>,
    /// Somebody who reads whatever is published at once.
    along: Mutex<Option<(Cursor, Told)>>,
}

impl Probe {
    /// The pen of a node whose release can read these levels.
    pub(crate) fn new(node: u64, levels: Levels, (book, feed): (Book, Arc<Feed<Sim>>)) -> Self {
        Self { node, levels, book, feed, along: Mutex::default() }
    }

    /// Reads along: what was just published, watchers can be told.
    fn read_along(&self, index: u64) -> Checked {
        let mut along = self.along.lock().unwrap_or_else(PoisonError::into_inner);
        let anew = || self.feed.cursor(index + 1).ok().map(|cursor| (cursor, Told::before(index + 1)));
        let Some((cursor, told)) = along.as_mut() else {
            *along = anew();
            return Ok(());
        };
        let who = format!("who reads along at node {}", self.node);
        loop {
            match self.feed.read(cursor) {
                Ok(changes) if changes.is_empty() => break,
                Ok(changes) if self.book.tells(&who, told, &changes) => {}
                Ok(_) => break,
                Err(_) => {
                    *along = anew();
                    return Ok(());
                }
            }
        }
        self.book.lock().history.check_published(&who, *told, index)
    }
}

impl Witness for Probe {
    fn applied(&self, applied: &Applied<'_>) {
        self.book.tell(|| match applied.entry {
            Some(entry) => format!("node {} applies {} {entry:?} -> {:?}", self.node, applied.id, applied.outcomes),
            None => format!("node {} applies {}", self.node, applied.id),
        });
        let readable = applied.entry.map_or(Ok(()), |entry| levels::check_entry(self.node, self.levels, entry));
        self.book.note(readable);
        let checked = self.book.lock().applied(self.node, applied);
        self.book.note(checked);
        self.feed.applied(applied);
    }

    fn installed(&self, ledger: &Ledger) {
        self.book.tell(|| format!("node {} installs a snapshot at {}", self.node, ledger.applied()));
        self.book.note(levels::check_state(self.node, self.levels, ledger));
        let checked = self.book.lock().agreement.installed(self.node, ledger);
        self.book.note(checked);
        self.book.count("snapshots installed");
        self.feed.installed(ledger);
    }

    fn unreadable(&self, unreadable: Unreadable) {
        self.book.note(levels::given(self.node, unreadable));
    }

    fn published(&self, ledger: &Ledger) {
        self.feed.published(ledger);
        let checked = self.read_along(ledger.applied());
        self.book.note(checked);
    }
}
