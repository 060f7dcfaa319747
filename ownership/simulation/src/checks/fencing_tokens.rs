//! Fencing tokens: each grant of a thing to another holder has a higher one.

use std::collections::BTreeMap;

use ledger::{Command, Outcome, OwnershipSubject};
use vocabulary::{ArtifactId, Epoch, Incarnation, Owner, SessionId, WorkerId};

use crate::ensure;
use crate::property::PropertyResult;

const RISE: &str = "fencing tokens rise";
const ONE: &str = "at most one owner per epoch";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum GrantSubject {
    Session(SessionId),
    Artifact(ArtifactId),
    Worker(WorkerId),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum GrantHolder {
    Owner(Owner),
    Incarnation(Incarnation),
}

impl From<OwnershipSubject> for GrantSubject {
    fn from(subject: OwnershipSubject) -> Self {
        match subject {
            OwnershipSubject::Session(id) => GrantSubject::Session(id),
            OwnershipSubject::Artifact(id) => GrantSubject::Artifact(id),
        }
    }
}

/// Newest grant of everything.
#[derive(Debug, Default)]
pub(crate) struct FencingTokenCheck(BTreeMap<GrantSubject, (Epoch, GrantHolder)>);

impl FencingTokenCheck {
    pub(crate) fn on_granted(&mut self, command: &Command, outcome: &Outcome) -> PropertyResult {
        let Outcome::Granted { epoch } = outcome else { return Ok(()) };
        let (thing, holder) = match command {
            Command::ClaimOwner(claim) => (claim.subject.into(), GrantHolder::Owner(claim.owner)),
            Command::Migrate(migrate) => (GrantSubject::Session(migrate.session), GrantHolder::Owner(migrate.to)),
            Command::RegisterWorker(worker) => {
                (GrantSubject::Worker(worker.worker), GrantHolder::Incarnation(worker.incarnation))
            }
            _ => return Ok(()),
        };
        if let Some((old, before)) = self.0.get(&thing) {
            ensure!(old <= epoch, RISE, "{thing:?} was granted at {old}, then at {epoch}")?;
            ensure!(old < epoch || *before == holder, ONE, "{thing:?} at {epoch}: {before:?} and {holder:?}")?;
        }
        self.0.insert(thing, (*epoch, holder));
        Ok(())
    }
}
