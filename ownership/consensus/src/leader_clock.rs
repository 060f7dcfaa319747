//! The leader's clock: the ledger time at the start of its term plus monotonic time since then.

use ledger::MAX_CLOCK_STEP;
use openraft::async_runtime::instant::Instant;
use vocabulary::{LedgerTime, Micros};

/// The ledger clock of one leader term.
///
/// The clock advances by at most one step per reading. Time in which this process was paused does not count, because no
/// lease could be renewed then.
#[derive(Debug)]
pub struct LeaderClock<I = std::time::Instant> {
    term_start: LedgerTime,
    last_time: LedgerTime,
    read_at: I,
}

impl<I: Instant> LeaderClock<I> {
    /// Starts a term at `now`, when the ledger's clock shows `ledger`.
    pub fn begin_term(ledger: LedgerTime, now: I) -> Self {
        Self { term_start: ledger, last_time: ledger, read_at: now }
    }

    /// Returns the time for the next entry, while the applied ledger's clock shows `ledger`.
    ///
    /// The time is at most one step ahead of what is applied. Otherwise refused or pending entries could leave the
    /// ledger far behind; it would then catch up at once and expire recently granted leases too early.
    pub fn read(&mut self, ledger: LedgerTime, now: I) -> LedgerTime {
        let passed = Micros::of(now.saturating_duration_since(self.read_at)).min(MAX_CLOCK_STEP);
        let bound = ledger.after(MAX_CLOCK_STEP);
        self.last_time = self.last_time.after(passed).min(bound).max(self.last_time);
        self.read_at = self.read_at.max(now);
        self.last_time
    }

    /// Returns the time in this term without pauses, up to the last reading.
    pub fn time_leading(&self) -> Micros {
        Micros(self.last_time.0 - self.term_start.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_leader_clock_continues_from_ledger_time_at_monotonic_speed() {
        let (start, ledger) = (Instant::now(), LedgerTime(5_000));
        let mut clock = LeaderClock::begin_term(ledger, start);
        assert_eq!(clock.read(ledger, start), ledger);
        assert_eq!(clock.read(ledger, start + Duration::from_micros(300)), LedgerTime(5_300));
        assert_eq!(clock.read(ledger, start + Duration::from_micros(900)), LedgerTime(5_900));
        assert_eq!(clock.time_leading(), Micros(900));
    }

    #[test]
    fn a_pause_advances_the_clock_by_one_step() {
        let start = Instant::now();
        let mut clock = LeaderClock::begin_term(LedgerTime(0), start);
        let late = start + Duration::from_secs(60);
        let step = LedgerTime(MAX_CLOCK_STEP.0);
        assert_eq!(clock.read(LedgerTime(0), late), step);
        assert_eq!(clock.read(step, late + Duration::from_micros(10)), step.after(Micros(10)));
        assert_eq!(clock.time_leading(), MAX_CLOCK_STEP + Micros(10));
    }

    #[test]
    fn the_clock_stays_within_one_step_of_the_applied_time() {
        let start = Instant::now();
        let mut clock = LeaderClock::begin_term(LedgerTime(0), start);
        let step = LedgerTime(MAX_CLOCK_STEP.0);
        for second in 1..20 {
            assert_eq!(clock.read(LedgerTime(0), start + Duration::from_secs(second)), step);
        }
        // Later entries do not make the clock catch up with the lost time.
        assert_eq!(clock.read(step, start + Duration::from_millis(19_500)), step.after(Micros(500_000)));
    }

    #[test]
    fn an_earlier_instant_does_not_move_the_clock_back() {
        let start = Instant::now();
        let mut clock = LeaderClock::begin_term(LedgerTime(7), start + Duration::from_secs(1));
        assert_eq!(clock.read(LedgerTime(7), start), LedgerTime(7));
        assert_eq!(clock.read(LedgerTime(0), start), LedgerTime(7));
    }
}
