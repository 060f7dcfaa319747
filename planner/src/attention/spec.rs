//! A model's layers, and the bytes that their state takes.
//!
//! The state of n tokens has three parts: entries that are kept for good (of every token, or one for m tokens), windows
//! of the last tokens, and a tail that is not compressed yet. Only the first lies in blocks and is never rewritten.

use serde::{Deserialize, Serialize};
use vocabulary::{Bytes, Tokens};

use super::SpecError;
use super::checkpoints::CheckpointInterval;
use super::file::AttentionFile;
use super::layer::{LayerSizes, LayerState, StateKind, check_range};
use crate::lcm::lcm;

/// What the layers of a model keep, and when their windows are stored. Bytes are over all ranks together; see `of_rank` for one of them.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(try_from = "AttentionFile", into = "AttentionFile")]
pub struct AttentionSpec {
    layers: Vec<LayerState>,
    alignment: Bytes,
    checkpoints: CheckpointInterval,
    /// Layers of equal sizes, counted.
    groups: Vec<(LayerSizes, u64)>,
    block: Tokens,
    block_bytes: Bytes,
    /// Of all layers of a ratio together: bytes of an entry, where it is smaller than a block.
    entries: Vec<(u64, Bytes)>,
    /// Likewise of an uncompressed token, where entries have several.
    tails: Vec<(u64, Bytes)>,
    /// Of all windows together, a token in each.
    window_raw: Bytes,
    /// Of all windows together, when they are full.
    full_windows: Bytes,
    longest_window: Tokens,
    window_depth: Tokens,
}

/// How the entries of one block lie in memory.
#[derive(Clone, PartialEq, Eq, Serialize, Debug)]
pub struct BlockLayout {
    /// Tokens in it.
    pub tokens: Tokens,
    /// Its bytes, padding included.
    pub bytes: Bytes,
    /// Its parts, in the order of the layers.
    pub parts: Vec<BlockPart>,
}

/// The entries of one kind of one layer in a block.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct BlockPart {
    /// Which layer.
    pub layer: usize,
    /// Of which kind.
    pub kind: StateKind,
    /// Where it begins in the block.
    pub offset: Bytes,
    /// How many entries.
    pub entries: u64,
    /// Their bytes, without the padding after them.
    pub bytes: Bytes,
}

pub(super) const MAX_LAYERS: u64 = 1_024;
const MAX_BLOCK_TOKENS: u64 = 65_536;
const MAX_ALIGNMENT: u64 = 1 << 20;

impl AttentionSpec {
    /// Of these layers, in their order. The part of every layer in a block begins at a multiple of `alignment`.
    pub fn new(layers: Vec<LayerState>, alignment: Bytes) -> Result<Self, SpecError> {
        check_range("layers", layers.len() as u64, 1, MAX_LAYERS)?;
        check_range("alignment", alignment.0, 1, MAX_ALIGNMENT)?;
        layers.iter().try_for_each(LayerState::check)?;
        let mut groups: Vec<(LayerSizes, u64)> = Vec::new();
        for sizes in layers.iter().map(LayerState::sizes) {
            match groups.iter_mut().find(|(known, _)| *known == sizes) {
                Some((_, count)) => *count += 1,
                None => groups.push((sizes, 1)),
            }
        }
        let block = groups.iter().fold(1, |all, (sizes, _)| lcm(all, sizes.ratio));
        check_range("the common multiple of all ratios", block, 1, MAX_BLOCK_TOKENS)?;
        let padded = |bytes: Bytes| Bytes(bytes.0.next_multiple_of(alignment.0));
        let in_block = |(sizes, count): &(LayerSizes, u64)| {
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
            checkpoints: CheckpointInterval::Full,
            groups,
        })
    }

    /// The same model whose windows are stored as `checkpoints` says.
    pub fn with_checkpoints(self, checkpoints: CheckpointInterval) -> Result<Self, SpecError> {
        checkpoints.check(&self)?;
        Ok(Self { checkpoints, ..self })
    }

    /// When its windows are stored.
    pub fn checkpoints(&self) -> CheckpointInterval {
        self.checkpoints
    }

    /// Its layers, in their order.
    pub fn layers(&self) -> &[LayerState] {
        &self.layers
    }

    /// Where every layer's part of a block begins: a multiple of so many bytes.
    pub fn alignment(&self) -> Bytes {
        self.alignment
    }

    /// Tokens in the smallest block that ends between entries in every layer: lcm(m, m'), 1 without compression.
    pub fn block(&self) -> Tokens {
        self.block
    }

    /// The kinds of state that it has.
    pub fn kinds(&self) -> impl Iterator<Item = StateKind> {
        let has = |kind, sizes: &LayerSizes| match kind {
            StateKind::WindowSwa => sizes.window > 0,
            StateKind::TailState => sizes.ratio > 1,
            StateKind::CompressedCsaIndex => sizes.kind == StateKind::CompressedCsaMain && sizes.index > Bytes::ZERO,
            kept => sizes.kind == kept && sizes.entry > Bytes::ZERO,
        };
        StateKind::ALL.into_iter().filter(move |kind| self.groups.iter().any(|(sizes, _)| has(*kind, sizes)))
    }

    /// Bytes of one kind in the state of so many tokens, without padding.
    pub fn kind_bytes(&self, kind: StateKind, tokens: Tokens) -> Bytes {
        let of_layer = |sizes: &LayerSizes| {
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

    /// Bytes of the entries that are kept for good of a prefix: whole blocks with their padding, then single entries.
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

    /// Bytes of all windows after so many tokens.
    pub fn window_bytes(&self, tokens: Tokens) -> Bytes {
        if tokens >= self.longest_window {
            return self.full_windows;
        }
        self.kind_bytes(StateKind::WindowSwa, tokens)
    }

    /// Bytes of what is not compressed yet after so many tokens.
    pub fn tail_bytes(&self, tokens: Tokens) -> Bytes {
        self.tails.iter().map(|(ratio, bytes)| *bytes * div_rem(tokens.0, *ratio).1).sum()
    }

    /// Bytes of the whole state of so many tokens.
    pub fn state_bytes(&self, tokens: Tokens) -> Bytes {
        self.entry_bytes(tokens) + self.window_bytes(tokens) + self.tail_bytes(tokens)
    }

    /// Bytes that lead from the state of `from` tokens to that of `to`: new entries, and of windows and tail what is
    /// new in them. Nothing for an empty range.
    pub fn range_bytes(&self, from: Tokens, to: Tokens) -> Bytes {
        if from >= to {
            return Bytes::ZERO;
        }
        self.entry_bytes(to) - self.entry_bytes(from) + self.window_bytes(to - from) + self.tail_bytes(to)
    }

    /// Bytes that one more token takes for good in a long sequence, rounded up; where a model has nothing but windows,
    /// what it takes in these.
    pub fn bytes_per_token(&self) -> Bytes {
        match self.block_bytes {
            Bytes::ZERO => self.window_raw,
            Bytes(bytes) => Bytes(bytes.div_ceil(self.block.0)),
        }
    }

    /// Bytes that one token takes in all windows together.
    pub fn window_bytes_per_token(&self) -> Bytes {
        self.window_raw
    }

    /// Tokens that have to be computed to have all windows again without anything of them: each layer's window reaches
    /// back from the one below, so the sum of all (n_win x L).
    pub fn window_depth(&self) -> Tokens {
        self.window_depth
    }

    /// How one block lies in memory.
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
                    parts.push(BlockPart { layer, kind, offset, entries, bytes });
                    offset = Bytes((offset + bytes).0.next_multiple_of(self.alignment.0));
                }
            }
        }
        BlockLayout { tokens: self.block, bytes: offset, parts }
    }
}

/// Bytes of all layers of a ratio together.
fn bytes_by_ratio(groups: &[(LayerSizes, u64)], bytes_of: impl Fn(&LayerSizes) -> Option<Bytes>) -> Vec<(u64, Bytes)> {
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

/// How often `by` goes into these tokens, and what is left. Ratios are powers of two, for which no division is needed:
/// a plan asks for hundreds of ranges.
fn div_rem(tokens: u64, by: u64) -> (u64, u64) {
    if by.is_power_of_two() { (tokens >> by.trailing_zeros(), tokens & (by - 1)) } else { (tokens / by, tokens % by) }
}
