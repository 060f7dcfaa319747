//! A router dies while it streams: its clients see the connection go, and go on through another.

use std::time::Duration;

use tokio::sync::oneshot;

use super::Strike;
use super::processes::kill;
use crate::NemesisError;
use crate::arena::Arena;
use crate::check::{Broken, StreamEnd};
use crate::streams::{Streaming, Wish, stream};

/// Long enough to be in the middle of it when the router dies.
const TOKENS: u32 = 2000;
const BEGINS_WITHIN: Duration = Duration::from_secs(10);

/// kill -9 of a node in the middle of a stream; the same step is asked again elsewhere.
pub(super) async fn killed(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let router = arena.follower().await?;
    let elsewhere = arena.leader().await?;
    let key = format!("killed-{}", arena.dice.below(1_000_000));
    let doors = arena.cluster.doors().clone();
    let (begins, began) = oneshot::channel();
    let (wished, asked) = (key.clone(), doors.clone());
    let streaming = tokio::spawn(async move {
        let wish = Wish { seat: router, key: &wished, tokens: TOKENS };
        stream(&asked, wish, move || begins.send(()).unwrap_or_default()).await
    });
    let late = |_| NemesisError::Late { what: "a stream to begin".into() };
    let begun = tokio::time::timeout(BEGINS_WITHIN, began).await.map_err(late)?;
    let mut strike = Strike::begin(arena);
    strike.fault();
    kill(arena, router).await?;
    let ended = streaming.await.unwrap_or(Streaming::NotServed);
    let again = stream(&doors, Wish { seat: elsewhere, key: &key, tokens: 24 }, || {}).await;
    if begun.is_err() || ended != Streaming::Ended(StreamEnd::Cut) {
        let detail = format!("the stream through the killed router: {ended:?}");
        strike.broken.push(Broken { promise: "a router is killed in mid-stream", detail });
    }
    if again != Streaming::Ended(StreamEnd::Whole) {
        let detail = format!("through another router: {again:?}");
        strike.broken.push(Broken { promise: "a killed router's clients go on through another", detail });
    }
    arena.cluster.restart(router).await?;
    Ok(strike.end(arena))
}
