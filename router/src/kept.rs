//! What is kept of people's words, and forgetting it: transcripts of stored responses, their makers, and token checkpoints.

use std::collections::HashSet;

use bytes::Bytes;
use vocabulary::{SessionId, TenantId};

use crate::resources::transcript::Origin;
use crate::soft_state::{Key, Kind, NotForgotten, SoftState};

/// Whose words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Whose {
    /// All of the tenant's.
    Tenants,
    /// Those of one of its sessions: responses that were made in it, all that follow them, and its checkpoint.
    Sessions(SessionId),
}

/// Forgets what this router and Redis keep; how many values it was.
pub(crate) async fn forget(state: &SoftState, tenant: &TenantId, whose: Whose) -> Result<usize, NotForgotten> {
    let wanted = |kept: &[(Key, Bytes)]| match whose {
        Whose::Tenants => kept.iter().map(|(key, _)| key.clone()).collect(),
        Whose::Sessions(session) => of_session(kept, session),
    };
    state.purge(tenant, wanted).await
}

fn of_session(kept: &[(Key, Bytes)], session: SessionId) -> Vec<Key> {
    let transcripts = kept.iter().filter(|(key, _)| key.kind == Kind::Transcript);
    let origins: Vec<_> = transcripts.filter_map(|(key, value)| Some((&*key.name, Origin::read(value)?))).collect();
    let mut ids: HashSet<&str> =
        origins.iter().filter(|(_, origin)| origin.session() == Some(session)).map(|(id, _)| *id).collect();
    loop {
        let known = ids.len();
        let follows = |origin: &Origin| origin.previous.as_deref().is_some_and(|id| ids.contains(id));
        let more: Vec<&str> = origins.iter().filter(|(_, origin)| follows(origin)).map(|(id, _)| *id).collect();
        ids.extend(more);
        if ids.len() == known {
            break;
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
            (key(Kind::Transcript, name), Bytes::from(value))
        };
        let kept = [
            transcript("resp_3", Some("resp_2"), None),
            transcript("resp_2", Some("resp_1"), None),
            transcript("resp_1", None, Some(7)),
            transcript("resp_4", None, Some(8)),
            transcript("resp_5", Some("resp_4"), None),
            (key(Kind::Maker, "resp_2"), Bytes::from_static(b"12345678")),
            (key(Kind::Maker, "resp_4"), Bytes::from_static(b"12345678")),
            (key(Kind::Checkpoint, &SessionId(7).to_string()), Bytes::from_static(b"ids")),
            (key(Kind::Checkpoint, &SessionId(8).to_string()), Bytes::from_static(b"ids")),
        ];
        let names: Vec<_> = of_session(&kept, SessionId(7)).iter().map(|key| key.name.to_string()).collect();
        assert_eq!(names, ["resp_3", "resp_2", "resp_1", "resp_2", &SessionId(7).to_string()]);
        assert!(of_session(&kept, SessionId(9)).is_empty());
    }
}
