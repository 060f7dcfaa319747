//! Sessions between two steps, the newest of them. Pure: time is an argument.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use planner::{Ask, StepKind};
use vocabulary::{SessionId, WorkerId};

use crate::pipeline::prompts::Kept;

/// Most sessions that are looked after.
const MOST: NonZeroUsize = NonZeroUsize::new(1024).expect("it is one");
/// How long after its step a session is looked after: who stays away longer is not expected shortly.
const LONGEST: Duration = Duration::from_secs(60);
/// Between two looks at the same one.
const AGAIN: Duration = Duration::from_secs(1);

/// The next step as far as it is known.
#[derive(Debug)]
pub struct Expected {
    /// What kind it is likely to be: what the last one was.
    pub step: StepKind,
    /// The last one's, with its answer in the prompt.
    pub ask: Ask,
    /// The prompt that it goes on from.
    pub kept: Arc<Kept>,
}

/// A session whose next step is awaited.
#[derive(Debug)]
struct Gap {
    /// None when nothing is sent any more: a prompt may be megabytes.
    expected: Option<Arc<Expected>>,
    begun: Instant,
    looked: Option<Instant>,
    tried: Tried,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tried {
    /// Nothing yet.
    Not,
    /// It came to nothing.
    Failed,
    /// The prefix lies there as well by now.
    Sent(WorkerId),
}

#[derive(Debug)]
pub(super) struct Gaps(LruCache<SessionId, Gap>);

impl Default for Gaps {
    fn default() -> Self {
        Self(LruCache::new(MOST))
    }
}

impl Gaps {
    /// A step of the session is over, served by `server`. Whether that is where its prefix had been sent to, where it had.
    pub(super) fn begins(
        &mut self,
        session: SessionId,
        (expected, server): (Expected, WorkerId),
        now: Instant,
    ) -> Option<bool> {
        let gap = Gap { expected: Some(Arc::new(expected)), begun: now, looked: None, tried: Tried::Not };
        match self.0.put(session, gap).map(|before| before.tried) {
            Some(Tried::Sent(to)) => Some(to == server),
            None | Some(Tried::Not | Tried::Failed) => None,
        }
    }

    /// At most so many that are to be looked at now, those that ended last first: they are the likeliest to be used.
    pub(super) fn due(&mut self, most: usize, now: Instant) -> Vec<(SessionId, Arc<Expected>)> {
        let mut due = Vec::new();
        self.let_go(now);
        for (session, gap) in self.0.iter_mut() {
            if due.len() == most || now.saturating_duration_since(gap.begun) > LONGEST {
                break;
            }
            let is_due = gap.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= AGAIN);
            if let (true, Tried::Not, Some(expected)) = (is_due, gap.tried, &gap.expected) {
                gap.looked = Some(now);
                due.push((*session, expected.clone()));
            }
        }
        due
    }

    /// Nothing more is sent in gaps as old as that; only what was is remembered.
    fn let_go(&mut self, now: Instant) {
        let is_old = |gap: &Gap| now.saturating_duration_since(gap.begun) > LONGEST;
        let old = self.0.iter().rev().take_while(|(_, gap)| is_old(gap)).map(|(session, _)| *session);
        for session in old.collect::<Vec<_>>() {
            match self.0.peek_mut(&session) {
                Some(gap) if matches!(gap.tried, Tried::Sent(_)) => gap.expected = None,
                _ => drop(self.0.pop(&session)),
            }
        }
    }

    /// Something was sent, or could not be. Nothing is sent twice in a gap.
    pub(super) fn tried(&mut self, session: SessionId, expected: &Arc<Expected>, tried: Tried) {
        let is_same = |gap: &Gap| gap.expected.as_ref().is_some_and(|known| Arc::ptr_eq(known, expected));
        if let Some(gap) = self.0.peek_mut(&session).filter(|gap| is_same(gap)) {
            gap.tried = tried;
        }
    }
}

#[cfg(test)]
mod tests {
    use planner::Transfers;
    use vocabulary::{Chain, PrefixId, Seed, TenantId, Tokens};

    use super::*;
    use crate::pipeline::token_ids::TokenIds;

    const SECOND: Duration = Duration::from_secs(1);

    fn expected() -> Expected {
        let chain = Chain::over_tokens(PrefixId(1), Seed::default(), Tokens(16), &[1; 32]);
        let kept = Kept {
            tenant: TenantId::default(),
            model: "m".into(),
            chain,
            tokens: TokenIds::Here([1; 32].into()),
            salt: None,
        };
        let ask = Ask {
            model: "m".into(),
            adapter: None,
            prompt: Tokens(40),
            answer: Tokens(8),
            growth: Tokens::ZERO,
            longest: None,
            block: Tokens(16),
            transfers: Transfers::Allowed,
        };
        Expected { step: StepKind::SmallIncrement, ask, kept: Arc::new(kept) }
    }

    fn due(gaps: &mut Gaps, now: Instant) -> Vec<u128> {
        gaps.due(3, now).iter().map(|(session, _)| session.0).collect()
    }

    #[test]
    fn the_newest_are_looked_at_once_a_second_until_they_are_old() {
        let (mut gaps, now) = (Gaps::default(), Instant::now());
        (0..5).for_each(|n| {
            gaps.begins(SessionId(n), (expected(), WorkerId(1)), now);
        });
        assert_eq!(due(&mut gaps, now), [4, 3, 2]);
        assert_eq!(due(&mut gaps, now), [1, 0], "the others were looked at just now");
        assert_eq!(due(&mut gaps, now), [] as [u128; 0]);
        assert_eq!(due(&mut gaps, now + SECOND), [4, 3, 2]);
        gaps.begins(SessionId(0), (expected(), WorkerId(1)), now + SECOND);
        assert_eq!(due(&mut gaps, now + SECOND), [0, 1], "it stepped again");
        assert_eq!(due(&mut gaps, now + SECOND * 61), [0]);
        assert_eq!(due(&mut gaps, now + SECOND * 62), [] as [u128; 0]);
    }

    #[test]
    fn nothing_is_sent_twice_and_the_next_step_says_whether_it_was_of_use() {
        let (mut gaps, now) = (Gaps::default(), Instant::now());
        let id = SessionId(1);
        assert_eq!(gaps.begins(id, (expected(), WorkerId(1)), now), None);
        let (_, waited) = gaps.due(1, now).remove(0);
        gaps.tried(id, &waited, Tried::Sent(WorkerId(2)));
        assert_eq!(due(&mut gaps, now + SECOND * 2), [] as [u128; 0]);
        assert_eq!(gaps.begins(id, (expected(), WorkerId(2)), now), Some(true));
        gaps.tried(id, &waited, Tried::Sent(WorkerId(2)));
        assert_eq!(due(&mut gaps, now), [1], "what was sent late was for the gap before");
        let (_, waited) = gaps.due(1, now + SECOND).remove(0);
        gaps.tried(id, &waited, Tried::Sent(WorkerId(2)));
        assert_eq!(gaps.begins(id, (expected(), WorkerId(1)), now), Some(false));
    }

    #[test]
    fn of_old_gaps_only_what_was_sent_is_kept() {
        let (mut gaps, now) = (Gaps::default(), Instant::now());
        for id in [SessionId(1), SessionId(2), SessionId(3)] {
            gaps.begins(id, (expected(), WorkerId(1)), now);
        }
        let waiting = gaps.due(3, now);
        for ((id, waited), tried) in waiting.iter().zip([Tried::Sent(WorkerId(2)), Tried::Failed, Tried::Not]) {
            gaps.tried(*id, waited, tried);
        }
        assert_eq!(due(&mut gaps, now + SECOND * 2), [1], "what failed is not tried again");
        assert_eq!(due(&mut gaps, now + SECOND * 61), [] as [u128; 0]);
        assert_eq!(gaps.0.len(), 1);
        let sent = gaps.0.peek(&SessionId(3)).unwrap();
        assert!(sent.expected.is_none(), "its prompt is not");
        assert_eq!(gaps.begins(SessionId(3), (expected(), WorkerId(2)), now), Some(true));
    }

    #[test]
    fn they_are_bounded() {
        let (mut gaps, now) = (Gaps::default(), Instant::now());
        (0..2000).for_each(|n| {
            gaps.begins(SessionId(n), (expected(), WorkerId(1)), now);
        });
        assert_eq!(gaps.0.len(), MOST.get());
        assert!(!gaps.0.contains(&SessionId(0)));
    }
}
