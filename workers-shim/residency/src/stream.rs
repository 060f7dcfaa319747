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

/// Whether a process is the one that was met before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Met {
    /// The same one.
    Same,
    /// Another one: what was known of the old one is void.
    Another,
}

/// One publisher's sequence.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    process: Option<Incarnation>,
    next: u64,
    last_live: Option<u64>,
    /// Whether a start was seen: a replay, or message 0.
    started: bool,
    /// Whether messages were lost since the cache was last known to be empty.
    holed: bool,
}

impl Stream {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The process behind the publisher was identified.
    pub fn meet(&mut self, process: Incarnation) -> Met {
        match self.process.replace(process) {
            Some(old) if old != process => {
                *self = Self { process: Some(process), ..Self::default() };
                Met::Another
            }
            _ => Met::Same,
        }
    }

    /// Another process speaks, though its identity could not be read.
    pub fn restart(&mut self) {
        *self = Self::default();
    }

    /// What `process` said before `next` is known from elsewhere. That is believed to be all of it only once a replay from
    /// there, or the next message itself, went on without a gap.
    pub fn adopt(&mut self, process: Incarnation, next: u64) {
        *self = Self { process: Some(process), next, ..Self::default() };
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
        self.last_live = Some(sequence);
        if sequence < self.next {
            return Verdict::Seen;
        }
        if sequence > self.next {
            return Verdict::Replay { from: self.next };
        }
        // Nothing lies between what is known, be it nothing at all, and this.
        self.started = true;
        self.advance(sequence)
    }

    /// A message arrived in a replay. What the replay leaves out is lost.
    pub fn replayed(&mut self, sequence: u64) -> Verdict {
        if sequence < self.next {
            return Verdict::Seen;
        }
        self.holed |= sequence > self.next;
        self.started = true;
        self.advance(sequence)
    }

    /// A replay came to its end marker: all that could be had is here.
    pub fn replay_ended(&mut self) {
        self.started = true;
    }

    /// The message that asked for the replay, again: what is still missing before it is lost.
    pub fn after_replay(&mut self, sequence: u64) -> Verdict {
        if sequence < self.next {
            return Verdict::Seen;
        }
        self.holed |= sequence > self.next;
        self.advance(sequence)
    }

    fn advance(&mut self, sequence: u64) -> Verdict {
        self.next = sequence.saturating_add(1);
        Verdict::Apply
    }

    /// A message could not be read, or part of it could not be kept.
    pub fn spoiled(&mut self) {
        self.holed = true;
    }

    /// The engine said that its cache is empty: whatever was missed no longer matters.
    pub fn cleared(&mut self) {
        self.started = true;
        self.holed = false;
    }

    /// How far the index can be believed.
    pub fn knowledge(&self) -> Knowledge {
        if self.started && !self.holed { Knowledge::Exact } else { Knowledge::Degraded }
    }
}

#[cfg(test)]
mod tests;
