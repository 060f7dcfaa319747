//! Ownership commands: claims, releases and migrations.

use vocabulary::{ArtifactId, Epoch, Owner};

use super::CommandResult;
use crate::artifact::Artifact;
use crate::command::{ClaimOwner, MigrateSession, OwnershipSubject, ReleaseOwner, SetGroup};
use crate::ledger::Ledger;
use crate::outcome::{Outcome, Refusal};
use crate::record::Session;

impl Ledger {
    pub(super) fn claim_owner(&mut self, epoch: Epoch, claim: ClaimOwner) -> CommandResult {
        self.check_live(claim.owner)?;
        let (owner, granted) = self.owner_and_epoch(claim.subject)?;
        match owner.filter(|owner| self.is_live(*owner)) {
            Some(owner) if owner == claim.owner => Ok(Outcome::Granted { epoch: granted }),
            Some(by) => Err(Refusal::AlreadyOwned { by, epoch: granted }),
            None => {
                self.check_not_draining(claim.owner)?;
                self.set_owner(epoch, claim.subject, Some(claim.owner));
                Ok(Outcome::Granted { epoch })
            }
        }
    }

    pub(super) fn release(&mut self, epoch: Epoch, release: ReleaseOwner) -> CommandResult {
        let (owner, granted) = self.owner_and_epoch(release.subject)?;
        if owner != Some(release.owner) {
            return Ok(Outcome::Done);
        }
        if granted != release.seen {
            return Err(Refusal::StaleEpoch { current: granted });
        }
        self.set_owner(epoch, release.subject, None);
        Ok(Outcome::Done)
    }

    /// Migrates a session to a worker that has its blocks: its decode ownership, and the artifacts up to the given head
    /// that no other session references. Shared artifacts keep their owner.
    pub(super) fn migrate(&mut self, epoch: Epoch, migrate: MigrateSession) -> CommandResult {
        self.check_live(migrate.to)?;
        let session = self.session(migrate.session).ok_or(Refusal::UnknownSession)?;
        let current = session.epoch;
        let is_fenced = self.session_owner(&session).is_some_and(|owner| owner != migrate.to);
        if is_fenced && current != migrate.seen {
            return Err(Refusal::StaleEpoch { current });
        }
        let head = session.heads.iter().find(|head| Some(head.point.id) == migrate.head).copied();
        let moves = session.owner != Some(migrate.to);
        if moves {
            self.check_not_draining(migrate.to)?;
        }
        for id in head.map_or_else(Vec::new, |head| self.exclusive_artifacts(head.artifact)) {
            let artifact = self.artifact(id).filter(|artifact| artifact.owner != Some(migrate.to));
            if let Some(artifact) = artifact {
                self.grant(epoch, artifact, migrate.to);
            }
        }
        if moves {
            self.set_owner(epoch, OwnershipSubject::Session(migrate.session), Some(migrate.to));
        }
        Ok(Outcome::Granted { epoch: if moves { epoch } else { current } })
    }

    /// Returns the artifacts from `id` up to the root that only one session uses.
    fn exclusive_artifacts(&self, id: ArtifactId) -> Vec<ArtifactId> {
        let end = self.artifact(id).map(|artifact| artifact.end());
        let path = end.map_or_else(Vec::new, |end| self.path(id, end));
        let alone = |artifact: Artifact| artifact.sessions.len() + artifact.children.len() == 1;
        path.iter().map(|here| here.artifact).take_while(|id| self.artifact(*id).is_some_and(alone)).collect()
    }

    fn owner_and_epoch(&self, subject: OwnershipSubject) -> Result<(Option<Owner>, Epoch), Refusal> {
        match subject {
            OwnershipSubject::Session(id) => {
                self.session(id).map(|s| (s.owner, s.epoch)).ok_or(Refusal::UnknownSession)
            }
            OwnershipSubject::Artifact(id) => {
                self.artifact(id).map(|a| (a.owner, a.epoch)).ok_or(Refusal::UnknownArtifact)
            }
        }
    }

    fn set_owner(&mut self, epoch: Epoch, subject: OwnershipSubject, owner: Option<Owner>) {
        let touched = self.now();
        match subject {
            OwnershipSubject::Session(id) => {
                if let Some(session) = self.session(id) {
                    self.put_session(Session { owner, epoch, touched, ..session });
                }
            }
            OwnershipSubject::Artifact(id) => {
                if let Some(mut artifact) = self.artifact(id) {
                    artifact.replicas.retain(|copy| Some(copy.holder) != owner);
                    self.put_artifact(Artifact { owner, epoch, touched, ..artifact });
                }
            }
        }
    }

    pub(super) fn set_group(&mut self, set: SetGroup) -> CommandResult {
        let artifact = self.artifact(set.artifact).ok_or(Refusal::UnknownArtifact)?;
        self.put_artifact(Artifact { group: set.group, ..artifact });
        Ok(Outcome::Done)
    }
}
