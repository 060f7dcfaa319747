//! How many bytes of KV a token takes, from a model's own `config.json`. Dense and grouped-query attention.
//!
//! It never guesses: a model whose state is not one dense entry a token and layer is refused by name.

use serde::{Deserialize, Serialize};
use vocabulary::{Bytes, Tokens};

/// The attention of a model with the same dense or grouped-query KV in every layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
pub struct AttentionSpec {
    /// Layers that keep KV.
    pub layers: u32,
    /// KV heads of each layer, over all tensor-parallel ranks.
    pub kv_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// Width of one number.
    pub element: Bytes,
}

/// Why a `config.json` gives no specification.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Not JSON, or a field has the wrong type.
    #[error("the model's config.json cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// A field that the size depends on is absent or zero.
    #[error("the model's config.json lacks {0}")]
    Missing(&'static str),
    /// The KV has another shape.
    #[error("{0} is not supported: state the bytes of KV a token takes in the worker's configuration")]
    Unsupported(&'static str),
    /// A number type of unknown width.
    #[error("the number type {0:?} has no known width")]
    NumberType(String),
}

#[derive(Deserialize)]
struct HfConfig {
    text_config: Option<Box<HfConfig>>,
    num_hidden_layers: Option<u32>,
    num_attention_heads: Option<u32>,
    num_key_value_heads: Option<u32>,
    hidden_size: Option<u32>,
    head_dim: Option<u32>,
    #[serde(alias = "torch_dtype")]
    dtype: Option<String>,
    kv_lora_rank: Option<u32>,
    sliding_window: Option<u64>,
    use_sliding_window: Option<bool>,
    layer_types: Option<Vec<String>>,
}

impl AttentionSpec {
    /// From the text of a Hugging Face `config.json` (Llama, Qwen and alike; a multimodal model's `text_config`).
    ///
    /// KV has the weights' number type unless `with_element` says otherwise; absent, two bytes.
    pub fn from_config(json: &str) -> Result<Self, SpecError> {
        let outer: HfConfig = serde_json::from_str(json)?;
        let dtype = outer.dtype.clone();
        let config = outer.text_config.map_or_else(|| serde_json::from_str(json), |inner| Ok(*inner))?;
        if let Some(shape) = other_shape(&config) {
            return Err(SpecError::Unsupported(shape));
        }
        let given = |value: Option<u32>, name| value.filter(|n| *n > 0).ok_or(SpecError::Missing(name));
        let heads = given(config.num_attention_heads, "num_attention_heads");
        let head_dim = match config.head_dim {
            Some(dim) => given(Some(dim), "head_dim")?,
            None => given(Some(given(config.hidden_size, "hidden_size")? / *heads.as_ref().unwrap_or(&1)), "head_dim")?,
        };
        Ok(Self {
            layers: given(config.num_hidden_layers, "num_hidden_layers")?,
            kv_heads: config.num_key_value_heads.map_or(heads, |n| given(Some(n), "num_key_value_heads"))?,
            head_dim,
            element: config.dtype.or(dtype).map_or(Ok(Bytes(2)), |name| width(&name))?,
        })
    }

    /// The same model with KV of another width (an fp8 cache: one byte).
    pub fn with_element(self, element: Bytes) -> Self {
        Self { element, ..self }
    }

    /// Bytes of KV one token takes on all ranks together: 2 (key and value) x layers x KV heads x width of a head.
    pub fn kv_bytes_per_token(&self) -> Bytes {
        self.element * 2 * u64::from(self.layers) * u64::from(self.kv_heads) * u64::from(self.head_dim)
    }

    /// Bytes of KV that these tokens take.
    pub fn kv_bytes(&self, tokens: Tokens) -> Bytes {
        self.kv_bytes_per_token() * tokens.0
    }
}

fn other_shape(config: &HfConfig) -> Option<&'static str> {
    let windowed = config.sliding_window.is_some_and(|window| window > 0) && config.use_sliding_window != Some(false);
    let layers = config.layer_types.as_deref().unwrap_or_default();
    if config.kv_lora_rank.is_some() {
        Some("multi-head latent attention")
    } else if layers.iter().any(|layer| layer == "sliding_attention") || (windowed && config.layer_types.is_none()) {
        Some("sliding-window attention")
    } else if layers.iter().any(|layer| layer != "full_attention") {
        Some("a layer that is not full attention")
    } else {
        None
    }
}

fn width(name: &str) -> Result<Bytes, SpecError> {
    match name {
        "float32" => Ok(Bytes(4)),
        "bfloat16" | "float16" | "half" | "auto" => Ok(Bytes(2)),
        "fp8" | "fp8_e4m3" | "fp8_e5m2" | "float8_e4m3fn" | "float8_e5m2" | "int8" => Ok(Bytes(1)),
        _ => Err(SpecError::NumberType(name.chars().take(32).collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per_token(json: &str) -> u64 {
        AttentionSpec::from_config(json).unwrap().kv_bytes_per_token().0
    }

    #[test]
    fn known_models_have_their_published_size() {
        // Llama 3.1 8B: 32 layers x 8 heads x 128 x 2 x 2 bytes = 128 KiB.
        let llama = r#"{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16", "rope_scaling": {"factor": 8.0}}"#;
        assert_eq!(per_token(llama), 131_072);
        // Qwen3 32B states its head width, which is not hidden_size / heads; newer files say `dtype`.
        let qwen3 = r#"{"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
            "hidden_size": 5120, "head_dim": 128, "dtype": "bfloat16", "sliding_window": null}"#;
        assert_eq!(per_token(qwen3), 262_144);
        // Qwen2.5 names a window that it does not use; without KV heads every head keeps KV.
        let qwen2 = r#"{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "hidden_size": 896, "sliding_window": 32768, "use_sliding_window": false, "torch_dtype": "float32"}"#;
        assert_eq!(per_token(qwen2), 24 * 2 * 64 * 2 * 4);
        let mha = r#"{"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}"#;
        assert_eq!(per_token(mha), 12 * 12 * 64 * 2 * 2);
    }

    #[test]
    fn a_multimodal_model_is_read_from_its_text_part() {
        let json = r#"{"torch_dtype": "float16", "vision_config": {"num_hidden_layers": 99}, "text_config":
            {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}}"#;
        assert_eq!(per_token(json), 2 * 2 * 16 * 2 * 2);
    }

    #[test]
    fn the_cache_may_be_narrower_than_the_weights() {
        let json = r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "dtype": "float32"}"#;
        let spec = AttentionSpec::from_config(json).unwrap();
        assert_eq!(spec.kv_bytes(Tokens(10)).0, 10 * 4 * spec.with_element(Bytes(1)).kv_bytes_per_token().0);
    }

    #[test]
    fn other_shapes_of_state_are_refused_by_name() {
        let base = r#""num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16"#;
        let refused = |extra: &str| {
            let error = AttentionSpec::from_config(&format!("{{{base}, {extra}}}")).unwrap_err();
            assert!(matches!(error, SpecError::Unsupported(_)), "{extra}: {error}");
            error.to_string()
        };
        assert!(refused(r#""kv_lora_rank": 512"#).contains("latent"));
        assert!(refused(r#""sliding_window": 4096"#).contains("sliding"));
        assert!(refused(r#""layer_types": ["full_attention", "sliding_attention"]"#).contains("sliding"));
        assert!(refused(r#""layer_types": ["linear_attention", "full_attention"]"#).contains("not full"));
    }

    #[test]
    fn broken_files_are_errors_not_zeros() {
        for bad in [
            "",
            "[]",
            "{}",
            r#"{"num_hidden_layers": -1}"#,
            r#"{"num_hidden_layers": 0, "num_attention_heads": 4, "head_dim": 16}"#,
            r#"{"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 16}"#,
            r#"{"num_hidden_layers": 2, "num_attention_heads": 64, "hidden_size": 16}"#,
            r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "dtype": "int3"}"#,
        ] {
            assert!(AttentionSpec::from_config(bad).is_err(), "{bad}");
        }
    }
}
