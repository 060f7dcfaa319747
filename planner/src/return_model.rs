//! Model of session returns: how likely a session comes back for its KV soon, by its idle time and its past gaps.
//!
//! Learned from observed gaps between steps. Keeps counts only: it remembers no session and reads no clock.

use vocabulary::Micros;

/// Horizon of a return that counts: KV needed later than this would have been evicted by others anyway.
const RETURN_HORIZON: Micros = Micros(120_000_000);
/// Horizon of a short-term return: waiting for such a session is better than evicting its KV.
const SHORT_RETURN_HORIZON: Micros = Micros(15_000_000);
/// Upper ends of the gap classes, in seconds; the last class is open-ended.
const CLASS_ENDS_SECONDS: [u64; 13] = [1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960, 1_920, 3_840];
const CLASSES: usize = CLASS_ENDS_SECONDS.len() + 1;
/// Prior counts, before any gap was observed: agents mostly wait for tools, sometimes for people.
const PRIOR_RETURNS: [u32; CLASSES] = [4, 4, 4, 4, 3, 2, 2, 2, 1, 1, 0, 0, 0, 0];
const PRIOR_ABANDONED: u32 = 3;
/// Number of gaps at which all counts are halved, so that older ones fade.
const MAX_GAPS: u32 = 8_192;
/// Number of gaps after which the probabilities are recomputed.
const REFRESH_EVERY: u32 = 32;

/// Return pattern of a session, by its longest gap so far. Tools answer at once, people do not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) enum ReturnPattern {
    /// The session has not come back yet.
    #[default]
    New,
    /// Always within 15 s.
    Quick,
    /// Always within a minute.
    Steady,
    /// At least once after a minute or more.
    Patient,
}

impl ReturnPattern {
    const COUNT: usize = 4;

    /// Returns the session's pattern after one more gap.
    pub(crate) fn after_gap(self, gap: Micros) -> Self {
        let this = match gap.0 / 1_000_000 {
            0..15 => Self::Quick,
            15..60 => Self::Steady,
            _ => Self::Patient,
        };
        self.max(this)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct ReturnModel([GapHistogram; ReturnPattern::COUNT]);

impl Default for ReturnModel {
    fn default() -> Self {
        let mut usual = GapHistogram {
            gap_counts: PRIOR_RETURNS,
            abandoned: PRIOR_ABANDONED,
            observed: 0,
            return_probabilities: [0.0; CLASSES],
        };
        usual.refresh_probabilities();
        Self(std::array::from_fn(|_| usual.clone()))
    }
}

impl ReturnModel {
    /// Records that a session came back after `gap`.
    pub(crate) fn record_return(&mut self, pattern: ReturnPattern, gap: Micros) {
        let gaps = &mut self.0[pattern as usize];
        gaps.gap_counts[class(gap)] += 1;
        gaps.count_gap();
    }

    /// Records that a session was abandoned: it has been idle for too long.
    pub(crate) fn record_abandoned(&mut self, pattern: ReturnPattern) {
        let gaps = &mut self.0[pattern as usize];
        gaps.abandoned += 1;
        gaps.count_gap();
    }

    /// Returns the chance, 0 to 1, that a session with this pattern and idle time comes back soon (within 120 s of the
    /// start of its class).
    pub(crate) fn return_probability(&self, pattern: ReturnPattern, idle: GapBucket) -> f64 {
        self.0[pattern as usize].return_probabilities[idle.0]
    }

    /// Returns the chance, 0 to 1, that the session comes back within 15 s.
    pub(crate) fn short_term_return_probability(&self, pattern: ReturnPattern, idle: GapBucket) -> f64 {
        self.0[pattern as usize].within(idle.0, SHORT_RETURN_HORIZON)
    }
}

/// Idle time of a session, as the index of its gap class.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct GapBucket(usize);

impl GapBucket {
    pub(crate) const MAX: Self = Self(CLASSES - 1);

    /// Returns the class of `time`, if that is lower than this class.
    pub(crate) fn at_most(mut self, time: Micros) -> Self {
        while self.0 > 0 && time.0 < CLASS_ENDS_SECONDS[self.0 - 1] * 1_000_000 {
            self.0 -= 1;
        }
        self
    }
}

/// Histogram of gaps, number of abandoned sessions, and the resulting probabilities.
#[derive(Clone, Debug)]
struct GapHistogram {
    gap_counts: [u32; CLASSES],
    abandoned: u32,
    observed: u32,
    return_probabilities: [f64; CLASSES],
}

impl GapHistogram {
    fn count_gap(&mut self) {
        self.observed += 1;
        if self.observed.is_multiple_of(REFRESH_EVERY) {
            self.refresh_probabilities();
        }
        if self.observed >= MAX_GAPS {
            self.gap_counts.iter_mut().chain([&mut self.abandoned, &mut self.observed]).for_each(|count| *count /= 2);
        }
    }

    fn refresh_probabilities(&mut self) {
        self.return_probabilities = std::array::from_fn(|at| self.within(at, RETURN_HORIZON));
    }

    /// Returns the share of sessions that came back within `time`, among those idle at least until the class begins
    /// (returned later or never). Gaps count as uniform within a class.
    fn within(&self, at: usize, time: Micros) -> f64 {
        let until = begin(at) + time.0 as f64;
        let (mut soon, mut all) = (0.0, f64::from(self.abandoned));
        for class in at..CLASSES {
            let (count, from) = (f64::from(self.gap_counts[class]), begin(class));
            let length = if class + 1 < CLASSES { begin(class + 1) - from } else { from };
            soon += count * ((until - from) / length).clamp(0.0, 1.0);
            all += count;
        }
        // Rounded to millionths, so that a decision log stores the exact value.
        if all > 0.0 { (soon / all * 1e6).round() / 1e6 } else { 0.0 }
    }
}

/// Returns the lower end of a class, in microseconds.
fn begin(class: usize) -> f64 {
    if class == 0 { 0.0 } else { CLASS_ENDS_SECONDS[class - 1] as f64 * 1e6 }
}

fn class(gap: Micros) -> usize {
    CLASS_ENDS_SECONDS.partition_point(|end| Micros(end * 1_000_000) <= gap)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Micros {
        Micros(seconds * 1_000_000)
    }

    fn idle(time: u64) -> GapBucket {
        GapBucket::MAX.at_most(seconds(time))
    }

    #[test]
    fn default_return_probability_falls_with_idle_time() {
        let returns = ReturnModel::default();
        let chances = [0, 30, 120, 500, 100_000].map(|time| returns.return_probability(ReturnPattern::New, idle(time)));
        assert!(chances[0] > 0.8 && chances.is_sorted_by(|a, b| a > b || *b == 0.0), "{chances:?}");
    }

    #[test]
    fn short_term_return_probability_is_lower_and_near_zero_after_minutes() {
        let returns = ReturnModel::default();
        for time in [0, 5, 20, 100, 400] {
            let shortly = returns.short_term_return_probability(ReturnPattern::New, idle(time));
            assert!(shortly < returns.return_probability(ReturnPattern::New, idle(time)), "{time}");
        }
        assert!(returns.short_term_return_probability(ReturnPattern::New, idle(0)) > 0.6);
        assert!(returns.short_term_return_probability(ReturnPattern::New, idle(120)) < 0.06);
    }

    #[test]
    fn abandoned_sessions_lower_return_probability_of_their_pattern_only() {
        let mut returns = ReturnModel::default();
        let before = returns.return_probability(ReturnPattern::New, idle(60));
        (0..640).for_each(|_| returns.record_abandoned(ReturnPattern::New));
        assert!(returns.return_probability(ReturnPattern::New, idle(60)) < 0.02);
        assert_eq!(
            returns.return_probability(ReturnPattern::Patient, idle(60)),
            before,
            "of another habit nothing was learned"
        );
    }

    #[test]
    fn late_returns_raise_return_probability_for_long_idle_times() {
        let mut returns = ReturnModel::default();
        (0..640).for_each(|_| returns.record_return(ReturnPattern::Patient, seconds(100)));
        assert!(returns.return_probability(ReturnPattern::Patient, idle(60)) > 0.98);
        assert!(returns.return_probability(ReturnPattern::Patient, idle(130)) < 0.5, "those would be back by now");
    }

    #[test]
    fn recent_gaps_outweigh_old_ones() {
        let mut returns = ReturnModel::default();
        (0..100_000).for_each(|_| returns.record_abandoned(ReturnPattern::Quick));
        (0..20_000).for_each(|_| returns.record_return(ReturnPattern::Quick, seconds(3)));
        assert!(returns.return_probability(ReturnPattern::Quick, idle(2)) > 0.8);
    }

    #[test]
    fn return_probability_stays_within_zero_and_one() {
        let mut returns = ReturnModel::default();
        for gap in [0, 1, 59, 60, 3_839, 3_840, u64::MAX / 1_000_000] {
            (0..64).for_each(|_| returns.record_return(ReturnPattern::Steady, seconds(gap)));
            for time in [0, 1, 60, 3_840, u64::MAX / 1_000_000] {
                assert!(
                    (0.0..=1.0).contains(&returns.return_probability(ReturnPattern::Steady, idle(time))),
                    "{gap} {time}"
                );
            }
        }
    }

    #[test]
    fn longest_gap_determines_the_return_pattern() {
        assert_eq!(ReturnPattern::New.after_gap(seconds(1)), ReturnPattern::Quick);
        assert_eq!(ReturnPattern::Quick.after_gap(seconds(15)), ReturnPattern::Steady);
        assert_eq!(ReturnPattern::Patient.after_gap(seconds(1)), ReturnPattern::Patient);
        assert_eq!(ReturnPattern::New.after_gap(seconds(60)), ReturnPattern::Patient);
    }
}
