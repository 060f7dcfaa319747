//! Server-sent events of a chat completion, cut out of a byte stream. Pure; bounded.
//!
//! OpenAI servers send every event as one `data:` line, so lines are all that is looked at.

/// The longest line that is kept.
const LONGEST_LINE: usize = 1 << 20;

/// A line grew past the bound.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {LONGEST_LINE} bytes")]
pub(crate) struct Oversized;

/// One event.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A JSON payload.
    Chunk(String),
    /// `data: [DONE]`.
    Done,
}

/// What has come of a line that is not complete yet.
#[derive(Default)]
pub(super) struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    /// Takes the next bytes and gives the events they complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<Vec<Event>, Oversized> {
        let mut events = Vec::new();
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.partial.extend_from_slice(&rest[..end]);
            events.extend(event(&self.partial));
            self.partial.clear();
            rest = &rest[end + 1..];
        }
        self.partial.extend_from_slice(rest);
        if self.partial.len() > LONGEST_LINE { Err(Oversized) } else { Ok(events) }
    }
}

fn event(line: &[u8]) -> Option<Event> {
    let payload = line.strip_prefix(b"data:")?.trim_ascii();
    match payload {
        b"[DONE]" => Some(Event::Done),
        _ => Some(Event::Chunk(String::from_utf8_lossy(payload).into_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_however_the_bytes_are_cut() {
        let stream = b"data: {\"a\":1}\r\n\r\n: comment\nevent: x\ndata: {\"b\":2}\n\ndata: [DONE]\n\n";
        let expected = [Event::Chunk("{\"a\":1}".into()), Event::Chunk("{\"b\":2}".into()), Event::Done];
        for size in 1..=stream.len() {
            let mut lines = Lines::default();
            let events: Vec<_> = stream.chunks(size).flat_map(|piece| lines.push(piece).unwrap()).collect();
            assert_eq!(events, expected, "pieces of {size}");
        }
    }

    #[test]
    fn a_line_without_an_end_is_refused_at_the_bound() {
        let mut lines = Lines::default();
        let piece = vec![b'x'; LONGEST_LINE];
        assert_eq!(lines.push(&piece), Ok(vec![]));
        assert_eq!(lines.push(b"y"), Err(Oversized));
    }
}
