//! Ownership: one owner per epoch, no owner replaced without a cause, nothing acknowledged lost.

use std::collections::BTreeMap;

use vocabulary::{Epoch, Owner, SessionId};

use super::GuaranteeViolation;
use super::order::describe;
use crate::history::{ClientOperation, LeaseSighting, OwnershipReply, OwnershipRequest, RunInstant, SessionHolder};

/// A grant that clients were told of: the one who made it, those who asked for what it gave already, those who read.
struct Grant<'a> {
    owner: Owner,
    evidence: Vec<&'a ClientOperation>,
}

impl<'a> Grant<'a> {
    /// The writes among them.
    fn writes(&self) -> impl Iterator<Item = &'a ClientOperation> {
        self.evidence.iter().copied().filter(|operation| operation.is_write())
    }
}

/// One owner per epoch, and a cause for every change of owner.
pub(super) fn check_grants(
    subject: SessionId,
    operations: &[&ClientOperation],
    sightings: &[LeaseSighting],
) -> Vec<GuaranteeViolation> {
    let (grants, mut broken) = collect_grants(subject, operations);
    let given = EarliestTakeovers::of(operations);
    let ordered: Vec<(&Epoch, &Grant<'_>)> = grants.iter().collect();
    for pair in ordered.windows(2) {
        let ((before, old), (after, new)) = (pair[0], pair[1]);
        // What was only read was made by a write of which nothing is known.
        let Some(by) = new.writes().next().filter(|_| old.owner != new.owner) else { continue };
        let mut changes =
            new.writes().map(|by| OwnerChange { from: *before, owner: old.owner, to: *after, operation: by });
        if !changes.any(|change| change.is_explained(&given, sightings)) {
            let detail =
                format!("{subject}: {before} of {:?} and {after} of {:?}, by {}", old.owner, new.owner, describe(by));
            broken.push(GuaranteeViolation { guarantee: "no owner is replaced while it owns", detail });
        }
    }
    broken
}

/// Every (epoch, owner) that was answered; two owners of one epoch are broken at once.
fn collect_grants<'a>(
    subject: SessionId,
    operations: &[&'a ClientOperation],
) -> (BTreeMap<Epoch, Grant<'a>>, Vec<GuaranteeViolation>) {
    let (mut grants, mut broken) = (BTreeMap::<Epoch, Grant<'a>>::new(), Vec::new());
    for operation in operations {
        let Some((epoch, owner)) = grant_of(operation) else { continue };
        let known = grants.entry(epoch).or_insert(Grant { owner, evidence: Vec::new() });
        if let Some(first) = known.evidence.first().filter(|_| known.owner != owner) {
            let detail = format!("{subject} at {epoch}: {} and {}", describe(first), describe(operation));
            broken.push(GuaranteeViolation { guarantee: "one owner per epoch", detail });
        }
        known.evidence.push(operation);
    }
    (grants, broken)
}

fn grant_of(operation: &ClientOperation) -> Option<(Epoch, Owner)> {
    match (operation.answer, operation.asked) {
        (
            OwnershipReply::Granted(epoch),
            OwnershipRequest::Claim(owner) | OwnershipRequest::Migrate { to: owner, .. },
        ) => Some((epoch, owner)),
        (OwnershipReply::Found(SessionHolder { owner: Some(owner), epoch }), _) => Some((epoch, owner)),
        _ => None,
    }
}

/// From one owner to the next.
struct OwnerChange<'a> {
    from: Epoch,
    owner: Owner,
    to: Epoch,
    operation: &'a ClientOperation,
}

/// When somebody asked for what took, or may have taken, the ownership that he had seen away; the earliest counts.
struct EarliestTakeovers(BTreeMap<Epoch, RunInstant>);

impl EarliestTakeovers {
    fn of(operations: &[&ClientOperation]) -> EarliestTakeovers {
        let mut given = BTreeMap::new();
        for operation in operations {
            let (seen, at) = match (operation.asked, operation.answer) {
                (OwnershipRequest::Release { seen, .. }, OwnershipReply::Released | OwnershipReply::Unknown)
                | (OwnershipRequest::Migrate { seen, .. }, OwnershipReply::Unknown) => (seen, operation.invoked),
                _ => continue,
            };
            given.entry(seen).and_modify(|first: &mut RunInstant| *first = at.min(*first)).or_insert(at);
        }
        EarliestTakeovers(given)
    }
}

impl OwnerChange<'_> {
    fn is_explained(&self, given: &EarliestTakeovers, sightings: &[LeaseSighting]) -> bool {
        let mut seen_since = given.0.range(self.from..self.to);
        self.is_fenced_migration()
            || seen_since.any(|(_, asked)| *asked < self.operation.completed)
            || self.lease_may_have_ended(sightings)
    }

    /// A migration that had seen the grant it replaces, or a later one that no client was told of.
    fn is_fenced_migration(&self) -> bool {
        matches!(self.operation.asked, OwnershipRequest::Migrate { seen, .. } if seen >= self.from && seen < self.to)
    }

    /// No, when the owner's lease was seen after the change as it had been before it.
    fn lease_may_have_ended(&self, sightings: &[LeaseSighting]) -> bool {
        let own = || sightings.iter().filter(|seen| seen.worker == self.owner.worker);
        let held = own().any(|seen| seen.shows_held(self.from, self.to));
        let ended = own().any(|seen| seen.shows_ended(self.from));
        ended && !held
    }
}

/// What was acknowledged is there at the end, or something that was asked later explains what is there.
pub(super) fn check_nothing_lost(
    subject: SessionId,
    operations: &[&ClientOperation],
    last: SessionHolder,
) -> Vec<GuaranteeViolation> {
    let promise = "nothing acknowledged is lost";
    let mut broken = Vec::new();
    for operation in operations {
        let kept = match (operation.answer, operation.asked) {
            (OwnershipReply::Granted(epoch), _) => epoch <= last.epoch,
            (OwnershipReply::Released, OwnershipRequest::Release { seen, .. }) => seen < last.epoch,
            _ => true,
        };
        if !kept {
            broken.push(GuaranteeViolation {
                guarantee: promise,
                detail: format!("{subject} is at {}, but {}", last.epoch, describe(operation)),
            });
        }
    }
    let writes = || operations.iter().filter(|operation| operation.is_write());
    let began = writes().filter(|write| may_have_changed(write)).map(|write| write.invoked).min();
    let as_found = |read: &&&ClientOperation| {
        read.answer == OwnershipReply::Found(last) && began.is_none_or(|at| read.invoked < at)
    };
    let untouched = writes().next().is_none() || operations.iter().any(|read| as_found(&read));
    if !untouched && !writes().any(|operation| explains(operation, last)) {
        let detail = format!("{subject} is {last:?}, which nothing that was asked explains");
        broken.push(GuaranteeViolation { guarantee: promise, detail });
    }
    broken
}

fn may_have_changed(write: &ClientOperation) -> bool {
    matches!(write.answer, OwnershipReply::Granted(_) | OwnershipReply::Released | OwnershipReply::Unknown)
}

/// Whether this write made, or may have made, the session what it is.
fn explains(operation: &ClientOperation, last: SessionHolder) -> bool {
    let unknown = operation.answer == OwnershipReply::Unknown;
    match (operation.asked, last.owner) {
        (OwnershipRequest::Claim(owner) | OwnershipRequest::Migrate { to: owner, .. }, Some(holder)) => {
            owner == holder && (unknown || operation.answer == OwnershipReply::Granted(last.epoch))
        }
        (OwnershipRequest::Release { seen, .. }, None) => {
            (unknown || operation.answer == OwnershipReply::Released) && seen < last.epoch
        }
        _ => false,
    }
}
