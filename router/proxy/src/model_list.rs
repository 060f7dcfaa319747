//! `GET /v1/models`: the union of the workers' models, each entry as its worker wrote it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method};
use http_body_util::{BodyExt as _, Limited};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::Mutex;
use workers_shim::engine_api::LegBody;

use crate::error::ApiError;
use crate::forward::UnplannedForwarder;
use crate::upstream::WorkerRequest;
use crate::worker_pool::PoolMember;
use vocabulary::truncated;

/// Timeout for one worker's list; the others are shown without it.
const WORKER_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest list of one worker, in bytes.
const MAX_LIST_BYTES: usize = 4 << 20;
/// Maximum number of models shown per worker; the same as in its probes.
const MAX_MODELS: usize = 1024;
/// How long a list is reused for all callers.
const CACHE_TTL: Duration = Duration::from_secs(1);

#[derive(Deserialize)]
struct WorkerModelList {
    data: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
}

#[derive(Serialize)]
struct MergedModelList<'a> {
    object: &'static str,
    data: Vec<&'a RawValue>,
}

type ModelEntries = Vec<(String, Box<RawValue>)>;

/// Model list that callers share for a second: asking every worker is expensive.
#[derive(Debug, Default)]
pub(crate) struct ModelListCache {
    last: Mutex<Option<(Instant, Option<Arc<ModelList>>)>>,
}

#[derive(Debug)]
struct ModelList {
    entries: ModelEntries,
    /// The serialized list, shared by callers.
    text: Bytes,
}

impl ModelList {
    fn of(entries: ModelEntries) -> Self {
        let data = entries.iter().map(|(_, entry)| &**entry).collect();
        let text = serde_json::to_vec(&MergedModelList { object: "list", data }).expect("raw JSON serializes").into();
        Self { entries, text }
    }
}

impl ModelListCache {
    /// Returns the list as of at most a second ago. Concurrent callers wait for the same refresh.
    async fn get(&self, forwarder: &UnplannedForwarder) -> Result<Arc<ModelList>, ApiError> {
        let mut last = self.last.lock().await;
        let entries = match &*last {
            Some((at, entries)) if at.elapsed() < CACHE_TTL => entries.clone(),
            _ => {
                let entries = merge_lists(forwarder).await.map(ModelList::of).map(Arc::new);
                *last = Some((Instant::now(), entries.clone()));
                entries
            }
        };
        entries.ok_or_else(|| ApiError::NoWorker { model: "any".into() })
    }

    /// Answers with the whole list.
    pub(crate) async fn list(&self, forwarder: &UnplannedForwarder) -> Result<Response, ApiError> {
        Ok(json(self.get(forwarder).await?.text.clone()))
    }

    /// Answers with the model of this name.
    pub(crate) async fn get_model(&self, forwarder: &UnplannedForwarder, wanted: &str) -> Result<Response, ApiError> {
        let list = self.get(forwarder).await?;
        let found = list.entries.iter().find(|(id, _)| id == wanted);
        found
            .map(|(_, entry)| json(Bytes::copy_from_slice(entry.get().as_bytes())))
            .ok_or_else(|| ApiError::UnknownModel { model: truncated(wanted) })
    }
}

fn json(text: Bytes) -> Response {
    let mut response = Body::from(text).into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Returns every model once, in the order of the workers and of their lists; `None` where no worker has answered.
async fn merge_lists(forwarder: &UnplannedForwarder) -> Option<ModelEntries> {
    let answering = forwarder.listed_workers.answering(forwarder.workers.fleet());
    let lists = futures::future::join_all(answering.iter().map(|member| fetch_list(forwarder, member))).await;
    lists.iter().any(Option::is_some).then(|| deduplicate(lists.into_iter().flatten()))
}

fn deduplicate(lists: impl Iterator<Item = Vec<Box<RawValue>>>) -> ModelEntries {
    let mut known = HashSet::new();
    let mut entries = ModelEntries::new();
    for entry in lists.flat_map(|list| list.into_iter().take(MAX_MODELS)) {
        let Ok(ListedModel { id }) = serde_json::from_str(entry.get()) else { continue };
        if known.insert(id.clone()) {
            entries.push((id, entry));
        }
    }
    entries
}

async fn fetch_list(forwarder: &UnplannedForwarder, member: &PoolMember) -> Option<Vec<Box<RawValue>>> {
    let request = WorkerRequest {
        method: Method::GET,
        path: "/v1/models".into(),
        headers: forwarder.workers.headers_for(member, &HeaderMap::new()),
        body: LegBody::default(),
    };
    let answer = async {
        let answer = forwarder.workers.send(member, request).await.ok()?;
        let body = Limited::new(answer.into_body(), MAX_LIST_BYTES).collect().await.ok()?.to_bytes();
        serde_json::from_slice::<WorkerModelList>(&body).ok()
    };
    Some(tokio::time::timeout(WORKER_TIMEOUT, answer).await.ok()??.data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ids: impl Iterator<Item = usize>) -> Vec<Box<RawValue>> {
        ids.map(|id| RawValue::from_string(format!("{{\"id\":\"m{id}\"}}")).unwrap()).collect()
    }

    #[test]
    fn the_merged_list_shows_each_model_once_and_is_bounded() {
        let lists = [list(0..150_000), list(1000..1030), list(0..1)];
        let entries = deduplicate(lists.into_iter());
        assert_eq!(entries.len(), 1030);
        assert_eq!([&*entries[0].0, &*entries[1029].0], ["m0", "m1029"]);
        let few = ModelList::of(deduplicate([list(0..2)].into_iter()));
        assert_eq!(few.text, r#"{"object":"list","data":[{"id":"m0"},{"id":"m1"}]}"#);
    }
}
