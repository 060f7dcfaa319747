//! Expected answer length, from past answers of the session and of all sessions. The client's `max_tokens` is only a
//! bound, often a thousand times the real length.

use vocabulary::Tokens;

/// Expected length before any answer was seen, and the number of answers that it counts as.
const PRIOR_TOKENS: f64 = 256.0;
const PRIOR_WEIGHT: f64 = 8.0;
/// Number of a session's own answers that the mean of all sessions counts as.
const FLEET_MEAN_WEIGHT: f64 = 2.0;
/// Weight that past answers lose with each new one: about the last eight answers of a session count, and the last
/// thousand of all sessions.
const SESSION_DECAY: f64 = 1.0 / 8.0;
const DECAY: f64 = 1.0 / 1_000.0;
/// Cap on the counted length: by the end of a longer answer the load differs from that at its start.
const MAX_ANSWER: Tokens = Tokens(1_024);

/// Exponentially weighted sum of past answer lengths.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct AnswerLengths {
    count: f64,
    tokens: f64,
}

impl AnswerLengths {
    /// Adds an answer to the statistics of all sessions.
    pub(super) fn record(&mut self, answer: Tokens) {
        self.add(answer, DECAY);
    }

    /// Adds an answer to the statistics of one session.
    pub(super) fn record_own(&mut self, answer: Tokens) {
        self.add(answer, SESSION_DECAY);
    }

    /// Returns the expected length of a session's next answer; `own` are its answers, `self` those of all sessions.
    pub(super) fn expected(&self, own: &Self) -> Tokens {
        let usual = (self.tokens + PRIOR_TOKENS * PRIOR_WEIGHT) / (self.count + PRIOR_WEIGHT);
        let tokens = (own.tokens + usual * FLEET_MEAN_WEIGHT) / (own.count + FLEET_MEAN_WEIGHT);
        Tokens(tokens.round() as u64).max(Tokens(1))
    }

    fn add(&mut self, answer: Tokens, fades: f64) {
        self.count = self.count * (1.0 - fades) + 1.0;
        self.tokens = self.tokens * (1.0 - fades) + answer.min(MAX_ANSWER).0 as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(count: usize, tokens: u64) -> AnswerLengths {
        let mut answers = AnswerLengths::default();
        (0..count).for_each(|_| answers.record_own(Tokens(tokens)));
        answers
    }

    #[test]
    fn default_answer_length_is_expected_before_any_answer() {
        assert_eq!(AnswerLengths::default().expected(&AnswerLengths::default()), Tokens(256));
    }

    #[test]
    fn new_session_expects_the_mean_answer_length_of_all_sessions() {
        let mut all = AnswerLengths::default();
        (0..5_000).for_each(|_| all.record(Tokens(80)));
        assert!((80..=83).contains(&all.expected(&AnswerLengths::default()).0));
    }

    #[test]
    fn own_answer_lengths_outweigh_the_mean_of_all_sessions() {
        let all = AnswerLengths::default();
        assert!((158..=161).contains(&all.expected(&of(2, 56)).0), "two of its own count as much as all others");
        assert!((590..=700).contains(&all.expected(&of(100, 700)).0));
        let mut changed = of(100, 700);
        (0..16).for_each(|_| changed.record_own(Tokens(10)));
        assert!(all.expected(&changed) < Tokens(150), "what it did long ago counts less");
    }

    #[test]
    fn endless_answers_are_capped_in_the_expected_length() {
        assert!(AnswerLengths::default().expected(&of(100, u64::MAX)) <= MAX_ANSWER);
        assert_eq!(AnswerLengths::default().expected(&of(1_000, 0)).0, 51);
    }
}
