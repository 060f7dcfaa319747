//! Ownership: one owner per epoch, no owner replaced without a cause, nothing acknowledged lost.

use std::collections::BTreeMap;

use vocabulary::{Epoch, Owner, SessionId};

use super::Broken;
use super::order::told;
use crate::history::{Answer, Asked, At, Holding, Operation, Sighting};

/// A grant that clients were told of: the one who made it, those who asked for what it gave already, those who read.
struct Grant<'a> {
    owner: Owner,
    told: Vec<&'a Operation>,
}

impl<'a> Grant<'a> {
    /// The writes among them.
    fn writes(&self) -> impl Iterator<Item = &'a Operation> {
        self.told.iter().copied().filter(|operation| operation.is_write())
    }
}

/// One owner per epoch, and a cause for every change of owner.
pub(super) fn of_subject(subject: SessionId, operations: &[&Operation], sightings: &[Sighting]) -> Vec<Broken> {
    let (grants, mut broken) = grants(subject, operations);
    let given = Given::of(operations);
    let ordered: Vec<(&Epoch, &Grant<'_>)> = grants.iter().collect();
    for pair in ordered.windows(2) {
        let ((before, old), (after, new)) = (pair[0], pair[1]);
        // What was only read was made by a write of which nothing is known.
        let Some(by) = new.writes().next().filter(|_| old.owner != new.owner) else { continue };
        let mut changes = new.writes().map(|by| Change { from: *before, owner: old.owner, to: *after, by });
        if !changes.any(|change| change.is_explained(&given, sightings)) {
            let detail =
                format!("{subject}: {before} of {:?} and {after} of {:?}, by {}", old.owner, new.owner, told(by));
            broken.push(Broken { promise: "no owner is replaced while it owns", detail });
        }
    }
    broken
}

/// Every (epoch, owner) that was answered; two owners of one epoch are broken at once.
fn grants<'a>(subject: SessionId, operations: &[&'a Operation]) -> (BTreeMap<Epoch, Grant<'a>>, Vec<Broken>) {
    let (mut grants, mut broken) = (BTreeMap::<Epoch, Grant<'a>>::new(), Vec::new());
    for operation in operations {
        let Some((epoch, owner)) = granted(operation) else { continue };
        let known = grants.entry(epoch).or_insert(Grant { owner, told: Vec::new() });
        if let Some(first) = known.told.first().filter(|_| known.owner != owner) {
            let detail = format!("{subject} at {epoch}: {} and {}", told(first), told(operation));
            broken.push(Broken { promise: "one owner per epoch", detail });
        }
        known.told.push(operation);
    }
    (grants, broken)
}

fn granted(operation: &Operation) -> Option<(Epoch, Owner)> {
    match (operation.answer, operation.asked) {
        (Answer::Granted(epoch), Asked::Claim(owner) | Asked::Migrate { to: owner, .. }) => Some((epoch, owner)),
        (Answer::Found(Holding { owner: Some(owner), epoch }), _) => Some((epoch, owner)),
        _ => None,
    }
}

/// From one owner to the next.
struct Change<'a> {
    from: Epoch,
    owner: Owner,
    to: Epoch,
    by: &'a Operation,
}

/// When somebody asked for what took, or may have taken, the ownership that he had seen away; the earliest counts.
struct Given(BTreeMap<Epoch, At>);

impl Given {
    fn of(operations: &[&Operation]) -> Given {
        let mut given = BTreeMap::new();
        for operation in operations {
            let (seen, at) = match (operation.asked, operation.answer) {
                (Asked::Release { seen, .. }, Answer::Released | Answer::Unknown)
                | (Asked::Migrate { seen, .. }, Answer::Unknown) => (seen, operation.invoked),
                _ => continue,
            };
            given.entry(seen).and_modify(|first: &mut At| *first = at.min(*first)).or_insert(at);
        }
        Given(given)
    }
}

impl Change<'_> {
    fn is_explained(&self, given: &Given, sightings: &[Sighting]) -> bool {
        let mut seen_since = given.0.range(self.from..self.to);
        self.is_fenced_migration()
            || seen_since.any(|(_, asked)| *asked < self.by.completed)
            || self.lease_may_have_ended(sightings)
    }

    /// A migration that had seen the grant it replaces, or a later one that no client was told of.
    fn is_fenced_migration(&self) -> bool {
        matches!(self.by.asked, Asked::Migrate { seen, .. } if seen >= self.from && seen < self.to)
    }

    /// No, when the owner's lease was seen after the change as it had been before it.
    fn lease_may_have_ended(&self, sightings: &[Sighting]) -> bool {
        let own = || sightings.iter().filter(|seen| seen.worker == self.owner.worker);
        let held = own().any(|seen| seen.shows_held(self.from, self.to));
        let ended = own().any(|seen| seen.shows_ended(self.from));
        ended && !held
    }
}

/// What was acknowledged is there at the end, or something that was asked later explains what is there.
pub(super) fn nothing_lost(subject: SessionId, operations: &[&Operation], last: Holding) -> Vec<Broken> {
    let promise = "nothing acknowledged is lost";
    let mut broken = Vec::new();
    for operation in operations {
        let kept = match (operation.answer, operation.asked) {
            (Answer::Granted(epoch), _) => epoch <= last.epoch,
            (Answer::Released, Asked::Release { seen, .. }) => seen < last.epoch,
            _ => true,
        };
        if !kept {
            broken.push(Broken { promise, detail: format!("{subject} is at {}, but {}", last.epoch, told(operation)) });
        }
    }
    let writes = || operations.iter().filter(|operation| operation.is_write());
    let began = writes().filter(|write| may_have_changed(write)).map(|write| write.invoked).min();
    let as_found = |read: &&&Operation| read.answer == Answer::Found(last) && began.is_none_or(|at| read.invoked < at);
    let untouched = writes().next().is_none() || operations.iter().any(|read| as_found(&read));
    if !untouched && !writes().any(|operation| explains(operation, last)) {
        let detail = format!("{subject} is {last:?}, which nothing that was asked explains");
        broken.push(Broken { promise, detail });
    }
    broken
}

fn may_have_changed(write: &Operation) -> bool {
    matches!(write.answer, Answer::Granted(_) | Answer::Released | Answer::Unknown)
}

/// Whether this write made, or may have made, the session what it is.
fn explains(operation: &Operation, last: Holding) -> bool {
    let unknown = operation.answer == Answer::Unknown;
    match (operation.asked, last.owner) {
        (Asked::Claim(owner) | Asked::Migrate { to: owner, .. }, Some(holder)) => {
            owner == holder && (unknown || operation.answer == Answer::Granted(last.epoch))
        }
        (Asked::Release { seen, .. }, None) => (unknown || operation.answer == Answer::Released) && seen < last.epoch,
        _ => false,
    }
}
