//! A request in the metrics, from its arrival to the last byte of its answer or to whatever ended it before.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::response::Response;
use http_body_util::BodyExt as _;
use tokio::sync::OwnedSemaphorePermit;

use crate::app_state::AppState;

/// Dropping it is the request's end.
pub(super) struct RequestTracker {
    gateway: Arc<AppState>,
    path: &'static str,
    arrived: Instant,
    /// None until an answer began; a client that leaves before is counted as nginx does.
    status: Option<u16>,
    /// Its place among the tenant's requests that run at once, where these are limited.
    slot: Option<OwnedSemaphorePermit>,
}

const CLIENT_LEFT: u16 = 499;

impl RequestTracker {
    pub(super) fn begin(gateway: Arc<AppState>, path: &'static str, arrived: Instant) -> Self {
        gateway.metrics.requests.in_flight.inc();
        Self { gateway, path, arrived, status: None, slot: None }
    }

    /// Holds this place to its end.
    pub(super) fn hold_slot(&mut self, place: Option<OwnedSemaphorePermit>) {
        self.slot = place;
    }

    /// Goes on until the body ends or is dropped.
    pub(super) fn wrap(mut self, response: Response) -> Response {
        self.status = Some(response.status().as_u16());
        response.map(|body| {
            Body::new(body.map_err(move |error| {
                // It lives as long as the body.
                let _ = &self;
                error
            }))
        })
    }
}

impl Drop for RequestTracker {
    fn drop(&mut self) {
        let requests = &self.gateway.metrics.requests;
        requests.in_flight.dec();
        requests.duration.with_label_values(&[self.path]).observe(self.arrived.elapsed().as_secs_f64());
        let code = self.status.unwrap_or(CLIENT_LEFT).to_string();
        requests.total.with_label_values(&[self.path, &code]).inc();
    }
}
