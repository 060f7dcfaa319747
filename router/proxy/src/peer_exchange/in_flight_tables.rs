//! Publishes this router's requests in flight to its peers: all of them, soon after a change, and regularly in any
//! case.
//!
//! Until peers know of a request, they may send their next one to the same worker: with a delay of 50 ms, four routers
//! in front of eight workers served a burst of new sessions a quarter later than one router did; with 10 ms, a tenth
//! later. So a new request is published at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use ownership::RouterTopic;
use tokio::time::{sleep, timeout};
use vocabulary::NodeId;
use workers_shim::fleet::{InFlightReport, RankInFlightCounts};

use super::PeerExchange;
use super::message::write_table;

/// Time between two different reports, unless a request was sent.
const CHANGE_INTERVAL: Duration = Duration::from_millis(10);
/// Minimum time between two reports.
const MIN_INTERVAL: Duration = Duration::from_millis(2);
/// Time between two equal reports; well below the silence after which a router no longer counts.
const HEARTBEAT: Duration = Duration::from_millis(250);
/// Timeout for sending a report. The next one contains everything again.
const SEND_TIMEOUT: Duration = Duration::from_millis(800);

#[derive(Default)]
struct TableDelivery {
    last_sent: Option<(Arc<[RankInFlightCounts]>, Instant)>,
    /// Whether the peer has not answered the last report yet.
    is_busy: Arc<AtomicBool>,
}

impl TableDelivery {
    fn is_due(&self, flows: &[RankInFlightCounts], now: Instant) -> bool {
        let is_free = !self.is_busy.load(Ordering::Relaxed);
        let is_recent = |(entries, at): &(Arc<[RankInFlightCounts]>, Instant)| {
            **entries == *flows && now.duration_since(*at) < HEARTBEAT
        };
        is_free && !self.last_sent.as_ref().is_some_and(is_recent)
    }
}

/// Runs until dropped.
pub(super) async fn publish(exchange: &Arc<PeerExchange>) {
    let (mut deliveries, mut sequence, mut wait) = (HashMap::<NodeId, TableDelivery>::new(), 0, CHANGE_INTERVAL);
    loop {
        sleep(MIN_INTERVAL).await;
        // Soon after a request was sent, else regularly.
        drop(timeout(wait.saturating_sub(MIN_INTERVAL), exchange.fleet.wait_dispatched()).await);
        wait = CHANGE_INTERVAL;
        let now = Instant::now();
        exchange.fleet.expire_peers(now);
        let peers = exchange.peers.peers();
        deliveries.retain(|node, _| peers.contains(node));
        if peers.is_empty() {
            // There is nobody to tell of dispatches.
            sleep(HEARTBEAT).await;
            continue;
        }
        let flows: Arc<[RankInFlightCounts]> = exchange.fleet.in_flight().into();
        let mut message = None;
        for node in peers {
            let delivery = deliveries.entry(node).or_default();
            if delivery.is_busy.load(Ordering::Relaxed) {
                // A busy peer gets the report as soon as it has answered.
                wait = MIN_INTERVAL;
            }
            if !delivery.is_due(&flows, now) {
                continue;
            }
            let encoded = message.get_or_insert_with(|| {
                sequence += 1;
                write_table(&InFlightReport { boot: exchange.boot, sequence, flows: flows.to_vec() })
            });
            let Some(encoded) = encoded else { continue };
            delivery.last_sent = Some((flows.clone(), now));
            send(exchange, node, encoded.clone(), &delivery.is_busy);
        }
    }
}

fn send(exchange: &Arc<PeerExchange>, node: NodeId, message: Bytes, is_busy: &Arc<AtomicBool>) {
    let (reply, is_busy) = (exchange.peers.call(node, RouterTopic::Exchange, message), is_busy.clone());
    let tables = exchange.metrics.tables.clone();
    is_busy.store(true, Ordering::Relaxed);
    tokio::spawn(async move {
        let outcome = if matches!(timeout(SEND_TIMEOUT, reply).await, Ok(Ok(_))) { "sent" } else { "failed" };
        tables.with_label_values(&[outcome]).inc();
        is_busy.store(false, Ordering::Relaxed);
    });
}

#[cfg(test)]
mod tests {
    use vocabulary::{DpRank, Tokens, WorkerId};

    use super::*;

    fn flows(dispatched: u64) -> Arc<[RankInFlightCounts]> {
        let rank = DpRank(0);
        [RankInFlightCounts { worker: WorkerId(1), rank, dispatched, begun: 0, finished: 0, pending: Tokens(0) }].into()
    }

    #[test]
    fn in_flight_table_is_sent_on_change_and_at_each_heartbeat() {
        let (mut delivery, now) = (TableDelivery::default(), Instant::now());
        assert!(delivery.is_due(&flows(1), now));
        delivery.last_sent = Some((flows(1), now));
        assert!(!delivery.is_due(&flows(1), now + HEARTBEAT / 2) && delivery.is_due(&flows(1), now + HEARTBEAT));
        assert!(delivery.is_due(&flows(2), now));
        delivery.is_busy.store(true, Ordering::Relaxed);
        assert!(!delivery.is_due(&flows(2), now + HEARTBEAT), "one at a time");
    }
}
