//! The newest sessions that are between two steps. Pure: time is an argument.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use planner::{RequestProfile, StepKind};
use vocabulary::{SessionId, WorkerId};

use crate::prompts::RetainedPrompt;

/// Maximum number of tracked sessions.
const MAX_SESSIONS: NonZeroUsize = NonZeroUsize::new(1024).expect("it is one");
/// How long after a step its session is considered: a session that stays away longer is not expected to return soon.
const MAX_IDLE: Duration = Duration::from_secs(60);
/// Minimum time between two checks of the same session.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The next step of a session, as far as it can be predicted.
#[derive(Debug)]
pub struct PredictedStep {
    /// Its probable kind: that of the last step.
    pub step: StepKind,
    /// The last step's request, with its answer as part of the prompt.
    pub request: RequestProfile,
    /// The prompt that it continues.
    pub prompt: Arc<RetainedPrompt>,
}

/// A session that waits for its next step.
#[derive(Debug)]
struct IdleSession {
    /// `None` when nothing more will be sent: a prompt may take megabytes.
    predicted: Option<Arc<PredictedStep>>,
    idle_since: Instant,
    checked_at: Option<Instant>,
    progress: ReplicationProgress,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReplicationProgress {
    /// Nothing was attempted.
    NotTried,
    /// The attempt failed.
    Failed,
    /// The prefix is also resident at this worker.
    Sent(WorkerId),
}

#[derive(Debug)]
pub(super) struct IdleSessions(LruCache<SessionId, IdleSession>);

impl Default for IdleSessions {
    fn default() -> Self {
        Self(LruCache::new(MAX_SESSIONS))
    }
}

impl IdleSessions {
    /// Records the end of a step, served by `worker`. Returns whether that is the worker to which the prefix had been
    /// sent; `None` if it had not been sent.
    pub(super) fn record_step_end(
        &mut self,
        session: SessionId,
        (expected, worker): (PredictedStep, WorkerId),
        now: Instant,
    ) -> Option<bool> {
        let gap = IdleSession {
            predicted: Some(Arc::new(expected)),
            idle_since: now,
            checked_at: None,
            progress: ReplicationProgress::NotTried,
        };
        match self.0.put(session, gap).map(|before| before.progress) {
            Some(ReplicationProgress::Sent(to)) => Some(to == worker),
            None | Some(ReplicationProgress::NotTried | ReplicationProgress::Failed) => None,
        }
    }

    /// Returns at most `most` sessions that are due for a check, the most recently active first: their copies are the
    /// most likely to be used.
    pub(super) fn due(&mut self, most: usize, now: Instant) -> Vec<(SessionId, Arc<PredictedStep>)> {
        let mut due = Vec::new();
        self.expire(now);
        for (session, gap) in self.0.iter_mut() {
            if due.len() == most || now.saturating_duration_since(gap.idle_since) > MAX_IDLE {
                break;
            }
            let is_due = gap.checked_at.is_none_or(|looked| now.saturating_duration_since(looked) >= RECHECK_INTERVAL);
            if let (true, ReplicationProgress::NotTried, Some(expected)) = (is_due, gap.progress, &gap.predicted) {
                gap.checked_at = Some(now);
                due.push((*session, expected.clone()));
            }
        }
        due
    }

    /// Stops replication for sessions that have been idle too long; keeps only those whose prefix was sent.
    fn expire(&mut self, now: Instant) {
        let is_old = |gap: &IdleSession| now.saturating_duration_since(gap.idle_since) > MAX_IDLE;
        let old = self.0.iter().rev().take_while(|(_, gap)| is_old(gap)).map(|(session, _)| *session);
        for session in old.collect::<Vec<_>>() {
            match self.0.peek_mut(&session) {
                Some(gap) if matches!(gap.progress, ReplicationProgress::Sent(_)) => gap.predicted = None,
                _ => drop(self.0.pop(&session)),
            }
        }
    }

    /// Records an attempt. Nothing is sent twice between two steps.
    pub(super) fn record_attempt(
        &mut self,
        session: SessionId,
        expected: &Arc<PredictedStep>,
        tried: ReplicationProgress,
    ) {
        let is_same = |gap: &IdleSession| gap.predicted.as_ref().is_some_and(|known| Arc::ptr_eq(known, expected));
        if let Some(gap) = self.0.peek_mut(&session).filter(|gap| is_same(gap)) {
            gap.progress = tried;
        }
    }
}

#[cfg(test)]
mod tests {
    use planner::TransferPermission;
    use vocabulary::{HashSeed, PrefixChain, PrefixId, TenantId, Tokens};

    use super::*;
    use crate::token_ids::LazyTokenIds;

    const SECOND: Duration = Duration::from_secs(1);

    fn predicted_step() -> PredictedStep {
        let chain = PrefixChain::over_tokens(PrefixId(1), HashSeed::default(), Tokens(16), &[1; 32]);
        let kept = RetainedPrompt {
            tenant: TenantId::default(),
            model: "m".into(),
            chain,
            tokens: LazyTokenIds::Known([1; 32].into()),
            salt: None,
        };
        let ask = RequestProfile {
            model: "m".into(),
            adapter: None,
            prompt_tokens: Tokens(40),
            expected_output_tokens: Tokens(8),
            expected_growth_tokens: Tokens::ZERO,
            longest_prompt_tokens: None,
            block_size: Tokens(16),
            transfers: TransferPermission::Allowed,
        };
        PredictedStep { step: StepKind::SmallIncrement, request: ask, prompt: Arc::new(kept) }
    }

    fn due_sessions(gaps: &mut IdleSessions, now: Instant) -> Vec<u128> {
        gaps.due(3, now).iter().map(|(session, _)| session.0).collect()
    }

    #[test]
    fn due_returns_newest_idle_sessions_once_a_second_until_they_expire() {
        let (mut gaps, now) = (IdleSessions::default(), Instant::now());
        (0..5).for_each(|n| {
            gaps.record_step_end(SessionId(n), (predicted_step(), WorkerId(1)), now);
        });
        assert_eq!(due_sessions(&mut gaps, now), [4, 3, 2]);
        assert_eq!(due_sessions(&mut gaps, now), [1, 0], "the others were looked at just now");
        assert_eq!(due_sessions(&mut gaps, now), [] as [u128; 0]);
        assert_eq!(due_sessions(&mut gaps, now + SECOND), [4, 3, 2]);
        gaps.record_step_end(SessionId(0), (predicted_step(), WorkerId(1)), now + SECOND);
        assert_eq!(due_sessions(&mut gaps, now + SECOND), [0, 1], "it stepped again");
        assert_eq!(due_sessions(&mut gaps, now + SECOND * 61), [0]);
        assert_eq!(due_sessions(&mut gaps, now + SECOND * 62), [] as [u128; 0]);
    }

    #[test]
    fn a_prefix_is_replicated_once_per_gap_and_the_next_step_reports_its_use() {
        let (mut gaps, now) = (IdleSessions::default(), Instant::now());
        let id = SessionId(1);
        assert_eq!(gaps.record_step_end(id, (predicted_step(), WorkerId(1)), now), None);
        let (_, waited) = gaps.due(1, now).remove(0);
        gaps.record_attempt(id, &waited, ReplicationProgress::Sent(WorkerId(2)));
        assert_eq!(due_sessions(&mut gaps, now + SECOND * 2), [] as [u128; 0]);
        assert_eq!(gaps.record_step_end(id, (predicted_step(), WorkerId(2)), now), Some(true));
        gaps.record_attempt(id, &waited, ReplicationProgress::Sent(WorkerId(2)));
        assert_eq!(due_sessions(&mut gaps, now), [1], "what was sent late was for the gap before");
        let (_, waited) = gaps.due(1, now + SECOND).remove(0);
        gaps.record_attempt(id, &waited, ReplicationProgress::Sent(WorkerId(2)));
        assert_eq!(gaps.record_step_end(id, (predicted_step(), WorkerId(1)), now), Some(false));
    }

    #[test]
    fn expired_gaps_keep_only_the_replicas_that_were_sent() {
        let (mut gaps, now) = (IdleSessions::default(), Instant::now());
        for id in [SessionId(1), SessionId(2), SessionId(3)] {
            gaps.record_step_end(id, (predicted_step(), WorkerId(1)), now);
        }
        let waiting = gaps.due(3, now);
        for ((id, waited), tried) in waiting.iter().zip([
            ReplicationProgress::Sent(WorkerId(2)),
            ReplicationProgress::Failed,
            ReplicationProgress::NotTried,
        ]) {
            gaps.record_attempt(*id, waited, tried);
        }
        assert_eq!(due_sessions(&mut gaps, now + SECOND * 2), [1], "what failed is not tried again");
        assert_eq!(due_sessions(&mut gaps, now + SECOND * 61), [] as [u128; 0]);
        assert_eq!(gaps.0.len(), 1);
        let sent = gaps.0.peek(&SessionId(3)).unwrap();
        assert!(sent.predicted.is_none(), "its prompt is not");
        assert_eq!(gaps.record_step_end(SessionId(3), (predicted_step(), WorkerId(2)), now), Some(true));
    }

    #[test]
    fn idle_sessions_are_bounded() {
        let (mut gaps, now) = (IdleSessions::default(), Instant::now());
        (0..2000).for_each(|n| {
            gaps.record_step_end(SessionId(n), (predicted_step(), WorkerId(1)), now);
        });
        assert_eq!(gaps.0.len(), MAX_SESSIONS.get());
        assert!(!gaps.0.contains(&SessionId(0)));
    }
}
