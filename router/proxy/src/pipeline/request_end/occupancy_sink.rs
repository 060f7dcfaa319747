//! Settles the speed sample and the KV reservation. The request leaves the target's load when the receipt consumes the
//! end.

use super::RequestEnd;
use crate::receipt::RequestOutcome;

/// Settles the KV reservation, and completes the sample of the in-flight count, whose guard ends with the receipt.
#[derive(Debug)]
pub(in crate::pipeline) struct OccupancySink;

impl OccupancySink {
    pub(in crate::pipeline) fn record(&self, end: &mut RequestEnd) {
        let usage = end.answer.usage;
        let computed = usage.map(|usage| end.locally_computed(usage));
        // An answer given by two workers is no speed sample of either.
        let is_from_one_worker = !end.attempts.is_empty() && !end.is_resumed();
        if let (Some(in_flight), Some(computed), true) = (&mut end.in_flight, computed, is_from_one_worker) {
            in_flight.complete(&computed);
        }
        let Some(reservation) = end.guards.reservation.take() else { return };
        match end.outcome {
            RequestOutcome::Complete => reservation.mark_served(usage),
            RequestOutcome::Rejected => reservation.mark_refused(),
            RequestOutcome::Failed | RequestOutcome::Interrupted => reservation.mark_failed(),
            // What was computed until then stays resident.
            RequestOutcome::ClientDisconnected => drop(reservation),
        }
    }
}
