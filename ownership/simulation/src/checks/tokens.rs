//! Fencing tokens: each grant of one thing to another holder has a higher one.

use std::collections::BTreeMap;

use ledger::{Command, Outcome, Subject};
use vocabulary::{ArtifactId, Epoch, Incarnation, Owner, SessionId, WorkerId};

use crate::book::Checked;
use crate::ensure;

const RISE: &str = "fencing tokens rise";
const ONE: &str = "at most one owner per epoch";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Thing {
    Session(SessionId),
    Artifact(ArtifactId),
    Worker(WorkerId),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Holder {
    Owner(Owner),
    Life(Incarnation),
}

impl From<Subject> for Thing {
    fn from(subject: Subject) -> Self {
        match subject {
            Subject::Session(id) => Thing::Session(id),
            Subject::Artifact(id) => Thing::Artifact(id),
        }
    }
}

/// The newest grant of everything.
#[derive(Debug, Default)]
pub(crate) struct Tokens(BTreeMap<Thing, (Epoch, Holder)>);

impl Tokens {
    pub(crate) fn granted(&mut self, command: &Command, outcome: &Outcome) -> Checked {
        let Outcome::Granted { epoch } = outcome else { return Ok(()) };
        let (thing, holder) = match command {
            Command::ClaimOwner(claim) => (claim.subject.into(), Holder::Owner(claim.owner)),
            Command::Migrate(migrate) => (Thing::Session(migrate.session), Holder::Owner(migrate.to)),
            Command::RegisterWorker(worker) => (Thing::Worker(worker.worker), Holder::Life(worker.incarnation)),
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
