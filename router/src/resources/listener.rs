//! What is learned from the answer of a new response while it passes: its id at once, its output at its end.

use std::sync::Arc;

use bytes::Bytes;
use vocabulary::{SessionId, TenantId, WorkerId};

use super::numbers::Numbers;
use super::transcript::{Addition, Told};
use super::{IdSniffer, Resources};
use crate::incoming::Incoming;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Form {
    /// One JSON object.
    Whole,
    /// Server-sent events.
    Events,
}

/// Listens to one answer. Dropping it is the answer's end.
#[derive(Debug)]
pub(crate) struct Listener {
    resources: Arc<Resources>,
    tenant: TenantId,
    worker: WorkerId,
    /// The body, until the id is known.
    request: Bytes,
    sniffer: IdSniffer,
    adds: Option<Addition>,
    collector: Collector,
    numbers: Numbers,
}

impl Listener {
    /// For an answer that `worker` gives to a step of `session`; where the request adds nothing to one no transcript is kept.
    pub(crate) fn new(
        resources: Arc<Resources>,
        (request, session): (&Incoming, Option<SessionId>),
        worker: WorkerId,
        form: Form,
    ) -> Self {
        let collector = Collector { form, limit: resources.longest_answer(), line: Vec::new(), last: None };
        let (tenant, adds) = (request.tenant.clone(), request.adds.clone().map(|adds| adds.of_session(session)));
        let (sniffer, numbers) = (IdSniffer::default(), Numbers::default());
        let request = request.body.clone();
        Self { resources, tenant, worker, request, sniffer, adds, collector, numbers }
    }

    /// The number of an event that follows what has passed.
    pub(crate) fn next_number(&self) -> u64 {
        self.numbers.next()
    }

    pub(crate) fn piece(&mut self, data: &[u8]) {
        if let Some(id) = self.sniffer.feed(data) {
            let request = std::mem::take(&mut self.request);
            let is_named = self.resources.is_named_by(&request, &id);
            if is_named || !self.resources.learn(&self.tenant, &id, self.worker) {
                self.adds = None;
            }
        }
        if self.collector.form == Form::Events {
            self.numbers.feed(data);
        }
        if self.adds.is_some() {
            self.collector.feed(data);
        }
    }

    fn ended(&mut self) {
        let Some(told) = self.collector.told() else { return };
        if let Some(transcript) = self.adds.as_ref().and_then(|adds| adds.answered(told.output)) {
            self.resources.keep_transcript(&self.tenant, &told.id, transcript);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.ended();
    }
}

/// Keeps a whole answer, or the last event of a stream, within a bound.
#[derive(Debug)]
struct Collector {
    form: Form,
    limit: usize,
    /// The answer so far, or the line that is being read; longer than the limit when it was cut.
    line: Vec<u8>,
    last: Option<Vec<u8>>,
}

impl Collector {
    fn feed(&mut self, data: &[u8]) {
        if self.form == Form::Whole {
            return self.push(data);
        }
        for part in data.split_inclusive(|byte| *byte == b'\n') {
            self.push(part);
            if part.ends_with(b"\n") {
                self.end_of_line();
            }
        }
    }

    /// Of what is too long, one byte too many is kept, as a sign.
    fn push(&mut self, data: &[u8]) {
        let room = (self.limit + 1).saturating_sub(self.line.len());
        self.line.extend_from_slice(&data[..data.len().min(room)]);
    }

    fn end_of_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let data = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii);
        if let Some(data) = data.filter(|data| data.starts_with(b"{")) {
            self.last = (line.len() <= self.limit).then(|| data.to_vec());
        }
    }

    fn told(&mut self) -> Option<Told<'_>> {
        match self.form {
            Form::Whole if self.line.len() > self.limit => None,
            Form::Whole => Told::read(&self.line),
            Form::Events => {
                self.end_of_line();
                Told::read_event(self.last.as_deref()?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn collector(form: Form, limit: usize) -> Collector {
        Collector { form, limit, line: Vec::new(), last: None }
    }

    const STREAM: &str = "event: response.created\r\ndata: {\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\",\"output\":[]}}\r\n\r\n\
        event: response.completed\r\ndata: {\"response\":{\"id\":\"resp_1\",\"status\":\"completed\",\"output\":[{\"x\":1}]},\"type\":\"response.completed\"}\r\n\r\ndata: [DONE]\n\n";

    #[test]
    fn a_stream_that_was_cut_tells_nothing() {
        let mut cut = collector(Form::Events, 1000);
        cut.feed(&STREAM.as_bytes()[..STREAM.find("event: response.completed").unwrap()]);
        assert!(cut.told().is_none());
    }

    #[test]
    fn what_is_too_long_is_not_kept() {
        let object = r#"{"id":"resp_1","status":"completed","output":[]}"#;
        for (limit, kept) in [(object.len(), true), (object.len() - 1, false)] {
            let mut whole = collector(Form::Whole, limit);
            whole.feed(object.as_bytes());
            assert_eq!(whole.told().is_some(), kept);
            assert!(whole.line.len() <= limit + 1);
        }
        let mut events = collector(Form::Events, 90);
        events.feed(STREAM.as_bytes());
        assert!(events.told().is_none(), "the last event is too long, and the one before is not the last");
    }

    proptest! {
        #[test]
        fn however_a_stream_is_cut_into_pieces_its_last_response_is_told(cuts in prop::collection::vec(1usize..60, 0..20)) {
            let mut events = collector(Form::Events, 1000);
            let mut rest = STREAM.as_bytes();
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                events.feed(piece);
                rest = after;
            }
            events.feed(rest);
            let told = events.told().unwrap();
            prop_assert_eq!((told.id.as_str(), told.output.get()), ("resp_1", "[{\"x\":1}]"));
        }
    }
}
