//! KV state that one layer keeps of a sequence.

use serde::{Deserialize, Serialize};
use strum::VariantArray as _;
use vocabulary::{Bytes, Tokens};

use super::SpecError;

/// Kind of KV state, with the names used in the ledger's records.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, strum::VariantArray)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum StateKind {
    /// One entry per token: dense, grouped-query or latent attention.
    DenseKv,
    /// Main entries of compressed sparse attention, one per m tokens.
    CompressedCsaMain,
    /// Index entries of compressed sparse attention, one per m tokens.
    CompressedCsaIndex,
    /// Entries of heavily compressed attention, one per m' tokens.
    CompressedHca,
    /// The last tokens of a sliding window, uncompressed.
    WindowSwa,
    /// Tokens after the last whole entry, not yet compressed.
    TailState,
}

impl StateKind {
    /// Every kind, in declaration order.
    pub const ALL: [Self; 6] = *Self::VARIANTS.first_chunk().expect("six kinds");
}

/// State of one layer. The field `kind` names the variant in a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LayerState {
    /// Keys and values of every token: dense and grouped-query attention.
    Dense(DenseKv),
    /// One latent entry per token, shared by all heads: multi-head latent attention.
    Mla(LatentKv),
    /// Keys and values of the last tokens only: sliding-window attention.
    SlidingWindow(WindowKv),
    /// Compressed sparse attention: an entry and an index entry per `compression_ratio` tokens, plus a window.
    Csa(SequenceCompressedKv),
    /// Heavily compressed attention: an entry per `compression_ratio` tokens, plus a window.
    Hca(SequenceCompressedKv),
}

/// Keys and values of every token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct DenseKv {
    /// KV heads, over all tensor-parallel ranks.
    pub kv_heads: u32,
    /// Numbers per key, and per value.
    pub head_dim: u32,
    /// Bits per number: 4, 8, 16 or 32.
    #[serde(default = "half")]
    pub element_bits: u32,
}

/// Latent entry of every token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct LatentKv {
    /// Numbers per entry, including the rotary position part.
    pub latent_dim: u32,
    /// Bits per number: 4, 8, 16 or 32.
    #[serde(default = "half")]
    pub element_bits: u32,
    /// Bytes of an indexer's key per token, if the layer has an indexer.
    #[serde(default, with = "vocabulary::bytes_with_unit")]
    pub index_entry_size: Bytes,
}

/// Keys and values of a sliding window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct WindowKv {
    /// KV heads, over all tensor-parallel ranks.
    pub kv_heads: u32,
    /// Numbers per key, and per value.
    pub head_dim: u32,
    /// Bits per number: 4, 8, 16 or 32.
    #[serde(default = "half")]
    pub element_bits: u32,
    /// Window size in tokens.
    pub window_tokens: Tokens,
}

/// Compressed entries, plus a window of uncompressed tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct SequenceCompressedKv {
    /// Tokens per entry: m or m'.
    pub compression_ratio: Tokens,
    /// Bytes of one entry.
    #[serde(with = "vocabulary::bytes_with_unit")]
    pub entry_size: Bytes,
    /// Bytes of one index entry; 0 for heavily compressed attention.
    #[serde(default, with = "vocabulary::bytes_with_unit")]
    pub index_entry_size: Bytes,
    /// Bytes of one uncompressed token, in the window or before it is compressed.
    #[serde(with = "vocabulary::bytes_with_unit")]
    pub uncompressed_token_size: Bytes,
    /// Window size in uncompressed tokens; 0 for none.
    #[serde(default)]
    pub window_tokens: Tokens,
}

fn half() -> u32 {
    16
}

/// Sizes of a layer's state, for any family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LayerStateSizes {
    /// Kind of the permanent entries.
    pub(super) kind: StateKind,
    /// Tokens per entry.
    pub(super) ratio: u64,
    /// Bytes of one entry; 0 if only a window is kept.
    pub(super) entry: Bytes,
    pub(super) index: Bytes,
    /// Bytes of one uncompressed token.
    pub(super) token_bytes: Bytes,
    /// Window size in uncompressed tokens.
    pub(super) window: u64,
}

impl LayerState {
    pub(super) fn sizes(&self) -> LayerStateSizes {
        let plain = |entry, index| LayerStateSizes {
            kind: StateKind::DenseKv,
            ratio: 1,
            entry,
            index,
            token_bytes: Bytes::ZERO,
            window: 0,
        };
        let compressed = |kind, layer: &SequenceCompressedKv| LayerStateSizes {
            kind,
            ratio: layer.compression_ratio.0,
            entry: layer.entry_size,
            index: layer.index_entry_size,
            token_bytes: layer.uncompressed_token_size,
            window: layer.window_tokens.0,
        };
        match self {
            Self::Dense(heads) => {
                plain(kv_entry_bytes(heads.kv_heads, heads.head_dim, heads.element_bits), Bytes::ZERO)
            }
            Self::Mla(latent) => {
                plain(bytes(u64::from(latent.latent_dim), latent.element_bits), latent.index_entry_size)
            }
            Self::SlidingWindow(layer) => LayerStateSizes {
                token_bytes: kv_entry_bytes(layer.kv_heads, layer.head_dim, layer.element_bits),
                window: layer.window_tokens.0,
                ..plain(Bytes::ZERO, Bytes::ZERO)
            },
            Self::Csa(layer) => compressed(StateKind::CompressedCsaMain, layer),
            Self::Hca(layer) => compressed(StateKind::CompressedHca, layer),
        }
    }

    /// Checks the bounds of all sizes, since they come from a file.
    pub(super) fn check(&self) -> Result<(), SpecError> {
        match self {
            Self::Dense(DenseKv { kv_heads, head_dim, element_bits }) => {
                check_heads(*kv_heads, *head_dim, *element_bits)
            }
            Self::SlidingWindow(WindowKv { kv_heads, head_dim, element_bits, window_tokens }) => {
                check_heads(*kv_heads, *head_dim, *element_bits)?;
                check_range("window_tokens", window_tokens.0, 1, MAX_WINDOW)
            }
            Self::Mla(LatentKv { latent_dim, element_bits, index_entry_size }) => {
                check_range("latent_dim", u64::from(*latent_dim), 1, MAX_WIDTH)?;
                check_range("index_entry_size", index_entry_size.0, 0, MAX_ENTRY_BYTES)?;
                check_bits("element_bits", *element_bits)
            }
            Self::Csa(layer) => check_compressed(layer, MAX_ENTRY_BYTES),
            Self::Hca(layer) => check_compressed(layer, 0),
        }
    }
}

pub(super) const MAX_HEADS: u64 = 1_024;
pub(super) const MAX_WIDTH: u64 = 16_384;
pub(super) const MAX_WINDOW: u64 = 1 << 24;
const MAX_ENTRY_BYTES: u64 = 1 << 20;
const MAX_RATIO: u64 = 65_536;

fn check_heads(kv_heads: u32, head_dim: u32, element_bits: u32) -> Result<(), SpecError> {
    check_range("kv_heads", u64::from(kv_heads), 1, MAX_HEADS)?;
    check_range("head_dim", u64::from(head_dim), 1, MAX_WIDTH)?;
    check_bits("element_bits", element_bits)
}

fn check_compressed(layer: &SequenceCompressedKv, largest_index: u64) -> Result<(), SpecError> {
    check_range("compression_ratio", layer.compression_ratio.0, 1, MAX_RATIO)?;
    check_range("entry_size", layer.entry_size.0, 1, MAX_ENTRY_BYTES)?;
    check_range("index_entry_size", layer.index_entry_size.0, 0, largest_index)?;
    check_range("uncompressed_token_size", layer.uncompressed_token_size.0, 1, MAX_ENTRY_BYTES)?;
    check_range("window_tokens", layer.window_tokens.0, 0, MAX_WINDOW)
}

pub(super) fn check_range(field: &str, found: u64, least: u64, most: u64) -> Result<(), SpecError> {
    match (least..=most).contains(&found) {
        true => Ok(()),
        false => Err(SpecError::field(field, found, format!("{least} to {most}"))),
    }
}

pub(super) fn check_bits(field: &str, bits: u32) -> Result<(), SpecError> {
    match bits {
        4 | 8 | 16 | 32 => Ok(()),
        other => Err(SpecError::field(field, other, "4, 8, 16 or 32")),
    }
}

/// Returns the bytes of a token's keys and values: 2 x heads x head width.
fn kv_entry_bytes(kv_heads: u32, head_dim: u32, bits: u32) -> Bytes {
    bytes(2 * u64::from(kv_heads) * u64::from(head_dim), bits)
}

fn bytes(numbers: u64, bits: u32) -> Bytes {
    Bytes((numbers * u64::from(bits)).div_ceil(8))
}
