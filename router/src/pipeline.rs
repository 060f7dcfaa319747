//! The way of one request, from bytes to bytes. Control flow only: what each step does lives in its own file.

pub mod aside;
mod batch;
pub mod commit;
pub mod execute;
pub mod finish;
pub(crate) mod guard;
pub mod identify;
mod knowledge;
pub mod legs;
pub mod locate;
pub mod opening;
pub mod parse;
pub mod place;
pub mod plan;
pub mod prompts;
pub mod readback;
pub mod receipt;
pub mod remote_prefill;
pub mod replicate;
pub mod resumable;
pub mod resume;
pub mod session_key;
pub mod single_flight;
pub mod steering;
pub mod stream;
pub mod summary;
pub mod tenure;
pub mod token_ids;
pub mod turns;
pub mod underway;
pub(crate) mod verify;
pub mod vigil;

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use prefix::{Checkpoint, Converted};

use crate::error::ApiError;
use crate::gateway::Gateway;
use crate::incoming::{Endpoint, Incoming};
use crate::memory::MemoryReservation;
use crate::telemetry::metrics::Metrics;
use aside::Load;
use identify::{Found, Named, Prefixed, Unnamed};
use legs::Legs;
use underway::Underway;

/// Serves one generation request: parse, identify, locate, classify, plan, execute, stream, commit.
pub async fn serve_generation(
    gateway: &Arc<Gateway>,
    endpoint: Endpoint,
    incoming: Incoming,
) -> Result<Response, ApiError> {
    let mut clock = Steps::begin(&gateway.metrics);
    gateway.policies.retries.earn(&incoming.tenant);
    let salt = gateway.salts.of(&incoming.tenant);
    let request = Load::of(&incoming).done(&gateway.aside, move || parse::parse(incoming, endpoint, salt)).await??;
    gateway.metrics.requests.count_stripped(request.body.stripped(&legs::options(&request)));
    if let Some(reserved) = &request.incoming.reserved {
        reserved.take_answer(request.answer).await?;
    }
    clock.done("parse");
    let (prefixed, chat) = identify(gateway, request).await?;
    clock.done("identify");
    let located = locate::locate(gateway, prefixed, chat).await?;
    clock.done("locate");
    let step = plan::classify(gateway, located);
    clock.done("classify");
    let mut underway = Underway::new(gateway, step);
    loop {
        let planned = underway.planned(|step, excluded| plan::plan(gateway, step, excluded))?;
        clock.done("plan");
        let Some((step, plan)) = planned else {
            underway.called(|step| plan::classify(gateway, locate::again(gateway, step.located))).await;
            clock.leave_out();
            continue;
        };
        commit::announce(gateway, step, &plan);
        match execute::execute(gateway, (step, &plan), Legs::of(gateway, step)).await {
            Ok(answering) => {
                clock.done("execute");
                let (opened, finish) = underway.answering(answering);
                let summary = summary::summary(&finish);
                // The end of the stream commits.
                return Ok(summary::told(stream::stream(opened, finish), summary));
            }
            Err(failed) => underway.failed(failed)?,
        }
    }
}

/// At the cost of what is new where the conversation is known, else as a whole. With what its engine makes of it, where
/// that had to be found out.
async fn identify(gateway: &Arc<Gateway>, request: parse::Request) -> Result<(Prefixed, Option<Converted>), ApiError> {
    let model = gateway.catalog().model(&request.model);
    let has_text = model.identifier.text().is_some();
    let remembered = &gateway.remembered;
    // Trees of values and rendered text are gone when it is identified.
    let mut derived = request.incoming.memory.as_deref().map(MemoryReservation::beside);
    if let Some(derived) = &mut derived {
        derived.grow(request.body.derived_bytes())?;
    }
    let (request, found, derived) = grown(gateway, Unnamed::new(request, model), derived).await?;
    let (request, found) = match found {
        Some(found) => {
            drop(derived);
            (request, found)
        }
        None => {
            let incoming = &request.request().incoming;
            let (tenant, size) = (incoming.tenant.clone(), incoming.body.len());
            let known = match has_text {
                true => remembered.checkpoints.known(&tenant, request.pin, size).await,
                false => None,
            };
            whole(gateway, (request, known), derived).await?
        }
    };
    let Named { prefixed, known, next, chat } = request.named(found);
    remembered.keep(&prefixed, known, next);
    Ok((prefixed, chat))
}

/// At the cost of what is new, once what comes in another endpoint's words is put into those of chat. None where it must
/// be identified as a whole. The memory goes with the work, which may outlast its client.
async fn grown(
    gateway: &Arc<Gateway>,
    request: Unnamed,
    derived: Option<MemoryReservation>,
) -> Result<(Unnamed, Option<Found>, Option<MemoryReservation>), ApiError> {
    let (load, trails) = (Load::of(&request.request().incoming), gateway.remembered.identity.trails.clone());
    let work = move || {
        let request = if request.is_foreign() { request.converted() } else { request };
        let found = request.grown(&trails);
        (request, found, derived)
    };
    load.done(&gateway.aside, work).await
}

async fn whole(
    gateway: &Arc<Gateway>,
    (request, known): (Unnamed, Option<Checkpoint>),
    derived: Option<MemoryReservation>,
) -> Result<(Unnamed, Found), ApiError> {
    let (load, trails) = (Load::of(&request.request().incoming), gateway.remembered.identity.trails.clone());
    let work = move || {
        let found = request.whole(&trails, known.as_ref());
        drop(derived);
        (request, found)
    };
    load.done(&gateway.aside, work).await
}

/// How long each step took.
struct Steps<'a> {
    metrics: &'a Metrics,
    since: Instant,
}

impl<'a> Steps<'a> {
    fn begin(metrics: &'a Metrics) -> Self {
        Self { metrics, since: Instant::now() }
    }

    fn done(&mut self, step: &str) {
        let now = Instant::now();
        self.metrics.plans.step.with_label_values(&[step]).observe((now - self.since).as_secs_f64());
        self.since = now;
    }

    /// What was since then belongs to no step.
    fn leave_out(&mut self) {
        self.since = Instant::now();
    }
}

#[cfg(test)]
mod tests;
