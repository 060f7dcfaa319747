//! The blocks of one source whose place is known: found by the engine's name, linked to the block before.
//!
//! A block costs 24 bytes, and about 16 among the names. A block that is gone while others hang on it leaves a *stump*, so that
//! they find it again when it is stored again; there are never more stumps than blocks.

mod adoption;
mod children;
mod inner;
mod names;
mod tightening;

use vocabulary::{BlockHash, PrefixId, Tier};

use crate::closure::{Closure, Shape};
use crate::copies::{Brief, Copies, Place};
use crate::event::EngineHash;
use crate::index::Change;
use crate::mix::MixMap;
use children::{Children, Few, Serves};
use inner::Inner;
use names::Names;

pub(crate) use adoption::{Ends, Placed};

/// Where a block is kept, as long as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct At(u32);

const NOWHERE: u32 = u32::MAX;

/// A block, or a stump: one without copies.
struct Node {
    end: [u64; 2],
    /// The block before; [`NOWHERE`] at the start of a chain, and for stumps.
    before: u32,
    /// Blocks whose `before` is this one.
    children: Few,
    copies: Brief,
}

pub(crate) struct Placing<'a> {
    pub(crate) name: EngineHash,
    /// None at the start of a chain.
    pub(crate) before: Option<At>,
    pub(crate) end: PrefixId,
    /// Chain blocks inside this engine block before its last one.
    pub(crate) inner: &'a [BlockHash],
}

#[derive(Default)]
pub(crate) struct Blocks {
    nodes: Vec<Node>,
    free: Vec<u32>,
    names: Names,
    children: Children,
    stumps: MixMap<BlockHash, u32>,
    /// Copies that do not fit into a node.
    many: MixMap<u32, Copies>,
    inner: Inner,
    closure: Closure,
}

pub(crate) const TIERS: [Tier; 3] = [Tier::Hbm, Tier::Host, Tier::Disk];

impl Blocks {
    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    pub(crate) fn find(&self, name: EngineHash) -> Option<At> {
        self.names.get(name).map(At)
    }

    /// Fetches what [`Self::find`] reads for each of `names`, all at once instead of one after the other.
    pub(crate) fn glance(&self, names: &[EngineHash]) {
        std::hint::black_box(names.iter().fold(0, |seen, name| seen ^ self.names.glance(*name)));
    }

    pub(crate) fn end(&self, at: At) -> PrefixId {
        let [low, high] = self.node(at.0).end;
        PrefixId(u128::from(high) << 64 | u128::from(low))
    }

    /// Whether every held block's predecessor is held too.
    pub(crate) fn shape(&self) -> Shape {
        self.closure.shape()
    }

    /// The worst shape since this was asked last.
    pub(crate) fn worst_shape(&mut self) -> Shape {
        self.closure.worst()
    }

    /// Makes room for a block that is not kept yet; it is kept once it has copies.
    pub(crate) fn place(&mut self, block: Placing<'_>) -> At {
        let end = [block.end.0 as u64, (block.end.0 >> 64) as u64];
        let stump = if self.stumps.is_empty() { None } else { self.stumps.remove(&block.end.block_hash()) };
        let at = stump.unwrap_or_else(|| self.vacant());
        let node = self.node_mut(at);
        (node.end, node.before) = (end, block.before.map_or(NOWHERE, |before| before.0));
        if let Some(before) = block.before {
            self.children.add(before.0, &mut self.nodes[before.0 as usize].children);
        }
        self.names.insert(block.name, at);
        self.inner.set(at, block.inner);
        At(at)
    }

    pub(crate) fn begin(&mut self, At(at): At, copies: Copies, out: &mut Vec<Change>) {
        self.count(at, copies);
        for tier in TIERS {
            if self.serves(at, tier) {
                self.held(at, tier, out);
            }
        }
    }

    /// One copy more.
    pub(crate) fn add(&mut self, At(at): At, place: Place, out: &mut Vec<Change>) {
        let served = self.serves(at, place.tier);
        if let Some(more) = self.node(at).copies.more(place) {
            self.node_mut(at).copies = more;
        } else {
            let mut copies = self.copies(at);
            copies.add(place);
            self.count(at, copies);
        }
        if !served && self.serves(at, place.tier) {
            self.held(at, place.tier, out);
        }
    }

    /// Changes how many copies of a block lie in `tier` and `group`, and forgets it with the last one. Says whether there were
    /// any to change; none where there is no such block.
    pub(crate) fn change(
        &mut self,
        name: EngineHash,
        (tier, group): (Tier, u32),
        left: impl Fn(u32) -> u32 + Copy,
        out: &mut Vec<Change>,
    ) -> Option<bool> {
        let at = self.names.get(name)?;
        let (served, before) = (self.serves(at, tier), self.node(at).copies);
        let known = if let Some(after) = before.all_in(tier, group).map(left).and_then(|left| before.with(left)) {
            self.node_mut(at).copies = after;
            true
        } else {
            let mut copies = self.copies(at);
            let known = copies.change(tier, group, left);
            self.count(at, copies);
            known
        };
        if served && !self.serves(at, tier) {
            self.gone(at, tier, out);
        }
        if self.node(at).copies == Brief::NONE {
            self.names.remove(name);
            self.forget(at);
            self.tighten();
        }
        Some(known)
    }

    /// What is gone when all of them are. Nothing is kept for it but what it is told from.
    pub(crate) fn into_gone(self) -> impl Iterator<Item = Change> + Send + Sync + use<> {
        let left = Self { nodes: self.nodes, many: self.many, inner: self.inner, ..Self::default() };
        (0..left.nodes.len() as u32).flat_map(move |at| {
            let mut gone = Vec::new();
            for tier in TIERS.into_iter().filter(|tier| left.serves(at, *tier)) {
                gone.extend(left.chain_blocks(at).map(|hash| Change::Gone(hash, tier)));
            }
            gone
        })
    }

    #[cfg(test)]
    pub(crate) fn forgot_all(&self) -> bool {
        let all_free = self.free.len() == self.nodes.len();
        all_free
            && self.len() == 0
            && self.children.is_empty()
            && self.stumps.is_empty()
            && self.many.is_empty()
            && self.shape() == Shape::Whole
    }

    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    fn vacant(&mut self) -> u32 {
        if let Some(at) = self.free.pop() {
            return at;
        }
        self.nodes.push(Node { end: [0; 2], before: NOWHERE, children: Few::NONE, copies: Brief::NONE });
        // As many as `most_blocks` allows, and their stumps: far from what 32 bits can number.
        (self.nodes.len() - 1) as u32
    }

    fn copies(&self, at: u32) -> Copies {
        match self.node(at).copies {
            Brief::ELSEWHERE => self.many.get(&at).cloned().unwrap_or_default(),
            brief => brief.copies(),
        }
    }

    fn count(&mut self, at: u32, copies: Copies) {
        let before = self.node(at).copies;
        if let Some(brief) = Brief::of(&copies) {
            self.node_mut(at).copies = brief;
            if before == Brief::ELSEWHERE {
                self.many.remove(&at);
            }
        } else {
            self.node_mut(at).copies = Brief::ELSEWHERE;
            self.many.insert(at, copies);
        }
    }

    #[inline]
    fn serves(&self, at: u32, tier: Tier) -> bool {
        match self.node(at).copies {
            Brief::ELSEWHERE => self.serves_elsewhere(at, tier),
            brief => brief.serves(tier),
        }
    }

    #[cold]
    fn serves_elsewhere(&self, at: u32, tier: Tier) -> bool {
        self.many.get(&at).is_some_and(|copies| copies.serves(tier))
    }

    /// First one first.
    fn chain_blocks(&self, at: u32) -> impl DoubleEndedIterator<Item = BlockHash> {
        let last = BlockHash(self.node(at).end[0]);
        self.inner.of(at).iter().copied().chain(std::iter::once(last))
    }

    /// It serves prefixes from `tier` now.
    fn held(&mut self, at: u32, tier: Tier, out: &mut Vec<Change>) {
        if tier == Tier::Hbm {
            let closed = self.children.serving(at, self.node(at).children);
            let opened = self.before(at, Serves::From);
            self.closure.holes(u32::from(opened), closed);
        } else {
            self.closure.hold_slower();
        }
        out.extend(self.chain_blocks(at).map(|hash| Change::Held(hash, tier)));
    }

    /// It no longer does. The last chain block goes first, so that no change leaves a hole behind.
    fn gone(&mut self, at: u32, tier: Tier, out: &mut Vec<Change>) {
        if tier == Tier::Hbm {
            let opened = self.children.serving(at, self.node(at).children);
            let closed = self.before(at, Serves::NoMore);
            self.closure.holes(opened, u32::from(closed));
        } else {
            self.closure.drop_slower();
        }
        out.extend(self.chain_blocks(at).rev().map(|hash| Change::Gone(hash, tier)));
    }

    /// Tells the block before whether this child of it serves from device memory; whether it does not itself, so that there
    /// is a hole between them.
    fn before(&mut self, at: u32, serves: Serves) -> bool {
        let before = self.node(at).before;
        if before == NOWHERE {
            return false;
        }
        self.children.serve(before, &mut self.nodes[before as usize].children, serves);
        !self.serves(before, Tier::Hbm)
    }

    /// The last copy is gone, and the name.
    fn forget(&mut self, at: u32) {
        let node = self.node(at);
        let (before, is_leaf, hash) = (node.before, node.children == Few::NONE, BlockHash(node.end[0]));
        self.node_mut(at).before = NOWHERE;
        if before != NOWHERE {
            self.children.remove(before, &mut self.nodes[before as usize].children);
            if self.node(before).children == Few::NONE && self.node(before).copies == Brief::NONE {
                self.vacate(before);
            }
        }
        if is_leaf {
            self.vacate(at);
        } else {
            self.stumps.entry(hash).or_insert(at);
        }
    }

    /// Gives the place of a block or a stump away on which nothing hangs.
    fn vacate(&mut self, at: u32) {
        let hash = BlockHash(self.node(at).end[0]);
        if !self.stumps.is_empty() && self.stumps.get(&hash) == Some(&at) {
            self.stumps.remove(&hash);
        }
        self.free.push(at);
    }
}

#[cfg(test)]
mod tests;
