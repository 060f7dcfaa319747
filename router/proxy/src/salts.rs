//! Cache salts that isolate tenants inside the engines: no tenant's request finds another tenant's prefix.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use ring::hmac;
use vocabulary::TenantId;

use vocabulary::Secret;

/// Secret where none is configured. A client's own salt is always replaced, so it need not be unguessable to be safe
/// behind this proxy; a configured secret is for engines that others can reach, too.
const DEFAULT_SECRET: &str = "ownerserve cache salt";

/// One salt per tenant: HMAC-SHA256 of its name, in hex.
pub struct CacheSalts {
    key: Option<hmac::Key>,
    cache: Mutex<HashMap<TenantId, Arc<str>>>,
}

impl std::fmt::Debug for CacheSalts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Salts").field("separate", &self.key.is_some()).finish_non_exhaustive()
    }
}

impl CacheSalts {
    /// Derives the salts from `secret`.
    pub fn per_tenant(secret: Option<&Secret>) -> Self {
        let secret = secret.map_or(DEFAULT_SECRET, Secret::expose);
        Self { key: Some(hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes())), cache: Mutex::default() }
    }

    /// Returns no salts, for a single tenant.
    pub fn none() -> Self {
        Self { key: None, cache: Mutex::default() }
    }

    /// Returns the tenant's salt; `None` for a single tenant. Tenants come from the keys file, so there are few.
    pub fn of(&self, tenant: &TenantId) -> Option<Arc<str>> {
        let key = self.key.as_ref()?;
        let mut cache = self.cache.lock();
        if let Some(salt) = cache.get(tenant) {
            return Some(salt.clone());
        }
        let tag = hmac::sign(key, tenant.0.as_bytes());
        let salt: Arc<str> = tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>().into();
        cache.insert(tenant.clone(), salt.clone());
        Some(salt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenant_has_its_own_stable_salt() {
        let salts = CacheSalts::per_tenant(Some(&Secret::from("s")));
        let (a, b) = (TenantId("a".into()), TenantId("b".into()));
        assert_eq!(salts.of(&a), salts.of(&a));
        assert_ne!(salts.of(&a), salts.of(&b));
        assert_eq!(salts.of(&a).unwrap().len(), 64);
        assert_ne!(CacheSalts::per_tenant(None).of(&a), salts.of(&a));
        assert_eq!(CacheSalts::none().of(&a), None);
    }
}
