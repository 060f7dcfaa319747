//! A source as another router knew it: what of it is written down, and how it is put together again.

use std::collections::hash_map::{Entry, Iter};

use super::{Placed, Source, SourceRules, TIERS};
use crate::event::EngineHash;
use crate::index::Change;
use crate::orphans::Orphan;

impl Source {
    pub(crate) fn rules(&self) -> &SourceRules {
        &self.rules
    }

    /// Blocks whose place is known.
    pub(crate) fn placed(&self) -> Iter<'_, EngineHash, Placed> {
        self.blocks.iter()
    }

    /// Blocks that wait for a parent or for tokens.
    pub(crate) fn waiting(&self) -> Iter<'_, EngineHash, Orphan> {
        self.orphans.iter()
    }

    /// Takes over a block; false when there is one of this name already. In any order.
    pub(crate) fn adopt_placed(&mut self, name: EngineHash, block: Placed, out: &mut Vec<Change>) -> bool {
        let Entry::Vacant(free) = self.blocks.entry(name) else { return false };
        let block = free.insert(block);
        for tier in TIERS {
            if block.copies.serves(tier) {
                block.held(tier, &mut self.closure, out);
            }
        }
        true
    }

    /// Takes over a block that waits; false when there is one of this name already.
    pub(crate) fn adopt_orphan(&mut self, name: EngineHash, orphan: Orphan) -> bool {
        if self.blocks.contains_key(&name) || self.orphans.get_mut(name).is_some() {
            return false;
        }
        self.orphans.keep(name, orphan);
        true
    }
}
