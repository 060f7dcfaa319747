//! `Idempotency-Key`: a write that is sent again under its key is answered as it was the first time, and not done again.
//!
//! Remembered by this router, in memory, within bounds of number, size and age. What was refused, failed or ended with an
//! unknown outcome is not remembered: sent again, it is tried again, which every write allows. One that still runs is
//! never forgotten, or it could be done twice: where only such are left, a new one is refused. Of one whose answer is too
//! large to keep it is remembered that it was done, and since when: sent again, it is refused.

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

use super::access::Who;
use super::fresh::REVISION;
use super::problem::{Kind, Problem};

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// On an answer that was given before.
pub(super) const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
pub(super) const LONGEST_KEY: usize = 128;
/// Most writes that are remembered, how long, and the largest answer of one.
const MOST: usize = 4096;
const KEPT: Duration = Duration::from_secs(3600);
const LARGEST: usize = 16 << 10;

type Digest = [u8; 32];

/// A write that carries a key: whose key it is, and what is asked under it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Keyed {
    name: Digest,
    asked: Digest,
}

impl Keyed {
    /// Of a whole write; none where it carries no key.
    pub(super) fn of(who: Option<&Who>, parts: &Parts, body: &[u8]) -> Result<Option<Self>, Problem> {
        let mut keys = parts.headers.get_all(KEY).iter();
        let Some(key) = keys.next() else { return Ok(None) };
        let is_plain = (1..=LONGEST_KEY).contains(&key.len()) && key.as_bytes().iter().all(u8::is_ascii_graphic);
        if !is_plain || keys.next().is_some() {
            let accepted = format!("Idempotency-Key: accepted is one, of 1 to {LONGEST_KEY} visible ASCII characters.");
            return Err(Problem::new(Kind::InvalidHeader, accepted));
        }
        // By the token: names need not be unique, and a token that follows another under its name is somebody else's.
        let who = who.and_then(|who| who.token.as_ref()).map_or(&b""[..], |token| &token[..]);
        let path = parts.uri.path_and_query().map_or("", |whole| whole.as_str());
        let fence = parts.headers.get(IF_MATCH).map_or(&b""[..], HeaderValue::as_bytes);
        let asked = digest(&[parts.method.as_str().as_bytes(), path.as_bytes(), fence, body]);
        Ok(Some(Self { name: digest(&[who, key.as_bytes()]), asked }))
    }
}

/// Of parts that cannot run into each other.
fn digest(parts: &[&[u8]]) -> Digest {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(&(part.len() as u64).to_le_bytes());
        context.update(part);
    }
    context.finish().as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// An answer that may be given again.
#[derive(Clone, Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    kind: Option<Kind>,
}

impl Answer {
    fn response(self, replayed: Option<HeaderValue>) -> Response {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response.headers_mut().extend(replayed.map(|value| (REPLAYED, value)));
        self.kind.map(|kind| response.extensions_mut().insert(kind));
        response
    }
}

/// What became of a write.
#[derive(Clone, Debug)]
enum State {
    Running,
    Answered(Answer),
    /// It was done, by this revision of the ledger, and its answer is not kept.
    Done(Option<HeaderValue>),
}

/// The writes that carried a key.
#[derive(Debug, Default)]
pub(super) struct Repeats(Mutex<Shelf>);

#[derive(Debug, Default)]
struct Shelf {
    by_name: HashMap<Digest, (Digest, State)>,
    /// Those that are over.
    by_age: VecDeque<(Instant, Digest)>,
}

/// How a write under a key begins.
#[derive(Debug)]
enum Begin {
    New,
    /// What was asked under the key before, and how that stands.
    Known(Digest, State),
    /// Every place is taken by one that runs.
    Full,
}

impl Shelf {
    fn begin(&mut self, keyed: Keyed, now: Instant) -> Begin {
        while let Some((since, _)) = self.by_age.front()
            && now.saturating_duration_since(*since) >= KEPT
        {
            self.drop_oldest();
        }
        if let Some((asked, state)) = self.by_name.get(&keyed.name) {
            return Begin::Known(*asked, state.clone());
        }
        if self.by_name.len() >= MOST && !self.drop_oldest() {
            return Begin::Full;
        }
        self.by_name.insert(keyed.name, (keyed.asked, State::Running));
        Begin::New
    }

    /// Forgets the answer that is oldest; false where there is none.
    fn drop_oldest(&mut self) -> bool {
        let oldest = self.by_age.pop_front();
        oldest.is_some_and(|(_, name)| self.by_name.remove(&name).is_some())
    }

    fn ended(&mut self, name: Digest, end: State, now: Instant) {
        if let Some((_, state)) = self.by_name.get_mut(&name) {
            *state = end;
            self.by_age.push_back((now, name));
        }
    }
}

/// Forgets a write that did not come to an answer worth keeping.
struct Begun {
    repeats: Arc<Repeats>,
    name: Digest,
}

impl Drop for Begun {
    fn drop(&mut self) {
        let mut shelf = self.repeats.0.lock();
        if matches!(shelf.by_name.get(&self.name), Some((_, State::Running))) {
            shelf.by_name.remove(&self.name);
        }
    }
}

impl Repeats {
    /// Does the write, unless it was done under this key.
    pub(super) async fn once(
        self: Arc<Self>,
        keyed: Keyed,
        (request, run): (Request, impl AsyncFnOnce(Request) -> Response),
    ) -> Response {
        let begin = self.0.lock().begin(keyed, Instant::now());
        let problem = match begin {
            Begin::New => {
                let begun = Begun { repeats: self, name: keyed.name };
                return begun.remember(run(request).await).await;
            }
            Begin::Full => {
                let detail = format!(
                    "Nothing was changed: {MOST} writes under an Idempotency-Key are under way here. Send it again shortly."
                );
                Problem::new(Kind::TooMany, detail)
            }
            Begin::Known(asked, _) if asked != keyed.asked => {
                let detail =
                    "Nothing was changed: another write was sent under this Idempotency-Key. Choose a new one.";
                Problem::new(Kind::Unprocessable, detail).caused("idempotency_key_reused")
            }
            Begin::Known(_, State::Answered(answer)) => {
                return answer.response(Some(HeaderValue::from_static("true")));
            }
            Begin::Known(_, State::Done(revision)) => done_before(revision.as_ref()),
            Begin::Known(_, State::Running) => {
                let detail = "The write under this Idempotency-Key is still under way. Send it again shortly.";
                Problem::new(Kind::Conflict, detail).caused("under_way")
            }
        };
        problem.into_response()
    }
}

/// What is said to a write that was done under its key, and whose answer nobody has any more.
fn done_before(revision: Option<&HeaderValue>) -> Problem {
    let since = revision.and_then(|revision| revision.to_str().ok());
    let since = since.map_or_else(String::new, |revision| format!(" by revision {revision}"));
    let detail = format!(
        "Nothing was changed now: the write under this Idempotency-Key was done before{since}, and its answer of more than \
         {LARGEST} bytes was not kept. Read with consistency=linearizable what it was about."
    );
    Problem::new(Kind::Conflict, detail).caused("answer_not_kept")
}

impl Begun {
    async fn remember(self, response: Response) -> Response {
        if !response.status().is_success() {
            return response;
        }
        if response.body().size_hint().upper().is_none_or(|most| most > LARGEST as u64) {
            let revision = response.headers().get(REVISION).cloned();
            self.repeats.0.lock().ended(self.name, State::Done(revision), Instant::now());
            return response;
        }
        let (parts, body) = response.into_parts();
        // It is in memory, and so small: that it cannot be read does not happen.
        let Ok(body) = to_bytes(body, LARGEST).await else {
            self.repeats.0.lock().ended(self.name, State::Done(None), Instant::now());
            return Problem::new(Kind::Internal, "The write was done, and its answer cannot be read.").into_response();
        };
        let kind = parts.extensions.get::<Kind>().copied();
        let answer = Answer { status: parts.status, headers: parts.headers, body, kind };
        self.repeats.0.lock().ended(self.name, State::Answered(answer.clone()), Instant::now());
        answer.response(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyed(key: &'static str, body: &str) -> Keyed {
        let (parts, ()) = http::Request::post("/x").header(KEY, key).body(()).unwrap().into_parts();
        Keyed::of(None, &parts, body.as_bytes()).unwrap().unwrap()
    }

    async fn send(repeats: &Arc<Repeats>, keyed: Keyed, answer: (StatusCode, &'static str)) -> (u16, String, bool) {
        let request = Request::new(Body::empty());
        let response = repeats.clone().once(keyed, (request, async |_| answer.into_response())).await;
        let (status, replayed) = (response.status().as_u16(), response.headers().contains_key(REPLAYED));
        let body = to_bytes(response.into_body(), LARGEST).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap(), replayed)
    }

    #[tokio::test]
    async fn the_same_write_under_its_key_is_answered_again_and_another_one_is_refused() {
        let repeats = Arc::<Repeats>::default();
        let first = send(&repeats, keyed("k", "1"), (StatusCode::OK, "first")).await;
        assert_eq!(first, (200, "first".into(), false));
        let again = send(&repeats, keyed("k", "1"), (StatusCode::OK, "second")).await;
        assert_eq!(again, (200, "first".into(), true));
        let (status, problem, _) = send(&repeats, keyed("k", "2"), (StatusCode::OK, "third")).await;
        assert!(status == 422 && problem.contains("idempotency_key_reused"), "{status} {problem}");
        assert_eq!(send(&repeats, keyed("l", "2"), (StatusCode::OK, "other")).await, (200, "other".into(), false));
    }

    #[tokio::test]
    async fn what_failed_is_done_again_and_what_runs_is_waited_for() {
        let repeats = Arc::<Repeats>::default();
        send(&repeats, keyed("k", "1"), (StatusCode::GATEWAY_TIMEOUT, "unknown")).await;
        let refused = send(&repeats, keyed("k", "1"), (StatusCode::CONFLICT, "not yet")).await;
        assert_eq!(refused, (409, "not yet".into(), false));
        assert_eq!(send(&repeats, keyed("k", "1"), (StatusCode::OK, "done")).await, (200, "done".into(), false));
        assert!(matches!(repeats.0.lock().begin(keyed("runs", "1"), Instant::now()), Begin::New));
        let (status, problem, _) = send(&repeats, keyed("runs", "1"), (StatusCode::OK, "twice")).await;
        assert!(status == 409 && problem.contains("under_way"), "{status} {problem}");
    }

    #[tokio::test]
    async fn what_was_done_with_an_answer_too_large_to_keep_is_not_done_again() {
        let repeats = Arc::<Repeats>::default();
        let long = "x".repeat(LARGEST + 1);
        let request = || Request::new(Body::empty());
        let done = ([(REVISION, "77")], long.clone());
        let first = repeats.clone().once(keyed("k", "1"), (request(), async |_| done.into_response())).await;
        assert_eq!(first.status(), 200);
        assert_eq!(to_bytes(first.into_body(), usize::MAX).await.unwrap(), long.as_bytes(), "it is told whole, once");
        let (status, problem, replayed) = send(&repeats, keyed("k", "1"), (StatusCode::OK, "done twice")).await;
        assert!(status == 409 && !replayed, "{status} {problem}");
        for told in ["answer_not_kept", "by revision 77", "Nothing was changed now", "consistency=linearizable"] {
            assert!(problem.contains(told), "{problem}");
        }
        let (status, problem, _) = send(&repeats, keyed("k", "2"), (StatusCode::OK, "other")).await;
        assert!(status == 422 && problem.contains("idempotency_key_reused"), "{status} {problem}");
        let at_most = send(&repeats, keyed("l", "1"), (StatusCode::OK, "x".repeat(LARGEST).leak())).await;
        let again = send(&repeats, keyed("l", "1"), (StatusCode::OK, "second")).await;
        assert_eq!((again.0, again.1, again.2), (200, at_most.1, true));
    }

    fn named(n: usize) -> Keyed {
        Keyed { name: digest(&[&n.to_le_bytes()]), asked: [0; 32] }
    }

    fn answer(shelf: &mut Shelf, n: usize, now: Instant) {
        let answer = Answer { status: StatusCode::OK, headers: HeaderMap::new(), body: Bytes::new(), kind: None };
        shelf.ended(named(n).name, State::Answered(answer), now);
    }

    #[test]
    fn the_oldest_answers_are_forgotten_by_age_and_by_number() {
        let (mut shelf, now) = (Shelf::default(), Instant::now());
        for n in 0..=MOST {
            assert!(matches!(shelf.begin(named(n), now), Begin::New));
            answer(&mut shelf, n, now);
        }
        assert_eq!((shelf.by_name.len(), shelf.by_age.len()), (MOST, MOST));
        assert!(matches!(shelf.begin(named(MOST), now), Begin::Known(..)));
        assert!(matches!(shelf.begin(named(0), now), Begin::New), "the oldest made room");
        assert!(matches!(shelf.begin(named(MOST), now + KEPT), Begin::New), "an hour later it is new");
    }

    #[test]
    fn a_write_that_runs_is_never_forgotten_and_a_new_one_is_refused_where_only_such_are_left() {
        let (mut shelf, now) = (Shelf::default(), Instant::now());
        for n in 0..MOST {
            assert!(matches!(shelf.begin(named(n), now), Begin::New));
        }
        let late = now + KEPT * 2;
        assert!(matches!(shelf.begin(named(MOST), late), Begin::Full));
        assert!(matches!(shelf.begin(named(0), late), Begin::Known(_, State::Running)), "it would be done twice");
        answer(&mut shelf, 7, late);
        assert!(matches!(shelf.begin(named(MOST), late), Begin::New));
        assert!(matches!(shelf.begin(named(MOST + 1), late), Begin::Full));
        assert_eq!(shelf.by_name.len(), MOST);
    }

    #[tokio::test]
    async fn a_write_that_finds_no_place_is_told_to_come_again() {
        let repeats = Arc::<Repeats>::default();
        (0..MOST).for_each(|n| drop(repeats.0.lock().begin(named(n), Instant::now())));
        let (status, problem, _) = send(&repeats, keyed("k", "1"), (StatusCode::OK, "done")).await;
        assert!(status == 429 && problem.contains("Send it again shortly"), "{status} {problem}");
    }

    #[test]
    fn keys_belong_to_the_token_that_sends_them_and_are_plain() {
        let of = |key: &str| {
            let (parts, ()) = http::Request::post("/x").header(KEY, key).body(()).unwrap().into_parts();
            Keyed::of(None, &parts, b"")
        };
        assert!(of("a b").is_err() && of("").is_err() && of(&"x".repeat(LONGEST_KEY + 1)).is_err());
        let (parts, ()) = http::Request::post("/x").header(KEY, "k").body(()).unwrap().into_parts();
        let of = |token: Option<Digest>| {
            let who = Who { name: "alice".into(), role: super::super::access::Role::Operator, token };
            Keyed::of(Some(&who), &parts, b"").unwrap().unwrap()
        };
        assert_eq!(of(Some([1; 32])), of(Some([1; 32])));
        assert_ne!(of(Some([1; 32])), of(Some([2; 32])), "two tokens of one name do not share keys");
        assert_ne!(of(Some([1; 32])), of(None));
    }
}
