//! Finds the session from which a prompt forks if it continues from a prefix that several sessions share: the eldest
//! one, if all of them descend from one session.

use std::collections::BTreeSet;

use vocabulary::SessionId;

use crate::artifact::Artifact;
use crate::ledger::Ledger;
use crate::record::Session;

/// Maximum number of sessions examined. A prefix that more sessions share is a common beginning, such as a system
/// prompt.
const MAX_SESSIONS: usize = 64;
/// Maximum number of artifacts examined. A session that moved often has many, and closed sessions leave theirs behind.
const MAX_ARTIFACTS: usize = 1_024;
/// Maximum number of fork generations followed upwards.
const MAX_FORKS: usize = 64;

/// Ancestry of a session.
struct SessionAncestry {
    /// Eldest ancestor whose id is known, open or not.
    root: SessionId,
    forks: usize,
}

impl Ledger {
    /// Returns the eldest session whose path goes through the artifact. `None` if there is no session, if the sessions
    /// do not all descend from one, or if there are too many.
    pub(crate) fn session_through(&self, artifact: &Artifact) -> Option<Session> {
        let mut eldest: Option<(SessionAncestry, Session)> = None;
        let (mut open, mut extents, mut seen) = (vec![artifact.clone()], 1, BTreeSet::new());
        while let Some(artifact) = open.pop() {
            for id in artifact.sessions.iter() {
                // One session can have heads in several artifacts.
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
