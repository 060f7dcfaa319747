//! Throughput from a history: acknowledged writes per second, and the longest time without one.

use serde::Serialize;

use crate::history::{ClientOperation, RunInstant};

/// Operations by outcome.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct AttemptTally {
    /// Acknowledged writes.
    pub(crate) acknowledged: u64,
    /// Writes refused by the ledger or not accepted.
    pub(crate) refused: u64,
    /// Writes with unknown outcome.
    pub(crate) unknown: u64,
    /// Answered linearizable reads.
    pub(crate) reads: u64,
}

impl AttemptTally {
    /// Counts these operations.
    pub(crate) fn of(operations: &[ClientOperation]) -> AttemptTally {
        use crate::history::OwnershipReply;
        let mut tally = AttemptTally::default();
        for operation in operations {
            match operation.answer {
                OwnershipReply::Found(_) => tally.reads += 1,
                OwnershipReply::Granted(_) | OwnershipReply::Released => tally.acknowledged += 1,
                OwnershipReply::Unknown if operation.is_write() => tally.unknown += 1,
                _ if operation.is_write() => tally.refused += 1,
                _ => {}
            }
        }
        tally
    }

    /// Number of all operations.
    pub(crate) fn total(&self) -> u64 {
        self.acknowledged + self.refused + self.unknown + self.reads
    }
}

/// Acknowledged writes per second, in each whole second of a window.
pub(crate) fn per_second(operations: &[ClientOperation], (from, to): (RunInstant, RunInstant)) -> Vec<u64> {
    let seconds = (to.0.saturating_sub(from.0) / 1_000_000) as usize;
    let mut counts = vec![0; seconds];
    for operation in operations.iter().filter(|operation| operation.is_acknowledged()) {
        let into = operation.completed.0.checked_sub(from.0).map(|into| (into / 1_000_000) as usize);
        if let Some(count) = into.and_then(|into| counts.get_mut(into)) {
            *count += 1;
        }
    }
    counts
}

/// Longest time between two acknowledged writes of any client, in seconds, from `from` to `to`.
pub(crate) fn longest_silence(operations: &[ClientOperation], (from, to): (RunInstant, RunInstant)) -> f64 {
    let acknowledged = operations.iter().filter(|operation| operation.is_acknowledged());
    let within = acknowledged.map(|operation| operation.completed).filter(|at| *at > from && *at < to);
    let mut times: Vec<RunInstant> = within.collect();
    times.extend([from, to]);
    times.sort_unstable();
    times.windows(2).map(|pair| pair[1].since(pair[0])).fold(0.0, f64::max)
}

/// Returns the value below which `share` of the values lie; `None` if there are none.
pub(crate) fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(at.saturating_sub(1).min(sorted.len().saturating_sub(1))).copied()
}

#[cfg(test)]
mod tests {
    use vocabulary::{DpRank, Epoch, Incarnation, Owner, SessionId, WorkerId};

    use super::*;
    use crate::history::{MemberSlot, OwnershipReply, OwnershipRequest};

    fn acknowledged(ms: u64) -> ClientOperation {
        let owner = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };
        ClientOperation {
            client: 0,
            seat: MemberSlot(1),
            subject: SessionId(1),
            asked: OwnershipRequest::Claim(owner),
            invoked: RunInstant(ms * 1000),
            completed: RunInstant(ms * 1000),
            answer: OwnershipReply::Granted(Epoch::default()),
            revision: None,
        }
    }

    #[test]
    fn throughput_counts_only_whole_seconds() {
        let operations = [100, 900, 1500, 2999].map(acknowledged);
        assert_eq!(per_second(&operations, (RunInstant(0), RunInstant(2_999_999))), [2, 1]);
        assert_eq!(per_second(&operations, (RunInstant(2_000_000), RunInstant(3_000_000))), [1]);
    }

    #[test]
    fn the_longest_silence_includes_both_ends_of_the_window() {
        let operations = [100, 400, 2400].map(acknowledged);
        assert_eq!(longest_silence(&operations, (RunInstant(0), RunInstant(3_000_000))), 2.0);
        assert_eq!(longest_silence(&operations, (RunInstant(0), RunInstant(9_000_000))), 6.6);
        let refused = ClientOperation { answer: OwnershipReply::Refused, ..acknowledged(1000) };
        assert_eq!(longest_silence(&[refused], (RunInstant(0), RunInstant(3_000_000))), 3.0);
    }

    #[test]
    fn quantiles_are_observed_values() {
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 0.5), Some(2.0));
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 0.99), Some(3.0));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
