//! How long answers are: as those before, of the session and of all. What a client allows is a bound, and often a thousand times
//! of what comes.

use vocabulary::Tokens;

/// An answer before any was seen, and for how many that stands.
const USUAL: f64 = 256.0;
const USUAL_COUNTS: f64 = 8.0;
/// For how many of a session's own answers the mean of all sessions stands.
const OTHERS_COUNT: f64 = 2.0;
/// A session's last eight answers count, and the last thousand of all: each older one this much less than the next.
const FADES_IN_SESSION: f64 = 1.0 / 8.0;
const FADES: f64 = 1.0 / 1_000.0;
/// Longer answers count as this long: beyond it load is another one than it was when the answer began.
const MOST: Tokens = Tokens(1_024);

/// Answers of the past, later ones with more weight.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Answers {
    count: f64,
    tokens: f64,
}

impl Answers {
    /// One more of all sessions' answers.
    pub(super) fn saw(&mut self, answer: Tokens) {
        self.add(answer, FADES);
    }

    /// One more of one session's answers.
    pub(super) fn saw_own(&mut self, answer: Tokens) {
        self.add(answer, FADES_IN_SESSION);
    }

    /// What the next answer is expected to be, of a session with such answers where all are `self`.
    pub(super) fn next(&self, own: &Self) -> Tokens {
        let usual = (self.tokens + USUAL * USUAL_COUNTS) / (self.count + USUAL_COUNTS);
        let tokens = (own.tokens + usual * OTHERS_COUNT) / (own.count + OTHERS_COUNT);
        Tokens(tokens.round() as u64).max(Tokens(1))
    }

    fn add(&mut self, answer: Tokens, fades: f64) {
        self.count = self.count * (1.0 - fades) + 1.0;
        self.tokens = self.tokens * (1.0 - fades) + answer.min(MOST).0 as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(count: usize, tokens: u64) -> Answers {
        let mut answers = Answers::default();
        (0..count).for_each(|_| answers.saw_own(Tokens(tokens)));
        answers
    }

    #[test]
    fn before_any_answer_the_usual_one_is_expected() {
        assert_eq!(Answers::default().next(&Answers::default()), Tokens(256));
    }

    #[test]
    fn a_new_sessions_answer_is_expected_to_be_as_all_are() {
        let mut all = Answers::default();
        (0..5_000).for_each(|_| all.saw(Tokens(80)));
        assert!((80..=83).contains(&all.next(&Answers::default()).0));
    }

    #[test]
    fn a_session_with_answers_of_its_own_is_expected_to_go_on_like_that() {
        let all = Answers::default();
        assert!((158..=161).contains(&all.next(&of(2, 56)).0), "two of its own count as much as all others");
        assert!((590..=700).contains(&all.next(&of(100, 700)).0));
        let mut changed = of(100, 700);
        (0..16).for_each(|_| changed.saw_own(Tokens(10)));
        assert!(all.next(&changed) < Tokens(150), "what it did long ago counts less");
    }

    #[test]
    fn one_endless_answer_does_not_make_the_next_ones_dear() {
        assert!(Answers::default().next(&of(100, u64::MAX)) <= MOST);
        assert_eq!(Answers::default().next(&of(1_000, 0)).0, 51);
    }
}
