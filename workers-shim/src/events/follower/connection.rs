//! Connections to an event publisher: the subscription, and short probe connections that show whether the publisher is
//! still there.
//!
//! A connection whose peer vanished silently looks like that of an engine without events.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::zmtp::{SocketType, ZmtpConnection, ZmtpError};

/// Timeout for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of probe connections. Together with their timeouts a lost publisher is noticed within 7 s.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);
/// Attempts per probe: one may fail because this host or the engine is busy.
const CHECK_ATTEMPTS: usize = 2;

/// Why a source is disconnected.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionLoss {
    /// The connection was not accepted.
    #[error("no connection within {CONNECT_TIMEOUT:?}")]
    Unreachable,
    /// The peer is not a publisher, or it closed the connection.
    #[error(transparent)]
    Ended(#[from] ZmtpError),
    /// The connection stands, but a probe connection is not answered.
    #[error("a second connection got no answer")]
    Unresponsive,
    /// The connection stands, but delivers no messages.
    #[error("the live socket delivers no messages, although replays do")]
    Deaf,
    /// The sequence numbers of its messages went back.
    #[error("another process speaks there")]
    SequenceReset,
}

/// Connects to `endpoint` and subscribes to all topics.
pub(super) async fn subscribe(endpoint: &str) -> Result<ZmtpConnection, ConnectionLoss> {
    let mut connection = connect(endpoint).await?;
    connection.subscribe("").await?;
    Ok(connection)
}

async fn connect(endpoint: &str) -> Result<ZmtpConnection, ConnectionLoss> {
    timeout(CONNECT_TIMEOUT, ZmtpConnection::connect(endpoint, SocketType::Sub))
        .await
        .map_err(|_| ConnectionLoss::Unreachable)?
        .map_err(ConnectionLoss::Ended)
}

/// Returns once probe connections to `endpoint` fail. They subscribe to nothing.
pub(super) async fn wait_unresponsive(endpoint: &str) {
    loop {
        sleep(CHECK_INTERVAL).await;
        let mut failed = 0;
        while connect(endpoint).await.is_err() {
            failed += 1;
            if failed == CHECK_ATTEMPTS {
                return;
            }
        }
    }
}
