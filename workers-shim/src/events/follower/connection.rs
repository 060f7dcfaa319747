//! Connections to a publisher: the one that listens, and short second ones that show whether it is still there.
//!
//! A connection whose other end vanished without a word looks like one of an engine that has nothing to say.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::zmtp::{SocketType, ZmtpConnection, ZmtpError};

/// The longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two looks whether the publisher still answers. With the waits for an answer, the longest time that a loss stays
/// unnoticed: 7 s.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);
/// Tries of a look: one may fail because this host or the engine is busy.
const CHECK_ATTEMPTS: usize = 2;

/// Why a source is not heard.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionLoss {
    /// Nobody took the connection.
    #[error("no connection within {CONNECT_TIMEOUT:?}")]
    Unreachable,
    /// Whoever did is no publisher, or it was there and is not any more.
    #[error(transparent)]
    Ended(#[from] ZmtpError),
    /// It seems to be there, and a second one is not answered.
    #[error("a second connection got no answer")]
    Unresponsive,
    /// It is there and brings nothing.
    #[error("only replays bring what is said")]
    Deaf,
    /// The numbers of its messages went back.
    #[error("another process speaks there")]
    SequenceReset,
}

/// Connects to everything that is said at `endpoint`.
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

/// Returns once nobody answers at `endpoint`. The connections that it makes for that ask for nothing.
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
