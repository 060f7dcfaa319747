//! Tests of several routers with the same workers.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use residency::{ReadProgress, ResidencySnapshot};
use vocabulary::NodeId;

use super::*;
use crate::events::{SnapshotProvider, SnapshotRequest};
use crate::sim::EventOptions;

/// Another router in the same process.
pub(super) struct PeerRouter(pub(super) Arc<Fleet>);

impl SnapshotProvider for PeerRouter {
    fn fetch(&self, request: SnapshotRequest) -> BoxFuture<'static, Option<ResidencySnapshot>> {
        let written = self.0.residency_snapshot(request.worker, request.rank);
        async move {
            let mut reader = request.reader();
            for chunk in written.await?.chunks {
                match reader.take(&chunk).ok()? {
                    ReadProgress::More(next) => reader = next,
                    ReadProgress::Complete(imprint) => return Some(imprint),
                }
            }
            None
        }
        .boxed()
    }
}

/// A worker that replays only its last two messages.
async fn small_replay_worker() -> SimWorker {
    let events = EventOptions { buffer: 2, ..EventOptions::default() };
    sim(SimOptions { events, ..sim_options() }).await
}

fn knows_prompt(harness: &FleetHarness, number: u32) -> bool {
    harness.depth(&prompt(number, 40)) == 10
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_fleet_takes_a_snapshot_for_events_beyond_the_replay_buffer() {
    let worker = small_replay_worker().await;
    let first = FleetHarness::at(worker.address());
    first.until_exact().await;
    for number in 0..6 {
        ask(worker.address(), &prompt(number, 40), 1).await;
        first.until("heard", |watch| knows_prompt(watch, number)).await;
    }
    let alone = FleetHarness::at(worker.address());
    alone.until("heard of the last prompt", |watch| knows_prompt(watch, 5)).await;
    alone.until("degraded", |watch| watch.view(0).kv_index_state == KvIndexState::Degraded).await;
    assert!(!knows_prompt(&alone, 0));
    let second = FleetHarness::with_peer(&first, worker.address());
    second.until_exact().await;
    for number in 0..6 {
        assert!(knows_prompt(&second, number), "prompt {number}");
    }
    assert_eq!(second.fleet.events(second.id(0)).unwrap().peer_snapshots, 1);
    // Both continue alike, including evictions: the cache holds 64 blocks of 8 tokens.
    for number in 6..20 {
        ask(worker.address(), &prompt(number, 40), 1).await;
    }
    first.until("heard of the last prompt", |watch| knows_prompt(watch, 19)).await;
    for number in 0..20 {
        let depth = first.depth(&prompt(number, 40));
        second.until("alike", |watch| watch.depth(&prompt(number, 40)) == depth).await;
    }
    assert_eq!(second.view(0).kv_index_state, KvIndexState::Exact);
    assert!(!knows_prompt(&second, 0), "evicted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_fleet_provides_no_snapshot() {
    let worker = small_replay_worker().await;
    for number in 0..6 {
        ask(worker.address(), &prompt(number, 40), 1).await;
    }
    let first = FleetHarness::at(worker.address());
    first.until("heard of the last prompt", |watch| knows_prompt(watch, 5)).await;
    let second = FleetHarness::with_peer(&first, worker.address());
    second.until("heard of the last prompt", |watch| knows_prompt(watch, 5)).await;
    second.until("degraded", |watch| watch.view(0).kv_index_state == KvIndexState::Degraded).await;
    assert!(
        first.fleet.residency_snapshot(first.id(0), DpRank(0)).await.is_none(),
        "nothing is given away that is not whole"
    );
    assert!(first.fleet.residency_snapshot(first.id(0), DpRank(9)).await.is_none(), "no such rank");
    assert!(first.fleet.residency_snapshot(WorkerId(1), DpRank(0)).await.is_none(), "no such worker");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peer_router_requests_count_as_load_until_it_goes_silent() {
    let worker = sim(sim_options()).await;
    let (a, b) = (FleetHarness::at(worker.address()), FleetHarness::at(worker.address()));
    for watch in [&a, &b] {
        watch.until("ready", |watch| watch.view(0).health == WorkerHealth::Ready).await;
    }
    let mut first = a.fleet.dispatch(a.id(0), DpRank(0), Tokens(500));
    let second = a.fleet.dispatch(a.id(0), DpRank(1), Tokens(70));
    let tell = |sequence| {
        b.fleet.merge_peer_table(
            NodeId(1),
            InFlightReport { boot: 1, sequence, flows: a.fleet.in_flight() },
            Instant::now(),
        )
    };
    assert_eq!(tell(1), MergeOutcome::Changed);
    let load = |harness: &FleetHarness| harness.view(0).load;
    assert_eq!((load(&b).waiting, load(&b).running, load(&b).backlog), (2, 0, Tokens(570)));
    first.record_first_token();
    drop(second);
    assert_eq!(tell(2), MergeOutcome::Changed);
    assert_eq!((load(&b).waiting, load(&b).running, load(&b).backlog), (0, 1, Tokens(0)));
    assert_eq!(b.fleet.peer_ages(Instant::now()).len(), 1);
    b.fleet.expire_peers(Instant::now() + SILENCE_TIMEOUT);
    assert_eq!((load(&b).waiting, load(&b).running), (0, 0));
    drop(first);
}
