//! Where one event ends, and which one ends an answer.

/// The name in an event's first line, where it stands there.
pub(super) fn event_name(event: &[u8]) -> &[u8] {
    let line = event.split(|byte| *byte == b'\n').next().unwrap_or_default();
    line.strip_prefix(b"event:").unwrap_or_default().trim_ascii()
}

/// What the last event of an answer says of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FinalEvent {
    Complete,
    Failed,
}

/// What an event of this name says of the answer that it ends, as `[DONE]` does elsewhere; none where it ends none.
pub(super) fn final_event(name: &[u8]) -> Option<FinalEvent> {
    match name {
        b"message_stop" | b"response.completed" | b"response.incomplete" => Some(FinalEvent::Complete),
        b"response.failed" => Some(FinalEvent::Failed),
        _ => None,
    }
}

/// Where the first event ends: after its blank line.
pub(super) fn event_end(bytes: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(found) = memchr::memchr(b'\n', &bytes[from..]) {
        let after = from + found + 1;
        match (bytes.get(after), bytes.get(after + 1)) {
            (Some(b'\n'), _) => return Some(after + 1),
            (Some(b'\r'), Some(b'\n')) => return Some(after + 2),
            _ => from = after,
        }
    }
    None
}
