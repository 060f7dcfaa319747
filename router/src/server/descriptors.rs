//! File descriptors: how many this process may open, and what of them connections get.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What is kept for the ledger, its peers, logs and configuration files.
const RESERVE: u64 = 256;
/// A client's connection and the worker's that answers it.
const PER_CLIENT: u64 = 2;
/// More are never asked for: some systems allow a thousand million, for which nobody has memory.
const MOST: u64 = 1 << 20;

/// Raises the soft limit of open files to the hard one. Returns what is in force.
pub(crate) fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let soft = limit.current.unwrap_or(MOST);
    let wanted = limit.maximum.unwrap_or(MOST).min(MOST);
    if soft >= wanted {
        return soft;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }) {
        Ok(()) => wanted,
        Err(error) => {
            tracing::warn!(%error, limit = soft, "the limit of open files could not be raised");
            soft
        }
    }
}

/// How many clients may be connected at once where `configured` are wanted and `limit` files may be open.
pub(crate) fn connections(configured: usize, limit: u64) -> usize {
    // A quarter of a small limit: what is left must serve clients at all.
    let reserve = RESERVE.min(limit / 4);
    let possible = usize::try_from((limit - reserve) / PER_CLIENT).unwrap_or(usize::MAX).max(1);
    if possible < configured {
        tracing::warn!(
            configured,
            possible,
            open_files = limit,
            "proxy.connections is more than this process may open: raise its limit of open files (ulimit -n, LimitNOFILE)"
        );
    }
    possible.min(configured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_to_the_ledger() {
        assert_eq!(connections(16_384, 1 << 20), 16_384);
        assert_eq!(connections(16_384, 1024), 384);
        assert_eq!(connections(100, 1024), 100);
        assert!(connections(16_384, 64) * 2 + 16 <= 64);
    }

    #[test]
    fn the_limit_in_force_is_the_hard_one() {
        let raised = raise_limit();
        assert_eq!(getrlimit(Resource::Nofile).current, Some(raised));
        assert_eq!(raised, getrlimit(Resource::Nofile).maximum.unwrap_or(MOST).min(MOST));
    }
}
