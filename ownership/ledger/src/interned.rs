//! What many records share, kept once: origins of extents, names in sessions. No part of the state.

use std::sync::Arc;

use imbl::OrdMap;
use vocabulary::{ModelId, PrefixId, TenantId};

use crate::artifact::{Origin, Scope};
use crate::record::Session;

/// Origins by root and scope, and names, each with the number of records that hold it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interned {
    origins: OrdMap<(PrefixId, Scope), (Arc<Origin>, u64)>,
    tenants: OrdMap<TenantId, u64>,
    models: OrdMap<ModelId, u64>,
}

impl Interned {
    /// Makes a new record's origin the one that others hold. Of two that share root and scope but differ, the first is
    /// kept once.
    pub(crate) fn share(&mut self, origin: &mut Arc<Origin>) {
        let key = (origin.root, origin.scope());
        match self.origins.get_mut(&key) {
            Some((known, held)) => {
                if known == origin {
                    *origin = known.clone();
                    *held += 1;
                }
            }
            None => drop(self.origins.insert(key, (origin.clone(), 1))),
        }
    }

    /// A record that held an origin is gone.
    pub(crate) fn release(&mut self, origin: &Arc<Origin>) {
        let key = (origin.root, origin.scope());
        let Some((known, held)) = self.origins.get_mut(&key) else { return };
        if Arc::ptr_eq(known, origin) {
            *held -= 1;
            if *held == 0 {
                self.origins.remove(&key);
            }
        }
    }

    /// Makes a new session's names those that others hold.
    pub(crate) fn share_names(&mut self, session: &mut Session) {
        share(&mut self.tenants, &mut session.tenant);
        share(&mut self.models, &mut session.model);
    }

    /// A session is gone.
    pub(crate) fn release_names(&mut self, session: &Session) {
        release(&mut self.tenants, &session.tenant);
        release(&mut self.models, &session.model);
    }
}

fn share<N: Ord + Clone>(names: &mut OrdMap<N, u64>, name: &mut N) {
    let held = names.get_key_value(name).map(|(known, held)| (known.clone(), *held));
    let (known, held) = held.unwrap_or_else(|| (name.clone(), 0));
    *name = known.clone();
    names.insert(known, held + 1);
}

fn release<N: Ord + Clone>(names: &mut OrdMap<N, u64>, name: &N) {
    match names.get(name).copied().unwrap_or(0) {
        0 | 1 => drop(names.remove(name)),
        held => drop(names.insert(name.clone(), held - 1)),
    }
}

impl PartialEq for Interned {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Interned {}
