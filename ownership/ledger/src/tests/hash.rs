//! Tests of the state hash: it covers all records and nothing else.

use vocabulary::{ArtifactGroupId, ArtifactId};

use super::*;
use crate::clients::OutcomeLimits;
use crate::ledger::LedgerIndexes;

type RecordMutation<R> = (&'static str, fn(&mut R));

/// Creates a ledger with something in every table.
fn populated_ledger() -> LedgerFixture {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 70)]), 0, 1));
    let forked = chain(&[('a', 64), ('b', 9)]);
    bench.step(step(2, &forked, 0, 2));
    let copy = ReplicateReadonly { place: prefix_ref(&forked, 73), holder: owner(3), ttl: TTL };
    bench.run(Command::ReplicateReadonly(copy));
    let intent = SetIntent { session: session(2), base: forked.head(), router: NodeId(1), step: Some((owner(2), TTL)) };
    bench.run(Command::Intent(intent));
    bench.run(Command::AdmitNode(AdmitNode { nonce: 7, address: "a:1".into() }));
    bench.run(Command::SetQuota(SetQuota { tenant: tenant(), artifacts: Some(9) }));
    bench
}

const ARTIFACT_MUTATIONS: &[RecordMutation<Artifact>] = &[
    ("tenant", |it| Arc::make_mut(&mut it.origin).tenant = TenantId("x".into())),
    ("model", |it| Arc::make_mut(&mut it.origin).model = ModelId::from("x")),
    ("root", |it| Arc::make_mut(&mut it.origin).root.0 ^= 1),
    ("format", |it| Arc::make_mut(&mut it.origin).shape.format.0 ^= 1),
    ("kinds", |it| Arc::make_mut(&mut it.origin).shape.kinds = KvKinds(2)),
    ("block", |it| Arc::make_mut(&mut it.origin).shape.block.0 ^= 1),
    ("block bytes", |it| Arc::make_mut(&mut it.origin).shape.block_bytes.0 ^= 1),
    ("no parent", |it| it.parent = None),
    ("parent", |it| it.parent.as_mut().unwrap().artifact.0 ^= 1),
    ("where it hangs on", |it| it.parent.as_mut().unwrap().at.id.0 ^= 1),
    ("a boundary", |it| it.boundaries[0].point.id.0 ^= 1),
    ("a boundary's place", |it| it.boundaries[0].point.blocks += Blocks(1)),
    ("a boundary's epoch", |it| it.boundaries[0].epoch.position += 1),
    ("no boundary", |it| it.boundaries.clear()),
    ("no owner", |it| it.owner = None),
    ("owner", |it| it.owner.as_mut().unwrap().worker.0 ^= 1),
    ("incarnation", |it| it.owner.as_mut().unwrap().incarnation.0 ^= 1),
    ("rank", |it| it.owner.as_mut().unwrap().rank.0 ^= 1),
    ("generation", |it| it.epoch.generation += 1),
    ("epoch", |it| it.epoch.index += 1),
    ("a session more", |it| assert!(it.sessions.insert(SessionId(77)))),
    ("no session", |it| it.sessions = RefSet::default()),
    ("a child more", |it| assert!(it.children.insert(ArtifactId(77)))),
    ("a copy's holder", |it| it.replicas[0].holder.rank.0 ^= 1),
    ("a copy's reach", |it| it.replicas[0].upto.blocks += Blocks(1)),
    ("a copy's end", |it| it.replicas[0].expires.0 += 1),
    ("no copy", |it| it.replicas.clear()),
    ("group", |it| it.group = Some(ArtifactGroupId(1))),
    ("touched", |it| it.touched.0 += 1),
    ("pinned", |it| it.pinned = ArtifactPinFlag::Yes),
];

const SESSION_MUTATIONS: &[RecordMutation<Session>] = &[
    ("tenant", |it| it.tenant = TenantId("x".into())),
    ("model", |it| it.model = ModelId::from("x")),
    ("parent", |it| it.parent = Some(SessionId(9))),
    ("a head", |it| it.heads[0].point.id.0 ^= 1),
    ("a head's extent", |it| it.heads[0].artifact.0 ^= 1),
    ("a head's time", |it| it.heads[0].touched.0 += 1),
    ("no head", |it| it.heads.clear()),
    ("owner", |it| it.owner = None),
    ("epoch", |it| it.epoch.position += 1),
    ("opened", |it| it.opened.0 += 1),
    ("touched", |it| it.touched.0 += 1),
];

const OTHER_MUTATIONS: &[RecordMutation<Ledger>] = &[
    ("a limit", |it| it.records.limits.sweep += 1),
    ("the generation", |it| it.records.generation += 1),
    ("the clock", |it| it.records.clock.0 += 1),
    ("the applied index", |it| it.records.applied += 1),
    ("a lease", |it| {
        let worker = it.worker(WorkerId(1)).unwrap().clone();
        it.put_worker(Worker { lease: WorkerLease::Expired { at: LedgerTime(1) }, ..worker });
    }),
    ("a drain", |it| {
        let worker = it.worker(WorkerId(1)).unwrap().clone();
        it.put_worker(Worker { draining: DrainFlag::Yes, ..worker });
    }),
    ("an intent", |it| it.put_intents(session(2), Vec::new())),
    ("an answer", |it| {
        it.records.clients.get_mut(&CLIENT).unwrap().record_outcome(
            ClientSerial(1),
            Outcome::Forgotten,
            OutcomeLimits { max_outcomes: 1_024, max_bytes: u64::MAX },
        );
    }),
    ("the level", |it| it.records.cluster.as_mut().unwrap().level += 1),
    ("a node", |it| drop(it.records.cluster.as_mut().unwrap().nodes.remove(&FOUNDER))),
    ("the last node id", |it| it.records.cluster.as_mut().unwrap().last_node.0 += 1),
    ("a quota", |it| it.records.cluster.as_mut().unwrap().quotas.clear()),
];

#[test]
fn the_state_hash_covers_every_field_of_every_record() {
    let bench = populated_ledger();
    let hash = bench.ledger.state_hash();
    let after = |flip: &dyn Fn(&mut Ledger)| {
        let mut other = bench.ledger.clone();
        flip(&mut other);
        other.state_hash()
    };
    let mut seen = std::collections::BTreeSet::from([hash]);
    for (field, flip) in ARTIFACT_MUTATIONS {
        let mut artifact = bench.head_artifact(session(2));
        flip(&mut artifact);
        assert!(seen.insert(after(&|ledger| ledger.records.artifacts.insert(&artifact))), "{field} of an extent");
    }
    for (field, flip) in SESSION_MUTATIONS {
        let mut record = bench.session(session(2));
        flip(&mut record);
        assert!(seen.insert(after(&|ledger| ledger.records.sessions.insert(&record))), "{field}");
    }
    for (field, flip) in OTHER_MUTATIONS {
        assert!(seen.insert(after(flip)), "{field}");
    }
}

#[test]
fn adding_and_removing_a_record_restores_the_state_hash() {
    let bench = populated_ledger();
    let mut ledger = bench.ledger.clone();
    let (artifact, record) = (bench.head_artifact(session(2)), bench.session(session(2)));
    ledger.records.artifacts.insert(&Artifact { id: ArtifactId(5), ..artifact.clone() });
    ledger.records.sessions.insert(&Session { id: SessionId(5), ..record });
    assert_ne!(ledger.state_hash(), bench.ledger.state_hash());
    ledger.records.artifacts.remove(ArtifactId(5));
    ledger.records.sessions.remove(SessionId(5));
    assert_eq!(ledger.state_hash(), bench.ledger.state_hash());
    ledger.records.artifacts.insert(&artifact);
    assert_eq!(ledger.state_hash(), bench.ledger.state_hash(), "the same record again");
}

#[test]
fn the_state_hash_survives_serialization_and_ignores_indexes() {
    let mut bench = populated_ledger();
    let read: Ledger = rmp_serde::from_slice(&rmp_serde::to_vec(&bench.ledger).unwrap()).unwrap();
    assert_eq!(read.state_hash(), bench.ledger.state_hash());
    let restored = bench.ledger.restored(RestoreBaseline::default());
    let read: Ledger = rmp_serde::from_slice(&rmp_serde::to_vec(&restored).unwrap()).unwrap();
    assert_eq!(read.state_hash(), restored.state_hash());
    assert_ne!(restored.state_hash(), bench.ledger.state_hash());
    let hash = bench.ledger.state_hash();
    bench.ledger.index = LedgerIndexes::default();
    assert_eq!(bench.ledger.state_hash(), hash);
    assert!(!bench.ledger.take_changes().is_empty());
    assert_eq!(bench.ledger.state_hash(), hash);
}
