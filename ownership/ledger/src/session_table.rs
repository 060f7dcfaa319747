//! All sessions by id, packed, and their digest, which every write updates.

use std::sync::Arc;

use imbl::OrdMap;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vocabulary::{ArtifactId, LedgerTime, ModelId, SessionId, TenantId};
use xxhash_rust::xxh3::xxh3_128;

use crate::artifact::Scope;
use crate::packed_codec::{PackedReader, PackedWriter};
use crate::radix::RadixMap;
use crate::record::{Session, SessionHead};

const PARENT: u8 = 1;
const OWNER: u8 = 2;

type TenantModel = (TenantId, ModelId);

/// A packed session plus the names that it shares with others.
#[derive(Clone)]
pub(crate) struct PackedSession {
    names: Arc<TenantModel>,
    bytes: Arc<[u8]>,
}

impl PackedSession {
    fn pack(session: &Session, tenant_model: Arc<TenantModel>) -> Self {
        let mut to = PackedWriter(Vec::with_capacity(48 + 56 * session.heads.len()));
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        to.0.push(flag(session.parent.is_some(), PARENT) | flag(session.owner.is_some(), OWNER));
        to.epoch(session.epoch);
        to.number(session.touched.0);
        to.number(session.touched.0.wrapping_sub(session.opened.0));
        session.owner.iter().for_each(|owner| to.owner(*owner));
        session.parent.iter().for_each(|parent| to.id(parent.0));
        to.number(session.heads.len() as u64);
        for head in &session.heads {
            to.point(head.point);
            to.id(head.artifact.0);
            to.0.extend(head.scope.hash().to_le_bytes());
            to.number(session.touched.0.wrapping_sub(head.touched.0));
        }
        Self { names: tenant_model, bytes: to.0.into() }
    }

    fn unpack(&self, id: SessionId) -> Session {
        let mut from = PackedReader(&self.bytes);
        let [flags] = from.array();
        let epoch = from.epoch();
        let touched = from.number();
        let opened = LedgerTime(touched.wrapping_sub(from.number()));
        let owner = (flags & OWNER != 0).then(|| from.owner());
        let parent = (flags & PARENT != 0).then(|| SessionId(from.id()));
        let heads = (0..from.number()).map(|_| SessionHead {
            point: from.point(),
            artifact: ArtifactId(from.id()),
            scope: Scope::from_hash(u64::from_le_bytes(from.array())),
            touched: LedgerTime(touched.wrapping_sub(from.number())),
        });
        let heads = heads.collect();
        let (tenant, model) = (*self.names).clone();
        Session { id, tenant, model, parent, heads, owner, epoch, opened, touched: LedgerTime(touched) }
    }

    fn digest(&self, id: SessionId) -> u128 {
        let (tenant, model) = (self.names.0.0.as_bytes(), self.names.1.0.as_bytes());
        let mut all = Vec::with_capacity(32 + tenant.len() + model.len() + self.bytes.len());
        all.extend(id.0.to_le_bytes());
        all.extend((tenant.len() as u64).to_le_bytes());
        all.extend((model.len() as u64).to_le_bytes());
        for part in [tenant, model, &self.bytes] {
            all.extend(part);
        }
        xxh3_128(&all)
    }
}

#[derive(Clone, Default)]
pub(crate) struct SessionTable {
    table: RadixMap<[u64; 2], PackedSession, 16>,
    /// Tenant and model names in use, each with the number of sessions that use it.
    names: OrdMap<TenantModel, (Arc<TenantModel>, u64)>,
    /// Sum of the records' digests: tables with equal contents have equal sums, whatever their history.
    pub(crate) digest: u128,
}

fn key(id: SessionId) -> [u64; 2] {
    [(id.0 >> 64) as u64, id.0 as u64]
}

fn id([high, low]: [u64; 2]) -> SessionId {
    SessionId(u128::from(high) << 64 | u128::from(low))
}

impl SessionTable {
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn get(&self, id: SessionId) -> Option<Session> {
        self.table.get(&key(id)).map(|stored| stored.unpack(id))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Session> {
        self.table.iter().map(|(key, stored)| stored.unpack(id(*key)))
    }

    pub(crate) fn iter_from(&self, from: SessionId) -> impl Iterator<Item = Session> {
        self.table.iter_from(&key(from)).map(|(key, stored)| stored.unpack(id(*key)))
    }

    pub(crate) fn insert(&mut self, session: &Session) {
        let names = self.intern_names(session);
        let stored = PackedSession::pack(session, names);
        self.digest = self.digest.wrapping_add(stored.digest(session.id));
        if let Some(old) = self.table.insert(key(session.id), stored) {
            self.release_names(session.id, &old);
        }
    }

    pub(crate) fn remove(&mut self, id: SessionId) -> Option<Session> {
        let old = self.table.remove(&key(id))?;
        self.release_names(id, &old);
        Some(old.unpack(id))
    }

    /// Returns the shared copy of the session's tenant and model names, and counts one more user.
    fn intern_names(&mut self, session: &Session) -> Arc<TenantModel> {
        let names = (session.tenant.clone(), session.model.clone());
        if let Some((known, held)) = self.names.get_mut(&names) {
            *held += 1;
            return known.clone();
        }
        let new = Arc::new(names.clone());
        self.names.insert(names, (new.clone(), 1));
        new
    }

    fn release_names(&mut self, id: SessionId, old: &PackedSession) {
        self.digest = self.digest.wrapping_sub(old.digest(id));
        let Some((_, held)) = self.names.get_mut(&*old.names) else { return };
        *held -= 1;
        if *held == 0 {
            self.names.remove(&*old.names);
        }
    }
}

impl PartialEq for SessionTable {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl Eq for SessionTable {}

impl std::fmt::Debug for SessionTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl FromIterator<Session> for SessionTable {
    fn from_iter<I: IntoIterator<Item = Session>>(sessions: I) -> Self {
        let mut all = Self::default();
        sessions.into_iter().for_each(|session| all.insert(&session));
        all
    }
}

impl Serialize for SessionTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len()))?;
        for session in self.iter() {
            map.serialize_entry(&session.id, &session)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for SessionTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SessionTableVisitor;
        impl<'de> serde::de::Visitor<'de> for SessionTableVisitor {
            type Value = SessionTable;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("sessions by id")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<SessionTable, A::Error> {
                let mut all = SessionTable::default();
                while let Some((_, session)) = map.next_entry::<SessionId, Session>()? {
                    all.insert(&session);
                }
                Ok(all)
            }
        }
        deserializer.deserialize_map(SessionTableVisitor)
    }
}
