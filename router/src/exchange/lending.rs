//! Imprints for neighbours: written by the follower of a source, kept until all their chunks were fetched.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ownership::PeerError;
use parking_lot::Mutex;
use tokio::time::timeout;
use workers_shim::events::Exported;
use workers_shim::fleet::Fleet;

use super::message::{Answer, Question};
use crate::telemetry::exchange::ExchangeMetrics;

/// Longest wait for a follower. It writes between two messages of its engine.
const PATIENCE: Duration = Duration::from_secs(2);
/// An imprint that nobody asks for is dropped.
const KEPT: Duration = Duration::from_secs(10);
/// Imprints that are kept at once, and bytes of all of them.
const MOST_LOANS: usize = 8;
const MOST_BYTES: usize = 512 << 20;

/// Imprints that are being fetched.
#[derive(Default)]
pub(super) struct Lending(Mutex<Loans>);

#[derive(Default)]
struct Loans {
    open: HashMap<u64, Loan>,
    last: u64,
}

struct Loan {
    chunks: Vec<Bytes>,
    touched: Instant,
}

impl Lending {
    pub(super) async fn answer(
        &self,
        fleet: &Fleet,
        metrics: &ExchangeMetrics,
        question: &[u8],
    ) -> Result<Bytes, PeerError> {
        let answer =
            match Question::read(question).ok_or_else(|| PeerError::Garbled("a question about imprints".into()))? {
                Question::Chunk { loan, place } => self.0.lock().chunk(loan, place),
                Question::Open { .. } if self.0.lock().is_full(Instant::now()) => Answer::Busy,
                Question::Open { worker, rank, process } => {
                    let written = timeout(PATIENCE, fleet.imprint(worker, rank)).await.ok().flatten();
                    let written = written.filter(|written| written.head.process == process);
                    written.map_or(Answer::NotKnown, |written| self.0.lock().lend(written, Instant::now()))
                }
            };
        if matches!(answer, Answer::Opened { .. }) {
            metrics.imprints.with_label_values(&["lent"]).inc();
        }
        Ok(answer.write())
    }
}

impl Loans {
    fn is_full(&mut self, now: Instant) -> bool {
        self.open.retain(|_, loan| now.saturating_duration_since(loan.touched) < KEPT);
        let bytes: usize = self.open.values().flat_map(|loan| &loan.chunks).map(Bytes::len).sum();
        self.open.len() >= MOST_LOANS || bytes >= MOST_BYTES
    }

    fn lend(&mut self, written: Exported, now: Instant) -> Answer {
        let Some(first) = written.chunks.first().cloned() else { return Answer::NotKnown };
        let Ok(chunks) = u32::try_from(written.chunks.len()) else { return Answer::NotKnown };
        if chunks == 1 {
            return Answer::Opened { loan: 0, chunks, first };
        }
        if self.is_full(now) {
            return Answer::Busy;
        }
        self.last += 1;
        self.open.insert(self.last, Loan { chunks: written.chunks, touched: now });
        Answer::Opened { loan: self.last, chunks, first }
    }

    fn chunk(&mut self, id: u64, place: u32) -> Answer {
        let Some(loan) = self.open.get_mut(&id) else { return Answer::Gone };
        let Some(chunk) = loan.chunks.get(place as usize).cloned() else { return Answer::Gone };
        loan.touched = Instant::now();
        if place as usize + 1 == loan.chunks.len() {
            self.open.remove(&id);
        }
        Answer::Chunk(chunk)
    }
}

#[cfg(test)]
mod tests {
    use residency::ImprintHead;
    use vocabulary::{DpRank, Incarnation, WorkerId};

    use super::*;

    fn written(chunks: usize) -> Exported {
        let head = ImprintHead { worker: WorkerId(1), rank: DpRank(0), process: Incarnation(1), next: 0 };
        let chunks = (0..chunks).map(|place| Bytes::from(vec![place as u8])).collect();
        Exported { head, chunks }
    }

    fn loan_of(answer: Answer) -> u64 {
        let Answer::Opened { loan, .. } = answer else { panic!("{answer:?}") };
        loan
    }

    #[test]
    fn a_loan_ends_with_its_last_chunk() {
        let (mut loans, now) = (Loans::default(), Instant::now());
        let id = loan_of(loans.lend(written(3), now));
        assert_eq!(loans.chunk(id, 1), Answer::Chunk(Bytes::from_static(&[1])));
        assert_eq!(loans.chunk(id, 1), Answer::Chunk(Bytes::from_static(&[1])), "asked again");
        assert_eq!(loans.chunk(id, 2), Answer::Chunk(Bytes::from_static(&[2])));
        assert_eq!((loans.chunk(id, 2), loans.open.len()), (Answer::Gone, 0));
        assert_eq!(loans.lend(written(1), now), Answer::Opened { loan: 0, chunks: 1, first: Bytes::from_static(&[0]) });
        assert_eq!((loans.lend(written(0), now), loans.open.len()), (Answer::NotKnown, 0));
    }

    #[test]
    fn loans_are_bounded_and_forgotten_ones_make_room() {
        let (mut loans, now) = (Loans::default(), Instant::now());
        for _ in 0..MOST_LOANS {
            loan_of(loans.lend(written(2), now));
        }
        assert_eq!(loans.lend(written(2), now), Answer::Busy);
        assert!(loans.is_full(now + KEPT / 2) && !loans.is_full(now + KEPT));
        assert_eq!(loans.chunk(1, 0), Answer::Gone);
    }
}
