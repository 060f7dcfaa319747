//! Export of a source to a snapshot, and its import.

use std::collections::hash_map::Iter;

use super::{SourceBlocks, SourceRules};
use crate::block_tree::{BlocksByEnd, PlacedBlock};
use crate::index::ResidencyChange;
use crate::kv_event::EngineHash;
use crate::orphans::Orphan;

impl SourceBlocks {
    pub(crate) fn rules(&self) -> &SourceRules {
        &self.rules
    }

    /// Iterates over the placed blocks.
    pub(crate) fn placed(&self) -> impl Iterator<Item = (EngineHash, PlacedBlock)> {
        self.blocks.placed()
    }

    /// Iterates over the orphans.
    pub(crate) fn orphan_entries(&self) -> Iter<'_, EngineHash, Orphan> {
        self.orphans.iter()
    }

    /// Imports a placed block, in any order; returns false if there is one of this name already.
    pub(crate) fn adopt_placed(
        &mut self,
        (name, block): (EngineHash, PlacedBlock),
        ends: &mut BlocksByEnd,
        out: &mut Vec<ResidencyChange>,
    ) -> bool {
        self.blocks.adopt(name, block, ends, out)
    }

    /// Imports an orphan; returns false if there is one of this name already.
    pub(crate) fn adopt_orphan(&mut self, hash: EngineHash, orphan: Orphan) -> bool {
        if self.blocks.find(hash).is_some() || self.orphans.get_mut(hash).is_some() {
            return false;
        }
        self.orphans.insert(hash, orphan);
        true
    }
}
