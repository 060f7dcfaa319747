//! Settings of a model.

use std::path::PathBuf;

use serde::Deserialize;

/// Section `[models.NAME]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// Folder with `tokenizer.json`, chat template and `config.json`. Without it prompts are identified by their bytes.
    pub tokenizer_dir: Option<PathBuf>,
    /// File that describes what its layers keep, in place of `config.json`; see `planner`'s `AttentionSpec`.
    pub attention_file: Option<PathBuf>,
    /// Bits of a number in the engines' KV cache, where that is not the weights' width: `--kv-cache-dtype fp8` is 8.
    pub kv_cache_bits: Option<u32>,
    /// Tokens a chain block; must divide the block size of every engine that serves the model.
    pub block_size: Option<u32>,
    /// Revision of the weights, where several are in use.
    pub revision: Option<String>,
    /// LoRA adapters of it, by the names that the engines serve them under.
    pub lora_adapters: Vec<String>,
}
