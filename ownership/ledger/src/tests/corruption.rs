//! Tests that the invariant checks can fail: each check is given a state or a transition that violates it.

use std::collections::BTreeSet;

use vocabulary::{ArtifactGroupId, ArtifactId};

use super::*;
use crate::clients::OutcomeLimits;
use crate::cluster_records::ClusterRecords;
use crate::ledger::LedgerIndexes;

type LedgerCorruption = fn(&CorruptionFixture, &mut Ledger);

/// A valid state, and the ids of the records to corrupt.
struct CorruptionFixture {
    valid: Ledger,
    shared: Artifact,
    child: Artifact,
    session: Session,
}

impl CorruptionFixture {
    /// Creates two sessions that share an artifact, one of which has a child, and a third worker with a copy.
    fn new() -> Self {
        let mut bench = LedgerFixture::new();
        bench.step(step(1, &chain(&[('a', 70)]), 0, 1));
        let forked = chain(&[('a', 64), ('b', 9)]);
        bench.step(step(2, &forked, 0, 2));
        let copy = ReplicateReadonly { place: prefix_ref(&forked, 73), holder: owner(3), ttl: TTL };
        assert_eq!(bench.run(Command::ReplicateReadonly(copy)), Outcome::Done);
        bench.run(Command::AdmitNode(AdmitNode { nonce: 7, address: "a:1".into() }));
        bench.run(Command::RetireNode(NodeId(2)));
        let (shared, child) = (bench.head_artifact(session(1)), bench.head_artifact(session(2)));
        let session = bench.session(session(2));
        invariants::check(&bench.ledger).unwrap();
        Self { valid: bench.ledger, shared, child, session }
    }

    fn corrupted_by(&self, fault: LedgerCorruption) -> Ledger {
        let mut bad = self.valid.clone();
        fault(self, &mut bad);
        bad
    }
}

/// Writes a record directly, bypassing the table writers, with matching indexes.
fn put_artifact(ledger: &mut Ledger, artifact: Artifact) {
    ledger.records.artifacts.insert(&artifact);
    ledger.index = LedgerIndexes::of(&ledger.records);
}

fn put_session(ledger: &mut Ledger, session: Session) {
    ledger.records.sessions.insert(&session);
    ledger.index = LedgerIndexes::of(&ledger.records);
}

fn put_worker(ledger: &mut Ledger, lease: WorkerLease) {
    let worker = ledger.worker(WorkerId(1)).unwrap().clone();
    ledger.records.workers.insert(worker.id, Arc::new(Worker { lease, ..worker }));
    ledger.index = LedgerIndexes::of(&ledger.records);
}

fn cluster(ledger: &mut Ledger) -> &mut ClusterRecords {
    ledger.records.cluster.as_mut().expect("the level was raised")
}

/// Corruptions that violate the state checks, by check.
const STATE_CORRUPTIONS: &[(&str, LedgerCorruption)] = &[
    ("indexes follow from the records", |_, ledger| ledger.index.usage.clear()),
    ("the digest follows from the records", |_, ledger| ledger.records.artifacts.digest ^= 1),
    ("expiry index and lease table are inverses", |_, ledger| ledger.index.leases.clear()),
    ("references equal what is referenced", |planted, ledger| {
        put_artifact(ledger, Artifact { sessions: RefSet::default(), ..planted.shared.clone() });
    }),
    ("the fork graph is acyclic", |planted, ledger| {
        let parent = Some(ParentPoint { artifact: planted.child.id, at: planted.child.end() });
        put_artifact(ledger, Artifact { parent, ..planted.shared.clone() });
    }),
    ("a boundary is kept by one extent", |planted, ledger| {
        let first = planted.shared.boundaries[0];
        ledger.index.boundaries.remove(first.point.id, scope(), planted.shared.id);
    }),
    ("waypoints are kept without a gap", |planted, ledger| {
        put_artifact(
            ledger,
            Artifact { boundaries: planted.shared.boundaries[1..].to_vec(), ..planted.shared.clone() },
        );
    }),
    ("a copy's digest equals the sealed digest", |planted, ledger| {
        let upto = PrefixPoint { id: PrefixId(5), ..planted.child.end() };
        let copy = Replica { holder: owner(3), upto, expires: LedgerTime(99) };
        put_artifact(ledger, Artifact { replicas: vec![copy], ..planted.child.clone() });
    }),
    ("no head is an ancestor of another", |planted, ledger| {
        let head = planted.session.heads[0];
        let at = planted.shared.boundaries[0].point;
        let ancestor = SessionHead { point: at, artifact: planted.shared.id, ..head };
        put_session(ledger, Session { heads: vec![ancestor, head], ..planted.session.clone() });
    }),
    ("nothing is shared across tenants", |planted, ledger| {
        let origin = ChainDescriptor { tenant: TenantId("x".into()), ..(*planted.child.origin).clone() };
        put_artifact(ledger, Artifact { origin: origin.into(), ..planted.child.clone() });
    }),
    ("every grant lies in the past", |planted, ledger| {
        put_artifact(ledger, Artifact { epoch: Epoch { index: 1_000, ..Epoch::default() }, ..planted.shared.clone() });
    }),
    ("every table is bounded", |_, ledger| ledger.records.limits.artifacts = 1),
];

/// Corruptions that violate the transition checks, by check.
const STEP_CORRUPTIONS: &[(&str, LedgerCorruption)] = &[
    ("one owner per epoch", |planted, ledger| {
        put_artifact(ledger, Artifact { owner: Some(owner(3)), ..planted.shared.clone() })
    }),
    ("fencing tokens rise", |planted, ledger| {
        put_session(ledger, Session { epoch: Epoch::default(), owner: None, ..planted.session.clone() });
    }),
    ("no lease revives without a new grant", |_, ledger| {
        put_worker(ledger, WorkerLease::Held { until: LedgerTime(9) })
    }),
    ("no lease ends early", |_, ledger| put_worker(ledger, WorkerLease::Expired { at: ledger.now() })),
    ("a sealed artifact never changes", |planted, ledger| {
        let moved = PrefixBoundary {
            point: PrefixPoint { id: PrefixId(5), ..planted.child.end() },
            ..planted.child.boundaries[0]
        };
        put_artifact(ledger, Artifact { boundaries: vec![moved], ..planted.child.clone() });
    }),
    ("the clock never runs backwards", |_, ledger| ledger.records.clock = LedgerTime(0)),
    ("the feature level never falls", |_, ledger| cluster(ledger).level = 1),
    ("node ids are never reused", |_, ledger| {
        let node = ledger.node(NodeId(2)).unwrap().clone();
        let membership = NodeLifecycle::Admitted { at: LedgerTime(0) };
        cluster(ledger).nodes.insert(node.id, Arc::new(Node { membership, ..node }));
    }),
    ("a replayed serial returns the first outcome", |_, ledger| {
        let client = ledger.records.clients.get_mut(&CLIENT).unwrap();
        client.record_outcome(
            ClientSerial(1),
            Outcome::Forgotten,
            OutcomeLimits { max_outcomes: 1_024, max_bytes: u64::MAX },
        );
    }),
];

fn check_names<T>(checks: &[(&'static str, T)]) -> BTreeSet<&'static str> {
    checks.iter().map(|(name, _)| *name).collect()
}

#[test]
fn every_invariant_check_has_a_corruption_case() {
    assert_eq!(check_names(STATE_CORRUPTIONS), check_names(invariants::STATE));
    assert_eq!(check_names(STEP_CORRUPTIONS), check_names(invariants::STEP));
}

#[test]
fn every_state_check_finds_its_corruption_and_passes_a_good_state() {
    let planted = CorruptionFixture::new();
    for (name, check) in invariants::STATE {
        let (_, fault) = STATE_CORRUPTIONS.iter().find(|(fault, _)| fault == name).unwrap();
        assert_eq!(check(&planted.valid), Ok(()), "{name}");
        assert!(check(&planted.corrupted_by(*fault)).is_err(), "{name}");
        assert!(invariants::check(&planted.corrupted_by(*fault)).is_err(), "{name}");
    }
}

#[test]
fn every_step_check_finds_its_corruption_and_passes_a_good_step() {
    let planted = CorruptionFixture::new();
    for (name, check) in invariants::STEP {
        let (_, fault) = STEP_CORRUPTIONS.iter().find(|(fault, _)| fault == name).unwrap();
        assert_eq!(check(&planted.valid, &planted.valid), Ok(()), "{name}");
        // A lease can only revive after it has ended.
        let mut before = planted.valid.clone();
        if name.contains("revives") {
            put_worker(&mut before, WorkerLease::Expired { at: LedgerTime(1) });
        }
        let violation = check(&before, &planted.corrupted_by(*fault));
        assert!(violation.is_err(), "{name}");
        let all = invariants::check_step(&before, &planted.corrupted_by(*fault)).unwrap_err();
        assert!(check_names(invariants::STEP).contains(all.invariant), "{all}");
    }
}

#[test]
fn unreported_and_invented_changes_are_violations() {
    let planted = CorruptionFixture::new();
    let mut after = planted.valid.clone();
    after.put_session(Session { owner: None, ..planted.session.clone() });
    let told = after.pending_changes();
    entry_changes::check_changes(&planted.valid, &after, &told).unwrap();
    let silent = entry_changes::check_changes(&planted.valid, &after, &[]).unwrap_err();
    assert_eq!(silent.invariant, "every change is told, and nothing else");
    let wrong = told.iter().map(|change| RecordUpdate { op: ChangeOp::Removed, ..change.clone() }).collect::<Vec<_>>();
    assert!(entry_changes::check_changes(&planted.valid, &after, &wrong).is_err());
    let made_up = [RecordUpdate { key: RecordKey::Artifact(ArtifactId(1)), op: ChangeOp::Put }];
    assert!(entry_changes::check_changes(&planted.valid, &planted.valid, &made_up).is_err());
}

#[test]
fn a_violation_names_the_invariant_and_the_record() {
    let planted = CorruptionFixture::new();
    let bad = planted.corrupted_by(|planted, ledger| {
        put_artifact(
            ledger,
            Artifact { group: Some(ArtifactGroupId(1)), children: RefSet::default(), ..planted.shared.clone() },
        );
    });
    let violation = invariants::check(&bad).unwrap_err();
    let text = violation.to_string();
    assert!(text.starts_with("references equal what is referenced: "), "{text}");
    assert!(text.contains(&planted.shared.id.to_string()), "{text}");
}
