//! Counters that all routers share: each router leases a part of what is left, atomically.

use super::SharedCache;
use super::breaker::SharedCacheHealth;
use super::key::{CacheKey, namespace_prefix};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CounterLease {
    /// A lease, and what is left after it.
    Granted {
        /// Units for this router; negative for units that it has returned.
        units: i64,
        left: u64,
    },
    /// Redis was not reachable, or did not answer.
    Unavailable,
}

/// A token bucket that fills within a minute: `ARGV` is its size and the wanted units. A key that holds no bucket is
/// replaced by a full one.
const LEASE_SCRIPT: &str = r"
local size, want = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local bucket = redis.pcall('HMGET', KEYS[1], 'level', 'at')
if bucket.err then
  redis.call('DEL', KEYS[1])
  bucket = {}
end
local level, at = tonumber(bucket[1] or ''), tonumber(bucket[2] or '')
if not level or not at or level ~= level then level, at = size, now end
level = math.min(size, level + math.max(0, now - at) * size / 60000)
local granted = want
if want > 0 then granted = math.max(0, math.min(want, math.floor(level))) end
level = math.min(size, level - granted)
redis.call('HSET', KEYS[1], 'level', string.format('%.3f', level), 'at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], 120000)
return {granted, math.max(0, math.floor(level))}
";

/// Counts the routers that were seen in the last ten seconds, including this one: `ARGV` is its name.
const COUNT_ROUTERS_SCRIPT: &str = r"
local now = tonumber(redis.call('TIME')[1])
local added = redis.pcall('ZADD', KEYS[1], now, ARGV[1])
if type(added) == 'table' then
  redis.call('DEL', KEYS[1])
  redis.call('ZADD', KEYS[1], now, ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - 10)
redis.call('EXPIRE', KEYS[1], 60)
return redis.call('ZCARD', KEYS[1])
";

impl SharedCache {
    /// Returns the number of routers where each must keep to its own share of a quota: without Redis, or while Redis is
    /// not up. `None` while quotas are leased from the shared count.
    pub(crate) fn isolated_router_count(&self) -> Option<u32> {
        match &self.inner.redis {
            None => Some(1),
            Some(shared) if shared.client.health() == SharedCacheHealth::Up => None,
            Some(_) => Some(self.router_count()),
        }
    }

    /// Returns the last known number of routers, including this one.
    pub(crate) fn router_count(&self) -> u32 {
        self.inner.routers_seen.load(std::sync::atomic::Ordering::Relaxed).max(1)
    }

    /// Leases `want` units of `key`, or returns units if negative. Waits no longer than the timeout.
    pub(crate) async fn lease(&self, key: &CacheKey, per_minute: u64, want: i64) -> CounterLease {
        let Some(shared) = &self.inner.redis else { return CounterLease::Unavailable };
        let mut pipeline = redis::pipe();
        pipeline.cmd("EVAL").arg(LEASE_SCRIPT).arg(1).arg(key.redis_key(&shared.namespace)).arg(per_minute).arg(want);
        let (outcome, leased) = match shared.client.call::<((i64, u64),)>(&pipeline).await {
            Ok(((units, left),)) => ("shared_hit", CounterLease::Granted { units, left }),
            Err(no_answer) => (no_answer.as_str(), CounterLease::Unavailable),
        };
        self.inner.metrics.count_lookup(key.kind, outcome);
        leased
    }
}

/// Adds the router count to a probe.
pub(super) fn count_routers(pipeline: &mut redis::Pipeline, namespace: &str, name: &str) {
    pipeline
        .cmd("EVAL")
        .arg(COUNT_ROUTERS_SCRIPT)
        .arg(1)
        .arg(format!("{}:routers", namespace_prefix(namespace)))
        .arg(name);
}
