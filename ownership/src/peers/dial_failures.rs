//! Recent failures to connect to nodes. Errors that need an operator are logged once per node and cause, and
//! rate-limited.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use vocabulary::NodeId;

use crate::peers::log_throttle::LogThrottle;
use crate::peers::socket::DialError;

/// How long a failure counts as recent. Nodes that are needed are called every second.
const RECENT_WINDOW: Duration = Duration::from_secs(30);

/// Last failure of each node.
#[derive(Debug, Default)]
pub(crate) struct DialFailures {
    last_failures: BTreeMap<NodeId, DialFailure>,
    throttle: LogThrottle,
}

#[derive(Debug)]
struct DialFailure {
    error: DialError,
    at: Instant,
    is_logged: bool,
}

impl DialFailures {
    /// Returns why the last call to a node failed; `None` if it succeeded or there was no recent call.
    pub(crate) fn recent_cause(&self, node: NodeId, now: Instant) -> Option<String> {
        let DialFailure { error: DialError::Tls(why) | DialError::Other(why), at, .. } =
            self.last_failures.get(&node)?;
        (now.saturating_duration_since(*at) < RECENT_WINDOW).then(|| why.clone())
    }

    /// Records a failure. If it should be logged, returns how many were not logged before it.
    pub(crate) fn record(&mut self, node: NodeId, why: DialError, now: Instant) -> Option<u64> {
        let was_told = self.last_failures.get(&node).is_some_and(|known| known.error == why && known.is_logged);
        let is_to_tell = matches!(why, DialError::Tls(_)) && !was_told;
        let untold = if is_to_tell { self.throttle.record(now) } else { None };
        self.last_failures.insert(node, DialFailure { error: why, at: now, is_logged: was_told || untold.is_some() });
        untold
    }

    pub(crate) fn clear(&mut self, node: NodeId) {
        self.last_failures.remove(&node);
    }

    /// Drops nodes that are not members.
    pub(crate) fn retain_members(&mut self, is_member: impl Fn(NodeId) -> bool) {
        self.last_failures.retain(|node, _| is_member(*node));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::log_throttle::LOG_INTERVAL;

    fn tls(why: &str) -> DialError {
        DialError::Tls(why.into())
    }

    #[test]
    fn a_dial_failure_is_logged_once_per_node_and_cause() {
        let (mut misses, mut now, node) = (DialFailures::default(), Instant::now(), NodeId(2));
        assert_eq!(misses.record(node, DialError::Other("refused".into()), now), None);
        assert_eq!(misses.record(node, tls("expired"), now), Some(0));
        assert_eq!(misses.record(node, tls("expired"), now + LOG_INTERVAL), None);
        now += 2 * LOG_INTERVAL;
        assert_eq!(misses.record(node, tls("unknown"), now), Some(0), "another cause");
        misses.clear(node);
        assert_eq!(misses.recent_cause(node, now), None);
        now += LOG_INTERVAL;
        assert_eq!(misses.record(node, tls("unknown"), now), Some(0), "again, after it was well");
        assert_eq!(misses.recent_cause(node, now).as_deref(), Some("unknown"));
        assert_eq!(misses.recent_cause(node, now + RECENT_WINDOW), None);
        misses.retain_members(|_| false);
        assert_eq!(misses.recent_cause(node, now), None);
    }

    #[test]
    fn dial_failures_of_many_nodes_and_causes_are_throttled_fairly() {
        let (mut misses, now) = (DialFailures::default(), Instant::now());
        let logged = (0..100).filter(|n| misses.record(NodeId(*n), tls("expired"), now).is_some()).count();
        assert_eq!(logged, 1);
        let changing = (0..100).filter(|n| misses.record(NodeId(5), tls(&n.to_string()), now).is_some()).count();
        assert_eq!(changing, 0);
        assert_eq!(misses.record(NodeId(7), tls("expired"), now + LOG_INTERVAL), Some(199), "it was not told yet");
    }
}
