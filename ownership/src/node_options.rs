//! Options of a directory and of its node's part in a cluster.

use std::path::PathBuf;
use std::time::Duration;

use consensus::{RequestedLedgerLimits, SupportedLevels, raft_config};
use openraft::Config;
use smart_default::SmartDefault;

use crate::error::LedgerNodeError;
use crate::node_folder::ClusterId;
use crate::peers::TlsFiles;

/// Options of a directory.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory for log, snapshot and identity.
    pub data_dir: PathBuf,
    /// Cluster that the data directory must belong to; a new directory founds it.
    pub cluster: Option<ClusterId>,
    /// Options of its part in a cluster.
    pub peering: ClusterOptions,
    /// Maximum number of queued commands; beyond it commands are refused at once.
    pub queue: usize,
    /// How long a command is retried before its outcome counts as unknown.
    pub submit_timeout: Duration,
    /// How long a worker's lease is held after a liveness report.
    pub lease: Duration,
    /// Requested limits of the ledger; used only where they are wider than its current ones.
    pub desired_limits: RequestedLedgerLimits,
    /// Interval at which leases are renewed and expired.
    pub tick: Duration,
    /// Number of entries after which a snapshot is written.
    pub snapshot_entries: u64,
    /// Bytes of log after which a snapshot is written.
    pub snapshot_bytes: u64,
    /// Simulates a release that supports feature levels up to this one, at most `ledger::NEXT_LEVEL`. For tests of
    /// mixed releases.
    pub max_level: Option<u32>,
}

impl Options {
    /// Returns the defaults for `data_dir`.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            cluster: None,
            peering: ClusterOptions::default(),
            queue: 4_096,
            submit_timeout: Duration::from_secs(10),
            lease: Duration::from_secs(15),
            desired_limits: RequestedLedgerLimits::default(),
            tick: Duration::from_secs(1),
            snapshot_entries: 50_000,
            snapshot_bytes: 64 << 20,
            max_level: None,
        }
    }

    pub(crate) fn levels(&self) -> SupportedLevels {
        let highest = self.max_level.unwrap_or(ledger::LEVEL).min(ledger::NEXT_LEVEL);
        SupportedLevels { lowest: 1, highest }
    }
}

/// Options of a node's part in a cluster. By default the node is standalone.
#[derive(Clone, PartialEq, Eq, Debug, SmartDefault)]
pub struct ClusterOptions {
    /// Address on which other nodes call this one, `host:port`; port 0 lets the system choose. Without it the node is
    /// standalone.
    pub listen: Option<String>,
    /// Address that is announced instead of `listen`, if that is a wildcard or not reachable from outside.
    pub advertise: Option<String>,
    /// Members to ask for admission if the data directory is new. If empty, a directory with an unfinished join resumes
    /// it, and a new directory founds a cluster.
    pub join: Vec<String>,
    /// How long a new node asks before it gives up.
    #[default(Duration::from_secs(60))]
    pub join_timeout: Duration,
    /// Certificates for mutual TLS between members; without them connections are not encrypted.
    pub tls: Option<TlsFiles>,
    /// Allows listening beyond loopback without `tls`. Anyone who reaches the address is then trusted.
    pub insecure: bool,
    /// Timers for the replacement of a silent leader.
    pub timers: ElectionTimers,
}

/// Timers for the replacement of a silent leader.
///
/// A follower waits for `election_max`, then for a random time between `election_min` and `election_max`, before it
/// asks the others whether they miss the leader, too. So a lost leader is replaced after about `election_max` plus the
/// shortest of the voters' random times.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct ElectionTimers {
    /// Interval of a leader's heartbeats.
    #[default(Duration::from_millis(250))]
    pub heartbeat: Duration,
    /// Minimum random wait.
    #[default(Duration::from_millis(500))]
    pub election_min: Duration,
    /// Maximum random wait; also how long a leader's heartbeat is valid.
    #[default(Duration::from_millis(1_000))]
    pub election_max: Duration,
}

impl ElectionTimers {
    /// Returns Raft's configuration with these timers.
    pub(crate) fn raft(self) -> Result<Config, LedgerNodeError> {
        let config = raft_config(self.heartbeat, (self.election_min, self.election_max));
        let wrong = |error: openraft::ConfigError| {
            LedgerNodeError::Options(format!(
                "the cluster's timers do not fit: {error}; cluster.heartbeat_interval < cluster.election_timeout_min < \
                 cluster.election_timeout_max is needed"
            ))
        };
        config.validate().map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inconsistent_timers_are_refused_with_the_required_values() {
        assert!(ElectionTimers::default().raft().is_ok());
        let wrong = ElectionTimers { heartbeat: Duration::from_secs(9), ..ElectionTimers::default() };
        let error = wrong.raft().unwrap_err().to_string();
        assert!(error.contains("cluster.heartbeat_interval < cluster.election_timeout_min"), "{error}");
    }

    #[test]
    fn a_lost_leader_is_replaced_within_two_seconds() {
        let timers = ElectionTimers::default();
        assert!(timers.election_max * 2 <= Duration::from_secs(2));
        assert!(timers.heartbeat * 2 <= timers.election_min);
    }
}
