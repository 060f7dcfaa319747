//! Stored responses: which worker created which response, so that later calls for it reach the same worker through any
//! router. Learned from answers as they pass; an unknown id is answered with 404.

pub(crate) mod answer_recorder;
pub(crate) mod listener;
mod sequence_numbers;
pub(crate) mod serve;
pub(crate) mod transcript;

use std::sync::Arc;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use vocabulary::{TenantId, WorkerId};

use crate::client_request::ClientRequest;
use crate::error::ApiError;
use crate::memory_budget::MemoryReservation;
use crate::offload_pool::{OffloadPool, OffloadSpec};
use crate::shared_cache::{CacheEntryKind, CacheKey, SharedCache};
use transcript::{ConversationHistory, PreviousStep};

/// Maximum size of an assembled conversation.
const MAX_HISTORY_BYTES: usize = 32 << 20;

/// Stored responses with their workers and transcripts, by tenant and id: no tenant reaches another tenant's.
#[derive(Debug)]
pub struct StoredResponses {
    shared_cache: Arc<SharedCache>,
    tenant_mode: TenantMode,
}

/// Whether one or several tenants store responses at the engines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TenantMode {
    /// One tenant: everybody who reaches the router.
    Single,
    /// Several tenants, distinguished by their API keys. Engines do not know tenants: an id belongs to the tenant that
    /// was first given it.
    Several,
}

impl StoredResponses {
    /// Keeps the records in `shared_cache`.
    pub fn new(shared_cache: Arc<SharedCache>, tenant_mode: TenantMode) -> Self {
        Self { shared_cache, tenant_mode }
    }

    /// Records that `worker` created `id`. Returns whether `tenant` may have it: not where another tenant has this id.
    pub fn register(&self, tenant: &TenantId, id: &str, worker: WorkerId) -> bool {
        if self.tenant_mode == TenantMode::Several
            && !self.shared_cache.put_if_absent(tenant_key(id), tenant_digest(tenant))
        {
            tracing::warn!(%tenant, %worker, "an engine gave a response an id that another tenant's response has: it is not remembered");
            return false;
        }
        let value = Bytes::copy_from_slice(&worker.0.to_le_bytes());
        self.shared_cache.put(CacheKey::new(CacheEntryKind::ResponseWorker, tenant, id), value);
        true
    }

    /// Returns the worker that created `id`, if the response is this tenant's.
    pub async fn worker_of(&self, tenant: &TenantId, id: &str) -> Option<WorkerId> {
        let value = self.shared_cache.get(&CacheKey::new(CacheEntryKind::ResponseWorker, tenant, id)).await?;
        if self.tenant_mode == TenantMode::Several {
            // Another router may have registered the id first.
            let first = self.shared_cache.get_shared(&tenant_key(id)).await;
            first.is_none_or(|first| first == tenant_digest(tenant)).then_some(())?;
        }
        Some(WorkerId(u64::from_le_bytes(value.as_ref().try_into().ok()?)))
    }

    /// Whether `request` itself contains `id`. A new id of an engine cannot be in it, unless the engine took it from
    /// there.
    fn is_named_by(&self, request: &[u8], id: &str) -> bool {
        self.tenant_mode == TenantMode::Several && memchr::memmem::find(request, id.as_bytes()).is_some()
    }

    /// Forgets `id`.
    pub fn forget(&self, tenant: &TenantId, id: &str) {
        self.shared_cache.forget(&CacheKey::new(CacheEntryKind::ResponseWorker, tenant, id));
        self.shared_cache.forget(&CacheKey::new(CacheEntryKind::Transcript, tenant, id));
    }

    /// Longest answer, or event of one, that is read for a transcript. Engines repeat the request in it.
    pub(crate) fn max_answer_bytes(&self) -> usize {
        2 * self.shared_cache.transcript_limit() + (256 << 10)
    }

    pub(crate) fn keep_transcript(&self, tenant: &TenantId, id: &str, transcript: Bytes) {
        if is_response_id(id) {
            self.shared_cache.put(CacheKey::new(CacheEntryKind::Transcript, tenant, id), transcript);
        }
    }

    /// Returns the request's body, which follows `id`, with the whole history as its input; `None` when a part of it is
    /// unknown. Long histories are assembled on the offload pool. The history and the new body are charged to the
    /// request.
    pub(crate) async fn resolve(
        &self,
        aside: &OffloadPool,
        request: &ClientRequest,
        id: &str,
    ) -> Result<Option<Bytes>, ApiError> {
        let (load, mut memory) = (OffloadSpec::of(request), request.memory.as_deref().map(MemoryReservation::sibling));
        let mut reserve = |bytes: usize| memory.as_mut().map_or(Ok(()), |memory| memory.grow(bytes));
        let gather = async {
            let mut history = ConversationHistory::new(MAX_HISTORY_BYTES);
            let mut id = id.to_owned();
            loop {
                let key = CacheKey::new(CacheEntryKind::Transcript, &request.tenant, &id);
                let Some(transcript) = self.shared_cache.get_shared(&key).await else { return Ok::<_, ApiError>(None) };
                reserve(transcript.len())?;
                let load = load.on(transcript.len());
                let add = move || {
                    let before = history.add(&transcript);
                    (history, before)
                };
                let (longer, before) = load.run(aside, add).await?;
                history = longer;
                match before {
                    None => return Ok(None),
                    Some(PreviousStep::Start) => return Ok(Some(history)),
                    Some(PreviousStep::Response(before)) => id = before,
                }
            }
        };
        let gathered = tokio::time::timeout(self.shared_cache.multi_call_timeout(), gather).await;
        let Some(history) = gathered.unwrap_or(Ok(None))? else { return Ok(None) };
        let size = history.bytes() + request.body.len();
        reserve(ConversationHistory::COPIES * size)?;
        let (load, request) = (load.on(size), request.clone());
        let assemble = move || {
            let resolved = history.into_body(&request.body);
            // Only the new body is kept.
            drop(memory);
            resolved.map(|body| request.charge_derived(body)).transpose()
        };
        load.run(aside, assemble).await?
    }
}

fn tenant_key(id: &str) -> CacheKey {
    CacheKey::without_tenant(CacheEntryKind::ResponseTenant, id)
}

/// Digest that identifies a tenant as the holder of an id.
fn tenant_digest(tenant: &TenantId) -> Bytes {
    Bytes::copy_from_slice(&Sha256::digest(tenant.0.as_bytes()))
}

/// Finds `"id": "resp_..."` in the beginning of an answer, in a JSON object or a stream of events.
#[derive(Debug, Default)]
pub(crate) struct IdSniffer {
    buffer: Vec<u8>,
    done: bool,
}

impl IdSniffer {
    /// Every engine puts the id first, so the search ends here.
    const MAX_SCAN_BYTES: usize = 16 * 1024;

    /// Returns the id once, as soon as it has arrived completely.
    pub(crate) fn feed(&mut self, data: &[u8]) -> Option<String> {
        if self.done {
            return None;
        }
        let room = Self::MAX_SCAN_BYTES - self.buffer.len();
        self.buffer.extend_from_slice(&data[..data.len().min(room)]);
        let id = find_id(&self.buffer);
        if id.is_some() || self.buffer.len() == Self::MAX_SCAN_BYTES {
            self.done = true;
            self.buffer = Vec::new();
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
        if is_response_id(id) {
            return Some(id.to_owned());
        }
    }
}

/// Whether this can be the id of a response, and is safe in a path.
fn is_response_id(id: &str) -> bool {
    id.starts_with("resp_")
        && id.len() <= CacheKey::MAX_NAME_BYTES
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantId {
        TenantId(name.into())
    }

    #[tokio::test]
    async fn a_response_belongs_to_its_tenant() {
        let metrics = crate::telemetry::metrics::Metrics::default().shared_cache;
        let state = SharedCache::start(&Default::default(), ("c", &Arc::default()), metrics.clone()).unwrap();
        let makers = StoredResponses::new(Arc::new(state), TenantMode::Several);
        makers.register(&tenant("a"), "resp_1", WorkerId(1));
        assert_eq!(makers.worker_of(&tenant("a"), "resp_1").await, Some(WorkerId(1)));
        assert_eq!(makers.worker_of(&tenant("b"), "resp_1").await, None);
        makers.forget(&tenant("a"), "resp_1");
        assert_eq!(makers.worker_of(&tenant("a"), "resp_1").await, None);
        makers.register(&tenant("a"), &"x".repeat(1000), WorkerId(1));
        assert_eq!(makers.worker_of(&tenant("a"), &"x".repeat(1000)).await, None, "an endless id takes nobody's place");
        assert_eq!(metrics.writes.with_label_values(&["response_tenant", "too_large"]).get(), 1);
    }

    #[tokio::test]
    async fn a_response_id_stays_with_its_first_tenant() {
        let metrics = crate::telemetry::metrics::Metrics::default().shared_cache;
        let state = Arc::new(SharedCache::start(&Default::default(), ("c", &Arc::default()), metrics).unwrap());
        let several = StoredResponses::new(state.clone(), TenantMode::Several);
        assert!(several.register(&tenant("b"), "resp_1", WorkerId(1)));
        assert!(!several.register(&tenant("a"), "resp_1", WorkerId(1)));
        assert_eq!(several.worker_of(&tenant("a"), "resp_1").await, None);
        assert_eq!(several.worker_of(&tenant("b"), "resp_1").await, Some(WorkerId(1)));
        assert!(several.register(&tenant("b"), "resp_1", WorkerId(2)), "its own tenant may make it again");
        several.forget(&tenant("b"), "resp_1");
        assert!(!several.register(&tenant("a"), "resp_1", WorkerId(1)), "deleted, it is nobody else's");
        assert!(several.is_named_by(b"{\"x\":\"resp_7\"}", "resp_7"));
        let single = StoredResponses::new(state, TenantMode::Single);
        assert!(single.register(&tenant("a"), "resp_1", WorkerId(1)) && !single.is_named_by(b"resp_7", "resp_7"));
    }

    #[test]
    fn response_ids_are_found_in_objects_and_streams_across_chunks() {
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
