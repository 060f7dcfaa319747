//! What is kept of people's words, and forgetting it: transcripts of stored responses, their makers, and token checkpoints.

use std::collections::{HashMap, HashSet};

use vocabulary::{SessionId, TenantId};

use crate::resources::transcript::Origin;
use crate::soft_state::{Key, Kind, NotForgotten, Purged, SoftState};

/// Whose words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Whose {
    /// All of the tenant's.
    Tenants,
    /// Those of one of its sessions: responses that were made in it, all that follow them, and its checkpoint.
    Sessions(SessionId),
}

/// Forgets what this router and Redis keep; how many values it was.
pub(crate) async fn forget(state: &SoftState, tenant: &TenantId, whose: Whose) -> Result<Purged, NotForgotten> {
    match whose {
        Whose::Tenants => state.purge(tenant).await,
        Whose::Sessions(session) => state.purge_some(tenant, Origin::read, |kept| of_session(kept, session)).await,
    }
}

fn of_session(kept: &[(Key, Option<Origin>)], session: SessionId) -> Vec<Key> {
    let mut following: HashMap<&str, Vec<&str>> = HashMap::new();
    let (mut open, mut ids) = (Vec::new(), HashSet::new());
    for (key, origin) in kept.iter().filter(|(key, _)| key.kind == Kind::Transcript) {
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
    let is_wanted = |key: &Key| match key.kind {
        Kind::Checkpoint => *key.name == *checkpoint,
        _ => ids.contains(&*key.name),
    };
    kept.iter().filter(|(key, _)| is_wanted(key)).map(|(key, _)| key.clone()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_sessions_words_are_its_responses_what_follows_them_and_its_checkpoint() {
        let tenant = TenantId("t".into());
        let key = |kind, name: &str| Key::new(kind, &tenant, name);
        let transcript = |name: &str, previous: Option<&str>, session: Option<u128>| {
            let session = session.map(|session| SessionId(session).to_string());
            let value = json!({"previous": previous, "session": session, "items": [{"x": 1}]}).to_string();
            (key(Kind::Transcript, name), Origin::read(value.as_bytes()))
        };
        let kept = [
            transcript("resp_3", Some("resp_2"), None),
            transcript("resp_2", Some("resp_1"), None),
            transcript("resp_1", None, Some(7)),
            transcript("resp_4", None, Some(8)),
            transcript("resp_5", Some("resp_4"), None),
            (key(Kind::Maker, "resp_2"), None),
            (key(Kind::Maker, "resp_4"), None),
            (key(Kind::Checkpoint, &SessionId(7).to_string()), None),
            (key(Kind::Checkpoint, &SessionId(8).to_string()), None),
        ];
        let names: Vec<_> = of_session(&kept, SessionId(7)).iter().map(|key| key.name.to_string()).collect();
        assert_eq!(names, ["resp_3", "resp_2", "resp_1", "resp_2", &SessionId(7).to_string()]);
        assert!(of_session(&kept, SessionId(9)).is_empty());
    }
}
