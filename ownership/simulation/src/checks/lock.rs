//! Linearizability of claims, releases and reads of one lock, as its clients saw them.
//!
//! Wing and Gong's search: is there an order of all operations, each between its call and its return, in which a simple
//! lock with fencing tokens would have given the same answers? An operation without a return may have happened at any
//! time since its call, or never.

use std::collections::BTreeSet;
use std::time::Duration;

use vocabulary::{Epoch, Owner};

use crate::ensure;
use crate::property::PropertyResult;

const LINEARIZABLE: &str = "claims, releases and reads are linearizable";

/// Maximum number of operations in one history: as many as fit a bit set.
pub(crate) const MAX_OPERATIONS: usize = 128;

/// Number of states after which the search gives up.
const MAX_STATES: usize = 400_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockRequest {
    Claim(Owner),
    Release(Owner, Epoch),
    Read,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockReply {
    Granted(Epoch),
    /// The owner, which has held it since this epoch.
    Owned(Owner, Epoch),
    /// Released, or not held.
    Released,
    /// Granted again meanwhile.
    Stale(Epoch),
    Held(Option<Owner>, Epoch),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LockOperation {
    pub(crate) request: LockRequest,
    pub(crate) called_at: Duration,
    /// Time and contents of the answer; `None` if there was none.
    pub(crate) returned: Option<(Duration, LockReply)>,
}

/// Possible state of the lock: its owner, the epoch if it is known, and an epoch that the next one must exceed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
struct LockState {
    owner: Option<Owner>,
    epoch: Option<Epoch>,
    min_epoch: Epoch,
}

impl LockState {
    /// Returns this state with the epoch set, if its epoch can be `epoch`.
    fn with_epoch(self, epoch: Epoch) -> Option<Self> {
        let fits = self.epoch.map_or(epoch > self.min_epoch || epoch == Epoch::default(), |known| known == epoch);
        fits.then_some(Self { epoch: Some(epoch), min_epoch: self.min_epoch.max(epoch), ..self })
    }

    fn held_by(self, owner: Owner) -> Self {
        let floor = self.epoch.unwrap_or(self.min_epoch).max(self.min_epoch);
        Self { owner: Some(owner), epoch: None, min_epoch: floor }
    }

    fn freed(self) -> Self {
        Self { owner: None, epoch: None, min_epoch: self.epoch.unwrap_or(self.min_epoch).max(self.min_epoch) }
    }

    /// Returns the states that an operation can lead to, given its answer; none if that answer is impossible.
    fn successors(self, request: LockRequest, reply: Option<LockReply>) -> Vec<Self> {
        match (request, reply) {
            (LockRequest::Claim(owner), reply) => self.after_claim(owner, reply).into_iter().collect(),
            (LockRequest::Release(owner, seen), reply) => self.after_release(owner, seen, reply),
            (LockRequest::Read, None) => vec![self],
            (LockRequest::Read, Some(LockReply::Held(owner, epoch))) if owner == self.owner => {
                self.with_epoch(epoch).into_iter().collect()
            }
            (LockRequest::Read, Some(_)) => Vec::new(),
        }
    }

    fn after_claim(self, owner: Owner, reply: Option<LockReply>) -> Option<Self> {
        match (self.owner, reply) {
            (None, None) => Some(self.held_by(owner)),
            (None, Some(LockReply::Granted(epoch))) => self.held_by(owner).with_epoch(epoch),
            (Some(_), None) => Some(self),
            (Some(by), Some(LockReply::Granted(epoch))) if by == owner => self.with_epoch(epoch),
            (Some(by), Some(LockReply::Owned(other, epoch))) if by != owner && by == other => self.with_epoch(epoch),
            _ => None,
        }
    }

    fn after_release(self, owner: Owner, seen: Epoch, reply: Option<LockReply>) -> Vec<Self> {
        if self.owner != Some(owner) {
            return if matches!(reply, None | Some(LockReply::Released)) { vec![self] } else { Vec::new() };
        }
        let fits = self.with_epoch(seen);
        match reply {
            Some(LockReply::Released) => fits.map(Self::freed).into_iter().collect(),
            Some(LockReply::Stale(current)) if current != seen => self.with_epoch(current).into_iter().collect(),
            Some(_) => Vec::new(),
            None => {
                let stays = self.epoch != Some(seen);
                fits.map(Self::freed).into_iter().chain(stays.then_some(self)).collect()
            }
        }
    }
}

/// Checks the history of one lock, which must have at most [`MAX_OPERATIONS`] operations.
pub(crate) fn check(thing: &str, history: &[LockOperation]) -> PropertyResult {
    let fits = history.len() <= MAX_OPERATIONS;
    ensure!(fits, LINEARIZABLE, "{thing}: {} operations are too many to check", history.len())?;
    let returns: Vec<Duration> =
        history.iter().map(|operation| operation.returned.map_or(Duration::MAX, |(at, _)| at)).collect();
    let must: u128 = bitset(history.iter().map(|operation| operation.returned.is_some()));
    let mut seen = BTreeSet::new();
    let mut open = vec![(0u128, LockState::default())];
    while let Some((done, lock)) = open.pop() {
        if done & must == must {
            return Ok(());
        }
        if !seen.insert((done, lock)) || seen.len() > MAX_STATES {
            continue;
        }
        let rest = |n: &usize| done & (1 << n) == 0;
        let first_return = (0..history.len()).filter(rest).map(|n| returns[n]).min().unwrap_or(Duration::MAX);
        for n in (0..history.len()).rev().filter(rest).filter(|n| history[*n].called_at <= first_return) {
            let reply = history[n].returned.map(|(_, reply)| reply);
            open.extend(lock.successors(history[n].request, reply).into_iter().map(|next| (done | 1 << n, next)));
        }
    }
    // A search that was cut off proves nothing.
    ensure!(seen.len() > MAX_STATES, LINEARIZABLE, "{thing}: no order explains {history:#?}")
}

fn bitset(all: impl Iterator<Item = bool>) -> u128 {
    all.enumerate().fold(0, |bits, (n, set)| bits | u128::from(set) << n)
}

#[cfg(test)]
mod tests {
    use vocabulary::{DpRank, Incarnation, WorkerId};

    use super::*;

    fn owner(n: u64) -> Owner {
        Owner { worker: WorkerId(n), incarnation: Incarnation(1), rank: DpRank(0) }
    }

    fn epoch(index: u64) -> Epoch {
        Epoch { generation: 0, index, position: 0 }
    }

    fn operation(request: LockRequest, called: u64, returned: u64, reply: LockReply) -> LockOperation {
        let returned = Some((Duration::from_millis(returned), reply));
        LockOperation { request, called_at: Duration::from_millis(called), returned }
    }

    fn unanswered(request: LockRequest, called: u64) -> LockOperation {
        LockOperation { request, called_at: Duration::from_millis(called), returned: None }
    }

    fn claim(n: u64) -> LockRequest {
        LockRequest::Claim(owner(n))
    }

    fn holds(n: u64, at: u64) -> LockReply {
        LockReply::Held(Some(owner(n)), epoch(at))
    }

    #[test]
    fn histories_of_a_correct_lock_are_linearizable() {
        for history in [
            vec![],
            vec![
                operation(claim(1), 0, 9, LockReply::Granted(epoch(5))),
                operation(LockRequest::Read, 10, 12, holds(1, 5)),
            ],
            // Overlapping claims: either may be first.
            vec![
                operation(claim(1), 0, 9, LockReply::Owned(owner(2), epoch(5))),
                operation(claim(2), 1, 9, LockReply::Granted(epoch(5))),
            ],
            // An unanswered claim took effect late.
            vec![
                unanswered(claim(1), 0),
                operation(LockRequest::Read, 1, 2, LockReply::Held(None, epoch(1))),
                operation(LockRequest::Read, 3, 4, holds(1, 7)),
            ],
            // Or never.
            vec![unanswered(claim(1), 0), operation(claim(2), 5, 6, LockReply::Granted(epoch(8)))],
            vec![
                operation(claim(1), 0, 1, LockReply::Granted(epoch(5))),
                unanswered(LockRequest::Release(owner(1), epoch(5)), 2),
                operation(claim(2), 3, 4, LockReply::Granted(epoch(9))),
                operation(LockRequest::Release(owner(1), epoch(5)), 5, 6, LockReply::Released),
                operation(LockRequest::Release(owner(2), epoch(5)), 7, 8, LockReply::Stale(epoch(9))),
            ],
        ] {
            assert_eq!(check("lock", &history), Ok(()), "{history:#?}");
        }
    }

    #[test]
    fn known_violations_are_found() {
        for (what, history) in [
            (
                "two owners",
                vec![
                    operation(claim(1), 0, 1, LockReply::Granted(epoch(5))),
                    operation(claim(2), 2, 3, LockReply::Granted(epoch(6))),
                ],
            ),
            (
                "a stale read",
                vec![
                    operation(claim(1), 0, 1, LockReply::Granted(epoch(5))),
                    operation(LockRequest::Read, 2, 3, LockReply::Held(None, epoch(1))),
                ],
            ),
            (
                "a read that goes back",
                vec![
                    unanswered(claim(1), 0),
                    operation(LockRequest::Read, 1, 2, holds(1, 7)),
                    operation(LockRequest::Read, 3, 4, LockReply::Held(None, epoch(1))),
                ],
            ),
            (
                "a token that falls",
                vec![
                    operation(claim(1), 0, 1, LockReply::Granted(epoch(9))),
                    operation(LockRequest::Release(owner(1), epoch(9)), 2, 3, LockReply::Released),
                    operation(claim(2), 4, 5, LockReply::Granted(epoch(8))),
                ],
            ),
            (
                "a lost claim",
                vec![
                    operation(claim(1), 0, 1, LockReply::Granted(epoch(5))),
                    operation(claim(1), 2, 3, LockReply::Granted(epoch(8))),
                ],
            ),
            (
                "a release on an old token",
                vec![
                    operation(claim(1), 0, 1, LockReply::Granted(epoch(5))),
                    operation(LockRequest::Release(owner(1), epoch(4)), 2, 3, LockReply::Released),
                    operation(LockRequest::Read, 4, 5, holds(1, 5)),
                ],
            ),
        ] {
            let broken = check("lock", &history).expect_err(what);
            assert_eq!(broken.check, LINEARIZABLE);
        }
    }

    #[test]
    fn histories_of_a_real_lock_pass_and_swapped_replies_fail() {
        use crate::rng::Rng;
        let mut caught = 0;
        for seed in 0..60 {
            let mut rng = Rng::stream(seed, "lock");
            let mut history = Vec::new();
            let (mut held, mut at, mut index) = (None, 1, 1);
            for n in 0..40u64 {
                let client = rng.within(1, 3);
                let (request, reply) = match rng.below(3) {
                    0 => match held {
                        Some(by) if by != client => (claim(client), LockReply::Owned(owner(by), epoch(at))),
                        Some(_) => (claim(client), LockReply::Granted(epoch(at))),
                        None => {
                            index += 1;
                            (held, at) = (Some(client), index);
                            (claim(client), LockReply::Granted(epoch(at)))
                        }
                    },
                    1 if held == Some(client) => {
                        let request = LockRequest::Release(owner(client), epoch(at));
                        index += 1;
                        (held, at) = (None, index);
                        (request, LockReply::Released)
                    }
                    _ => (LockRequest::Read, LockReply::Held(held.map(owner), epoch(at))),
                };
                // Calls and returns overlap with their neighbours'.
                history.push(operation(request, n * 10 - rng.below(n.min(1) * 10), n * 10 + rng.below(12), reply));
            }
            assert_eq!(check("lock", &history), Ok(()), "seed {seed}");
            let granted = |operation: &LockOperation| matches!(operation.returned, Some((_, LockReply::Granted(_))));
            if let Some(n) = history.iter().rposition(granted) {
                let (at, _) = history[n].returned.unwrap();
                history[n].returned = Some((at, LockReply::Granted(epoch(index + 50))));
                history.push(operation(
                    LockRequest::Read,
                    900,
                    901,
                    LockReply::Held(held.map(owner), epoch(last_seen_epoch(&history))),
                ));
                caught += usize::from(check("lock", &history).is_err());
            }
        }
        assert!(caught >= 50, "{caught}");
    }

    /// Returns the epoch that the last read saw.
    fn last_seen_epoch(history: &[LockOperation]) -> u64 {
        let seen = |operation: &LockOperation| match operation.returned {
            Some((_, LockReply::Held(_, epoch))) => Some(epoch.index),
            _ => None,
        };
        history.iter().rev().find_map(seen).unwrap_or(1)
    }
}
