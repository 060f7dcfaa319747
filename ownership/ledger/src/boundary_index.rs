//! Index from a prefix to the artifact that keeps it, with 16 bytes per boundary.
//!
//! An entry has 64 bits of prefix and scope and 64 bits of the artifact's id, so a hit is verified in the artifact
//! table.

use vocabulary::{ArtifactId, PrefixId};

use crate::artifact::Scope;
use crate::artifact_table::{ArtifactTable, BoundaryArtifactView};
use crate::radix::RadixMap;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct BoundaryIndex(RadixMap<u128, (), 64>);

impl BoundaryIndex {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn insert(&mut self, prefix: PrefixId, scope: Scope, id: ArtifactId) {
        self.0.insert(entry(prefix, scope, id), ());
    }

    pub(crate) fn remove(&mut self, prefix: PrefixId, scope: Scope, id: ArtifactId) {
        self.0.remove(&entry(prefix, scope, id));
    }

    pub(crate) fn find<'a>(
        &self,
        prefix: PrefixId,
        scope: Scope,
        artifacts: &'a ArtifactTable,
    ) -> Option<BoundaryArtifactView<'a>> {
        let mut from = key(prefix, scope);
        loop {
            let (found, ()) = self.0.at_or_after(&from).filter(|(found, ())| *found >> 64 == from >> 64)?;
            if let Some(holder) = boundary_of_entry(*found, prefix, scope, artifacts) {
                return Some(holder);
            }
            from = found.checked_add(1)?;
        }
    }
}

/// Returns the boundary that an entry refers to, if its artifact really keeps the prefix. Several artifacts may share
/// the upper half of an id.
fn boundary_of_entry(
    entry: u128,
    prefix: PrefixId,
    scope: Scope,
    artifacts: &ArtifactTable,
) -> Option<BoundaryArtifactView<'_>> {
    let mut from = u128::from(entry as u64) << 64;
    loop {
        let (id, stored) = artifacts.at_or_after(ArtifactId(from)).filter(|(id, _)| id.0 >> 64 == from >> 64)?;
        if let Some(boundary) = stored.boundary(id, prefix).filter(|_| stored.origin().scope() == scope) {
            return Some(boundary);
        }
        from = id.0.checked_add(1)?;
    }
}

/// Returns the half of an entry that is derived from the prefix. Both inputs are hashes, so keys are evenly
/// distributed.
fn key(prefix: PrefixId, scope: Scope) -> u128 {
    u128::from((prefix.0 >> 64) as u64 ^ scope.hash()) << 64
}

fn entry(prefix: PrefixId, scope: Scope, id: ArtifactId) -> u128 {
    key(prefix, scope) | id.0 >> 64
}
