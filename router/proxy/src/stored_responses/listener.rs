//! Records a new response from its answer as it passes: its id at once, and its output at its end. A long output
//! is read on the offload pool.

use std::sync::Arc;

use bytes::Bytes;
use vocabulary::{SessionId, TenantId, WorkerId};

use super::sequence_numbers::SequenceNumberScanner;
use super::transcript::{ConversationAddition, ResponseObject};
use super::{IdSniffer, StoredResponses};
use crate::client_request::ClientRequest;
use crate::memory_budget::MemoryReservation;
use crate::offload_pool::{OffloadPool, OffloadSpec};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BodyFormat {
    /// One JSON object.
    Whole,
    /// Server-sent events.
    Events,
}

/// Recorder of the response that one answer creates. Dropping it ends the answer.
#[derive(Debug)]
pub(crate) struct ResponseRecorder {
    resources: Arc<StoredResponses>,
    pool: Arc<OffloadPool>,
    tenant: TenantId,
    worker: WorkerId,
    /// The request's body and its memory, until the id is known.
    request: Option<(Bytes, Option<Arc<MemoryReservation>>)>,
    load: OffloadSpec,
    /// Memory for reading the output.
    memory: Option<MemoryReservation>,
    sniffer: IdSniffer,
    addition: Option<ConversationAddition>,
    collector: Collector,
    sequence_numbers: SequenceNumberScanner,
}

impl ResponseRecorder {
    /// Records the answer of `worker` to a step of `session`. No transcript is kept where the request has no
    /// addition.
    pub(crate) fn new(
        (resources, pool): (Arc<StoredResponses>, Arc<OffloadPool>),
        (request, session): (&ClientRequest, Option<SessionId>),
        worker: WorkerId,
        form: BodyFormat,
    ) -> Self {
        let collector = Collector { form, limit: resources.max_answer_bytes(), line: Vec::new(), last_event: None };
        let (tenant, addition) =
            (request.tenant.clone(), request.addition.clone().map(|adds| adds.with_session(session)));
        let (sniffer, sequence_numbers) = (IdSniffer::default(), SequenceNumberScanner::default());
        let (load, memory) = (OffloadSpec::of(request), request.memory.as_deref().map(MemoryReservation::sibling));
        let request = Some((request.body.clone(), request.memory.clone()));
        Self { resources, pool, tenant, worker, request, load, memory, sniffer, addition, collector, sequence_numbers }
    }

    /// Returns the sequence number for an event after those that have passed.
    pub(crate) fn next_sequence_number(&self) -> u64 {
        self.sequence_numbers.next()
    }

    pub(crate) fn on_chunk(&mut self, data: &[u8]) {
        if let Some(id) = self.sniffer.feed(data) {
            let request = self.request.take();
            let is_named = request.is_some_and(|(body, _)| self.resources.is_named_by(&body, &id));
            if is_named || !self.resources.register(&self.tenant, &id, self.worker) {
                self.addition = None;
            }
        }
        if self.collector.form == BodyFormat::Events {
            self.sequence_numbers.feed(data);
        }
        if self.addition.is_some() {
            self.collector.feed(data);
        }
    }

    /// Stores the transcript. Without memory or a place to read a long output, none is stored.
    fn on_end(&mut self) {
        let Some(addition) = self.addition.take() else { return };
        let mut collector = self.collector.take();
        let load = self.load.on(collector.bytes() + addition.bytes());
        let read = move || {
            let response = collector.final_response()?;
            Some((addition.transcript_with(response.output)?, response.id))
        };
        let (resources, tenant) = (self.resources.clone(), self.tenant.clone());
        let store = move |read: Option<Option<(Bytes, String)>>| {
            if let Some((transcript, id)) = read.flatten() {
                resources.keep_transcript(&tenant, &id, transcript);
            }
        };
        load.run_detached((&self.pool, self.memory.take()), read, store);
    }
}

impl Drop for ResponseRecorder {
    fn drop(&mut self) {
        self.on_end();
    }
}

/// Keeps a whole answer, or the last event of a stream, up to a limit.
#[derive(Debug)]
struct Collector {
    form: BodyFormat,
    limit: usize,
    /// The answer so far, or the current line; longer than the limit when it was cut.
    line: Vec<u8>,
    last_event: Option<Vec<u8>>,
}

impl Collector {
    fn take(&mut self) -> Self {
        let (line, last_event) = (std::mem::take(&mut self.line), self.last_event.take());
        Self { form: self.form, limit: self.limit, line, last_event }
    }

    fn bytes(&self) -> usize {
        self.line.len() + self.last_event.as_ref().map_or(0, Vec::len)
    }

    fn feed(&mut self, data: &[u8]) {
        if self.form == BodyFormat::Whole {
            return self.push(data);
        }
        for part in data.split_inclusive(|byte| *byte == b'\n') {
            self.push(part);
            if part.ends_with(b"\n") {
                self.end_of_line();
            }
        }
    }

    /// Appends data; of what is too long, one byte too many is kept as a marker.
    fn push(&mut self, data: &[u8]) {
        let room = (self.limit + 1).saturating_sub(self.line.len());
        self.line.extend_from_slice(&data[..data.len().min(room)]);
    }

    fn end_of_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let data = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii);
        if let Some(data) = data.filter(|data| data.starts_with(b"{")) {
            self.last_event = (line.len() <= self.limit).then(|| data.to_vec());
        }
    }

    fn final_response(&mut self) -> Option<ResponseObject<'_>> {
        match self.form {
            BodyFormat::Whole if self.line.len() > self.limit => None,
            BodyFormat::Whole => ResponseObject::read(&self.line),
            BodyFormat::Events => {
                self.end_of_line();
                ResponseObject::read_event(self.last_event.as_deref()?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn collector(form: BodyFormat, limit: usize) -> Collector {
        Collector { form, limit, line: Vec::new(), last_event: None }
    }

    const STREAM: &str = "event: response.created\r\ndata: {\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\",\"output\":[]}}\r\n\r\n\
        event: response.completed\r\ndata: {\"response\":{\"id\":\"resp_1\",\"status\":\"completed\",\"output\":[{\"x\":1}]},\"type\":\"response.completed\"}\r\n\r\ndata: [DONE]\n\n";

    #[test]
    fn a_truncated_stream_yields_no_response() {
        let mut cut = collector(BodyFormat::Events, 1000);
        cut.feed(&STREAM.as_bytes()[..STREAM.find("event: response.completed").unwrap()]);
        assert!(cut.final_response().is_none());
    }

    #[test]
    fn an_oversized_response_is_discarded() {
        let object = r#"{"id":"resp_1","status":"completed","output":[]}"#;
        for (limit, kept) in [(object.len(), true), (object.len() - 1, false)] {
            let mut whole = collector(BodyFormat::Whole, limit);
            whole.feed(object.as_bytes());
            assert_eq!(whole.final_response().is_some(), kept);
            assert!(whole.line.len() <= limit + 1);
        }
        let mut events = collector(BodyFormat::Events, 90);
        events.feed(STREAM.as_bytes());
        assert!(events.final_response().is_none(), "the last event is too long, and the one before is not the last");
    }

    proptest! {
        #[test]
        fn the_final_response_is_found_at_any_chunk_boundary(cuts in prop::collection::vec(1usize..60, 0..20)) {
            let mut events = collector(BodyFormat::Events, 1000);
            let mut rest = STREAM.as_bytes();
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                events.feed(piece);
                rest = after;
            }
            events.feed(rest);
            let told = events.final_response().unwrap();
            prop_assert_eq!((told.id.as_str(), told.output.get()), ("resp_1", "[{\"x\":1}]"));
        }
    }
}
