//! A request in the metrics, from its arrival to the last byte of its answer or to whatever ended it before.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};

use crate::gateway::Gateway;

/// Dropping it is the request's end.
pub(super) struct Counted {
    gateway: Arc<Gateway>,
    path: &'static str,
    arrived: Instant,
    /// None until an answer began; a client that leaves before is counted as nginx does.
    status: Option<u16>,
}

const CLIENT_LEFT: u16 = 499;

impl Counted {
    pub(super) fn begin(gateway: Arc<Gateway>, path: &'static str, arrived: Instant) -> Self {
        gateway.metrics.requests.in_flight.inc();
        Self { gateway, path, arrived, status: None }
    }

    /// Goes on until the body ends or is dropped.
    pub(super) fn wrap(mut self, response: Response) -> Response {
        self.status = Some(response.status().as_u16());
        response.map(|body| Body::new(CountedBody { body, _counted: self }))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let requests = &self.gateway.metrics.requests;
        requests.in_flight.dec();
        requests.duration.with_label_values(&[self.path]).observe(self.arrived.elapsed().as_secs_f64());
        let code = self.status.unwrap_or(CLIENT_LEFT).to_string();
        requests.total.with_label_values(&[self.path, &code]).inc();
    }
}

struct CountedBody {
    body: Body,
    _counted: Counted,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
