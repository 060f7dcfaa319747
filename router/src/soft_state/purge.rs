//! Finding and forgetting what is kept of one tenant, here and in Redis.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redis::{FromRedisValue, Pipeline};
use tokio::task::spawn_blocking;
use vocabulary::TenantId;

use super::key::of_namespace;
use super::link::NoAnswer;
use super::memory::{Held, Origin};
use super::watch::{Over, Write};
use super::{Inner, Key, Kind, Shared, SoftState};

/// Names that Redis looks at for one answer.
const PAGE: usize = 512;
/// Bytes of values that are asked for in one go, and most of them.
const BATCH_BYTES: usize = 1 << 20;
const BATCH: usize = 64;
/// How often it is asked before it counts as not answering.
const TRIES: usize = 3;
/// How often it is told to forget what a write that was under way has put back.
const PASSES: usize = 3;
/// Longest time for all of it.
const PATIENCE: Duration = Duration::from_secs(60);
/// What is kept of people's words.
const KINDS: [Kind; 3] = [Kind::Maker, Kind::Transcript, Kind::Checkpoint];

/// Redis did not answer, or did not forget in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("Redis did not answer, or did not forget in time")]
pub(crate) struct NotForgotten;

/// How many values were forgotten, and how many transcripts in Redis could not be read to see whose they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Purged {
    pub(crate) forgotten: usize,
    pub(crate) unread: usize,
}

impl SoftState {
    /// Forgets all that is kept of `tenant` at this time, by its names: no value is read, so that those of another secret go as
    /// well. What other routers have in their memory stays there.
    pub(crate) async fn purge(&self, tenant: &TenantId) -> Result<Purged, NotForgotten> {
        let work = async {
            let mut keys: HashSet<Key> =
                self.inner.memory.lock().of_tenant(tenant).into_iter().map(|(key, _)| key).collect();
            if let Some(shared) = &self.inner.shared {
                keys.extend(shared.kept(tenant).await?.into_iter().map(|(key, _)| key));
            }
            Ok(Purged { forgotten: self.forget_all(keys).await?, unread: 0 })
        };
        tokio::time::timeout(PATIENCE, work).await.map_err(|_| NotForgotten)?
    }

    /// The same of what `wanted` names among it, which is shown what `read` makes of each transcript.
    pub(crate) async fn purge_some<T: Send + 'static>(
        &self,
        tenant: &TenantId,
        read: fn(&[u8]) -> Option<T>,
        wanted: impl FnOnce(&[(Key, Option<T>)]) -> Vec<Key>,
    ) -> Result<Purged, NotForgotten> {
        let work = async {
            let here = self.inner.memory.lock().of_tenant(tenant);
            let near = move || here.into_iter().map(|(key, value)| (key, read(&value))).collect();
            let mut found: Vec<_> = spawn_blocking(near).await.map_err(|_| NotForgotten)?;
            let mut unread = 0;
            if let Some(shared) = &self.inner.shared {
                let (transcripts, others): (Vec<_>, Vec<_>) =
                    shared.kept(tenant).await?.into_iter().partition(|(key, _)| key.kind == Kind::Transcript);
                found.extend(others.into_iter().map(|(key, _)| (key, None)));
                for batch in batches(transcripts) {
                    let (values, failed) = Inner::read_batch(&self.inner, batch, read).await?;
                    found.extend(values);
                    unread += failed;
                }
            }
            let keys = wanted(&found).into_iter().collect();
            Ok(Purged { forgotten: self.forget_all(keys).await?, unread })
        };
        tokio::time::timeout(PATIENCE, work).await.map_err(|_| NotForgotten)?
    }

    /// Puts a mark in the place of each, until none is left; how many there were.
    async fn forget_all(&self, keys: HashSet<Key>) -> Result<usize, NotForgotten> {
        let count = keys.len();
        let mut left: Vec<Key> = keys.into_iter().collect();
        for _ in 0..PASSES {
            left.iter().for_each(|key| self.inner.memory.lock().remove(key));
            let Some(shared) = self.inner.shared.as_ref().filter(|_| !left.is_empty()) else { return Ok(count) };
            shared.mark(&left, self.inner.ttl).await?;
            // What waits to be written is written before it is looked for again.
            tokio::time::sleep(self.inner.timeout).await;
            left = shared.unmarked(left).await?.into_iter().map(|(key, _)| key).collect();
        }
        if left.is_empty() { Ok(count) } else { Err(NotForgotten) }
    }
}

/// Keys whose values are read in one go.
fn batches(keys: Vec<(Key, usize)>) -> Vec<Vec<Key>> {
    let (mut batches, mut bytes) = (Vec::<Vec<Key>>::new(), 0);
    for (key, size) in keys {
        match batches.last_mut().filter(|batch| batch.len() < BATCH && bytes + size <= BATCH_BYTES) {
            Some(batch) => batch.push(key),
            None => {
                batches.push(vec![key]);
                bytes = 0;
            }
        }
        bytes += size;
    }
    batches
}

impl Inner {
    /// What `read` makes of these values, and how many cannot be read. Marks are left out.
    async fn read_batch<T: Send + 'static>(
        inner: &Arc<Self>,
        batch: Vec<Key>,
        read: fn(&[u8]) -> Option<T>,
    ) -> Result<(Vec<(Key, Option<T>)>, usize), NotForgotten> {
        let Some(shared) = &inner.shared else { return Ok((Vec::new(), 0)) };
        let mut pipeline = redis::pipe();
        for key in &batch {
            let most = inner.most_bytes(key.kind) + super::seal::OVERHEAD;
            pipeline.cmd("GETRANGE").arg(key.text(&shared.namespace)).arg(0).arg(most);
        }
        let values: Vec<Vec<u8>> = shared.browse(&pipeline).await?;
        let inner = inner.clone();
        let work = move || {
            let (mut found, mut unread) = (Vec::new(), 0);
            let Some(shared) = &inner.shared else { return (found, unread) };
            // What is gone by now is empty.
            for (key, sealed) in batch.into_iter().zip(values).filter(|(_, sealed)| !sealed.is_empty()) {
                match inner.read(shared, key.kind, &key.text(&shared.namespace), sealed) {
                    None => unread += 1,
                    Some(value) if value.is_empty() => {}
                    Some(value) => found.push((key, read(&value))),
                }
            }
            (found, unread)
        };
        spawn_blocking(work).await.map_err(|_| NotForgotten)
    }
}

impl Shared {
    /// Asks a few times: what is looked through here is much, and nobody waits for it.
    async fn browse<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, NotForgotten> {
        for _ in 0..TRIES {
            match self.link.browse(pipeline).await {
                Ok(answer) => return Ok(answer),
                Err(NoAnswer::Failed(_)) => {}
                Err(NoAnswer::NotAsked | NoAnswer::Foreign) => break,
            }
        }
        Err(NotForgotten)
    }

    /// What Redis holds of the words of `tenant`, and the size of each; without marks.
    async fn kept(&self, tenant: &TenantId) -> Result<Vec<(Key, usize)>, NotForgotten> {
        let prefixes = KINDS.map(|kind| (kind, Key::new(kind, tenant, "").text(&self.namespace)));
        let namespace = of_namespace(&self.namespace);
        let pattern = format!("{}:*:{}:{}:*", literally(&namespace), tenant.0.len(), literally(&tenant.0));
        let (mut keys, mut cursor) = (HashSet::new(), 0u64);
        loop {
            let mut pipeline = redis::pipe();
            pipeline.cmd("SCAN").arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(PAGE);
            let ((next, page),): ((u64, Vec<String>),) = self.browse(&pipeline).await?;
            for name in &page {
                let of = prefixes.iter().find_map(|(kind, prefix)| Some((*kind, name.strip_prefix(prefix.as_str())?)));
                keys.extend(of.map(|(kind, rest)| Key::new(kind, tenant, rest)));
            }
            cursor = next;
            if cursor == 0 {
                return self.unmarked(keys.into_iter().collect()).await;
            }
        }
    }

    /// Those of which Redis holds a value, whatever it is, and its size. A mark is known by its form.
    async fn unmarked(&self, keys: Vec<Key>) -> Result<Vec<(Key, usize)>, NotForgotten> {
        let (version, length) = self.sealer.mark();
        let mut found = Vec::new();
        for page in keys.chunks(PAGE) {
            let (mut sizes, mut begins) = (redis::pipe(), redis::pipe());
            for key in page {
                let name = key.text(&self.namespace);
                sizes.cmd("STRLEN").arg(&name);
                begins.cmd("GETRANGE").arg(&name).arg(0).arg(0);
            }
            let sizes: Vec<usize> = self.browse(&sizes).await?;
            let begins: Vec<Vec<u8>> = self.browse(&begins).await?;
            for ((key, size), begin) in page.iter().zip(sizes).zip(begins) {
                let is_mark = size == length && begin == [version];
                if size > 0 && !is_mark {
                    found.push((key.clone(), size));
                }
            }
        }
        Ok(found)
    }

    async fn mark(&self, keys: &[Key], ttl: Duration) -> Result<(), NotForgotten> {
        for page in keys.chunks(PAGE) {
            let held = Held { value: Bytes::new(), ttl, origin: Origin::Shared };
            let writes: Vec<Write> = page.iter().map(|key| Write { key: key.clone(), held: held.clone() }).collect();
            if self.save(&writes, Over::Anything).await != "saved" {
                return Err(NotForgotten);
            }
        }
        Ok(())
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
        let purged = |forgotten| Ok(Purged { forgotten, unread: 0 });
        assert_eq!(state.purge(&TenantId("a".into())).await, purged(2));
        assert_eq!(state.near(&key(Kind::Transcript, "a", "resp_1")), None);
        assert_eq!(state.near(&key(Kind::Checkpoint, "a", "s")), None);
        assert!(state.near(&key(Kind::Charge, "a", "c")).is_some(), "what it owes is not forgotten");
        assert!(state.near(&key(Kind::Transcript, "b", "resp_1")).is_some());
        assert_eq!(state.purge(&TenantId("a".into())).await, purged(0));
        let transcripts = |kept: &[(Key, Option<usize>)]| {
            let known = kept.iter().filter(|(_, length)| *length == Some(5));
            known.map(|(key, _)| key.clone()).collect::<Vec<_>>()
        };
        let some = state.purge_some(&TenantId("b".into()), |value| Some(value.len()), transcripts).await;
        assert_eq!(some, purged(1));
        assert_eq!(state.near(&key(Kind::Transcript, "b", "resp_1")), None);
        assert!(state.near(&key(Kind::Checkpoint, "b", "s")).is_some());
    }

    #[test]
    fn large_values_are_read_few_at_once() {
        let key = |n: usize| Key::new(Kind::Transcript, &TenantId("a".into()), &n.to_string());
        let sizes = |size: usize, count: usize| {
            let batches = batches((0..count).map(|n| (key(n), size)).collect());
            batches.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(sizes(BATCH_BYTES / 2, 5), [2, 2, 1]);
        assert_eq!(sizes(4 * BATCH_BYTES, 2), [1, 1]);
        assert_eq!(sizes(1, 100), [64, 36]);
    }

    #[test]
    fn a_name_is_no_pattern() {
        assert_eq!(literally("a:[b]*?\\"), "a:\\[b\\]\\*\\?\\\\");
    }
}
