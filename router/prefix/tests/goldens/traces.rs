//! Compares the token ids of every step of recorded dialogues with `transformers`: in full, from checkpoints, and
//! extended from the previous step.

use std::path::Path;

use crate::recorded;

#[test]
fn recorded_dialogues_match_transformers_ids_at_every_step() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sessions = here.join("../../configs/traces/tau_bench/airline.json.gz");
    let by_model = recorded::check(&sessions, &here.join("testdata/tau_bench.json"));
    assert!(by_model.len() >= 13, "{} families", by_model.len());
    for (model, checked) in &by_model {
        assert!(checked.differences.is_empty(), "{model}:\n{}", checked.differences.join("\n"));
        assert!(checked.steps > 60 && checked.too_large == 0, "{model}: {} steps", checked.steps);
    }
    let exact = by_model.values().filter(|checked| checked.refused == 0).count();
    assert!(exact >= 10, "only {exact} families take the dialogues");
    let known: u64 = by_model.values().map(|checked| checked.reused).sum();
    let tokens: u64 = by_model.values().map(|checked| checked.tokens).sum();
    assert!(known * 2 > tokens, "checkpoints knew only {known} of {tokens} tokens");
    let grown: u64 = by_model.values().map(|checked| checked.extended.1).sum();
    assert!(grown * 2 > tokens, "the steps before knew only {grown} of {tokens} tokens");
}
