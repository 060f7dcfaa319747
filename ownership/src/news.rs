//! What the log of a node says as it loses the quorum or its members and finds them again: once for each time.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use consensus::Quorum;
use vocabulary::NodeId;

use crate::core::Core;
use crate::members;

/// What was told last.
#[derive(Debug, Default)]
pub(crate) struct News {
    contact: Contact,
    silent: Silent,
}

impl News {
    /// Tells what changed since the last look.
    pub(crate) fn tell(&mut self, core: &Core, quorum: &Quorum) {
        // What ended or was removed said so, and waits for nobody.
        if !core.registry.is_retired() && !core.has_stopped() {
            self.contact.tell(core, quorum);
        }
        self.silent.tell(core);
    }
}

/// Whether this node hears of the quorum.
#[derive(Debug, Default)]
struct Contact {
    lost_since: Option<Instant>,
    is_told: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    Lost,
    Found { after: Duration },
}

impl Contact {
    /// Notes whether there is a quorum now. A leader that is replaced in time is no news.
    fn note(&mut self, quorum: &Quorum, (now, patience): (Instant, Duration)) -> Option<Turn> {
        if !quorum.stale {
            let (since, was_told) = (self.lost_since.take(), std::mem::take(&mut self.is_told));
            return since.filter(|_| was_told).map(|since| Turn::Found { after: now - since });
        }
        let since = *self.lost_since.get_or_insert(now);
        let is_news = !self.is_told && now - since >= patience;
        self.is_told |= is_news;
        is_news.then_some(Turn::Lost)
    }

    fn tell(&mut self, core: &Core, quorum: &Quorum) {
        let node = core.node();
        match self.note(quorum, (Instant::now(), 2 * core.patience())) {
            None => {}
            Some(Turn::Lost) if quorum.leader == Some(node) => tracing::warn!(
                %node,
                "too few voters answer this leader: there is no quorum, ownership stands still, and steps are served on the \
                 last view. See that most voters run and reach each other"
            ),
            Some(Turn::Lost) => tracing::warn!(
                %node,
                "no leader is heard: there is no quorum that this node knows of, ownership stands still, and steps are \
                 served on the last view. See that most voters run and reach each other, and this node"
            ),
            Some(Turn::Found { after }) => {
                let (leader, without_s) = (quorum.leader.map_or(0, |leader| leader.0), after.as_secs());
                tracing::info!(%node, leader, without_s, "there is a quorum again");
            }
        }
    }
}

/// Which members do not answer this leader, so that it is said once for each time.
#[derive(Debug, Default)]
struct Silent {
    leads_since: Option<Instant>,
    nodes: BTreeSet<NodeId>,
}

impl Silent {
    fn tell(&mut self, core: &Core) {
        if !core.leads() {
            *self = Self::default();
            return;
        }
        // A new leader has not heard of anybody yet.
        if self.leads_since.get_or_insert_with(Instant::now).elapsed() < core.patience() {
            return;
        }
        let members = members::list(core).into_iter();
        let now: BTreeSet<NodeId> =
            members.filter(|member| member.answers == Some(false)).map(|member| member.node).collect();
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

    const PATIENCE: Duration = Duration::from_secs(3);

    #[test]
    fn a_lost_quorum_is_told_once_it_lasts_and_once_when_it_is_back() {
        let (mut contact, start) = (Contact::default(), Instant::now());
        let (lost, there) = (Quorum { stale: true, ..Quorum::default() }, Quorum::default());
        let at = |millis| (start + Duration::from_millis(millis), PATIENCE);
        let told = [
            (&lost, 0, None),
            (&lost, 2_900, None),
            (&there, 2_950, None),
            (&lost, 4_000, None),
            (&lost, 7_000, Some(Turn::Lost)),
            (&lost, 9_000, None),
            (&there, 10_000, Some(Turn::Found { after: Duration::from_secs(6) })),
            (&there, 11_000, None),
            (&lost, 12_000, None),
            (&lost, 15_000, Some(Turn::Lost)),
        ];
        for (quorum, millis, expected) in told {
            assert_eq!(contact.note(quorum, at(millis)), expected, "after {millis} ms");
        }
    }
}
