//! Effect of the model's attention family on plans.

use vocabulary::{Blocks, Bytes, Micros, Tokens};

use super::{PlanningScene, check, id, list, terms};
use crate::attention::tests::{hybrid, read};
use crate::*;

/// 128,000 sealed tokens at an owner with 64 running answers, and an idle worker.
const LONG_SESSION: &str = "
    session owner=a sealed=8000
    ask step=small_increment prompt=128100
    policy off=remote_prefill
    worker a hybrid holds=8000 running=64
    worker b hybrid";

/// The main scenario of this module: the same session, load and network for different models.
///
/// A dense model's KV (16.8 GB) stays where it is. A hybrid model's compressed entries (0.8 GB) are fetched, and
/// windows that were not stored are recomputed at the target: all 60 layers' worth, or the part after a checkpoint.
#[test]
fn dense_session_stays_while_a_hybrid_one_moves_and_recomputes_its_tail() {
    let with = |model: &str| format!("{LONG_SESSION}\n attention {model}");
    check(&with("of=llama-3.1-8b"), "colocated_prefill at a 128000+100, keep");
    check(&with("of=hybrid checkpoints=none"), "tail_recompute at b 120320+7780, 8000 blocks from a, read_replica");
    check(&with("of=hybrid checkpoints=4096"), "tail_recompute at b 126976+1124, 7936 blocks from a, read_replica");
    check(&with("of=hybrid"), "artifact_fetch at b 128000+100, 8000 blocks from a, read_replica");
}

#[test]
fn latent_session_moves_where_a_dense_one_with_equal_layers_stays() {
    // 70,272 bytes per token make 9 GB; the same 61 layers with 8 heads of 128 would make 32 GB.
    let busier = LONG_SESSION.replace("running=64", "running=96");
    check(
        &format!("{busier}\n attention of=deepseek-v3"),
        "artifact_fetch at b 128000+100, 8000 blocks from a, read_replica",
    );
    let heads = DenseKv { kv_heads: 8, head_dim: 128, element_bits: 16 };
    let dense = AttentionSpec::new(vec![LayerState::Dense(heads); 61], Bytes(1)).unwrap();
    let scene = PlanningScene { attention: Some(dense), ..PlanningScene::read(&busier) };
    assert_eq!(scene.name(scene.plan().plan.target()), "a");
}

#[test]
fn fewer_kv_bits_make_a_session_cheaper_to_move() {
    let scene = |bits| {
        let attention = Some(read("llama-3.1-8b").with_kv_bits(bits).unwrap());
        PlanningScene { attention, ..PlanningScene::read(&format!("{LONG_SESSION}\n policy lambda=0")) }
    };
    let target = |bits| {
        let scene = scene(bits);
        scene.name(scene.plan().plan.target()).to_owned()
    };
    assert_eq!([4, 8, 32].map(target), ["b", "b", "a"]);
}

#[test]
fn target_fetches_only_the_blocks_it_lacks() {
    let text = format!("{LONG_SESSION} holds=4000\n attention of=hybrid");
    let scene = PlanningScene::read(&text);
    let plan = scene.plan().plan;
    let spec = hybrid();
    assert_eq!(plan.moved_bytes(), spec.range_bytes(Tokens(64_000), Tokens(128_000)));
    assert_eq!(plan.action, Action::ArtifactFetch);
}

#[test]
fn checkpoint_inside_an_engine_block_is_not_used() {
    // Windows are stored every 1,152 tokens, which is an engine block boundary (256 tokens) only every 2,304 tokens.
    let text = format!("{LONG_SESSION} block=256\n attention of=hybrid checkpoints=1152");
    let plan = PlanningScene::read(&text).plan().plan;
    let blocks = plan.sequence.handoff(HandoffKind::Replicate).unwrap().blocks.unwrap();
    let tokens = blocks.tokens(Tokens(16));
    assert_eq!((tokens, plan.answer_leg().cached_tokens), (Tokens(55 * 2_304), Tokens(55 * 2_304)));
}

#[test]
fn prefix_shorter_than_the_window_depth_is_recomputed_unless_stored() {
    // 400 blocks are 6,400 tokens; the windows of 60 layers reach back 7,680 tokens.
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
fn window_only_kv_is_light_enough_to_move() {
    // Mistral v0.1: 512 MiB for any session length; 16.8 GB without its window.
    check(
        &format!("{LONG_SESSION}\n attention of=mistral-7b-v0.1"),
        "artifact_fetch at b 128000+100, 8000 blocks from a, read_replica",
    );
    check(&format!("{LONG_SESSION}\n attention of=mistral-7b-v0.3"), "colocated_prefill at a 128000+100, keep");
}

#[test]
fn disabled_tail_recompute_moves_the_tail_when_possible() {
    // Loading the windows (4 GB) takes longer than computing 60 x 16 tokens; both are cheaper than staying.
    let layer = WindowKv { kv_heads: 64, head_dim: 16_384, element_bits: 16, window_tokens: Tokens(16) };
    let latent = LatentKv { latent_dim: 64, element_bits: 8, index_entry_size: Bytes(0) };
    let layers = [LayerState::SlidingWindow(layer), LayerState::Mla(latent)].repeat(60);
    let attention = Some(AttentionSpec::new(layers, Bytes(1)).unwrap());
    let line = |off: &str| {
        let scene = PlanningScene::read(&format!("{LONG_SESSION}\n policy lambda=0 {off}"));
        let scene = PlanningScene { attention: attention.clone(), ..scene };
        let plan = scene.plan().plan;
        (plan.action, scene.name(plan.target()).to_owned())
    };
    assert_eq!(line(""), (Action::TailRecompute, "b".to_owned()));
    assert_eq!(line("off=tail_recompute"), (Action::ArtifactFetch, "b".to_owned()));
}

#[test]
fn session_stays_when_recomputing_windows_costs_too_much() {
    check(
        &format!("{LONG_SESSION} rate=2000\n attention of=hybrid checkpoints=none"),
        "colocated_prefill at a 128000+100, keep",
    );
}

/// Returns the bytes that the chosen plan moves.
fn moved(text: &str) -> Bytes {
    PlanningScene::read(text).plan().plan.moved_bytes()
}

#[test]
fn fetch_bytes_follow_the_model_rather_than_the_worker() {
    let draining = "session owner=a sealed=99\n worker a hybrid holds=99 health=draining\n worker b hybrid";
    assert_eq!(moved(draining), Bytes(99 * 16 * 100_000));
    let with = |model: &str| moved(&format!("{draining}\n attention of={model}"));
    assert_eq!(with("llama-3.1-8b"), Bytes(99 * 16 * 131_072));
    assert_eq!(with("deepseek-v3"), Bytes(99 * 16 * 70_272));
    assert_eq!(with("gpt-oss-20b"), Bytes(12 * 2_048 * (99 * 16 + 128)));
    // 99 x 16 tokens do not end at a boundary of the model's 128-token block.
    let spec = hybrid();
    assert_eq!(with("hybrid"), spec.range_bytes(Tokens(0), Tokens(12 * 128)));
}

#[test]
fn remote_prefill_bytes_include_windows_and_tail() {
    let text = "ask prompt=16000\n attention of=hybrid\n worker p prefill\n worker d decode running=8 holds=800";
    let price = terms(text, Action::RemotePrefill, "d");
    let spec = hybrid();
    let bytes = spec.entry_bytes(Tokens(16_000)) - spec.entry_bytes(Tokens(12_800))
        + spec.kind_bytes(StateKind::WindowSwa, Tokens(3_200))
        + spec.kind_bytes(StateKind::TailState, Tokens(16_000));
    assert_eq!(price.network, Micros(10_000 + bytes.0 / 10_000 + 20_000));
}

#[test]
fn tiers_and_memory_are_priced_by_the_model() {
    let at = |lines: &str| terms(&format!("attention of=gpt-oss-20b\n {lines}"), Action::ColocatedPrefill, "a");
    let layers = 12 * 2_048;
    // 1,584 tokens from host memory at 20 GB/s, of which 128 in windows.
    assert_eq!(at("worker a hybrid host=99").restore, Micros(layers * (1_584 + 128) / 20_000 + 20_000));
    let price = at("policy lambda=1048576\n worker a hybrid holds=50 usage=0.5");
    assert_eq!(price.memory, Micros(layers * (900 + 128) / 2), "prompt and answer, by half");
}

#[test]
fn kv_moves_only_between_compatible_parallel_shapes() {
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
    assert!(listed.contains(&"artifact_fetch at b: parallelism_mismatch".to_owned()), "{listed:?}");
    // 8 heads cannot be split over 3 ranks, but that is unknown without the model.
    check(&draining("shape=1x1", "shape=3x1"), "colocated_prefill at b 0+1600, move (owner_draining)");
    check(&draining("shape=1x1", "shape=3x1").replacen("of=llama-3.1-8b", "", 1), fetched);
}

#[test]
fn remote_prefill_uses_the_best_worker_of_a_compatible_shape() {
    // d can read from p and r, and r holds more; q holds most of all, but its shape is incompatible.
    check(
        "ask prompt=16000
         worker p prefill shape=1x1
         worker q prefill holds=900 shape=4x1
         worker r prefill holds=500
         worker d decode running=8 shape=2x1",
        "remote_prefill at d 0+0, prefill at r 8000+8000, claim",
    );
}

#[test]
fn plan_between_incompatible_shapes_is_illegal() {
    let draining = "session owner=a sealed=99\n worker a hybrid holds=99 health=draining\n worker b hybrid shape=2x1";
    let mut scene = PlanningScene::read(draining);
    let plan = scene.plan().plan;
    assert_eq!(plan.check(&scene.inputs()), Ok(()));
    scene.shapes.push((id("a"), ParallelShape { tensor: 4, pipeline: 1 }));
    scene.shapes.sort_unstable_by_key(|(id, _)| *id);
    assert_eq!(plan.check(&scene.inputs()), Err(PlanViolation::IncompatibleShapes(id("a"), id("b"))));
}

#[test]
fn replicate_that_ends_between_entries_is_illegal() {
    let draining = "attention of=hybrid\n session owner=a sealed=99
        worker a hybrid holds=99 health=draining\n worker b hybrid";
    let scene = PlanningScene::read(draining);
    let mut plan = scene.plan().plan;
    let [Some(LegOrHandoff::Handoff(handoff)), None] = &mut plan.sequence.before_answer else { panic!("{plan:?}") };
    assert_eq!(handoff.blocks.replace(Blocks(97)), Some(Blocks(96)));
    assert_eq!(plan.check(&scene.inputs()), Err(PlanViolation::Unaligned(Blocks(97))));
}

#[test]
fn dense_spec_decides_like_its_flat_bytes_per_token() {
    let flat = PlanningScene::read(
        &LONG_SESSION
            .replace("worker a hybrid", "worker a hybrid bytes=131072")
            .replace("worker b hybrid", "worker b hybrid bytes=131072"),
    );
    let spec = PlanningScene { attention: Some(read("llama-3.1-8b")), ..PlanningScene::read(LONG_SESSION) };
    assert_eq!(flat.plan(), spec.plan());
}
