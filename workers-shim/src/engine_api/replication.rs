//! Copies a sealed prefix between unmodified engines: a prefill leg at the holder and a decode leg at the target, both
//! with the same token ids up to a block boundary, and an answer of one token.
//!
//! The ids must be equal in both legs: parameters of another prompt yield wrong text with status 200.

use std::io::Write as _;

use bytes::Bytes;

use super::answer::HandoffParams;
use super::kv::{KvTransfer, LegFields};
use super::request::text;

/// The engine's path for both legs.
pub const PATH: &str = "/v1/completions";

/// A prefix to copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplicationRequest<'a> {
    /// The engines' name of the model or adapter.
    pub model: &'a str,
    /// Token ids of whole blocks from the start of the prompt.
    pub tokens: &'a [u32],
    /// The cache salt that the client's requests carry.
    pub salt: Option<&'a str>,
}

/// Builds the leg at the holder. The [`HandoffParams`] of its answer go into [`target_leg`] with the same `replica`.
pub fn source_leg(replica: &ReplicationRequest<'_>, transfer: &KvTransfer) -> Bytes {
    body(replica, transfer.connector.dialect().source_fields(&transfer.handshake))
}

/// Builds the leg at the target; once it answers, the prefix is in its cache.
pub fn target_leg(
    replica: &ReplicationRequest<'_>,
    (transfer, handoff): (&KvTransfer, Option<HandoffParams>),
) -> Bytes {
    body(replica, transfer.connector.dialect().target_fields(&transfer.handshake, handoff))
}

fn body(replica: &ReplicationRequest<'_>, fields: LegFields) -> Bytes {
    let mut out = Vec::with_capacity(replica.tokens.len() * 7 + 1024);
    out.extend_from_slice(b"{\"model\":");
    out.extend_from_slice(&text(replica.model));
    out.extend_from_slice(b",\"prompt\":[");
    for (position, token) in replica.tokens.iter().enumerate() {
        if position > 0 {
            out.push(b',');
        }
        write!(out, "{token}").expect("writing to memory cannot fail");
    }
    out.extend_from_slice(b"],\"max_tokens\":1,\"temperature\":0,\"ignore_eos\":true,\"stream\":false");
    if let Some(salt) = replica.salt {
        out.extend_from_slice(b",\"cache_salt\":");
        out.extend_from_slice(&text(salt));
    }
    for (name, value) in fields {
        out.extend_from_slice(b",");
        out.extend_from_slice(&text(name));
        out.extend_from_slice(b":");
        out.extend_from_slice(&value);
    }
    out.push(b'}');
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_api::{KvConnector, answer::AnswerSummary};

    #[test]
    fn both_replication_legs_send_the_same_tokens_and_generate_one() {
        let replica = ReplicationRequest { model: "a\"b", tokens: &[1, 20, 300], salt: Some("5a") };
        let nixl = KvTransfer { connector: KvConnector::Nixl, ..KvTransfer::default() };
        let answer = br#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_request_id":"r","x":[1]}}"#;
        let handoff = AnswerSummary::read(&Bytes::from_static(answer)).unwrap().handoff.unwrap();
        let read = |body: Bytes| serde_json::from_slice::<serde_json::Value>(&body).unwrap();
        let (mut p, mut d) = (read(source_leg(&replica, &nixl)), read(target_leg(&replica, (&nixl, Some(handoff)))));
        let parameters = |body: &mut serde_json::Value| body.as_object_mut().unwrap().remove("kv_transfer_params");
        assert_eq!(parameters(&mut p), Some(serde_json::json!({"do_remote_decode": true, "do_remote_prefill": false})));
        let handed = serde_json::json!({"do_remote_prefill": true, "remote_request_id": "r", "x": [1]});
        assert_eq!(parameters(&mut d), Some(handed));
        assert_eq!(p, d);
        let expected = serde_json::json!({
            "model": "a\"b", "prompt": [1, 20, 300], "max_tokens": 1, "temperature": 0, "ignore_eos": true, "stream": false, "cache_salt": "5a"
        });
        assert_eq!(p, expected);
    }
}
