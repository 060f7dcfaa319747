//! File descriptors: how many this process may open, and how many of them connections get.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Reserved for the ledger, logs and configuration files.
const FILES: u64 = 256;
/// Maximum connections of the operator listener.
const OPERATORS: u64 = 256;
/// Maximum connections of the listener for other nodes.
const NODES: u64 = 1024;
/// Sockets per worker that no client causes: its events, their replay, probes.
const PER_WORKER: u64 = 4;
/// Maximum number of event publishers beyond the first of each worker, and the sockets of each: live events, their
/// replay, and a probe of the publisher.
const EXTRA_RANKS: u64 = 1024;
const PER_EXTRA_RANK: u64 = 3;
/// Per client: its connection, the connection to its worker, and an idle one kept for reuse.
const DESCRIPTORS_PER_CLIENT: u64 = 3;
/// Upper bound for the requested limit: some systems allow a thousand million, for which nobody has memory.
const MAX_DESCRIPTORS: u64 = 1 << 20;

/// Raises the soft limit of open files to the hard limit. Returns the limit in force.
pub fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let soft = limit.current.unwrap_or(MAX_DESCRIPTORS);
    let target = limit.maximum.unwrap_or(MAX_DESCRIPTORS).min(MAX_DESCRIPTORS);
    if soft >= target {
        return soft;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(target), maximum: limit.maximum }) {
        Ok(()) => target,
        Err(error) => {
            tracing::warn!(%error, limit = soft, "the limit of open files could not be raised");
            soft
        }
    }
}

/// Returns the limit of open files in force.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(MAX_DESCRIPTORS)
}

/// Returns how many event publishers beyond the first rank of each worker `limit` descriptors allow.
pub fn extra_event_ranks(limit: u64) -> usize {
    EXTRA_RANKS.min(limit / 16 / PER_EXTRA_RANK).max(1) as usize
}

/// What the process needs file descriptors for.
#[derive(Clone, Copy, Debug)]
pub struct DescriptorDemand {
    /// Wanted client connections: `proxy.max_connections`.
    pub clients: usize,
    /// Possible number of workers.
    pub workers: usize,
    /// Whether other nodes connect to this one.
    pub is_in_cluster: bool,
}

impl DescriptorDemand {
    /// Returns a limit of open files that suffices for all wanted connections.
    fn descriptors(&self) -> u64 {
        let nodes = if self.is_in_cluster { NODES } else { 0 };
        let events = (self.workers as u64).saturating_mul(PER_WORKER);
        let reserved = FILES + OPERATORS + nodes + events + EXTRA_RANKS * PER_EXTRA_RANK;
        (self.clients as u64)
            .saturating_mul(DESCRIPTORS_PER_CLIENT)
            .saturating_add(reserved)
            .max(8 * nodes.max(events).max(FILES))
    }
}

/// Maximum number of concurrent connections per listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionLimits {
    /// Most connections of clients.
    pub clients: usize,
    /// Most connections of operators.
    pub operators: usize,
}

impl ConnectionLimits {
    /// Divides `limit` descriptors. Of a small limit, each use other than clients gets at most an eighth: the rest must
    /// still serve clients.
    pub fn of(limit: u64, needs: DescriptorDemand) -> Self {
        let eighth = limit / 8;
        let operators = OPERATORS.min(eighth / 2).max(2);
        let nodes = if needs.is_in_cluster { NODES.min(eighth) } else { 0 };
        let events = (needs.workers as u64).saturating_mul(PER_WORKER).min(eighth);
        let ranks = extra_event_ranks(limit) as u64 * PER_EXTRA_RANK;
        let reserved = FILES.min(eighth) + operators + nodes + events + ranks;
        let possible =
            usize::try_from(limit.saturating_sub(reserved) / DESCRIPTORS_PER_CLIENT).unwrap_or(usize::MAX).max(1);
        if possible < needs.clients {
            tracing::warn!(
                configured = needs.clients,
                possible,
                open_files = limit,
                needed = needs.descriptors(),
                "proxy.max_connections is more than this process may open: raise its limit of open files to what is needed \
                 (ulimit -n, LimitNOFILE)"
            );
        }
        Self { clients: possible.min(needs.clients), operators: operators as usize }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_that_is_told_is_enough() {
        let needs = DescriptorDemand { clients: 16_384, workers: 64, is_in_cluster: true };
        assert_eq!(ConnectionLimits::of(needs.descriptors(), needs).clients, 16_384);
        assert!(ConnectionLimits::of(needs.descriptors() - 2, needs).clients < 16_384);
    }

    #[test]
    fn all_connections_together_leave_descriptors_to_the_ledger() {
        let needs = DescriptorDemand { clients: 16_384, workers: 64, is_in_cluster: true };
        assert_eq!(ConnectionLimits::of(1 << 20, needs), ConnectionLimits { clients: 16_384, operators: 256 });
        assert_eq!(ConnectionLimits::of(1 << 20, DescriptorDemand { clients: 100, ..needs }).clients, 100);
        for limit in [64, 256, 1024, 4096, 20_000] {
            let ConnectionLimits { clients, operators } = ConnectionLimits::of(limit, needs);
            let ranks = extra_event_ranks(limit) as u64 * PER_EXTRA_RANK;
            let kept = FILES.min(limit / 8) + NODES.min(limit / 8) + (64 * PER_WORKER).min(limit / 8) + ranks;
            assert!(
                clients as u64 * DESCRIPTORS_PER_CLIENT + operators as u64 + kept <= limit,
                "{limit}: {clients}, {operators}"
            );
            assert!(clients as u64 * 2 * DESCRIPTORS_PER_CLIENT >= limit - 8, "{limit}: {clients}");
        }
    }

    #[test]
    fn soft_limit_is_raised_to_the_hard_limit() {
        let raised = raise_limit();
        assert_eq!(getrlimit(Resource::Nofile).current, Some(raised));
        assert_eq!(raised, getrlimit(Resource::Nofile).maximum.unwrap_or(MAX_DESCRIPTORS).min(MAX_DESCRIPTORS));
    }
}
