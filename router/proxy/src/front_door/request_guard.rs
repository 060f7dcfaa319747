//! Tracks one request in the metrics, from its arrival to the last byte of its answer or to whatever ended it earlier.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::response::Response;
use http_body_util::BodyExt as _;
use tokio::sync::OwnedSemaphorePermit;

use crate::telemetry::metrics::Metrics;

/// Guard of one request in the metrics. Dropping it ends the request.
pub(super) struct RequestGuard {
    metrics: Arc<Metrics>,
    path: &'static str,
    arrived: Instant,
    /// `None` until an answer began; a client that leaves before is counted as 499, as nginx does.
    status: Option<u16>,
    /// The request's slot among the tenant's concurrent requests, where these are limited.
    slot: Option<OwnedSemaphorePermit>,
}

const CLIENT_LEFT: u16 = 499;

impl RequestGuard {
    pub(super) fn begin(metrics: Arc<Metrics>, path: &'static str, arrived: Instant) -> Self {
        metrics.requests.in_flight.inc();
        Self { metrics, path, arrived, status: None, slot: None }
    }

    /// Keeps this slot until the request ends.
    pub(super) fn hold_slot(&mut self, slot: Option<OwnedSemaphorePermit>) {
        self.slot = slot;
    }

    /// Keeps tracking until the body ends or is dropped.
    pub(super) fn wrap(mut self, response: Response) -> Response {
        self.status = Some(response.status().as_u16());
        response.map(|body| {
            Body::new(body.map_err(move |error| {
                // Moves the guard into the closure, so that it lives as long as the body.
                let _ = &self;
                error
            }))
        })
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let requests = &self.metrics.requests;
        requests.in_flight.dec();
        requests.duration.with_label_values(&[self.path]).observe(self.arrived.elapsed().as_secs_f64());
        let code = self.status.unwrap_or(CLIENT_LEFT).to_string();
        requests.total.with_label_values(&[self.path, &code]).inc();
    }
}
