//! A source as another router knew it: what of it is written down, and how it is put together again.

use std::collections::hash_map::Iter;

use super::{Source, SourceRules};
use crate::blocks::{Ends, Placed};
use crate::event::EngineHash;
use crate::index::Change;
use crate::orphans::Orphan;

impl Source {
    pub(crate) fn rules(&self) -> &SourceRules {
        &self.rules
    }

    /// Blocks whose place is known.
    pub(crate) fn placed(&self) -> impl Iterator<Item = (EngineHash, Placed)> {
        self.blocks.placed()
    }

    /// Blocks that wait for a parent or for tokens.
    pub(crate) fn waiting(&self) -> Iter<'_, EngineHash, Orphan> {
        self.orphans.iter()
    }

    /// Takes over a block; false when there is one of this name already. In any order.
    pub(crate) fn adopt_placed(
        &mut self,
        (name, block): (EngineHash, Placed),
        ends: &mut Ends,
        out: &mut Vec<Change>,
    ) -> bool {
        self.blocks.adopt(name, block, ends, out)
    }

    /// Takes over a block that waits; false when there is one of this name already.
    pub(crate) fn adopt_orphan(&mut self, name: EngineHash, orphan: Orphan) -> bool {
        if self.blocks.find(name).is_some() || self.orphans.get_mut(name).is_some() {
            return false;
        }
        self.orphans.keep(name, orphan);
        true
    }
}
