//! Builds a specification from a Hugging Face `config.json`, by model family.
//!
//! Fields and defaults are those of `transformers` (`models/*/configuration_*.py`). The family is given by
//! `model_type`, which every published file has.

use serde_json::Value;
use vocabulary::{Bytes, Tokens};

use super::config_fields::ConfigObject;
use super::error::shortened;
use super::layer::{DenseKv, LatentKv, LayerState, MAX_HEADS, MAX_WIDTH, MAX_WINDOW, WindowKv, check_bits};
use super::spec::MAX_LAYERS;
use super::{AttentionSpec, SpecError};

/// Which layers of a family use a sliding window.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ModelFamily {
    /// No windows: every layer keeps every token.
    Dense,
    /// All layers use `sliding_window`, unless it is null.
    Mistral,
    /// Dense, unless `use_sliding_window` is set: then layers from `max_window_layers` on use the window.
    Qwen,
    /// Layers alternate between a window and all tokens; the first has a window.
    Alternate,
    /// Every sixth layer (`sliding_window_pattern`) keeps all tokens; the others have a window.
    Gemma3,
    /// Multi-head latent attention.
    DeepSeek,
}

const FAMILIES: [(&str, ModelFamily); 18] = [
    ("deepseek_v2", ModelFamily::DeepSeek),
    ("deepseek_v3", ModelFamily::DeepSeek),
    ("gemma", ModelFamily::Dense),
    ("gemma2", ModelFamily::Alternate),
    ("gemma3", ModelFamily::Gemma3),
    ("gemma3_text", ModelFamily::Gemma3),
    ("glm4_moe", ModelFamily::Dense),
    ("gpt_oss", ModelFamily::Alternate),
    ("granite", ModelFamily::Dense),
    ("kimi_k2", ModelFamily::DeepSeek),
    ("llama", ModelFamily::Dense),
    ("mistral", ModelFamily::Mistral),
    ("mixtral", ModelFamily::Mistral),
    ("olmo2", ModelFamily::Dense),
    ("qwen2", ModelFamily::Qwen),
    ("qwen2_moe", ModelFamily::Qwen),
    ("qwen3", ModelFamily::Qwen),
    ("qwen3_moe", ModelFamily::Qwen),
];

impl AttentionSpec {
    /// Largest accepted `config.json` in bytes; published ones have a few thousand.
    pub const MAX_CONFIG_BYTES: usize = 1 << 20;

    /// Builds a specification from the text of a model's `config.json`; for a multimodal model, from its `text_config`.
    ///
    /// KV numbers have the width of the weights' `dtype`, or two bytes if none is given. Quantization chosen at engine
    /// start is not in this file: see `with_kv_bits`.
    pub fn from_config(json: &str) -> Result<Self, SpecError> {
        if json.len() > Self::MAX_CONFIG_BYTES {
            return Err(SpecError::TooLong { found: json.len(), accepted: Self::MAX_CONFIG_BYTES });
        }
        let file: Value = serde_json::from_str(json).map_err(|error| SpecError::NotAnObject(error.to_string()))?;
        let file = file.as_object().ok_or_else(|| SpecError::NotAnObject(shortened(json)))?;
        let outer = ConfigObject::of_file(file);
        let inner = outer.text_part();
        let fields = inner.as_ref().unwrap_or(&outer);
        let family = match fields.text("model_type")? {
            Some(name) => family(name)?,
            None => family(outer.text("model_type")?.unwrap_or("missing"))?,
        };
        let bits = match kv_bits(fields)? {
            Some(bits) => bits,
            None => bits_of_weights(&outer)?,
        };
        Self::new(layers(family, fields, bits)?, Bytes(1))
    }

    /// Returns the same model with KV numbers of `bits` bits, as set on the engine (`--kv-cache-dtype fp8`: 8).
    pub fn with_kv_bits(&self, bits: u32) -> Result<Self, SpecError> {
        check_bits("kv_cache_bits", bits)?;
        let narrowed = |layer: &LayerState| match *layer {
            LayerState::Dense(heads) => LayerState::Dense(DenseKv { element_bits: bits, ..heads }),
            LayerState::Mla(latent) => LayerState::Mla(LatentKv { element_bits: bits, ..latent }),
            LayerState::SlidingWindow(layer) => LayerState::SlidingWindow(WindowKv { element_bits: bits, ..layer }),
            stated @ (LayerState::Csa(_) | LayerState::Hca(_)) => stated,
        };
        Self::new(self.layers().iter().map(narrowed).collect(), self.alignment())
    }
}

fn family(name: &str) -> Result<ModelFamily, SpecError> {
    let known = FAMILIES.iter().find(|(known, _)| *known == name);
    known.map(|(_, family)| *family).ok_or_else(|| SpecError::UnknownFamily {
        found: shortened(name),
        accepted: FAMILIES.map(|(known, _)| known).join(", "),
    })
}

fn layers(family: ModelFamily, fields: &ConfigObject<'_>, bits: u32) -> Result<Vec<LayerState>, SpecError> {
    let count = fields.required_number("num_hidden_layers", 1..=MAX_LAYERS)? as usize;
    if family == ModelFamily::DeepSeek {
        let width = fields.required_number("kv_lora_rank", 1..=MAX_WIDTH)?
            + fields.required_number("qk_rope_head_dim", 1..=MAX_WIDTH)?;
        return Ok(vec![
            LayerState::Mla(LatentKv {
                latent_dim: width as u32,
                element_bits: bits,
                index_entry_size: Bytes::ZERO
            });
            count
        ]);
    }
    let DenseKv { kv_heads, head_dim, element_bits: bits } = heads(family, fields, bits)?;
    let layer = |window: Option<Tokens>| match window {
        None => LayerState::Dense(DenseKv { kv_heads, head_dim, element_bits: bits }),
        Some(window) => {
            LayerState::SlidingWindow(WindowKv { kv_heads, head_dim, element_bits: bits, window_tokens: window })
        }
    };
    Ok(windows(family, fields, count)?.into_iter().map(layer).collect())
}

fn heads(family: ModelFamily, fields: &ConfigObject<'_>, bits: u32) -> Result<DenseKv, SpecError> {
    // The small Gemma 3 files omit fields that equal the defaults.
    let gemma3 = |value: u64| (family == ModelFamily::Gemma3).then_some(value);
    let heads = fields.number("num_attention_heads", 1..=MAX_HEADS)?.or(gemma3(8));
    let kv_heads = fields.number("num_key_value_heads", 1..=MAX_HEADS)?.or(gemma3(4)).or(heads);
    let head_dim = match fields.number("head_dim", 1..=MAX_WIDTH)?.or(gemma3(256)) {
        Some(dim) => dim,
        None => {
            let heads = heads.ok_or_else(|| fields.missing("num_attention_heads", format!("1 to {MAX_HEADS}")))?;
            let hidden = fields.required_number("hidden_size", 1..=MAX_HEADS * MAX_WIDTH)?;
            let accepted = || format!("a multiple of num_attention_heads ({heads}), or state head_dim");
            let dim = (hidden % heads == 0).then_some(hidden / heads).filter(|dim| *dim <= MAX_WIDTH);
            dim.ok_or_else(|| fields.wrong("hidden_size", hidden, accepted()))?
        }
    };
    let kv_heads = kv_heads.ok_or_else(|| fields.missing("num_key_value_heads", format!("1 to {MAX_HEADS}")))?;
    Ok(DenseKv { kv_heads: kv_heads as u32, head_dim: head_dim as u32, element_bits: bits })
}

/// Returns the window of each layer; none for a layer that keeps all tokens.
fn windows(family: ModelFamily, fields: &ConfigObject<'_>, count: usize) -> Result<Vec<Option<Tokens>>, SpecError> {
    let window = fields.number("sliding_window", 1..=MAX_WINDOW)?.map(Tokens);
    let needed = || window.ok_or_else(|| fields.missing("sliding_window", format!("1 to {MAX_WINDOW}")));
    let used = match family {
        ModelFamily::Dense | ModelFamily::DeepSeek => false,
        ModelFamily::Qwen => fields.flag("use_sliding_window")?.unwrap_or(false),
        ModelFamily::Mistral => window.is_some(),
        ModelFamily::Alternate | ModelFamily::Gemma3 => true,
    };
    if let Some(types) = fields.list("layer_types")? {
        return listed(fields, types, count, window);
    }
    if !used {
        return Ok(vec![None; count]);
    }
    let window = needed()?;
    let slides: Box<dyn Fn(usize) -> bool> = match family {
        ModelFamily::Alternate => Box::new(|layer| layer % 2 == 0),
        ModelFamily::Gemma3 => {
            let pattern = fields.number("sliding_window_pattern", 1..=MAX_LAYERS)?.unwrap_or(6) as usize;
            Box::new(move |layer| (layer + 1) % pattern != 0)
        }
        ModelFamily::Qwen => {
            let first = fields.number("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(28) as usize;
            Box::new(move |layer| layer >= first)
        }
        ModelFamily::Mistral | ModelFamily::Dense | ModelFamily::DeepSeek => Box::new(|_| true),
    };
    Ok((0..count).map(|layer| slides(layer).then_some(window)).collect())
}

/// Returns the windows given by `layer_types`, which has one entry per layer.
fn listed(
    fields: &ConfigObject<'_>,
    types: &[Value],
    count: usize,
    window: Option<Tokens>,
) -> Result<Vec<Option<Tokens>>, SpecError> {
    if types.len() != count {
        return Err(fields.wrong(
            "layer_types",
            format!("{} layers", types.len()),
            format!("{count}, as many as num_hidden_layers"),
        ));
    }
    let of_layer = |word: &Value| match (word.as_str(), window) {
        (Some("full_attention"), _) => Ok(None),
        (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
        (Some("sliding_attention"), None) => {
            Err(fields.missing("sliding_window", format!("1 to {MAX_WINDOW}, since layer_types names windows")))
        }
        _ => Err(fields.wrong("layer_types", word, "full_attention or sliding_attention")),
    };
    types.iter().map(of_layer).collect()
}

fn kv_bits(fields: &ConfigObject<'_>) -> Result<Option<u32>, SpecError> {
    // Older files call it `torch_dtype`.
    let name = if fields.text("dtype")?.is_some() { "dtype" } else { "torch_dtype" };
    let Some(dtype) = fields.text(name)? else { return Ok(None) };
    match dtype {
        "float32" => Ok(Some(32)),
        "bfloat16" | "float16" | "half" | "auto" => Ok(Some(16)),
        "fp8" | "float8_e4m3fn" | "float8_e5m2" | "int8" => Ok(Some(8)),
        _ => Err(fields.wrong(name, dtype, "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8")),
    }
}

fn bits_of_weights(outer: &ConfigObject<'_>) -> Result<u32, SpecError> {
    Ok(kv_bits(outer)?.unwrap_or(16))
}
