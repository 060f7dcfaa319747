//! Measures the time of one planning decision: `cargo run --release -p planner --example plan_speed`.
//!
//! Each role (prefill, decode, hybrid) has a third of the fleet. Every worker holds some of the prompt, on two tiers of
//! up to two ranks, and has recent prefill load. The memory of every first rank is full with the KV of 65,536 sessions.
//! Prints the minimum over many rounds, since anything above it is noise of the machine: first with a flat number of
//! bytes per token, then with a hybrid model of 60 layers with window checkpoints.

use std::hint::black_box;
use std::io::Write;
use std::time::{Duration, Instant};

use planner::{
    AttentionSpec, DisabledFeatures, LayerState, OccupancyModel, OccupancyView, PlanningInputs, Policy, RequestProfile,
    SequenceCompressedKv, SessionView, StepFootprint, StepKind, TransferPermission, WindowCheckpointInterval, plan,
};
use vocabulary::{
    Blocks, Bytes, DpRank, EngineSpeed, Epoch, Incarnation, KvIndexState, KvLink, KvLinkCapability, Micros, ModelId,
    Overlap, Owner, SessionId, Tier, Tokens, WorkerCapacity, WorkerHealth, WorkerId, WorkerLoad, WorkerRole,
    WorkerView,
};

const SESSIONS: u64 = 65_536;

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{:>8} {:>9} {:>11} {:>10} {:>10}", "workers", "overlaps", "candidates", "us flat", "us hybrid")?;
    let hybrid = hybrid();
    for (workers, ranks) in [(8, 1), (8, 8), (64, 1), (64, 8), (256, 1)] {
        let (fleet, overlaps) = (fleet(workers, ranks), overlaps(workers, ranks));
        let (candidates, flat) = measure(&fleet, &overlaps, None);
        let (_, hybrid) = measure(&fleet, &overlaps, Some(&hybrid));
        let [flat, hybrid] = [flat, hybrid].map(|least| least.as_secs_f64() * 1e6);
        writeln!(out, "{workers:>8} {:>9} {candidates:>11} {flat:>10.2} {hybrid:>10.2}", overlaps.len())?;
    }
    Ok(())
}

/// Returns the number of candidates of one decision, and the minimum time of one.
fn measure(fleet: &[WorkerView], overlaps: &[Overlap], attention: Option<&AttentionSpec>) -> (usize, Duration) {
    const ROUNDS: u32 = 500;
    const PLANS: u32 = 20;
    let ask = RequestProfile {
        model: "m".into(),
        adapter: None,
        prompt_tokens: Tokens(120_000),
        longest_prompt_tokens: None,
        expected_output_tokens: Tokens(300),
        expected_growth_tokens: Tokens(20_000),
        block_size: Tokens(16),
        transfers: TransferPermission::Allowed,
    };
    let mut session = SessionView::new(SessionId(1));
    let occupancy = full(fleet);
    let (policy, mut candidates, mut least) = (Policy::default(), 0, Duration::MAX);
    session.owner = Some(Owner { worker: fleet[1].id, incarnation: Incarnation(1), rank: DpRank(0) });
    (session.epoch, session.sealed) = (Epoch::default(), Blocks(5_000));
    for round in 0..ROUNDS {
        session.id = SessionId(u128::from(round));
        let step = StepKind::LongToolOutput;
        let inputs = PlanningInputs {
            step,
            request: &ask,
            attention,
            session: &session,
            workers: fleet,
            shapes: &[],
            overlaps,
            occupancy: OccupancyView { model: &occupancy, now: Micros(SESSIONS * 1_000) },
            excluded: &[],
            policy: &policy,
            disabled: DisabledFeatures::default(),
            round_robin_index: 0,
        };
        let start = Instant::now();
        for _ in 0..PLANS {
            candidates = black_box(plan(black_box(&inputs)).expect("workers are ready")).candidates.len();
        }
        least = least.min(start.elapsed() / PLANS);
    }
    (candidates, least)
}

fn hybrid() -> AttentionSpec {
    let layer = |ratio, index| SequenceCompressedKv {
        compression_ratio: Tokens(ratio),
        entry_size: Bytes(640),
        index_entry_size: Bytes(index),
        uncompressed_token_size: Bytes(640),
        window_tokens: Tokens(128),
    };
    let pair = [LayerState::Csa(layer(4, 132)), LayerState::Hca(layer(128, 0))];
    let spec = AttentionSpec::new(pair.repeat(30), Bytes(1)).expect("a model within its bounds");
    spec.with_checkpoints(WindowCheckpointInterval::EveryTokens(Tokens(4_096))).expect("a multiple of 128")
}

/// Returns a model after one step of each session, a millisecond apart, each at one worker.
fn full(fleet: &[WorkerView]) -> OccupancyModel {
    let mut occupancy = OccupancyModel::default();
    let tokens = Tokens(1_100_000 * fleet.len() as u64 / SESSIONS);
    for (view, session) in fleet.iter().cycle().zip(0..SESSIONS) {
        let at = Owner { worker: view.id, incarnation: view.incarnation, rank: DpRank(0) };
        let (id, now) = (SessionId(1_000_000 + u128::from(session)), Micros(session * 1_000));
        occupancy.step_started(at, id, StepFootprint { tokens, cached: Tokens::ZERO, capacity: view.capacity.kv }, now);
        occupancy.prefill_started(at, Micros(1_000), now);
        occupancy.step_ended(at, id, tokens, now);
    }
    occupancy
}

fn fleet(workers: u64, ranks: u16) -> Vec<WorkerView> {
    (0..workers).map(|n| worker(n, ranks)).collect()
}

fn worker(n: u64, ranks: u16) -> WorkerView {
    let endpoint = format!("http://worker-{n}:8000");
    WorkerView {
        id: WorkerId::of_endpoint(&endpoint),
        endpoint: endpoint.into(),
        incarnation: Incarnation(1),
        role: [WorkerRole::Prefill, WorkerRole::Decode, WorkerRole::Hybrid][n as usize % 3],
        models: [ModelId::from("m")].into(),
        ranks,
        health: WorkerHealth::Ready,
        kv_index_state: KvIndexState::Exact,
        load: WorkerLoad { running: n as u32 % 17, waiting: 0, backlog: Tokens(n % 5 * 1_000), kv_usage: 0.4 },
        capacity: WorkerCapacity { kv: Tokens(1_000_000), block: Tokens(16), context: Tokens(262_144) },
        speeds: EngineSpeed {
            prefill_tokens_per_second: 11_000.0,
            decode_step: Micros(20_000),
            decode_slowdown: Micros(500),
        },
        kv_bytes_per_token: Bytes(131_072),
        link: Some(KvLink {
            fabric: "nixl".into(),
            fixed: Micros(8_000),
            bytes_per_second: 25e9,
            carries: KvLinkCapability::Prefixes,
        }),
    }
}

fn overlaps(workers: u64, ranks: u16) -> Vec<Overlap> {
    let ranks = |worker: u64| (0..ranks.min(2)).map(move |rank| (worker, rank));
    let each = |(worker, rank): (u64, u16)| {
        [Tier::Hbm, Tier::Host].map(|tier| Overlap {
            worker: WorkerId::of_endpoint(&format!("http://worker-{worker}:8000")),
            rank: DpRank(rank),
            tier,
            blocks: Blocks((worker * 797 + u64::from(rank)) % 5_000),
        })
    };
    (0..workers).flat_map(ranks).flat_map(each).collect()
}
