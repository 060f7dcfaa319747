//! Resume: an answer that broke off goes on at another worker, planned and sent as its step was.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use planner::Plan;
use vocabulary::Tokens;
use workers_shim::dialect::{GoOn, Usage};

use super::commit;
use super::execute::{Failed, execute};
use super::finish::Finish;
use super::legs::{LegError, Legs, Opened};
use super::plan::{Classified, plan};
use super::receipt::Ending;
use super::underway::{Break, Underway};
use crate::error::ApiError;
use crate::gateway::Gateway;
use crate::upstream::WorkerBody;

/// Token ids of the prompt, and those of the answer that are kept. Without them all is asked for anew.
pub type SoFar = Option<(Vec<u32>, Vec<u32>)>;

/// The rest of an answer.
pub struct Rest {
    /// Its first piece.
    pub first: Bytes,
    /// What comes after that.
    pub body: WorkerBody,
    /// What is to be done at its end.
    pub finish: Finish,
}

/// Goes on with what `finish` was to end. The error is for the client; the step is over then.
pub async fn resume(finish: Finish, broken: Break, so_far: SoFar) -> Result<Rest, ApiError> {
    let gateway = finish.gateway.clone();
    let (error, usage) = (broken.error.clone(), broken.usage);
    resumed(&gateway, Underway::broken(finish, broken), (so_far, usage)).await.map_err(|_| {
        let requests = &gateway.metrics.requests;
        requests.broken.with_label_values(&["failed"]).inc();
        requests.errors.with_label_values(&["worker_broke_off"]).inc();
        error
    })
}

async fn resumed(
    gateway: &Arc<Gateway>,
    mut underway: Underway,
    (so_far, usage): (SoFar, Option<Usage>),
) -> Result<Rest, ApiError> {
    loop {
        let Some((step, chosen)) = underway.planned(|step, excluded| plan(gateway, step, excluded))? else {
            return Err(ApiError::Overloaded { what: "what has failed once does not wait" });
        };
        commit::announce(gateway, step, &chosen);
        let sent = match legs(gateway, (step, &chosen), so_far.as_ref()) {
            Some(legs) => execute(gateway, (step, &chosen), legs).await,
            None => {
                let (asked, exclude, error) = (Instant::now(), chosen.target(), LegError::Unknown);
                Err(Failed { asked, remarks: Vec::new(), exclude, error })
            }
        };
        match sent {
            Ok(answering) => {
                let (opened, finish) = underway.answering(answering);
                return match opened {
                    Opened::Stream(answer, first) => Ok(begun(gateway, (answer.into_body(), first), finish)),
                    // Refused: what was taken up is not what the engine takes.
                    Opened::Whole(answer, _) => {
                        tracing::warn!(worker = %finish.server(), status = %answer.status(), "the rest of an answer was refused");
                        finish.end(Ending::Broken, usage);
                        Err(ApiError::WorkerFailed { detail: "it refused the rest of an answer".into() })
                    }
                };
            }
            Err(failed) => underway.failed(failed)?,
        }
    }
}

fn begun(gateway: &Gateway, (body, first): (WorkerBody, Bytes), finish: Finish) -> Rest {
    let requests = &gateway.metrics.requests;
    requests.broken.with_label_values(&["resumed"]).inc();
    if let Some(resumed) = finish.attempts.last().and_then(|attempt| attempt.resumed) {
        requests.resume.observe(resumed.took.duration().as_secs_f64());
    }
    Rest { first, body, finish }
}

/// The legs for what is left of the answer; none where nobody knows how long it may be.
fn legs(
    gateway: &Arc<Gateway>,
    (step, plan): (&Classified, &Plan),
    so_far: Option<&(Vec<u32>, Vec<u32>)>,
) -> Option<Legs> {
    let legs = Legs::of(gateway, step);
    let Some((prompt, said)) = so_far else { return Some(legs) };
    let target = step.located.workers.iter().find(|worker| worker.id == plan.target())?;
    let context = Some(target.capacity.context).filter(|context| *context > Tokens::ZERO);
    let body = legs.body.going_on(legs.options.api, GoOn { prompt, said, context })?;
    Some(legs.going_on(body))
}
