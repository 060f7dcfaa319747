//! Tests of workers that join and leave a running fleet.

use vocabulary::DpRank;

use super::*;

fn spec(worker: &SimWorker) -> WorkerDefinition {
    WorkerDefinition::at(&url(worker.address()), WorkerRole::Hybrid)
}

fn ids(harness: &FleetHarness) -> Vec<WorkerId> {
    harness.fleet.snapshot().iter().map(|view| view.id).collect()
}

fn turnover(joined: usize, changed: usize, left: usize) -> FleetChangeCounts {
    FleetChangeCounts { joined, changed, left }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joining_worker_is_followed_and_others_are_undisturbed() {
    let (a, b) = (sim(sim_options()).await, sim(sim_options()).await);
    let watch = FleetHarness::with_workers(vec![spec(&a)]);
    watch.until_exact().await;
    ask(a.address(), &prompt(1, 40), 1).await;
    watch.until("heard", |watch| watch.depth(&prompt(1, 40)) == 10).await;
    assert_eq!(watch.fleet.set_workers(vec![spec(&a), spec(&b)]).unwrap(), turnover(1, 0, 0));
    assert_eq!(watch.depth(&prompt(1, 40)), 10, "what is known of who stays is not forgotten");
    watch.until("the new one is known", |watch| watch.view(1).kv_index_state == KvIndexState::Exact).await;
    assert_eq!(watch.fleet.set_workers(vec![spec(&a), spec(&b)]).unwrap(), FleetChangeCounts::default());
    assert_eq!(watch.fleet.leaving(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_worker_gets_no_new_requests_and_ends_with_its_streams() {
    let (a, b) = (sim(sim_options()).await, sim(sim_options()).await);
    let watch = FleetHarness::with_workers(vec![spec(&a), spec(&b)]);
    watch.until_exact().await;
    let (gone, stays) = (watch.id(0), watch.id(1));
    ask(a.address(), &prompt(1, 40), 1).await;
    watch.until("heard", |watch| watch.depth(&prompt(1, 40)) == 10).await;
    let stream = watch.fleet.dispatch(gone, DpRank(0), Tokens(40));
    let mut lost = tokio::spawn(watch.fleet.wait_lost(gone));
    assert_eq!(watch.fleet.set_workers(vec![spec(&b)]).unwrap(), turnover(0, 0, 1));
    assert_eq!((ids(&watch), watch.fleet.is_listed(gone), watch.fleet.leaving()), (vec![stays], false, vec![gone]));
    let holders = |harness: &FleetHarness| harness.overlaps(&prompt(1, 40)).len();
    watch.until("what it held is forgotten", |watch| holders(watch) == 0).await;
    assert_eq!(watch.index.read().sources(), 1);
    let beat = tokio::time::timeout(Duration::from_millis(200), &mut lost).await;
    assert!(beat.is_err(), "a stream there is still watched, and nothing ails it");
    assert_eq!(watch.fleet.in_flight().iter().map(|flow| flow.dispatched - flow.finished).sum::<u64>(), 1);
    drop(stream);
    watch.until("it is gone", |watch| watch.fleet.leaving().is_empty()).await;
    assert_eq!(watch.fleet.events(gone), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_worker_that_dies_notifies_its_open_streams() {
    let a = sim(sim_options()).await;
    let watch = FleetHarness::with_workers(vec![spec(&a)]);
    watch.until_exact().await;
    let gone = watch.id(0);
    let stream = watch.fleet.dispatch(gone, DpRank(0), Tokens(40));
    let lost = tokio::spawn(watch.fleet.wait_lost(gone));
    watch.fleet.set_workers(Vec::new()).unwrap();
    drop(a);
    tokio::time::timeout(Duration::from_secs(20), lost).await.expect("it is told").unwrap();
    drop(stream);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn returning_worker_is_a_new_member_followed_from_the_start() {
    let a = sim(sim_options()).await;
    let mut watch = FleetHarness::with_workers(vec![spec(&a)]);
    watch.until_exact().await;
    let id = watch.id(0);
    ask(a.address(), &prompt(1, 40), 1).await;
    watch.until("heard", |watch| watch.depth(&prompt(1, 40)) == 10).await;
    watch.fleet.set_draining(id, WorkerHealth::Draining);
    let stream = watch.fleet.dispatch(id, DpRank(0), Tokens(40));
    for _ in 0..5 {
        assert_eq!(watch.fleet.set_workers(Vec::new()).unwrap(), turnover(0, 0, 1));
        assert_eq!(watch.fleet.set_workers(vec![spec(&a)]).unwrap(), turnover(1, 0, 0));
    }
    let heard = |harness: &FleetHarness| harness.fleet.event_sources(id).is_some_and(|sources| sources.connected == 1);
    watch.until("the new one is followed", heard).await;
    watch.until_exact().await;
    assert_eq!(
        (watch.depth(&prompt(1, 40)), watch.view(0).health),
        (10, WorkerHealth::Ready),
        "replayed, and not draining"
    );
    assert_eq!(watch.view(0).load.running + watch.view(0).load.waiting, 0, "the stream is the former one's");
    assert_eq!(watch.index.read().sources(), 1, "nobody is followed twice");
    drop(stream);
    watch.until("the former ones are gone", |watch| watch.fleet.leaving().is_empty()).await;
    while watch.alive.try_recv().is_ok() {}
    assert_eq!(watch.alive.recv().await.map(|alive| alive.worker), Some(id), "it is reported");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_worker_starts_anew_and_a_duplicate_changes_nothing() {
    let a = sim(sim_options()).await;
    let watch = FleetHarness::with_workers(vec![spec(&a)]);
    watch.until_exact().await;
    let decode = WorkerDefinition { role: WorkerRole::Decode, ..spec(&a) };
    assert!(matches!(watch.fleet.set_workers(vec![decode.clone(), spec(&a)]), Err(FleetError::DuplicateWorker(_))));
    assert_eq!((watch.view(0).role, watch.fleet.leaving()), (WorkerRole::Hybrid, vec![]));
    let stream = watch.fleet.dispatch(watch.id(0), DpRank(0), Tokens(40));
    let mut lost = tokio::spawn(watch.fleet.wait_lost(watch.id(0)));
    let life = watch.view(0).incarnation;
    watch.fleet.set_draining(watch.id(0), WorkerHealth::Draining);
    assert_eq!(watch.fleet.set_workers(vec![decode.clone()]).unwrap(), turnover(0, 1, 0));
    // Effective at once: no request is refused meanwhile.
    let view = watch.view(0);
    assert_eq!((view.role, view.health, view.incarnation), (WorkerRole::Decode, WorkerHealth::Draining, life));
    assert_eq!(&*view.models, ["tiny".into()]);
    watch.fleet.set_draining(watch.id(0), WorkerHealth::Ready);
    watch.until_exact().await;
    assert_eq!(watch.fleet.incarnation(watch.id(0)), Some(life));
    let others = WorkerDefinition { models: vec!["large".into()], ..decode };
    assert_eq!(watch.fleet.set_workers(vec![others.clone()]).unwrap(), turnover(0, 1, 0));
    assert_eq!((&*watch.view(0).models, watch.view(0).health), (&["large".into()][..], WorkerHealth::Ready));
    let asked = WorkerDefinition { models: Vec::new(), ..others };
    assert_eq!(watch.fleet.set_workers(vec![asked]).unwrap(), turnover(0, 1, 0));
    watch.until("it is asked for its models", |watch| *watch.view(0).models == ["tiny".into()]).await;
    let beat = tokio::time::timeout(Duration::from_millis(50), &mut lost).await;
    assert!(beat.is_err(), "a stream that is there goes on");
    drop(stream);
}
