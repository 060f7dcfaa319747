//! Clients of a model beside the writers: they stream answers through the nodes, and turn to another when one fails.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::{CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::check::{Broken, StreamEnd, Streamed};
use crate::door::Doors;
use crate::faults::LONGEST_PAUSE;
use crate::history::{History, Seat};
use crate::http::Line;

const CLIENTS: usize = 2;
const PAUSE: Duration = Duration::from_millis(300);
const BEGINS_WITHIN: Duration = Duration::from_secs(20);
/// Longest time between two pieces of an answer: a router may be stopped twice in a row, each time for long.
const SILENCE: Duration = Duration::from_secs(2 * LONGEST_PAUSE.as_secs() + 10);
/// Text enough for several blocks, so that sessions are sealed.
const OPENING: &str = "flight reservation passenger window luggage refund airport morning confirm change upgrade payment card \
                       number please policy insurance cancel itinerary return economy business arrival departure ";

/// An answer to be streamed.
pub(crate) struct Wish<'a> {
    /// Through which node.
    pub(crate) seat: Seat,
    /// Of which session.
    pub(crate) key: &'a str,
    /// At most so many tokens.
    pub(crate) tokens: u32,
}

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Streaming {
    /// It began, and ended like this.
    Ended(StreamEnd),
    /// It never began: the node is not there, or said so.
    NotServed,
}

/// Streaming clients at work. Dropping it ends them.
pub(crate) struct Streams {
    ended: Arc<Mutex<Vec<Streamed>>>,
    clients: Vec<JoinHandle<()>>,
}

impl Streams {
    /// Starts them.
    pub(crate) fn start(doors: Doors, seats: &[Seat], history: Arc<History>) -> Streams {
        let ended: Arc<Mutex<Vec<Streamed>>> = Arc::default();
        let client = |number: usize| {
            let (doors, history, ended) = (doors.clone(), history.clone(), ended.clone());
            let seats = seats.to_vec();
            tokio::spawn(async move {
                for step in 0_usize.. {
                    let seat = seats[(step + number) % seats.len()];
                    let key = format!("stream-{number}-{}", step / 8);
                    let streaming = stream(&doors, Wish { seat, key: &key, tokens: 24 }, || {}).await;
                    if let Streaming::Ended(end) = streaming {
                        let at = history.now();
                        ended.lock().unwrap_or_else(PoisonError::into_inner).push(Streamed { end, at });
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            })
        };
        let clients = (0..CLIENTS).map(client).collect();
        Streams { ended, clients }
    }

    /// How the streams so far ended.
    pub(crate) fn check(&self) -> Vec<Broken> {
        crate::check::streams(&self.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How many have ended.
    pub(crate) fn count(&self) -> usize {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for client in &self.clients {
            client.abort();
        }
    }
}

/// Streams one answer to its end; `began` is called at its first bytes.
pub(crate) async fn stream(doors: &Doors, wish: Wish<'_>, began: impl FnOnce()) -> Streaming {
    let Wish { seat, key, tokens } = wish;
    let address = doors.proxy(seat);
    let content = format!("{key} {OPENING}").repeat(3);
    let messages = json!([{"role": "user", "content": content}]);
    let body = json!({"model": "tiny", "stream": true, "max_tokens": tokens, "ignore_eos": true, "messages": messages});
    let request = Request::builder()
        .method(Method::POST)
        .uri("/v1/chat/completions")
        .header(HOST, address.to_string())
        .header(CONTENT_TYPE, "application/json")
        .header("x-session-id", key)
        .body(Full::new(body.to_string().into()))
        .expect("headers are plain text");
    let mut line = Line::new(address);
    let Ok(answer) = line.open(request, BEGINS_WITHIN).await else { return Streaming::NotServed };
    if answer.status() != StatusCode::OK {
        return Streaming::NotServed;
    }
    let mut body = answer.into_body();
    let (mut text, mut began) = (Vec::new(), Some(began));
    loop {
        match tokio::time::timeout(SILENCE, body.frame()).await {
            Ok(Some(Ok(frame))) => {
                if let Some(began) = began.take() {
                    began();
                }
                text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            }
            Ok(Some(Err(_))) => return Streaming::Ended(StreamEnd::Cut),
            Ok(None) => return Streaming::Ended(how_it_ended(&text)),
            Err(_) => return Streaming::Ended(StreamEnd::Silent),
        }
    }
}

/// How a stream that was closed in order ended.
fn how_it_ended(text: &[u8]) -> StreamEnd {
    let text = String::from_utf8_lossy(text);
    let mut events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let has = |part: &str| text.contains(part);
    if has("\"error\"") {
        StreamEnd::Error
    } else if events.next_back() == Some("[DONE]") && has("\"finish_reason\":\"") {
        StreamEnd::Whole
    } else {
        StreamEnd::Silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_without_a_word_is_told_from_one_with_a_reason() {
        let reason = "data: {\"choices\":[{\"finish_reason\":\"length\"}]}\n\n";
        assert_eq!(how_it_ended(format!("{reason}data: [DONE]\n\n").as_bytes()), StreamEnd::Whole);
        assert_eq!(how_it_ended(reason.as_bytes()), StreamEnd::Silent);
        assert_eq!(how_it_ended(b"data: {\"choices\":[]}\n\ndata: [DONE]\n\n"), StreamEnd::Silent);
        assert_eq!(how_it_ended(b"data: {\"error\":{\"message\":\"gone\"}}\n\n"), StreamEnd::Error);
        assert_eq!(how_it_ended(b""), StreamEnd::Silent);
    }
}
