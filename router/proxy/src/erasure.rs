//! Erasure of people's texts: transcripts of stored responses, the records of their workers, and token checkpoints.

use std::collections::{HashMap, HashSet};

use vocabulary::{SessionId, TenantId};

use crate::shared_cache::{CacheEntryKind, CacheKey, PurgeCount, PurgeError, SharedCache};
use crate::stored_responses::transcript::TranscriptHeader;

/// Which data to erase.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErasureScope {
    /// All data of the tenant.
    Tenant,
    /// One session of the tenant: the responses created in it, all that follow them, and its checkpoint.
    Session(SessionId),
}

/// Erases what this router and Redis store; returns how many values there were.
pub async fn erase(state: &SharedCache, tenant: &TenantId, whose: ErasureScope) -> Result<PurgeCount, PurgeError> {
    match whose {
        ErasureScope::Tenant => state.purge(tenant).await,
        ErasureScope::Session(session) => {
            state.purge_some(tenant, TranscriptHeader::read, |kept| session_keys(kept, session)).await
        }
    }
}

fn session_keys(kept: &[(CacheKey, Option<TranscriptHeader>)], session: SessionId) -> Vec<CacheKey> {
    let mut following: HashMap<&str, Vec<&str>> = HashMap::new();
    let (mut open, mut ids) = (Vec::new(), HashSet::new());
    for (key, origin) in kept.iter().filter(|(key, _)| key.kind == CacheEntryKind::Transcript) {
        let Some(origin) = origin else { continue };
        if origin.session() == Some(session) {
            open.push(&*key.name);
        }
        if let Some(previous) = origin.previous.as_deref() {
            following.entry(previous).or_default().push(&key.name);
        }
    }
    while let Some(id) = open.pop() {
        if ids.insert(id) {
            open.extend(following.get(id).into_iter().flatten());
        }
    }
    let checkpoint = session.to_string();
    let is_wanted = |key: &CacheKey| match key.kind {
        CacheEntryKind::Checkpoint => *key.name == *checkpoint,
        _ => ids.contains(&*key.name),
    };
    kept.iter().filter(|(key, _)| is_wanted(key)).map(|(key, _)| key.clone()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_session_scope_erases_its_responses_their_successors_and_its_checkpoint() {
        let tenant = TenantId("t".into());
        let key = |kind, name: &str| CacheKey::new(kind, &tenant, name);
        let transcript = |name: &str, previous: Option<&str>, session: Option<u128>| {
            let session = session.map(|session| SessionId(session).to_string());
            let value = json!({"previous": previous, "session": session, "items": [{"x": 1}]}).to_string();
            (key(CacheEntryKind::Transcript, name), TranscriptHeader::read(value.as_bytes()))
        };
        let kept = [
            transcript("resp_3", Some("resp_2"), None),
            transcript("resp_2", Some("resp_1"), None),
            transcript("resp_1", None, Some(7)),
            transcript("resp_4", None, Some(8)),
            transcript("resp_5", Some("resp_4"), None),
            (key(CacheEntryKind::ResponseWorker, "resp_2"), None),
            (key(CacheEntryKind::ResponseWorker, "resp_4"), None),
            (key(CacheEntryKind::Checkpoint, &SessionId(7).to_string()), None),
            (key(CacheEntryKind::Checkpoint, &SessionId(8).to_string()), None),
        ];
        let names: Vec<_> = session_keys(&kept, SessionId(7)).iter().map(|key| key.name.to_string()).collect();
        assert_eq!(names, ["resp_3", "resp_2", "resp_1", "resp_2", &SessionId(7).to_string()]);
        assert!(session_keys(&kept, SessionId(9)).is_empty());
    }
}
