//! Concurrent legs, for engines whose legs wait for each other. Each would wait for minutes, so the end of one bounds
//! the other.

use super::*;

/// How long the target may continue after the source refused its leg: it refuses the same request at once, with an
/// error that is meant for the client.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends both legs. The prefill leg continues after the decode leg has begun to answer: it ends once its KV was
/// fetched.
pub(super) async fn run(
    (legs, pair): (&Legs, &LegPair),
    transfer: &KvTransfer,
    mut client: oneshot::Sender<RemotePrefillAnswer>,
) {
    let (failed, failure) = oneshot::channel();
    let source = tokio::spawn({
        let (legs, pair, transfer) = (legs.clone(), *pair, transfer.clone());
        async move {
            if let Err(error) = run_source_leg(&legs, &pair, (&transfer, None)).await {
                // The receiver is gone if the answer has begun or the client has left.
                let _ = failed.send(error);
            }
        }
    });
    let body = legs.body.decode(&legs.options, (transfer, None));
    let met = tokio::select! {
        biased;
        opened = serve_while_source_lives(legs, pair, body) => Ok(opened),
        error = refusal_event(failure) => Err(error),
        () = client_left(&mut client) => return source.abort(),
    };
    let outcome = match met {
        Ok(opened) => (opened, Vec::new()),
        Err(error) => {
            tracing::warn!(worker = %pair.prefill.worker, %error, "a prefill leg failed");
            (serve_without_transfer(legs, pair).await, vec![failed_prefill_event(&error)])
        }
    };
    if outcome.0.is_err() {
        // Nobody will fetch what it computes.
        source.abort();
    }
    let _ = client.send(outcome);
}

/// Returns why the prefill leg failed, once the decode leg cannot produce an answer any more.
async fn refusal_event(failure: oneshot::Receiver<LegError>) -> LegError {
    match failure.await {
        Ok(LegError::Failed(status)) if status.is_client_error() => {
            tokio::time::sleep(REFUSAL_TIMEOUT).await;
            LegError::Failed(status)
        }
        Ok(error) => error,
        // The prefill leg succeeded.
        Err(_) => std::future::pending().await,
    }
}
