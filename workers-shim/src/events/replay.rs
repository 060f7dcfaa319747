//! Asking a publisher for what it said before: `["", start]` from a DEALER socket, answers up to an end marker.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use crate::zmtp::{SocketType, ZmtpConnection, ZmtpError};

/// The longest wait for a connection, and for each message.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The sequence number that ends a replay: -1.
const END_SEQUENCE: u64 = u64::MAX;

/// A replay that did not come to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReplayError {
    /// Nobody answered in time.
    #[error("no answer within {TIMEOUT:?}")]
    TimedOut,
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] ZmtpError),
}

/// Frames of one event message: its number and its content.
pub(super) struct EventMessage {
    pub(super) sequence: u64,
    pub(super) payload: Bytes,
}

impl EventMessage {
    /// The last two frames, whatever stands before them: topics and delimiters differ between versions.
    pub(super) fn from_frames(mut frames: Vec<Bytes>) -> Option<Self> {
        let payload = frames.pop()?;
        let number = frames.pop()?;
        let sequence = u64::from_be_bytes(number.as_ref().try_into().ok()?);
        Some(Self { sequence, payload })
    }
}

/// Asks for everything from `start` on and shows each message in order.
pub(super) async fn replay(endpoint: &str, start: u64, mut show: impl FnMut(EventMessage)) -> Result<(), ReplayError> {
    let mut connection = with_timeout(ZmtpConnection::connect(endpoint, SocketType::Dealer)).await?;
    let ask = [Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())];
    with_timeout(connection.send(&ask)).await?;
    loop {
        let Some(message) = EventMessage::from_frames(with_timeout(connection.recv()).await?) else { continue };
        if message.sequence == END_SEQUENCE {
            return Ok(());
        }
        show(message);
    }
}

async fn with_timeout<T>(step: impl Future<Output = Result<T, ZmtpError>>) -> Result<T, ReplayError> {
    Ok(timeout(TIMEOUT, step).await.map_err(|_| ReplayError::TimedOut)??)
}
