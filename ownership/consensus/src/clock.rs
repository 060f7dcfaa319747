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

    /// The time of the next entry, while the ledger's clock shows `ledger`.
    ///
    /// At most one step beyond what is applied: entries that were refused or are still on their way must not leave the
    /// ledger behind, because it would catch up in no time, and end leases that it granted meanwhile too early.
    pub fn read(&mut self, ledger: LedgerTime, now: I) -> LedgerTime {
        let passed = Micros::of(now.saturating_duration_since(self.read)).min(MAX_CLOCK_STEP);
        let bound = ledger.after(MAX_CLOCK_STEP);
        self.last = self.last.after(passed).min(bound).max(self.last);
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
        let (start, ledger) = (Instant::now(), LedgerTime(5_000));
        let mut clock = LeaderClock::take_office(ledger, start);
        assert_eq!(clock.read(ledger, start), ledger);
        assert_eq!(clock.read(ledger, start + Duration::from_micros(300)), LedgerTime(5_300));
        assert_eq!(clock.read(ledger, start + Duration::from_micros(900)), LedgerTime(5_900));
        assert_eq!(clock.in_office(), Micros(900));
    }

    #[test]
    fn a_pause_counts_as_one_step() {
        let start = Instant::now();
        let mut clock = LeaderClock::take_office(LedgerTime(0), start);
        let late = start + Duration::from_secs(60);
        let step = LedgerTime(MAX_CLOCK_STEP.0);
        assert_eq!(clock.read(LedgerTime(0), late), step);
        assert_eq!(clock.read(step, late + Duration::from_micros(10)), step.after(Micros(10)));
        assert_eq!(clock.in_office(), MAX_CLOCK_STEP + Micros(10));
    }

    #[test]
    fn while_nothing_is_applied_it_stands_one_step_ahead() {
        let start = Instant::now();
        let mut clock = LeaderClock::take_office(LedgerTime(0), start);
        let step = LedgerTime(MAX_CLOCK_STEP.0);
        for second in 1..20 {
            assert_eq!(clock.read(LedgerTime(0), start + Duration::from_secs(second)), step);
        }
        // What is applied later does not let it run after the time that was lost.
        assert_eq!(clock.read(step, start + Duration::from_millis(19_500)), step.after(Micros(500_000)));
    }

    #[test]
    fn an_instant_from_before_does_not_move_it_back() {
        let start = Instant::now();
        let mut clock = LeaderClock::take_office(LedgerTime(7), start + Duration::from_secs(1));
        assert_eq!(clock.read(LedgerTime(7), start), LedgerTime(7));
        assert_eq!(clock.read(LedgerTime(0), start), LedgerTime(7));
    }
}
