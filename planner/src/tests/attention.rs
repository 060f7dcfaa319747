//! What the family of the model's attention changes about a plan.

use vocabulary::{Blocks, Bytes, Micros, Tokens};

use super::{Scene, check, id, list, terms};
use crate::attention::tests::{hybrid, read};
use crate::*;

/// 128,000 sealed tokens at an owner that generates 64 other answers, beside an idle worker.
const LONG_SESSION: &str = "
    session owner=a sealed=8000
    ask step=small_increment prompt=128100
    policy off=remote_prefill
    worker a hybrid holds=8000 running=64
    worker b hybrid";

/// The story of this module: the same session, the same load, the same network.
///
/// A dense model's 16.8 GB stay where they are. A hybrid's compressed entries are 0.8 GB: they are fetched, and what was
/// not kept of the windows is computed again at the target, all 60 layers' worth of it or what follows a checkpoint.
#[test]
fn a_dense_session_stays_and_a_hybrid_one_moves_its_compressed_kv_and_recomputes_its_tail() {
    let with = |model: &str| format!("{LONG_SESSION}\n attention {model}");
    check(&with("of=llama-3.1-8b"), "colocated_prefill at a 128000+100, keep");
    check(&with("of=hybrid checkpoints=none"), "tail_recompute at b 120320+7780, 8000 blocks from a, borrow");
    check(&with("of=hybrid checkpoints=4096"), "tail_recompute at b 126976+1124, 7936 blocks from a, borrow");
    check(&with("of=hybrid"), "artifact_fetch at b 128000+100, 8000 blocks from a, borrow");
}

#[test]
fn a_latent_session_moves_where_a_dense_one_of_as_many_layers_stays() {
    // 70,272 bytes a token are 9 GB; the same 61 layers with 8 heads of 128 were 32 GB.
    let busier = LONG_SESSION.replace("running=64", "running=96");
    check(
        &format!("{busier}\n attention of=deepseek-v3"),
        "artifact_fetch at b 128000+100, 8000 blocks from a, borrow",
    );
    let heads = Heads { kv_heads: 8, head_dim: 128, bits: 16 };
    let dense = AttentionSpec::new(vec![LayerState::Dense(heads); 61], Bytes(1)).unwrap();
    let scene = Scene { attention: Some(dense), ..Scene::read(&busier) };
    assert_eq!(scene.name(scene.plan().plan.target()), "a");
}

#[test]
fn a_narrower_cache_makes_the_same_session_lighter() {
    let scene = |bits| {
        let attention = Some(read("llama-3.1-8b").with_bits(bits).unwrap());
        Scene { attention, ..Scene::read(&format!("{LONG_SESSION}\n policy lambda=0")) }
    };
    let target = |bits| {
        let scene = scene(bits);
        scene.name(scene.plan().plan.target()).to_owned()
    };
    assert_eq!([4, 8, 32].map(target), ["b", "b", "a"]);
}

#[test]
fn a_target_with_the_newer_part_of_the_prefix_fetches_nothing_of_it_again() {
    let text = format!("{LONG_SESSION} holds=4000\n attention of=hybrid");
    let scene = Scene::read(&text);
    let plan = scene.plan().plan;
    let spec = hybrid();
    assert_eq!(plan.handoff.unwrap().bytes(), spec.range(Tokens(64_000), Tokens(128_000)));
    assert_eq!(plan.action, Action::ArtifactFetch);
}

#[test]
fn a_checkpoint_inside_an_engines_block_is_of_no_use() {
    // Windows lie at every 1,152 tokens; engine blocks of 256 end there at every 2,304.
    let text = format!("{LONG_SESSION} block=256\n attention of=hybrid checkpoints=1152");
    let plan = Scene::read(&text).plan().plan;
    let Some(Handoff::Replicate { blocks, .. }) = plan.handoff else { panic!("{plan:?}") };
    let tokens = blocks.tokens(Tokens(16));
    assert_eq!((tokens, plan.decode.tokens_cached), (Tokens(55 * 2_304), Tokens(55 * 2_304)));
}

#[test]
fn a_prefix_shorter_than_all_windows_is_computed_unless_its_windows_are_stored() {
    // 400 blocks are 6,400 tokens; 60 windows reach back 7,680.
    let scene = |policy: &str| {
        format!(
            "session owner=a sealed=400\n ask prompt=6500\n attention of=hybrid {policy}
            worker a hybrid holds=400 health=draining\n worker b hybrid"
        )
    };
    check(&scene("checkpoints=none"), "colocated_prefill at b 0+6500, move (owner_draining)");
    check(&scene(""), "state_migration at b 6400+100, 400 blocks from a, move (owner_draining)");
}

#[test]
fn windows_alone_are_light_enough_to_move() {
    // Mistral's first: 512 MiB however long the session is, 16.8 GB without its window.
    check(
        &format!("{LONG_SESSION}\n attention of=mistral-7b-v0.1"),
        "artifact_fetch at b 128000+100, 8000 blocks from a, borrow",
    );
    check(&format!("{LONG_SESSION}\n attention of=mistral-7b-v0.3"), "colocated_prefill at a 128000+100, keep");
}

#[test]
fn a_tail_that_may_not_be_recomputed_is_moved_where_that_is_possible() {
    // The windows' 4 GB take longer than computing 60 x 16 tokens, and both beat staying.
    let layer = Windowed { kv_heads: 64, head_dim: 16_384, bits: 16, window: Tokens(16) };
    let latent = Latent { width: 64, bits: 8, index: Bytes(0) };
    let layers = [LayerState::Window(layer), LayerState::Latent(latent)].repeat(60);
    let attention = Some(AttentionSpec::new(layers, Bytes(1)).unwrap());
    let line = |off: &str| {
        let scene = Scene::read(&format!("{LONG_SESSION}\n policy lambda=0 {off}"));
        let scene = Scene { attention: attention.clone(), ..scene };
        let plan = scene.plan().plan;
        (plan.action, scene.name(plan.target()).to_owned())
    };
    assert_eq!(line(""), (Action::TailRecompute, "b".to_owned()));
    assert_eq!(line("off=tail_recompute"), (Action::ArtifactFetch, "b".to_owned()));
}

#[test]
fn where_computing_the_windows_again_costs_too_much_the_session_stays() {
    check(
        &format!("{LONG_SESSION} rate=2000\n attention of=hybrid checkpoints=none"),
        "colocated_prefill at a 128000+100, keep",
    );
}

/// The bytes of the chosen plan's handoff.
fn moved(text: &str) -> Bytes {
    Scene::read(text).plan().plan.handoff.unwrap().bytes()
}

#[test]
fn a_fetch_moves_the_bytes_of_the_model_and_not_of_the_worker() {
    let draining = "session owner=a sealed=99\n worker a hybrid holds=99 health=draining\n worker b hybrid";
    assert_eq!(moved(draining), Bytes(99 * 16 * 100_000));
    let with = |model: &str| moved(&format!("{draining}\n attention of={model}"));
    assert_eq!(with("llama-3.1-8b"), Bytes(99 * 16 * 131_072));
    assert_eq!(with("deepseek-v3"), Bytes(99 * 16 * 70_272));
    assert_eq!(with("gpt-oss-20b"), Bytes(12 * 2_048 * (99 * 16 + 128)));
    // 99 x 16 tokens end inside a block of 128.
    let spec = hybrid();
    assert_eq!(with("hybrid"), spec.range(Tokens(0), Tokens(12 * 128)));
}

#[test]
fn a_remote_prefill_moves_windows_and_tail_too() {
    let text = "ask prompt=16000\n attention of=hybrid\n worker p prefill\n worker d decode running=8 holds=800";
    let price = terms(text, Action::RemotePrefill, "d");
    let spec = hybrid();
    let bytes = spec.kept(Tokens(16_000)) - spec.kept(Tokens(12_800))
        + spec.bytes_of(StateKind::WindowSwa, Tokens(3_200))
        + spec.bytes_of(StateKind::TailState, Tokens(16_000));
    assert_eq!(price.network, Micros(10_000 + bytes.0 / 10_000 + 20_000));
}

#[test]
fn tiers_and_memory_are_priced_by_the_model_too() {
    let at = |lines: &str| terms(&format!("attention of=gpt-oss-20b\n {lines}"), Action::ColocatedPrefill, "a");
    let layers = 12 * 2_048;
    // 1,584 tokens from host memory at 20 GB/s, 128 of them in windows.
    assert_eq!(at("worker a hybrid host=99").restore, Micros(layers * (1_584 + 128) / 20_000 + 20_000));
    let price = at("policy lambda=1048576\n worker a hybrid holds=50 usage=0.5");
    assert_eq!(price.memory, Micros(layers * (900 + 128) / 2), "prompt and answer, by half");
}

#[test]
fn kv_moves_only_between_shapes_whose_ranks_can_read_from_each_other() {
    let draining = |from: &str, to: &str| {
        format!(
            "attention of=llama-3.1-8b\n session owner=a sealed=99
            worker a hybrid holds=99 health=draining {from}\n worker b hybrid {to}"
        )
    };
    let fetched = "state_migration at b 1584+16, 99 blocks from a, move (owner_draining)";
    check(&draining("shape=2x1", "shape=4x1"), fetched);
    check(&draining("shape=2x1", ""), fetched);
    check(&draining("shape=4x1", "shape=2x1"), "colocated_prefill at b 0+1600, move (owner_draining)");
    let listed = list(&draining("shape=1x1", "shape=1x2"));
    assert!(listed.contains(&"artifact_fetch at b: other_shape".to_owned()), "{listed:?}");
    // 8 heads cannot be shared out over 3 ranks, which nobody knows without the model.
    check(&draining("shape=1x1", "shape=3x1"), "colocated_prefill at b 0+1600, move (owner_draining)");
    check(&draining("shape=1x1", "shape=3x1").replacen("of=llama-3.1-8b", "", 1), fetched);
}

#[test]
fn a_prompt_is_computed_by_the_best_worker_that_the_target_can_read_from() {
    // d reads from p and r, of which r holds more; q is the best of all and has ranks of another kind.
    check(
        "ask prompt=16000
         worker p prefill shape=1x1
         worker q prefill holds=900 shape=4x1
         worker r prefill holds=500
         worker d decode running=8 shape=2x1",
        "remote_prefill at d 0+0, prefill at r 8000+8000, open",
    );
}

#[test]
fn a_plan_between_shapes_that_do_not_match_is_illegal() {
    let draining = "session owner=a sealed=99\n worker a hybrid holds=99 health=draining\n worker b hybrid shape=2x1";
    let mut scene = Scene::read(draining);
    let plan = scene.plan().plan;
    assert_eq!(plan.check(&scene.inputs()), Ok(()));
    scene.shapes.push((id("a"), ParallelShape { tensor: 4, pipeline: 1 }));
    scene.shapes.sort_unstable_by_key(|(id, _)| *id);
    assert_eq!(plan.check(&scene.inputs()), Err(Illegal::Shape(id("a"), id("b"))));
}

#[test]
fn a_replicate_that_ends_between_entries_is_illegal() {
    let draining = "attention of=hybrid\n session owner=a sealed=99
        worker a hybrid holds=99 health=draining\n worker b hybrid";
    let scene = Scene::read(draining);
    let mut plan = scene.plan().plan;
    let Some(Handoff::Replicate { blocks, .. }) = &mut plan.handoff else { panic!("{plan:?}") };
    assert_eq!(*blocks, Blocks(96));
    *blocks = Blocks(97);
    assert_eq!(plan.check(&scene.inputs()), Err(Illegal::Unaligned(Blocks(97))));
}

#[test]
fn a_dense_specification_decides_as_its_flat_figure_does() {
    let flat = Scene::read(
        &LONG_SESSION
            .replace("worker a hybrid", "worker a hybrid bytes=131072")
            .replace("worker b hybrid", "worker b hybrid bytes=131072"),
    );
    let spec = Scene { attention: Some(read("llama-3.1-8b")), ..Scene::read(LONG_SESSION) };
    assert_eq!(flat.plan(), spec.plan());
}
