//! Finding and forgetting what is kept of one tenant, here and in Redis.

use std::time::Duration;

use bytes::Bytes;
use vocabulary::TenantId;

use super::key::of_namespace;
use super::{Inner, Key, Kind, Shared, SoftState};

/// Names that Redis looks at for one answer.
const PAGE: usize = 512;
/// Most values that are asked for in one go.
const BATCH: usize = 16;
/// Longest time for all of it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Redis did not answer, or did not forget in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("Redis did not answer, or did not forget in time")]
pub(crate) struct NotForgotten;

impl SoftState {
    /// Forgets of `tenant` what `wanted` names among all that is kept of it, until nothing of that is left; how much it was.
    /// What other routers have in their memory stays there.
    pub(crate) async fn purge(
        &self,
        tenant: &TenantId,
        wanted: impl Fn(&[(Key, Bytes)]) -> Vec<Key>,
    ) -> Result<usize, NotForgotten> {
        let work = async {
            let mut forgotten = std::collections::HashSet::new();
            loop {
                let here = self.inner.memory.lock().of_tenant(tenant);
                let there = match &self.inner.shared {
                    Some(shared) => self.inner.of_tenant(shared, tenant).await?,
                    None => Vec::new(),
                };
                let keys = wanted(&[here, there].concat());
                if keys.is_empty() {
                    return Ok(forgotten.len());
                }
                for key in keys {
                    // What waits to be written is written before this.
                    self.forget(&key);
                    forgotten.insert(key);
                }
                if self.inner.shared.is_some() {
                    tokio::time::sleep(self.inner.timeout).await;
                }
            }
        };
        tokio::time::timeout(PATIENCE, work).await.map_err(|_| NotForgotten)?
    }
}

impl Inner {
    /// What Redis holds of the words of `tenant`. Marks of what was forgotten, and what cannot be read, are left out.
    async fn of_tenant(&self, shared: &Shared, tenant: &TenantId) -> Result<Vec<(Key, Bytes)>, NotForgotten> {
        let mut found = Vec::new();
        for kind in [Kind::Maker, Kind::Transcript, Kind::Checkpoint] {
            let prefix = Key::new(kind, tenant, "").text(&shared.namespace);
            let names = shared.names(&prefix).await?;
            for batch in names.chunks(BATCH) {
                let mut pipeline = redis::pipe();
                for name in batch {
                    pipeline.cmd("GETRANGE").arg(name).arg(0).arg(self.most_bytes(kind) + super::seal::OVERHEAD);
                }
                let values: Vec<Vec<u8>> = shared.link.tell(&pipeline).await.map_err(|_| NotForgotten)?;
                for (name, sealed) in batch.iter().zip(values) {
                    let value = self.read(shared, kind, name, sealed);
                    if let Some(value) = value.filter(|value| !value.is_empty()) {
                        found.push((Key::new(kind, tenant, &name[prefix.len()..]), value));
                    }
                }
            }
        }
        Ok(found)
    }
}

impl Shared {
    async fn names(&self, prefix: &str) -> Result<Vec<String>, NotForgotten> {
        debug_assert!(prefix.starts_with(&of_namespace(&self.namespace)));
        let pattern = format!("{}*", literally(prefix));
        let (mut names, mut cursor) = (Vec::new(), 0u64);
        loop {
            let mut pipeline = redis::pipe();
            pipeline.cmd("SCAN").arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(PAGE);
            let answer = self.link.tell::<((u64, Vec<String>),)>(&pipeline).await;
            let ((next, page),) = answer.map_err(|_| NotForgotten)?;
            names.extend(page.into_iter().filter(|name| name.starts_with(prefix)));
            cursor = next;
            if cursor == 0 {
                names.sort_unstable();
                names.dedup();
                return Ok(names);
            }
        }
    }
}

/// A text that matches itself only, where Redis reads patterns.
fn literally(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for letter in text.chars() {
        if matches!(letter, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_tenants_values_are_forgotten_and_no_others() {
        let metrics = crate::telemetry::metrics::Metrics::default().soft_state;
        let state = SoftState::start(&Default::default(), ("c", &std::sync::Arc::default()), metrics).unwrap();
        let key = |kind, tenant: &str, name: &str| Key::new(kind, &TenantId(tenant.into()), name);
        for tenant in ["a", "b"] {
            state.put(key(Kind::Transcript, tenant, "resp_1"), Bytes::from_static(b"words"));
            state.put(key(Kind::Checkpoint, tenant, "s"), Bytes::from_static(b"ids"));
            state.put(key(Kind::Charge, tenant, "c"), Bytes::from_static(b"7"));
        }
        let all = |kept: &[(Key, Bytes)]| kept.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>();
        assert_eq!(state.purge(&TenantId("a".into()), all).await, Ok(2));
        assert_eq!(state.near(&key(Kind::Transcript, "a", "resp_1")), None);
        assert_eq!(state.near(&key(Kind::Checkpoint, "a", "s")), None);
        assert!(state.near(&key(Kind::Charge, "a", "c")).is_some(), "what it owes is not forgotten");
        assert!(state.near(&key(Kind::Transcript, "b", "resp_1")).is_some());
        assert_eq!(state.purge(&TenantId("a".into()), all).await, Ok(0));
    }

    #[test]
    fn a_name_is_no_pattern() {
        assert_eq!(literally("a:[b]*?\\"), "a:\\[b\\]\\*\\?\\\\");
    }
}
