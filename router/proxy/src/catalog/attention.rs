//! Attention specification: the state that a model's layers keep, read from the file in `models.NAME.attention_file`, else
//! from the `config.json` beside its text.
//!
//! An unknown `config.json` only makes prices less exact, so it is a warning; an invalid file that was written for this
//! router prevents the start.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use planner::{AttentionSpec, SpecError, StateKind};
use vocabulary::ModelId;

use ownership::ledger::{KvKind, KvKinds};

use super::BUILT_IN;
use crate::catalog::ModelConfig;
use crate::renamed_keys;
use crate::toml_file::{TomlFileError, read_toml};

/// Why a model's attention file or its `kv_cache_bits` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AttentionError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is longer than any valid one.
    #[error("{0} has more than {most} bytes", most = AttentionSpec::MAX_CONFIG_BYTES)]
    TooLong(PathBuf),
    /// The file is not TOML, or has values that are not accepted.
    #[error("{path}: {source}")]
    Wrong {
        /// The file.
        path: PathBuf,
        /// Position and reason.
        source: TomlFileError,
    },
    /// `kv_cache_bits`, or the content of a `config.json`, is not accepted.
    #[error("{0}")]
    Spec(#[from] SpecError),
}

/// Loads the model's specification, where there is one.
pub(super) fn load(model: &ModelId, config: &ModelConfig) -> Result<Option<Arc<AttentionSpec>>, AttentionError> {
    let spec = match (&config.attention_file, &config.tokenizer_dir) {
        (Some(file), _) => Some(load_description(file)?),
        // The built-in text is small, but the engines that are simulated for it hold blocks like a large model's.
        (None, Some(folder)) if folder.to_str() != Some(BUILT_IN) => load_folder(model, folder),
        (None, _) => None,
    };
    let narrowed = |spec: AttentionSpec| config.kv_cache_bits.map_or(Ok(spec.clone()), |bits| spec.with_kv_bits(bits));
    Ok(spec.map(narrowed).transpose()?.map(Arc::new))
}

/// Returns the kinds of state that its blocks hold, in the ledger's format.
pub(super) fn ledger_kinds(spec: &AttentionSpec) -> KvKinds {
    let kind = |kind| match kind {
        StateKind::DenseKv => KvKind::DenseKv,
        StateKind::CompressedCsaMain => KvKind::CompressedCsaMain,
        StateKind::CompressedCsaIndex => KvKind::CompressedCsaIndex,
        StateKind::CompressedHca => KvKind::CompressedHca,
        StateKind::WindowSwa => KvKind::WindowSwa,
        StateKind::TailState => KvKind::TailState,
    };
    // A tail belongs to the session's owner alone and is not stored in blocks.
    let sealed = spec.kinds().filter(|kind| *kind != StateKind::TailState);
    sealed.map(kind).fold(KvKinds(0), KvKinds::with)
}

/// Loads a `config.json`, or a description in our own format if the name ends otherwise.
pub fn load_spec(path: &Path) -> Result<AttentionSpec, AttentionError> {
    match path.extension().is_some_and(|ending| ending == "json") {
        true => Ok(AttentionSpec::from_config(&read(path)?)?),
        false => load_description(path),
    }
}

fn load_description(path: &Path) -> Result<AttentionSpec, AttentionError> {
    let text = read(path)?;
    read_toml(&text, renamed_keys::ATTENTION_FILE).map_err(|source| AttentionError::Wrong { path: path.into(), source })
}

/// Loads the specification from a model's directory; `None` without a `config.json`, or with an unknown one.
fn load_folder(name: &ModelId, folder: &Path) -> Option<AttentionSpec> {
    let path = folder.join("config.json");
    let spec = match read(&path) {
        Err(AttentionError::Unreadable { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => return None,
        text => text.and_then(|text| Ok(AttentionSpec::from_config(&text)?)),
    };
    spec.inspect_err(|error| {
        tracing::warn!(
            model = %name, path = %path.display(), %error,
            "the model's KV is not known; it is priced by each worker's kv_size_per_token"
        );
    })
    .ok()
}

fn read(path: &Path) -> Result<String, AttentionError> {
    let unreadable = |source| AttentionError::Unreadable { path: path.into(), source };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let most = AttentionSpec::MAX_CONFIG_BYTES as u64;
    let mut text = String::new();
    let length = file.take(most + 1).read_to_string(&mut text).map_err(unreadable)?;
    if length as u64 > most { Err(AttentionError::TooLong(path.into())) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use vocabulary::{Bytes, Tokens};

    use super::*;

    const LLAMA: &str = r#"{"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16"}"#;
    const HYBRID: &str = r#"
        layer_alignment = "512B"
        window_checkpoints = { every_tokens = 4096 }
        [[layers]]
        repeat = 30
        [[layers.pattern]]
        kind = "csa"
        compression_ratio = 4
        entry_size = "640B"
        index_entry_size = "132B"
        uncompressed_token_size = "640B"
        window_tokens = 128
        [[layers.pattern]]
        kind = "hca"
        compression_ratio = 128
        entry_size = "640B"
        uncompressed_token_size = "640B"
        window_tokens = 128"#;

    /// Loads a model with this `config.json` in its directory and this attention file, where they are given.
    fn load_with(
        json: Option<&str>,
        file: Option<&str>,
        kv_cache_bits: Option<u32>,
    ) -> Result<Option<AttentionSpec>, String> {
        let folder = tempfile::tempdir().unwrap();
        let written = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        json.map(|text| written("config.json", text));
        let attention_file = file.map(|text| written("attention.toml", text));
        let tokenizer_dir = Some(folder.path().to_owned());
        let config = ModelConfig { tokenizer_dir, attention_file, kv_cache_bits, ..ModelConfig::default() };
        let spec = load(&"m".into(), &config).map_err(|error| error.to_string())?;
        Ok(spec.map(|spec| (*spec).clone()))
    }

    #[test]
    fn attention_is_read_from_the_model_folder() {
        let spec = load_with(Some(LLAMA), None, None).unwrap().unwrap();
        assert_eq!((spec.bytes_per_token(), ledger_kinds(&spec)), (Bytes(131_072), KvKinds::default()));
        let narrow = load_with(Some(LLAMA), None, Some(8)).unwrap().unwrap();
        assert_eq!(narrow.bytes_per_token(), Bytes(65_536));
        assert!(
            load_with(Some(LLAMA), None, Some(7)).unwrap_err().contains("kv_cache_bits is 7; accepted: 4, 8, 16 or 32")
        );
    }

    #[test]
    fn a_missing_or_unknown_model_config_yields_no_attention() {
        let huge = format!("{LLAMA}{}", " ".repeat(AttentionSpec::MAX_CONFIG_BYTES));
        for strange in [None, Some("{"), Some(r#"{"model_type": "jamba"}"#), Some(huge.as_str())] {
            assert_eq!(load_with(strange, None, None), Ok(None));
        }
    }

    #[test]
    fn an_explicit_attention_file_overrides_the_folder_and_must_be_valid() {
        let spec = load_with(Some(LLAMA), Some(HYBRID), None).unwrap().unwrap();
        assert_eq!((spec.layers().len(), spec.block()), (60, Tokens(128)));
        let all = [KvKind::CompressedCsaMain, KvKind::CompressedCsaIndex, KvKind::CompressedHca, KvKind::WindowSwa];
        assert_eq!(ledger_kinds(&spec), all.into_iter().fold(KvKinds(0), KvKinds::with));
        let wrong = load_with(None, Some(&HYBRID.replace("compression_ratio = 128", "compression_ratio = 0")), None)
            .unwrap_err();
        assert!(
            wrong.contains("attention.toml") && wrong.contains("compression_ratio is 0; accepted: 1 to 65536"),
            "{wrong}"
        );
        let config = ModelConfig { attention_file: Some("/nonexistent.toml".into()), ..ModelConfig::default() };
        assert!(load(&"m".into(), &config).unwrap_err().to_string().contains("/nonexistent.toml"));
    }

    #[test]
    fn the_built_in_model_has_no_attention_spec() {
        let config = ModelConfig { tokenizer_dir: Some(BUILT_IN.into()), ..ModelConfig::default() };
        assert!(load(&"tiny".into(), &config).unwrap().is_none());
    }
}
