use ownership::ledger::{Command, Outcome, StepOutcome};
use ownership::ledger::{
    Entry, KvFormat, KvKinds, KvShape, Origin, RegisterWorker, Submission, WorkerKind, WorkerSpec,
};
use vocabulary::{
    Bytes, Chain, ClientId, ClientSerial, DpRank, Epoch, Incarnation, LedgerTime, Micros, ModelId, NodeId, Role, Seed,
    TenantId, Tokens, WorkerId,
};

use super::*;
use crate::exchange::unapplied::Reach;

const FRESH: SessionId = SessionId(999);

/// A ledger that knows workers 1 and 2.
struct Bench {
    ledger: Ledger,
    index: u64,
}

impl Bench {
    fn new() -> Self {
        let mut bench = Self { ledger: Ledger::default(), index: 0 };
        bench.run(Command::OpenClient(NodeId(1)));
        for worker in [1, 2] {
            let spec = WorkerSpec {
                endpoint: format!("http://w{worker}:1").into(),
                role: Role::Hybrid,
                kind: WorkerKind::Engine,
                models: [].into(),
                ranks: 1,
            };
            let (worker, incarnation) = (owner(worker).worker, owner(worker).incarnation);
            let ttl = Micros(15_000_000);
            bench.run(Command::RegisterWorker(RegisterWorker { worker, incarnation, spec, ttl }));
        }
        bench
    }

    fn run(&mut self, command: Command) -> Outcome {
        self.index += 1;
        let submission = Submission { client: ClientId(1), serial: ClientSerial(self.index), command };
        let entry = Entry { time: LedgerTime(self.index), submissions: vec![submission] };
        self.ledger.apply(self.index, &entry).remove(0)
    }

    fn commit(&mut self, step: &Finished) {
        let command = step.command(Blocks::ZERO, NodeId(1)).unwrap();
        assert!(StepOutcome::of(&self.run(command)).sealed);
    }

    /// Where the view and `own` put a prompt.
    fn place(&self, named: Option<u128>, prompt: &Chain, own: &Unapplied) -> Place {
        let session = named.map(SessionId);
        let query = Query { scope: step(1, 1, 0).scope(), session, chain: prompt, preamble: Blocks::ZERO };
        let found = self.ledger.locate(query);
        Place::in_view(&found, session, FRESH).with_own(own, &self.ledger, (query, Instant::now()))
    }
}

fn owner(worker: u64) -> Owner {
    Owner { worker: WorkerId(worker), incarnation: Incarnation(1), rank: DpRank(0) }
}

/// `blocks` blocks, of which those after the tenth are of this path.
fn chain(blocks: u32, path: u32) -> Chain {
    let tokens: Vec<u32> = (0..blocks).map(|block| if block < 10 { block } else { block + 1000 * path }).collect();
    Chain::over_tokens(PrefixId(9), Seed(1), Tokens(1), &tokens)
}

fn step(session: u128, blocks: u32, path: u32) -> Finished {
    let shape = KvShape { format: KvFormat(1), kinds: KvKinds::default(), block: Tokens(1), block_bytes: Bytes(1) };
    let origin = Origin { tenant: TenantId::default(), model: ModelId::from("m"), root: PrefixId(9), shape };
    let (parent, replaces, custody, base) = (None, None, Custody::Claims, PrefixId(9));
    let (session, owner, chain) = (SessionId(session), owner(1), chain(blocks, path));
    Finished { session, parent, origin, chain, replaces, owner, custody, base }
}

fn own(steps: impl IntoIterator<Item = Finished>) -> Unapplied {
    let mut own = Unapplied::default();
    for step in steps {
        own.take(step, Reach::Nobody, Instant::now());
    }
    own
}

fn head(place: &Place) -> (u128, u64, u64) {
    let (head, shared) = place.head.map_or((0, 0), |(head, shared)| (head.blocks.0, shared.0));
    (place.session.0, head, shared)
}

#[test]
fn a_step_that_the_ledger_has_not_heard_of_yet_is_gone_on_from() {
    let bench = Bench::new();
    let own = own([step(1, 12, 0)]);
    let named = bench.place(Some(1), &chain(15, 0), &own);
    assert_eq!((head(&named), named.owner(None)), ((1, 12, 12), Some(owner(1))));
    let by_chain = bench.place(None, &chain(15, 0), &own);
    assert_eq!((head(&by_chain), by_chain.owner(None)), ((1, 12, 12), Some(owner(1))));
    let other = bench.place(Some(2), &chain(15, 0), &own);
    assert_eq!((head(&other), other.owner(None)), ((2, 0, 0), None), "another session's step");
    let nothing = bench.place(None, &chain(15, 0), &Unapplied::default());
    assert_eq!(head(&nothing), (FRESH.0, 0, 0));
}

#[test]
fn the_view_counts_where_it_shows_the_step_or_more() {
    let mut bench = Bench::new();
    bench.commit(&step(1, 12, 0));
    let moved = Finished { owner: owner(2), custody: Custody::Moves { seen: Epoch::default() }, ..step(1, 12, 0) };
    let place = bench.place(Some(1), &chain(20, 0), &own([moved.clone()]));
    assert_eq!((head(&place), place.own.is_none()), ((1, 12, 12), true), "what was made of it is the ledger's to say");
    assert_eq!(place.owner(Some(owner(1))), Some(owner(1)));
    let newer = bench.place(Some(1), &chain(20, 0), &own([Finished { chain: chain(16, 0), ..moved.clone() }]));
    assert_eq!((head(&newer), newer.owner(Some(owner(1)))), ((1, 16, 16), Some(owner(2))));
    bench.commit(&step(1, 18, 0));
    let older = bench.place(Some(1), &chain(20, 0), &own([Finished { chain: chain(16, 0), ..moved }]));
    assert_eq!((head(&older), older.own.is_none()), ((1, 18, 18), true), "another router went on from there");
}

#[test]
fn a_prompt_that_leaves_the_step_late_rewrites_it_and_one_that_leaves_early_does_not() {
    let bench = Bench::new();
    let own = own([step(1, 18, 0)]);
    let late = bench.place(Some(1), &chain(20, 1), &own);
    assert_eq!((head(&late), late.rewrites), ((1, 18, 10), Some(step(1, 18, 0).head().unwrap().id)));
    let early = bench.place(Some(1), &chain(3, 0), &own);
    assert_eq!((head(&early), early.rewrites), ((1, 18, 3), None));
    let unnamed = bench.place(None, &chain(20, 1), &own);
    assert_eq!(head(&unnamed), (FRESH.0, 0, 0), "only a head that the chain goes through names a session");
}

#[test]
fn who_borrows_leaves_the_owner_where_it_was_and_who_claims_takes_what_nobody_has() {
    let place = |custody| Bench::new().place(Some(1), &chain(15, 0), &own([Finished { custody, ..step(1, 12, 0) }]));
    let owners = |custody| [None, Some(owner(2))].map(|known| place(custody).owner(known).map(|owner| owner.worker.0));
    assert_eq!(owners(Custody::Stays), [None, Some(2)]);
    assert_eq!(owners(Custody::Claims), [Some(1), Some(2)]);
    assert_eq!(owners(Custody::Moves { seen: Epoch::default() }), [Some(1), Some(1)]);
}
