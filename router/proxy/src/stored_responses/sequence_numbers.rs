//! Sequence numbers of the events in a `/v1/responses` stream, so that an event that the router adds continues them.

/// Tracks the `"sequence_number"` of the newest event, without parsing the events.
#[derive(Debug, Default)]
pub(super) struct SequenceNumberScanner {
    last: Option<u64>,
    /// The end of the previous chunks: a number may be split between chunks.
    tail: Vec<u8>,
}

/// Inside a text its quotes would be escaped.
const FIELD: &[u8] = b"\"sequence_number\":";
/// Field name, a space, the longest number, and the byte that ends it.
const MAX_MATCH_BYTES: usize = FIELD.len() + 22;

impl SequenceNumberScanner {
    pub(super) fn feed(&mut self, piece: &[u8]) {
        let seen = last_number(piece);
        self.tail.extend_from_slice(&piece[..piece.len().min(MAX_MATCH_BYTES)]);
        self.last = seen.or_else(|| last_number(&self.tail)).or(self.last);
        if piece.len() > MAX_MATCH_BYTES {
            self.tail.clear();
            self.tail.extend_from_slice(&piece[piece.len() - MAX_MATCH_BYTES..]);
        } else {
            let excess = self.tail.len().saturating_sub(MAX_MATCH_BYTES);
            self.tail.drain(..excess);
        }
    }

    pub(super) fn next(&self) -> u64 {
        self.last.map_or(0, |newest| newest.saturating_add(1))
    }
}

/// Returns the last complete number in `text`.
fn last_number(text: &[u8]) -> Option<u64> {
    let mut until = text.len();
    loop {
        let at = text[..until].windows(FIELD.len()).rposition(|window| window == FIELD)?;
        let rest = text[at + FIELD.len()..].trim_ascii_start();
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        // A number at the end of the text may continue in the next chunk.
        if digits > 0 && digits < rest.len() {
            return std::str::from_utf8(&rest[..digits]).ok()?.parse().ok();
        }
        until = at;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str = concat!(
        "event: response.created\ndata: {\"sequence_number\":0,\"response\":{\"id\":\"resp_1\"}}\n\n",
        "data: {\"type\":\"response.output_text.delta\",\"delta\":\"\\\"sequence_number\\\":99,\",\"sequence_number\": 41}\n\n",
        "data: {\"sequence_number\":42,\"delta\":\"a long one that goes on for more than any number could be wide\"}\n\n",
    );

    #[test]
    fn a_stream_without_sequence_numbers_starts_at_the_first() {
        let mut numbers = SequenceNumberScanner::default();
        numbers.feed(b"data: {}\n\n");
        assert_eq!(numbers.next(), 0);
    }

    proptest! {
        #[test]
        fn the_next_sequence_number_is_found_at_any_chunk_boundary(cuts in prop::collection::vec(1usize..60, 0..20)) {
            let mut numbers = SequenceNumberScanner::default();
            let mut rest = STREAM.as_bytes();
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                numbers.feed(piece);
                rest = after;
            }
            numbers.feed(rest);
            prop_assert_eq!(numbers.next(), 43);
        }
    }
}
