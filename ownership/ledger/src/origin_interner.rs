//! Interner for chain descriptors, which many artifacts share. Not part of the state.

use std::sync::Arc;

use imbl::OrdMap;
use vocabulary::PrefixId;

use crate::artifact::{ChainDescriptor, Scope};

/// Chain descriptors by root and scope, each with the number of artifacts that use it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChainDescriptorInterner {
    origins: OrdMap<(PrefixId, Scope), (Arc<ChainDescriptor>, u64)>,
}

impl ChainDescriptorInterner {
    /// Replaces a new record's descriptor by the shared one. If two share root and scope but differ, only the first
    /// is interned.
    pub(crate) fn intern(&mut self, origin: &mut Arc<ChainDescriptor>) {
        let key = (origin.root, origin.scope());
        match self.origins.get_mut(&key) {
            Some((known, held)) => {
                if known == origin {
                    *origin = known.clone();
                    *held += 1;
                }
            }
            None => drop(self.origins.insert(key, (origin.clone(), 1))),
        }
    }

    /// Releases a descriptor after its record was removed.
    pub(crate) fn release(&mut self, origin: &Arc<ChainDescriptor>) {
        let key = (origin.root, origin.scope());
        let Some((known, held)) = self.origins.get_mut(&key) else { return };
        if Arc::ptr_eq(known, origin) {
            *held -= 1;
            if *held == 0 {
                self.origins.remove(&key);
            }
        }
    }
}

impl PartialEq for ChainDescriptorInterner {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for ChainDescriptorInterner {}
