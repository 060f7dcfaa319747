//! The sequence of one publisher's messages: what is next, what was missed, and how much is known because of it.
//!
//! It decides; asking for a replay and reading a process's identity are the caller's work.

use vocabulary::{Incarnation, Knowledge};

/// What to do with a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Its turn has come.
    Apply,
    /// It was applied before.
    Seen,
    /// Something is missing: check the process's identity, ask for a replay from here, then [`Stream::after_replay`].
    Replay {
        /// The first sequence number that is missing.
        from: u64,
    },
    /// The numbers went back: another process speaks.
    Restarted,
}

/// Whether a process is the one that is expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Met {
    /// It is.
    Same,
    /// Another one: what was known of the old one is void.
    Another,
    /// It does not tell.
    Unknown,
}

/// Why not all is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gap {
    /// Nobody knows which process speaks.
    Unidentified,
    /// What was said before was not all heard yet.
    Behind,
    /// Messages are lost; the engine has stored so many blocks since.
    Lost(u64),
}

/// Whether the live socket brings what is said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hearing {
    /// As far as can be told.
    Fine,
    /// Replays bring messages that should have been heard before.
    Deaf,
}

/// Looks in a row at which only the replay brought something, before the live socket counts as deaf. What is said between a
/// look and its replay makes one.
const DEAF_LOOKS: u8 = 2;

/// How often an engine must have stored as many blocks as it can hold before nothing that was lost matters.
const TURNS: u64 = 2;

/// One publisher's sequence.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    process: Option<Incarnation>,
    /// Whether the process behind the present connection was found to be that one.
    identified: bool,
    next: u64,
    last_live: Option<u64>,
    /// Whether all that was said before `next` was heard, or is known to be lost.
    complete: bool,
    /// While messages that still matter are lost: blocks stored since.
    hole: Option<u64>,
    /// Whether the live socket brought anything since the last look.
    heard: bool,
    /// Looks in a row at which only the replay did.
    unheard: u8,
}

impl Stream {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whose stream it should be.
    pub fn expect(&mut self, process: Incarnation) {
        self.process = Some(process);
    }

    /// Who is behind the present connection, as far as it tells.
    pub fn meet(&mut self, process: Option<Incarnation>) -> Met {
        let Some(process) = process else { return Met::Unknown };
        if self.process.is_some_and(|expected| expected != process) {
            *self = Self { process: Some(process), ..Self::default() };
            return Met::Another;
        }
        (self.process, self.identified) = (Some(process), true);
        Met::Same
    }

    /// There is no connection any more: what is said meanwhile may be missing, and whoever is there next may be another one.
    pub fn lose(&mut self) {
        *self = Self {
            process: self.process,
            next: self.next,
            last_live: self.last_live,
            hole: self.hole,
            ..Self::default()
        };
    }

    /// Another process speaks, though its identity could not be read.
    pub fn restart(&mut self) {
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
    pub fn live(&mut self, sequence: u64) -> Verdict {
        // The same message twice is a stutter of the network's; an older one cannot come over TCP.
        if self.last_live.is_some_and(|last| sequence < last) {
            return Verdict::Restarted;
        }
        (self.last_live, self.heard) = (Some(sequence), true);
        if sequence < self.next {
            return Verdict::Seen;
        }
        if sequence > self.next {
            return Verdict::Replay { from: self.next };
        }
        // Nothing lies between what is known, be it nothing at all, and this.
        self.complete |= self.identified;
        self.advance(sequence)
    }

    /// A message arrived in a replay. What the replay leaves out is lost.
    pub fn replayed(&mut self, sequence: u64) -> Verdict {
        self.after_replay(sequence)
    }

    /// A replay came to its end marker, and who gave it is the process that is expected: all that could be had is here.
    pub fn replay_ended(&mut self) {
        self.complete = true;
    }

    /// A replay brought messages, and nobody knows of which process.
    pub fn replay_doubted(&mut self) {
        self.complete = false;
    }

    /// The message that asked for the replay, again: what is still missing before it is lost.
    pub fn after_replay(&mut self, sequence: u64) -> Verdict {
        if sequence < self.next {
            return Verdict::Seen;
        }
        if sequence > self.next {
            self.spoiled();
        }
        self.advance(sequence)
    }

    /// A look was taken, which began when `from` was next and asked for all that was missing.
    pub fn looked(&mut self, from: u64) -> Hearing {
        let only_replayed = !std::mem::take(&mut self.heard) && self.next > from;
        self.unheard = if only_replayed { self.unheard.saturating_add(1) } else { 0 };
        if self.unheard >= DEAF_LOOKS { Hearing::Deaf } else { Hearing::Fine }
    }

    fn advance(&mut self, sequence: u64) -> Verdict {
        self.next = sequence.saturating_add(1);
        Verdict::Apply
    }

    /// A message could not be read, or part of it could not be kept.
    pub fn spoiled(&mut self) {
        self.hole = Some(0);
    }

    /// A block came whose parent was never told: the engine still holds what was lost, so nothing was turned over yet.
    pub fn orphaned(&mut self) {
        self.hole = self.hole.map(|_| 0);
    }

    /// The engine stored blocks where it computes, which has room for `most`, if that is known. Of what it held when
    /// messages were lost nothing is left, but for what is used all the time, once it stored twice as many.
    pub fn stored(&mut self, blocks: u64, most: Option<u64>) {
        let Some(since) = self.hole.map(|since| since.saturating_add(blocks)) else { return };
        let is_over = most.is_some_and(|most| most > 0 && since >= turned_over(most));
        self.hole = Some(since).filter(|_| !is_over);
    }

    /// The engine said that its cache is empty: whatever was missed no longer matters.
    pub fn cleared(&mut self) {
        self.complete |= self.identified;
        self.hole = None;
    }

    /// Why not all is known; none where it is.
    pub fn gap(&self) -> Option<Gap> {
        match self {
            Self { identified: false, .. } => Some(Gap::Unidentified),
            Self { hole: Some(since), .. } => Some(Gap::Lost(*since)),
            Self { complete: false, .. } => Some(Gap::Behind),
            _ => None,
        }
    }

    /// How far the index can be believed.
    pub fn knowledge(&self) -> Knowledge {
        if self.gap().is_none() { Knowledge::Exact } else { Knowledge::Degraded }
    }
}

/// Blocks that an engine must have stored since messages were lost, for their loss not to matter any more.
pub fn turned_over(most: u64) -> u64 {
    most.saturating_mul(TURNS)
}

#[cfg(test)]
mod tests;
