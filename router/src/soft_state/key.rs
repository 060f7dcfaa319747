//! Names of what is remembered. The tenant is part of every name, so that nothing is ever looked up across tenants.

use std::sync::Arc;

use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::TenantId;

/// What is remembered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Kind {
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
pub struct Key {
    /// What it is.
    pub kind: Kind,
    /// Whose it is.
    pub tenant: TenantId,
    /// Which one.
    pub name: Arc<str>,
}

impl Key {
    /// Longest name; longer ones are not remembered.
    pub const LONGEST: usize = 128;

    /// The name of one of `tenant`'s things.
    pub fn new(kind: Kind, tenant: &TenantId, name: &str) -> Self {
        Self { kind, tenant: tenant.clone(), name: name.into() }
    }

    /// The name of something that belongs to no tenant yet.
    pub fn of_nobody(kind: Kind, name: &str) -> Self {
        Self::new(kind, &TenantId("".into()), name)
    }

    /// Whether it is short enough to be remembered.
    pub fn is_bounded(&self) -> bool {
        self.name.len() <= Self::LONGEST && self.tenant.0.len() <= Self::LONGEST
    }

    /// As Redis knows it. The tenant's length stands before it, so that no two keys read alike.
    pub fn text(&self, namespace: &str) -> String {
        let Self { kind, tenant, name } = self;
        format!("{}:{}:{}:{tenant}:{name}", of_namespace(namespace), kind.as_ref(), tenant.0.len())
    }
}

pub(super) fn of_namespace(namespace: &str) -> String {
    format!("ownerserve:{VERSION}:{namespace}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_tenants_or_kinds_share_a_key() {
        let key = |kind, tenant: &str, name| Key::new(kind, &TenantId(tenant.into()), name).text("c");
        assert_eq!(key(Kind::Maker, "a", "resp_1"), "ownerserve:1:c:maker:1:a:resp_1");
        assert_ne!(key(Kind::Maker, "a:b", "c"), key(Kind::Maker, "a", "b:c"));
        assert_ne!(key(Kind::Maker, "a", "x"), key(Kind::Transcript, "a", "x"));
    }

    #[test]
    fn endless_names_are_not_remembered() {
        let key = |name: &str| Key::new(Kind::Maker, &TenantId::default(), name);
        assert!(key(&"x".repeat(128)).is_bounded());
        assert!(!key(&"x".repeat(129)).is_bounded());
    }
}
