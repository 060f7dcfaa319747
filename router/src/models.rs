//! `GET /v1/models`: the union of what the workers serve, each entry as its worker wrote it.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method};
use http_body_util::{BodyExt as _, Limited};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::{ApiError, shortened};
use crate::gateway::Gateway;
use crate::roster::Member;
use crate::upstream::Outgoing;

/// Longest wait for one worker's list; the others' are shown without it.
const PATIENCE: Duration = Duration::from_secs(2);
/// Largest list of one worker.
const LARGEST: usize = 4 << 20;

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

pub(crate) async fn list(gateway: &Gateway) -> Result<Response, ApiError> {
    let entries = union(gateway).await?;
    let data = entries.iter().map(|(_, entry)| &**entry).collect();
    let text = serde_json::to_string(&Union { object: "list", data }).expect("raw JSON serializes");
    Ok(json(text))
}

pub(crate) async fn one(gateway: &Gateway, wanted: &str) -> Result<Response, ApiError> {
    let entries = union(gateway).await?;
    let found = entries.into_iter().find(|(id, _)| id == wanted);
    found
        .map(|(_, entry)| json(entry.get().to_owned()))
        .ok_or_else(|| ApiError::UnknownModel { model: shortened(wanted) })
}

fn json(text: String) -> Response {
    let mut response = Body::from(text).into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Every model once, in the order of the workers and of their lists.
async fn union(gateway: &Gateway) -> Result<Vec<(String, Box<RawValue>)>, ApiError> {
    let answering = gateway.roster.answering(gateway.fleet());
    let lists = futures::future::join_all(answering.iter().map(|member| ask(gateway, member))).await;
    if lists.iter().all(Option::is_none) {
        return Err(ApiError::NoWorker { model: "any".into() });
    }
    let mut union: Vec<(String, Box<RawValue>)> = Vec::new();
    for entry in lists.into_iter().flatten().flatten() {
        let Ok(Entry { id }) = serde_json::from_str(entry.get()) else { continue };
        if !union.iter().any(|(known, _)| *known == id) {
            union.push((id, entry));
        }
    }
    Ok(union)
}

async fn ask(gateway: &Gateway, member: &Member) -> Option<Vec<Box<RawValue>>> {
    let request = Outgoing {
        method: Method::GET,
        path: "/v1/models".into(),
        headers: gateway.headers_for(member, &HeaderMap::new()),
        body: bytes::Bytes::new(),
    };
    let answer = async {
        let answer = gateway.upstream.send(member.config.endpoint(), request).await.ok()?;
        let body = Limited::new(answer.into_body(), LARGEST).collect().await.ok()?.to_bytes();
        serde_json::from_slice::<WorkerList>(&body).ok()
    };
    Some(tokio::time::timeout(PATIENCE, answer).await.ok()??.data)
}
