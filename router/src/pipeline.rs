//! The way of one request, from bytes to bytes. Control flow only: what each step does lives in its own file.

pub mod commit;
pub mod execute;
pub mod finish;
pub mod identify;
pub mod legs;
pub mod locate;
pub mod opening;
pub mod parse;
pub mod place;
pub mod plan;
pub mod prompts;
pub mod receipt;
pub mod remote_prefill;
pub mod replicate;
pub mod session_key;
pub mod single_flight;
pub mod steering;
pub mod stream;
pub mod underway;

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;

use crate::error::ApiError;
use crate::gateway::Gateway;
use crate::incoming::{Endpoint, Incoming};
use crate::telemetry::metrics::Metrics;
use identify::Prefixed;
use underway::Underway;

/// Bodies above this are tokenized on a thread that may block.
const LONG_BODY: usize = 256 << 10;

/// Serves one generation request: parse, identify, locate, classify, plan, execute, stream, commit.
pub async fn serve_generation(
    gateway: &Arc<Gateway>,
    endpoint: Endpoint,
    incoming: Incoming,
) -> Result<Response, ApiError> {
    let mut clock = Steps::begin(&gateway.metrics);
    let salt = gateway.salts.of(&incoming.tenant);
    let request = parse::parse(incoming, endpoint, salt)?;
    gateway.metrics.requests.count_stripped(request.body.stripped(&legs::options(&request)));
    clock.done("parse");
    let prefixed = identify(gateway, request).await?;
    clock.done("identify");
    let located = locate::locate(gateway, prefixed);
    clock.done("locate");
    let step = plan::classify(gateway, located);
    clock.done("classify");
    let mut underway = Underway::new(gateway, step);
    loop {
        let (step, plan) = underway.planned(|step, excluded| plan::plan(gateway, step, excluded))?;
        clock.done("plan");
        commit::announce(gateway, step, &plan);
        match execute::execute(gateway, step, &plan).await {
            Ok(answering) => {
                clock.done("execute");
                let (opened, finish) = underway.answering(answering);
                // The end of the stream commits.
                return Ok(stream::stream(opened, finish));
            }
            Err(failed) => underway.failed(failed)?,
        }
    }
}

async fn identify(gateway: &Gateway, request: parse::Request) -> Result<Prefixed, ApiError> {
    let model = gateway.catalog().model(&request.model);
    let (tenant, size, pin) = (request.incoming.tenant.clone(), request.incoming.body.len(), identify::pin(&request));
    let checkpoints = &gateway.remembered.checkpoints;
    let known = match model.identifier.text() {
        Some(_) => checkpoints.known(&tenant, pin, size).await,
        None => None,
    };
    let (prefixed, found) = if size < LONG_BODY {
        identify::identify(request, model, (pin, known))
    } else {
        let id = request.incoming.id;
        let identified = tokio::task::spawn_blocking(move || identify::identify(request, model, (pin, known))).await;
        identified.map_err(|_| ApiError::Internal { request: id.to_string() })?
    };
    checkpoints.keep(&tenant, pin, (&prefixed.prompt, found, size));
    Ok(prefixed)
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
}

#[cfg(test)]
mod tests;
