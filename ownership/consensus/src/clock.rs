//! The ledger's clock as a leader drives it: the clock it found, plus its own monotonic time since.

use ledger::MAX_CLOCK_STEP;
use openraft::async_runtime::instant::Instant;
use vocabulary::{LedgerTime, Micros};

/// The clock of one term of office.
///
/// It never shows more than one step beyond what it showed before: time in which this process did not run is not
/// counted, because nobody could renew a lease then.
#[derive(Debug)]
pub struct LeaderClock<I = std::time::Instant> {
    since: LedgerTime,
    last: LedgerTime,
    read: I,
}

impl<I: Instant> LeaderClock<I> {
    /// Takes office at `now`, when the ledger's clock shows `ledger`.
    pub fn take_office(ledger: LedgerTime, now: I) -> Self {
        Self { since: ledger, last: ledger, read: now }
    }

    /// The time of the next entry.
    pub fn read(&mut self, now: I) -> LedgerTime {
        let passed = Micros::of(now.saturating_duration_since(self.read)).min(MAX_CLOCK_STEP);
        self.last = self.last.after(passed);
        self.read = self.read.max(now);
        self.last
    }

    /// Time in office, without pauses: what was read last, not more.
    pub fn in_office(&self) -> Micros {
        Micros(self.last.0 - self.since.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn it_goes_on_from_the_ledgers_clock_and_follows_monotonic_time() {
        let start = Instant::now();
        let mut clock = LeaderClock::take_office(LedgerTime(5_000), start);
        assert_eq!(clock.read(start), LedgerTime(5_000));
        assert_eq!(clock.read(start + Duration::from_micros(300)), LedgerTime(5_300));
        assert_eq!(clock.read(start + Duration::from_micros(900)), LedgerTime(5_900));
        assert_eq!(clock.in_office(), Micros(900));
    }

    #[test]
    fn a_pause_counts_as_one_step() {
        let start = Instant::now();
        let mut clock = LeaderClock::take_office(LedgerTime(0), start);
        let late = start + Duration::from_secs(60);
        assert_eq!(clock.read(late), LedgerTime(MAX_CLOCK_STEP.0));
        assert_eq!(clock.read(late + Duration::from_micros(10)), LedgerTime(MAX_CLOCK_STEP.0 + 10));
        assert_eq!(clock.in_office(), MAX_CLOCK_STEP + Micros(10));
    }

    #[test]
    fn an_instant_from_before_does_not_move_it_back() {
        let start = Instant::now();
        let mut clock = LeaderClock::take_office(LedgerTime(7), start + Duration::from_secs(1));
        assert_eq!(clock.read(start), LedgerTime(7));
    }
}
