//! Nodes that could not be talked with when they were last called, and why. What only a hand mends is told in the log, once
//! for each node and cause, and not more often than now and then.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use vocabulary::NodeId;

use crate::peers::seldom::Seldom;
use crate::peers::socket::Missed;

/// For how long a call that failed says something: whom this node needs it calls every second.
const LATELY: Duration = Duration::from_secs(30);

/// The last failure of each node.
#[derive(Debug, Default)]
pub(crate) struct Misses {
    all: BTreeMap<NodeId, Miss>,
    news: Seldom,
}

#[derive(Debug)]
struct Miss {
    why: Missed,
    at: Instant,
    is_told: bool,
}

impl Misses {
    /// Why a node could not be talked with when it was called lately; none where it could, or was not called.
    pub(crate) fn lately(&self, node: NodeId, now: Instant) -> Option<String> {
        let Miss { why: Missed::Tls(why) | Missed::Other(why), at, .. } = self.all.get(&node)?;
        (now.saturating_duration_since(*at) < LATELY).then(|| why.clone())
    }

    /// Notes one. Where it is to be told, how many went by untold before it.
    pub(crate) fn note(&mut self, node: NodeId, why: Missed, now: Instant) -> Option<u64> {
        let was_told = self.all.get(&node).is_some_and(|known| known.why == why && known.is_told);
        let is_to_tell = matches!(why, Missed::Tls(_)) && !was_told;
        let untold = if is_to_tell { self.news.note(now) } else { None };
        self.all.insert(node, Miss { why, at: now, is_told: was_told || untold.is_some() });
        untold
    }

    pub(crate) fn met(&mut self, node: NodeId) {
        self.all.remove(&node);
    }

    /// Only these are members.
    pub(crate) fn keep(&mut self, is_member: impl Fn(NodeId) -> bool) {
        self.all.retain(|node, _| is_member(*node));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::seldom::EVERY;

    fn tls(why: &str) -> Missed {
        Missed::Tls(why.into())
    }

    #[test]
    fn what_a_hand_must_mend_is_told_once_for_each_node_and_cause() {
        let (mut misses, mut now, node) = (Misses::default(), Instant::now(), NodeId(2));
        assert_eq!(misses.note(node, Missed::Other("refused".into()), now), None);
        assert_eq!(misses.note(node, tls("expired"), now), Some(0));
        assert_eq!(misses.note(node, tls("expired"), now + EVERY), None);
        now += 2 * EVERY;
        assert_eq!(misses.note(node, tls("unknown"), now), Some(0), "another cause");
        misses.met(node);
        assert_eq!(misses.lately(node, now), None);
        now += EVERY;
        assert_eq!(misses.note(node, tls("unknown"), now), Some(0), "again, after it was well");
        assert_eq!(misses.lately(node, now).as_deref(), Some("unknown"));
        assert_eq!(misses.lately(node, now + LATELY), None);
        misses.keep(|_| false);
        assert_eq!(misses.lately(node, now), None);
    }

    #[test]
    fn many_nodes_or_changing_causes_fill_no_log_and_each_has_its_turn() {
        let (mut misses, now) = (Misses::default(), Instant::now());
        let told = (0..100).filter(|n| misses.note(NodeId(*n), tls("expired"), now).is_some()).count();
        assert_eq!(told, 1);
        let changing = (0..100).filter(|n| misses.note(NodeId(5), tls(&n.to_string()), now).is_some()).count();
        assert_eq!(changing, 0);
        assert_eq!(misses.note(NodeId(7), tls("expired"), now + EVERY), Some(199), "it was not told yet");
    }
}
