//! Log of refused nodes, once per node and cause.
//!
//! A removed node that was not stopped calls every second. Without TLS a caller may claim another id each time, so all
//! lines together are rate-limited, too.

use std::collections::BTreeMap;
use std::time::Instant;

use vocabulary::NodeId;

use crate::peers::error::HandshakeRefusal;
use crate::peers::log_throttle::LogThrottle;

/// Maximum number of remembered nodes; a caller may claim any id.
const MAX_NODES: usize = 1_024;

/// Last logged refusal of each node; `None` is a node without an id.
#[derive(Debug, Default)]
pub(crate) struct RefusalLog {
    logged: BTreeMap<Option<NodeId>, HandshakeRefusal>,
    throttle: LogThrottle,
}

impl RefusalLog {
    /// Records a refusal. If it should be logged, returns how many were not logged before it; a refusal that is
    /// suppressed now is logged at a later call of that node.
    pub(crate) fn record(&mut self, node: Option<NodeId>, refusal: &HandshakeRefusal, now: Instant) -> Option<u64> {
        if self.logged.get(&node) == Some(refusal) {
            return None;
        }
        let suppressed = self.throttle.record(now)?;
        if self.logged.len() >= MAX_NODES {
            self.logged.clear();
        }
        self.logged.insert(node, refusal.clone());
        Some(suppressed)
    }

    pub(crate) fn clear(&mut self, node: Option<NodeId>) {
        self.logged.remove(&node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::log_throttle::LOG_INTERVAL;

    #[test]
    fn a_refusal_is_logged_once_per_node_and_cause_until_the_node_is_accepted() {
        let mut log = RefusalLog::default();
        let (node, removed) = (Some(NodeId(3)), HandshakeRefusal::Retired { node: NodeId(3) });
        let mut now = Instant::now();
        let logged: Vec<_> = (0..3).map(|_| log.record(node, &removed, now)).collect();
        assert_eq!(logged, [Some(0), None, None]);
        let mut later = |log: &mut RefusalLog, node, refusal: &HandshakeRefusal| {
            now += LOG_INTERVAL;
            log.record(node, refusal, now)
        };
        assert_eq!(later(&mut log, node, &removed), None, "it was told");
        assert_eq!(later(&mut log, None, &removed), Some(0), "another one");
        assert_eq!(later(&mut log, node, &HandshakeRefusal::Protocol { spoken: 1 }), Some(0), "another cause");
        log.clear(node);
        assert_eq!(later(&mut log, node, &removed), Some(0));
        for n in 0..3 * MAX_NODES as u64 {
            later(&mut log, Some(NodeId(n)), &removed);
        }
        assert!(log.logged.len() <= MAX_NODES);
    }

    #[test]
    fn refusals_of_ever_new_node_ids_are_throttled_and_hide_no_node() {
        let (mut log, now) = (RefusalLog::default(), Instant::now());
        let refusal = HandshakeRefusal::Protocol { spoken: 1 };
        let logged = (0..1_000).filter(|n| log.record(Some(NodeId(*n)), &refusal, now).is_some()).count();
        assert_eq!(logged, 1);
        assert_eq!(
            log.record(Some(NodeId(7)), &refusal, now + LOG_INTERVAL),
            Some(999),
            "it still calls, and is told of"
        );
    }
}
