//! Sessions between two steps, the newest of them. Pure: time is an argument.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use planner::{Ask, StepKind};
use vocabulary::{SessionId, WorkerId};

use crate::pipeline::prompts::Kept;

/// Most sessions that are looked after.
const MOST: usize = 1024;
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
    expected: Arc<Expected>,
    /// By age.
    number: u64,
    begun: Instant,
    looked: Option<Instant>,
    sent: Option<WorkerId>,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    by_session: HashMap<SessionId, Gap>,
    by_age: BTreeMap<u64, SessionId>,
    next: u64,
}

impl Gaps {
    /// A step of the session is over, served by `server`. Whether that is where its prefix had been sent to, where it had.
    pub(super) fn begins(
        &mut self,
        session: SessionId,
        (expected, server): (Expected, WorkerId),
        now: Instant,
    ) -> Option<bool> {
        let sent = self.forget(session).and_then(|gap| gap.sent);
        let number = self.next;
        self.next += 1;
        self.by_age.insert(number, session);
        let gap = Gap { expected: Arc::new(expected), number, begun: now, looked: None, sent: None };
        self.by_session.insert(session, gap);
        while self.by_session.len() > MOST {
            let Some((_, oldest)) = self.by_age.pop_first() else { break };
            self.by_session.remove(&oldest);
        }
        sent.map(|to| to == server)
    }

    /// At most so many that are to be looked at now, those that ended last first: they are the likeliest to be used.
    pub(super) fn due(&mut self, most: usize, now: Instant) -> Vec<(SessionId, Arc<Expected>)> {
        let mut due = Vec::new();
        for session in self.by_age.values().rev() {
            let Some(gap) = self.by_session.get_mut(session) else { continue };
            if due.len() == most || now.saturating_duration_since(gap.begun) > LONGEST {
                break;
            }
            let is_due = gap.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= AGAIN);
            if is_due && gap.sent.is_none() {
                gap.looked = Some(now);
                due.push((*session, gap.expected.clone()));
            }
        }
        due
    }

    /// Its prefix lies there as well by now. Nothing is sent twice in a gap.
    pub(super) fn sent(&mut self, session: SessionId, expected: &Arc<Expected>, to: WorkerId) {
        let gap = self.by_session.get_mut(&session).filter(|gap| Arc::ptr_eq(&gap.expected, expected));
        if let Some(gap) = gap {
            gap.sent = Some(to);
        }
    }

    fn forget(&mut self, session: SessionId) -> Option<Gap> {
        let gap = self.by_session.remove(&session)?;
        self.by_age.remove(&gap.number);
        Some(gap)
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
        gaps.sent(id, &waited, WorkerId(2));
        assert_eq!(due(&mut gaps, now + SECOND * 2), [] as [u128; 0]);
        assert_eq!(gaps.begins(id, (expected(), WorkerId(2)), now), Some(true));
        gaps.sent(id, &waited, WorkerId(2));
        assert_eq!(due(&mut gaps, now), [1], "what was sent late was for the gap before");
        let (_, waited) = gaps.due(1, now + SECOND).remove(0);
        gaps.sent(id, &waited, WorkerId(2));
        assert_eq!(gaps.begins(id, (expected(), WorkerId(1)), now), Some(false));
    }

    #[test]
    fn they_are_bounded() {
        let (mut gaps, now) = (Gaps::default(), Instant::now());
        (0..2000).for_each(|n| {
            gaps.begins(SessionId(n), (expected(), WorkerId(1)), now);
        });
        assert_eq!((gaps.by_session.len(), gaps.by_age.len()), (MOST, MOST));
        assert!(!gaps.by_session.contains_key(&SessionId(0)));
    }
}
