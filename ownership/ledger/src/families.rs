//! Whom a prompt leaves that goes on from what several sessions share: the eldest of them, where they are one family.

use std::collections::BTreeSet;

use vocabulary::SessionId;

use crate::artifact::Artifact;
use crate::ledger::Ledger;
use crate::record::Session;

/// Sessions that are looked at. Where more go on from one extent it is what everybody begins with.
const MAX_SESSIONS: usize = 64;
/// Extents that are looked at for them: a session that moved often lies in many, and closed ones leave theirs behind.
const MAX_ARTIFACTS: usize = 1_024;
/// Forks of forks that are followed upwards.
const MAX_FORKS: usize = 64;

/// Where a session stands in its family.
struct SessionAncestry {
    /// The eldest ancestor that is known by name, open or not.
    root: SessionId,
    forks: usize,
}

impl Ledger {
    /// The session whose path goes through the extent: of several that were forked from one another the eldest. None where
    /// there is no session, and where there are of several families.
    pub(crate) fn session_through(&self, artifact: &Artifact) -> Option<Session> {
        let mut eldest: Option<(SessionAncestry, Session)> = None;
        let (mut open, mut extents, mut seen) = (vec![artifact.clone()], 1, BTreeSet::new());
        while let Some(artifact) = open.pop() {
            for id in artifact.sessions.iter() {
                // One session can end in several extents.
                let Some(session) = self.session(id).filter(|_| seen.insert(id)) else { continue };
                let descent = self.ancestry(&session);
                if seen.len() > MAX_SESSIONS || eldest.as_ref().is_some_and(|(of, _)| of.root != descent.root) {
                    return None;
                }
                let age = |descent: &SessionAncestry, session: &Session| (descent.forks, session.opened, session.id);
                if eldest.as_ref().is_none_or(|(of, known)| age(&descent, &session) < age(of, known)) {
                    eldest = Some((descent, session));
                }
            }
            extents += artifact.children.len();
            if extents > MAX_ARTIFACTS {
                return None;
            }
            open.extend(artifact.children.iter().filter_map(|id| self.artifact(id)));
        }
        eldest.map(|(_, session)| session)
    }

    fn ancestry(&self, session: &Session) -> SessionAncestry {
        let (mut root, mut parent, mut forks) = (session.id, session.parent, 0);
        while let Some(id) = parent.filter(|_| forks < MAX_FORKS) {
            (root, forks) = (id, forks + 1);
            parent = self.session(id).and_then(|session| session.parent);
        }
        SessionAncestry { root, forks }
    }
}
