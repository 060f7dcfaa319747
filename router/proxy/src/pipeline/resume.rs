//! Resume: an answer that broke off continues at another worker, planned and sent like its step.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use planner::Plan;
use vocabulary::Tokens;
use workers_shim::engine_api::AnswerContinuation;

use super::commit;
use super::end_guard::EndGuard;
use super::execute::execute;
use super::plan::plan;
use super::planning::{PlanVerdict, Planning};
use super::stream::StreamStage;
use super::streaming::Streaming;
use crate::error::ApiError;
use crate::leg_outcome::{FailedAttempt, LegError, LegResponse};
use crate::legs::Legs;
use crate::request_states::ClassifiedStep;
use crate::upstream::WorkerBody;

/// Where another worker resumes an answer.
#[derive(Debug)]
pub enum ResumeFrom {
    /// After these token ids of the prompt, and of the part of the answer that is kept.
    TokenIds {
        /// The prompt.
        prompt: Vec<u32>,
        /// The kept part of the answer.
        answer: Vec<u32>,
    },
    /// From the beginning: the whole answer is generated again.
    Beginning,
}

impl ResumeFrom {
    /// Returns the number of answer tokens that are kept.
    pub(super) fn kept_tokens(&self) -> Tokens {
        match self {
            Self::TokenIds { answer, .. } => Tokens(answer.len() as u64),
            Self::Beginning => Tokens::ZERO,
        }
    }
}

/// The rest of an answer.
pub struct ResumedAnswer {
    /// The first chunk.
    pub first_chunk: Bytes,
    /// The body after the first chunk.
    pub body: WorkerBody,
    /// The step, which another worker answers now.
    pub streaming: Streaming,
}

/// Resumes an answer that broke off. On failure the client gets `error`; the step is over then.
pub(super) async fn resume(
    stage: Arc<StreamStage>,
    planning: EndGuard<Planning>,
    (error, from): (ApiError, ResumeFrom),
) -> Result<ResumedAnswer, ApiError> {
    let requests = &stage.requests;
    match try_resume(&stage, planning, &from).await {
        Ok(resumed) => {
            requests.broken_streams.with_label_values(&["resumed"]).inc();
            if let Some(resumed) = resumed.streaming.attempt().and_then(|attempt| attempt.resume) {
                requests.resume.observe(resumed.duration.duration().as_secs_f64());
            }
            Ok(resumed)
        }
        Err(_) => {
            requests.broken_streams.with_label_values(&["failed"]).inc();
            requests.errors.with_label_values(&["stream_interrupted"]).inc();
            Err(error)
        }
    }
}

async fn try_resume(
    stage: &StreamStage,
    mut planning: EndGuard<Planning>,
    from: &ResumeFrom,
) -> Result<ResumedAnswer, ApiError> {
    let (ends, reporter) = (&stage.ends, &stage.reporter);
    loop {
        let verdict = planning.take().plan(&stage.plan, |step, excluded| plan(&stage.plan, step, excluded));
        let dispatched = match verdict.map_err(|failed| failed.record(ends))? {
            PlanVerdict::Start(dispatched) => EndGuard::new(*dispatched, ends),
            PlanVerdict::Wait(planning) => {
                return Err(planning
                    .give_up(ApiError::Overloaded { what: "what has failed once does not wait" })
                    .record(ends));
            }
        };
        let (step, chosen) = (&dispatched.step, &dispatched.planned.plan);
        commit::announce(&stage.execute.ledger, step, chosen);
        let sent = match legs(stage, (step, chosen), from) {
            Ok(legs) => execute(&stage.execute, (step, chosen), legs).await,
            Err(error) => {
                let (sent_at, exclude) = (Instant::now(), chosen.target());
                Err(FailedAttempt { sent_at, events: Vec::new(), exclude, error })
            }
        };
        match sent {
            Ok(started) => {
                let (opened, streaming) = dispatched.take().started(reporter, started);
                return match opened {
                    LegResponse::Stream(answer, first_chunk) => {
                        Ok(ResumedAnswer { first_chunk, body: answer.into_body(), streaming })
                    }
                    // The engine refused the continuation that was built for it.
                    LegResponse::Whole(answer, _) => {
                        let (worker, status) = (streaming.target(), answer.status());
                        tracing::warn!(%worker, %status, "the rest of an answer was refused");
                        ends.record(streaming.refused());
                        Err(ApiError::WorkerFailed { detail: "it refused the rest of an answer".into() })
                    }
                };
            }
            Err(failed) => {
                let failed = dispatched.take().failed(reporter, failed);
                planning = EndGuard::new(failed.map_err(|failed| failed.record(ends))?, ends);
            }
        }
    }
}

/// Builds the legs for the rest of the answer. Fails where its maximum length is unknown, or memory is short.
fn legs(stage: &StreamStage, (step, plan): (&ClassifiedStep, &Plan), from: &ResumeFrom) -> Result<Legs, LegError> {
    let legs = Legs::of(&stage.client, step);
    let ResumeFrom::TokenIds { prompt, answer } = from else { return Ok(legs) };
    let target = step.located.workers.iter().find(|worker| worker.id == plan.target());
    let context = target.ok_or(LegError::UnknownWorker)?.capacity.context;
    let context = Some(context).filter(|context| *context > Tokens::ZERO);
    let body = legs.body.continuation(legs.options.api, AnswerContinuation { prompt, answer, context });
    legs.for_resume(body.ok_or(LegError::UnknownWorker)?)
}
