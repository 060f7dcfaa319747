//! Generated command sequences: every invariant after every entry, and the same sequence twice is the same to the bit.

use proptest::prelude::*;
use vocabulary::GroupId;

use super::*;

/// Tables small enough to overflow.
const TIGHT: Limits = Limits {
    workers: 4,
    sessions: 6,
    artifacts: 12,
    heads: 3,
    replicas: 2,
    intents: 4,
    clients: 3,
    outcomes: 6,
    batch: 8,
    sweep: 4,
    session_idle: Micros(30_000_000),
    artifact_idle: Micros(10_000_000),
};

/// Texts that share prefixes at and between waypoints.
fn text() -> impl Strategy<Value = Chain> {
    let part = (prop::sample::select(vec!['a', 'b']), prop::sample::select(vec![1, 3, 20, 64, 90]));
    prop::collection::vec(part, 1..4).prop_map(|parts| {
        // The letter of each part is offset by its place, so that equal starts are equal and the rest is not.
        let parts: Vec<_> =
            parts.iter().enumerate().map(|(i, (c, n))| ((*c as u8 + 2 * i as u8) as char, *n)).collect();
        chain(&parts)
    })
}

fn owners() -> impl Strategy<Value = Owner> {
    (1..5u64, 1..3u64, 0..3u16).prop_map(|(worker, incarnation, rank)| Owner {
        worker: WorkerId(worker),
        incarnation: Incarnation(incarnation),
        rank: DpRank(rank),
    })
}

/// What a command is, before it is filled in with what a writer would have seen.
#[derive(Clone, Debug)]
enum Wish {
    Step { session: u128, text: Chain, base: u64, owner: Owner, custody: u8, rewrite: bool },
    Lifecycle { session: u128, other: u128, text: Chain, kind: u8 },
    Copy { text: Chain, holder: Owner, ttl: u64, drop: bool },
    Worker { worker: u64, incarnation: u64, kind: u8 },
    Owner { session: u128, owner: Owner, kind: u8 },
}

fn wish() -> impl Strategy<Value = Wish> {
    prop_oneof![
        8 => (0..8u128, text(), 0..200u64, owners(), 0..3u8, any::<bool>()).prop_map(
            |(session, text, base, owner, custody, rewrite)| Wish::Step { session, text, base, owner, custody, rewrite }),
        3 => (0..8u128, 0..8u128, text(), 0..5u8)
            .prop_map(|(session, other, text, kind)| Wish::Lifecycle { session, other, text, kind }),
        2 => (text(), owners(), 1..20_000_000u64, any::<bool>())
            .prop_map(|(text, holder, ttl, drop)| Wish::Copy { text, holder, ttl, drop }),
        4 => (1..6u64, 1..4u64, 0..4u8).prop_map(|(worker, incarnation, kind)| Wish::Worker { worker, incarnation, kind }),
        3 => (0..8u128, owners(), 0..4u8).prop_map(|(session, owner, kind)| Wish::Owner { session, owner, kind }),
    ]
}

/// The command that a writer who looks at `ledger` would send.
fn command(ledger: &Ledger, wish: &Wish) -> Command {
    match wish {
        Wish::Step { session: id, text, base, owner, custody, rewrite } => {
            let seen = ledger.session(session(*id)).map_or(Epoch::default(), |session| session.epoch);
            let query = Query { scope: scope(), session: Some(session(*id)), chain: text, preamble: Blocks(0) };
            let located = ledger.locate(query);
            let custody = [Custody::Stays, Custody::Claims, Custody::Moves { seen }][*custody as usize % 3];
            let base = if *base > 100 { located.known() } else { Blocks(*base).min(text.blocks()) };
            let replaces = located.rewrites().filter(|_| *rewrite);
            let commit = StepCommit { owner: *owner, custody, base, replaces, ..step(*id, text, 0, 1) };
            Command::commit_step(commit).expect("texts have blocks")
        }
        Wish::Lifecycle { session: id, other, text, kind } => lifecycle(session(*id), session(*other), text, *kind),
        Wish::Copy { text, holder, ttl, drop } => {
            let scope = scope();
            let place = ledger.deepest(scope, text).map_or(place(text, 1), |(point, artifact)| Place {
                scope,
                point,
                extent: Some(artifact.id),
            });
            match drop {
                true => Command::DropReplica(DropReplica { place, holder: *holder }),
                false => Command::ReplicateReadonly(ReplicateReadonly { place, holder: *holder, ttl: Micros(*ttl) }),
            }
        }
        Wish::Worker { worker, incarnation, kind } => worker_command(ledger, *worker, *incarnation, *kind),
        Wish::Owner { session: id, owner, kind } => {
            let session = ledger.session(session(*id));
            let artifact = session.and_then(Session::head).map(|head| Subject::Artifact(head.artifact));
            let subject = artifact.filter(|_| kind % 2 == 0).unwrap_or(Subject::Session(SessionId(*id)));
            let seen = session.map_or(Epoch::default(), |session| session.epoch);
            match kind {
                0 | 1 => Command::ClaimOwner(ClaimOwner { subject, owner: *owner }),
                _ => Command::Release(Release { subject, owner: *owner, seen }),
            }
        }
    }
}

fn lifecycle(session: SessionId, other: SessionId, text: &Chain, kind: u8) -> Command {
    let at = place(text, text.blocks().0);
    match kind {
        0 => Command::CloseSession(session),
        1 => Command::Fork(Fork { parent: session, child: other, at }),
        2 => Command::Advance(Advance { session, head: at, replaces: None, intent: None }),
        3 => Command::SetGroup(SetGroup { artifact: vocabulary::ArtifactId(session.0), group: Some(GroupId(1)) }),
        _ => Command::Intent(SetIntent {
            session,
            base: text.root,
            router: NodeId(other.0 as u64),
            step: (!other.0.is_multiple_of(3)).then_some((owner(1), Micros(1_000_000 * other.0 as u64))),
        }),
    }
}

fn worker_command(ledger: &Ledger, worker: u64, incarnation: u64, kind: u8) -> Command {
    let known = ledger.worker(WorkerId(worker));
    match (kind, known.map(|known| (known.epoch, known.lease))) {
        (0, Some((epoch, Lease::Held { until }))) => {
            Command::Expire(Expire { worker: WorkerId(worker), epoch, deadline: until })
        }
        (1, _) => Command::RenewLease(RenewLease {
            alive: (1..=worker).map(|n| (WorkerId(n), Incarnation(incarnation))).collect(),
            ttl: TTL,
        }),
        (2, _) if incarnation == 3 => Command::RetireWorker(WorkerId(worker)),
        _ => register(worker, incarnation),
    }
}

/// One entry: who writes with which serial, what, and how much later.
type Written = (Vec<(u128, u64, Wish)>, u64);

fn written() -> impl Strategy<Value = Written> {
    (prop::collection::vec((1..5u128, 0..60u64, wish()), 1..4), 0..3_000_000u64)
}

/// Runs a sequence, checking every invariant; returns the entries as they were, all outcomes, and the end.
fn play(sequence: &[Written]) -> (Vec<(u64, Entry)>, Vec<Vec<Outcome>>, Ledger) {
    let mut bench = Bench::empty(TIGHT);
    let opened = |client| Submission {
        client: ClientId(client),
        serial: ClientSerial(0),
        command: Command::OpenClient(NodeId(1)),
    };
    let mut ledger = bench.ledger.clone();
    let (mut log, mut outcomes) = (Vec::new(), Vec::new());
    for (n, (wishes, after)) in sequence.iter().enumerate() {
        let mut submissions: Vec<Submission> = wishes
            .iter()
            .map(|(client, serial, wish)| Submission {
                client: ClientId(*client),
                serial: ClientSerial(n as u64 + serial / 20),
                command: command(&ledger, wish),
            })
            .collect();
        if n % 10 == 0 {
            submissions.insert(0, opened(1 + n as u128 / 10 % 4));
        }
        log.push((
            bench.index + 1,
            Entry { time: ledger.now().after(Micros(*after)), submissions: submissions.clone() },
        ));
        outcomes.push(bench.entry(Micros(*after), submissions));
        ledger = bench.ledger.clone();
    }
    (log, outcomes, bench.ledger)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn invariants_hold_and_the_same_log_gives_the_same_bits(sequence in prop::collection::vec(written(), 1..60)) {
        let (log, outcomes, end) = play(&sequence);
        let mut replayed = Bench::empty(TIGHT).ledger;
        let mut through_snapshots = replayed.clone();
        for ((index, entry), expected) in log.iter().zip(&outcomes) {
            prop_assert_eq!(&replayed.apply(*index, entry), expected);
            let bytes = rmp_serde::to_vec(&through_snapshots).unwrap();
            through_snapshots = rmp_serde::from_slice(&bytes).unwrap();
            prop_assert_eq!(&through_snapshots.apply(*index, entry), expected);
        }
        prop_assert_eq!(&replayed, &end);
        prop_assert_eq!(replayed.state_hash(), end.state_hash());
        prop_assert_eq!(through_snapshots.state_hash(), end.state_hash());
        prop_assert_eq!(&through_snapshots, &end);
    }

    #[test]
    fn what_locate_finds_is_the_deepest_kept_prefix(
        sequence in prop::collection::vec(written(), 1..40),
        prompt in text(),
    ) {
        let (_, _, ledger) = play(&sequence);
        let kept = |blocks: u64| {
            let point = Point::on(&prompt, Blocks(blocks)).unwrap();
            ledger.artifacts().any(|a| a.boundaries.iter().any(|b| b.point == point))
        };
        let deepest = (1..=prompt.blocks().0).rev().find(|n| kept(*n)).unwrap_or(0);
        let query = Query { scope: scope(), session: None, chain: &prompt, preamble: Blocks(0) };
        prop_assert_eq!(ledger.locate(query).known(), Blocks(deepest));
    }
}

/// The checks must be able to fail: each is shown a state or a step that breaks it.
#[test]
fn planted_faults_are_found() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('a', 70)]), 0, 1));
    bench.step(step(2, &chain(&[('a', 64), ('b', 9)]), 0, 2));
    let good = bench.ledger.clone();
    let broken_by = |fault: &dyn Fn(&mut Ledger)| {
        let mut bad = good.clone();
        fault(&mut bad);
        let state = invariants::check(&bad).err();
        state.or(invariants::check_step(&good, &bad).err()).map(|violation| violation.invariant)
    };
    let (extent, child) = (bench.extent(session(1)).clone(), bench.extent(session(2)).clone());
    let put = |ledger: &mut Ledger, artifact: Artifact| {
        ledger.records.artifacts.insert(artifact.id, Arc::new(artifact));
        ledger.index = crate::ledger::Indexes::of(&ledger.records);
    };
    assert_eq!(broken_by(&|_| {}), None);
    assert_eq!(
        broken_by(&|l| {
            l.index.leases.clear();
        }),
        Some("indexes follow from the records")
    );
    assert_eq!(
        broken_by(&|l| put(l, Artifact { sessions: Refs::default(), ..extent.clone() })),
        Some("references equal what is referenced")
    );
    assert_eq!(
        broken_by(&|l| put(l, Artifact { owner: Some(owner(3)), ..extent.clone() })),
        Some("one owner per epoch")
    );
    assert_eq!(
        broken_by(&|l| put(l, Artifact { epoch: Epoch::default(), owner: None, ..extent.clone() })),
        Some("fencing tokens rise")
    );
    let later = Epoch { index: 1_000, ..Epoch::default() };
    assert_eq!(
        broken_by(&|l| put(l, Artifact { epoch: later, ..extent.clone() })),
        Some("every grant lies in the past")
    );
    assert_eq!(
        broken_by(&|l| put(l, Artifact { boundaries: extent.boundaries[1..].to_vec(), ..extent.clone() })),
        Some("the fork graph is acyclic")
    );
    let moved = Boundary { point: Point { id: PrefixId(5), ..child.end() }, ..child.boundaries[0] };
    assert_eq!(
        broken_by(&|l| put(l, Artifact { boundaries: vec![moved], ..child.clone() })),
        Some("a sealed artifact never changes")
    );
    assert_eq!(broken_by(&|l| l.records.clock = LedgerTime(0)), Some("the clock never runs backwards"));
    let copy = Replica { holder: owner(3), upto: moved.point, expires: LedgerTime(99) };
    assert_eq!(
        broken_by(&|l| put(l, Artifact { replicas: vec![copy], ..child.clone() })),
        Some("a copy's digest equals the sealed digest")
    );
    let foreign = Origin { tenant: TenantId("x".into()), ..child.origin.clone() };
    assert_eq!(
        broken_by(&|l| put(l, Artifact { origin: foreign.clone(), ..child.clone() })),
        Some("nothing is shared across tenants")
    );
    let ended = Worker { lease: Lease::Expired { at: good.now() }, ..good.worker(WorkerId(1)).unwrap().clone() };
    assert_eq!(broken_by(&|l| l.put_worker(ended.clone())), Some("no lease ends early"));
}

#[test]
fn a_clone_is_a_view_that_later_entries_do_not_touch() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('a', 70)]), 0, 1));
    let (view, hash) = (bench.ledger.clone(), bench.ledger.state_hash());
    bench.step(step(1, &chain(&[('a', 90)]), 70, 1));
    assert_eq!(view.state_hash(), hash);
    assert_ne!(bench.ledger.state_hash(), hash);
}
