//! All sessions, by id, and their digest, which is kept in step with every write.

use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vocabulary::SessionId;
use xxhash_rust::xxh3::xxh3_128;

use crate::radix::Radix;
use crate::record::Session;

type Table = Radix<SessionId, Arc<Session>, 16>;

/// The table. Reads are the map's own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sessions {
    table: Table,
    /// The sum of the records' digests: equal contents have equal sums, however they came about.
    pub(crate) digest: u128,
}

impl Sessions {
    pub(crate) fn insert(&mut self, session: Arc<Session>) {
        self.digest = self.digest.wrapping_add(digest(&session));
        if let Some(old) = self.table.insert(session.id, session) {
            self.digest = self.digest.wrapping_sub(digest(&old));
        }
    }

    pub(crate) fn remove(&mut self, id: SessionId) -> Option<Arc<Session>> {
        let old = self.table.remove(&id)?;
        self.digest = self.digest.wrapping_sub(digest(&old));
        Some(old)
    }
}

/// Of the record as it is written.
fn digest(session: &Session) -> u128 {
    let mut bytes = Vec::with_capacity(384);
    rmp_serde::encode::write(&mut bytes, session).expect("a record encodes into memory");
    xxh3_128(&bytes)
}

impl Deref for Sessions {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.table
    }
}

impl PartialEq for Sessions {
    fn eq(&self, other: &Self) -> bool {
        self.table == other.table
    }
}

impl Eq for Sessions {}

impl FromIterator<Arc<Session>> for Sessions {
    fn from_iter<I: IntoIterator<Item = Arc<Session>>>(sessions: I) -> Self {
        let mut all = Self::default();
        sessions.into_iter().for_each(|session| all.insert(session));
        all
    }
}

impl Serialize for Sessions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.table.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Sessions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let table = Table::deserialize(deserializer)?;
        let digest = table.iter().fold(0u128, |sum, (_, session)| sum.wrapping_add(digest(session)));
        Ok(Self { table, digest })
    }
}
