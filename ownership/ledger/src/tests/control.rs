use super::*;

fn admit(nonce: u128, address: &str) -> Command {
    Command::AdmitNode(AdmitNode { nonce, address: address.into() })
}

fn pin(artifact: vocabulary::ArtifactId, pinned: ArtifactPinFlag) -> Command {
    Command::Pin(PinArtifact { artifact, pinned })
}

fn quota(artifacts: Option<u64>) -> Command {
    Command::SetQuota(SetQuota { tenant: tenant(), artifacts })
}

#[test]
fn node_ids_only_grow_and_a_nonce_always_gets_the_same_id() {
    let mut bench = LedgerFixture::new();
    assert_eq!(bench.ledger.node(FOUNDER).map(Node::is_member), Some(true));
    assert_eq!(bench.run(admit(7, "a:1")), Outcome::Admitted { node: NodeId(2) });
    assert_eq!(bench.run(admit(8, "a:1")), Outcome::Admitted { node: NodeId(3) }, "another node, wherever it runs");
    assert_eq!(bench.run(admit(7, "b:1")), Outcome::Admitted { node: NodeId(2) });
    assert_eq!(bench.ledger.node(NodeId(2)).map(|node| &*node.address), Some("b:1"));
    assert_eq!(bench.run(Command::RetireNode(NodeId(3))), Outcome::Done);
    assert_eq!(bench.run(admit(9, "a:1")), Outcome::Admitted { node: NodeId(4) });
}

#[test]
fn a_retired_node_is_not_admitted_again() {
    let mut bench = LedgerFixture::new();
    bench.run(admit(7, "a:1"));
    assert_eq!(bench.run(Command::RetireNode(NodeId(2))), Outcome::Done);
    assert_eq!(bench.run(Command::RetireNode(NodeId(2))), Outcome::Done, "said twice");
    assert_eq!(bench.run(admit(7, "a:1")), Outcome::Refused(Refusal::NodeRemoved { node: NodeId(2) }));
    assert_eq!(bench.run(Command::RetireNode(NodeId(9))), Outcome::Refused(Refusal::UnknownNode));
}

#[test]
fn an_empty_or_overlong_address_is_refused() {
    let mut bench = LedgerFixture::new();
    for bad in [String::new(), "x".repeat(257)] {
        assert_eq!(bench.run(admit(7, &bad)), Outcome::Refused(Refusal::InvalidAddress));
    }
    assert_eq!(bench.ledger.nodes().count(), 1);
}

#[test]
fn a_full_node_table_forgets_the_first_retired_node_or_refuses() {
    let mut bench = LedgerFixture::new();
    let batch = |from: u128, to: u128| Command::Batch((from..to).map(|n| admit(n, "a:1")).collect());
    bench.run(batch(1, 1_024));
    assert_eq!(bench.ledger.nodes().count(), 1_024);
    assert_eq!(bench.run(admit(2_000, "a:1")), Outcome::Refused(Refusal::LedgerFull));
    bench.run(Command::RetireNode(NodeId(9)));
    bench.run(Command::RetireNode(NodeId(5)));
    assert_eq!(bench.run(admit(2_000, "a:1")), Outcome::Admitted { node: NodeId(1_025) });
    assert!(bench.ledger.node(NodeId(9)).is_none() && bench.ledger.node(NodeId(5)).is_some());
}

#[test]
fn a_pinned_artifact_outlives_its_references_and_the_sweep() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    let id = bench.head_artifact(session(1)).id;
    assert_eq!(bench.run(pin(id, ArtifactPinFlag::Yes)), Outcome::Done);
    bench.run(Command::CloseSession(session(1)));
    let idle = bench.ledger.limits().artifact_idle;
    bench.advance_time(idle + TTL);
    assert!(bench.ledger.artifact(id).is_some());
    assert_eq!(bench.run(Command::Evict(id)), Outcome::Refused(Refusal::Pinned));
    assert_eq!(bench.run(pin(id, ArtifactPinFlag::No)), Outcome::Done);
    bench.advance_time(TTL);
    assert!(bench.ledger.artifact(id).is_none());
    assert_eq!(bench.run(pin(id, ArtifactPinFlag::Yes)), Outcome::Refused(Refusal::UnknownArtifact));
}

#[test]
fn only_an_unreferenced_artifact_can_be_evicted() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 64), ('b', 10)]), 0, 1));
    bench.step(step(2, &chain(&[('a', 64), ('c', 10)]), 0, 1));
    let (parent, child) = (bench.head_artifact(session(1)).id, bench.head_artifact(session(2)).id);
    let refused = Outcome::Refused(Refusal::Referenced);
    assert_eq!(bench.run(Command::Evict(child)), refused, "a session's head is in it");
    bench.run(Command::CloseSession(session(1)));
    assert_eq!(bench.run(Command::Evict(parent)), refused, "an extent hangs on it");
    bench.run(Command::CloseSession(session(2)));
    assert_eq!(bench.run(Command::Evict(child)), Outcome::Done);
    assert_eq!(bench.run(Command::Evict(parent)), Outcome::Done);
    assert_eq!(bench.run(Command::Evict(parent)), Outcome::Refused(Refusal::UnknownArtifact));
    assert_eq!(bench.ledger.artifact_count(), 0);
}

#[test]
fn a_draining_worker_keeps_its_grants_and_gets_no_new_ones() {
    let mut bench = LedgerFixture::new();
    let (mine, theirs) = (chain(&[('a', 30)]), chain(&[('b', 30)]));
    let granted = bench.step(step(1, &mine, 0, 1)).granted.unwrap();
    bench.step(step(2, &theirs, 0, 2));
    let drain = |draining| Command::DrainWorker(DrainWorker { worker: WorkerId(1), draining });
    assert_eq!(bench.run(drain(DrainFlag::Yes)), Outcome::Done);
    let claim =
        |id| Command::ClaimOwner(ClaimOwner { subject: OwnershipSubject::Session(session(id)), owner: owner(1) });
    assert_eq!(bench.run(claim(1)), Outcome::Granted { epoch: granted });
    let refused = Outcome::Refused(Refusal::WorkerDraining);
    let seen = bench.session(session(2)).epoch;
    let to = MigrateSession { session: session(2), to: owner(1), head: Some(theirs.head()), seen };
    assert_eq!(bench.run(Command::Migrate(to)), refused);
    let copy = ReplicateReadonly { place: prefix_ref(&theirs, 30), holder: owner(1), ttl: TTL };
    assert_eq!(bench.run(Command::ReplicateReadonly(copy)), refused);
    // A step that was in flight when the drain began still commits its blocks.
    let late = bench.step(step(3, &chain(&[('c', 30)]), 0, 1));
    assert_eq!((late.sealed, late.granted), (true, None));
    // A new incarnation drains like the old one, until the drain is removed.
    bench.run(register(1, 2));
    assert_eq!(bench.ledger.worker(WorkerId(1)).unwrap().draining, DrainFlag::Yes);
    assert_eq!(bench.run(drain(DrainFlag::No)), Outcome::Done);
    let reborn = Owner { incarnation: Incarnation(2), ..owner(1) };
    let outcome =
        bench.run(Command::ClaimOwner(ClaimOwner { subject: OwnershipSubject::Session(session(3)), owner: reborn }));
    assert!(matches!(outcome, Outcome::Granted { .. }), "{outcome:?}");
    let nobody = DrainWorker { worker: WorkerId(9), draining: DrainFlag::Yes };
    assert_eq!(bench.run(Command::DrainWorker(nobody)), Outcome::Refused(Refusal::UnknownWorker));
}

#[test]
fn a_draining_worker_adopts_no_orphaned_artifacts() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 2));
    bench.expire_lease(2);
    bench.run(register(1, 1));
    bench.run(Command::DrainWorker(DrainWorker { worker: WorkerId(1), draining: DrainFlag::Yes }));
    bench.step(step(1, &chain(&[('a', 60)]), 30, 1));
    let path: Vec<_> = bench.ledger.artifacts().map(|extent| (extent.end().blocks.0, extent.owner)).collect();
    assert!(path.contains(&(30, Some(owner(2)))) && path.contains(&(60, Some(owner(1)))), "{path:?}");
}

#[test]
fn a_tenant_over_its_quota_seals_and_opens_nothing_new() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 64), ('b', 10)]), 0, 1));
    assert_eq!(bench.ledger.usage(&tenant()), TenantUsage { artifacts: 1, sessions: 1 });
    assert_eq!(bench.run(quota(Some(1))), Outcome::Done);
    let refused = Refusal::QuotaExceeded { quota: 1 };
    let text = chain(&[('a', 64), ('c', 10)]);
    let outcome = bench.run(Command::commit_step(step(2, &text, 0, 1)).unwrap());
    assert_eq!(outcome.refusals()[..2], [&refused, &refused]);
    assert!(!StepCommitOutcome::of(&outcome).restart_from_root, "from the root it is no less beyond the quota");
    // What the worker already owns may still grow.
    assert!(bench.step(step(1, &chain(&[('a', 64), ('b', 40)]), 74, 1)).sealed);
    assert_eq!(bench.run(quota(Some(2))), Outcome::Done);
    assert!(bench.step(step(2, &text, 0, 1)).sealed);
    let other = StepCommit { tenant: &TenantId("other".into()), ..step(3, &text, 0, 1) };
    assert!(bench.step(other).sealed, "another tenant has its own");
    assert_eq!(bench.run(quota(None)), Outcome::Done);
    assert_eq!((bench.ledger.quota(&tenant()), bench.ledger.quotas().count()), (None, 0));
    assert!(bench.step(step(4, &chain(&[('d', 9)]), 0, 1)).sealed);
}

#[test]
fn limits_only_widen() {
    let mut bench = LedgerFixture::new();
    let wide = LedgerLimits { artifacts: 1 << 24, ..*bench.ledger.limits() };
    assert_eq!(bench.run(Command::SetLimits(Box::new(wide))), Outcome::Done);
    assert_eq!(bench.ledger.limits(), &wide);
    let narrow = LedgerLimits { sessions: 1, ..wide };
    assert_eq!(bench.run(Command::SetLimits(Box::new(narrow))), Outcome::Refused(Refusal::InvalidLimits));
    assert_eq!(bench.ledger.limits(), &wide);
}

#[test]
fn changes_list_each_record_once_in_its_current_state() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    let extent = bench.head_artifact(session(1)).id;
    let put = |key| RecordUpdate { key, op: ChangeOp::Put };
    assert_eq!(bench.ledger.take_changes().len(), 2, "a session and an extent");
    assert_eq!(bench.ledger.take_changes(), []);
    bench.run(Command::CloseSession(session(1)));
    let gone = RecordUpdate { key: RecordKey::Session(session(1)), op: ChangeOp::Removed };
    assert_eq!(bench.ledger.take_changes(), [gone, put(RecordKey::Artifact(extent))]);
    bench.run(Command::Batch(vec![Command::Evict(extent), quota(Some(9)), admit(3, "a:1")]));
    let evicted = RecordUpdate { key: RecordKey::Artifact(extent), op: ChangeOp::Removed };
    assert_eq!(
        bench.ledger.take_changes(),
        [evicted, put(RecordKey::Quota(tenant())), put(RecordKey::Node(NodeId(2)))]
    );
}

#[test]
fn lease_expiry_is_a_change_and_renewal_is_not() {
    let mut bench = LedgerFixture::new();
    let alive = vec![(WorkerId(1), Incarnation(1))];
    bench.run(Command::RenewLease(RenewLease { alive, ttl: TTL }));
    assert_eq!(bench.ledger.take_changes(), []);
    bench.expire_lease(1);
    assert_eq!(bench.ledger.take_changes(), [RecordUpdate { key: RecordKey::Worker(WorkerId(1)), op: ChangeOp::Put }]);
    bench.run(register(1, 1));
    assert_eq!(bench.ledger.take_changes().len(), 1);
}

#[test]
fn untaken_changes_are_dropped_at_the_next_entry() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    bench.entry(Micros(1), Vec::new());
    assert_eq!(bench.ledger.take_changes(), []);
    bench.step(step(2, &chain(&[('b', 30)]), 0, 1));
    assert_eq!(bench.ledger.clone().take_changes(), [], "a view has none");
    bench.ledger.apply_empty(1_000);
    assert_eq!(bench.ledger.take_changes(), []);
}

#[test]
fn a_restored_ledger_outranks_every_grant_of_the_lost_cluster() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 30)]);
    bench.step(step(1, &one, 0, 1));
    bench.run(quota(Some(9)));
    bench.run(admit(7, "a:1"));
    let restored = bench.ledger.restored(RestoreBaseline { applied: 3, clock: LedgerTime(1_000_000), generation: 0 });
    invariants::check(&restored).unwrap();
    assert_eq!((restored.generation(), restored.applied(), restored.now()), (1, 3, LedgerTime(1_000_000)));
    let lost = Epoch { generation: 0, index: u64::MAX, position: u32::MAX };
    assert!(restored.sessions().all(|session| session.epoch > lost));
    assert!(restored.artifacts().all(|artifact| artifact.epoch > lost));
    assert!(restored.workers().all(|worker| worker.epoch > lost && worker.is_live()));
    assert_eq!((restored.quota(&tenant()), restored.nodes().count()), (Some(9), 1));
    // Clients start over, because outcomes after the backup are unknown.
    bench.ledger = restored;
    assert_eq!(bench.run(register(1, 1)), Outcome::Refused(Refusal::UnknownClient));
    assert_eq!(bench.run(Command::OpenClient(NodeId(1))), Outcome::Done);
    assert!(bench.step(step(1, &chain(&[('a', 60)]), 30, 1)).sealed);
    let back = bench.ledger.restored(RestoreBaseline::default());
    assert_eq!((back.generation(), back.now()), (2, bench.ledger.now()), "the clock never runs backwards");
    // Of two restores of one backup, the later one outranks all grants of the earlier one's cluster.
    let at = |generation| bench.ledger.restored(RestoreBaseline { generation, ..RestoreBaseline::default() });
    let (first, second) = (at(1_800_000_000), at(1_800_000_001));
    let granted = Epoch { generation: first.generation(), index: u64::MAX, position: u32::MAX };
    assert!(second.workers().all(|worker| worker.epoch > granted));
    assert_eq!(
        first.restored(RestoreBaseline::default()).generation(),
        1_800_000_001,
        "also by a clock that stands still"
    );
}
