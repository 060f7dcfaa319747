//! Session keys: the headers and body fields by which agents name their sessions.
//!
//! This module only reads names. The ledger knows a session's head and owner.

use http::HeaderMap;

use crate::receipt::SessionKeySource;

/// Longest name that is used; bytes beyond it do not distinguish sessions.
pub const MAX_KEY_BYTES: usize = 512;

/// A session as its client names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionKey {
    /// The name, at most `MAX_KEY_BYTES` bytes.
    pub name: String,
    /// Name of the session that spawned this one.
    pub parent: Option<String>,
    /// Where the name was found.
    pub source: SessionKeySource,
}

/// Header names, the most trusted first, each with its source.
const HEADERS: [(&str, SessionKeySource); 7] = [
    ("x-session-id", SessionKeySource::SessionHeader),
    ("x-claude-code-session-id", SessionKeySource::ClaudeCode),
    ("session-id", SessionKeySource::Codex),
    ("session_id", SessionKeySource::Codex),
    ("x-session-affinity", SessionKeySource::Affinity),
    ("x-dynamo-session-id", SessionKeySource::Dynamo),
    ("x-litellm-session-id", SessionKeySource::LiteLlm),
];

impl SessionKey {
    /// Returns the name in the headers, else the one in the body (`in_body`).
    pub fn find(headers: &HeaderMap, in_body: Option<&str>) -> Option<Self> {
        HEADERS
            .iter()
            .find_map(|(header, source)| Some(Self::new(text(headers, header)?, headers, *source)))
            .or_else(|| Some(Self::new(in_body.filter(|name| !name.is_empty())?, headers, SessionKeySource::Body)))
    }

    fn new(name: &str, headers: &HeaderMap, source: SessionKeySource) -> Self {
        let mut key = Self { name: truncate(name).to_owned(), parent: None, source };
        match source {
            // Sub-agents share their session's header, but each is a conversation of its own.
            SessionKeySource::ClaudeCode => {
                if let Some(agent) = text(headers, "x-claude-code-agent-id") {
                    key.name = format!("{}/{}", key.name, truncate(agent));
                    key.parent = Some(match text(headers, "x-claude-code-parent-agent-id") {
                        Some(parent) => format!("{}/{}", truncate(name), truncate(parent)),
                        None => truncate(name).to_owned(),
                    });
                }
            }
            _ => key.parent = text(headers, "x-parent-session-id").map(|parent| truncate(parent).to_owned()),
        }
        key
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim).filter(|value| !value.is_empty())
}

/// Returns the first `MAX_KEY_BYTES` bytes, cut at a character boundary.
fn truncate(name: &str) -> &str {
    &name[..name.floor_char_boundary(MAX_KEY_BYTES)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(headers: &[(&'static str, &str)], body: Option<&str>) -> Option<(String, Option<String>, SessionKeySource)> {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        SessionKey::find(&headers, body).map(|key| (key.name, key.parent, key.source))
    }

    #[test]
    fn the_most_trusted_header_names_the_session() {
        let both = [("x-litellm-session-id", "b"), ("x-session-id", "a")];
        assert_eq!(key(&both, Some("c")), Some(("a".into(), None, SessionKeySource::SessionHeader)));
        assert_eq!(key(&both[..1], Some("c")), Some(("b".into(), None, SessionKeySource::LiteLlm)));
    }

    #[test]
    fn a_body_field_names_the_session_when_no_header_does() {
        assert_eq!(key(&[("x-session-id", " ")], Some("c")), Some(("c".into(), None, SessionKeySource::Body)));
        assert_eq!(key(&[], Some("")), None);
        assert_eq!(key(&[], None), None);
    }

    #[test]
    fn a_sub_agent_is_a_separate_session_with_a_parent() {
        let agent = [("x-claude-code-session-id", "s"), ("x-claude-code-agent-id", "x")];
        assert_eq!(key(&agent, None), Some(("s/x".into(), Some("s".into()), SessionKeySource::ClaudeCode)));
        let nested = [agent[0], agent[1], ("x-claude-code-parent-agent-id", "y")];
        assert_eq!(key(&nested, None), Some(("s/x".into(), Some("s/y".into()), SessionKeySource::ClaudeCode)));
        let opencode = [("x-session-affinity", "child"), ("x-parent-session-id", "p")];
        assert_eq!(key(&opencode, None), Some(("child".into(), Some("p".into()), SessionKeySource::Affinity)));
    }

    #[test]
    fn a_long_session_key_is_truncated_at_a_character() {
        let long = "é".repeat(MAX_KEY_BYTES);
        let (name, ..) = key(&[], Some(&long)).unwrap();
        assert_eq!(name.len(), MAX_KEY_BYTES);
    }
}
