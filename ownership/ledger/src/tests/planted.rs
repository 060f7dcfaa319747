//! The checks must be able to fail: each is shown a state or a step that breaks what it names, and finds it.

use std::collections::BTreeSet;

use vocabulary::{ArtifactId, GroupId};

use super::*;
use crate::clients::Keep;
use crate::ledger::Indexes;
use crate::node::Cluster;

type Fault = fn(&Planted, &mut Ledger);

/// A good state, and what of it the faults damage.
struct Planted {
    good: Ledger,
    shared: Artifact,
    child: Artifact,
    session: Session,
}

impl Planted {
    /// Two sessions that share an extent, of which one has a child, and a third worker with a copy.
    fn new() -> Self {
        let mut bench = Bench::new();
        bench.step(step(1, &chain(&[('a', 70)]), 0, 1));
        let forked = chain(&[('a', 64), ('b', 9)]);
        bench.step(step(2, &forked, 0, 2));
        let copy = ReplicateReadonly { place: place(&forked, 73), holder: owner(3), ttl: TTL };
        assert_eq!(bench.run(Command::ReplicateReadonly(copy)), Outcome::Done);
        bench.run(Command::AdmitNode(AdmitNode { nonce: 7, address: "a:1".into() }));
        bench.run(Command::RetireNode(NodeId(2)));
        let (shared, child) = (bench.extent(session(1)), bench.extent(session(2)));
        let session = bench.session(session(2));
        invariants::check(&bench.ledger).unwrap();
        Self { good: bench.ledger, shared, child, session }
    }

    fn broken_by(&self, fault: Fault) -> Ledger {
        let mut bad = self.good.clone();
        fault(self, &mut bad);
        bad
    }
}

/// Writes a record past the tables' writers, with indexes to match.
fn put(ledger: &mut Ledger, artifact: Artifact) {
    ledger.records.artifacts.insert(&artifact);
    ledger.index = Indexes::of(&ledger.records);
}

fn put_session(ledger: &mut Ledger, session: Session) {
    ledger.records.sessions.insert(&session);
    ledger.index = Indexes::of(&ledger.records);
}

fn put_worker(ledger: &mut Ledger, lease: Lease) {
    let worker = ledger.worker(WorkerId(1)).unwrap().clone();
    ledger.records.workers.insert(worker.id, Arc::new(Worker { lease, ..worker }));
    ledger.index = Indexes::of(&ledger.records);
}

fn cluster(ledger: &mut Ledger) -> &mut Cluster {
    ledger.records.cluster.as_mut().expect("the level was raised")
}

/// What breaks each check of a state.
const STATES: &[(&str, Fault)] = &[
    ("indexes follow from the records", |_, ledger| ledger.index.usage.clear()),
    ("the digest follows from the records", |_, ledger| ledger.records.artifacts.digest ^= 1),
    ("expiry index and lease table are inverses", |_, ledger| ledger.index.leases.clear()),
    ("references equal what is referenced", |planted, ledger| {
        put(ledger, Artifact { sessions: Refs::default(), ..planted.shared.clone() });
    }),
    ("the fork graph is acyclic", |planted, ledger| {
        let parent = Some(Attached { artifact: planted.child.id, at: planted.child.end() });
        put(ledger, Artifact { parent, ..planted.shared.clone() });
    }),
    ("a boundary is kept by one extent", |planted, ledger| {
        let first = planted.shared.boundaries[0];
        ledger.index.boundaries.remove(first.point.id, scope(), planted.shared.id);
    }),
    ("waypoints are kept without a gap", |planted, ledger| {
        put(ledger, Artifact { boundaries: planted.shared.boundaries[1..].to_vec(), ..planted.shared.clone() });
    }),
    ("a copy's digest equals the sealed digest", |planted, ledger| {
        let upto = Point { id: PrefixId(5), ..planted.child.end() };
        let copy = Replica { holder: owner(3), upto, expires: LedgerTime(99) };
        put(ledger, Artifact { replicas: vec![copy], ..planted.child.clone() });
    }),
    ("no head is an ancestor of another", |planted, ledger| {
        let head = planted.session.heads[0];
        let at = planted.shared.boundaries[0].point;
        let ancestor = Head { point: at, artifact: planted.shared.id, ..head };
        put_session(ledger, Session { heads: vec![ancestor, head], ..planted.session.clone() });
    }),
    ("nothing is shared across tenants", |planted, ledger| {
        let origin = Origin { tenant: TenantId("x".into()), ..(*planted.child.origin).clone() };
        put(ledger, Artifact { origin: origin.into(), ..planted.child.clone() });
    }),
    ("every grant lies in the past", |planted, ledger| {
        put(ledger, Artifact { epoch: Epoch { index: 1_000, ..Epoch::default() }, ..planted.shared.clone() });
    }),
    ("every table is bounded", |_, ledger| ledger.records.limits.artifacts = 1),
];

/// What breaks each check of a step.
const STEPS: &[(&str, Fault)] = &[
    ("one owner per epoch", |planted, ledger| {
        put(ledger, Artifact { owner: Some(owner(3)), ..planted.shared.clone() })
    }),
    ("fencing tokens rise", |planted, ledger| {
        put_session(ledger, Session { epoch: Epoch::default(), owner: None, ..planted.session.clone() });
    }),
    ("no lease revives without a new grant", |_, ledger| put_worker(ledger, Lease::Held { until: LedgerTime(9) })),
    ("no lease ends early", |_, ledger| put_worker(ledger, Lease::Expired { at: ledger.now() })),
    ("a sealed artifact never changes", |planted, ledger| {
        let moved = Boundary { point: Point { id: PrefixId(5), ..planted.child.end() }, ..planted.child.boundaries[0] };
        put(ledger, Artifact { boundaries: vec![moved], ..planted.child.clone() });
    }),
    ("the clock never runs backwards", |_, ledger| ledger.records.clock = LedgerTime(0)),
    ("the feature level never falls", |_, ledger| cluster(ledger).level = 1),
    ("node ids are never reused", |_, ledger| {
        let node = ledger.node(NodeId(2)).unwrap().clone();
        let membership = Membership::Admitted { at: LedgerTime(0) };
        cluster(ledger).nodes.insert(node.id, Arc::new(Node { membership, ..node }));
    }),
    ("a replayed serial returns the first outcome", |_, ledger| {
        let client = ledger.records.clients.get_mut(&CLIENT).unwrap();
        client.remember(ClientSerial(1), Outcome::Forgotten, Keep { outcomes: 1_024, bytes: u64::MAX });
    }),
];

fn names<T>(checks: &[(&'static str, T)]) -> BTreeSet<&'static str> {
    checks.iter().map(|(name, _)| *name).collect()
}

#[test]
fn every_check_has_a_planted_fault() {
    assert_eq!(names(STATES), names(invariants::STATE));
    assert_eq!(names(STEPS), names(invariants::STEP));
}

#[test]
fn every_check_of_a_state_finds_its_fault_and_only_in_the_broken_state() {
    let planted = Planted::new();
    for (name, check) in invariants::STATE {
        let (_, fault) = STATES.iter().find(|(fault, _)| fault == name).unwrap();
        assert_eq!(check(&planted.good), Ok(()), "{name}");
        assert!(check(&planted.broken_by(*fault)).is_err(), "{name}");
        assert!(invariants::check(&planted.broken_by(*fault)).is_err(), "{name}");
    }
}

#[test]
fn every_check_of_a_step_finds_its_fault_and_only_in_the_broken_step() {
    let planted = Planted::new();
    for (name, check) in invariants::STEP {
        let (_, fault) = STEPS.iter().find(|(fault, _)| fault == name).unwrap();
        assert_eq!(check(&planted.good, &planted.good), Ok(()), "{name}");
        // A lease must have ended before it can revive.
        let mut before = planted.good.clone();
        if name.contains("revives") {
            put_worker(&mut before, Lease::Expired { at: LedgerTime(1) });
        }
        let violation = check(&before, &planted.broken_by(*fault));
        assert!(violation.is_err(), "{name}");
        let all = invariants::check_step(&before, &planted.broken_by(*fault)).unwrap_err();
        assert!(names(invariants::STEP).contains(all.invariant), "{all}");
    }
}

#[test]
fn a_change_that_is_not_told_is_found_and_so_is_one_that_is_made_up() {
    let planted = Planted::new();
    let mut after = planted.good.clone();
    after.put_session(Session { owner: None, ..planted.session.clone() });
    let told = after.changed();
    told::check_changes(&planted.good, &after, &told).unwrap();
    let silent = told::check_changes(&planted.good, &after, &[]).unwrap_err();
    assert_eq!(silent.invariant, "every change is told, and nothing else");
    let wrong = told.iter().map(|change| Changed { op: Op::Gone, ..change.clone() }).collect::<Vec<_>>();
    assert!(told::check_changes(&planted.good, &after, &wrong).is_err());
    let made_up = [Changed { key: Key::Artifact(ArtifactId(1)), op: Op::Put }];
    assert!(told::check_changes(&planted.good, &planted.good, &made_up).is_err());
}

#[test]
fn a_violation_names_the_invariant_and_the_place() {
    let planted = Planted::new();
    let bad = planted.broken_by(|planted, ledger| {
        put(ledger, Artifact { group: Some(GroupId(1)), children: Refs::default(), ..planted.shared.clone() });
    });
    let violation = invariants::check(&bad).unwrap_err();
    let text = violation.to_string();
    assert!(text.starts_with("references equal what is referenced: "), "{text}");
    assert!(text.contains(&planted.shared.id.to_string()), "{text}");
}
