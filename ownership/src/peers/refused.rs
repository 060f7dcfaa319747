//! Who was refused, so that it is told once for each node and cause, and not at every attempt: a removed node that was not
//! stopped calls every second. Without TLS a caller may say each time that it is another node, so that there is also a bound
//! on how often anything is told.

use std::collections::BTreeMap;
use std::time::Instant;

use vocabulary::NodeId;

use crate::peers::error::Refusal;
use crate::peers::seldom::Seldom;

/// Nodes that are remembered; a caller may say that it is any node.
const MOST: usize = 1_024;

/// The last refusal of each node that was told; none is a node without an id.
#[derive(Debug, Default)]
pub(crate) struct Refused {
    told: BTreeMap<Option<NodeId>, Refusal>,
    news: Seldom,
}

impl Refused {
    /// Notes a refusal. Where it is to be told, how many went by untold before it; one of a node that calls again has its turn
    /// then.
    pub(crate) fn news(&mut self, node: Option<NodeId>, refusal: &Refusal, now: Instant) -> Option<u64> {
        if self.told.get(&node) == Some(refusal) {
            return None;
        }
        let untold = self.news.note(now)?;
        if self.told.len() >= MOST {
            self.told.clear();
        }
        self.told.insert(node, refusal.clone());
        Some(untold)
    }

    pub(crate) fn came_in(&mut self, node: Option<NodeId>) {
        self.told.remove(&node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::seldom::EVERY;

    #[test]
    fn a_refusal_is_told_once_for_each_node_and_cause_and_again_after_it_came_in() {
        let mut refused = Refused::default();
        let (node, removed) = (Some(NodeId(3)), Refusal::Retired { node: NodeId(3) });
        let mut now = Instant::now();
        let told: Vec<_> = (0..3).map(|_| refused.news(node, &removed, now)).collect();
        assert_eq!(told, [Some(0), None, None]);
        let mut later = |refused: &mut Refused, node, refusal: &Refusal| {
            now += EVERY;
            refused.news(node, refusal, now)
        };
        assert_eq!(later(&mut refused, node, &removed), None, "it was told");
        assert_eq!(later(&mut refused, None, &removed), Some(0), "another one");
        assert_eq!(later(&mut refused, node, &Refusal::Protocol { spoken: 1 }), Some(0), "another cause");
        refused.came_in(node);
        assert_eq!(later(&mut refused, node, &removed), Some(0));
        for n in 0..3 * MOST as u64 {
            later(&mut refused, Some(NodeId(n)), &removed);
        }
        assert!(refused.told.len() <= MOST);
    }

    #[test]
    fn who_calls_under_another_id_each_time_fills_no_log_and_hides_nobody_for_good() {
        let (mut refused, now) = (Refused::default(), Instant::now());
        let refusal = Refusal::Protocol { spoken: 1 };
        let told = (0..1_000).filter(|n| refused.news(Some(NodeId(*n)), &refusal, now).is_some()).count();
        assert_eq!(told, 1);
        assert_eq!(refused.news(Some(NodeId(7)), &refusal, now + EVERY), Some(999), "it still calls, and is told of");
    }
}
