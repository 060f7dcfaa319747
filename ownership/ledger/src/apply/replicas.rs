//! Read-only copies. A copied prefix is recorded on every artifact on its path, up to where the copy reaches.

use super::CommandResult;
use crate::artifact::{ParentPoint, Replica};
use crate::command::{DropReplica, ReplicateReadonly};
use crate::ledger::Ledger;
use crate::outcome::Outcome;

impl Ledger {
    pub(super) fn replicate_readonly(&mut self, copy: ReplicateReadonly) -> CommandResult {
        self.check_live(copy.holder)?;
        self.check_not_draining(copy.holder)?;
        let artifact = match self.resolve_prefix(copy.place) {
            Ok(artifact) => artifact.id,
            Err(unresolved) => return unresolved.into(),
        };
        let expires = self.now().after(copy.ttl);
        for here in self.path(artifact, copy.place.point) {
            self.add_replica(here, Replica { holder: copy.holder, upto: here.at, expires });
        }
        Ok(Outcome::Done)
    }

    fn add_replica(&mut self, here: ParentPoint, mut replica: Replica) {
        let owned = |holder| move |artifact: &crate::Artifact| artifact.owner != Some(holder);
        let Some(mut artifact) = self.artifact(here.artifact).filter(owned(replica.holder)) else { return };
        if let Some(known) = artifact.replicas.iter().find(|known| known.holder == replica.holder) {
            replica.expires = replica.expires.max(known.expires);
            replica.upto = if known.upto.blocks > replica.upto.blocks { known.upto } else { replica.upto };
        }
        let now = self.now();
        artifact.replicas.retain(|known| known.holder != replica.holder && known.expires > now);
        if artifact.replicas.len() >= self.records.limits.replicas.max(1) as usize {
            let first = artifact.replicas.iter().map(|known| (known.expires, known.holder)).min();
            artifact.replicas.retain(|known| Some((known.expires, known.holder)) != first);
        }
        let place = artifact.replicas.partition_point(|known| known.holder < replica.holder);
        artifact.replicas.insert(place, replica);
        artifact.touched = now;
        self.put_artifact(artifact);
    }

    pub(super) fn drop_replica(&mut self, copy: DropReplica) -> CommandResult {
        let artifact = match self.resolve_prefix(copy.place) {
            Ok(artifact) => artifact.id,
            Err(unresolved) => return unresolved.into(),
        };
        for here in self.path(artifact, copy.place.point) {
            let found = self.artifact(here.artifact).filter(|a| a.replicas.iter().any(|r| r.holder == copy.holder));
            if let Some(mut artifact) = found {
                artifact.replicas.retain(|known| known.holder != copy.holder);
                self.put_artifact(artifact);
            }
        }
        Ok(Outcome::Done)
    }
}
