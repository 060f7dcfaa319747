//! Cache of conversation checkpoints, bounded in bytes and shared fairly between tenants.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::Bytes;

use crate::conversation_checkpoint::{BodyPrefixHasher, ConversationCheckpoint, lead_bytes};
use crate::fair_lru::FairLru;

/// Checkpoints of all conversations of a router. Only an optimization: without them prompts are computed in full.
#[derive(Debug)]
pub struct ConversationCache {
    index: Mutex<ConversationIndex>,
    max_bytes: usize,
}

/// How a conversation was recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum LookupTier {
    /// By the client's session name, up to the end of the cached conversation.
    Session,
    /// By the leading bytes of its message list, up to the end of the cached conversation.
    Leading,
    /// By session or leading bytes, up to an earlier message: the conversation was shortened, forked or edited.
    Segment,
    /// By a token checkpoint that holds the beginning of its rendered prompt.
    Checkpoint,
    /// Not recognized: everything was computed.
    Miss,
}

/// A cached checkpoint whose messages a body shares up to a boundary.
pub(crate) struct CheckpointMatch<'a> {
    pub(crate) checkpoint: Arc<ConversationCheckpoint>,
    /// Id of the checkpoint in the cache.
    pub(crate) id: u64,
    /// Index of the last boundary up to which the body is equal.
    pub(crate) boundary: usize,
    pub(crate) hasher: BodyPrefixHasher<'a>,
    pub(crate) tier: LookupTier,
}

#[derive(Debug)]
struct ConversationIndex {
    /// Checkpoints by id, accounted to tenants.
    checkpoints: FairLru<Arc<str>, u64, CachedConversation>,
    /// Checkpoint ids by session and by lead digest, both XORed with the scope.
    by_key: HashMap<u128, u64>,
    next_id: u64,
}

#[derive(Debug)]
struct CachedConversation {
    checkpoint: Arc<ConversationCheckpoint>,
    session: Option<u128>,
}

impl ConversationIndex {
    fn get_and_touch(&mut self, key: u128) -> Option<(u64, Arc<ConversationCheckpoint>)> {
        let id = *self.by_key.get(&key)?;
        Some((id, self.checkpoints.get_mut(&id)?.checkpoint.clone()))
    }

    fn contains(&self, found: &CheckpointMatch<'_>) -> bool {
        self.checkpoints.peek(&found.id).is_some_and(|slot| Arc::ptr_eq(&slot.checkpoint, &found.checkpoint))
    }

    fn remove(&mut self, id: u64) {
        if let Some(slot) = self.checkpoints.remove(&id) {
            self.remove_keys(id, &slot);
        }
    }

    /// Removes all lookup keys of a checkpoint.
    fn remove_keys(&mut self, id: u64, slot: &CachedConversation) {
        for key in lookup_keys(&slot.checkpoint, slot.session) {
            if self.by_key.get(&key) == Some(&id) {
                self.by_key.remove(&key);
            }
        }
    }

    fn insert(&mut self, tenant: &str, (trail, bytes): (Arc<ConversationCheckpoint>, usize), session: Option<u128>) {
        self.next_id += 1;
        let id = self.next_id;
        self.by_key.extend(lookup_keys(&trail, session).map(|key| (key, id)));
        for (id, slot) in
            self.checkpoints.insert(tenant.into(), id, (CachedConversation { checkpoint: trail, session }, bytes))
        {
            self.remove_keys(id, &slot);
        }
    }

    /// Replaces a checkpoint in place if the new one keeps all of its lookup keys; otherwise returns `false`.
    fn replace(
        &mut self,
        id: u64,
        (trail, bytes): (&Arc<ConversationCheckpoint>, usize),
        session: Option<u128>,
    ) -> bool {
        let has_keys = |CachedConversation { checkpoint: old, session: named }: &CachedConversation| {
            (*named, old.scope) == (session, trail.scope) && trail.lead_digests.starts_with(&old.lead_digests)
        };
        let may_be_replaced = self.checkpoints.peek(&id).is_some_and(has_keys);
        if !may_be_replaced
            || !self.checkpoints.replace(&id, (CachedConversation { checkpoint: trail.clone(), session }, bytes))
        {
            return false;
        }
        // Old keys are written again, too: another conversation with the same beginning may have taken them since.
        self.by_key.extend(lookup_keys(trail, session).map(|key| (key, id)));
        true
    }
}

fn lookup_keys(trail: &ConversationCheckpoint, session: Option<u128>) -> impl Iterator<Item = u128> {
    session.into_iter().chain(trail.lead_digests.iter().copied()).map(|key| key ^ trail.scope)
}

impl ConversationCache {
    /// Creates a cache bounded to this much memory.
    pub fn new(bound: Bytes) -> Self {
        let max_bytes = usize::try_from(bound.0).unwrap_or(usize::MAX);
        let index = ConversationIndex { checkpoints: FairLru::new(max_bytes), by_key: HashMap::new(), next_id: 0 };
        Self { index: Mutex::new(index), max_bytes }
    }

    /// Returns whether the cache may hold anything.
    pub fn has_room(&self) -> bool {
        self.max_bytes > 0
    }

    fn lock_index(&self) -> MutexGuard<'_, ConversationIndex> {
        // A step that panicked leaves a complete checkpoint or none, so a poisoned lock is safe to use.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of all checkpoints.
    pub fn memory_bytes(&self) -> Bytes {
        Bytes(self.lock_index().checkpoints.bytes() as u64)
    }

    /// Number of cached conversations.
    pub fn len(&self) -> usize {
        self.lock_index().checkpoints.len()
    }

    /// Returns whether no conversation is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all conversations.
    pub fn clear(&self) {
        let mut index = self.lock_index();
        index.checkpoints.clear();
        index.by_key.clear();
    }

    /// Returns the checkpoint that shares the longest beginning with `body`, as far as one pass over it can tell.
    pub(crate) fn find<'a>(&self, scope: u128, session: Option<u128>, body: &'a [u8]) -> Option<CheckpointMatch<'a>> {
        let named =
            session.and_then(|session| self.match_key(session ^ scope, (0, &BodyPrefixHasher::new(body)), scope));
        match named {
            Some(found) if found.tier == LookupTier::Leading => {
                Some(CheckpointMatch { tier: LookupTier::Session, ..found })
            }
            named => self.find_by_leading_bytes((scope, body), named),
        }
    }

    /// Returns the better of the checkpoint found by leading bytes and `named`, the one found by session.
    fn find_by_leading_bytes<'a>(
        &self,
        (scope, body): (u128, &'a [u8]),
        named: Option<CheckpointMatch<'a>>,
    ) -> Option<CheckpointMatch<'a>> {
        let mut best = named;
        let known = best.as_ref().map(|found| found.id);
        for MatchCandidate { key, end, hasher: leading, .. } in self.candidates(scope, body, known).into_iter().rev() {
            let found = self.match_key(key, (end, &leading), scope);
            let is_end = found.as_ref().is_some_and(|found| found.tier == LookupTier::Leading);
            best = found.into_iter().chain(best).max_by_key(CheckpointMatch::matched_bytes);
            if is_end {
                break;
            }
        }
        best
    }

    /// Returns the checkpoints that share leading bytes with `body`, except `known`. Each appears once, under its
    /// longest common beginning, so that it is compared once. Longest last.
    pub(crate) fn candidates<'a>(&self, scope: u128, body: &'a [u8], known: Option<u64>) -> Vec<MatchCandidate<'a>> {
        let mut leading = BodyPrefixHasher::new(body);
        let mut candidates: Vec<MatchCandidate<'a>> = Vec::new();
        for end in (0..).map_while(lead_bytes) {
            let Some(key) = leading.digest(end).map(|digest| digest ^ scope) else { break };
            let Some(id) = self.lock_index().by_key.get(&key).copied() else { break };
            if known != Some(id) {
                candidates.retain(|earlier| earlier.id != id);
                candidates.push(MatchCandidate { key, id, end, hasher: leading.clone() });
            }
        }
        candidates
    }

    fn match_key<'a>(
        &self,
        key: u128,
        (checked, leading): (usize, &BodyPrefixHasher<'a>),
        scope: u128,
    ) -> Option<CheckpointMatch<'a>> {
        let (id, checkpoint) = self.lock_index().get_and_touch(key).filter(|(_, trail)| trail.scope == scope)?;
        let (known, leading) = checkpoint.deepest_match(checked, leading)?;
        let tier = if known + 1 == checkpoint.boundaries.len() { LookupTier::Leading } else { LookupTier::Segment };
        Some(CheckpointMatch { checkpoint, id, boundary: known, hasher: leading, tier })
    }

    pub(crate) fn remove(&self, found: &CheckpointMatch<'_>) {
        self.lock_index().remove(found.id);
    }

    /// Stores a tenant's checkpoint and replaces the one it extends.
    pub(crate) fn insert(
        &self,
        tenant: &str,
        trail: Arc<ConversationCheckpoint>,
        (session, replaced): (Option<u128>, Option<&CheckpointMatch<'_>>),
    ) {
        let bytes = trail.memory_bytes();
        let mut index = self.lock_index();
        // Another step of the conversation may have replaced it already.
        let replaced = replaced.filter(|found| index.contains(found));
        if let Some(old) = replaced.map(|found| found.id) {
            if index.checkpoints.bytes() + bytes <= self.max_bytes && index.replace(old, (&trail, bytes), session) {
                return;
            }
            index.remove(old);
        }
        index.insert(tenant, (trail, bytes), session);
    }
}

/// A checkpoint that shares leading bytes with a body and must still be compared.
pub(crate) struct MatchCandidate<'a> {
    /// Lookup key of the shared beginning, and the offset where it ends.
    key: u128,
    pub(crate) end: usize,
    id: u64,
    hasher: BodyPrefixHasher<'a>,
}

impl CheckpointMatch<'_> {
    fn matched_bytes(&self) -> usize {
        self.checkpoint.boundaries[self.boundary].body_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation_checkpoint::tests::checkpoint;

    const BODY: [u8; 4000] = [7; 4000];

    fn check(conversations: &ConversationCache, expected: &[&Arc<ConversationCheckpoint>]) {
        let index = conversations.lock_index();
        let mut kept: Vec<_> = index.checkpoints.iter().map(|(_, slot)| slot.checkpoint.clone()).collect();
        kept.sort_by_key(|trail| trail.boundaries.last().unwrap().body_bytes);
        assert!(
            kept.len() == expected.len() && kept.iter().zip(expected).all(|(kept, trail)| Arc::ptr_eq(kept, trail))
        );
        assert_eq!(index.checkpoints.bytes(), kept.iter().map(|trail| trail.memory_bytes()).sum::<usize>());
        assert!(index.by_key.values().all(|id| index.checkpoints.contains(id)));
    }

    #[test]
    fn extended_checkpoint_replaces_its_predecessor_and_gains_keys() {
        let conversations = ConversationCache::new(Bytes(1 << 20));
        let [first, second] = [&[600][..], &[600, 3000]].map(|ends| Arc::new(checkpoint(&BODY, ends)));
        conversations.insert("", first.clone(), (Some(1), None));
        check(&conversations, &[&first]);
        let found = conversations.find(0, Some(1), &BODY).unwrap();
        conversations.insert("", second.clone(), (Some(1), Some(&found)));
        check(&conversations, &[&second]);
        assert_eq!(conversations.lock_index().by_key.len(), 1 + second.lead_digests.len());
        let unnamed = conversations.find(0, None, &BODY).unwrap();
        assert!(Arc::ptr_eq(&unnamed.checkpoint, &second) && unnamed.tier == LookupTier::Leading);
        conversations.remove(&unnamed);
        check(&conversations, &[]);
        assert!(conversations.lock_index().by_key.is_empty());
    }

    #[test]
    fn concurrent_extension_does_not_replace_the_faster_one() {
        let conversations = ConversationCache::new(Bytes(1 << 20));
        let [first, quick, slow] =
            [&[600][..], &[600, 900], &[600, 3000]].map(|ends| Arc::new(checkpoint(&BODY, ends)));
        conversations.insert("", first, (Some(1), None));
        let [one, other] = [0, 0].map(|_| conversations.find(0, Some(1), &BODY).unwrap());
        conversations.insert("", quick.clone(), (Some(1), Some(&one)));
        conversations.insert("", slow.clone(), (Some(1), Some(&other)));
        check(&conversations, &[&quick, &slow]);
        assert!(Arc::ptr_eq(&conversations.find(0, Some(1), &BODY).unwrap().checkpoint, &slow));
    }

    #[test]
    fn checkpoint_with_different_keys_is_inserted_anew() {
        let conversations = ConversationCache::new(Bytes(1 << 20));
        let [first, second] = [&[600][..], &[600, 3000]].map(|ends| Arc::new(checkpoint(&BODY, ends)));
        conversations.insert("", first, (None, None));
        let found = conversations.find(0, None, &BODY).unwrap();
        conversations.insert("", second.clone(), (Some(1), Some(&found)));
        check(&conversations, &[&second]);
        assert!(conversations.find(0, Some(1), &BODY).is_some());
        let bound = conversations.memory_bytes();
        let full = ConversationCache::new(bound);
        full.insert("", second, (Some(1), None));
        let found = full.find(0, Some(1), &BODY).unwrap();
        let longer = Arc::new(checkpoint(&BODY, &[600, 3000, 3999]));
        full.insert("", longer, (Some(1), Some(&found)));
        check(&full, &[]);
    }
}
