//! Linearizability of claims, releases and reads of one owned thing, as its clients saw them.
//!
//! Wing and Gong's search: is there one order of all operations, each somewhere between its call and its return, in
//! which a plain lock with fencing tokens would have said the same? An operation without a return may have happened at
//! any time since its call, or never.

use std::collections::BTreeSet;
use std::time::Duration;

use vocabulary::{Epoch, Owner};

use crate::book::Checked;
use crate::ensure;

const LINEARIZABLE: &str = "claims, releases and reads are linearizable";

/// Operations that one history may hold: as many as fit a set of bits.
pub(crate) const MAX_OPERATIONS: usize = 128;

/// Orders that the search looks at before it gives up.
const MAX_STATES: usize = 400_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asked {
    Claim(Owner),
    Release(Owner, Epoch),
    Read,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Said {
    Granted(Epoch),
    /// Somebody has it since this epoch.
    Owned(Owner, Epoch),
    /// Given back, or not held.
    Done,
    /// Granted anew meanwhile.
    Stale(Epoch),
    Holds(Option<Owner>, Epoch),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Operation {
    pub(crate) asked: Asked,
    pub(crate) called: Duration,
    /// What was said, and when; none when no answer came.
    pub(crate) returned: Option<(Duration, Said)>,
}

/// A lock as it may be: who has it, since when if that is known, and an epoch that the next one exceeds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
struct Lock {
    owner: Option<Owner>,
    epoch: Option<Epoch>,
    floor: Epoch,
}

impl Lock {
    /// This lock, if its epoch can be `epoch`.
    fn at(self, epoch: Epoch) -> Option<Self> {
        let fits = self.epoch.map_or(epoch > self.floor || epoch == Epoch::default(), |known| known == epoch);
        fits.then_some(Self { epoch: Some(epoch), floor: self.floor.max(epoch), ..self })
    }

    fn taken(self, owner: Owner) -> Self {
        let floor = self.epoch.unwrap_or(self.floor).max(self.floor);
        Self { owner: Some(owner), epoch: None, floor }
    }

    fn given_back(self) -> Self {
        Self { owner: None, epoch: None, floor: self.epoch.unwrap_or(self.floor).max(self.floor) }
    }

    /// The locks that an operation can leave behind, given what was said; none when that could not be said.
    fn after(self, asked: Asked, said: Option<Said>) -> Vec<Self> {
        match (asked, said) {
            (Asked::Claim(owner), said) => self.claimed(owner, said).into_iter().collect(),
            (Asked::Release(owner, seen), said) => self.released(owner, seen, said),
            (Asked::Read, None) => vec![self],
            (Asked::Read, Some(Said::Holds(owner, epoch))) if owner == self.owner => {
                self.at(epoch).into_iter().collect()
            }
            (Asked::Read, Some(_)) => Vec::new(),
        }
    }

    fn claimed(self, owner: Owner, said: Option<Said>) -> Option<Self> {
        match (self.owner, said) {
            (None, None) => Some(self.taken(owner)),
            (None, Some(Said::Granted(epoch))) => self.taken(owner).at(epoch),
            (Some(_), None) => Some(self),
            (Some(by), Some(Said::Granted(epoch))) if by == owner => self.at(epoch),
            (Some(by), Some(Said::Owned(other, epoch))) if by != owner && by == other => self.at(epoch),
            _ => None,
        }
    }

    fn released(self, owner: Owner, seen: Epoch, said: Option<Said>) -> Vec<Self> {
        if self.owner != Some(owner) {
            return if matches!(said, None | Some(Said::Done)) { vec![self] } else { Vec::new() };
        }
        let fits = self.at(seen);
        match said {
            Some(Said::Done) => fits.map(Self::given_back).into_iter().collect(),
            Some(Said::Stale(current)) if current != seen => self.at(current).into_iter().collect(),
            Some(_) => Vec::new(),
            None => {
                let stays = self.epoch != Some(seen);
                fits.map(Self::given_back).into_iter().chain(stays.then_some(self)).collect()
            }
        }
    }
}

/// Checks the history of one thing. Operations beyond [`MAX_OPERATIONS`] must not be there.
pub(crate) fn check(thing: &str, history: &[Operation]) -> Checked {
    let fits = history.len() <= MAX_OPERATIONS;
    ensure!(fits, LINEARIZABLE, "{thing}: {} operations are too many to check", history.len())?;
    let returns: Vec<Duration> =
        history.iter().map(|operation| operation.returned.map_or(Duration::MAX, |(at, _)| at)).collect();
    let must: u128 = bits(history.iter().map(|operation| operation.returned.is_some()));
    let mut seen = BTreeSet::new();
    let mut open = vec![(0u128, Lock::default())];
    while let Some((done, lock)) = open.pop() {
        if done & must == must {
            return Ok(());
        }
        if !seen.insert((done, lock)) || seen.len() > MAX_STATES {
            continue;
        }
        let rest = |n: &usize| done & (1 << n) == 0;
        let first_return = (0..history.len()).filter(rest).map(|n| returns[n]).min().unwrap_or(Duration::MAX);
        for n in (0..history.len()).rev().filter(rest).filter(|n| history[*n].called <= first_return) {
            let said = history[n].returned.map(|(_, said)| said);
            open.extend(lock.after(history[n].asked, said).into_iter().map(|next| (done | 1 << n, next)));
        }
    }
    // A search that was cut off has shown nothing.
    ensure!(seen.len() > MAX_STATES, LINEARIZABLE, "{thing}: no order explains {history:#?}")
}

fn bits(all: impl Iterator<Item = bool>) -> u128 {
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

    fn operation(asked: Asked, called: u64, returned: u64, said: Said) -> Operation {
        let returned = Some((Duration::from_millis(returned), said));
        Operation { asked, called: Duration::from_millis(called), returned }
    }

    fn lost(asked: Asked, called: u64) -> Operation {
        Operation { asked, called: Duration::from_millis(called), returned: None }
    }

    fn claim(n: u64) -> Asked {
        Asked::Claim(owner(n))
    }

    fn holds(n: u64, at: u64) -> Said {
        Said::Holds(Some(owner(n)), epoch(at))
    }

    #[test]
    fn what_a_lock_would_say_is_linearizable() {
        for history in [
            vec![],
            vec![operation(claim(1), 0, 9, Said::Granted(epoch(5))), operation(Asked::Read, 10, 12, holds(1, 5))],
            // Overlapping claims: either may be first.
            vec![
                operation(claim(1), 0, 9, Said::Owned(owner(2), epoch(5))),
                operation(claim(2), 1, 9, Said::Granted(epoch(5))),
            ],
            // A claim without an answer took effect late.
            vec![
                lost(claim(1), 0),
                operation(Asked::Read, 1, 2, Said::Holds(None, epoch(1))),
                operation(Asked::Read, 3, 4, holds(1, 7)),
            ],
            // Or never.
            vec![lost(claim(1), 0), operation(claim(2), 5, 6, Said::Granted(epoch(8)))],
            vec![
                operation(claim(1), 0, 1, Said::Granted(epoch(5))),
                lost(Asked::Release(owner(1), epoch(5)), 2),
                operation(claim(2), 3, 4, Said::Granted(epoch(9))),
                operation(Asked::Release(owner(1), epoch(5)), 5, 6, Said::Done),
                operation(Asked::Release(owner(2), epoch(5)), 7, 8, Said::Stale(epoch(9))),
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
                    operation(claim(1), 0, 1, Said::Granted(epoch(5))),
                    operation(claim(2), 2, 3, Said::Granted(epoch(6))),
                ],
            ),
            (
                "a stale read",
                vec![
                    operation(claim(1), 0, 1, Said::Granted(epoch(5))),
                    operation(Asked::Read, 2, 3, Said::Holds(None, epoch(1))),
                ],
            ),
            (
                "a read that goes back",
                vec![
                    lost(claim(1), 0),
                    operation(Asked::Read, 1, 2, holds(1, 7)),
                    operation(Asked::Read, 3, 4, Said::Holds(None, epoch(1))),
                ],
            ),
            (
                "a token that falls",
                vec![
                    operation(claim(1), 0, 1, Said::Granted(epoch(9))),
                    operation(Asked::Release(owner(1), epoch(9)), 2, 3, Said::Done),
                    operation(claim(2), 4, 5, Said::Granted(epoch(8))),
                ],
            ),
            (
                "a lost claim",
                vec![
                    operation(claim(1), 0, 1, Said::Granted(epoch(5))),
                    operation(claim(1), 2, 3, Said::Granted(epoch(8))),
                ],
            ),
            (
                "a release on an old token",
                vec![
                    operation(claim(1), 0, 1, Said::Granted(epoch(5))),
                    operation(Asked::Release(owner(1), epoch(4)), 2, 3, Said::Done),
                    operation(Asked::Read, 4, 5, holds(1, 5)),
                ],
            ),
        ] {
            let broken = check("lock", &history).expect_err(what);
            assert_eq!(broken.check, LINEARIZABLE);
        }
    }

    #[test]
    fn generated_histories_of_a_real_lock_pass_and_swapped_answers_do_not() {
        use crate::rng::Rng;
        let mut caught = 0;
        for seed in 0..60 {
            let mut rng = Rng::stream(seed, "lock");
            let mut history = Vec::new();
            let (mut held, mut at, mut index) = (None, 1, 1);
            for n in 0..40u64 {
                let who = rng.within(1, 3);
                let (asked, said) = match rng.below(3) {
                    0 => match held {
                        Some(by) if by != who => (claim(who), Said::Owned(owner(by), epoch(at))),
                        Some(_) => (claim(who), Said::Granted(epoch(at))),
                        None => {
                            index += 1;
                            (held, at) = (Some(who), index);
                            (claim(who), Said::Granted(epoch(at)))
                        }
                    },
                    1 if held == Some(who) => {
                        let asked = Asked::Release(owner(who), epoch(at));
                        index += 1;
                        (held, at) = (None, index);
                        (asked, Said::Done)
                    }
                    _ => (Asked::Read, Said::Holds(held.map(owner), epoch(at))),
                };
                // Calls and returns overlap their neighbours'.
                history.push(operation(asked, n * 10 - rng.below(n.min(1) * 10), n * 10 + rng.below(12), said));
            }
            assert_eq!(check("lock", &history), Ok(()), "seed {seed}");
            let granted = |operation: &Operation| matches!(operation.returned, Some((_, Said::Granted(_))));
            if let Some(n) = history.iter().rposition(granted) {
                let (at, _) = history[n].returned.unwrap();
                history[n].returned = Some((at, Said::Granted(epoch(index + 50))));
                history.push(operation(Asked::Read, 900, 901, Said::Holds(held.map(owner), epoch(at_of(&history)))));
                caught += usize::from(check("lock", &history).is_err());
            }
        }
        assert!(caught >= 50, "{caught}");
    }

    /// The epoch that the last read saw.
    fn at_of(history: &[Operation]) -> u64 {
        let seen = |operation: &Operation| match operation.returned {
            Some((_, Said::Holds(_, epoch))) => Some(epoch.index),
            _ => None,
        };
        history.iter().rev().find_map(seen).unwrap_or(1)
    }
}
