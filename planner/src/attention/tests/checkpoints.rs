//! Window checkpoints: where windows are stored, and which interval is cheapest.

use proptest::prelude::*;
use vocabulary::Tokens;

use super::{hybrid, read, sizes};
use crate::attention::*;

#[test]
fn window_restore_starts_at_the_last_stored_checkpoint() {
    let last = |policy: WindowCheckpointInterval, unit| policy.last_stored(Tokens(10_000), Tokens(unit)).0;
    assert_eq!(last(WindowCheckpointInterval::Full, 128), 9_984);
    assert_eq!(last(WindowCheckpointInterval::EveryTokens(Tokens(4_096)), 128), 8_192);
    assert_eq!(
        last(WindowCheckpointInterval::EveryTokens(Tokens(384)), 256),
        9_984,
        "where blocks and checkpoints meet"
    );
    assert_eq!(last(WindowCheckpointInterval::None, 128), 0);
}

#[test]
fn checkpoint_interval_is_part_of_the_spec_file() {
    let hybrid = hybrid().with_checkpoints(WindowCheckpointInterval::EveryTokens(Tokens(4_096))).unwrap();
    let text = serde_json::to_string(&hybrid).unwrap();
    assert!(text.contains(r#""window_checkpoints":{"every_tokens":4096}"#), "{text}");
    assert_eq!(serde_json::from_str::<AttentionSpec>(&text).unwrap(), hybrid);
    let wrong = text.replace("4096", "4000");
    let error = serde_json::from_str::<AttentionSpec>(&wrong).unwrap_err().to_string();
    assert!(error.contains("window_checkpoints.every_tokens is 4000; accepted: a multiple of 128 tokens"), "{error}");
    assert_eq!(read("gpt-oss-20b").checkpoints(), WindowCheckpointInterval::Full, "as engines do");
}

/// 10 GB/s to write and to load, 40 us of compute per token, one restore per 10,000 tokens.
const COSTS: WindowCheckpointCosts = WindowCheckpointCosts { write: 1e-4, load: 1e-4, compute: 40.0, restores: 1e-4 };

#[test]
fn checkpoint_period_balances_write_and_recompute_cost() {
    let spec = hybrid();
    // W = 60 x 128 x 640 bytes, 491.52 us to write: sqrt(2 x 491.52 / (1e-4 x 40)) = 495.7 tokens.
    let (policy, cost) = WindowCheckpointInterval::choose(&spec, Tokens(128), &COSTS);
    assert_eq!(policy, WindowCheckpointInterval::EveryTokens(Tokens(512)));
    assert!((cost - (491.52 / 512.0 + 1e-4 * (491.52 + 40.0 * 192.0))).abs() < 1e-9, "{cost}");
}

#[test]
fn free_writes_are_always_stored_and_unused_ones_never() {
    let spec = hybrid();
    let chosen = |costs| WindowCheckpointInterval::choose(&spec, Tokens(128), &costs).0;
    assert_eq!(chosen(WindowCheckpointCosts { restores: 0.0, ..COSTS }), WindowCheckpointInterval::None);
    assert_eq!(chosen(WindowCheckpointCosts { write: 0.0, ..COSTS }), WindowCheckpointInterval::Full);
    assert_eq!(
        chosen(WindowCheckpointCosts { restores: 1.0, ..COSTS }),
        WindowCheckpointInterval::Full,
        "restored at every token"
    );
    assert_eq!(
        chosen(WindowCheckpointCosts { compute: 0.0, ..COSTS }),
        WindowCheckpointInterval::None,
        "computing is free"
    );
    let broken = WindowCheckpointCosts { write: f64::NAN, load: -1.0, compute: f64::INFINITY, restores: f64::NAN };
    assert_eq!(chosen(broken), WindowCheckpointInterval::Full, "everything costs nothing");
    let dense = WindowCheckpointInterval::choose(&read("llama-3.1-8b"), Tokens(16), &COSTS);
    assert_eq!(dense, (WindowCheckpointInterval::Full, 0.0), "no windows, no cost");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chosen_checkpoint_interval_is_the_cheapest(
        spec in sizes::spec(),
        costs in (0.0..1e-2f64, 0.0..1e-2f64, 0.0..500.0f64, 0.0..0.1f64),
        periods in prop::collection::vec(1u64..3_000, 20),
    ) {
        let (write, load, compute, restores) = costs;
        let (costs, unit) = (WindowCheckpointCosts { write, load, compute, restores }, spec.block());
        let (policy, cost) = WindowCheckpointInterval::choose(&spec, unit, &costs);
        let others = periods.into_iter().map(|n| WindowCheckpointInterval::EveryTokens(unit * n));
        for other in others.chain([WindowCheckpointInterval::Full, WindowCheckpointInterval::None]) {
            let price = costs.cost_per_token(&spec, unit, other);
            prop_assert!(cost <= price * (1.0 + 1e-12), "{policy:?} at {cost} beside {other:?} at {price}");
        }
        prop_assert!(spec.with_checkpoints(policy).is_ok());
    }
}
