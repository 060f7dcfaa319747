//! Leases of workers that routers on several nodes reach.

use std::time::Duration;

use ledger::{Command, RegisterWorker, WorkerKind, WorkerSpec};
use ownership::Options;
use vocabulary::{Incarnation, Micros, ModelId, WorkerId, WorkerRole};

use crate::nodes::{TestCluster, eventually};

const LEASE: Duration = Duration::from_secs(2);

fn with_fast_tick(options: &mut Options) {
    options.lease = LEASE;
    options.tick = Duration::from_millis(100);
}

fn register(n: u64) -> Command {
    let spec = WorkerSpec {
        endpoint: "http://worker".into(),
        role: WorkerRole::Hybrid,
        kind: WorkerKind::Engine,
        models: [ModelId::from("tiny")].into(),
        ranks: 1,
    };
    let (worker, incarnation) = (WorkerId(n), Incarnation(1));
    Command::RegisterWorker(RegisterWorker { worker, incarnation, spec, ttl: Micros::of(LEASE) })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_survives_a_leader_change_and_ends_without_reports() {
    let mut nodes = TestCluster::three_with(1, with_fast_tick).await;
    for n in [1, 2] {
        nodes.node(4).submit(register(n)).unwrap().await.unwrap();
    }
    // The leader acknowledges before a learner's view shows the write.
    eventually("both workers in the learner's view", || async {
        nodes.node(4).report_alive(WorkerId(1), Incarnation(1));
        nodes.node(4).view().worker(WorkerId(2)).map(|_| ())
    })
    .await;
    let leader = nodes.leader().await;
    nodes.kill(leader).await;
    // Only the learner's router reaches worker 1; no router reaches worker 2.
    eventually("the silent worker's lease to end", || async {
        assert!(nodes.node(4).report_alive(WorkerId(1), Incarnation(1)));
        let view = nodes.node(4).view();
        assert!(view.worker(WorkerId(1)).unwrap().is_live(), "the reported worker's lease ended");
        (!view.worker(WorkerId(2)).unwrap().is_live()).then_some(())
    })
    .await;
    nodes.assert_converged().await;
    nodes.close().await;
}
