//! Connections to a publisher: the one that listens, and short second ones that show whether it is still there.
//!
//! A connection whose other end vanished without a word looks like one of an engine that has nothing to say.

use std::time::Duration;

use tokio::time::{sleep, timeout};
use zeromq::{Socket, SubSocket, ZmqError};

/// The longest wait for a connection.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks whether the publisher still answers. With the waits for an answer, the longest time that a loss stays
/// unnoticed: 7 s.
const LOOK: Duration = Duration::from_secs(3);
/// Tries of a look: one may fail because this host or the engine is busy.
const TRIES: usize = 2;

/// Why a source is not heard.
#[derive(Debug, thiserror::Error)]
pub(super) enum Loss {
    /// Nobody took the connection.
    #[error("no connection within {PATIENCE:?}")]
    Unreachable,
    /// Whoever did is no publisher.
    #[error("{0}")]
    Refused(#[from] ZmqError),
    /// It was there and is not any more.
    #[error("the connection was closed")]
    Closed,
    /// It seems to be there, and a second one is not answered.
    #[error("a second connection got no answer")]
    Unanswered,
    /// It is there and brings nothing.
    #[error("only replays bring what is said")]
    Deaf,
    /// The numbers of its messages went back.
    #[error("another process speaks there")]
    Backwards,
}

/// Connects a socket to everything that is said at `endpoint`.
pub(super) async fn listen(socket: &mut SubSocket, endpoint: &str) -> Result<(), Loss> {
    socket.subscribe("").await?;
    connect(socket, endpoint).await
}

async fn connect(socket: &mut SubSocket, endpoint: &str) -> Result<(), Loss> {
    timeout(PATIENCE, socket.connect(endpoint)).await.map_err(|_| Loss::Unreachable)?.map_err(Loss::Refused)
}

/// Returns once nobody answers at `endpoint`. The connections that it makes for that ask for nothing.
pub(super) async fn unanswered(endpoint: &str) {
    loop {
        sleep(LOOK).await;
        let mut failed = 0;
        while connect(&mut SubSocket::new(), endpoint).await.is_err() {
            failed += 1;
            if failed == TRIES {
                return;
            }
        }
    }
}
