//! Both legs at once, where engines wait for each other. Each would wait for minutes, so the end of one bounds the other.

use super::*;

/// How long a target may go on whose source refused its leg: the same request is refused there at once, in words that
/// are the client's to read.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends both. The prefill leg goes on when the decode leg has begun to answer: it ends once its KV was fetched.
pub(super) async fn run(
    (legs, plan): (&Legs, &Plan),
    transfer: &KvTransfer,
    mut client: oneshot::Sender<RemotePrefillResult>,
) {
    let (failed, failure) = oneshot::channel();
    let source = tokio::spawn({
        let (legs, plan, transfer) = (legs.clone(), *plan, transfer.clone());
        async move {
            if let Err(error) = run_source_leg(&legs, &plan, (&transfer, None)).await {
                // Nobody hears it where the answer has begun, or the client is gone.
                let _ = failed.send(error);
            }
        }
    });
    let body = legs.body.decode(&legs.options, (transfer, None));
    let met = tokio::select! {
        biased;
        opened = serve_while_source_lives(legs, plan, body) => Ok(opened),
        error = refusal_event(failure) => Err(error),
        () = client_left(&mut client) => return source.abort(),
    };
    let outcome = match met {
        Ok(opened) => (opened, Vec::new()),
        Err(error) => {
            tracing::warn!(worker = %plan.prefill.worker, %error, "a prefill leg failed");
            (serve_without_transfer(legs, plan).await, vec![failed_prefill_event(&error)])
        }
    };
    if outcome.0.is_err() {
        // Nobody will fetch what it computes.
        source.abort();
    }
    let _ = client.send(outcome);
}

/// Why the prefill leg failed, once the decode leg cannot come to an answer any more.
async fn refusal_event(failure: oneshot::Receiver<LegError>) -> LegError {
    match failure.await {
        Ok(LegError::Failed(status)) if status.is_client_error() => {
            tokio::time::sleep(REFUSAL_TIMEOUT).await;
            LegError::Failed(status)
        }
        Ok(error) => error,
        // It went well.
        Err(_) => std::future::pending().await,
    }
}
