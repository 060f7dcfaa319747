//! Log messages for losing and regaining the quorum or members, one per change.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use consensus::QuorumStatus;
use vocabulary::NodeId;

use crate::members;
use crate::node_core::NodeCore;

/// What was logged last.
#[derive(Debug, Default)]
pub(crate) struct LoggedQuorumState {
    contact: QuorumContact,
    silent: SilentMembers,
}

impl LoggedQuorumState {
    /// Logs what changed since the last check.
    pub(crate) fn log_changes(&mut self, core: &NodeCore, quorum: &QuorumStatus) {
        // A node that stopped or was removed has logged that and waits for nobody.
        if !core.registry.is_retired() && !core.has_stopped() {
            self.contact.log_change(core, quorum);
        }
        self.silent.log_silent(core);
    }
}

/// Whether this node has contact with the quorum.
#[derive(Debug, Default)]
struct QuorumContact {
    lost_since: Option<Instant>,
    is_reported: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ContactChange {
    Lost,
    Restored { after: Duration },
}

impl QuorumContact {
    /// Updates the contact. A leader that is replaced in time is not reported.
    fn note(&mut self, quorum: &QuorumStatus, (now, patience): (Instant, Duration)) -> Option<ContactChange> {
        if !quorum.stale {
            let (since, was_told) = (self.lost_since.take(), std::mem::take(&mut self.is_reported));
            return since.filter(|_| was_told).map(|since| ContactChange::Restored { after: now - since });
        }
        let since = *self.lost_since.get_or_insert(now);
        let is_news = !self.is_reported && now - since >= patience;
        self.is_reported |= is_news;
        is_news.then_some(ContactChange::Lost)
    }

    fn log_change(&mut self, core: &NodeCore, quorum: &QuorumStatus) {
        let node = core.node();
        match self.note(quorum, (Instant::now(), 2 * core.silence_timeout())) {
            None => {}
            Some(ContactChange::Lost) if quorum.leader == Some(node) => tracing::warn!(
                %node,
                "too few voters answer this leader: there is no quorum, ownership stands still, and steps are served on the \
                 last view. See that most voters run and reach each other"
            ),
            Some(ContactChange::Lost) => tracing::warn!(
                %node,
                "no leader is heard: there is no quorum that this node knows of, ownership stands still, and steps are \
                 served on the last view. See that most voters run and reach each other, and this node"
            ),
            Some(ContactChange::Restored { after }) => {
                let (leader, without_s) = (quorum.leader.map_or(0, |leader| leader.0), after.as_secs());
                tracing::info!(%node, leader, without_s, "there is a quorum again");
            }
        }
    }
}

/// Members that do not answer this leader, so that each loss is logged once.
#[derive(Debug, Default)]
struct SilentMembers {
    leading_since: Option<Instant>,
    nodes: BTreeSet<NodeId>,
}

impl SilentMembers {
    fn log_silent(&mut self, core: &NodeCore) {
        if !core.is_leading() {
            *self = Self::default();
            return;
        }
        // A new leader has not heard from anybody yet.
        if self.leading_since.get_or_insert_with(Instant::now).elapsed() < core.silence_timeout() {
            return;
        }
        let members = members::list(core).into_iter();
        let now: BTreeSet<NodeId> =
            members.filter(|member| member.reachable == Some(false)).map(|member| member.node).collect();
        for node in now.difference(&self.nodes) {
            tracing::warn!(%node, "a member does not answer this leader; it is asked until it does");
        }
        for node in self.nodes.difference(&now) {
            tracing::info!(%node, "a member answers again, or was taken out");
        }
        self.nodes = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE_TIMEOUT: Duration = Duration::from_secs(3);

    #[test]
    fn a_lost_quorum_is_reported_once_and_its_recovery_once() {
        let (mut contact, start) = (QuorumContact::default(), Instant::now());
        let (disconnected, connected) =
            (QuorumStatus { stale: true, ..QuorumStatus::default() }, QuorumStatus::default());
        let at = |millis| (start + Duration::from_millis(millis), SILENCE_TIMEOUT);
        let steps = [
            (&disconnected, 0, None),
            (&disconnected, 2_900, None),
            (&connected, 2_950, None),
            (&disconnected, 4_000, None),
            (&disconnected, 7_000, Some(ContactChange::Lost)),
            (&disconnected, 9_000, None),
            (&connected, 10_000, Some(ContactChange::Restored { after: Duration::from_secs(6) })),
            (&connected, 11_000, None),
            (&disconnected, 12_000, None),
            (&disconnected, 15_000, Some(ContactChange::Lost)),
        ];
        for (quorum, millis, expected) in steps {
            assert_eq!(contact.note(quorum, at(millis)), expected, "after {millis} ms");
        }
    }
}
