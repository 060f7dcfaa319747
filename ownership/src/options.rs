//! How a directory is kept, and how its node takes part in a cluster.

use std::path::PathBuf;
use std::time::Duration;

use consensus::{DesiredLimits, SupportedLevels, raft_config};
use openraft::Config;
use smart_default::SmartDefault;

use crate::error::OwnershipError;
use crate::node_folder::ClusterId;
use crate::peers::TlsFiles;

/// How a directory is kept.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where log, snapshot and identity lie.
    pub data_dir: PathBuf,
    /// The cluster that the data directory must belong to; a new directory founds it.
    pub cluster: Option<ClusterId>,
    /// How it takes part in a cluster.
    pub peering: PeerOptions,
    /// Commands that may wait; beyond it they are refused at once.
    pub queue: usize,
    /// How long a command is tried before its outcome counts as unknown.
    pub submit_timeout: Duration,
    /// How long a worker's lease is held after a sign of life.
    pub lease: Duration,
    /// How much the ledger shall hold, where that is more than it does.
    pub desired_limits: DesiredLimits,
    /// How often leases are renewed and ended.
    pub tick: Duration,
    /// A snapshot is written after so many entries.
    pub snapshot_entries: u64,
    /// A snapshot is written after so many bytes of log.
    pub snapshot_bytes: u64,
    /// Works as a release that knows feature levels up to this one, `ledger::NEXT_LEVEL` at most. For tests of mixed
    /// releases.
    pub max_level: Option<u32>,
}

impl Options {
    /// The defaults, in `data_dir`.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            cluster: None,
            peering: PeerOptions::default(),
            queue: 4_096,
            submit_timeout: Duration::from_secs(10),
            lease: Duration::from_secs(15),
            desired_limits: DesiredLimits::default(),
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

/// How a node takes part in a cluster. The default stands alone.
#[derive(Clone, PartialEq, Eq, Debug, SmartDefault)]
pub struct PeerOptions {
    /// Where other nodes call this one, `host:port`; port 0 lets the system choose. Without it the node stands alone.
    pub listen: Option<String>,
    /// What the others are told instead of `listen`: needed where that is a wildcard or not reachable from outside.
    pub advertise: Option<String>,
    /// Members to ask for admission, when the data directory is new. Without any, a directory in which a join
    /// was begun goes on with that, and a new one founds a cluster.
    pub join: Vec<String>,
    /// How long a new node may ask before it gives up.
    #[default(Duration::from_secs(60))]
    pub join_timeout: Duration,
    /// Certificates, for connections that only members can make; none leaves them plain.
    pub tls: Option<TlsFiles>,
    /// Listens beyond the loopback without `tls` as well: whoever reaches the address is taken at its word.
    pub insecure: bool,
    /// When a silent leader is replaced.
    pub timers: ElectionTimers,
}

/// When a silent leader is replaced.
///
/// A follower waits for `election_max`, then for a random time from `election_min` to `election_max`, before it asks
/// the others whether they miss the leader too. So a lost leader is replaced after about `election_max` plus the
/// shortest of the voters' random times.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct ElectionTimers {
    /// How often a leader shows that it is there.
    #[default(Duration::from_millis(250))]
    pub heartbeat: Duration,
    /// The shortest random wait.
    #[default(Duration::from_millis(500))]
    pub election_min: Duration,
    /// The longest random wait; also how long a leader's word holds.
    #[default(Duration::from_millis(1_000))]
    pub election_max: Duration,
}

impl ElectionTimers {
    /// Raft's configuration with these timers.
    pub(crate) fn raft(self) -> Result<Config, OwnershipError> {
        let config = raft_config(self.heartbeat, (self.election_min, self.election_max));
        let wrong = |error: openraft::ConfigError| {
            OwnershipError::Options(format!(
                "the cluster's timers do not fit: {error}; heartbeat < election_min < election_max is needed"
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
        assert!(error.contains("heartbeat < election_min"), "{error}");
    }

    #[test]
    fn a_lost_leader_is_replaced_within_two_seconds() {
        let timers = ElectionTimers::default();
        assert!(timers.election_max * 2 <= Duration::from_secs(2));
        assert!(timers.heartbeat * 2 <= timers.election_min);
    }
}
