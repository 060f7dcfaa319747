//! Ownership guarantees: one owner per epoch, no owner replaced without a cause, nothing acknowledged lost.

use std::collections::BTreeMap;

use vocabulary::{Epoch, Owner, SessionId};

use super::order::describe;
use super::violation::GuaranteeViolation;
use crate::history::{ClientOperation, LeaseSighting, OwnershipReply, OwnershipRequest, RunInstant, SessionOwner};

/// A grant that clients saw: from the write that made it, from writes that asked for it again, or from reads.
struct Grant<'a> {
    owner: Owner,
    evidence: Vec<&'a ClientOperation>,
}

impl<'a> Grant<'a> {
    /// Returns the writes that returned this grant.
    fn writes(&self) -> impl Iterator<Item = &'a ClientOperation> {
        self.evidence.iter().copied().filter(|operation| operation.is_write())
    }
}

/// Checks that each epoch has one owner and every change of owner has a cause.
pub(super) fn check_grants(
    subject: SessionId,
    operations: &[&ClientOperation],
    sightings: &[LeaseSighting],
) -> Vec<GuaranteeViolation> {
    let (grants, mut broken) = collect_grants(subject, operations);
    let takeovers = EarliestReleases::of(operations);
    let ordered: Vec<(&Epoch, &Grant<'_>)> = grants.iter().collect();
    for pair in ordered.windows(2) {
        let ((before, old), (after, new)) = (pair[0], pair[1]);
        // A grant seen only by reads was made by a write with an unknown outcome.
        let Some(by) = new.writes().next().filter(|_| old.owner != new.owner) else { continue };
        let mut changes =
            new.writes().map(|by| OwnerChange { from: *before, owner: old.owner, to: *after, operation: by });
        if !changes.any(|change| change.is_explained(&takeovers, sightings)) {
            let detail =
                format!("{subject}: {before} of {:?} and {after} of {:?}, by {}", old.owner, new.owner, describe(by));
            broken.push(GuaranteeViolation { guarantee: "no owner is replaced while it owns", detail });
        }
    }
    broken
}

/// Collects every (epoch, owner) in a reply; two owners of one epoch are a violation.
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
        (OwnershipReply::Found(SessionOwner { owner: Some(owner), epoch }), _) => Some((epoch, owner)),
        _ => None,
    }
}

/// A change from one owner to the next.
struct OwnerChange<'a> {
    from: Epoch,
    owner: Owner,
    to: Epoch,
    operation: &'a ClientOperation,
}

/// By seen epoch: the earliest request that released, or may have released, that ownership.
struct EarliestReleases(BTreeMap<Epoch, RunInstant>);

impl EarliestReleases {
    fn of(operations: &[&ClientOperation]) -> EarliestReleases {
        let mut given = BTreeMap::new();
        for operation in operations {
            let (seen, at) = match (operation.asked, operation.answer) {
                (OwnershipRequest::Release { seen, .. }, OwnershipReply::Released | OwnershipReply::Unknown)
                | (OwnershipRequest::Migrate { seen, .. }, OwnershipReply::Unknown) => (seen, operation.invoked),
                _ => continue,
            };
            given.entry(seen).and_modify(|first: &mut RunInstant| *first = at.min(*first)).or_insert(at);
        }
        EarliestReleases(given)
    }
}

impl OwnerChange<'_> {
    fn is_explained(&self, takeovers: &EarliestReleases, sightings: &[LeaseSighting]) -> bool {
        let mut seen_since = takeovers.0.range(self.from..self.to);
        self.is_fenced_migration()
            || seen_since.any(|(_, asked)| *asked < self.operation.completed)
            || self.lease_may_have_ended(sightings)
    }

    /// Returns whether a migration caused it that had seen the replaced grant, or a later grant unknown to clients.
    fn is_fenced_migration(&self) -> bool {
        matches!(self.operation.asked, OwnershipRequest::Migrate { seen, .. } if seen >= self.from && seen < self.to)
    }

    /// Returns whether the old owner's lease was seen ended, and not seen held beyond the change.
    fn lease_may_have_ended(&self, sightings: &[LeaseSighting]) -> bool {
        let own = || sightings.iter().filter(|seen| seen.worker == self.owner.worker);
        let held = own().any(|seen| seen.shows_held(self.from, self.to));
        let ended = own().any(|seen| seen.shows_ended(self.from));
        ended && !held
    }
}

/// Checks that acknowledged writes are in the final state, and that the final state is explained by some request.
pub(super) fn check_nothing_lost(
    subject: SessionId,
    operations: &[&ClientOperation],
    holder: SessionOwner,
) -> Vec<GuaranteeViolation> {
    let promise = "nothing acknowledged is lost";
    let mut broken = Vec::new();
    for operation in operations {
        let kept = match (operation.answer, operation.asked) {
            (OwnershipReply::Granted(epoch), _) => epoch <= holder.epoch,
            (OwnershipReply::Released, OwnershipRequest::Release { seen, .. }) => seen < holder.epoch,
            _ => true,
        };
        if !kept {
            broken.push(GuaranteeViolation {
                guarantee: promise,
                detail: format!("{subject} is at {}, but {}", holder.epoch, describe(operation)),
            });
        }
    }
    let writes = || operations.iter().filter(|operation| operation.is_write());
    let began = writes().filter(|write| may_have_changed(write)).map(|write| write.invoked).min();
    let as_found = |read: &&&ClientOperation| {
        read.answer == OwnershipReply::Found(holder) && began.is_none_or(|at| read.invoked < at)
    };
    let untouched = writes().next().is_none() || operations.iter().any(|read| as_found(&read));
    if !untouched && !writes().any(|operation| explains(operation, holder)) {
        let detail = format!("{subject} is {holder:?}, which nothing that was asked explains");
        broken.push(GuaranteeViolation { guarantee: promise, detail });
    }
    broken
}

fn may_have_changed(write: &ClientOperation) -> bool {
    matches!(write.answer, OwnershipReply::Granted(_) | OwnershipReply::Released | OwnershipReply::Unknown)
}

/// Returns whether this write produced, or may have produced, the session's final state.
fn explains(operation: &ClientOperation, last: SessionOwner) -> bool {
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
