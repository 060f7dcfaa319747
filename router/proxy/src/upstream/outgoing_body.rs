//! The body of a request to a worker, sent chunk by chunk without a copy.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use workers_shim::engine_api::LegBody;

/// Chunks that are not yet sent.
#[derive(Debug)]
pub(crate) struct OutgoingBody {
    chunks: VecDeque<Bytes>,
    left: u64,
}

impl From<LegBody> for OutgoingBody {
    fn from(body: LegBody) -> Self {
        let mut chunks = VecDeque::from(body.into_chunks());
        chunks.retain(|chunk| !chunk.is_empty());
        let left = chunks.iter().map(|chunk| chunk.len() as u64).sum();
        Self { chunks, left }
    }
}

impl Body for OutgoingBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let chunk = self.chunks.pop_front();
        self.left -= chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
        Poll::Ready(chunk.map(|chunk| Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.chunks.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
