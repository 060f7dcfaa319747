//! Tracks the sequence of one publisher's messages: which is next, what was missed, and how exactly the blocks are
//! known as a result.
//!
//! It only decides; requesting a replay and reading the process identity are up to the caller.

use vocabulary::{Incarnation, KvIndexState};

/// What to do with a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MessageAction {
    /// Apply it: it is next.
    Apply,
    /// Ignore it: it was applied before.
    Duplicate,
    /// Messages are missing: check the process identity, request a replay from here, then call
    /// [`SequenceTracker::after_replay`].
    Replay {
        /// The first sequence number that is missing.
        from: u64,
    },
    /// The sequence number went back, so another process is publishing.
    Restarted,
}

/// Whether the process is the expected one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessMatch {
    /// It is.
    Same,
    /// It is another one: what was known of the old one is void.
    Another,
    /// It does not identify itself.
    Unknown,
}

/// Why the blocks are not known exactly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KnowledgeGap {
    /// The publishing process is not identified.
    Unidentified,
    /// Earlier messages have not all been received yet.
    CatchingUp,
    /// Messages are lost; contains the number of blocks stored since.
    Lost(u64),
}

/// Whether the live socket delivers messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LiveSocketHealth {
    /// As far as can be told.
    Fine,
    /// Replays contain messages that the live socket should have delivered before.
    Deaf,
}

/// Number of consecutive checks in which only the replay had messages, after which the live socket counts as deaf. One
/// such check is normal, because a message may be published between a check and its replay.
const DEAF_AFTER_CHECKS: u8 = 2;

/// Number of times that an engine must have stored its full capacity before lost messages become irrelevant.
const TURNOVERS: u64 = 2;

/// The message sequence of one publisher.
#[derive(Clone, Debug, Default)]
pub struct SequenceTracker {
    process: Option<Incarnation>,
    /// Whether the process behind the current connection was identified as `process`.
    identified: bool,
    next: u64,
    last_live: Option<u64>,
    /// Whether all messages before `next` were received, or are known to be lost.
    complete: bool,
    /// Blocks stored since messages were lost; None once these are irrelevant.
    stored_since_loss: Option<u64>,
    /// Whether the live socket delivered anything since the last check.
    live_since_check: bool,
    /// Consecutive checks in which only the replay had messages.
    silent_checks: u8,
}

impl SequenceTracker {
    /// Creates a tracker that knows nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets which process should be publishing.
    pub fn expect_process(&mut self, incarnation: Incarnation) {
        self.process = Some(incarnation);
    }

    /// Compares the process behind the current connection with the expected one; None if it does not identify itself.
    pub fn identify_process(&mut self, incarnation: Option<Incarnation>) -> ProcessMatch {
        let Some(incarnation) = incarnation else { return ProcessMatch::Unknown };
        if self.process.is_some_and(|expected| expected != incarnation) {
            *self = Self { process: Some(incarnation), ..Self::default() };
            return ProcessMatch::Another;
        }
        (self.process, self.identified) = (Some(incarnation), true);
        ProcessMatch::Same
    }

    /// Records that the connection is lost: messages may be missed, and another process may answer next.
    pub fn disconnect(&mut self) {
        *self = Self {
            process: self.process,
            next: self.next,
            last_live: self.last_live,
            stored_since_loss: self.stored_since_loss,
            ..Self::default()
        };
    }

    /// Records that another process is publishing, although its identity could not be read.
    pub fn on_process_restart(&mut self) {
        *self = Self { process: self.process, ..Self::default() };
    }

    /// Starts from a snapshot of `process` before message `next`. It counts as complete only once a replay from there,
    /// or the next message itself, continued without a gap.
    pub fn adopt(&mut self, incarnation: Incarnation, next: u64) {
        let identified = self.identified && self.process == Some(incarnation);
        *self = Self { process: Some(incarnation), identified, next, ..Self::default() };
    }

    /// Returns the next expected sequence number, from which to request a replay.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Handles a message from the live socket.
    pub fn on_live(&mut self, sequence: u64) -> MessageAction {
        // The same message again is a duplicate from the network; an older one is impossible over TCP.
        if self.last_live.is_some_and(|last| sequence < last) {
            return MessageAction::Restarted;
        }
        (self.last_live, self.live_since_check) = (Some(sequence), true);
        if sequence < self.next {
            return MessageAction::Duplicate;
        }
        if sequence > self.next {
            return MessageAction::Replay { from: self.next };
        }
        // Nothing is missing between what is known, even if that is nothing, and this message.
        self.complete |= self.identified;
        self.advance(sequence)
    }

    /// Handles a message from a replay. Messages that the replay skips are lost.
    pub fn on_replayed(&mut self, sequence: u64) -> MessageAction {
        self.after_replay(sequence)
    }

    /// Records that a replay by the expected process reached its end marker: everything available was received.
    pub fn replay_ended(&mut self) {
        self.complete = true;
    }

    /// Records that a replay delivered messages of an unidentified process.
    pub fn replay_unidentified(&mut self) {
        self.complete = false;
    }

    /// Handles the message that triggered the replay once more: messages still missing before it are lost.
    pub fn after_replay(&mut self, sequence: u64) -> MessageAction {
        if sequence < self.next {
            return MessageAction::Duplicate;
        }
        if sequence > self.next {
            self.record_loss();
        }
        self.advance(sequence)
    }

    /// Records a check that started when `from` was next and requested everything missing.
    pub fn check_live_socket(&mut self, from: u64) -> LiveSocketHealth {
        let only_replayed = !std::mem::take(&mut self.live_since_check) && self.next > from;
        self.silent_checks = if only_replayed { self.silent_checks.saturating_add(1) } else { 0 };
        if self.silent_checks >= DEAF_AFTER_CHECKS { LiveSocketHealth::Deaf } else { LiveSocketHealth::Fine }
    }

    fn advance(&mut self, sequence: u64) -> MessageAction {
        self.next = sequence.saturating_add(1);
        MessageAction::Apply
    }

    /// Records a message that could not be read or only partially be stored.
    pub fn record_loss(&mut self) {
        self.stored_since_loss = Some(0);
    }

    /// Records a block with an unknown parent: the engine still holds what was lost, so the turnover starts again.
    pub fn record_orphan(&mut self) {
        self.stored_since_loss = self.stored_since_loss.map(|_| 0);
    }

    /// Records blocks stored in device memory, which has room for `most` blocks, if known. Once the engine has stored
    /// twice as many, nothing is left of what it held when messages were lost, except for blocks in constant use.
    pub fn record_stored(&mut self, blocks: u64, most: Option<u64>) {
        let Some(since) = self.stored_since_loss.map(|since| since.saturating_add(blocks)) else { return };
        let is_over = most.is_some_and(|most| most > 0 && since >= turnover_blocks(most));
        self.stored_since_loss = Some(since).filter(|_| !is_over);
    }

    /// Records that the engine's cache was cleared: what was missed no longer matters.
    pub fn cache_cleared(&mut self) {
        self.complete |= self.identified;
        self.stored_since_loss = None;
    }

    /// Returns why the blocks are not known exactly; None if they are.
    pub fn gap(&self) -> Option<KnowledgeGap> {
        match self {
            Self { identified: false, .. } => Some(KnowledgeGap::Unidentified),
            Self { stored_since_loss: Some(since), .. } => Some(KnowledgeGap::Lost(*since)),
            Self { complete: false, .. } => Some(KnowledgeGap::CatchingUp),
            _ => None,
        }
    }

    /// Returns how exactly the blocks are known.
    pub fn kv_index_state(&self) -> KvIndexState {
        if self.gap().is_none() { KvIndexState::Exact } else { KvIndexState::Degraded }
    }
}

/// Returns the number of blocks that an engine must have stored before lost messages no longer matter.
pub fn turnover_blocks(most: u64) -> u64 {
    most.saturating_mul(TURNOVERS)
}

#[cfg(test)]
mod tests;
