//! Resume: an answer that broke off continues at another worker, planned and sent like its step.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use planner::Plan;
use vocabulary::Tokens;
use workers_shim::engine_api::{AnswerContinuation, TokenUsage};

use super::commit;
use super::execute::{FailedAttempt, execute};
use super::legs::{LegError, LegResponse, Legs};
use super::plan::{ClassifiedStep, plan};
use super::planning::{BrokenAnswer, Planning};
use super::receipt::RequestOutcome;
use super::request_end::RequestEnd;
use crate::app_state::AppState;
use crate::error::ApiError;
use crate::upstream::WorkerBody;

/// Token ids of the prompt, and of the answer part that is kept. Without them the whole answer is requested again.
pub type ResumePrefix = Option<(Vec<u32>, Vec<u32>)>;

/// The rest of an answer.
pub struct ResumedAnswer {
    /// The first chunk.
    pub first_chunk: Bytes,
    /// The body after the first chunk.
    pub body: WorkerBody,
    /// What to do at the end of the request.
    pub end: RequestEnd,
}

/// Resumes the answer of the request `finish`. The error is for the client; the step is over then.
pub async fn resume(finish: RequestEnd, broken: BrokenAnswer, so_far: ResumePrefix) -> Result<ResumedAnswer, ApiError> {
    let gateway = finish.gateway.clone();
    let (error, usage) = (broken.error.clone(), broken.usage);
    try_resume(&gateway, Planning::from_broken(finish, broken), (so_far, usage)).await.map_err(|_| {
        let requests = &gateway.metrics.requests;
        requests.broken_streams.with_label_values(&["failed"]).inc();
        requests.errors.with_label_values(&["stream_interrupted"]).inc();
        error
    })
}

async fn try_resume(
    gateway: &Arc<AppState>,
    mut underway: Planning,
    (so_far, usage): (ResumePrefix, Option<TokenUsage>),
) -> Result<ResumedAnswer, ApiError> {
    loop {
        let Some((step, chosen)) = underway.plan_next(|step, excluded| plan(gateway, step, excluded))? else {
            return Err(ApiError::Overloaded { what: "what has failed once does not wait" });
        };
        commit::announce(&gateway.ledger, step, &chosen);
        let sent = match legs(gateway, (step, &chosen), so_far.as_ref()) {
            Some(legs) => execute(gateway, (step, &chosen), legs).await,
            None => {
                let (asked, exclude, error) = (Instant::now(), chosen.target(), LegError::UnknownWorker);
                Err(FailedAttempt { sent_at: asked, events: Vec::new(), exclude, error })
            }
        };
        match sent {
            Ok(answering) => {
                let (opened, finish) = underway.start_answer(answering);
                return match opened {
                    LegResponse::Stream(answer, first) => {
                        Ok(resumed_answer(gateway, (answer.into_body(), first), finish))
                    }
                    // The engine refused the continuation that was built for it.
                    LegResponse::Whole(answer, _) => {
                        tracing::warn!(worker = %finish.target(), status = %answer.status(), "the rest of an answer was refused");
                        finish.end(RequestOutcome::Broken, usage);
                        Err(ApiError::WorkerFailed { detail: "it refused the rest of an answer".into() })
                    }
                };
            }
            Err(failed) => underway.record_failure(failed)?,
        }
    }
}

fn resumed_answer(gateway: &AppState, (body, first): (WorkerBody, Bytes), finish: RequestEnd) -> ResumedAnswer {
    let requests = &gateway.metrics.requests;
    requests.broken_streams.with_label_values(&["resumed"]).inc();
    if let Some(resumed) = finish.attempts.last().and_then(|attempt| attempt.resumed) {
        requests.resume.observe(resumed.took.duration().as_secs_f64());
    }
    ResumedAnswer { first_chunk: first, body, end: finish }
}

/// Builds the legs for the rest of the answer; `None` where its maximum length is unknown.
fn legs(
    gateway: &Arc<AppState>,
    (step, plan): (&ClassifiedStep, &Plan),
    so_far: Option<&(Vec<u32>, Vec<u32>)>,
) -> Option<Legs> {
    let legs = Legs::of(&gateway.workers, step);
    let Some((prompt, said)) = so_far else { return Some(legs) };
    let target = step.located.workers.iter().find(|worker| worker.id == plan.target())?;
    let context = Some(target.capacity.context).filter(|context| *context > Tokens::ZERO);
    let body = legs.body.continuation(legs.options.api, AnswerContinuation { prompt, answer: said, context })?;
    Some(legs.for_resume(body))
}
