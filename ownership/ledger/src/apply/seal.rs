//! Sealing: makes blocks immutable, by extending an artifact or by adding a new one.

use std::sync::Arc;

use vocabulary::{ArtifactId, Epoch, LedgerTime, Owner};

use super::{CommandResult, UnresolvedPrefix};
use crate::PrefixPoint;
use crate::artifact::{Artifact, ParentPoint, PrefixBoundary, Scope};
use crate::command::{PrefixRef, SealBlocks};
use crate::ledger::Ledger;
use crate::locate::OwnershipStatus;
use crate::outcome::{Outcome, Refusal, SealResult};
use crate::point::WAYPOINT;

/// Number of an artifact's newest boundaries that are kept besides its waypoints.
const RETAINED_BOUNDARIES: usize = 8;

/// Maximum number of artifacts on the path to the root that one command may write.
const MAX_PATH_ARTIFACTS: usize = 256;

/// Where the new blocks of a segment attach.
struct AttachPoint {
    /// Boundary before the new blocks; `None` at the root.
    parent: Option<ParentPoint>,
    /// Number of the segment's points that precede its new blocks.
    known_points: usize,
}

impl Ledger {
    pub(super) fn seal(&mut self, epoch: Epoch, seal: &SealBlocks) -> CommandResult {
        if !seal.run.is_well_formed() || seal.origin.shape.block.0 == 0 {
            return Err(Refusal::InvalidBlockRange);
        }
        self.check_live(seal.owner)?;
        let start = match self.attach_point(seal) {
            Ok(start) => start,
            Err(unresolved) => return unresolved.into(),
        };
        let new = &seal.run.points[start.known_points..];
        if let Some(attached) = start.parent {
            self.adopt_path(epoch, attached.artifact, seal.owner);
        }
        let (artifact, stored) = match (start.parent, new) {
            (Some(attached), []) => (attached.artifact, SealResult::Known),
            (Some(attached), _) if self.can_extend(attached, seal) => {
                self.extend_artifact(attached.artifact, retained_boundaries(new, epoch));
                (attached.artifact, SealResult::Joined)
            }
            (attached, _) => (self.add_artifact(epoch, seal, attached, new)?, SealResult::New),
        };
        Ok(Outcome::Sealed { artifact, end: seal.run.end(), stored, epoch })
    }

    /// Returns the deepest point of the segment that is already a boundary, so that equal histories share one path of
    /// artifacts.
    fn attach_point(&self, seal: &SealBlocks) -> Result<AttachPoint, UnresolvedPrefix> {
        let scope = seal.origin.scope();
        let known = self.known_points(seal, scope);
        let point = if known > 0 { seal.run.points[known - 1] } else { seal.run.base };
        if known == 0 && point.blocks.0 == 0 {
            let agrees = point.id == seal.origin.root;
            return if agrees {
                Ok(AttachPoint { parent: None, known_points: known })
            } else {
                Err(UnresolvedPrefix::Refused(Refusal::InvalidBlockRange))
            };
        }
        let artifact = self.resolve_prefix(PrefixRef { scope, point, extent: seal.extent })?;
        let (old, new) = (&artifact.origin, &seal.origin);
        if old.root != new.root || old.model != new.model || old.shape.block != new.shape.block {
            return Err(UnresolvedPrefix::Refused(Refusal::InvalidBlockRange));
        }
        Ok(AttachPoint { parent: Some(ParentPoint { artifact: artifact.id, at: point }), known_points: known })
    }

    /// Returns how many points of the segment are already known.
    ///
    /// Waypoints are kept without gaps, so a binary search over them finds the last one that is kept; any deeper
    /// boundary lies before the next waypoint.
    fn known_points(&self, seal: &SealBlocks, scope: Scope) -> usize {
        let points = &seal.run.points;
        let is_kept = |point: &PrefixPoint| self.has_boundary(point.id, scope);
        let waypoints: Vec<usize> =
            (0..points.len()).filter(|n| points[*n].blocks.0.is_multiple_of(WAYPOINT)).collect();
        let passed = waypoints.partition_point(|place| is_kept(&points[*place]));
        let first = passed.checked_sub(1).map_or(0, |last| waypoints[last] + 1);
        let end = waypoints.get(passed).copied().unwrap_or(points.len());
        points[first..end].iter().rposition(is_kept).map_or(first, |place| first + place + 1)
    }

    /// Returns whether new blocks may extend the artifact before them: equal owner and chain, no copies, no children,
    /// and no session references it but this one, whose head is at its end.
    fn can_extend(&self, attached: ParentPoint, seal: &SealBlocks) -> bool {
        let Some(extent) = self.artifact(attached.artifact) else { return false };
        let head_at_end = |session| {
            let heads = self.session(session).map_or_else(Vec::new, |session| session.heads);
            heads.iter().all(|head| head.artifact != extent.id || head.point == extent.end())
        };
        extent.end() == attached.at
            && extent.owner == Some(seal.owner)
            && *extent.origin == seal.origin
            && extent.children.is_empty()
            && extent.replicas.iter().all(|copy| copy.expires <= self.now())
            && extent.sessions.iter().all(|session| Some(session) == seal.session && head_at_end(session))
    }

    fn extend_artifact(&mut self, id: ArtifactId, new: Vec<PrefixBoundary>) {
        let Some(mut extent) = self.artifact(id) else { return };
        extent.boundaries.extend(new);
        let newest = extent.boundaries.len().saturating_sub(RETAINED_BOUNDARIES);
        let mut place = 0;
        extent.boundaries.retain(|boundary| {
            place += 1;
            place > newest || boundary.point.blocks.0 % WAYPOINT == 0
        });
        extent.replicas.clear();
        extent.touched = self.now();
        self.put_artifact(extent);
    }

    fn add_artifact(
        &mut self,
        epoch: Epoch,
        seal: &SealBlocks,
        parent: Option<ParentPoint>,
        new: &[PrefixPoint],
    ) -> Result<ArtifactId, Refusal> {
        let boundaries = retained_boundaries(new, epoch);
        let from = parent.map_or(seal.run.base, |parent| parent.at).blocks;
        let first = boundaries.first().ok_or(Refusal::InvalidBlockRange)?.point;
        let id = seal.origin.scope().artifact_id(from, first.id, epoch);
        self.check_artifact_quota(&seal.origin.tenant)?;
        let touched = self.now();
        // Linked before evicting, so that the parent itself is not evicted.
        self.link(parent, id, touched);
        while self.artifact_count() >= self.records.limits.artifacts as usize {
            if !self.make_room_for_artifact(&seal.origin.tenant) {
                self.unlink(parent, id);
                return Err(Refusal::LedgerFull);
            }
        }
        self.put_artifact(Artifact {
            id,
            origin: Arc::new(seal.origin.clone()),
            parent,
            boundaries,
            owner: Some(seal.owner),
            epoch,
            sessions: Default::default(),
            children: Default::default(),
            replicas: Vec::new(),
            group: None,
            touched,
            pinned: Default::default(),
        });
        Ok(id)
    }

    fn link(&mut self, parent: Option<ParentPoint>, child: ArtifactId, touched_at: LedgerTime) {
        if let Some(mut parent) = parent.and_then(|parent| self.artifact(parent.artifact)) {
            parent.children.insert(child);
            parent.touched = touched_at;
            self.put_artifact(parent);
        }
    }

    fn unlink(&mut self, parent: Option<ParentPoint>, child: ArtifactId) {
        if let Some(mut parent) = parent.and_then(|parent| self.artifact(parent.artifact)) {
            parent.children.remove(child);
            self.put_artifact(parent);
        }
    }

    /// Replaces dead owners from an artifact up to the root: a live copy's holder becomes the owner; if there is none,
    /// `owner` does, because it holds the whole prefix.
    fn adopt_path(&mut self, epoch: Epoch, id: ArtifactId, owner: Owner) {
        let mut next = Some(id);
        for _ in 0..MAX_PATH_ARTIFACTS {
            let Some(artifact) = next.and_then(|id| self.artifact(id)) else { return };
            next = artifact.parent.map(|parent| parent.artifact);
            let heir = match self.ownership_status(&artifact) {
                OwnershipStatus::Owned(_) => continue,
                OwnershipStatus::Replicated(copy) => copy,
                OwnershipStatus::InStore(_) | OwnershipStatus::Unowned if self.is_draining(owner) => continue,
                OwnershipStatus::InStore(_) | OwnershipStatus::Unowned => owner,
            };
            self.grant(epoch, artifact, heir);
        }
    }

    /// Makes `owner` the owner of an artifact.
    pub(super) fn grant(&mut self, epoch: Epoch, mut artifact: Artifact, owner: Owner) {
        artifact.owner = Some(owner);
        artifact.epoch = epoch;
        artifact.replicas.retain(|copy| copy.holder != owner);
        artifact.touched = self.now();
        self.put_artifact(artifact);
    }

    /// Returns the artifacts from `id` up to the root, each with its deepest boundary on the path to `point`.
    pub(super) fn path(&self, id: ArtifactId, point: PrefixPoint) -> Vec<ParentPoint> {
        let mut path = Vec::new();
        let mut next = Some(ParentPoint { artifact: id, at: point });
        while let Some(here) = next.filter(|_| path.len() < MAX_PATH_ARTIFACTS) {
            path.push(here);
            next = self.artifact(here.artifact).and_then(|artifact| artifact.parent);
        }
        path
    }
}

/// Returns the boundaries to keep for new blocks: waypoints and the end.
fn retained_boundaries(new: &[PrefixPoint], epoch: Epoch) -> Vec<PrefixBoundary> {
    let end = new.last().map(|end| end.blocks);
    let keep = |point: &&PrefixPoint| point.blocks.0.is_multiple_of(WAYPOINT) || Some(point.blocks) == end;
    new.iter().filter(keep).map(|point| PrefixBoundary { point: *point, epoch }).collect()
}
