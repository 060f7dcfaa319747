//! Finds the end of a server-sent event, and recognises the event that ends an answer.

/// Returns the event's name, if its first line contains it.
pub(super) fn event_name(event: &[u8]) -> &[u8] {
    let line = event.split(|byte| *byte == b'\n').next().unwrap_or_default();
    line.strip_prefix(b"event:").unwrap_or_default().trim_ascii()
}

/// How an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FinalEvent {
    Complete,
    Failed,
}

/// Returns how an event of this name ends the answer (the equivalent of `[DONE]`); None if it does not end it.
pub(super) fn final_event(name: &[u8]) -> Option<FinalEvent> {
    match name {
        b"message_stop" | b"response.completed" | b"response.incomplete" => Some(FinalEvent::Complete),
        b"response.failed" => Some(FinalEvent::Failed),
        _ => None,
    }
}

/// Returns the offset after the blank line that ends the first event.
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
