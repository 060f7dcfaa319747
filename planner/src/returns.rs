//! How likely a session comes back for its KV soon, by how long it has been idle and how it came back before.
//!
//! Learned from the gaps that were seen. Counts only: no session is remembered here, and no clock is read.

use vocabulary::Micros;

/// A return within this time counts: what is wanted later would have been evicted by others anyway.
const SOON: Micros = Micros(120_000_000);
/// A return within this time is one that others rather wait for than push it out.
const SHORTLY: Micros = Micros(15_000_000);
/// Ends of the classes of gaps, in seconds; the last class has none.
const ENDS: [u64; 13] = [1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960, 1_920, 3_840];
const CLASSES: usize = ENDS.len() + 1;
/// What is believed before anything was seen: agents wait for tools mostly, for people now and then.
const USUAL: [u32; CLASSES] = [4, 4, 4, 4, 3, 2, 2, 2, 1, 1, 0, 0, 0, 0];
const USUAL_GONE: u32 = 3;
/// From so many gaps on the older ones count half.
const MOST: u32 = 8_192;
/// Chances are worked out anew whenever so many more gaps were seen.
const SETTLE_EVERY: u32 = 32;

/// How a session came back so far: by its longest gap. Tools answer at once, people do not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) enum Habit {
    /// It has not come back yet.
    #[default]
    New,
    /// Within 15 s.
    Quick,
    /// Within a minute.
    Steady,
    /// After more.
    Patient,
}

impl Habit {
    const COUNT: usize = 4;

    /// The same session's, after one more gap.
    pub(crate) fn after(self, gap: Micros) -> Self {
        let this = match gap.0 / 1_000_000 {
            0..15 => Self::Quick,
            15..60 => Self::Steady,
            _ => Self::Patient,
        };
        self.max(this)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Returns([Gaps; Habit::COUNT]);

impl Default for Returns {
    fn default() -> Self {
        let mut usual = Gaps { gaps: USUAL, gone: USUAL_GONE, seen: 0, chances: [0.0; CLASSES] };
        usual.settle();
        Self(std::array::from_fn(|_| usual.clone()))
    }
}

impl Returns {
    /// A session came back after so long.
    pub(crate) fn came_back(&mut self, habit: Habit, gap: Micros) {
        let gaps = &mut self.0[habit as usize];
        gaps.gaps[class(gap)] += 1;
        gaps.saw_one();
    }

    /// A session was given up: nothing was heard of it for long.
    pub(crate) fn stayed_away(&mut self, habit: Habit) {
        let gaps = &mut self.0[habit as usize];
        gaps.gone += 1;
        gaps.saw_one();
    }

    /// The chance, 0 to 1, that a session of this habit that has been idle for so long comes back soon.
    pub(crate) fn chance(&self, habit: Habit, idle: Idle) -> f64 {
        self.0[habit as usize].chances[idle.0]
    }

    /// The same, that it comes back within 15 s.
    pub(crate) fn chance_shortly(&self, habit: Habit, idle: Idle) -> f64 {
        self.0[habit as usize].within(idle.0, SHORTLY)
    }
}

/// For how long a session has been idle, as far as it makes a difference.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Idle(usize);

impl Idle {
    pub(crate) const LONGEST: Self = Self(CLASSES - 1);

    /// After so long, where it is no longer than this.
    pub(crate) fn at_most(mut self, time: Micros) -> Self {
        while self.0 > 0 && time.0 < ENDS[self.0 - 1] * 1_000_000 {
            self.0 -= 1;
        }
        self
    }
}

/// Gaps by their length, how many sessions never came back, and the chances that follow.
#[derive(Clone, Debug)]
struct Gaps {
    gaps: [u32; CLASSES],
    gone: u32,
    seen: u32,
    chances: [f64; CLASSES],
}

impl Gaps {
    fn saw_one(&mut self) {
        self.seen += 1;
        if self.seen.is_multiple_of(SETTLE_EVERY) {
            self.settle();
        }
        if self.seen >= MOST {
            self.gaps.iter_mut().chain([&mut self.gone, &mut self.seen]).for_each(|count| *count /= 2);
        }
    }

    fn settle(&mut self) {
        self.chances = std::array::from_fn(|at| self.within(at, SOON));
    }

    /// Of those that were idle for as long as a class begins: who came back within `time`, by all that came back later
    /// than that or never. Inside a class gaps count as even.
    fn within(&self, at: usize, time: Micros) -> f64 {
        let until = begin(at) + time.0 as f64;
        let (mut soon, mut all) = (0.0, f64::from(self.gone));
        for class in at..CLASSES {
            let (count, from) = (f64::from(self.gaps[class]), begin(class));
            let length = if class + 1 < CLASSES { begin(class + 1) - from } else { from };
            soon += count * ((until - from) / length).clamp(0.0, 1.0);
            all += count;
        }
        // In millionths, so that a decision log says them as they are.
        if all > 0.0 { (soon / all * 1e6).round() / 1e6 } else { 0.0 }
    }
}

/// Where a class begins, in microseconds.
fn begin(class: usize) -> f64 {
    if class == 0 { 0.0 } else { ENDS[class - 1] as f64 * 1e6 }
}

fn class(gap: Micros) -> usize {
    ENDS.partition_point(|end| Micros(end * 1_000_000) <= gap)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Micros {
        Micros(seconds * 1_000_000)
    }

    fn idle(time: u64) -> Idle {
        Idle::LONGEST.at_most(seconds(time))
    }

    #[test]
    fn before_anything_was_seen_the_chance_falls_with_the_time() {
        let returns = Returns::default();
        let chances = [0, 30, 120, 500, 100_000].map(|time| returns.chance(Habit::New, idle(time)));
        assert!(chances[0] > 0.8 && chances.is_sorted_by(|a, b| a > b || *b == 0.0), "{chances:?}");
    }

    #[test]
    fn within_15_s_fewer_come_back_than_soon_and_hardly_anybody_who_has_been_idle_for_minutes() {
        let returns = Returns::default();
        for time in [0, 5, 20, 100, 400] {
            let shortly = returns.chance_shortly(Habit::New, idle(time));
            assert!(shortly < returns.chance(Habit::New, idle(time)), "{time}");
        }
        assert!(returns.chance_shortly(Habit::New, idle(0)) > 0.6);
        assert!(returns.chance_shortly(Habit::New, idle(120)) < 0.06);
    }

    #[test]
    fn sessions_that_stay_away_teach_that_others_of_their_habit_will() {
        let mut returns = Returns::default();
        let before = returns.chance(Habit::New, idle(60));
        (0..640).for_each(|_| returns.stayed_away(Habit::New));
        assert!(returns.chance(Habit::New, idle(60)) < 0.02);
        assert_eq!(returns.chance(Habit::Patient, idle(60)), before, "of another habit nothing was learned");
    }

    #[test]
    fn sessions_that_come_back_late_teach_to_wait_for_them() {
        let mut returns = Returns::default();
        (0..640).for_each(|_| returns.came_back(Habit::Patient, seconds(100)));
        assert!(returns.chance(Habit::Patient, idle(60)) > 0.98);
        assert!(returns.chance(Habit::Patient, idle(130)) < 0.5, "those would be back by now");
    }

    #[test]
    fn what_was_learned_long_ago_gives_way() {
        let mut returns = Returns::default();
        (0..100_000).for_each(|_| returns.stayed_away(Habit::Quick));
        (0..20_000).for_each(|_| returns.came_back(Habit::Quick, seconds(3)));
        assert!(returns.chance(Habit::Quick, idle(2)) > 0.8);
    }

    #[test]
    fn chances_lie_between_none_and_certain_whatever_was_seen() {
        let mut returns = Returns::default();
        for gap in [0, 1, 59, 60, 3_839, 3_840, u64::MAX / 1_000_000] {
            (0..64).for_each(|_| returns.came_back(Habit::Steady, seconds(gap)));
            for time in [0, 1, 60, 3_840, u64::MAX / 1_000_000] {
                assert!((0.0..=1.0).contains(&returns.chance(Habit::Steady, idle(time))), "{gap} {time}");
            }
        }
    }

    #[test]
    fn the_longest_gap_makes_the_habit() {
        assert_eq!(Habit::New.after(seconds(1)), Habit::Quick);
        assert_eq!(Habit::Quick.after(seconds(15)), Habit::Steady);
        assert_eq!(Habit::Patient.after(seconds(1)), Habit::Patient);
        assert_eq!(Habit::New.after(seconds(60)), Habit::Patient);
    }
}
