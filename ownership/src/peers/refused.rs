//! Who was refused, so that it is said once for each node and cause, and not at every attempt: a removed node that was not
//! stopped calls every second.

use std::collections::BTreeMap;

use vocabulary::NodeId;

use crate::peers::error::Refusal;

/// Nodes that are remembered; a caller may say that it is any node.
const MOST: usize = 1_024;

/// The last refusal of each node; none is a node without an id.
#[derive(Debug, Default)]
pub(crate) struct Refused(BTreeMap<Option<NodeId>, Refusal>);

impl Refused {
    /// Notes a refusal. Whether it is news.
    pub(crate) fn is_news(&mut self, node: Option<NodeId>, refusal: &Refusal) -> bool {
        if self.0.get(&node) == Some(refusal) {
            return false;
        }
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.insert(node, refusal.clone());
        true
    }

    /// Notes that a node came in.
    pub(crate) fn came_in(&mut self, node: Option<NodeId>) {
        self.0.remove(&node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_news_once_for_each_node_and_cause_and_again_after_it_came_in() {
        let mut refused = Refused::default();
        let (node, removed) = (Some(NodeId(3)), Refusal::Retired { node: NodeId(3) });
        let told: Vec<bool> = (0..3).map(|_| refused.is_news(node, &removed)).collect();
        assert_eq!(told, [true, false, false]);
        assert!(refused.is_news(None, &removed), "another one");
        assert!(refused.is_news(node, &Refusal::Protocol { spoken: 1 }), "another cause");
        refused.came_in(node);
        assert!(refused.is_news(node, &removed));
        for n in 0..3 * MOST as u64 {
            refused.is_news(Some(NodeId(n)), &removed);
        }
        assert!(refused.0.len() <= MOST);
    }
}
