//! Session growth: how many tokens sessions add after their first step, to estimate what a new one will need.

use vocabulary::Tokens;

/// Number of sessions at which all counts are halved, so that older ones fade.
const MAX_SESSIONS: f64 = 1_024.0;

/// Sums over observed sessions; running sessions count with their growth so far.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct SessionGrowth {
    sessions: f64,
    tokens: f64,
}

impl SessionGrowth {
    /// Records the end of a session's first step.
    pub(super) fn record_session(&mut self) {
        self.sessions += 1.0;
        if self.sessions >= MAX_SESSIONS {
            (self.sessions, self.tokens) = (self.sessions / 2.0, self.tokens / 2.0);
        }
    }

    /// Records that a session has grown by `tokens`.
    pub(super) fn record_growth(&mut self, tokens: Tokens) {
        self.tokens += tokens.0 as f64;
    }

    /// Returns the expected growth of a new session; 0 before any session was seen.
    pub(super) fn expected(&self) -> Tokens {
        Tokens((self.tokens / self.sessions.max(1.0)).round() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_session_expects_the_mean_growth_of_other_sessions() {
        let mut growth = SessionGrowth::default();
        assert_eq!(growth.expected(), Tokens::ZERO);
        for _ in 0..196 {
            growth.record_session();
            growth.record_growth(Tokens(300));
            growth.record_growth(Tokens(700));
        }
        assert_eq!(growth.expected(), Tokens(1_000));
    }

    #[test]
    fn old_session_growth_decays() {
        let mut growth = SessionGrowth::default();
        (0..1_000).for_each(|_| growth.record_session());
        (0..5_000).for_each(|_| {
            growth.record_session();
            growth.record_growth(Tokens(4_000));
        });
        assert!((3_700..4_100).contains(&growth.expected().0), "{:?}", growth.expected());
    }
}
