//! A model's layers, and the bytes of their KV state.
//!
//! The state of n tokens has three parts: permanent entries (one per token, or one per m tokens), windows of the last
//! tokens, and a tail that is not compressed yet. Only the permanent entries are stored in blocks and never rewritten.

use serde::{Deserialize, Serialize};
use vocabulary::{Bytes, Tokens};

use super::SpecError;
use super::checkpoints::WindowCheckpointInterval;
use super::file::AttentionSpecFile;
use super::layer::{LayerState, LayerStateSizes, StateKind, check_range};
use crate::lcm::lcm;

/// KV state of a model's layers, and how often their windows are stored. Bytes are totals over all ranks; see
/// `for_rank` for one.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(try_from = "AttentionSpecFile", into = "AttentionSpecFile")]
pub struct AttentionSpec {
    layers: Vec<LayerState>,
    alignment: Bytes,
    checkpoints: WindowCheckpointInterval,
    /// Distinct layer sizes, with the number of layers of each.
    groups: Vec<(LayerStateSizes, u64)>,
    block: Tokens,
    block_bytes: Bytes,
    /// By ratio: bytes of one entry in all layers of that ratio together, for ratios smaller than a block.
    entries: Vec<(u64, Bytes)>,
    /// By ratio: bytes of one uncompressed token in all layers of that ratio together, for ratios above 1.
    tails: Vec<(u64, Bytes)>,
    /// Bytes of one token in all windows together.
    window_raw: Bytes,
    /// Bytes of all windows together when full.
    full_windows: Bytes,
    longest_window: Tokens,
    window_depth: Tokens,
}

/// Memory layout of one block.
#[derive(Clone, PartialEq, Eq, Serialize, Debug)]
pub struct BlockLayout {
    /// Tokens per block.
    pub tokens: Tokens,
    /// Bytes per block, including padding.
    pub bytes: Bytes,
    /// Parts of the block, in the order of the layers.
    pub parts: Vec<LayerBlockSlice>,
}

/// Entries of one kind of one layer in a block.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct LayerBlockSlice {
    /// Index of the layer.
    pub layer: usize,
    /// Kind of the entries.
    pub kind: StateKind,
    /// Offset of the part in the block.
    pub offset: Bytes,
    /// Number of entries.
    pub entries: u64,
    /// Bytes of the entries, without trailing padding.
    pub bytes: Bytes,
}

pub(super) const MAX_LAYERS: u64 = 1_024;
const MAX_BLOCK_TOKENS: u64 = 65_536;
const MAX_ALIGNMENT: u64 = 1 << 20;

impl AttentionSpec {
    /// Creates the specification of these layers, in order. The part of every layer in a block starts at a multiple of
    /// `alignment`.
    pub fn new(layers: Vec<LayerState>, alignment: Bytes) -> Result<Self, SpecError> {
        check_range("layers", layers.len() as u64, 1, MAX_LAYERS)?;
        check_range("layer_alignment", alignment.0, 1, MAX_ALIGNMENT)?;
        layers.iter().try_for_each(LayerState::check)?;
        let mut groups: Vec<(LayerStateSizes, u64)> = Vec::new();
        for sizes in layers.iter().map(LayerState::sizes) {
            match groups.iter_mut().find(|(known, _)| *known == sizes) {
                Some((_, count)) => *count += 1,
                None => groups.push((sizes, 1)),
            }
        }
        let block = groups.iter().fold(1, |all, (sizes, _)| lcm(all, sizes.ratio));
        check_range("the common multiple of all ratios", block, 1, MAX_BLOCK_TOKENS)?;
        let padded = |bytes: Bytes| Bytes(bytes.0.next_multiple_of(alignment.0));
        let in_block = |(sizes, count): &(LayerStateSizes, u64)| {
            let entries = block / sizes.ratio;
            (padded(sizes.entry * entries) + padded(sizes.index * entries)) * *count
        };
        let windowed = || groups.iter().filter(|(sizes, _)| sizes.window > 0);
        Ok(Self {
            block: Tokens(block),
            entries: bytes_by_ratio(&groups, |sizes| (sizes.ratio < block).then_some(sizes.entry + sizes.index)),
            tails: bytes_by_ratio(&groups, |sizes| (sizes.ratio > 1).then_some(sizes.token_bytes)),
            block_bytes: groups.iter().map(in_block).sum(),
            window_raw: windowed().map(|(sizes, count)| sizes.token_bytes * *count).sum(),
            full_windows: windowed().map(|(sizes, count)| sizes.token_bytes * sizes.window * *count).sum(),
            longest_window: windowed().map(|(sizes, _)| Tokens(sizes.window)).max().unwrap_or_default(),
            window_depth: windowed().map(|(sizes, count)| Tokens(sizes.window) * *count).sum(),
            layers,
            alignment,
            checkpoints: WindowCheckpointInterval::Full,
            groups,
        })
    }

    /// Returns the same model with windows stored at the given interval.
    pub fn with_checkpoints(self, checkpoints: WindowCheckpointInterval) -> Result<Self, SpecError> {
        checkpoints.check(&self)?;
        Ok(Self { checkpoints, ..self })
    }

    /// Returns how often the windows are stored.
    pub fn checkpoints(&self) -> WindowCheckpointInterval {
        self.checkpoints
    }

    /// Returns the layers, in order.
    pub fn layers(&self) -> &[LayerState] {
        &self.layers
    }

    /// Returns the alignment in bytes of every layer's part in a block.
    pub fn alignment(&self) -> Bytes {
        self.alignment
    }

    /// Returns the tokens of the smallest block that ends at an entry boundary in every layer: lcm(m, m'), or 1 without
    /// compression.
    pub fn block(&self) -> Tokens {
        self.block
    }

    /// Returns the kinds of state that the model has.
    pub fn kinds(&self) -> impl Iterator<Item = StateKind> {
        let has = |kind, sizes: &LayerStateSizes| match kind {
            StateKind::WindowSwa => sizes.window > 0,
            StateKind::TailState => sizes.ratio > 1,
            StateKind::CompressedCsaIndex => sizes.kind == StateKind::CompressedCsaMain && sizes.index > Bytes::ZERO,
            kept => sizes.kind == kept && sizes.entry > Bytes::ZERO,
        };
        StateKind::ALL.into_iter().filter(move |kind| self.groups.iter().any(|(sizes, _)| has(*kind, sizes)))
    }

    /// Returns the bytes of one kind of state for `tokens` tokens, without padding.
    pub fn kind_bytes(&self, kind: StateKind, tokens: Tokens) -> Bytes {
        let of_layer = |sizes: &LayerStateSizes| {
            let (entries, rest) = div_rem(tokens.0, sizes.ratio);
            match kind {
                StateKind::WindowSwa => sizes.token_bytes * tokens.0.min(sizes.window),
                StateKind::TailState => sizes.token_bytes * rest,
                StateKind::CompressedCsaIndex if sizes.kind == StateKind::CompressedCsaMain => sizes.index * entries,
                StateKind::DenseKv if sizes.kind == kind => (sizes.entry + sizes.index) * entries,
                _ if sizes.kind == kind => sizes.entry * entries,
                _ => Bytes::ZERO,
            }
        };
        self.groups.iter().map(|(sizes, count)| of_layer(sizes) * *count).sum()
    }

    /// Returns the bytes of a prefix's permanent entries: whole blocks with padding, then single entries.
    pub fn entry_bytes(&self, tokens: Tokens) -> Bytes {
        if self.block == Tokens(1) {
            return self.block_bytes * tokens.0;
        }
        let (blocks, rest) = div_rem(tokens.0, self.block.0);
        let whole = self.block_bytes * blocks;
        if rest == 0 {
            return whole;
        }
        whole + self.entries.iter().map(|(ratio, bytes)| *bytes * div_rem(rest, *ratio).0).sum()
    }

    /// Returns the bytes of all windows after `tokens` tokens.
    pub fn window_bytes(&self, tokens: Tokens) -> Bytes {
        if tokens >= self.longest_window {
            return self.full_windows;
        }
        self.kind_bytes(StateKind::WindowSwa, tokens)
    }

    /// Returns the bytes that are not compressed yet after `tokens` tokens.
    pub fn tail_bytes(&self, tokens: Tokens) -> Bytes {
        self.tails.iter().map(|(ratio, bytes)| *bytes * div_rem(tokens.0, *ratio).1).sum()
    }

    /// Returns the bytes of the whole state of `tokens` tokens.
    pub fn state_bytes(&self, tokens: Tokens) -> Bytes {
        self.entry_bytes(tokens) + self.window_bytes(tokens) + self.tail_bytes(tokens)
    }

    /// Returns the bytes that turn the state of `from` tokens into that of `to` tokens: new entries, and the new part
    /// of windows and tail. Zero for an empty range.
    pub fn range_bytes(&self, from: Tokens, to: Tokens) -> Bytes {
        if from >= to {
            return Bytes::ZERO;
        }
        self.entry_bytes(to) - self.entry_bytes(from) + self.window_bytes(to - from) + self.tail_bytes(to)
    }

    /// Returns the permanent bytes of one more token in a long sequence, rounded up; for a model that has only windows,
    /// the bytes of a token in the windows.
    pub fn bytes_per_token(&self) -> Bytes {
        match self.block_bytes {
            Bytes::ZERO => self.window_raw,
            Bytes(bytes) => Bytes(bytes.div_ceil(self.block.0)),
        }
    }

    /// Returns the bytes of one token in all windows together.
    pub fn window_bytes_per_token(&self) -> Bytes {
        self.window_raw
    }

    /// Returns the tokens that must be computed to rebuild all windows from nothing: each layer's window reaches back
    /// from the one below, so the depth is the sum of all windows (n_win x L).
    pub fn window_depth(&self) -> Tokens {
        self.window_depth
    }

    /// Returns the memory layout of one block.
    pub fn layout(&self) -> BlockLayout {
        let (mut parts, mut offset) = (Vec::new(), Bytes::ZERO);
        for (layer, state) in self.layers.iter().enumerate() {
            let sizes = state.sizes();
            let entries = self.block.0 / sizes.ratio;
            let index = match sizes.kind {
                StateKind::CompressedCsaMain => StateKind::CompressedCsaIndex,
                kind => kind,
            };
            for (kind, entry) in [(sizes.kind, sizes.entry), (index, sizes.index)] {
                let bytes = entry * entries;
                if bytes > Bytes::ZERO {
                    parts.push(LayerBlockSlice { layer, kind, offset, entries, bytes });
                    offset = Bytes((offset + bytes).0.next_multiple_of(self.alignment.0));
                }
            }
        }
        BlockLayout { tokens: self.block, bytes: offset, parts }
    }
}

/// Returns the bytes summed over all layers of each ratio.
fn bytes_by_ratio(
    groups: &[(LayerStateSizes, u64)],
    bytes_of: impl Fn(&LayerStateSizes) -> Option<Bytes>,
) -> Vec<(u64, Bytes)> {
    let mut all: Vec<(u64, Bytes)> = Vec::new();
    for (sizes, count) in groups {
        let Some(bytes) = bytes_of(sizes).filter(|bytes| *bytes > Bytes::ZERO) else { continue };
        match all.iter_mut().find(|(ratio, _)| *ratio == sizes.ratio) {
            Some((_, sum)) => *sum += bytes * *count,
            None => all.push((sizes.ratio, bytes * *count)),
        }
    }
    all
}

/// Returns quotient and remainder. Ratios are powers of two, which need no division: a plan asks for hundreds of
/// ranges.
fn div_rem(tokens: u64, by: u64) -> (u64, u64) {
    if by.is_power_of_two() { (tokens >> by.trailing_zeros(), tokens & (by - 1)) } else { (tokens / by, tokens % by) }
}
