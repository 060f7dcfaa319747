use planner::AttentionSpec;
use workers_shim::sim::EngineProfile;

use super::*;
use crate::config::Config;
use crate::toml_file::{TomlFileError, read_toml};

/// Paths that stand for an element of a list.
const LISTS: [&str; 6] =
    ["workers", "discovery.dns", "discovery.kubernetes", "layers", "layers.each", "layers.pattern"];

/// A file with `value` at `path`; `*` is the name `m`.
fn file_with(path: &str, value: Value) -> Table {
    let mut parts: Vec<&str> = path.split('.').collect();
    let mut inner = value;
    while let Some(last) = parts.pop() {
        if LISTS
            .contains(&format!("{}{last}", parts.iter().map(|part| format!("{part}.")).collect::<String>()).as_str())
        {
            inner = Value::Array(vec![inner]);
        }
        let name = if last == "*" { "m" } else { last };
        inner = Value::Table(Table::from_iter([(name.to_owned(), inner)]));
    }
    let Value::Table(table) = inner else { panic!("{path} has a segment") };
    table
}

/// A path of this table as it is shown for `file_with`.
fn shown(path: &str) -> String {
    let mut whole = String::new();
    let parts: Vec<&str> = path.split('.').collect();
    for (at, part) in parts.iter().enumerate() {
        let dot = if whole.is_empty() { "" } else { "." };
        whole += &format!("{dot}{}", if *part == "*" { "m" } else { part });
        if LISTS.contains(&parts[..=at].join(".").as_str()) && at + 1 < parts.len() {
            whole += "[0]";
        }
    }
    whole
}

fn load(text: &str) -> Result<Config, String> {
    let mut table: Table = text.parse().unwrap();
    Config::from_table(&mut table, &[]).map_err(|error| error.to_string())
}

fn profile(text: &str) -> Result<EngineProfile, TomlFileError> {
    read_toml(text, PROFILE)
}

#[test]
fn every_old_key_is_refused_with_its_new_name() {
    for keys in [SETTINGS, PROFILE, ATTENTION_FILE] {
        for key in keys.keys {
            let lines = keys.find(&file_with(key.old, Value::Boolean(true)));
            assert_eq!(lines, [format!("{} is now {}", shown(key.old), shown(key.new))]);
        }
        for section in keys.sections {
            let mut inside = file_with(section.old, Value::Table(Table::new()));
            assert_eq!(
                keys.find(&inside),
                [format!("{} is now {}", section.old, section.new)]
                    .map(|line| { line.replace("layers.", "layers[0].") })
            );
            inside = file_with(section.new, Value::Table(Table::new()));
            assert_eq!(keys.find(&inside), [] as [String; 0]);
        }
        for value in keys.values {
            let line = |old: &str| {
                let (old_value, new_value) = (value.old_value, value.new_value);
                format!("{} = \"{old_value}\" is now {} = \"{new_value}\"", shown(old), shown(value.new))
            };
            for path in [value.old, value.new] {
                assert_eq!(keys.find(&file_with(path, Value::String(value.old_value.into()))), [line(path)]);
            }
        }
    }
}

#[test]
fn every_new_key_of_the_settings_exists() {
    for key in SETTINGS.keys {
        let name = key.new.rsplit('.').next().unwrap();
        // Of the wrong type, or of the right one: unknown is neither.
        for value in [Value::Boolean(true), Value::Integer(1)] {
            let mut table = file_with(key.new, value);
            if let Err(error) = Config::from_table(&mut table, &[]) {
                let error = error.to_string();
                assert!(!error.contains("unknown field") && error.contains(name), "{}: {error}", key.new);
            }
        }
    }
    for value in SETTINGS.values {
        let mut table = file_with(value.new, Value::String(value.new_value.into()));
        if let Err(error) = Config::from_table(&mut table, &[]) {
            let error = error.to_string();
            assert!(error.contains("missing field `url`"), "{}: {error}", value.new);
        }
    }
}

#[test]
fn every_new_key_of_profiles_and_attention_files_exists() {
    let written = toml::to_string(&EngineProfile::default()).unwrap();
    assert_eq!(profile(&written).unwrap(), EngineProfile::default());
    let attention = r#"
        layer_alignment = "512B"
        window_checkpoints = { every_tokens = 4096 }
        [[layers]]
        repeat = 2
        [[layers.pattern]]
        kind = "mla"
        latent_dim = 576
        element_bits = 8
        index_entry_size = "132B"
        [[layers.pattern]]
        kind = "sliding_window"
        kv_heads = 8
        head_dim = 64
        window_tokens = 128
        [[layers.pattern]]
        kind = "csa"
        compression_ratio = 4
        entry_size = "584B"
        uncompressed_token_size = "584B""#;
    read_toml::<AttentionSpec>(attention, ATTENTION_FILE).unwrap();
    for (keys, text) in [(PROFILE, written.as_str()), (ATTENTION_FILE, attention)] {
        let file: Table = text.parse().unwrap();
        for key in keys.keys {
            assert!(!occurrences(&file, (key.new, key.new)).is_empty(), "{}", key.new);
        }
    }
}

#[test]
fn a_file_of_before_is_refused_with_all_new_names_at_once() {
    let error = load(
        r#"
        [steering]
        mode = "own"
        [identity]
        [models."Qwen/Qwen3-8B"]
        text = "/models/Qwen3-8B"
        [soft_state]
        secret = "sk-secret"
        timeout = 0.03
        [planner]
        lambda = 200.0
        [planner.admission]
        tolerated = 3_000_000
        [planner.tiers]
        host_bytes_per_second = 20e9
        [[workers]]
        url = "http://a:1"
        [[workers]]
        url = "http://b:1"
        [workers.profile.link]
        dialect = "plain"
        fixed_us = 1500"#,
    )
    .unwrap_err();
    let lines = [
        "the configuration has settings that were renamed:",
        "steering.mode = \"own\" is now routing.mode = \"active\"",
        "models.\"Qwen/Qwen3-8B\".text is now models.\"Qwen/Qwen3-8B\".tokenizer_dir",
        "soft_state.secret is now shared_cache.encryption_secret",
        "soft_state.timeout = 0.03 is now shared_cache.timeout = \"30ms\"",
        "workers[1].profile.link.dialect = \"plain\" is now workers[1].profile.link.connector = \"none\"",
        "workers[1].profile.link.fixed_us = 1500 is now workers[1].profile.link.latency = \"1.5ms\"",
        "planner.admission.tolerated = 3000000 is now planner.admission.max_displaced_compute = \"3s\"",
        "planner.lambda = 200.0 is now planner.memory_cost_per_mib = \"200us\"",
        "planner.tiers.host_bytes_per_second = 20000000000.0 is now planner.tiers.host_bandwidth = \"20GB\"",
        "identity is now prefix_cache",
    ];
    assert_eq!(error.lines().map(str::trim).collect::<Vec<_>>(), lines);
}

#[test]
fn an_old_value_under_a_new_key_is_refused_too() {
    let error = load("[routing]\nmode = \"sticky\"").unwrap_err();
    assert!(error.contains("routing.mode = \"sticky\" is now routing.mode = \"bypass\""), "{error}");
    let mut table = Table::new();
    let error = Config::from_table(&mut table, &["steering.mode=own".into()]).unwrap_err().to_string();
    assert!(error.contains("steering.mode = \"own\" is now routing.mode = \"active\""), "{error}");
}

#[test]
fn a_profile_of_before_is_refused_with_its_new_names() {
    let error = profile("step_overhead_us = 500\nblocks = 64\nblock_size = 16").unwrap_err().to_string();
    let lines = [
        "it has keys that were renamed:",
        "step_overhead_us = 500 is now step_overhead = \"500us\"",
        "blocks is now num_gpu_blocks",
    ];
    assert_eq!(error.lines().map(str::trim).collect::<Vec<_>>(), lines);
}

#[test]
fn a_recorded_section_gets_new_keys_units_and_values() {
    use serde_json::json;

    let planner = json!({
        "rule": "own", "lambda": 200.5, "mu": 0.3, "sources": "in_turn", "disabled": ["artifact_fetch"],
        "trust": {"fallback": 0.8}, "overload": {"queue": 2_000_000}, "tiers": {"host_bytes_per_second": 2e10},
        "thresholds": {"cold": 60_000_000}, "unknown": 1,
    });
    let renamed = json!({
        "policy": "lowest_cost", "memory_cost_per_mib": "200.5us", "interference_weight": 0.3,
        "replicate_dispatch": "queued", "disabled_actions": ["artifact_fetch"],
        "kv_index_confidence": {"approximate": 0.8}, "overload": {"max_queue_time": "2s"},
        "tiers": {"host_bandwidth": "20GB"}, "thresholds": {"cold_resume_after": "1m"}, "unknown": 1,
    });
    assert_eq!(SETTINGS.renamed("planner", planner), renamed);
    assert_eq!(SETTINGS.renamed("steering.mode", json!("sticky")), json!("bypass"));
    let file = json!({
        "alignment": 512, "checkpoints": {"every": 4096},
        "layers": [{"times": 2, "each": [{"state": "window", "kv_heads": 2, "bits": 16, "window": 128}]}],
    });
    let renamed = json!({
        "layer_alignment": "512B", "window_checkpoints": {"every_tokens": 4096},
        "layers": [{"repeat": 2, "pattern": [{"kind": "sliding_window", "kv_heads": 2, "element_bits": 16, "window_tokens": 128}]}],
    });
    assert_eq!(ATTENTION_FILE.renamed("", file), renamed);
}
