//! Which worker made which stored response, so that later calls about it reach the same one. In memory, bounded,
//! learned from answers as they pass; what is forgotten answers 404.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use vocabulary::{TenantId, WorkerId};

/// Most responses remembered; the least recently used goes first.
const CAPACITY: usize = 100_000;
/// Longest id that is remembered.
const LONGEST_ID: usize = 128;

type Key = (TenantId, Arc<str>);

/// The makers of responses, by tenant and id: nobody reaches another tenant's.
#[derive(Debug)]
pub struct ResponseMakers {
    capacity: usize,
    makers: Mutex<Makers>,
}

#[derive(Debug, Default)]
struct Makers {
    clock: u64,
    by_id: HashMap<Key, (WorkerId, u64)>,
    by_use: BTreeMap<u64, Key>,
}

impl Default for ResponseMakers {
    fn default() -> Self {
        Self::with_capacity(CAPACITY)
    }
}

impl ResponseMakers {
    /// Remembers at most `capacity`.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), makers: Mutex::default() }
    }

    /// `worker` made `id`.
    pub fn learn(&self, tenant: &TenantId, id: &str, worker: WorkerId) {
        if id.len() > LONGEST_ID {
            return;
        }
        let mut makers = self.makers.lock();
        makers.touch((tenant.clone(), id.into()), worker);
        while makers.by_id.len() > self.capacity {
            let Some((_, oldest)) = makers.by_use.pop_first() else { break };
            makers.by_id.remove(&oldest);
        }
    }

    /// Who made `id`.
    pub fn maker(&self, tenant: &TenantId, id: &str) -> Option<WorkerId> {
        let mut makers = self.makers.lock();
        let key = (tenant.clone(), Arc::from(id));
        let (worker, _) = *makers.by_id.get(&key)?;
        makers.touch(key, worker);
        Some(worker)
    }

    /// `id` is no more.
    pub fn forget(&self, tenant: &TenantId, id: &str) {
        let mut makers = self.makers.lock();
        if let Some((_, used)) = makers.by_id.remove(&(tenant.clone(), Arc::from(id))) {
            makers.by_use.remove(&used);
        }
    }
}

impl Makers {
    fn touch(&mut self, key: Key, worker: WorkerId) {
        self.clock += 1;
        if let Some((_, used)) = self.by_id.insert(key.clone(), (worker, self.clock)) {
            self.by_use.remove(&used);
        }
        self.by_use.insert(self.clock, key);
    }
}

/// Finds `"id": "resp_..."` in the beginning of an answer, whether one JSON object or a stream of events.
#[derive(Debug, Default)]
pub(crate) struct IdSniffer {
    seen: Vec<u8>,
    done: bool,
}

impl IdSniffer {
    /// The id comes first in every engine's answer; further than this is not looked.
    const LOOK: usize = 16 * 1024;

    /// The id, once, as soon as it has been seen whole.
    pub(crate) fn feed(&mut self, data: &[u8]) -> Option<String> {
        if self.done {
            return None;
        }
        let room = Self::LOOK - self.seen.len();
        self.seen.extend_from_slice(&data[..data.len().min(room)]);
        let id = find_id(&self.seen);
        if id.is_some() || self.seen.len() == Self::LOOK {
            self.done = true;
            self.seen = Vec::new();
        }
        id
    }
}

fn find_id(seen: &[u8]) -> Option<String> {
    let mut rest = seen;
    loop {
        let at = rest.windows(4).position(|window| window == b"\"id\"")?;
        rest = &rest[at + 4..];
        let value = rest.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        let Some(value) = value.and_then(|value| value.strip_prefix(b"\"")) else { continue };
        let end = value.iter().position(|byte| *byte == b'"')?;
        let id = std::str::from_utf8(&value[..end]).ok()?;
        if id.starts_with("resp_") && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
            return Some(id.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantId {
        TenantId(name.into())
    }

    #[test]
    fn a_response_belongs_to_its_tenant() {
        let makers = ResponseMakers::default();
        makers.learn(&tenant("a"), "resp_1", WorkerId(1));
        assert_eq!(makers.maker(&tenant("a"), "resp_1"), Some(WorkerId(1)));
        assert_eq!(makers.maker(&tenant("b"), "resp_1"), None);
        makers.forget(&tenant("a"), "resp_1");
        assert_eq!(makers.maker(&tenant("a"), "resp_1"), None);
    }

    #[test]
    fn the_least_recently_used_is_forgotten_first() {
        let makers = ResponseMakers::with_capacity(2);
        let t = tenant("a");
        makers.learn(&t, "1", WorkerId(1));
        makers.learn(&t, "2", WorkerId(2));
        assert!(makers.maker(&t, "1").is_some());
        makers.learn(&t, "3", WorkerId(3));
        assert_eq!([makers.maker(&t, "1"), makers.maker(&t, "2")], [Some(WorkerId(1)), None]);
        makers.learn(&t, &"x".repeat(1000), WorkerId(3));
        assert!(makers.maker(&t, "1").is_some(), "an endless id takes nobody's place");
        assert_eq!(makers.makers.lock().by_use.len(), 2);
    }

    #[test]
    fn ids_are_found_in_objects_and_streams_also_when_cut() {
        let mut sniffer = IdSniffer::default();
        assert_eq!(sniffer.feed(b"{\"id\": \"resp_ab"), None);
        assert_eq!(sniffer.feed(b"c-1\", \"x\": 1}").as_deref(), Some("resp_abc-1"));
        assert_eq!(sniffer.feed(b"{\"id\": \"resp_d\"}"), None, "only the first");
        let event = b"event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_9\",";
        assert_eq!(IdSniffer::default().feed(event).as_deref(), Some("resp_9"));
        assert_eq!(
            IdSniffer::default().feed(br#"{"id":"msg_1","x":{"id":7},"id":"resp_2"}"#).as_deref(),
            Some("resp_2")
        );
        assert_eq!(IdSniffer::default().feed(br#"{"id":"resp_../x"}"#), None);
        let mut far = IdSniffer::default();
        assert_eq!(far.feed(&vec![b' '; 20_000]), None);
        assert_eq!(far.feed(br#"{"id":"resp_2"}"#), None);
    }
}
