//! Parsing of `config.json`: accepted and rejected files.

use vocabulary::{Bytes, Tokens};

use super::{read, text_of};
use crate::attention::*;

/// Returns the number of layers that keep all tokens, and of layers with a window.
fn split(spec: &AttentionSpec) -> (usize, usize) {
    let windows = spec.layers().iter().filter(|layer| matches!(layer, LayerState::SlidingWindow(_))).count();
    (spec.layers().len() - windows, windows)
}

fn window_of(spec: &AttentionSpec) -> u64 {
    let window = spec.layers().iter().find_map(|layer| match layer {
        LayerState::SlidingWindow(layer) => Some(layer.window_tokens.0),
        _ => None,
    });
    window.unwrap()
}

#[test]
fn dense_models_match_their_published_bytes_per_token() {
    // Layers x KV heads x head width x 2 (key and value) x 2 bytes.
    assert_eq!(read("llama-3.1-8b").bytes_per_token(), Bytes(32 * 8 * 128 * 2 * 2));
    assert_eq!(read("llama-3.1-8b").bytes_per_token(), Bytes(131_072));
    // The file states `head_dim`, which differs from hidden_size / heads.
    assert_eq!(read("qwen3-32b").bytes_per_token(), Bytes(64 * 8 * 128 * 2 * 2));
    // The file has a window that is not used.
    assert_eq!(read("qwen2.5-0.5b").bytes_per_token(), Bytes(24 * 2 * 64 * 2 * 2));
    assert_eq!(split(&read("qwen2.5-0.5b")), (24, 0));
}

#[test]
fn latent_models_keep_one_entry_for_all_heads() {
    // (512 + 64) x 61 layers x 2 bytes, whatever the quantization of the weights.
    assert_eq!(read("deepseek-v3").bytes_per_token(), Bytes(70_272));
    assert_eq!(read("deepseek-v2-lite").bytes_per_token(), Bytes((512 + 64) * 27 * 2));
}

#[test]
fn mistral_v0_1_has_a_window_in_every_layer_and_v0_3_none() {
    let first = read("mistral-7b-v0.1");
    assert_eq!((split(&first), window_of(&first)), ((0, 32), 4_096));
    // The state stops growing after 4,096 tokens: 4,096 x 128 KiB.
    assert_eq!(first.state_bytes(Tokens(32_768)), Bytes(4_096 * 131_072));
    assert_eq!(first.state_bytes(Tokens(100)), Bytes(100 * 131_072));
    assert_eq!(split(&read("mistral-7b-v0.3")), (32, 0));
}

#[test]
fn gpt_oss_has_a_window_of_128_in_every_other_layer() {
    let spec = read("gpt-oss-20b");
    assert_eq!((split(&spec), window_of(&spec)), ((12, 12), 128));
    assert!(matches!(spec.layers()[0], LayerState::SlidingWindow(_)), "a window comes first");
    // Per layer and token: 8 heads x 64 x 2 x 2 bytes = 2 KiB.
    assert_eq!(spec.state_bytes(Tokens(10_000)), Bytes(12 * 2_048 * (10_000 + 128)));
    assert_eq!(spec.window_depth(), Tokens(12 * 128));
}

#[test]
fn gpt_oss_alternates_windows_without_a_layer_list() {
    let mut short: serde_json::Value = serde_json::from_str(text_of("gpt-oss-20b")).unwrap();
    short.as_object_mut().unwrap().remove("layer_types").unwrap();
    assert_eq!(AttentionSpec::from_config(&short.to_string()).unwrap(), read("gpt-oss-20b"));
}

#[test]
fn gemma_3_has_five_window_layers_per_full_layer() {
    let spec = read("gemma-3-27b");
    // 62 layers: every sixth, 10 in all, is a full layer.
    assert_eq!((split(&spec), window_of(&spec)), ((10, 52), 1_024));
    // Per layer and token: 16 heads x 128 x 2 x 2 bytes = 8 KiB.
    assert_eq!(spec.state_bytes(Tokens(50_000)), Bytes(8_192 * (10 * 50_000 + 52 * 1_024)));
    assert_eq!(spec.bytes_per_token(), Bytes(10 * 8_192), "in the long run only the others grow");
    // The small models omit fields that equal the family's defaults: 4 KV heads of 256.
    let small = read("gemma-3-4b");
    assert_eq!(split(&small), (5, 29));
    assert_eq!(small.bytes_per_token(), Bytes(5 * 4 * 256 * 2 * 2));
}

#[test]
fn gemma_2_alternates_windows_of_4096() {
    let spec = read("gemma-2-9b");
    assert_eq!((split(&spec), window_of(&spec)), ((21, 21), 4_096));
    assert_eq!(spec.bytes_per_token(), Bytes(21 * 8 * 256 * 2 * 2));
}

#[test]
fn kv_cache_may_use_fewer_bits_than_the_weights() {
    let spec = read("llama-3.1-8b");
    assert_eq!(spec.with_kv_bits(8).unwrap().bytes_per_token(), Bytes(65_536));
    assert!(spec.with_kv_bits(3).is_err());
}

/// Parses the `config.json` of a small dense model with these fields added.
fn small(fields: &str) -> Result<AttentionSpec, SpecError> {
    let base = r#"{"model_type": "qwen3", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}"#;
    let mut file: serde_json::Map<_, _> = serde_json::from_str(base).unwrap();
    file.extend(serde_json::from_str::<serde_json::Map<_, _>>(fields).unwrap());
    AttentionSpec::from_config(&serde_json::Value::Object(file).to_string())
}

#[test]
fn missing_kv_heads_and_dtype_fall_back_to_defaults() {
    assert_eq!(small("{}").unwrap().bytes_per_token(), Bytes(4 * 4 * 16 * 2 * 2));
    assert_eq!(small(r#"{"torch_dtype": "float32"}"#).unwrap().bytes_per_token(), Bytes(4 * 4 * 16 * 2 * 4));
    assert_eq!(small(r#"{"head_dim": null, "dtype": null}"#).unwrap(), small("{}").unwrap(), "null is absent");
}

#[test]
fn enabled_qwen_window_starts_at_max_window_layers() {
    let spec = small(r#"{"use_sliding_window": true, "sliding_window": 32, "max_window_layers": 3}"#).unwrap();
    assert_eq!((split(&spec), window_of(&spec)), ((3, 1), 32));
}

#[test]
fn invalid_config_field_error_names_found_and_accepted_values() {
    let check = |fields: &str, expected: &str| assert_eq!(small(fields).unwrap_err().to_string(), expected, "{fields}");
    check(r#"{"num_hidden_layers": 0}"#, "num_hidden_layers is 0; accepted: a whole number, 1 to 1024");
    check(r#"{"num_hidden_layers": -3}"#, "num_hidden_layers is -3; accepted: a whole number, 1 to 1024");
    check(r#"{"num_hidden_layers": 1e9}"#, "num_hidden_layers is 1000000000.0; accepted: a whole number, 1 to 1024");
    check(r#"{"num_hidden_layers": null}"#, "num_hidden_layers is missing; accepted: a whole number, 1 to 1024");
    check(r#"{"num_key_value_heads": "8"}"#, "num_key_value_heads is \"8\"; accepted: a whole number, 1 to 1024");
    check(
        r#"{"hidden_size": 65}"#,
        "hidden_size is 65; accepted: a multiple of num_attention_heads (4), or state head_dim",
    );
    check(
        r#"{"dtype": "int3"}"#,
        "dtype is int3; accepted: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8",
    );
    check(
        r#"{"layer_types": ["full_attention"]}"#,
        "layer_types is 1 layers; accepted: 4, as many as num_hidden_layers",
    );
    let linear = r#"{"layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"]}"#;
    check(linear, "layer_types is \"linear_attention\"; accepted: full_attention or sliding_attention");
    let windows = r#"{"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]}"#;
    check(windows, "sliding_window is missing; accepted: 1 to 16777216, since layer_types names windows");
    check(r#"{"use_sliding_window": 1}"#, "use_sliding_window is 1; accepted: true or false");
    check(r#"{"use_sliding_window": true}"#, "sliding_window is missing; accepted: 1 to 16777216");
}

#[test]
fn unknown_model_family_is_rejected_with_the_known_ones() {
    let error = small(r#"{"model_type": "jamba"}"#).unwrap_err().to_string();
    assert!(error.starts_with("model_type is jamba; accepted: deepseek_v2, "), "{error}");
    assert!(error.contains("models.NAME.attention_file"), "says what to do next: {error}");
    assert!(small(r#"{"model_type": null}"#).unwrap_err().to_string().starts_with("model_type is missing"));
    let long = small(&format!(r#"{{"model_type": "{}"}}"#, "x".repeat(10_000))).unwrap_err();
    assert!(long.to_string().len() < 500, "a stranger's words are shortened");
}

#[test]
fn multimodal_config_is_read_from_its_text_part() {
    let json = r#"{"model_type": "gemma3", "torch_dtype": "float32", "vision_config": {"num_hidden_layers": 99},
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}}"#;
    assert_eq!(AttentionSpec::from_config(json).unwrap().bytes_per_token(), Bytes(2 * 16 * 2 * 4));
    let wrong = json.replace("\"num_hidden_layers\": 6", "\"num_hidden_layers\": 6000");
    let error = AttentionSpec::from_config(&wrong).unwrap_err().to_string();
    assert!(error.starts_with("text_config.num_hidden_layers is 6000"), "{error}");
}

#[test]
fn broken_and_oversized_config_files_are_errors() {
    for bad in ["", "[]", "7", "{\"model_type\"", "{}", r#"{"model_type": "llama"}"#, r#"{"model_type": 3}"#] {
        assert!(AttentionSpec::from_config(bad).is_err(), "{bad}");
    }
    let padded = format!("{}{}", text_of("llama-3.1-8b"), " ".repeat(1 << 20));
    assert!(matches!(AttentionSpec::from_config(&padded), Err(SpecError::TooLong { .. })));
}
