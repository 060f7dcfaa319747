//! A specification from a Hugging Face `config.json`, family by family.
//!
//! Fields and defaults are those of `transformers` (`models/*/configuration_*.py`). A family is known by `model_type`,
//! which every published file has.

use serde_json::Value;
use vocabulary::{Bytes, Tokens};

use super::error::shortened;
use super::fields::Fields;
use super::layer::{Heads, LONGEST_WINDOW, Latent, LayerState, MOST_HEADS, WIDEST, Windowed};
use super::spec::MOST_LAYERS;
use super::{AttentionSpec, SpecError};

/// How a family's layers look back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    /// Every layer keeps every token.
    Dense,
    /// `sliding_window`, where it is not null, is every layer's.
    Mistral,
    /// As dense, unless `use_sliding_window`: then from layer `max_window_layers` on.
    Qwen,
    /// A window and all tokens in turn, a window first.
    Alternate,
    /// Every sixth layer (`sliding_window_pattern`) keeps all tokens.
    Gemma3,
    /// Latent attention.
    DeepSeek,
}

const FAMILIES: [(&str, Family); 18] = [
    ("deepseek_v2", Family::DeepSeek),
    ("deepseek_v3", Family::DeepSeek),
    ("gemma", Family::Dense),
    ("gemma2", Family::Alternate),
    ("gemma3", Family::Gemma3),
    ("gemma3_text", Family::Gemma3),
    ("glm4_moe", Family::Dense),
    ("gpt_oss", Family::Alternate),
    ("granite", Family::Dense),
    ("kimi_k2", Family::DeepSeek),
    ("llama", Family::Dense),
    ("mistral", Family::Mistral),
    ("mixtral", Family::Mistral),
    ("olmo2", Family::Dense),
    ("qwen2", Family::Qwen),
    ("qwen2_moe", Family::Qwen),
    ("qwen3", Family::Qwen),
    ("qwen3_moe", Family::Qwen),
];

impl AttentionSpec {
    /// Bytes of the longest `config.json` that is read; published ones have a few thousand.
    pub const LONGEST_FILE: usize = 1 << 20;

    /// From the text of a model's `config.json`; a multimodal model's `text_config`.
    ///
    /// KV has the width of the weights' `dtype`, two bytes where none is given. What an engine quantizes at start is not
    /// in this file: see `with_bits`.
    pub fn from_config(json: &str) -> Result<Self, SpecError> {
        if json.len() > Self::LONGEST_FILE {
            return Err(SpecError::TooLong { found: json.len(), accepted: Self::LONGEST_FILE });
        }
        let file: Value = serde_json::from_str(json).map_err(|error| SpecError::NotAnObject(error.to_string()))?;
        let file = file.as_object().ok_or_else(|| SpecError::NotAnObject(shortened(json)))?;
        let outer = Fields::of_file(file);
        let inner = outer.text_part();
        let fields = inner.as_ref().unwrap_or(&outer);
        let family = match fields.text("model_type")? {
            Some(name) => family(name)?,
            None => family(outer.text("model_type")?.unwrap_or("missing"))?,
        };
        let bits = match bits(fields)? {
            Some(bits) => bits,
            None => bits_of_weights(&outer)?,
        };
        Self::new(layers(family, fields, bits)?, Bytes(1))
    }

    /// The same model with KV numbers of so many bits, as engines can be told (`--kv-cache-dtype fp8`: 8).
    pub fn with_bits(&self, bits: u32) -> Result<Self, SpecError> {
        let narrowed = |layer: &LayerState| match *layer {
            LayerState::Dense(heads) => LayerState::Dense(Heads { bits, ..heads }),
            LayerState::Latent(latent) => LayerState::Latent(Latent { bits, ..latent }),
            LayerState::Window(layer) => LayerState::Window(Windowed { bits, ..layer }),
            stated @ (LayerState::Csa(_) | LayerState::Hca(_)) => stated,
        };
        Self::new(self.layers().iter().map(narrowed).collect(), self.alignment())
    }
}

fn family(name: &str) -> Result<Family, SpecError> {
    let known = FAMILIES.iter().find(|(known, _)| *known == name);
    known.map(|(_, family)| *family).ok_or_else(|| SpecError::UnknownFamily {
        found: shortened(name),
        accepted: FAMILIES.map(|(known, _)| known).join(", "),
    })
}

fn layers(family: Family, fields: &Fields<'_>, bits: u32) -> Result<Vec<LayerState>, SpecError> {
    let count = fields.needed("num_hidden_layers", 1..=MOST_LAYERS)? as usize;
    if family == Family::DeepSeek {
        let width = fields.needed("kv_lora_rank", 1..=WIDEST)? + fields.needed("qk_rope_head_dim", 1..=WIDEST)?;
        return Ok(vec![LayerState::Latent(Latent { width: width as u32, bits, index: Bytes::ZERO }); count]);
    }
    let Heads { kv_heads, head_dim, bits } = heads(family, fields, bits)?;
    let layer = |window: Option<Tokens>| match window {
        None => LayerState::Dense(Heads { kv_heads, head_dim, bits }),
        Some(window) => LayerState::Window(Windowed { kv_heads, head_dim, bits, window }),
    };
    Ok(windows(family, fields, count)?.into_iter().map(layer).collect())
}

fn heads(family: Family, fields: &Fields<'_>, bits: u32) -> Result<Heads, SpecError> {
    // The small Gemma 3 files leave out what equals the defaults.
    let gemma3 = |value: u64| (family == Family::Gemma3).then_some(value);
    let heads = fields.number("num_attention_heads", 1..=MOST_HEADS)?.or(gemma3(8));
    let kv_heads = fields.number("num_key_value_heads", 1..=MOST_HEADS)?.or(gemma3(4)).or(heads);
    let head_dim = match fields.number("head_dim", 1..=WIDEST)?.or(gemma3(256)) {
        Some(dim) => dim,
        None => {
            let heads = heads.ok_or_else(|| fields.missing("num_attention_heads", format!("1 to {MOST_HEADS}")))?;
            let hidden = fields.needed("hidden_size", 1..=MOST_HEADS * WIDEST)?;
            let accepted = || format!("a multiple of num_attention_heads ({heads}), or state head_dim");
            let dim = (hidden % heads == 0).then_some(hidden / heads).filter(|dim| *dim <= WIDEST);
            dim.ok_or_else(|| fields.wrong("hidden_size", hidden, accepted()))?
        }
    };
    let kv_heads = kv_heads.ok_or_else(|| fields.missing("num_key_value_heads", format!("1 to {MOST_HEADS}")))?;
    Ok(Heads { kv_heads: kv_heads as u32, head_dim: head_dim as u32, bits })
}

/// Each layer's window; none where it keeps all tokens.
fn windows(family: Family, fields: &Fields<'_>, count: usize) -> Result<Vec<Option<Tokens>>, SpecError> {
    let window = fields.number("sliding_window", 1..=LONGEST_WINDOW)?.map(Tokens);
    let needed = || window.ok_or_else(|| fields.missing("sliding_window", format!("1 to {LONGEST_WINDOW}")));
    let used = match family {
        Family::Dense | Family::DeepSeek => false,
        Family::Qwen => fields.flag("use_sliding_window")?.unwrap_or(false),
        Family::Mistral => window.is_some(),
        Family::Alternate | Family::Gemma3 => true,
    };
    if let Some(types) = fields.list("layer_types")? {
        return listed(fields, types, count, window);
    }
    if !used {
        return Ok(vec![None; count]);
    }
    let window = needed()?;
    let slides: Box<dyn Fn(usize) -> bool> = match family {
        Family::Alternate => Box::new(|layer| layer % 2 == 0),
        Family::Gemma3 => {
            let pattern = fields.number("sliding_window_pattern", 1..=MOST_LAYERS)?.unwrap_or(6) as usize;
            Box::new(move |layer| (layer + 1) % pattern != 0)
        }
        Family::Qwen => {
            let first = fields.number("max_window_layers", 0..=MOST_LAYERS)?.unwrap_or(28) as usize;
            Box::new(move |layer| layer >= first)
        }
        Family::Mistral | Family::Dense | Family::DeepSeek => Box::new(|_| true),
    };
    Ok((0..count).map(|layer| slides(layer).then_some(window)).collect())
}

/// As `layer_types` says, one word a layer.
fn listed(
    fields: &Fields<'_>,
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
            Err(fields.missing("sliding_window", format!("1 to {LONGEST_WINDOW}, since layer_types names windows")))
        }
        _ => Err(fields.wrong("layer_types", word, "full_attention or sliding_attention")),
    };
    types.iter().map(of_layer).collect()
}

fn bits(fields: &Fields<'_>) -> Result<Option<u32>, SpecError> {
    // `torch_dtype` is its name in older files.
    let name = if fields.text("dtype")?.is_some() { "dtype" } else { "torch_dtype" };
    let Some(dtype) = fields.text(name)? else { return Ok(None) };
    match dtype {
        "float32" => Ok(Some(32)),
        "bfloat16" | "float16" | "half" | "auto" => Ok(Some(16)),
        "fp8" | "float8_e4m3fn" | "float8_e5m2" | "int8" => Ok(Some(8)),
        _ => Err(fields.wrong(name, dtype, "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8")),
    }
}

fn bits_of_weights(outer: &Fields<'_>) -> Result<u32, SpecError> {
    Ok(bits(outer)?.unwrap_or(16))
}
