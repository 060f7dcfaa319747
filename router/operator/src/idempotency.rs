//! `Idempotency-Key`: a write repeated under its key gets the first response and is not executed again.
//!
//! Responses are remembered by this router, in memory, bounded in number, size and age. Refused, failed and unknown
//! outcomes are not remembered: repeated, they are executed again, which every write allows. A running write is never
//! forgotten, because it could then be executed twice: if only such are left, a new one is refused. If a response is
//! too large to keep, only the fact and the revision are remembered, and a repetition is refused.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody as _, to_bytes};
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use http::header::IF_MATCH;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use parking_lot::Mutex;
use ring::digest::{Context, SHA256};

use super::access::Principal;
use super::consistency::REVISION_HEADER;
use super::problem::{Problem, ProblemKind};

const KEY_HEADER: HeaderName = HeaderName::from_static("idempotency-key");
/// Header of a replayed response.
pub(super) const REPLAYED_HEADER: HeaderName = HeaderName::from_static("idempotency-replayed");
pub(super) const MAX_KEY_CHARS: usize = 128;
/// Maximum number of remembered writes, how long they are kept, and maximum response size.
const MAX_ENTRIES: usize = 4096;
const RETENTION: Duration = Duration::from_secs(3600);
const MAX_RESPONSE_BYTES: usize = 16 << 10;

type WriteDigest = [u8; 32];

/// A write with an idempotency key: digests of the key and of the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct IdempotentWrite {
    key: WriteDigest,
    request: WriteDigest,
}

impl IdempotentWrite {
    /// Returns the digests of a write; `None` if it has no key.
    pub(super) fn from_request(who: Option<&Principal>, parts: &Parts, body: &[u8]) -> Result<Option<Self>, Problem> {
        let mut keys = parts.headers.get_all(KEY_HEADER).iter();
        let Some(key) = keys.next() else { return Ok(None) };
        let is_plain = (1..=MAX_KEY_CHARS).contains(&key.len()) && key.as_bytes().iter().all(u8::is_ascii_graphic);
        if !is_plain || keys.next().is_some() {
            let accepted =
                format!("Idempotency-Key: accepted is one, of 1 to {MAX_KEY_CHARS} visible ASCII characters.");
            return Err(Problem::new(ProblemKind::InvalidHeader, accepted));
        }
        // Keys are scoped by token: names need not be unique, and a new token under an old name belongs to somebody
        // else.
        let who = who.and_then(|who| who.token.as_ref()).map_or(&b""[..], |token| &token[..]);
        let path = parts.uri.path_and_query().map_or("", |whole| whole.as_str());
        let fence = parts.headers.get(IF_MATCH).map_or(&b""[..], HeaderValue::as_bytes);
        let request_digest = digest(&[parts.method.as_str().as_bytes(), path.as_bytes(), fence, body]);
        Ok(Some(Self { key: digest(&[who, key.as_bytes()]), request: request_digest }))
    }
}

/// Hashes the parts unambiguously.
fn digest(parts: &[&[u8]]) -> WriteDigest {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(&(part.len() as u64).to_le_bytes());
        context.update(part);
    }
    context.finish().as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// A response that can be replayed.
#[derive(Clone, Debug)]
struct ReplayableResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    kind: Option<ProblemKind>,
}

impl ReplayableResponse {
    fn response(self, replayed: Option<HeaderValue>) -> Response {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response.headers_mut().extend(replayed.map(|value| (REPLAYED_HEADER, value)));
        self.kind.map(|kind| response.extensions_mut().insert(kind));
        response
    }
}

/// State of a write.
#[derive(Clone, Debug)]
enum WriteState {
    Running,
    Answered(ReplayableResponse),
    /// Done at this revision of the ledger; its response was not kept.
    DoneWithoutResponse(Option<HeaderValue>),
}

/// Writes with an idempotency key.
#[derive(Debug, Default)]
pub(super) struct IdempotencyStore(Mutex<IdempotencyTable>);

#[derive(Debug, Default)]
struct IdempotencyTable {
    by_key: HashMap<WriteDigest, (WriteDigest, WriteState)>,
    /// Completed writes, oldest first.
    by_age: VecDeque<(Instant, WriteDigest)>,
}

/// Result of looking up a key.
#[derive(Debug)]
enum IdempotencyLookup {
    New,
    /// The earlier request under this key, and its state.
    Existing(WriteDigest, WriteState),
    /// All places are taken by running writes.
    Full,
}

impl IdempotencyTable {
    fn begin(&mut self, write: IdempotentWrite, now: Instant) -> IdempotencyLookup {
        while let Some((since, _)) = self.by_age.front()
            && now.saturating_duration_since(*since) >= RETENTION
        {
            self.drop_oldest();
        }
        if let Some((asked, state)) = self.by_key.get(&write.key) {
            return IdempotencyLookup::Existing(*asked, state.clone());
        }
        if self.by_key.len() >= MAX_ENTRIES && !self.drop_oldest() {
            return IdempotencyLookup::Full;
        }
        self.by_key.insert(write.key, (write.request, WriteState::Running));
        IdempotencyLookup::New
    }

    /// Drops the oldest response; returns `false` if there is none.
    fn drop_oldest(&mut self) -> bool {
        let oldest = self.by_age.pop_front();
        oldest.is_some_and(|(_, name)| self.by_key.remove(&name).is_some())
    }

    fn complete(&mut self, name: WriteDigest, end: WriteState, now: Instant) {
        if let Some((_, state)) = self.by_key.get_mut(&name) {
            *state = end;
            self.by_age.push_back((now, name));
        }
    }
}

/// Removes a write on drop unless it got a response worth keeping.
struct IdempotencyGuard {
    repeats: Arc<IdempotencyStore>,
    key: WriteDigest,
}

impl Drop for IdempotencyGuard {
    fn drop(&mut self) {
        let mut index = self.repeats.0.lock();
        if matches!(index.by_key.get(&self.key), Some((_, WriteState::Running))) {
            index.by_key.remove(&self.key);
        }
    }
}

impl IdempotencyStore {
    /// Executes the write, unless this key was used before.
    pub(super) async fn run_once(
        self: Arc<Self>,
        write: IdempotentWrite,
        (request, run): (Request, impl AsyncFnOnce(Request) -> Response),
    ) -> Response {
        let begin = self.0.lock().begin(write, Instant::now());
        let problem = match begin {
            IdempotencyLookup::New => {
                let begun = IdempotencyGuard { repeats: self, key: write.key };
                return begun.record(run(request).await).await;
            }
            IdempotencyLookup::Full => {
                let detail = format!(
                    "Nothing was changed: {MAX_ENTRIES} writes under an Idempotency-Key are under way here. Send it again shortly."
                );
                Problem::new(ProblemKind::TooManyRequests, detail)
            }
            IdempotencyLookup::Existing(asked, _) if asked != write.request => {
                let detail =
                    "Nothing was changed: another write was sent under this Idempotency-Key. Choose a new one.";
                Problem::new(ProblemKind::Unprocessable, detail).with_reason("idempotency_key_reused")
            }
            IdempotencyLookup::Existing(_, WriteState::Answered(answer)) => {
                return answer.response(Some(HeaderValue::from_static("true")));
            }
            IdempotencyLookup::Existing(_, WriteState::DoneWithoutResponse(revision)) => {
                already_done_problem(revision.as_ref())
            }
            IdempotencyLookup::Existing(_, WriteState::Running) => {
                let detail = "The write under this Idempotency-Key is still under way. Send it again shortly.";
                Problem::new(ProblemKind::Conflict, detail).with_reason("under_way")
            }
        };
        problem.into_response()
    }
}

/// Problem for a repetition whose first response was not kept.
fn already_done_problem(revision: Option<&HeaderValue>) -> Problem {
    let since = revision.and_then(|revision| revision.to_str().ok());
    let since = since.map_or_else(String::new, |revision| format!(" by revision {revision}"));
    let detail = format!(
        "Nothing was changed now: the write under this Idempotency-Key was done before{since}, and its answer of more than \
         {MAX_RESPONSE_BYTES} bytes was not kept. Read with consistency=linearizable what it was about."
    );
    Problem::new(ProblemKind::Conflict, detail).with_reason("response_not_retained")
}

impl IdempotencyGuard {
    async fn record(self, response: Response) -> Response {
        if !response.status().is_success() {
            return response;
        }
        if response.body().size_hint().upper().is_none_or(|most| most > MAX_RESPONSE_BYTES as u64) {
            let revision = response.headers().get(REVISION_HEADER).cloned();
            self.repeats.0.lock().complete(self.key, WriteState::DoneWithoutResponse(revision), Instant::now());
            return response;
        }
        let (parts, body) = response.into_parts();
        // Cannot fail: the body is in memory and small enough.
        let Ok(body) = to_bytes(body, MAX_RESPONSE_BYTES).await else {
            self.repeats.0.lock().complete(self.key, WriteState::DoneWithoutResponse(None), Instant::now());
            return Problem::new(ProblemKind::Internal, "The write was done, and its answer cannot be read.")
                .into_response();
        };
        let kind = parts.extensions.get::<ProblemKind>().copied();
        let answer = ReplayableResponse { status: parts.status, headers: parts.headers, body, kind };
        self.repeats.0.lock().complete(self.key, WriteState::Answered(answer.clone()), Instant::now());
        answer.response(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyed(key: &'static str, body: &str) -> IdempotentWrite {
        let (parts, ()) = http::Request::post("/x").header(KEY_HEADER, key).body(()).unwrap().into_parts();
        IdempotentWrite::from_request(None, &parts, body.as_bytes()).unwrap().unwrap()
    }

    async fn send(
        repeats: &Arc<IdempotencyStore>,
        write: IdempotentWrite,
        answer: (StatusCode, &'static str),
    ) -> (u16, String, bool) {
        let request = Request::new(Body::empty());
        let response = repeats.clone().run_once(write, (request, async |_| answer.into_response())).await;
        let (status, replayed) = (response.status().as_u16(), response.headers().contains_key(REPLAYED_HEADER));
        let body = to_bytes(response.into_body(), MAX_RESPONSE_BYTES).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap(), replayed)
    }

    #[tokio::test]
    async fn repeated_write_is_replayed_and_a_reused_key_is_rejected() {
        let repeats = Arc::<IdempotencyStore>::default();
        let first = send(&repeats, keyed("k", "1"), (StatusCode::OK, "first")).await;
        assert_eq!(first, (200, "first".into(), false));
        let again = send(&repeats, keyed("k", "1"), (StatusCode::OK, "second")).await;
        assert_eq!(again, (200, "first".into(), true));
        let (status, problem, _) = send(&repeats, keyed("k", "2"), (StatusCode::OK, "third")).await;
        assert!(status == 422 && problem.contains("idempotency_key_reused"), "{status} {problem}");
        assert_eq!(send(&repeats, keyed("l", "2"), (StatusCode::OK, "other")).await, (200, "other".into(), false));
    }

    #[tokio::test]
    async fn failed_write_is_retried_and_running_write_conflicts() {
        let repeats = Arc::<IdempotencyStore>::default();
        send(&repeats, keyed("k", "1"), (StatusCode::GATEWAY_TIMEOUT, "unknown")).await;
        let response = send(&repeats, keyed("k", "1"), (StatusCode::CONFLICT, "not yet")).await;
        assert_eq!(response, (409, "not yet".into(), false));
        assert_eq!(send(&repeats, keyed("k", "1"), (StatusCode::OK, "done")).await, (200, "done".into(), false));
        assert!(matches!(repeats.0.lock().begin(keyed("runs", "1"), Instant::now()), IdempotencyLookup::New));
        let (status, problem, _) = send(&repeats, keyed("runs", "1"), (StatusCode::OK, "twice")).await;
        assert!(status == 409 && problem.contains("under_way"), "{status} {problem}");
    }

    #[tokio::test]
    async fn completed_write_with_an_oversized_response_is_not_repeated() {
        let repeats = Arc::<IdempotencyStore>::default();
        let long = "x".repeat(MAX_RESPONSE_BYTES + 1);
        let request = || Request::new(Body::empty());
        let done = ([(REVISION_HEADER, "77")], long.clone());
        let first = repeats.clone().run_once(keyed("k", "1"), (request(), async |_| done.into_response())).await;
        assert_eq!(first.status(), 200);
        assert_eq!(to_bytes(first.into_body(), usize::MAX).await.unwrap(), long.as_bytes(), "it is told whole, once");
        let (status, problem, replayed) = send(&repeats, keyed("k", "1"), (StatusCode::OK, "done twice")).await;
        assert!(status == 409 && !replayed, "{status} {problem}");
        for told in ["response_not_retained", "by revision 77", "Nothing was changed now", "consistency=linearizable"] {
            assert!(problem.contains(told), "{problem}");
        }
        let (status, problem, _) = send(&repeats, keyed("k", "2"), (StatusCode::OK, "other")).await;
        assert!(status == 422 && problem.contains("idempotency_key_reused"), "{status} {problem}");
        let at_most = send(&repeats, keyed("l", "1"), (StatusCode::OK, "x".repeat(MAX_RESPONSE_BYTES).leak())).await;
        let again = send(&repeats, keyed("l", "1"), (StatusCode::OK, "second")).await;
        assert_eq!((again.0, again.1, again.2), (200, at_most.1, true));
    }

    fn named(n: usize) -> IdempotentWrite {
        IdempotentWrite { key: digest(&[&n.to_le_bytes()]), request: [0; 32] }
    }

    fn answer(shelf: &mut IdempotencyTable, n: usize, now: Instant) {
        let answer =
            ReplayableResponse { status: StatusCode::OK, headers: HeaderMap::new(), body: Bytes::new(), kind: None };
        shelf.complete(named(n).key, WriteState::Answered(answer), now);
    }

    #[test]
    fn oldest_responses_expire_by_age_and_count() {
        let (mut index, now) = (IdempotencyTable::default(), Instant::now());
        for n in 0..=MAX_ENTRIES {
            assert!(matches!(index.begin(named(n), now), IdempotencyLookup::New));
            answer(&mut index, n, now);
        }
        assert_eq!((index.by_key.len(), index.by_age.len()), (MAX_ENTRIES, MAX_ENTRIES));
        assert!(matches!(index.begin(named(MAX_ENTRIES), now), IdempotencyLookup::Existing(..)));
        assert!(matches!(index.begin(named(0), now), IdempotencyLookup::New), "the oldest made room");
        assert!(
            matches!(index.begin(named(MAX_ENTRIES), now + RETENTION), IdempotencyLookup::New),
            "an hour later it is new"
        );
    }

    #[test]
    fn running_write_is_never_evicted_and_new_writes_are_rejected() {
        let (mut index, now) = (IdempotencyTable::default(), Instant::now());
        for n in 0..MAX_ENTRIES {
            assert!(matches!(index.begin(named(n), now), IdempotencyLookup::New));
        }
        let late = now + RETENTION * 2;
        assert!(matches!(index.begin(named(MAX_ENTRIES), late), IdempotencyLookup::Full));
        assert!(
            matches!(index.begin(named(0), late), IdempotencyLookup::Existing(_, WriteState::Running)),
            "it would be done twice"
        );
        answer(&mut index, 7, late);
        assert!(matches!(index.begin(named(MAX_ENTRIES), late), IdempotencyLookup::New));
        assert!(matches!(index.begin(named(MAX_ENTRIES + 1), late), IdempotencyLookup::Full));
        assert_eq!(index.by_key.len(), MAX_ENTRIES);
    }

    #[tokio::test]
    async fn full_store_rejects_new_writes_with_a_retry_hint() {
        let repeats = Arc::<IdempotencyStore>::default();
        (0..MAX_ENTRIES).for_each(|n| drop(repeats.0.lock().begin(named(n), Instant::now())));
        let (status, problem, _) = send(&repeats, keyed("k", "1"), (StatusCode::OK, "done")).await;
        assert!(status == 429 && problem.contains("Send it again shortly"), "{status} {problem}");
    }

    #[test]
    fn keys_are_validated_and_scoped_to_a_token() {
        let of = |key: &str| {
            let (parts, ()) = http::Request::post("/x").header(KEY_HEADER, key).body(()).unwrap().into_parts();
            IdempotentWrite::from_request(None, &parts, b"")
        };
        assert!(of("a b").is_err() && of("").is_err() && of(&"x".repeat(MAX_KEY_CHARS + 1)).is_err());
        let (parts, ()) = http::Request::post("/x").header(KEY_HEADER, "k").body(()).unwrap().into_parts();
        let of = |token: Option<WriteDigest>| {
            let who = Principal { name: "alice".into(), role: super::super::access::TokenRole::Operator, token };
            IdempotentWrite::from_request(Some(&who), &parts, b"").unwrap().unwrap()
        };
        assert_eq!(of(Some([1; 32])), of(Some([1; 32])));
        assert_ne!(of(Some([1; 32])), of(Some([2; 32])), "two tokens of one name do not share keys");
        assert_ne!(of(Some([1; 32])), of(None));
    }
}
