//! `GET /v1/models`: the union of what the workers serve, each entry as its worker wrote it.

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

use crate::error::{ApiError, shortened};
use crate::gateway::Gateway;
use crate::roster::Member;
use crate::upstream::Outgoing;

/// Longest wait for one worker's list; the others' are shown without it.
const PATIENCE: Duration = Duration::from_secs(2);
/// Largest list of one worker.
const LARGEST: usize = 4 << 20;
/// Most models of one worker that are shown, as many as its probes take.
const MOST_MODELS: usize = 1024;
/// How long a list is shown to all who ask.
const FRESH: Duration = Duration::from_secs(1);

#[derive(Deserialize)]
struct WorkerList {
    data: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Entry {
    id: String,
}

#[derive(Serialize)]
struct Union<'a> {
    object: &'static str,
    data: Vec<&'a RawValue>,
}

type Entries = Vec<(String, Box<RawValue>)>;

/// The list that all callers share for a second: asking every worker is work for all of them.
#[derive(Debug, Default)]
pub struct ModelList {
    last: Mutex<Option<(Instant, Option<Arc<List>>)>>,
}

#[derive(Debug)]
struct List {
    entries: Entries,
    /// All of it as it is answered; callers share it.
    text: Bytes,
}

impl List {
    fn of(entries: Entries) -> Self {
        let data = entries.iter().map(|(_, entry)| &**entry).collect();
        let text = serde_json::to_vec(&Union { object: "list", data }).expect("raw JSON serializes").into();
        Self { entries, text }
    }
}

impl ModelList {
    /// The list as it was at most a second ago. Who comes while it is made waits for it.
    async fn get(&self, gateway: &Gateway) -> Result<Arc<List>, ApiError> {
        let mut last = self.last.lock().await;
        let entries = match &*last {
            Some((at, entries)) if at.elapsed() < FRESH => entries.clone(),
            _ => {
                let entries = union(gateway).await.map(List::of).map(Arc::new);
                *last = Some((Instant::now(), entries.clone()));
                entries
            }
        };
        entries.ok_or_else(|| ApiError::NoWorker { model: "any".into() })
    }
}

pub(crate) async fn list(gateway: &Gateway) -> Result<Response, ApiError> {
    Ok(json(gateway.models.get(gateway).await?.text.clone()))
}

pub(crate) async fn one(gateway: &Gateway, wanted: &str) -> Result<Response, ApiError> {
    let list = gateway.models.get(gateway).await?;
    let found = list.entries.iter().find(|(id, _)| id == wanted);
    found
        .map(|(_, entry)| json(Bytes::copy_from_slice(entry.get().as_bytes())))
        .ok_or_else(|| ApiError::UnknownModel { model: shortened(wanted) })
}

fn json(text: Bytes) -> Response {
    let mut response = Body::from(text).into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Every model once, in the order of the workers and of their lists; none where no worker tells any.
async fn union(gateway: &Gateway) -> Option<Entries> {
    let answering = gateway.roster.answering(gateway.fleet());
    let lists = futures::future::join_all(answering.iter().map(|member| ask(gateway, member))).await;
    lists.iter().any(Option::is_some).then(|| once(lists.into_iter().flatten()))
}

fn once(lists: impl Iterator<Item = Vec<Box<RawValue>>>) -> Entries {
    let mut known = HashSet::new();
    let mut entries = Entries::new();
    for entry in lists.flat_map(|list| list.into_iter().take(MOST_MODELS)) {
        let Ok(Entry { id }) = serde_json::from_str(entry.get()) else { continue };
        if known.insert(id.clone()) {
            entries.push((id, entry));
        }
    }
    entries
}

async fn ask(gateway: &Gateway, member: &Member) -> Option<Vec<Box<RawValue>>> {
    let request = Outgoing {
        method: Method::GET,
        path: "/v1/models".into(),
        headers: gateway.headers_for(member, &HeaderMap::new()),
        body: Bytes::new(),
    };
    let answer = async {
        let answer = gateway.upstream.send(member.config.endpoint(), request).await.ok()?;
        let body = Limited::new(answer.into_body(), LARGEST).collect().await.ok()?.to_bytes();
        serde_json::from_slice::<WorkerList>(&body).ok()
    };
    Some(tokio::time::timeout(PATIENCE, answer).await.ok()??.data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ids: impl Iterator<Item = usize>) -> Vec<Box<RawValue>> {
        ids.map(|id| RawValue::from_string(format!("{{\"id\":\"m{id}\"}}")).unwrap()).collect()
    }

    #[test]
    fn each_model_is_shown_once_and_of_an_endless_list_the_beginning() {
        let lists = [list(0..150_000), list(1000..1030), list(0..1)];
        let entries = once(lists.into_iter());
        assert_eq!(entries.len(), 1030);
        assert_eq!([&*entries[0].0, &*entries[1029].0], ["m0", "m1029"]);
        let few = List::of(once([list(0..2)].into_iter()));
        assert_eq!(few.text, r#"{"object":"list","data":[{"id":"m0"},{"id":"m1"}]}"#);
    }
}
