//! Property tests: generated command sequences satisfy every invariant after every entry and are bit-for-bit
//! deterministic.

use proptest::prelude::*;
use vocabulary::ArtifactGroupId;

use super::*;

/// Limits that are small enough to overflow.
const SMALL_LIMITS: LedgerLimits = LedgerLimits {
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

/// Generates chains that share prefixes at waypoints and between them.
fn text() -> impl Strategy<Value = PrefixChain> {
    let part = (prop::sample::select(vec!['a', 'b']), prop::sample::select(vec![1, 3, 20, 64, 90]));
    prop::collection::vec(part, 1..4).prop_map(|parts| {
        // Letters are offset by the part's position, so that equal starts are equal and the rest differs.
        let parts: Vec<_> =
            parts.iter().enumerate().map(|(i, (c, n))| ((*c as u8 + 2 * i as u8) as char, *n)).collect();
        chain(&parts)
    })
}

/// Returns the usual conversation of a session: a start that several share, then its own blocks.
fn conversation(session: u128, blocks: u64) -> Vec<(char, u64)> {
    let shared = [30, 64, 130][session as usize % 3];
    let own = ['p', 'q'][session as usize / 3 % 2];
    vec![('a', shared.min(blocks)), (own, blocks.saturating_sub(shared))]
}

/// Kind of a session's next prompt.
#[derive(Clone, Debug)]
enum NextPrompt {
    Extends(u64),
    Rewrites(u64, u64),
    Arbitrary(PrefixChain),
}

fn next_prompt() -> impl Strategy<Value = NextPrompt> {
    prop_oneof![
        6 => (0..40u64).prop_map(NextPrompt::Extends),
        2 => (1..30u64, 1..20u64).prop_map(|(back, new)| NextPrompt::Rewrites(back, new)),
        2 => text().prop_map(NextPrompt::Arbitrary),
    ]
}

fn prompt(ledger: &Ledger, session: u128, prompt: &NextPrompt) -> PrefixChain {
    let head =
        ledger.session(SessionId(session)).and_then(|session| session.head()).map_or(0, |head| head.point.blocks.0);
    match prompt {
        NextPrompt::Extends(on) => chain(&conversation(session, (head + on).max(1))),
        NextPrompt::Rewrites(back, new) => {
            let mut parts = conversation(session, head.saturating_sub(*back).max(1));
            parts.push(('x', *new));
            chain(&parts)
        }
        NextPrompt::Arbitrary(text) => text.clone(),
    }
}

fn owners() -> impl Strategy<Value = Owner> {
    let incarnation = prop_oneof![9 => Just(1u64), 1 => Just(2u64)];
    let rank = prop_oneof![9 => Just(0u16), 1 => 1..3u16];
    (1..4u64, incarnation, rank).prop_map(|(worker, incarnation, rank)| Owner {
        worker: WorkerId(worker),
        incarnation: Incarnation(incarnation),
        rank: DpRank(rank),
    })
}

/// Kind of command, to be completed from what a writer would have seen.
#[derive(Clone, Debug)]
enum CommandDraft {
    Step { session: u128, turn: NextPrompt, owner: Option<Owner>, transition: u8, whim: u8 },
    Lifecycle { session: u128, other: u128, text: PrefixChain, kind: u8 },
    Copy { session: u128, at: u64, holder: Owner, ttl: u64, drop: bool },
    Worker { worker: u64, incarnation: u64, kind: u8 },
    Owner { session: u128, owner: Owner, kind: u8 },
    Control { session: u128, n: u64, kind: u8 },
}

fn command_draft() -> impl Strategy<Value = CommandDraft> {
    let elsewhere = prop::option::weighted(0.3, owners());
    prop_oneof![
        16 => (0..8u128, next_prompt(), elsewhere, 0..3u8, 0..8u8).prop_map(
            |(session, turn, owner, transition, whim)| CommandDraft::Step { session, turn, owner, transition, whim }),
        2 => (0..8u128, 0..8u128, text(), 0..5u8)
            .prop_map(|(session, other, text, kind)| CommandDraft::Lifecycle { session, other, text, kind }),
        2 => (0..8u128, 0..200u64, owners(), 1..20_000_000u64, any::<bool>())
            .prop_map(|(session, at, holder, ttl, drop)| CommandDraft::Copy { session, at, holder, ttl, drop }),
        3 => (1..6u64, 1..4u64, 0..6u8).prop_map(|(worker, incarnation, kind)| CommandDraft::Worker { worker, incarnation, kind }),
        2 => (0..8u128, owners(), 0..4u8).prop_map(|(session, owner, kind)| CommandDraft::Owner { session, owner, kind }),
        6 => (0..8u128, 0..12u64, 0..9u8).prop_map(|(session, n, kind)| CommandDraft::Control { session, n, kind }),
    ]
}

/// Builds the command that a writer who sees `ledger` would send.
fn command(ledger: &Ledger, wish: &CommandDraft) -> Command {
    match wish {
        CommandDraft::Step { session: id, turn, owner: elsewhere, transition, whim } => {
            let text = prompt(ledger, *id, turn);
            let session = ledger.session(session(*id));
            let usual = session.as_ref().and_then(|session| session.owner).unwrap_or(owner(1 + *id as u64 % 3));
            let seen = session.filter(|_| *whim != 1).map_or(Epoch::default(), |session| session.epoch);
            let query =
                LocateQuery { scope: scope(), session: Some(SessionId(*id)), chain: &text, shared_prefix: Blocks(0) };
            let located = ledger.locate(query);
            let transition =
                [OwnershipTransition::Unchanged, OwnershipTransition::Claim, OwnershipTransition::Migrate { seen }]
                    [*transition as usize % 3];
            // Sometimes the writer's view was stale.
            let base = match whim {
                2 => Blocks(0),
                3 => Blocks(text.blocks().0 / 2),
                _ => located.known_blocks(),
            };
            let replaces = located.replaced_head().filter(|_| *whim != 4);
            let owner = elsewhere.unwrap_or(usual);
            let commit =
                StepCommit { owner, ownership: transition, base, replaced_head: replaces, ..step(*id, &text, 0, 1) };
            Command::commit_step(commit).expect("texts have blocks")
        }
        CommandDraft::Lifecycle { session: id, other, text, kind } => {
            lifecycle(session(*id), session(*other), text, *kind)
        }
        CommandDraft::Copy { session: id, at, holder, ttl, drop } => {
            let text = chain(&conversation(*id, 200));
            let extent = ledger.session(session(*id)).and_then(|session| session.head()).map(|head| head.artifact);
            let kept = ledger.deepest_boundary(scope(), &text).map_or(1, |kept| kept.point.blocks.0);
            let place = PrefixRef { extent, ..prefix_ref(&text, if at % 2 == 0 { kept } else { *at }) };
            match drop {
                true => Command::DropReplica(DropReplica { place, holder: *holder }),
                false => Command::ReplicateReadonly(ReplicateReadonly { place, holder: *holder, ttl: Micros(*ttl) }),
            }
        }
        CommandDraft::Control { session: id, n, kind } => control(ledger, session(*id), *n, *kind),
        CommandDraft::Worker { worker, incarnation, kind } => worker_command(ledger, *worker, *incarnation, *kind),
        CommandDraft::Owner { session: id, owner, kind } => {
            let session = ledger.session(session(*id));
            let artifact = session
                .as_ref()
                .and_then(|session| session.head())
                .map(|head| OwnershipSubject::Artifact(head.artifact));
            let subject = artifact.filter(|_| kind % 2 == 0).unwrap_or(OwnershipSubject::Session(SessionId(*id)));
            let (owned, seen) = match subject {
                OwnershipSubject::Session(_) => session.map(|s| (s.owner, s.epoch)),
                OwnershipSubject::Artifact(id) => ledger.artifact(id).map(|a| (a.owner, a.epoch)),
            }
            .unwrap_or_default();
            match kind {
                0 | 1 => Command::ClaimOwner(ClaimOwner { subject, owner: *owner }),
                _ => Command::Release(ReleaseOwner { subject, owner: owned.unwrap_or(*owner), seen }),
            }
        }
    }
}

fn lifecycle(session: SessionId, other: SessionId, text: &PrefixChain, kind: u8) -> Command {
    let at = prefix_ref(text, text.blocks().0);
    match kind {
        0 => Command::CloseSession(session),
        1 => Command::Fork(ForkSession { parent: session, child: other, at }),
        2 => Command::Advance(AdvanceHead { session, head: at, replaces: None, intent: None }),
        3 => {
            Command::SetGroup(SetGroup { artifact: vocabulary::ArtifactId(session.0), group: Some(ArtifactGroupId(1)) })
        }
        _ => Command::Intent(SetIntent {
            session,
            base: text.root,
            router: NodeId(other.0 as u64),
            step: (!other.0.is_multiple_of(3)).then_some((owner(1), Micros(1_000_000 * other.0 as u64))),
        }),
    }
}

/// Builds an operator or cluster command, mostly about existing records.
fn control(ledger: &Ledger, session: SessionId, n: u64, kind: u8) -> Command {
    let head = ledger.session(session).and_then(|session| session.head()).map(|head| head.artifact);
    let idle = ledger.artifacts().find(|artifact| artifact.sessions.is_empty() && artifact.children.is_empty());
    let artifact = head.or(idle.as_ref().map(|artifact| artifact.id)).unwrap_or(vocabulary::ArtifactId(n.into()));
    let (pinned, draining) = match n % 3 {
        0 => (ArtifactPinFlag::Yes, DrainFlag::Yes),
        _ => (ArtifactPinFlag::No, DrainFlag::No),
    };
    match kind {
        0 => Command::AdmitNode(AdmitNode { nonce: 1 + u128::from(n % 3), address: format!("node-{n}:1").into() }),
        1 => Command::RetireNode(NodeId(n % 5)),
        2 => Command::RaiseLevel(1 + (n % 2) as u32 * NEXT_LEVEL),
        3 => Command::SetLimits(Box::new(LedgerLimits { workers: 3 + n as u32 % 2, ..*ledger.limits() })),
        4 => Command::Pin(PinArtifact { artifact, pinned }),
        5 => Command::Evict(idle.filter(|_| !n.is_multiple_of(3)).map_or(artifact, |idle| idle.id)),
        6 => Command::DrainWorker(DrainWorker { worker: WorkerId(n % 4), draining }),
        7 => Command::SetQuota(SetQuota { tenant: tenant(), artifacts: n.is_multiple_of(3).then_some(n) }),
        _ => Command::SetGroup(SetGroup { artifact, group: n.is_multiple_of(2).then_some(ArtifactGroupId(n.into())) }),
    }
}

fn worker_command(ledger: &Ledger, worker: u64, incarnation: u64, kind: u8) -> Command {
    let known = ledger.worker(WorkerId(worker));
    match (kind, known.map(|known| (known.epoch, known.lease))) {
        (0, Some((epoch, WorkerLease::Held { until }))) => {
            Command::ExpireLease(ExpireLease { worker: WorkerId(worker), epoch, deadline: until })
        }
        (1 | 2, _) => Command::RenewLease(RenewLease {
            alive: ledger.workers().map(|worker| (worker.id, worker.incarnation)).collect(),
            ttl: TTL,
        }),
        (3, Some((seen, _))) if incarnation == 2 => {
            Command::RetireLife(RetireIncarnation { worker: WorkerId(worker), seen })
        }
        (3, _) if incarnation == 3 => Command::RetireWorker(WorkerId(worker)),
        (4, Some(_)) => register(worker, incarnation),
        _ => register(worker, known.map_or(1, |known| known.incarnation.0)),
    }
}

/// Position in a sequence at which the level is raised.
const LEVEL_RAISE_AT: usize = 6;

/// One entry: (client, serial, command) triples, and the time since the previous entry.
type GeneratedEntry = (Vec<(u128, u64, CommandDraft)>, u64);

fn generated_entry() -> impl Strategy<Value = GeneratedEntry> {
    (
        prop::collection::vec((prop_oneof![4 => Just(1u128), 1 => 1..5u128], 0..10u64, command_draft()), 1..4),
        prop_oneof![5 => 0..100_000u64, 1 => 0..3_000_000u64],
    )
}

/// Creates a ledger with small limits and three workers, at level 1.
fn small_ledger() -> LedgerFixture {
    let mut bench = LedgerFixture::level1(SMALL_LIMITS);
    for n in 1..4 {
        bench.run(register(n, 1));
    }
    bench
}

/// Runs a sequence and checks every invariant. Returns the entries, all outcomes, and the final state.
fn run_sequence(sequence: &[GeneratedEntry]) -> (Vec<(u64, LedgerEntry)>, Vec<Vec<Outcome>>, Ledger) {
    let mut bench = small_ledger();
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
                serial: ClientSerial(1_010 + (n as u64 * 8 + serial).saturating_sub(4)),
                command: command(&ledger, wish),
            })
            .collect();
        if n == LEVEL_RAISE_AT {
            let command = Command::RaiseLevel(LEVEL);
            submissions.insert(0, Submission { client: ClientId(1), serial: ClientSerial(1_000_000), command });
        }
        if n % 10 == 0 {
            submissions.insert(0, opened(1 + n as u128 / 10 % 4));
        }
        log.push((
            bench.index + 1,
            LedgerEntry { time: ledger.now().after(Micros(*after)), submissions: submissions.clone() },
        ));
        outcomes.push(bench.entry(Micros(*after), submissions));
        ledger = bench.ledger.clone();
    }
    (log, outcomes, bench.ledger)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn invariants_hold_and_equal_logs_give_equal_states(sequence in prop::collection::vec(generated_entry(), 1..60)) {
        let (log, outcomes, end) = run_sequence(&sequence);
        let mut replayed = small_ledger().ledger;
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
    fn locate_finds_the_deepest_retained_prefix(
        sequence in prop::collection::vec(generated_entry(), 1..40),
        prompt in text(),
    ) {
        let (_, _, ledger) = run_sequence(&sequence);
        let kept = |blocks: u64| {
            let point = PrefixPoint::on_chain(&prompt, Blocks(blocks)).unwrap();
            ledger.artifacts().any(|a| a.boundaries.iter().any(|b| b.point == point))
        };
        let deepest = (1..=prompt.blocks().0).rev().find(|n| kept(*n)).unwrap_or(0);
        let query = LocateQuery { scope: scope(), session: None, chain: &prompt, shared_prefix: Blocks(0) };
        let located = ledger.locate(query);
        prop_assert_eq!(located.known_blocks(), Blocks(deepest));
        // Naming the session must give the same result as the search.
        for session in ledger.sessions() {
            let named = ledger.locate(LocateQuery { session: Some(session.id), ..query });
            prop_assert_eq!(&named.sealed, &located.sealed);
        }
    }
}

/// Checks that generated sequences also succeed; sequences that only hit refusals would prove little.
#[test]
fn generated_sequences_reach_every_outcome_kind() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let strategy = prop::collection::vec(generated_entry(), 40..60);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..60 {
        let sequence = strategy.new_tree(&mut runner).unwrap().current();
        let (_, outcomes, _) = run_sequence(&sequence);
        outcomes.iter().flatten().for_each(|outcome| collect_outcome_kinds(outcome, &mut seen));
    }
    let wanted = [
        "Done",
        "Opened",
        "Granted",
        "New",
        "Joined",
        "Known",
        "Merged",
        "First",
        "FastForward",
        "Unchanged",
        "Diverged",
        "Replaced",
        "Renewed",
        "Forgotten",
        "stale_incarnation",
        "unknown_worker",
        "lease_expired",
        "lease_changed",
        "already_owned",
        "stale_epoch",
        "unknown_session",
        "unknown_artifact",
        "unknown_prefix",
        "unknown_client",
        "ledger_full",
        "Admitted",
        "feature_level_too_low",
        "quota_exceeded",
        "worker_draining",
        "pinned",
        "referenced",
        "unknown_node",
        "invalid_limits",
    ];
    let missing: Vec<_> = wanted.iter().filter(|kind| !seen.contains(**kind)).collect();
    assert!(missing.is_empty(), "never seen: {missing:?}");
}

fn collect_outcome_kinds(outcome: &Outcome, seen: &mut std::collections::BTreeSet<String>) {
    match outcome {
        Outcome::Batch(parts) => parts.iter().for_each(|part| collect_outcome_kinds(part, seen)),
        Outcome::Sealed { stored, .. } => drop(seen.insert(format!("{stored:?}"))),
        Outcome::Advanced { movement } => drop(seen.insert(format!("{movement:?}"))),
        Outcome::Refused(refusal) => drop(seen.insert(refusal.reason().to_owned())),
        plain => {
            let name = format!("{plain:?}");
            let end = name.find(|c: char| !c.is_alphanumeric()).unwrap_or(name.len());
            seen.insert(name[..end].to_owned());
        }
    }
}

#[test]
fn a_clone_is_unaffected_by_later_entries() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 70)]), 0, 1));
    let (view, hash) = (bench.ledger.clone(), bench.ledger.state_hash());
    bench.step(step(1, &chain(&[('a', 90)]), 70, 1));
    assert_eq!(view.state_hash(), hash);
    assert_ne!(bench.ledger.state_hash(), hash);
}
