//! A router is killed while it streams: its clients see the connection close and continue through another router.

use std::time::Duration;

use tokio::sync::oneshot;

use super::processes::kill;
use super::record::NemesisRecord;
use crate::NemesisError;
use crate::check::{GuaranteeViolation, ResponseStreamEnd};
use crate::streams::{StreamRequest, StreamResult, run_stream};
use crate::testbed::TrialEnvironment;

/// Long enough that the router is killed in the middle of the stream.
const TOKENS: u32 = 2000;
const FIRST_TOKEN_TIMEOUT: Duration = Duration::from_secs(10);

/// kill -9 of a node in the middle of a stream; the same step is sent to another node.
pub(super) async fn kill_mid_stream(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let router = environment.follower().await?;
    let elsewhere = environment.leader().await?;
    let key = format!("killed-{}", environment.rng.below(1_000_000));
    let addresses = environment.cluster.addresses().clone();
    let (begins, began) = oneshot::channel();
    let (wished, asked) = (key.clone(), addresses.clone());
    let streaming = tokio::spawn(async move {
        let wish = StreamRequest { seat: router, key: &wished, tokens: TOKENS };
        run_stream(&asked, wish, move || begins.send(()).unwrap_or_default()).await
    });
    let late = |_| NemesisError::Late { what: "a stream to begin".into() };
    let begun = tokio::time::timeout(FIRST_TOKEN_TIMEOUT, began).await.map_err(late)?;
    let mut fault = NemesisRecord::begin(environment);
    fault.count_fault();
    kill(environment, router).await?;
    let ended = streaming.await.unwrap_or(StreamResult::NotServed);
    let again = run_stream(&addresses, StreamRequest { seat: elsewhere, key: &key, tokens: 24 }, || {}).await;
    if begun.is_err() || ended != StreamResult::Ended(ResponseStreamEnd::Cut) {
        let detail = format!("the stream through the killed router: {ended:?}");
        fault.broken.push(GuaranteeViolation { guarantee: "a router is killed in mid-stream", detail });
    }
    if again != StreamResult::Ended(ResponseStreamEnd::Whole) {
        let detail = format!("through another router: {again:?}");
        fault.broken.push(GuaranteeViolation { guarantee: "a killed router's clients go on through another", detail });
    }
    environment.cluster.restart(router).await?;
    Ok(fault.end(environment))
}
