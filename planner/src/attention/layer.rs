//! What one layer keeps of a sequence.

use serde::{Deserialize, Serialize};
use strum::VariantArray as _;
use vocabulary::{Bytes, Tokens};

use super::SpecError;

/// A kind of KV state, in the words of the ledger's records.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, strum::VariantArray)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum StateKind {
    /// An entry for every token: dense, grouped or latent attention.
    DenseKv,
    /// Main entries of compressed sparse attention, one for m tokens.
    CompressedCsaMain,
    /// What its indexer looks through, one for m tokens.
    CompressedCsaIndex,
    /// Entries of heavily compressed attention, one for m' tokens.
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

/// The state of one layer. `state` names the variant in a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum LayerState {
    /// Keys and values of every token: dense and grouped-query attention.
    Dense(DenseKv),
    /// One latent entry for every token, the same for all heads: multi-head latent attention.
    Latent(LatentKv),
    /// Keys and values of the last tokens only.
    Window(WindowKv),
    /// Compressed sparse attention: an entry and an index entry for `ratio` tokens, beside a window.
    Csa(CompressedKv),
    /// Heavily compressed attention: an entry for `ratio` tokens, beside a window.
    Hca(CompressedKv),
}

/// Keys and values of some heads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct DenseKv {
    /// KV heads, over all tensor-parallel ranks.
    pub kv_heads: u32,
    /// Numbers in a key, and as many in a value.
    pub head_dim: u32,
    /// Bits of a number: 4, 8, 16 or 32.
    #[serde(default = "half")]
    pub bits: u32,
}

/// A latent entry.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct LatentKv {
    /// Numbers in it, its position part included.
    pub width: u32,
    /// Bits of a number: 4, 8, 16 or 32.
    #[serde(default = "half")]
    pub bits: u32,
    /// Bytes of an indexer's key beside it, where the layer has one.
    #[serde(default)]
    pub index: Bytes,
}

/// Keys and values of a window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct WindowKv {
    /// KV heads, over all tensor-parallel ranks.
    pub kv_heads: u32,
    /// Numbers in a key, and as many in a value.
    pub head_dim: u32,
    /// Bits of a number: 4, 8, 16 or 32.
    #[serde(default = "half")]
    pub bits: u32,
    /// Tokens that are looked back upon.
    pub window: Tokens,
}

/// Compressed entries with a window of uncompressed ones.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct CompressedKv {
    /// Tokens in one entry: m or m'.
    pub ratio: Tokens,
    /// Bytes of one entry.
    pub entry: Bytes,
    /// Bytes of one index entry; 0 for heavily compressed attention.
    #[serde(default)]
    pub index: Bytes,
    /// Bytes of one uncompressed token, in the window or before it is compressed.
    pub raw: Bytes,
    /// Tokens that are looked back upon uncompressed; 0 for none.
    #[serde(default)]
    pub window: Tokens,
}

fn half() -> u32 {
    16
}

/// A layer's sizes, whatever its family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LayerSizes {
    /// Of what is kept for good.
    pub(super) kind: StateKind,
    /// Tokens in one entry of it.
    pub(super) ratio: u64,
    /// Bytes of one entry; 0 where only a window is kept.
    pub(super) entry: Bytes,
    pub(super) index: Bytes,
    /// Bytes of one uncompressed token.
    pub(super) token_bytes: Bytes,
    /// Uncompressed tokens that are looked back upon.
    pub(super) window: u64,
}

impl LayerState {
    pub(super) fn sizes(&self) -> LayerSizes {
        let plain = |entry, index| LayerSizes {
            kind: StateKind::DenseKv,
            ratio: 1,
            entry,
            index,
            token_bytes: Bytes::ZERO,
            window: 0,
        };
        let compressed = |kind, layer: &CompressedKv| LayerSizes {
            kind,
            ratio: layer.ratio.0,
            entry: layer.entry,
            index: layer.index,
            token_bytes: layer.raw,
            window: layer.window.0,
        };
        match self {
            Self::Dense(heads) => plain(kv_entry_bytes(heads.kv_heads, heads.head_dim, heads.bits), Bytes::ZERO),
            Self::Latent(latent) => plain(bytes(u64::from(latent.width), latent.bits), latent.index),
            Self::Window(layer) => LayerSizes {
                token_bytes: kv_entry_bytes(layer.kv_heads, layer.head_dim, layer.bits),
                window: layer.window.0,
                ..plain(Bytes::ZERO, Bytes::ZERO)
            },
            Self::Csa(layer) => compressed(StateKind::CompressedCsaMain, layer),
            Self::Hca(layer) => compressed(StateKind::CompressedHca, layer),
        }
    }

    /// Bounds on everything: the sizes come from a file.
    pub(super) fn check(&self) -> Result<(), SpecError> {
        match self {
            Self::Dense(DenseKv { kv_heads, head_dim, bits }) => check_heads(*kv_heads, *head_dim, *bits),
            Self::Window(WindowKv { kv_heads, head_dim, bits, window }) => {
                check_heads(*kv_heads, *head_dim, *bits)?;
                check_range("window", window.0, 1, MAX_WINDOW)
            }
            Self::Latent(LatentKv { width: numbers, bits, index }) => {
                check_range("width", u64::from(*numbers), 1, MAX_WIDTH)?;
                check_range("index", index.0, 0, MAX_ENTRY_BYTES)?;
                check_bits(*bits)
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

fn check_heads(kv_heads: u32, head_dim: u32, bits: u32) -> Result<(), SpecError> {
    check_range("kv_heads", u64::from(kv_heads), 1, MAX_HEADS)?;
    check_range("head_dim", u64::from(head_dim), 1, MAX_WIDTH)?;
    check_bits(bits)
}

fn check_compressed(layer: &CompressedKv, largest_index: u64) -> Result<(), SpecError> {
    check_range("ratio", layer.ratio.0, 1, MAX_RATIO)?;
    check_range("entry", layer.entry.0, 1, MAX_ENTRY_BYTES)?;
    check_range("index", layer.index.0, 0, largest_index)?;
    check_range("raw", layer.raw.0, 1, MAX_ENTRY_BYTES)?;
    check_range("window", layer.window.0, 0, MAX_WINDOW)
}

pub(super) fn check_range(field: &str, found: u64, least: u64, most: u64) -> Result<(), SpecError> {
    match (least..=most).contains(&found) {
        true => Ok(()),
        false => Err(SpecError::field(field, found, format!("{least} to {most}"))),
    }
}

fn check_bits(bits: u32) -> Result<(), SpecError> {
    match bits {
        4 | 8 | 16 | 32 => Ok(()),
        other => Err(SpecError::field("bits", other, "4, 8, 16 or 32")),
    }
}

/// 2 (key and value) x heads x width of a head.
fn kv_entry_bytes(kv_heads: u32, head_dim: u32, bits: u32) -> Bytes {
    bytes(2 * u64::from(kv_heads) * u64::from(head_dim), bits)
}

fn bytes(numbers: u64, bits: u32) -> Bytes {
    Bytes((numbers * u64::from(bits)).div_ceil(8))
}
