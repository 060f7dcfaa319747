//! A stream of server-sent events, looked at as it passes: where events end, usage, finish reasons, the end mark.
//!
//! Pieces are handed on as they came, without a copy, unless an event has to be kept from the client.

use bytes::{Bytes, BytesMut};
use memchr::memmem;

use super::vllm::{Answer, Usage};

/// Most bytes of one event that are held back while its end is awaited.
pub const LONGEST_EVENT: usize = 4 << 20;

/// What is to be done with a usage event that has no choices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UsagePolicy {
    /// It belongs to the client.
    Pass,
    /// The router asked for it; the client did not.
    Keep,
}

/// What an answer's stream has told so far.
#[derive(Debug)]
pub struct EventScan {
    policy: UsagePolicy,
    /// The start of an event whose end has not come.
    held: BytesMut,
    usage: Option<Usage>,
    finished: bool,
    done: bool,
}

impl EventScan {
    /// At the start of a stream.
    pub fn new(policy: UsagePolicy) -> Self {
        Self { policy, held: BytesMut::new(), usage: None, finished: false, done: false }
    }

    /// Looks at a piece and returns what of it, and of what was held back, goes to the client now.
    pub fn piece(&mut self, piece: Bytes) -> Bytes {
        let whole = ends_event(&piece);
        if self.held.is_empty() && whole && !self.must_edit(&piece) {
            self.look(&piece);
            return piece;
        }
        self.held.extend_from_slice(&piece);
        let end = match memmem::rfind(&self.held, b"\n\n") {
            Some(at) => at + 2,
            // An endless event is none; better a strange client than a full memory.
            None if self.held.len() > LONGEST_EVENT => self.held.len(),
            None => return Bytes::new(),
        };
        let events = self.held.split_to(end).freeze();
        self.look(&events);
        if self.must_edit(&events) { without_usage(&events) } else { events }
    }

    /// What is still held back when the stream ends.
    pub fn rest(&mut self) -> Bytes {
        let rest = self.held.split().freeze();
        self.look(&rest);
        rest
    }

    /// Token counts, once they were seen.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Whether the stream came to a proper end: the end mark, or a finish reason.
    pub fn is_complete(&self) -> bool {
        self.done || self.finished
    }

    fn must_edit(&self, events: &[u8]) -> bool {
        self.policy == UsagePolicy::Keep && memmem::find(events, b"\"usage\":{").is_some()
    }

    fn look(&mut self, events: &[u8]) {
        if memmem::find(events, b"\"usage\":{").is_some() {
            let counted = payloads(events).filter_map(|payload| Answer::read(payload).usage);
            self.usage = counted.last().or(self.usage);
        }
        self.finished |= memmem::find_iter(events, b"\"finish_reason\":").any(|at| {
            let value = events[at + 16..].trim_ascii_start();
            !value.is_empty() && !value.starts_with(b"null")
        });
        self.done |= memmem::find(events, b"data: [DONE]").is_some();
    }
}

fn ends_event(piece: &[u8]) -> bool {
    piece.ends_with(b"\n\n")
}

/// The events' `data:` payloads.
fn payloads(events: &[u8]) -> impl Iterator<Item = &[u8]> {
    events.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(b"data:")).map(|data| data.trim_ascii())
}

/// The events but those that carry usage and no choices.
fn without_usage(events: &[u8]) -> Bytes {
    let mut kept = BytesMut::with_capacity(events.len());
    let mut rest = events;
    while !rest.is_empty() {
        let end = memmem::find(rest, b"\n\n").map_or(rest.len(), |at| at + 2);
        let (event, next) = rest.split_at(end);
        if !payloads(event).any(is_usage_only) {
            kept.extend_from_slice(event);
        }
        rest = next;
    }
    kept.freeze()
}

fn is_usage_only(payload: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Event<'a> {
        #[serde(borrow)]
        choices: Vec<&'a serde_json::value::RawValue>,
        #[serde(borrow)]
        usage: &'a serde_json::value::RawValue,
    }
    serde_json::from_slice::<Event<'_>>(payload)
        .is_ok_and(|event| event.choices.is_empty() && event.usage.get().starts_with('{'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vocabulary::Tokens;

    const TOKEN: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
    const LAST: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    /// Feeds `text` in pieces of `size` bytes; returns what the client gets.
    fn fed(scan: &mut EventScan, text: &str, size: usize) -> String {
        let mut out = Vec::new();
        for piece in text.as_bytes().chunks(size) {
            out.extend_from_slice(&scan.piece(Bytes::copy_from_slice(piece)));
        }
        out.extend_from_slice(&scan.rest());
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn everything_passes_when_the_client_asked_for_usage_however_it_is_cut() {
        let text = [TOKEN, LAST, USAGE, DONE].concat();
        for size in [1, 7, 64, 10_000] {
            let mut scan = EventScan::new(UsagePolicy::Pass);
            assert_eq!(fed(&mut scan, &text, size), text);
            assert_eq!(scan.usage().map(|usage| usage.prompt_tokens), Some(Tokens(5)), "pieces of {size}");
            assert!(scan.is_complete());
        }
    }

    #[test]
    fn a_usage_event_nobody_asked_for_is_kept_from_the_client_however_it_is_cut() {
        let text = [TOKEN, LAST, USAGE, DONE].concat();
        for size in [1, 7, 64, 10_000] {
            let mut scan = EventScan::new(UsagePolicy::Keep);
            assert_eq!(fed(&mut scan, &text, size), [TOKEN, LAST, DONE].concat(), "pieces of {size}");
            assert_eq!(scan.usage().map(|usage| usage.completion_tokens), Some(Tokens(2)));
        }
    }

    #[test]
    fn usage_beside_choices_stays_and_is_read() {
        let both = "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":{\"prompt_tokens\":9}}\n\n";
        let mut scan = EventScan::new(UsagePolicy::Keep);
        assert_eq!(fed(&mut scan, both, 10_000), both);
        assert_eq!(scan.usage().map(|usage| usage.prompt_tokens), Some(Tokens(9)));
    }

    #[test]
    fn whole_events_pass_without_a_copy() {
        let piece = Bytes::from_static(TOKEN.as_bytes());
        let passed = EventScan::new(UsagePolicy::Keep).piece(piece.clone());
        assert_eq!(passed.as_ptr(), piece.as_ptr());
    }

    #[test]
    fn a_stream_that_stops_in_the_middle_is_not_complete() {
        let mut scan = EventScan::new(UsagePolicy::Pass);
        fed(&mut scan, TOKEN, 10);
        assert!(!scan.is_complete());
        fed(&mut scan, LAST, 10);
        assert!(scan.is_complete());
    }

    #[test]
    fn an_endless_event_is_not_held_for_ever() {
        let mut scan = EventScan::new(UsagePolicy::Pass);
        let piece = Bytes::from(vec![b'x'; LONGEST_EVENT]);
        assert!(scan.piece(piece.clone()).is_empty());
        assert_eq!(scan.piece(piece).len(), 2 * LONGEST_EVENT);
    }
}
