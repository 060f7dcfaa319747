//! ZMTP 3.0 over TCP with the NULL mechanism (rfc.zeromq.org/spec/23), with which engines publish KV events. Lengths
//! announced by a peer are limited, and memory is never reserved for bytes that have not arrived.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Maximum size of a message in bytes, all frames together.
const MAX_MESSAGE: usize = 16 << 20;
/// Maximum number of frames per message.
const MAX_FRAMES: usize = 64;
/// Maximum size of a command in bytes: READY with a few properties, or a PING.
const MAX_COMMAND: usize = 4 << 10;
/// Maximum size of a PING's context in bytes, from the specification.
const MAX_CONTEXT: usize = 16;
/// Maximum number of topics per subscriber, and the maximum length of a topic in bytes.
const MAX_TOPICS: usize = 64;
const MAX_TOPIC: usize = 256;
/// Buffer size for one read of a socket.
const READ_BUFFER: usize = 64 << 10;
/// Timeout of the handshake with an incoming connection.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a connection is no longer usable.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// The network failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer closed the connection.
    #[error("the connection was closed")]
    Closed,
    /// The endpoint is not a TCP endpoint.
    #[error("{0} is no tcp:// endpoint")]
    Endpoint(String),
    /// The peer violated the protocol.
    #[error("not ZMTP 3 with the NULL mechanism: {0}")]
    Protocol(&'static str),
    /// The peer has an incompatible socket type.
    #[error("the peer is not a {0} socket; check that the endpoints of events and of replay are not exchanged")]
    Socket(&'static str),
    /// A message exceeds its limits.
    #[error(
        "a message is longer than {MAX_MESSAGE} bytes or {MAX_FRAMES} frames, or a command longer than {MAX_COMMAND} bytes"
    )]
    TooLong,
}

/// The socket type at one end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketType {
    Pub,
    Sub,
    Router,
    Dealer,
}

impl SocketType {
    fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Sub => "SUB",
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
        }
    }

    /// Returns the compatible types of the peer, the usual one first.
    fn peer_types(self) -> [&'static str; 2] {
        match self {
            Self::Pub => ["SUB", "XSUB"],
            Self::Sub => ["PUB", "XPUB"],
            Self::Router => ["DEALER", "REQ"],
            Self::Dealer => ["ROUTER", "REP"],
        }
    }
}

/// One connection after its handshake.
#[derive(Debug)]
pub(crate) struct ZmtpConnection {
    stream: TcpStream,
    unread: BytesMut,
    unsent: BytesMut,
    /// Frames of an incomplete message, and their total bytes.
    partial: (Vec<Bytes>, usize),
}

impl ZmtpConnection {
    /// Connects to `tcp://HOST:PORT`.
    pub(crate) async fn connect(endpoint: &str, own: SocketType) -> Result<Self, ZmtpError> {
        let address = endpoint.strip_prefix("tcp://").ok_or_else(|| ZmtpError::Endpoint(endpoint.to_owned()))?;
        Self::handshake(TcpStream::connect(address).await?, own).await
    }

    async fn handshake(stream: TcpStream, own: SocketType) -> Result<Self, ZmtpError> {
        stream.set_nodelay(true)?;
        let mut connection =
            Self { stream, unread: BytesMut::new(), unsent: BytesMut::new(), partial: Default::default() };
        connection.stream.write_all(&greeting()).await?;
        let mut theirs = [0; 64];
        connection.stream.read_exact(&mut theirs).await?;
        check_greeting(&theirs)?;
        put_frame(&mut connection.unsent, COMMAND, &ready(own));
        connection.flush().await?;
        match connection.frame().await? {
            (COMMAND, body) if body.starts_with(b"\x05READY") => {
                let theirs = socket_type(&body[6..]);
                let is_peer = own.peer_types().iter().any(|peer| theirs == Some(peer.as_bytes()));
                if is_peer { Ok(connection) } else { Err(ZmtpError::Socket(own.peer_types()[0])) }
            }
            (COMMAND, _) => Err(ZmtpError::Protocol("the handshake was refused")),
            _ => Err(ZmtpError::Protocol("no READY command")),
        }
    }

    /// Receives the next message. Cancel-safe.
    pub(crate) async fn recv(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        loop {
            let (flags, body) = self.frame().await?;
            if flags & COMMAND != 0 {
                // PING contains two bytes of time to live and a context, which PONG returns.
                if let Some(context) = body.strip_prefix(b"\x04PING").and_then(|rest| rest.get(2..)) {
                    if context.len() > MAX_CONTEXT {
                        return Err(ZmtpError::Protocol("a PING with a long context"));
                    }
                    put_frame(&mut self.unsent, COMMAND, &[b"\x04PONG", context].concat());
                }
                continue;
            }
            let (frames, bytes) = &mut self.partial;
            *bytes += body.len();
            if frames.len() == MAX_FRAMES || *bytes > MAX_MESSAGE {
                return Err(ZmtpError::TooLong);
            }
            frames.push(body);
            if flags & MORE == 0 {
                return Ok(std::mem::take(&mut self.partial).0);
            }
        }
    }

    /// Sends one message. If the call is cancelled, the next call sends the rest first.
    pub(crate) async fn send(&mut self, frames: &[Bytes]) -> Result<(), ZmtpError> {
        for (at, frame) in frames.iter().enumerate() {
            put_frame(&mut self.unsent, if at + 1 < frames.len() { MORE } else { 0 }, frame);
        }
        self.flush().await
    }

    /// Subscribes to all topics that begin with `topic`.
    pub(crate) async fn subscribe(&mut self, topic: &str) -> Result<(), ZmtpError> {
        self.send(&[[b"\x01", topic.as_bytes()].concat().into()]).await
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
        while !self.unsent.is_empty() {
            self.stream.write_buf(&mut self.unsent).await?;
        }
        Ok(())
    }

    async fn frame(&mut self) -> Result<(u8, Bytes), ZmtpError> {
        loop {
            self.flush().await?;
            if let Some(frame) = take_frame(&mut self.unread)? {
                return Ok(frame);
            }
            self.unread.reserve(READ_BUFFER);
            if self.stream.read_buf(&mut self.unread).await? == 0 {
                return Err(ZmtpError::Closed);
            }
        }
    }
}

/// Accepts connections and serves each in its own task, which ends with this future.
pub(crate) async fn serve<F>(
    listener: TcpListener,
    own: SocketType,
    each: impl Fn(ZmtpConnection) -> F + Clone + Send + 'static,
) where
    F: Future<Output = ()> + Send,
{
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let each = each.clone();
                    tasks.spawn(async move {
                        match timeout(HANDSHAKE_TIMEOUT, ZmtpConnection::handshake(stream, own)).await {
                            Ok(Ok(connection)) => each(connection).await,
                            Ok(Err(error)) => tracing::debug!(%error, "a peer was not taken"),
                            Err(_) => tracing::debug!("a peer did not end its handshake"),
                        }
                    });
                }
                // Probably out of file descriptors; wait for others to end.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            },
            Some(_) = tasks.join_next() => {}
        }
    }
}

/// Sends the published messages that one subscriber subscribed to. Messages for which it has no room are dropped.
pub(crate) async fn publish(mut connection: ZmtpConnection, mut live: broadcast::Receiver<Arc<[Bytes]>>) {
    let mut topics: Vec<Bytes> = Vec::new();
    loop {
        let is_open = tokio::select! {
            asked = connection.recv() => match asked.as_deref() {
                Ok([change]) => {
                    match change.first() {
                        Some(1) if topics.len() < MAX_TOPICS && change.len() <= 1 + MAX_TOPIC => topics.push(change.slice(1..)),
                        Some(0) => topics.retain(|topic| *topic != change[1..]),
                        _ => {}
                    }
                    true
                }
                Ok(_) => true,
                Err(_) => false,
            },
            message = live.recv() => match message {
                Ok(message) if topics.iter().any(|topic| message[0].starts_with(topic)) => connection.send(&message).await.is_ok(),
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => true,
                Err(broadcast::error::RecvError::Closed) => false,
            },
        };
        if !is_open {
            return;
        }
    }
}

fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn check_greeting(theirs: &[u8; 64]) -> Result<(), ZmtpError> {
    if theirs[0] != 0xff || theirs[9] & 1 == 0 {
        return Err(ZmtpError::Protocol("no greeting"));
    }
    if theirs[10] < 3 {
        return Err(ZmtpError::Protocol("an older version"));
    }
    let mechanism = &theirs[12..32];
    match mechanism.strip_prefix(b"NULL") {
        Some(rest) if rest.iter().all(|byte| *byte == 0) => Ok(()),
        _ => Err(ZmtpError::Protocol("another mechanism")),
    }
}

/// Encodes the READY command: names with one length byte, values with four.
fn ready(own: SocketType) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", own.name()), ("Identity", "")] {
        body.put_u8(name.len() as u8);
        body.put_slice(name.as_bytes());
        body.put_u32(value.len() as u32);
        body.put_slice(value.as_bytes());
    }
    body
}

/// Returns the value of `Socket-Type` among READY's properties.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let (length, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(*length))?;
        let (length, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
}

/// Parses the frames in `bytes`, which start with a peer's greeting, in reads of `size` bytes. For fuzzing: connections
/// are read in the same way.
pub fn frames_of(bytes: &[u8], size: usize) -> Result<Vec<Bytes>, ZmtpError> {
    let (greeting, rest) = bytes.split_first_chunk::<64>().ok_or(ZmtpError::Closed)?;
    check_greeting(greeting)?;
    let (mut unread, mut frames) = (BytesMut::new(), Vec::new());
    for piece in rest.chunks(size) {
        unread.extend_from_slice(piece);
        while let Some((flags, body)) = take_frame(&mut unread)? {
            if flags & COMMAND != 0
                && let Some(properties) = body.strip_prefix(b"\x05READY")
            {
                socket_type(properties);
            }
            frames.push(body);
        }
    }
    Ok(frames)
}

fn put_frame(into: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => into.put_slice(&[flags, length]),
        Err(_) => {
            into.put_u8(flags | LONG);
            into.put_u64(body.len() as u64);
        }
    }
    into.put_slice(body);
}

/// Takes one complete frame (flags and body) from the front of the read buffer; None if it is incomplete.
pub(crate) fn take_frame(unread: &mut BytesMut) -> Result<Option<(u8, Bytes)>, ZmtpError> {
    let Some(flags) = unread.first().copied() else { return Ok(None) };
    if flags & !(MORE | LONG | COMMAND) != 0 {
        return Err(ZmtpError::Protocol("unknown flags"));
    }
    let (head, length) = match (flags & LONG, unread.get(1), unread.get(1..).and_then(<[u8]>::first_chunk)) {
        (0, Some(length), _) => (2, u64::from(*length)),
        (LONG, _, Some(length)) => (9, u64::from_be_bytes(*length)),
        _ => return Ok(None),
    };
    let longest = if flags & COMMAND == 0 { MAX_MESSAGE } else { MAX_COMMAND };
    let length = usize::try_from(length).ok().filter(|length| *length <= longest).ok_or(ZmtpError::TooLong)?;
    if unread.len() < head + length {
        return Ok(None);
    }
    unread.advance(head);
    Ok(Some((flags & !LONG, unread.split_to(length).freeze())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(wire: &[u8]) -> Result<Vec<(u8, Bytes)>, ZmtpError> {
        let mut unread = BytesMut::from(wire);
        std::iter::from_fn(|| take_frame(&mut unread).transpose()).collect()
    }

    #[test]
    fn frames_round_trip_and_partial_ones_are_withheld() {
        let mut wire = BytesMut::new();
        let bodies: [&[u8]; 3] = [b"", &[7; 255], &[8; 70_000]];
        bodies.iter().for_each(|body| put_frame(&mut wire, MORE, body));
        let taken = frames(&wire).unwrap();
        assert_eq!(taken.iter().map(|(_, body)| &body[..]).collect::<Vec<_>>(), bodies);
        assert!(taken.iter().all(|(flags, _)| flags & MORE != 0));
        for end in 0..wire.len() {
            assert!(frames(&wire[..end]).unwrap().len() < 3);
        }
    }

    #[test]
    fn overlong_frame_is_refused_before_allocation() {
        // 64 TiB, and the largest 64-bit length.
        for length in [[0, 0, 0x40, 0, 0, 0, 0, 0], [0xff; 8]] {
            let wire = [&[LONG][..], &length].concat();
            let mut unread = BytesMut::from(&wire[..]);
            assert!(matches!(take_frame(&mut unread), Err(ZmtpError::TooLong)));
            assert!(unread.capacity() < 1 << 10);
        }
        let command = [COMMAND | LONG, 0, 0, 0, 0, 0, 0, 0x10, 1];
        assert!(matches!(frames(&command), Err(ZmtpError::TooLong)));
        assert!(matches!(frames(&[0x80, 0]), Err(ZmtpError::Protocol(_))));
    }

    #[test]
    fn only_zmtp_3_null_greetings_and_known_sockets_are_accepted() {
        let mut curve = greeting();
        curve[12..17].copy_from_slice(b"CURVE");
        assert!(check_greeting(&greeting()).is_ok() && check_greeting(&curve).is_err());
        assert!(check_greeting(b"HTTP/1.1 400 Bad request\r\nConnection: done\r\nContent-Length: 0\r\n\r").is_err());
        assert_eq!(socket_type(&ready(SocketType::Sub)[6..]), Some(&b"SUB"[..]));
        assert_eq!(socket_type(b"\x0bSocket-Type\xff\xff\xff\xffPUB"), None);
    }

    #[tokio::test]
    async fn topics_filter_messages_and_a_hostile_publisher_is_disconnected() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let (sender, _) = broadcast::channel::<Arc<[Bytes]>>(16);
        let live = sender.clone();
        tokio::spawn(serve(listener, SocketType::Pub, move |connection| publish(connection, live.subscribe())));
        let mut subscriber = ZmtpConnection::connect(&endpoint, SocketType::Sub).await.unwrap();
        subscriber.subscribe("kv").await.unwrap();
        let message = |topic: &'static str| Arc::from([Bytes::from(topic), Bytes::from("payload")]);
        // Nothing is sent until the subscription has arrived.
        let publishing = tokio::spawn(async move {
            loop {
                let _ = sender.send(message("other"));
                let _ = sender.send(message("kv@w"));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let first = subscriber.recv().await.unwrap();
        publishing.abort();
        assert_eq!(first, ["kv@w", "payload"]);
        let exchanged = ZmtpConnection::connect(&endpoint, SocketType::Dealer).await.unwrap_err().to_string();
        assert!(exchanged.contains("not a ROUTER socket") && exchanged.contains("replay"), "{exchanged}");

        let hostile = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", hostile.local_addr().unwrap());
        tokio::spawn(async move {
            let (mut stream, _) = hostile.accept().await.unwrap();
            let mut wire = BytesMut::from(&greeting()[..]);
            put_frame(&mut wire, COMMAND, &ready(SocketType::Pub));
            wire.put_slice(&[LONG, 0, 0, 0x40, 0, 0, 0, 0, 0]);
            stream.write_all(&wire).await.unwrap();
            std::future::pending::<()>().await
        });
        let mut subscriber = ZmtpConnection::connect(&endpoint, SocketType::Sub).await.unwrap();
        assert!(matches!(subscriber.recv().await, Err(ZmtpError::TooLong)));
    }
}
