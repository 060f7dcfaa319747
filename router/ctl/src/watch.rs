//! `ownerserve ctl cluster watch`: prints changes as they happen, until it is stopped.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use futures::StreamExt as _;
use http::HeaderMap;
use http_body_util::BodyExt as _;
use serde_json::Value;
use tokio::io::Interest;
use tokio::net::unix::pipe::OpenOptions;

use super::client::OperatorClient;
use super::error::CtlError;
use super::lists::with_query;
use super::output::{OutputFormat, write_stdout};
use super::table::cell_text;

const MAX_EVENT_BYTES: usize = 16 << 20;
/// Pause after an attempt that yielded nothing.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

// What is watched. Not a doc comment: as one it would be the help of the command.
#[derive(Clone, Debug, Args)]
pub(crate) struct WatchArgs {
    /// The first revision that is printed; when left out, the next one.
    #[arg(long, value_name = "REVISION")]
    from_revision: Option<u64>,
    /// Only these kinds of records: worker, session, artifact, node, quota.
    #[arg(long, value_delimiter = ',')]
    kind: Vec<String>,
    /// Ends after this number of revisions.
    #[arg(long, value_name = "N")]
    max_revisions: Option<u64>,
}

#[derive(Debug)]
struct WatchPosition {
    /// First revision not reported yet; `None` until a response tells where "now" was.
    from_revision: Option<u64>,
    /// Number of revisions still wanted.
    remaining: u64,
}

#[derive(PartialEq, Eq, Debug)]
enum WatchOutcome {
    /// Everything requested was reported, or the reader is gone.
    Done,
    /// The connection broke or was silent for too long.
    Broken(String),
}

/// Prints changes. A broken or silent connection is resumed after the last printed revision, at another endpoint if
/// necessary, with retries until one answers. Ends when its reader does.
pub(crate) async fn watch(client: &OperatorClient, args: &WatchArgs, output: OutputFormat) -> Result<(), CtlError> {
    let mut tell = |data: &Value| print(data, output);
    tokio::select! {
        done = follow(client, (args, output), &mut tell) => done,
        () = stdout_closed() => Ok(()),
    }
}

/// Passes every change to `tell`, from whichever endpoint provides it.
async fn follow(
    client: &OperatorClient,
    (args, output): (&WatchArgs, OutputFormat),
    tell: &mut impl FnMut(&Value) -> std::io::Result<()>,
) -> Result<(), CtlError> {
    let mut client = client.clone();
    let mut position =
        WatchPosition { from_revision: args.from_revision, remaining: args.max_revisions.unwrap_or(u64::MAX) };
    let (mut is_heard, mut refused) = (false, 0);
    while position.remaining > 0 {
        let mut query: Vec<_> =
            position.from_revision.map(|from| ("from_revision", from.to_string())).into_iter().collect();
        query.extend((!args.kind.is_empty()).then(|| ("kind", args.kind.join(","))));
        let (endpoint, answer) = match client.open(&with_query("watch", &query)).await {
            Ok(opened) => opened,
            // After the first connection, retries until an endpoint answers again; before it, each endpoint is tried
            // once.
            Err(error) if error.is_transient() && (is_heard || refused + 1 < client.endpoints.len()) => {
                if refused == 0 {
                    output.note(&format!("{error}; the watch resumes as soon as an endpoint answers"));
                }
                refused += 1;
                if is_heard {
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                let first = client.endpoints[0].clone();
                client = client.starting_after(&first);
                continue;
            }
            Err(error) => return Err(error),
        };
        (is_heard, refused) = (true, 0);
        position.from_revision = position.from_revision.or_else(|| revision(answer.headers()).map(|now| now + 1));
        let (from, began) = (position.from_revision, Instant::now());
        match read_events(answer.into_body(), &mut position, tell).await? {
            WatchOutcome::Done => return Ok(()),
            WatchOutcome::Broken(why) => {
                output.note(&format!(
                    "{endpoint}: {why}; the watch resumes at the next endpoint after the last printed revision"
                ));
                // Limits the rate of attempts if an endpoint closes every response at once.
                if position.from_revision == from {
                    tokio::time::sleep_until((began + RETRY_INTERVAL).into()).await;
                }
                client = client.starting_after(&endpoint);
            }
        }
    }
    Ok(())
}

/// Reads the events of one response and advances `position`.
async fn read_events(
    body: impl http_body::Body<Data = Bytes>,
    position: &mut WatchPosition,
    tell: &mut impl FnMut(&Value) -> std::io::Result<()>,
) -> Result<WatchOutcome, CtlError> {
    let mut pieces = std::pin::pin!(body.into_data_stream());
    let mut text = Vec::new();
    loop {
        match pieces.next().await {
            None => return Ok(WatchOutcome::Broken("the endpoint ended the watch".into())),
            Some(Err(_)) => return Ok(WatchOutcome::Broken("the connection broke or was silent for too long".into())),
            Some(Ok(piece)) => text.extend_from_slice(&piece),
        }
        while let Some(event) = pop_event(&mut text) {
            let Some((name, data)) = event else { continue };
            if name == "compacted" {
                return Err(CtlError::refusal("Revision compacted", "compacted", cell_text(data.get("detail"))));
            }
            // A heartbeat with the current revision.
            if name == "progress" {
                position.from_revision =
                    data["revision"].as_u64().map(|revision| revision + 1).or(position.from_revision);
                continue;
            }
            match tell(&data) {
                Err(gone) if gone.kind() == ErrorKind::BrokenPipe => return Ok(WatchOutcome::Done),
                told => told.map_err(|source| CtlError::File { path: "standard output".into(), source })?,
            }
            position.from_revision = data["revision"].as_u64().map(|revision| revision + 1).or(position.from_revision);
            position.remaining -= 1;
            if position.remaining == 0 {
                return Ok(WatchOutcome::Done);
            }
        }
        if text.len() > MAX_EVENT_BYTES {
            return Ok(WatchOutcome::Broken("the endpoint sent an event that is too large".into()));
        }
    }
}

/// Completes when standard output is a pipe without a reader: an idle watch would notice only at the next change.
async fn stdout_closed() {
    // Opened separately, because non-blocking mode must not apply to the shared descriptor.
    if let Ok(out) = OpenOptions::new().open_sender("/proc/self/fd/1")
        && out.ready(Interest::ERROR).await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

fn revision(headers: &HeaderMap) -> Option<u64> {
    headers.get("ownerserve-revision")?.to_str().ok()?.parse().ok()
}

/// Removes the next complete event from the start of `text`: its name and data; the inner `None` stands for a
/// comment.
fn pop_event(text: &mut Vec<u8>) -> Option<Option<(String, Value)>> {
    let end = text.windows(2).position(|pair| pair == b"\n\n")?;
    let event: Vec<u8> = text.drain(..end + 2).collect();
    let event = String::from_utf8_lossy(&event).into_owned();
    let field =
        |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned());
    let data = field("data:").and_then(|data| serde_json::from_str(&data).ok());
    Some(field("event:").zip(data))
}

fn print(data: &Value, output: OutputFormat) -> std::io::Result<()> {
    if output == OutputFormat::Json {
        return write_stdout(&format!("{data}\n"));
    }
    for change in data["changes"].as_array().into_iter().flatten() {
        let cell = |name: &str| cell_text(change.get(name));
        write_stdout(&format!("{}  {:4}  {:8}  {}\n", data["revision"], cell("op"), cell("kind"), cell("key")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;

    use serde_json::json;
    use vocabulary::TimeSpan;

    use super::super::client::{ClientTimeouts, OperatorClientOptions};
    use super::*;

    #[test]
    fn events_are_parsed_whole_and_comments_skipped() {
        let mut text = b": still here\n\nid: 7\nevent: changes\ndata: {\"revision\":7}\n\nid: 8\nevent: cha".to_vec();
        assert_eq!(pop_event(&mut text), Some(None));
        assert_eq!(pop_event(&mut text), Some(Some(("changes".into(), json!({"revision": 7})))));
        assert_eq!(pop_event(&mut text), None);
        assert_eq!(text, b"id: 8\nevent: cha");
    }
    /// Accepts one connection and returns its request line.
    fn accept_request(node: &TcpListener) -> (String, TcpStream) {
        let (mut connection, _) = node.accept().unwrap();
        let (mut text, mut byte) = (Vec::new(), [0]);
        while !text.ends_with(b"\r\n\r\n") {
            connection.read_exact(&mut byte).unwrap();
            text.push(byte[0]);
        }
        let head = String::from_utf8(text).unwrap();
        (head.lines().next().unwrap().to_owned(), connection)
    }

    const RESPONSE_HEAD: &str = "HTTP/1.1 200 OK\r\nownerserve-revision: 41\r\ntransfer-encoding: chunked\r\n\r\n";

    /// Returns the request to the second endpoint after the first one reported nothing and then did `what`.
    async fn request_to_next_endpoint(what: fn(TcpStream) -> Option<TcpStream>) -> (String, Result<(), u8>, Vec<u64>) {
        let (first, second) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let endpoints = [&first, &second].map(|node| format!("http://{}", node.local_addr().unwrap())).to_vec();
        let (line, next) = mpsc::channel();
        std::thread::spawn(move || {
            let (_, mut connection) = accept_request(&first);
            connection.write_all(RESPONSE_HEAD.as_bytes()).unwrap();
            let held = what(connection);
            let (second_line, mut connection) = accept_request(&second);
            line.send(second_line).unwrap();
            let event = "event: changes\ndata: {\"revision\":42,\"changes\":[]}\n\n";
            connection.write_all(format!("{RESPONSE_HEAD}{:x}\r\n{event}\r\n", event.len()).as_bytes()).unwrap();
            connection.read_exact(&mut [0]).unwrap_err();
            drop(held);
        });
        let client = test_client(endpoints);
        let args = WatchArgs { from_revision: None, kind: Vec::new(), max_revisions: Some(1) };
        let mut told = Vec::new();
        let mut tell = |data: &Value| {
            told.extend(data["revision"].as_u64());
            Ok(())
        };
        let done = follow(&client, (&args, OutputFormat::Table), &mut tell).await.map_err(|error| error.exit_code());
        (next.recv().unwrap(), done, told)
    }

    #[tokio::test]
    async fn watch_broken_before_its_first_change_resumes_at_its_start() {
        let (line, done, told) = request_to_next_endpoint(|_| None).await;
        assert!(line.starts_with("GET /ownerserve/v1/watch?from_revision=42 "), "{line}");
        assert_eq!((done, told), (Ok(()), vec![42]));
    }

    #[tokio::test]
    async fn watch_resumes_at_the_next_node_when_one_falls_silent() {
        let (line, done, told) = request_to_next_endpoint(Some).await;
        assert!(line.starts_with("GET /ownerserve/v1/watch?from_revision=42 "), "{line}");
        assert_eq!((done, told), (Ok(()), vec![42]));
    }

    fn test_client(endpoints: Vec<String>) -> OperatorClient {
        let waits = ClientTimeouts {
            read_timeout: TimeSpan::seconds(30),
            request_timeout: TimeSpan::seconds(30),
            max_pause: TimeSpan::millis(300),
        };
        OperatorClient::new(OperatorClientOptions { endpoints, token: None, timeouts: waits, cacert: None }).unwrap()
    }

    #[tokio::test]
    async fn watch_resumes_after_its_last_revision_once_a_node_returns() {
        let node = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = node.local_addr().unwrap();
        let client = test_client(vec![format!("http://{address}")]);
        let served = std::thread::spawn(move || {
            let (_, mut connection) = accept_request(&node);
            let progress = "event: progress\ndata: {\"revision\":77}\n\n";
            connection.write_all(format!("{RESPONSE_HEAD}{:x}\r\n{progress}\r\n", progress.len()).as_bytes()).unwrap();
            drop((connection, node));
            // Nobody listens there meanwhile.
            std::thread::sleep(RETRY_INTERVAL / 2);
            let (line, mut connection) = accept_request(&TcpListener::bind(address).unwrap());
            let event = "event: changes\ndata: {\"revision\":90,\"changes\":[]}\n\n";
            connection.write_all(format!("{RESPONSE_HEAD}{:x}\r\n{event}\r\n", event.len()).as_bytes()).unwrap();
            line
        });
        let args = WatchArgs { from_revision: None, kind: Vec::new(), max_revisions: Some(1) };
        let mut told = Vec::new();
        let mut tell = |data: &Value| {
            told.extend(data["revision"].as_u64());
            Ok(())
        };
        follow(&client, (&args, OutputFormat::Table), &mut tell).await.unwrap();
        let line = served.join().unwrap();
        assert!(line.starts_with("GET /ownerserve/v1/watch?from_revision=78 "), "{line}");
        assert_eq!(told, [90]);
    }

    #[tokio::test]
    async fn watch_moves_to_the_next_node_and_fails_when_all_are_full() {
        let full = || {
            let node = TcpListener::bind("127.0.0.1:0").unwrap();
            let endpoint = format!("http://{}", node.local_addr().unwrap());
            std::thread::spawn(move || {
                let (_, mut connection) = accept_request(&node);
                let said =
                    json!({"type": "urn:ownerserve:problem:too_many_requests", "title": "Too many", "detail": "64"})
                        .to_string();
                let head = format!("HTTP/1.1 429 x\r\ncontent-length: {}\r\n\r\n", said.len());
                connection.write_all(format!("{head}{said}").as_bytes()).unwrap();
            });
            endpoint
        };
        let client = test_client(vec![full(), full()]);
        let args = WatchArgs { from_revision: None, kind: Vec::new(), max_revisions: Some(1) };
        let error = follow(&client, (&args, OutputFormat::Table), &mut |_: &Value| Ok(())).await.unwrap_err();
        assert_eq!(error.error_code(), "too_many_requests");
    }

    #[tokio::test]
    async fn watch_ends_cleanly_when_its_reader_closes_the_pipe() {
        let mut position = WatchPosition { from_revision: None, remaining: u64::MAX };
        let body = http_body_util::Full::new(Bytes::from("event: changes\ndata: {\"revision\":7}\n\n"));
        let ended = read_events(body, &mut position, &mut |_: &Value| Err(ErrorKind::BrokenPipe.into())).await.unwrap();
        assert_eq!((ended, position.from_revision), (WatchOutcome::Done, None));
    }
}
