//! Raft configuration, shared by servers and the simulation.

use std::time::Duration;

use openraft::{Config, SnapshotPolicy};

/// Returns Raft's configuration with these timers: heartbeat interval, and minimum and maximum election timeout.
pub fn raft_config(heartbeat: Duration, (election_min, election_max): (Duration, Duration)) -> Config {
    let millis = |time: Duration| time.as_millis() as u64;
    Config {
        cluster_name: "ownerserve".into(),
        heartbeat_interval: millis(heartbeat),
        election_timeout_min: millis(election_min),
        election_timeout_max: millis(election_max),
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: 1_000,
        // Bounds what is sent at once to a follower that comes back; an entry can have up to a megabyte.
        max_payload_entries: 64,
        install_snapshot_timeout: 60_000,
        enable_pre_vote: Some(true),
        // A restarted leader may have lost entries that it had sent; it must not write other entries in the same term.
        enable_leader_restore: Some(false),
        backoff: "50ms ...1s".into(),
        ..Config::default()
    }
}
