//! Keys of cached values. The tenant is part of every key, so that nothing is ever looked up across tenants.

use std::sync::Arc;

use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::TenantId;

/// Kind of a cached value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum CacheEntryKind {
    /// The worker that created a response.
    ResponseWorker,
    /// The tenant that a response belongs to; the key does not depend on who asks.
    ResponseTenant,
    /// Input and output of a response.
    Transcript,
    /// Token ids of a session's prompt so far.
    Checkpoint,
    /// What remains of a tenant's quota.
    Quota,
    /// What was charged for a request that may be sent again.
    QuotaCharge,
}

/// Format version of everything that is written; values of other versions are not seen.
const VERSION: u32 = 1;

/// Key of one cached value.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct CacheKey {
    /// Kind of the value.
    pub kind: CacheEntryKind,
    /// Tenant that the value belongs to.
    pub tenant: TenantId,
    /// Name of the value within its kind and tenant.
    pub name: Arc<str>,
}

impl CacheKey {
    /// Longest name; values with longer ones are not cached.
    pub const MAX_NAME_BYTES: usize = 128;

    /// Returns the key for a value of `tenant`.
    pub fn new(kind: CacheEntryKind, tenant: &TenantId, name: &str) -> Self {
        Self { kind, tenant: tenant.clone(), name: name.into() }
    }

    /// Returns the key for a value that belongs to no tenant.
    pub fn without_tenant(kind: CacheEntryKind, name: &str) -> Self {
        Self::new(kind, &TenantId("".into()), name)
    }

    /// Whether it is short enough to be cached.
    pub fn is_cacheable(&self) -> bool {
        self.name.len() <= Self::MAX_NAME_BYTES && self.tenant.0.len() <= Self::MAX_NAME_BYTES
    }

    /// Returns the key in Redis. The tenant is preceded by its length, so that no two keys are equal.
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
        assert_eq!(key(CacheEntryKind::ResponseWorker, "a", "resp_1"), "ownerserve:1:c:response_worker:1:a:resp_1");
        assert_ne!(key(CacheEntryKind::ResponseWorker, "a:b", "c"), key(CacheEntryKind::ResponseWorker, "a", "b:c"));
        assert_ne!(key(CacheEntryKind::ResponseWorker, "a", "x"), key(CacheEntryKind::Transcript, "a", "x"));
    }

    #[test]
    fn overlong_names_are_not_cached() {
        let key = |name: &str| CacheKey::new(CacheEntryKind::ResponseWorker, &TenantId::default(), name);
        assert!(key(&"x".repeat(128)).is_cacheable());
        assert!(!key(&"x".repeat(129)).is_cacheable());
    }
}
