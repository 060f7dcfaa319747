//! Model clients next to the writers: they stream responses through the nodes and move to another node when one
//! fails.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::{CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::api_client::ClusterAddresses;
use crate::check::{GuaranteeViolation, ResponseStreamEnd, StreamEnding};
use crate::history::{MemberSlot, OperationHistory};
use crate::http::KeepAliveConnection;

const CLIENTS: usize = 2;
const PAUSE: Duration = Duration::from_millis(300);
const FIRST_TOKEN_TIMEOUT: Duration = Duration::from_secs(20);
/// Longer than every timeout between nodes.
pub(crate) const MAX_PAUSE: Duration = Duration::from_secs(20);
/// Maximum time between two pieces of a response: a router may be paused twice in a row, each time for long.
const MAX_SILENCE: Duration = Duration::from_secs(2 * MAX_PAUSE.as_secs() + 10);
/// Enough text for several blocks, so that sessions are sealed.
const PROMPT_TEXT: &str = "flight reservation passenger window luggage refund airport morning confirm change upgrade payment card \
                       number please policy insurance cancel itinerary return economy business arrival departure ";

/// A response to stream.
pub(crate) struct StreamRequest<'a> {
    /// Node that the request goes to.
    pub(crate) seat: MemberSlot,
    /// Session key.
    pub(crate) key: &'a str,
    /// Maximum number of tokens.
    pub(crate) tokens: u32,
}

/// Result of a stream request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamResult {
    /// The stream began, and ended like this.
    Ended(ResponseStreamEnd),
    /// The stream never began: the node is down, or refused.
    NotServed,
}

/// Running streaming clients. Dropping it stops them.
pub(crate) struct StreamClients {
    ended: Arc<Mutex<Vec<StreamEnding>>>,
    clients: Vec<JoinHandle<()>>,
}

impl StreamClients {
    /// Starts the clients.
    pub(crate) fn start(
        addresses: ClusterAddresses,
        seats: &[MemberSlot],
        history: Arc<OperationHistory>,
    ) -> StreamClients {
        let ended: Arc<Mutex<Vec<StreamEnding>>> = Arc::default();
        let client = |number: usize| {
            let (addresses, history, ended) = (addresses.clone(), history.clone(), ended.clone());
            let seats = seats.to_vec();
            tokio::spawn(async move {
                for step in 0_usize.. {
                    let slot = seats[(step + number) % seats.len()];
                    let key = format!("stream-{number}-{}", step / 8);
                    let streaming =
                        run_stream(&addresses, StreamRequest { seat: slot, key: &key, tokens: 24 }, || {}).await;
                    if let StreamResult::Ended(end) = streaming {
                        let at = history.now();
                        ended.lock().unwrap_or_else(PoisonError::into_inner).push(StreamEnding { end, at });
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            })
        };
        let clients = (0..CLIENTS).map(client).collect();
        StreamClients { ended, clients }
    }

    /// Checks how the streams so far ended.
    pub(crate) fn check(&self) -> Vec<GuaranteeViolation> {
        crate::check::check_streams(&self.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Number of finished streams.
    pub(crate) fn count(&self) -> usize {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Drop for StreamClients {
    fn drop(&mut self) {
        for client in &self.clients {
            client.abort();
        }
    }
}

/// Streams one response to its end; calls `began` at its first bytes.
pub(crate) async fn run_stream(
    addresses: &ClusterAddresses,
    wish: StreamRequest<'_>,
    began: impl FnOnce(),
) -> StreamResult {
    let StreamRequest { seat: slot, key, tokens } = wish;
    let address = addresses.proxy(slot);
    let content = format!("{key} {PROMPT_TEXT}").repeat(3);
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
    let mut line = KeepAliveConnection::new(address);
    let Ok(answer) = line.open(request, FIRST_TOKEN_TIMEOUT).await else { return StreamResult::NotServed };
    if answer.status() != StatusCode::OK {
        return StreamResult::NotServed;
    }
    let mut body = answer.into_body();
    let (mut text, mut began) = (Vec::new(), Some(began));
    loop {
        match tokio::time::timeout(MAX_SILENCE, body.frame()).await {
            Ok(Some(Ok(frame))) => {
                if let Some(began) = began.take() {
                    began();
                }
                text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            }
            Ok(Some(Err(_))) => return StreamResult::Ended(ResponseStreamEnd::Cut),
            Ok(None) => return StreamResult::Ended(stream_end(&text)),
            Err(_) => return StreamResult::Ended(ResponseStreamEnd::Silent),
        }
    }
}

/// Classifies a stream that was closed in order.
fn stream_end(text: &[u8]) -> ResponseStreamEnd {
    let text = String::from_utf8_lossy(text);
    let mut events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let has = |part: &str| text.contains(part);
    if has("\"error\"") {
        ResponseStreamEnd::Error
    } else if events.next_back() == Some("[DONE]") && has("\"finish_reason\":\"") {
        ResponseStreamEnd::Whole
    } else {
        ResponseStreamEnd::Silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_stream_end_differs_from_an_end_with_a_reason() {
        let reason = "data: {\"choices\":[{\"finish_reason\":\"length\"}]}\n\n";
        assert_eq!(stream_end(format!("{reason}data: [DONE]\n\n").as_bytes()), ResponseStreamEnd::Whole);
        assert_eq!(stream_end(reason.as_bytes()), ResponseStreamEnd::Silent);
        assert_eq!(stream_end(b"data: {\"choices\":[]}\n\ndata: [DONE]\n\n"), ResponseStreamEnd::Silent);
        assert_eq!(stream_end(b"data: {\"error\":{\"message\":\"gone\"}}\n\n"), ResponseStreamEnd::Error);
        assert_eq!(stream_end(b""), ResponseStreamEnd::Silent);
    }
}
