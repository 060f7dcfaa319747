//! A process that lacks file handles, memory or threads for a while waits for them: it stops for nothing that passes.

use crate::book::Checked;
use crate::ensure;

const STOPPED: &str = "a shortage stops no node";

/// EAGAIN, ENOMEM, EMFILE.
const SHORT: [i32; 3] = [11, 12, 24];

/// Checks why a node's Raft has ended.
pub(crate) fn check(node: u64, why: &str) -> Checked {
    let is_short = SHORT.iter().any(|error| why.contains(&format!("(os error {error})")));
    ensure!(!is_short, STOPPED, "node {node}: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_passes_may_not_stop_a_node() {
        for error in SHORT {
            assert!(check(1, &format!("when Write: {}", std::io::Error::from_raw_os_error(error))).is_err());
        }
        assert_eq!(check(1, &format!("when Write: {}", std::io::Error::from_raw_os_error(28))), Ok(()));
        assert_eq!(check(1, "the log could not be flushed"), Ok(()));
    }
}
