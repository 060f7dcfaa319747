//! Requests a replay from a publisher: a DEALER socket sends `["", start]` and receives messages up to an end marker.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use crate::zmtp::{SocketType, ZmtpConnection, ZmtpError};

/// Timeout for connecting, and for each message.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The sequence number of the end marker: -1.
const END_SEQUENCE: u64 = u64::MAX;

/// Why a replay did not reach its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReplayError {
    /// No response in time.
    #[error("no answer within {TIMEOUT:?}")]
    TimedOut,
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] ZmtpError),
}

/// One event message: its sequence number and its payload.
pub(super) struct EventMessage {
    pub(super) sequence: u64,
    pub(super) payload: Bytes,
}

impl EventMessage {
    /// Parses the last two frames and ignores those before: topics and delimiters differ between versions.
    pub(super) fn from_frames(mut frames: Vec<Bytes>) -> Option<Self> {
        let payload = frames.pop()?;
        let number = frames.pop()?;
        let sequence = u64::from_be_bytes(number.as_ref().try_into().ok()?);
        Some(Self { sequence, payload })
    }
}

/// Requests all messages from `start` on and passes each to `show`, in order.
pub(super) async fn replay(endpoint: &str, start: u64, mut show: impl FnMut(EventMessage)) -> Result<(), ReplayError> {
    let mut connection = with_timeout(ZmtpConnection::connect(endpoint, SocketType::Dealer)).await?;
    let request = [Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())];
    with_timeout(connection.send(&request)).await?;
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
