//! A process that temporarily lacks file descriptors, memory or threads waits for them and does not stop.

use crate::ensure;
use crate::property::PropertyResult;

const STOPPED: &str = "a shortage stops no node";

/// EAGAIN, ENOMEM, EMFILE.
const SHORTAGE_ERRNOS: [i32; 3] = [11, 12, 24];

/// Checks why a node's Raft has ended.
pub(crate) fn check(node: u64, why: &str) -> PropertyResult {
    let is_short = SHORTAGE_ERRNOS.iter().any(|error| why.contains(&format!("(os error {error})")));
    ensure!(!is_short, STOPPED, "node {node}: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transient_shortage_must_not_stop_a_node() {
        for error in SHORTAGE_ERRNOS {
            assert!(check(1, &format!("when Write: {}", std::io::Error::from_raw_os_error(error))).is_err());
        }
        assert_eq!(check(1, &format!("when Write: {}", std::io::Error::from_raw_os_error(28))), Ok(()));
        assert_eq!(check(1, "the log could not be flushed"), Ok(()));
    }
}
