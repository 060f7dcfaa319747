//! Identifiers of the entities in the cluster. Each kind of id has its own type.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_64;

use crate::hex::hex_id;

/// Error for a text that does not parse as the expected kind of id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no such id: accepted is {expected} and {digits} hexadecimal digits, as lists show it")]
pub struct ParseIdError {
    /// Prefix with which an id of the expected kind begins.
    pub expected: &'static str,
    /// Number of hexadecimal digits that must follow.
    pub digits: usize,
    /// Start of the text that was given.
    pub text: String,
}

/// Identifies an engine endpoint. Derived from its URL, so all routers agree on a worker's id without coordination.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u64);
hex_id!(WorkerId, u64, "w-");

impl WorkerId {
    /// Returns the id of the worker at `endpoint` (scheme, host and port, without a trailing slash).
    pub fn of_endpoint(endpoint: &str) -> Self {
        Self(xxh3_64(endpoint.trim_end_matches('/').as_bytes()))
    }
}

/// One life of an engine process, identified by its start time (vLLM: `process_start_time_seconds`, in microseconds).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

/// A data-parallel rank inside a worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default)]
#[serde(transparent)]
pub struct DpRank(pub u16);

/// Owner of a prefix: one rank of one incarnation of one worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
pub struct Owner {
    /// Worker (engine endpoint).
    pub worker: WorkerId,
    /// Incarnation of that worker.
    pub incarnation: Incarnation,
    /// Data-parallel rank inside the worker.
    pub rank: DpRank,
}

/// Identifies a voter or learner of the quorum. Ids are never reused.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default, derive_more::Display,
)]
#[serde(transparent)]
pub struct NodeId(pub u64);

/// Identifies a writer to the ledger: one boot of one node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u128);
hex_id!(ClientId, u128, "c-");

/// Sequence number of a client's command. A repeated serial returns the first outcome.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default)]
#[serde(transparent)]
pub struct ClientSerial(pub u64);

/// Identifies a user's conversation, scoped by tenant and model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u128);
hex_id!(SessionId, u128, "s-");

impl SessionId {
    /// Returns the session that a client calls `key`: the first 128 bits of a SHA-256. The same key of another tenant or
    /// model is a different session, and nobody can compute a key that names another's.
    pub fn of_key(tenant: &TenantId, model: &ModelId, key: &str) -> Self {
        let mut digest = Sha256::new();
        for part in [&*tenant.0, &*model.0, key] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        let half: [u8; 16] = std::array::from_fn({
            let digest = digest.finalize();
            move |at| digest[at]
        });
        Self(u128::from_be_bytes(half))
    }
}

/// Identifies a sealed, immutable range of blocks of one prefix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArtifactId(pub u128);
hex_id!(ArtifactId, u128, "a-");

/// Identifies a group of related prefixes (a repository, a document).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArtifactGroupId(pub u128);
hex_id!(ArtifactGroupId, u128, "g-");

/// Identifies one client request; also sent to engines as `X-Request-Id`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u128);
hex_id!(RequestId, u128, "req-");

/// Name of a tenant. Nothing is shared across tenants.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, derive_more::Display)]
#[serde(transparent)]
pub struct TenantId(pub Arc<str>);

impl Default for TenantId {
    /// Returns the only tenant of a deployment without API keys.
    fn default() -> Self {
        Self(Arc::from("default"))
    }
}

/// Name of a served model, as clients write it in `model`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, derive_more::Display)]
#[serde(transparent)]
pub struct ModelId(pub Arc<str>);

impl From<&str> for ModelId {
    fn from(name: &str) -> Self {
        Self(Arc::from(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_round_trips_through_its_text() {
        let id = SessionId(0xabc);
        assert_eq!(id.to_string(), "s-00000000000000000000000000000abc");
        assert_eq!(id.to_string().parse::<SessionId>().unwrap(), id);
        let (long, signed) = (format!("s-{:033x}", 1), format!("s-+{:031x}", 1));
        for bad in ["", "s-", "w-12", "s-xyz", &long, &signed] {
            assert!(bad.parse::<SessionId>().is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn an_abbreviated_id_is_refused() {
        let short = "s-95b041be".parse::<SessionId>().unwrap_err();
        assert!(short.to_string().contains("accepted is s- and 32 hexadecimal digits"), "{short}");
        assert!("w-2a".parse::<WorkerId>().is_err());
        assert_eq!("w-000000000000002A".parse(), Ok(WorkerId(42)), "as people write digits, too");
    }

    #[test]
    fn a_session_id_is_the_beginning_of_a_sha_256() {
        // Of each part's length (8 bytes, little endian) and the part; computed by another implementation.
        let id = SessionId::of_key(&TenantId::default(), &ModelId::from("tiny"), "k");
        assert_eq!(id.to_string(), "s-399f7c23dd2d35626f98b41028564add");
    }

    #[test]
    fn a_session_key_is_scoped_by_tenant_and_model() {
        let (a, b) = (TenantId(Arc::from("a")), TenantId(Arc::from("ab")));
        let (m, n) = (ModelId::from("bm"), ModelId::from("m"));
        assert_eq!(SessionId::of_key(&a, &m, "k"), SessionId::of_key(&a, &m, "k"));
        assert_ne!(SessionId::of_key(&a, &m, "k"), SessionId::of_key(&b, &n, "k"));
        assert_ne!(SessionId::of_key(&a, &m, "k"), SessionId::of_key(&a, &m, "l"));
    }

    #[test]
    fn a_trailing_slash_does_not_change_the_worker_id() {
        assert_eq!(WorkerId::of_endpoint("http://a:1/"), WorkerId::of_endpoint("http://a:1"));
        assert_ne!(WorkerId::of_endpoint("http://a:1"), WorkerId::of_endpoint("http://a:2"));
    }
}
