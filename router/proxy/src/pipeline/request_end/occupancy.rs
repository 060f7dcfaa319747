//! Settles the speed sample and the KV reservation. The count in flight falls when the receipt consumes the end.

use super::RequestEnd;
use crate::receipt::RequestOutcome;

/// Marks how load and reservation end. Both end when their guards are dropped.
#[derive(Debug)]
pub(in crate::pipeline) struct OccupancySink;

impl OccupancySink {
    pub(in crate::pipeline) fn record(&self, end: &mut RequestEnd) {
        let usage = end.answer.usage;
        let counted = usage.map(|usage| end.locally_computed(usage));
        // An answer given by two workers says nothing about the speed of one.
        let is_whole = !end.attempts.is_empty() && !end.is_resumed();
        if let (Some(in_flight), Some(counted), true) = (&mut end.in_flight, counted, is_whole) {
            in_flight.complete(&counted);
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
