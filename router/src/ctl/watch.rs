//! `ownerserve ctl watch`: changes as they happen, until it is ended.

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

use super::client::Client;
use super::error::CtlError;
use super::lists::with_query;
use super::output::{Output, written};
use super::table::word;

const LONGEST: usize = 16 << 20;
/// Between two tries where an answer brought nothing.
const AGAIN: Duration = Duration::from_secs(1);

/// What is watched.
#[derive(Clone, Debug, Args)]
pub(crate) struct WatchArgs {
    /// The first revision that is told; what comes from now on when left out.
    #[arg(long)]
    from: Option<u64>,
    /// Only these kinds of records: worker, session, artifact, node, quota.
    #[arg(long, value_delimiter = ',')]
    kind: Vec<String>,
    /// Ends after so many revisions.
    #[arg(long)]
    count: Option<u64>,
}

#[derive(Debug)]
struct Place {
    /// The first revision that was not told yet; none until an answer says where "now" was.
    from: Option<u64>,
    /// How many are still wanted.
    left: u64,
}

#[derive(PartialEq, Eq, Debug)]
enum End {
    /// Everything that was asked for was told, or nobody listens any more.
    Done,
    /// It broke, or fell silent.
    Broken(String),
}

/// Prints changes. A connection that breaks or falls silent is taken up again behind what was printed, at the next endpoint
/// if need be, and as long as it takes until one answers. It ends when its reader does.
pub(crate) async fn watch(client: &Client, args: &WatchArgs, output: Output) -> Result<(), CtlError> {
    let mut tell = |data: &Value| print(data, output);
    tokio::select! {
        done = follow(client, (args, output), &mut tell) => done,
        () = nobody_reads() => Ok(()),
    }
}

/// Tells `tell` every change, wherever it can be heard of.
async fn follow(
    client: &Client,
    (args, output): (&WatchArgs, Output),
    tell: &mut impl FnMut(&Value) -> std::io::Result<()>,
) -> Result<(), CtlError> {
    let mut client = client.clone();
    let mut place = Place { from: args.from, left: args.count.unwrap_or(u64::MAX) };
    let (mut is_heard, mut refused) = (false, 0);
    while place.left > 0 {
        let mut query: Vec<_> = place.from.map(|from| ("from", from.to_string())).into_iter().collect();
        query.extend((!args.kind.is_empty()).then(|| ("kind", args.kind.join(","))));
        let (endpoint, answer) = match client.open(&with_query("watch", &query)).await {
            Ok(opened) => opened,
            // One that was heard goes on once somebody answers again; before that, each is asked once.
            Err(error) if error.may_pass() && (is_heard || refused + 1 < client.endpoints.len()) => {
                if refused == 0 {
                    output.note(&format!("{error}; the watch goes on as soon as an endpoint takes it"));
                }
                refused += 1;
                if is_heard {
                    tokio::time::sleep(AGAIN).await;
                }
                let first = client.endpoints[0].clone();
                client = client.past(&first);
                continue;
            }
            Err(error) => return Err(error),
        };
        (is_heard, refused) = (true, 0);
        place.from = place.from.or_else(|| revision(answer.headers()).map(|now| now + 1));
        let (from, began) = (place.from, Instant::now());
        match take(answer.into_body(), &mut place, tell).await? {
            End::Done => return Ok(()),
            End::Broken(why) => {
                output
                    .note(&format!("{endpoint}: {why}; the watch goes on behind what was told, at the next endpoint"));
                // One that ends every answer at once is not asked without end.
                if place.from == from {
                    tokio::time::sleep_until((began + AGAIN).into()).await;
                }
                client = client.past(&endpoint);
            }
        }
    }
    Ok(())
}

/// Tells what one answer brings, and moves `place` behind it.
async fn take(
    body: impl http_body::Body<Data = Bytes>,
    place: &mut Place,
    tell: &mut impl FnMut(&Value) -> std::io::Result<()>,
) -> Result<End, CtlError> {
    let mut pieces = std::pin::pin!(body.into_data_stream());
    let mut text = Vec::new();
    loop {
        match pieces.next().await {
            None => return Ok(End::Broken("it ended the watch".into())),
            Some(Err(_)) => return Ok(End::Broken("its connection broke, or was silent for too long".into())),
            Some(Ok(piece)) => text.extend_from_slice(&piece),
        }
        while let Some(event) = take_event(&mut text) {
            let Some((name, data)) = event else { continue };
            if name == "compacted" {
                return Err(CtlError::no("Revision compacted", "compacted", word(data.get("detail"))));
            }
            // How far it is, with nothing to tell.
            if name == "progress" {
                place.from = data["revision"].as_u64().map(|revision| revision + 1).or(place.from);
                continue;
            }
            match tell(&data) {
                Err(gone) if gone.kind() == ErrorKind::BrokenPipe => return Ok(End::Done),
                told => told.map_err(|source| CtlError::File { path: "standard output".into(), source })?,
            }
            place.from = data["revision"].as_u64().map(|revision| revision + 1).or(place.from);
            place.left -= 1;
            if place.left == 0 {
                return Ok(End::Done);
            }
        }
        if text.len() > LONGEST {
            return Ok(End::Broken("it sent an event without end".into()));
        }
    }
}

/// Ends when standard output is a pipe that nobody reads any more: a quiet watch would only notice with the next change.
async fn nobody_reads() {
    // An end of its own, so that this one's not blocking says nothing of the other's.
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

/// Takes the next whole event from the start of `text`: its name and data; none inside for a comment.
fn take_event(text: &mut Vec<u8>) -> Option<Option<(String, Value)>> {
    let end = text.windows(2).position(|pair| pair == b"\n\n")?;
    let event: Vec<u8> = text.drain(..end + 2).collect();
    let event = String::from_utf8_lossy(&event).into_owned();
    let field =
        |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned());
    let data = field("data:").and_then(|data| serde_json::from_str(&data).ok());
    Some(field("event:").zip(data))
}

fn print(data: &Value, output: Output) -> std::io::Result<()> {
    if output == Output::Json {
        return written(&format!("{data}\n"));
    }
    for change in data["changes"].as_array().into_iter().flatten() {
        let cell = |name: &str| word(change.get(name));
        written(&format!("{}  {:4}  {:8}  {}\n", data["revision"], cell("op"), cell("kind"), cell("key")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;

    use serde_json::json;

    use super::super::client::{ClientOptions, Waits};
    use super::*;
    use crate::config::units::Span;

    #[test]
    fn events_are_taken_whole_and_comments_skipped() {
        let mut text = b": still here\n\nid: 7\nevent: changes\ndata: {\"revision\":7}\n\nid: 8\nevent: cha".to_vec();
        assert_eq!(take_event(&mut text), Some(None));
        assert_eq!(take_event(&mut text), Some(Some(("changes".into(), json!({"revision": 7})))));
        assert_eq!(take_event(&mut text), None);
        assert_eq!(text, b"id: 8\nevent: cha");
    }
    /// Takes one connection, and says which line it was asked with.
    fn asked(node: &TcpListener) -> (String, TcpStream) {
        let (mut connection, _) = node.accept().unwrap();
        let (mut text, mut byte) = (Vec::new(), [0]);
        while !text.ends_with(b"\r\n\r\n") {
            connection.read_exact(&mut byte).unwrap();
            text.push(byte[0]);
        }
        let head = String::from_utf8(text).unwrap();
        (head.lines().next().unwrap().to_owned(), connection)
    }

    const HEAD: &str = "HTTP/1.1 200 OK\r\nownerserve-revision: 41\r\ntransfer-encoding: chunked\r\n\r\n";

    /// What the next endpoint is asked when the first one told nothing and then did `what`.
    async fn asked_of_the_next(what: fn(TcpStream) -> Option<TcpStream>) -> (String, Result<(), u8>, Vec<u64>) {
        let (first, second) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let endpoints = [&first, &second].map(|node| format!("http://{}", node.local_addr().unwrap())).to_vec();
        let (line, next) = mpsc::channel();
        std::thread::spawn(move || {
            let (_, mut connection) = asked(&first);
            connection.write_all(HEAD.as_bytes()).unwrap();
            let held = what(connection);
            let (second_line, mut connection) = asked(&second);
            line.send(second_line).unwrap();
            let event = "event: changes\ndata: {\"revision\":42,\"changes\":[]}\n\n";
            connection.write_all(format!("{HEAD}{:x}\r\n{event}\r\n", event.len()).as_bytes()).unwrap();
            connection.read_exact(&mut [0]).unwrap_err();
            drop(held);
        });
        let client = looked_after(endpoints);
        let args = WatchArgs { from: None, kind: Vec::new(), count: Some(1) };
        let mut told = Vec::new();
        let mut tell = |data: &Value| {
            told.extend(data["revision"].as_u64());
            Ok(())
        };
        let done = follow(&client, (&args, Output::Table), &mut tell).await.map_err(|error| error.code());
        (next.recv().unwrap(), done, told)
    }

    #[tokio::test]
    async fn a_watch_that_broke_before_its_first_change_goes_on_where_it_began() {
        let (line, done, told) = asked_of_the_next(|_| None).await;
        assert!(line.starts_with("GET /ownerserve/v1/watch?from=42 "), "{line}");
        assert_eq!((done, told), (Ok(()), vec![42]));
    }

    #[tokio::test]
    async fn a_watch_at_a_node_that_fell_silent_goes_on_at_the_next_one() {
        let (line, done, told) = asked_of_the_next(Some).await;
        assert!(line.starts_with("GET /ownerserve/v1/watch?from=42 "), "{line}");
        assert_eq!((done, told), (Ok(()), vec![42]));
    }

    fn looked_after(endpoints: Vec<String>) -> Client {
        let waits = Waits { look: Span::seconds(30), act: Span::seconds(30), pause: Span::millis(300) };
        Client::new(ClientOptions { endpoints, token: None, waits, cacert: None }).unwrap()
    }

    #[tokio::test]
    async fn a_watch_waits_until_a_node_is_back_and_goes_on_behind_how_far_it_was() {
        let node = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = node.local_addr().unwrap();
        let client = looked_after(vec![format!("http://{address}")]);
        let served = std::thread::spawn(move || {
            let (_, mut connection) = asked(&node);
            let progress = "event: progress\ndata: {\"revision\":77}\n\n";
            connection.write_all(format!("{HEAD}{:x}\r\n{progress}\r\n", progress.len()).as_bytes()).unwrap();
            drop((connection, node));
            // Meanwhile nobody listens there.
            std::thread::sleep(AGAIN / 2);
            let (line, mut connection) = asked(&TcpListener::bind(address).unwrap());
            let event = "event: changes\ndata: {\"revision\":90,\"changes\":[]}\n\n";
            connection.write_all(format!("{HEAD}{:x}\r\n{event}\r\n", event.len()).as_bytes()).unwrap();
            line
        });
        let args = WatchArgs { from: None, kind: Vec::new(), count: Some(1) };
        let mut told = Vec::new();
        let mut tell = |data: &Value| {
            told.extend(data["revision"].as_u64());
            Ok(())
        };
        follow(&client, (&args, Output::Table), &mut tell).await.unwrap();
        let line = served.join().unwrap();
        assert!(line.starts_with("GET /ownerserve/v1/watch?from=78 "), "{line}");
        assert_eq!(told, [90]);
    }

    #[tokio::test]
    async fn a_watch_that_one_node_has_no_room_for_begins_at_the_next_and_fails_where_all_are_full() {
        let full = || {
            let node = TcpListener::bind("127.0.0.1:0").unwrap();
            let endpoint = format!("http://{}", node.local_addr().unwrap());
            std::thread::spawn(move || {
                let (_, mut connection) = asked(&node);
                let said =
                    json!({"type": "urn:ownerserve:problem:too_many", "title": "Too many", "detail": "64"}).to_string();
                let head = format!("HTTP/1.1 429 x\r\ncontent-length: {}\r\n\r\n", said.len());
                connection.write_all(format!("{head}{said}").as_bytes()).unwrap();
            });
            endpoint
        };
        let client = looked_after(vec![full(), full()]);
        let args = WatchArgs { from: None, kind: Vec::new(), count: Some(1) };
        let error = follow(&client, (&args, Output::Table), &mut |_: &Value| Ok(())).await.unwrap_err();
        assert_eq!(error.word(), "too_many");
    }

    #[tokio::test]
    async fn a_watch_whose_reader_has_left_ends_well() {
        let mut place = Place { from: None, left: u64::MAX };
        let body = http_body_util::Full::new(Bytes::from("event: changes\ndata: {\"revision\":7}\n\n"));
        let ended = take(body, &mut place, &mut |_: &Value| Err(ErrorKind::BrokenPipe.into())).await.unwrap();
        assert_eq!((ended, place.from), (End::Done, None));
    }
}
