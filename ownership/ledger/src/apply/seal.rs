//! Sealing: blocks become immutable, at the end of an extent or as a new one.

use std::sync::Arc;

use vocabulary::{ArtifactId, Epoch, LedgerTime, Owner};

use super::{Answer, Unresolved};
use crate::Point;
use crate::artifact::{Artifact, Attached, Boundary, Scope};
use crate::command::{Place, Seal};
use crate::ledger::Ledger;
use crate::locate::Standing;
use crate::outcome::{Outcome, Refusal, Stored};
use crate::point::WAYPOINT;

/// How many of an extent's newest boundaries are kept besides its waypoints.
const KEPT_BOUNDARIES: usize = 8;

/// How far up a path of extents one command may write.
const MAX_PATH: usize = 256;

/// Where a run's new blocks hang on.
struct Start {
    /// The kept point before them; none at the root.
    attached: Option<Attached>,
    /// Points of the run before its new blocks.
    known: usize,
}

impl Ledger {
    pub(super) fn seal(&mut self, epoch: Epoch, seal: &Seal) -> Answer {
        if !seal.run.is_well_formed() || seal.origin.shape.block.0 == 0 {
            return Err(Refusal::BadRun);
        }
        self.check_live(seal.owner)?;
        let start = match self.start(seal) {
            Ok(start) => start,
            Err(unresolved) => return unresolved.into(),
        };
        let new = &seal.run.points[start.known..];
        if let Some(attached) = start.attached {
            self.adopt_path(epoch, attached.artifact, seal.owner);
        }
        let (artifact, stored) = match (start.attached, new) {
            (Some(attached), []) => (attached.artifact, Stored::Known),
            (Some(attached), _) if self.may_join(attached, seal) => {
                self.join(attached.artifact, kept(new, epoch));
                (attached.artifact, Stored::Joined)
            }
            (attached, _) => (self.add_extent(epoch, seal, attached, new)?, Stored::New),
        };
        Ok(Outcome::Sealed { artifact, end: seal.run.end(), stored, epoch })
    }

    /// The deepest point of the run that is kept already, so that equal histories are one path of extents.
    fn start(&self, seal: &Seal) -> Result<Start, Unresolved> {
        let scope = seal.origin.scope();
        let known = self.known(seal, scope);
        let point = if known > 0 { seal.run.points[known - 1] } else { seal.run.base };
        if known == 0 && point.blocks.0 == 0 {
            let agrees = point.id == seal.origin.root;
            return if agrees {
                Ok(Start { attached: None, known })
            } else {
                Err(Unresolved::Refused(Refusal::BadRun))
            };
        }
        let artifact = self.resolve(Place { scope, point, extent: seal.extent })?;
        let (old, new) = (&artifact.origin, &seal.origin);
        if old.root != new.root || old.model != new.model || old.shape.block != new.shape.block {
            return Err(Unresolved::Refused(Refusal::BadRun));
        }
        Ok(Start { attached: Some(Attached { artifact: artifact.id, at: point }), known })
    }

    /// How many points of the run are kept already: waypoints are without a gap, so halving over them finds the last,
    /// and what is deeper lies before the next.
    fn known(&self, seal: &Seal, scope: Scope) -> usize {
        let points = &seal.run.points;
        let is_kept = |point: &Point| self.keeps(point.id, scope);
        let waypoints: Vec<usize> =
            (0..points.len()).filter(|n| points[*n].blocks.0.is_multiple_of(WAYPOINT)).collect();
        let passed = waypoints.partition_point(|place| is_kept(&points[*place]));
        let first = passed.checked_sub(1).map_or(0, |last| waypoints[last] + 1);
        let end = waypoints.get(passed).copied().unwrap_or(points.len());
        points[first..end].iter().rposition(is_kept).map_or(first, |place| first + place + 1)
    }

    /// Whether new blocks may become part of the extent before them: equal owner and shape, no copies, and no one but
    /// this session, whose head is at its end, references it.
    fn may_join(&self, attached: Attached, seal: &Seal) -> bool {
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

    fn join(&mut self, id: ArtifactId, new: Vec<Boundary>) {
        let Some(mut extent) = self.artifact(id) else { return };
        extent.boundaries.extend(new);
        let newest = extent.boundaries.len().saturating_sub(KEPT_BOUNDARIES);
        let mut place = 0;
        extent.boundaries.retain(|boundary| {
            place += 1;
            place > newest || boundary.point.blocks.0 % WAYPOINT == 0
        });
        extent.replicas.clear();
        extent.touched = self.now();
        self.put_artifact(extent);
    }

    fn add_extent(
        &mut self,
        epoch: Epoch,
        seal: &Seal,
        parent: Option<Attached>,
        new: &[Point],
    ) -> Result<ArtifactId, Refusal> {
        let boundaries = kept(new, epoch);
        let from = parent.map_or(seal.run.base, |parent| parent.at).blocks;
        let first = boundaries.first().ok_or(Refusal::BadRun)?.point;
        let id = seal.origin.scope().artifact(from, first.id, epoch);
        self.check_extent_quota(&seal.origin.tenant)?;
        let touched = self.now();
        // The parent is linked before anything is evicted, so that it is not.
        self.link(parent, id, touched);
        while self.artifact_count() >= self.records.limits.artifacts as usize {
            if !self.make_room_for_extent(&seal.origin.tenant) {
                self.unlink(parent, id);
                return Err(Refusal::Full);
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

    fn link(&mut self, parent: Option<Attached>, child: ArtifactId, touched: LedgerTime) {
        if let Some(mut parent) = parent.and_then(|parent| self.artifact(parent.artifact)) {
            parent.children.insert(child);
            parent.touched = touched;
            self.put_artifact(parent);
        }
    }

    fn unlink(&mut self, parent: Option<Attached>, child: ArtifactId) {
        if let Some(mut parent) = parent.and_then(|parent| self.artifact(parent.artifact)) {
            parent.children.remove(child);
            self.put_artifact(parent);
        }
    }

    /// Rewrites the owners that are gone, from an extent up to the root: a live copy becomes the owner, and what nobody
    /// has becomes `owner`'s, who holds the whole prefix.
    fn adopt_path(&mut self, epoch: Epoch, id: ArtifactId, owner: Owner) {
        let mut next = Some(id);
        for _ in 0..MAX_PATH {
            let Some(artifact) = next.and_then(|id| self.artifact(id)) else { return };
            next = artifact.parent.map(|parent| parent.artifact);
            let heir = match self.standing(&artifact) {
                Standing::Owned(_) => continue,
                Standing::Copied(copy) => copy,
                Standing::Stored(_) | Standing::Unowned if self.is_draining(owner) => continue,
                Standing::Stored(_) | Standing::Unowned => owner,
            };
            self.grant(epoch, artifact, heir);
        }
    }

    /// Makes `owner` the owner of an extent.
    pub(super) fn grant(&mut self, epoch: Epoch, mut artifact: Artifact, owner: Owner) {
        artifact.owner = Some(owner);
        artifact.epoch = epoch;
        artifact.replicas.retain(|copy| copy.holder != owner);
        artifact.touched = self.now();
        self.put_artifact(artifact);
    }

    /// Extents from `id` up to the root, each with its deepest kept point on the path to `point`.
    pub(super) fn path(&self, id: ArtifactId, point: Point) -> Vec<Attached> {
        let mut path = Vec::new();
        let mut next = Some(Attached { artifact: id, at: point });
        while let Some(here) = next.filter(|_| path.len() < MAX_PATH) {
            path.push(here);
            next = self.artifact(here.artifact).and_then(|artifact| artifact.parent);
        }
        path
    }
}

/// The points of new blocks that are kept: waypoints and the end.
fn kept(new: &[Point], epoch: Epoch) -> Vec<Boundary> {
    let end = new.last().map(|end| end.blocks);
    let keep = |point: &&Point| point.blocks.0.is_multiple_of(WAYPOINT) || Some(point.blocks) == end;
    new.iter().filter(keep).map(|point| Boundary { point: *point, epoch }).collect()
}
