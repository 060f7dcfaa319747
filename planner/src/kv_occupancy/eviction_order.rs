//! Idle sessions of one rank in the order in which the engine evicts them. Both ends are also cached in contiguous
//! arrays: every plan reads them at every rank, while the order changes only with a step.

use std::collections::BTreeMap;

use vocabulary::{Micros, SessionId, Tokens};

use crate::return_model::ReturnPattern;

/// A session that had a step within this time is active.
const ACTIVE_WINDOW: Micros = Micros(60_000_000);
/// Most victims examined one by one; those after them count as the average of these.
pub(super) const MAX_VICTIMS: usize = 16;
/// Most idle sessions examined for activity.
const MAX_ACTIVE: usize = 16;

/// KV of one idle session.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdleResident {
    pub(super) session: SessionId,
    /// End of its last step.
    pub(super) last: Micros,
    pub(super) tokens: Tokens,
    /// Return pattern of the session; none when it now lives elsewhere.
    pub(super) return_pattern: Option<ReturnPattern>,
}

impl IdleResident {
    fn key(&self) -> EvictionKey {
        (self.last, self.session)
    }
}

type EvictionKey = (Micros, SessionId);

/// All idle sessions of a rank, least recently used first.
#[derive(Clone, Debug, Default)]
pub(super) struct EvictionOrder {
    all: BTreeMap<EvictionKey, (Tokens, Option<ReturnPattern>)>,
    /// Least recently used sessions; one more than the number of victims, since a session is no victim of itself.
    oldest: Vec<IdleResident>,
    /// Most recently used sessions, latest first.
    newest: Vec<EvictionKey>,
    /// Bit mask of the sessions in `newest` that still live at this rank; bit 0 is the first.
    resident_bits: u32,
    /// End of the last step of the oldest session in `newest`.
    oldest_of_newest: Micros,
}

impl EvictionOrder {
    pub(super) fn insert(&mut self, idle: IdleResident) {
        let key = idle.key();
        self.all.insert(key, (idle.tokens, idle.return_pattern));
        if self.oldest.len() <= MAX_VICTIMS || self.is_among_oldest(key) {
            self.refresh_oldest();
        }
        if self.newest.len() < MAX_ACTIVE || self.is_among_newest(key) {
            self.refresh_newest();
        }
    }

    pub(super) fn remove(&mut self, last: Micros, session: SessionId) {
        let key = (last, session);
        self.all.remove(&key);
        if self.is_among_oldest(key) {
            self.refresh_oldest();
        }
        if self.is_among_newest(key) {
            self.refresh_newest();
        }
    }

    pub(super) fn least_recently_used(&self) -> Option<&IdleResident> {
        self.oldest.first()
    }

    /// Returns the least recently used sessions, one more than a step has victims.
    pub(super) fn oldest(&self) -> &[IdleResident] {
        &self.oldest
    }

    /// Returns the number of recently active sessions in `newest` that live at this rank, without `own`.
    pub(super) fn active_count(&self, now: Micros, own: Option<EvictionKey>) -> u32 {
        let active = match now - self.oldest_of_newest < ACTIVE_WINDOW {
            true => self.newest.len(),
            false => self.newest.partition_point(|(last, _)| now - *last < ACTIVE_WINDOW),
        };
        let own = own.and_then(|own| self.newest[..active].iter().position(|key| *key == own));
        let others = ((1 << active) - 1) & !own.map_or(0, |at| 1 << at);
        (self.resident_bits & others).count_ones()
    }

    fn is_among_oldest(&self, key: EvictionKey) -> bool {
        self.oldest.last().is_some_and(|last| key <= last.key())
    }

    fn is_among_newest(&self, key: EvictionKey) -> bool {
        self.newest.last().is_some_and(|last| key >= *last)
    }

    fn refresh_oldest(&mut self) {
        let idle = |(&(last, session), &(tokens, return_pattern)): (&EvictionKey, &(_, _))| IdleResident {
            session,
            last,
            tokens,
            return_pattern,
        };
        self.oldest.clear();
        self.oldest.extend(self.all.iter().take(MAX_VICTIMS + 1).map(idle));
    }

    fn refresh_newest(&mut self) {
        self.newest.clear();
        self.resident_bits = 0;
        for (at, (key, (_, return_pattern))) in self.all.iter().rev().take(MAX_ACTIVE).enumerate() {
            self.newest.push(*key);
            self.resident_bits |= u32::from(return_pattern.is_some()) << at;
            self.oldest_of_newest = key.0;
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.oldest.is_empty() && self.newest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        /// Few points in time and many sessions: many steps end at the same moment, and removals often hit both ends.
        #[test]
        fn oldest_and_newest_match_a_list_sorted_after_every_change(
            changes in prop::collection::vec((any::<bool>(), 0u64..40, 0u128..30, any::<bool>(), 0u64..100), 1..160),
        ) {
            let (mut line, mut plain) = (EvictionOrder::default(), BTreeMap::new());
            for (comes, second, session, lives, pick) in changes {
                let (last, session) = (Micros(second * 7_000_000), SessionId(session));
                if comes {
                    let (tokens, return_pattern) = (Tokens(second + 1), lives.then_some(ReturnPattern::Quick));
                    line.insert(IdleResident { session, last, tokens, return_pattern });
                    plain.insert((last, session), (tokens, return_pattern));
                } else if let Some(key) = plain.keys().nth(pick as usize % plain.len().max(1)).copied() {
                    line.remove(key.0, key.1);
                    plain.remove(&key);
                }
                let oldest = line.oldest().iter().map(|idle| (idle.key(), (idle.tokens, idle.return_pattern)));
                prop_assert!(oldest.eq(plain.clone().into_iter().take(17)), "{:?}", line);
                prop_assert_eq!(line.least_recently_used().map(IdleResident::key), plain.keys().next().copied());
                for now in [second * 7_000_000, 280_000_000, 320_000_000].map(Micros) {
                    for own in [None, plain.keys().last().copied(), plain.keys().next().copied()] {
                        let newest = plain.iter().rev().take(16).filter(|(key, _)| now - key.0 < Micros(60_000_000));
                        let others = newest.filter(|(key, (_, return_pattern))| return_pattern.is_some() && Some(**key) != own);
                        prop_assert_eq!(line.active_count(now, own) as usize, others.count(), "{:?}", line);
                    }
                }
            }
        }
    }
}
