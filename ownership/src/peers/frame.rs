//! Wire format between nodes after the handshake: length-prefixed frames, many exchanges per connection.
//!
//! Layout: length of the payload (4 bytes, little endian), kind (1), method (1), exchange (8, little endian), payload.

use std::io;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum payload. Entries and snapshots are split into pieces well below it.
pub(crate) const MAX_PAYLOAD: usize = 64 << 20;

/// Size of the header before the payload.
const HEADER: usize = 14;

/// Initial buffer for a declared length whose bytes have not arrived.
const INITIAL_BUFFER: usize = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug, strum::FromRepr)]
#[repr(u8)]
pub(crate) enum FrameKind {
    /// Opens an exchange; the method names its subject.
    Open = 1,
    /// Another piece of the request.
    More = 2,
    /// End of the request.
    End = 3,
    /// One piece of the answer.
    Reply = 4,
    /// End of the answer.
    Done = 5,
    /// The exchange failed; the payload is the error.
    Fail = 6,
    Ping = 7,
    Pong = 8,
    /// A complete request in one frame.
    Ask = 9,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PeerFrame {
    pub(crate) kind: FrameKind,
    /// Method of the request; 0 in every frame but the first of an exchange.
    pub(crate) method: u8,
    /// Id of the exchange, chosen by the side that opens it.
    pub(crate) exchange: u64,
    pub(crate) payload: Bytes,
}

impl PeerFrame {
    pub(crate) fn new(kind: FrameKind, exchange: u64, payload: Bytes) -> Self {
        Self { kind, method: 0, exchange, payload }
    }

    /// Creates a frame without a payload.
    pub(crate) fn without_payload(kind: FrameKind, exchange: u64) -> Self {
        Self::new(kind, exchange, Bytes::new())
    }
}

/// Reads the next frame; `None` if the other side closed the connection between two frames.
pub(crate) async fn read<R: AsyncRead + Unpin>(from: &mut R) -> io::Result<Option<PeerFrame>> {
    let mut header = [0u8; HEADER];
    let first = from.read(&mut header).await?;
    if first == 0 {
        return Ok(None);
    }
    from.read_exact(&mut header[first..]).await?;
    let length = u32::from_le_bytes(header[..4].try_into().expect("four bytes")) as usize;
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let kind = FrameKind::from_repr(header[4]).ok_or_else(|| invalid(format!("{} is no kind of frame", header[4])))?;
    if length > MAX_PAYLOAD {
        return Err(invalid(format!("a frame of {length} bytes; {MAX_PAYLOAD} is the most")));
    }
    let exchange = u64::from_le_bytes(header[6..].try_into().expect("eight bytes"));
    let payload = read_payload(from, length).await?;
    Ok(Some(PeerFrame { kind, method: header[5], exchange, payload }))
}

/// Reads a payload. Memory grows with what has arrived, not with what was announced.
async fn read_payload<R: AsyncRead + Unpin>(from: &mut R, length: usize) -> io::Result<Bytes> {
    let mut payload = BytesMut::with_capacity(length.min(INITIAL_BUFFER));
    let mut rest = from.take(length as u64);
    while payload.len() < length {
        if rest.read_buf(&mut payload).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(payload.freeze())
}

/// Writes a frame; the caller flushes.
pub(crate) async fn write<W: AsyncWrite + Unpin>(to: &mut W, frame: &PeerFrame) -> io::Result<()> {
    let length = u32::try_from(frame.payload.len()).ok().filter(|length| *length as usize <= MAX_PAYLOAD);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a frame is too long to send"))?;
    let mut header = [0u8; HEADER];
    header[..4].copy_from_slice(&length.to_le_bytes());
    header[4] = frame.kind as u8;
    header[5] = frame.method;
    header[6..].copy_from_slice(&frame.exchange.to_le_bytes());
    to.write_all(&header).await?;
    to.write_all(&frame.payload).await
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn check(bytes: &[u8]) -> io::Result<Option<PeerFrame>> {
        let mut from = bytes;
        read(&mut from).await
    }

    #[tokio::test]
    async fn a_frame_round_trips() {
        let mut wire = Vec::new();
        let frames = [
            PeerFrame { kind: FrameKind::Open, method: 9, exchange: 77, payload: Bytes::from(vec![5; 100_000]) },
            PeerFrame::without_payload(FrameKind::Ping, 0),
            PeerFrame::new(FrameKind::Fail, u64::MAX, Bytes::from_static(b"no")),
        ];
        for frame in &frames {
            write(&mut wire, frame).await.unwrap();
        }
        let mut from = wire.as_slice();
        for frame in frames {
            assert_eq!(read(&mut from).await.unwrap(), Some(frame));
        }
        assert_eq!(read(&mut from).await.unwrap(), None);
    }

    #[tokio::test]
    async fn every_truncation_is_an_error_and_never_a_frame() {
        let mut wire = Vec::new();
        write(&mut wire, &PeerFrame::new(FrameKind::Reply, 3, Bytes::from_static(b"hello"))).await.unwrap();
        for cut in 1..wire.len() {
            let error = check(&wire[..cut]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "cut at {cut}");
        }
    }

    #[tokio::test]
    async fn unknown_kinds_and_oversized_lengths_are_refused_before_allocation() {
        let mut wire = Vec::new();
        write(&mut wire, &PeerFrame::without_payload(FrameKind::Ping, 0)).await.unwrap();
        wire[4] = 99;
        assert!(check(&wire).await.unwrap_err().to_string().contains("99 is no kind"));
        wire[4] = FrameKind::Ping as u8;
        wire[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(check(&wire).await.unwrap_err().to_string().contains("is the most"));
    }
}
