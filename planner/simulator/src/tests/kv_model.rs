//! Fleets that serve models in which not every layer keeps every token, under each tier policy.

use std::sync::Arc;

use planner::{AttentionSpec, DenseKv, LayerState, WindowCheckpointInterval, WindowKv};
use vocabulary::{Bytes, Tokens};

use super::readers::{read, sessions};
use crate::policies::PolicyKind;
use crate::report::RunStats;
use crate::trace::{ReplayLimits, Trace};
use crate::{HardwareProfile, KvModel, Simulation, SimulationSetup, TierPolicy};

const HEADS: DenseKv = DenseKv { kv_heads: 8, head_dim: 128, element_bits: 16 };

/// 128 KiB per token, like the model of the default profile.
pub(super) fn dense() -> AttentionSpec {
    AttentionSpec::new(vec![LayerState::Dense(HEADS); 32], Bytes(1)).unwrap()
}

/// Half of the layers keep 128 tokens: 64 KiB per token and 8 MiB of windows, whose depth is 2,048 tokens.
fn hybrid() -> AttentionSpec {
    let DenseKv { kv_heads, head_dim, element_bits: bits } = HEADS;
    let window =
        LayerState::SlidingWindow(WindowKv { kv_heads, head_dim, element_bits: bits, window_tokens: Tokens(128) });
    AttentionSpec::new([LayerState::Dense(HEADS), window].repeat(16), Bytes(1)).unwrap()
}

/// Runs a model.
fn run(
    model: &AttentionSpec,
    cache: TierPolicy,
    (trace, kind): (&Trace, PolicyKind),
    setup: SimulationSetup,
) -> RunStats {
    let model = Arc::new(KvModel::new(model, cache, setup.spec, trace).unwrap());
    let trace = model.scale_trace(trace.clone());
    let setup = SimulationSetup { spec: model.worker(), ..setup };
    Simulation::new(&trace, kind, setup).unwrap().with_model(&model).run(&mut |_, _| {})
}

/// Two conversations of three steps (100, 110 and 120 blocks of 64 tokens) at one worker, each evicting the other.
fn alternating_conversations() -> Trace {
    let session = |name: &str, first: u64| {
        let step = |at: u64, blocks: u64, par: i64, keep: u64| {
            let (tokens, new, run) = (blocks * 64, blocks - keep, first + 1_000 * at);
            format!(
                r#"{{"t": {at}, "agent": 0, "in": {tokens}, "out": 20, "think": 20, "par": {par}, "keep": {keep}, "runs": [[{run}, {new}]]}}"#
            )
        };
        let steps = [step(0, 100, -1, 0), step(60, 110, 0, 100), step(120, 120, 1, 110)];
        format!(r#"{{"id": "{name}", "block_size": 64, "tool_tokens": 0, "reqs": [{}]}}"#, steps.join(","))
    };
    read(&[session("a", 1), session("b", 1_000_000)].join("\n"))
}

/// One worker that holds one conversation, 9,000 tokens of the hybrid model, with slower tiers of these sizes.
fn small(host: u64, disk: u64) -> SimulationSetup {
    let mut spec = HardwareProfile::H100_8B;
    let sizes = &mut spec.sizes;
    (sizes.device, sizes.host, sizes.disk) = (Tokens(4_500), Tokens(host), Tokens(disk));
    SimulationSetup { workers: 1, spec, load: 2.0, seed: 1 }
}

fn run_hybrid(cache: TierPolicy, setup: SimulationSetup) -> RunStats {
    run(&hybrid(), cache, (&alternating_conversations(), PolicyKind::RoundRobin), setup)
}

fn periodic(tokens: u64) -> TierPolicy {
    TierPolicy::Periodic(Tokens(tokens))
}

#[test]
fn explicit_dense_model_matches_the_default_model() {
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let mut spec = HardwareProfile::H100_8B;
    (spec.sizes.device, spec.sizes.host, spec.sizes.disk) = (Tokens(160_000), Tokens(100_000), Tokens(300_000));
    let setup = SimulationSetup { workers: 3, spec, load: 8.0, seed: 1 };
    for kind in PolicyKind::ALL {
        let plain = Simulation::new(&trace, kind, setup).unwrap().run(&mut |_, _| {});
        assert_eq!(run(&dense(), TierPolicy::Lru, (&trace, kind), setup), plain, "{kind:?}");
    }
}

#[test]
fn memory_fits_more_sessions_of_a_hybrid_model() {
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let mut spec = HardwareProfile::H100_8B;
    spec.sizes.device = Tokens(200_000);
    let of = |model: &AttentionSpec| {
        let setup = SimulationSetup { workers: 2, spec, load: 6.0, seed: 1 };
        let figures = run(model, TierPolicy::Lru, (&trace, PolicyKind::SessionPinning), setup);
        assert_eq!(figures.unserved, 0);
        figures
    };
    let (dense, hybrid) = (of(&dense()), of(&hybrid()));
    let times = hybrid.memory.hbm_session_capacity / dense.memory.hbm_session_capacity;
    assert!((1.5..2.0).contains(&times), "half a token's bytes, and windows with every run: {times}");
    assert!(hybrid.reuse.prefill_tokens < dense.reuse.prefill_tokens);
}

#[test]
fn worker_memory_bytes_do_not_depend_on_the_model() {
    let mut spec = HardwareProfile::H100_8B;
    (spec.sizes.host, spec.sizes.disk) = (Tokens(10), Tokens(20));
    let worker = KvModel::new(&hybrid(), TierPolicy::Lru, spec, &alternating_conversations()).unwrap().worker();
    assert_eq!(worker.kv_bytes * 2, spec.kv_bytes);
    let sizes = worker.sizes;
    assert_eq!((sizes.device, sizes.host, sizes.disk), (Tokens(800_000), Tokens(20), Tokens(40)));
    assert_eq!(sizes.disk_speed.read, 2.0 * spec.sizes.disk_speed.read);
    assert_eq!(worker.link.tokens_per_second, 2.0 * spec.link.tokens_per_second);
    assert_eq!(worker.timing, spec.timing);
}

#[test]
fn restored_steps_recompute_windows_that_were_not_stored() {
    for (host, disk) in [(100_000, 0), (0, 100_000), (4_000, 100_000)] {
        let again = |cache| {
            let figures = run_hybrid(cache, small(host, disk));
            assert_eq!((figures.steps, figures.unserved), (6, 0), "{cache}");
            figures.reuse.recomputed_tokens
        };
        assert_eq!(again(TierPolicy::Full), 0);
        assert_eq!(again(TierPolicy::Lru), 0, "as the model says, which is all windows");
        assert_eq!(again(TierPolicy::NoWindows), 4 * 2_048, "n_win x L");
        // The prefixes end at 6,400 and 7,040 tokens.
        assert_eq!(again(periodic(4_096)), 2 * (2_304 + 2_944));
        assert_eq!(again(periodic(64)), 0);
        assert_eq!(again(periodic(8_192)), 4 * 2_048, "no window is stored so early");
        assert_eq!(again(TierPolicy::DeviceOnly), 2 * (6_400 + 7_040), "nothing comes back");
    }
}

#[test]
fn denser_window_checkpoints_write_more_bytes() {
    let written =
        [TierPolicy::Full, periodic(64), periodic(640), periodic(6_400), TierPolicy::NoWindows, TierPolicy::DeviceOnly]
            .map(|cache| {
                let figures = run_hybrid(cache, small(0, 100_000));
                let disk = figures.memory.disk;
                assert!(
                    disk.useful_bytes <= disk.read_bytes && disk.useful_bytes <= disk.written_bytes,
                    "{cache} {disk:?}"
                );
                disk.written_bytes
            });
    // Tokens of both prompts except the last step's, at 64 KiB each; the windows of every token take as much again.
    let kept = 2 * 7_040 * 65_536;
    assert!((kept..kept * 11 / 10).contains(&written[4]) && written[5] == 0, "{written:?}");
    assert_eq!(written[0], 2 * written[4]);
    assert!(written[1] > written[0], "windows at every 64 tokens overlap");
    assert!(written[2] > written[3] && written[3] > written[4], "{written:?}");
}

#[test]
fn lowest_cost_policy_is_close_to_the_best_fixed_policy() {
    let fixed = [TierPolicy::Full, TierPolicy::NoWindows, periodic(256), periodic(1_024), periodic(4_096)];
    for (host, disk) in [(100_000, 0), (0, 100_000), (4_000, 100_000)] {
        // Seconds spent waiting for first tokens and writing to disk.
        let seconds = |cache| {
            let figures = run_hybrid(cache, small(host, disk));
            let written = figures.memory.disk.written_bytes as f64 / 3e9;
            figures.ttft.mean * figures.ttft.count as f64 + written
        };
        let best = fixed.map(seconds).into_iter().fold(f64::INFINITY, f64::min);
        let (cost, none) = (seconds(TierPolicy::LowestCost), seconds(TierPolicy::DeviceOnly));
        assert!(cost <= 1.03 * best && cost < none, "{host} {disk}: {cost} beside {best} and {none}");
    }
}

#[test]
fn lowest_cost_policy_ignores_a_disk_slower_than_computing() {
    let mut setup = small(0, 100_000);
    (setup.spec.sizes.disk_speed.read, setup.spec.sizes.disk_speed.write) = (100.0, 1e6);
    let (all, cost, none) = (
        run_hybrid(TierPolicy::Full, setup),
        run_hybrid(TierPolicy::LowestCost, setup),
        run_hybrid(TierPolicy::DeviceOnly, setup),
    );
    assert!(all.ttft.mean > 10.0 * none.ttft.mean);
    assert_eq!((cost.ttft, cost.memory.disk.read_bytes), (none.ttft, 0));
}

#[test]
fn every_policy_serves_every_step_under_every_tier_policy() {
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let mut spec = HardwareProfile::H100_8B;
    (spec.sizes.device, spec.sizes.host, spec.sizes.disk) = (Tokens(90_000), Tokens(30_000), Tokens(100_000));
    let setup = SimulationSetup { workers: 2, spec, load: 6.0, seed: 1 };
    for kind in PolicyKind::ALL {
        for cache in [TierPolicy::DeviceOnly, TierPolicy::NoWindows, periodic(4_096), TierPolicy::LowestCost] {
            let figures = run(&hybrid(), cache, (&trace, kind), setup);
            assert_eq!((figures.steps, figures.unserved), (778, 0), "{kind:?} {cache}");
            assert_eq!(figures, run(&hybrid(), cache, (&trace, kind), setup), "{kind:?} {cache}");
        }
    }
}

#[test]
fn unsupported_tier_policy_is_rejected_with_the_accepted_ones() {
    let refused = |model: &AttentionSpec, cache| {
        KvModel::new(model, cache, HardwareProfile::H100_8B, &alternating_conversations())
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    for cache in [TierPolicy::Full, TierPolicy::NoWindows, periodic(64)] {
        let message = refused(&dense(), cache);
        assert!(message.contains("and the model has none; accepted: none, lru, lowest_cost"), "{message}");
    }
    let DenseKv { kv_heads, head_dim, element_bits: bits } = HEADS;
    let window =
        LayerState::SlidingWindow(WindowKv { kv_heads, head_dim, element_bits: bits, window_tokens: Tokens(128) });
    let message = refused(&AttentionSpec::new(vec![window; 4], Bytes(1)).unwrap(), TierPolicy::Lru);
    assert!(message.contains("accepted: at least one that keeps something of every token"), "{message}");
    let message = refused(&hybrid(), periodic(1 << 30));
    assert!(message.starts_with("tier policy `periodic:1073741824`: window_checkpoints.every"), "{message}");
    let chosen = KvModel::new(&dense(), TierPolicy::LowestCost, HardwareProfile::H100_8B, &alternating_conversations())
        .unwrap()
        .checkpoints();
    assert_eq!(chosen, WindowCheckpointInterval::Full, "no windows, no cost");
}
