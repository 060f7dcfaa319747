//! Several fleets over the same workers, as several routers have them.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use residency::{Imprint, Taken};
use vocabulary::NodeId;

use super::*;
use crate::events::{Imprints, Wanted};
use crate::sim::EventOptions;

/// Another router in the same process.
pub(super) struct Neighbour(pub(super) Arc<Fleet>);

impl Imprints for Neighbour {
    fn fetch(&self, wanted: Wanted) -> BoxFuture<'static, Option<Imprint>> {
        let written = self.0.imprint(wanted.worker, wanted.rank);
        async move {
            let mut reader = wanted.reader();
            for chunk in written.await?.chunks {
                match reader.take(&chunk).ok()? {
                    Taken::More(next) => reader = next,
                    Taken::Whole(imprint) => return Some(imprint),
                }
            }
            None
        }
        .boxed()
    }
}

/// A worker that replays only its last two messages.
async fn forgetful() -> SimWorker {
    let events = EventOptions { buffer: 2, ..EventOptions::default() };
    sim(SimOptions { events, ..sim_options() }).await
}

fn knows(watch: &Watch, number: u32) -> bool {
    watch.depth(&prompt(number, 40)) == 10
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_fleet_learns_from_another_what_the_engine_no_longer_tells() {
    let worker = forgetful().await;
    let first = Watch::at(worker.address());
    first.until_exact().await;
    for number in 0..6 {
        ask(worker.address(), &prompt(number, 40), 1).await;
        first.until("heard", |watch| knows(watch, number)).await;
    }
    let alone = Watch::at(worker.address());
    alone.until("heard of the last prompt", |watch| knows(watch, 5)).await;
    alone.until("degraded", |watch| watch.view(0).knowledge == Knowledge::Degraded).await;
    assert!(!knows(&alone, 0));
    let second = Watch::beside(&first, worker.address());
    second.until_exact().await;
    for number in 0..6 {
        assert!(knows(&second, number), "prompt {number}");
    }
    assert_eq!(second.fleet.events(second.id(0)).unwrap().adopted, 1);
    // Both go on alike, evictions included: the cache holds 64 blocks of 8 tokens.
    for number in 6..20 {
        ask(worker.address(), &prompt(number, 40), 1).await;
    }
    first.until("heard of the last prompt", |watch| knows(watch, 19)).await;
    for number in 0..20 {
        let depth = first.depth(&prompt(number, 40));
        second.until("alike", |watch| watch.depth(&prompt(number, 40)) == depth).await;
    }
    assert_eq!(second.view(0).knowledge, Knowledge::Exact);
    assert!(!knows(&second, 0), "evicted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_that_does_not_know_all_is_no_help() {
    let worker = forgetful().await;
    for number in 0..6 {
        ask(worker.address(), &prompt(number, 40), 1).await;
    }
    let first = Watch::at(worker.address());
    first.until("heard of the last prompt", |watch| knows(watch, 5)).await;
    let second = Watch::beside(&first, worker.address());
    second.until("heard of the last prompt", |watch| knows(watch, 5)).await;
    second.until("degraded", |watch| watch.view(0).knowledge == Knowledge::Degraded).await;
    assert!(first.fleet.imprint(first.id(0), DpRank(0)).await.is_none(), "nothing is given away that is not whole");
    assert!(first.fleet.imprint(first.id(0), DpRank(9)).await.is_none(), "no such rank");
    assert!(first.fleet.imprint(WorkerId(1), DpRank(0)).await.is_none(), "no such worker");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_router_sent_is_load_for_the_other_until_it_is_silent() {
    let worker = sim(sim_options()).await;
    let (a, b) = (Watch::at(worker.address()), Watch::at(worker.address()));
    for watch in [&a, &b] {
        watch.until("ready", |watch| watch.view(0).health == Health::Ready).await;
    }
    let mut first = a.fleet.dispatch(a.id(0), DpRank(0), Tokens(500));
    let second = a.fleet.dispatch(a.id(0), DpRank(1), Tokens(70));
    let tell = |sequence| {
        b.fleet.hear(NodeId(1), InFlightTable { boot: 1, sequence, flows: a.fleet.in_flight() }, Instant::now())
    };
    assert_eq!(tell(1), Heard::News);
    let load = |watch: &Watch| watch.view(0).load;
    assert_eq!((load(&b).waiting, load(&b).running, load(&b).backlog), (2, 0, Tokens(570)));
    first.first_token();
    drop(second);
    assert_eq!(tell(2), Heard::News);
    assert_eq!((load(&b).waiting, load(&b).running, load(&b).backlog), (0, 1, Tokens(0)));
    assert_eq!(b.fleet.heard(Instant::now()).len(), 1);
    b.fleet.forget_silent(Instant::now() + SILENCE);
    assert_eq!((load(&b).waiting, load(&b).running), (0, 0));
    drop(first);
}
