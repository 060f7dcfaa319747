//! Names of what is remembered. The tenant is part of every name, so that nothing is ever looked up across tenants.

use std::sync::Arc;

use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::TenantId;

/// What is remembered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum CacheEntryKind {
    /// Which worker made a response.
    Maker,
    /// Which tenant a response belongs to; the same key whoever asks.
    Holder,
    /// What a response was made of, and what it said.
    Transcript,
    /// Token ids of a session's prompt so far.
    Checkpoint,
    /// What a tenant may still use.
    Quota,
    /// What was charged for a request that may be sent again.
    Charge,
}

/// Version of everything that is written; another version's values are not seen.
const VERSION: u32 = 1;

/// The name of one thing.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct CacheKey {
    /// What it is.
    pub kind: CacheEntryKind,
    /// Whose it is.
    pub tenant: TenantId,
    /// Which one.
    pub name: Arc<str>,
}

impl CacheKey {
    /// Longest name; longer ones are not remembered.
    pub const MAX_NAME_BYTES: usize = 128;

    /// The name of one of `tenant`'s things.
    pub fn new(kind: CacheEntryKind, tenant: &TenantId, name: &str) -> Self {
        Self { kind, tenant: tenant.clone(), name: name.into() }
    }

    /// The name of something that belongs to no tenant yet.
    pub fn without_tenant(kind: CacheEntryKind, name: &str) -> Self {
        Self::new(kind, &TenantId("".into()), name)
    }

    /// Whether it is short enough to be remembered.
    pub fn is_cacheable(&self) -> bool {
        self.name.len() <= Self::MAX_NAME_BYTES && self.tenant.0.len() <= Self::MAX_NAME_BYTES
    }

    /// As Redis knows it. The tenant's length stands before it, so that no two keys read alike.
    pub fn redis_key(&self, namespace: &str) -> String {
        let Self { kind, tenant, name } = self;
        format!("{}:{}:{}:{tenant}:{name}", namespace_prefix(namespace), kind.as_ref(), tenant.0.len())
    }
}

pub(super) fn namespace_prefix(namespace: &str) -> String {
    format!("ownerserve:{VERSION}:{namespace}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_distinct_by_tenant_and_kind() {
        let key = |kind, tenant: &str, name| CacheKey::new(kind, &TenantId(tenant.into()), name).redis_key("c");
        assert_eq!(key(CacheEntryKind::Maker, "a", "resp_1"), "ownerserve:1:c:maker:1:a:resp_1");
        assert_ne!(key(CacheEntryKind::Maker, "a:b", "c"), key(CacheEntryKind::Maker, "a", "b:c"));
        assert_ne!(key(CacheEntryKind::Maker, "a", "x"), key(CacheEntryKind::Transcript, "a", "x"));
    }

    #[test]
    fn overlong_names_are_not_cached() {
        let key = |name: &str| CacheKey::new(CacheEntryKind::Maker, &TenantId::default(), name);
        assert!(key(&"x".repeat(128)).is_cacheable());
        assert!(!key(&"x".repeat(129)).is_cacheable());
    }
}
