//! The sequence of one publisher's messages: what is next, what was missed, and how much is known because of it.
//!
//! It decides; asking for a replay and reading a process's identity are the caller's work.

use vocabulary::{Incarnation, KvIndexState};

/// What to do with a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SequenceAction {
    /// Its turn has come.
    Apply,
    /// It was applied before.
    Duplicate,
    /// Something is missing: check the process's identity, ask for a replay from here, then [`SequenceTracker::after_replay`].
    Replay {
        /// The first sequence number that is missing.
        from: u64,
    },
    /// The numbers went back: another process speaks.
    Restarted,
}

/// Whether a process is the one that is expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessMatch {
    /// It is.
    Same,
    /// Another one: what was known of the old one is void.
    Another,
    /// It does not tell.
    Unknown,
}

/// Why not all is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KnowledgeGap {
    /// Nobody knows which process speaks.
    Unidentified,
    /// What was said before was not all heard yet.
    CatchingUp,
    /// Messages are lost; the engine has stored so many blocks since.
    Lost(u64),
}

/// Whether the live socket brings what is said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LiveSocketHealth {
    /// As far as can be told.
    Fine,
    /// Replays bring messages that should have been heard before.
    Deaf,
}

/// Looks in a row at which only the replay brought something, before the live socket counts as deaf. What is said between a
/// look and its replay makes one.
const DEAF_AFTER_CHECKS: u8 = 2;

/// How often an engine must have stored as many blocks as it can hold before nothing that was lost matters.
const TURNOVERS: u64 = 2;

/// One publisher's sequence.
#[derive(Clone, Debug, Default)]
pub struct SequenceTracker {
    process: Option<Incarnation>,
    /// Whether the process behind the present connection was found to be that one.
    identified: bool,
    next: u64,
    last_live: Option<u64>,
    /// Whether all that was said before `next` was heard, or is known to be lost.
    complete: bool,
    /// While messages that still matter are lost: blocks stored since.
    stored_since_loss: Option<u64>,
    /// Whether the live socket brought anything since the last look.
    live_since_check: bool,
    /// Looks in a row at which only the replay did.
    silent_checks: u8,
}

impl SequenceTracker {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whose stream it should be.
    pub fn expect_process(&mut self, process: Incarnation) {
        self.process = Some(process);
    }

    /// Who is behind the present connection, as far as it tells.
    pub fn identify_process(&mut self, process: Option<Incarnation>) -> ProcessMatch {
        let Some(process) = process else { return ProcessMatch::Unknown };
        if self.process.is_some_and(|expected| expected != process) {
            *self = Self { process: Some(process), ..Self::default() };
            return ProcessMatch::Another;
        }
        (self.process, self.identified) = (Some(process), true);
        ProcessMatch::Same
    }

    /// There is no connection any more: what is said meanwhile may be missing, and whoever is there next may be another one.
    pub fn disconnect(&mut self) {
        *self = Self {
            process: self.process,
            next: self.next,
            last_live: self.last_live,
            stored_since_loss: self.stored_since_loss,
            ..Self::default()
        };
    }

    /// Another process speaks, though its identity could not be read.
    pub fn process_restarted(&mut self) {
        *self = Self { process: self.process, ..Self::default() };
    }

    /// What `process` said before `next` is known from elsewhere. That is believed to be all of it only once a replay from
    /// there, or the next message itself, went on without a gap.
    pub fn adopt(&mut self, process: Incarnation, next: u64) {
        let identified = self.identified && self.process == Some(process);
        *self = Self { process: Some(process), identified, next, ..Self::default() };
    }

    /// What is missing, if anything: the number to ask a replay for.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// A message arrived on the live socket.
    pub fn on_live(&mut self, sequence: u64) -> SequenceAction {
        // The same message twice is a stutter of the network's; an older one cannot come over TCP.
        if self.last_live.is_some_and(|last| sequence < last) {
            return SequenceAction::Restarted;
        }
        (self.last_live, self.live_since_check) = (Some(sequence), true);
        if sequence < self.next {
            return SequenceAction::Duplicate;
        }
        if sequence > self.next {
            return SequenceAction::Replay { from: self.next };
        }
        // Nothing lies between what is known, be it nothing at all, and this.
        self.complete |= self.identified;
        self.advance(sequence)
    }

    /// A message arrived in a replay. What the replay leaves out is lost.
    pub fn on_replayed(&mut self, sequence: u64) -> SequenceAction {
        self.after_replay(sequence)
    }

    /// A replay came to its end marker, and who gave it is the process that is expected: all that could be had is here.
    pub fn replay_ended(&mut self) {
        self.complete = true;
    }

    /// A replay brought messages, and nobody knows of which process.
    pub fn replay_unidentified(&mut self) {
        self.complete = false;
    }

    /// The message that asked for the replay, again: what is still missing before it is lost.
    pub fn after_replay(&mut self, sequence: u64) -> SequenceAction {
        if sequence < self.next {
            return SequenceAction::Duplicate;
        }
        if sequence > self.next {
            self.record_loss();
        }
        self.advance(sequence)
    }

    /// A look was taken, which began when `from` was next and asked for all that was missing.
    pub fn check_live_socket(&mut self, from: u64) -> LiveSocketHealth {
        let only_replayed = !std::mem::take(&mut self.live_since_check) && self.next > from;
        self.silent_checks = if only_replayed { self.silent_checks.saturating_add(1) } else { 0 };
        if self.silent_checks >= DEAF_AFTER_CHECKS { LiveSocketHealth::Deaf } else { LiveSocketHealth::Fine }
    }

    fn advance(&mut self, sequence: u64) -> SequenceAction {
        self.next = sequence.saturating_add(1);
        SequenceAction::Apply
    }

    /// A message could not be read, or part of it could not be kept.
    pub fn record_loss(&mut self) {
        self.stored_since_loss = Some(0);
    }

    /// A block came whose parent was never told: the engine still holds what was lost, so nothing was turned over yet.
    pub fn record_orphan(&mut self) {
        self.stored_since_loss = self.stored_since_loss.map(|_| 0);
    }

    /// The engine stored blocks where it computes, which has room for `most`, if that is known. Of what it held when
    /// messages were lost nothing is left, but for what is used all the time, once it stored twice as many.
    pub fn record_stored(&mut self, blocks: u64, most: Option<u64>) {
        let Some(since) = self.stored_since_loss.map(|since| since.saturating_add(blocks)) else { return };
        let is_over = most.is_some_and(|most| most > 0 && since >= turnover_blocks(most));
        self.stored_since_loss = Some(since).filter(|_| !is_over);
    }

    /// The engine said that its cache is empty: whatever was missed no longer matters.
    pub fn cache_cleared(&mut self) {
        self.complete |= self.identified;
        self.stored_since_loss = None;
    }

    /// Why not all is known; none where it is.
    pub fn gap(&self) -> Option<KnowledgeGap> {
        match self {
            Self { identified: false, .. } => Some(KnowledgeGap::Unidentified),
            Self { stored_since_loss: Some(since), .. } => Some(KnowledgeGap::Lost(*since)),
            Self { complete: false, .. } => Some(KnowledgeGap::CatchingUp),
            _ => None,
        }
    }

    /// How far the index can be believed.
    pub fn knowledge(&self) -> KvIndexState {
        if self.gap().is_none() { KvIndexState::Exact } else { KvIndexState::Degraded }
    }
}

/// Blocks that an engine must have stored since messages were lost, for their loss not to matter any more.
pub fn turnover_blocks(most: u64) -> u64 {
    most.saturating_mul(TURNOVERS)
}

#[cfg(test)]
mod tests;
