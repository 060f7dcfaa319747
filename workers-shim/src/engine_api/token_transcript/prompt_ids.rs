//! Extracts the prompt's token ids from a stream event, so that later parsers need not scan a list as long as the
//! context. Engines put it beside the choices or into the first one; the field name counts wherever it occurs.

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;

// Made once: a search of a short event takes less time than making it.
static NAME: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"prompt_token_ids\""));

/// An event without its prompt's token ids.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::engine_api) struct ExtractedPromptIds {
    /// The event with `null` in their place.
    pub(in crate::engine_api) event: Bytes,
    pub(super) ids: Vec<u32>,
}

impl ExtractedPromptIds {
    /// Extracts the ids; None if the event contains none.
    pub(super) fn of(event: &[u8]) -> Option<Self> {
        // Inside a JSON string the quotes would be escaped, so this matches field names only.
        NAME.find_iter(event).find_map(|at| {
            let from = preceding_byte_at(event, at + NAME.needle().len(), b':')?;
            let (ids, to) = parse_ids(event, from).filter(|(ids, _)| !ids.is_empty())?;
            Some(Self { event: [&event[..from], b"null", &event[to..]].concat().into(), ids })
        })
    }
}

/// Expects `byte` at `at`, optionally surrounded by whitespace, and returns the offset after it.
fn preceding_byte_at(event: &[u8], at: usize, byte: u8) -> Option<usize> {
    let at = skip_space(event, at);
    (event.get(at) == Some(&byte)).then(|| skip_space(event, at + 1))
}

fn skip_space(event: &[u8], at: usize) -> usize {
    let rest = event.get(at..).unwrap_or_default();
    at + rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

/// Parses the list of numbers at `from` and returns it with its end; None if there is no such list. Reads no further
/// than the list, so that unterminated lists cost linear time.
fn parse_ids(event: &[u8], from: usize) -> Option<(Vec<u32>, usize)> {
    let first = preceding_byte_at(event, from, b'[')?;
    let is_inside = |byte: &&u8| byte.is_ascii_digit() || byte.is_ascii_whitespace() || **byte == b',';
    let end = first + event.get(first..)?.iter().take_while(is_inside).count();
    if event.get(end) != Some(&b']') {
        return None;
    }
    let inside = event[first..end].trim_ascii_end();
    // A token id has about five digits.
    let mut ids = Vec::with_capacity(inside.len() / 5);
    for number in inside.split(|byte| *byte == b',').filter(|_| !inside.is_empty()) {
        ids.push(parse_id(number.trim_ascii())?);
    }
    // Kept for the lifetime of the answer.
    ids.shrink_to_fit();
    Some((ids, end + 1))
}

fn parse_id(digits: &[u8]) -> Option<u32> {
    let is_number = !digits.is_empty() && (digits.len() == 1 || digits[0] != b'0');
    let add = |id: u32, digit: &u8| {
        let digit = digit.is_ascii_digit().then(|| u32::from(digit - b'0'))?;
        id.checked_mul(10)?.checked_add(digit)
    };
    digits.iter().try_fold(0, add).filter(|_| is_number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn extraction_leaves_the_rest_of_the_event_unchanged() {
        let (before, after) = (r#"data: {"id":"c","prompt_token_ids" : "#, r#","choices":[]}"#);
        let lifted = ExtractedPromptIds::of(format!("{before}[ 1, 20 ,4294967295 ]{after}\n\n").as_bytes()).unwrap();
        assert_eq!(lifted.ids, [1, 20, u32::MAX]);
        assert_eq!(lifted.event, format!("{before}null{after}\n\n"));
        let later = ExtractedPromptIds::of(br#"{"prompt_token_ids":[],"choices":[{"prompt_token_ids":[7]}]}"#).unwrap();
        assert_eq!(later.ids, [7], "an empty one tells nothing");
    }

    #[test]
    fn invalid_id_list_is_left_in_place() {
        for event in [
            r#"{"prompt_token_ids":null}"#,
            r#"{"prompt_token_ids":[]}"#,
            r#"{"prompt_token_ids":[1,-2]}"#,
            r#"{"prompt_token_ids":[1,4294967296]}"#,
            r#"{"prompt_token_ids":[01]}"#,
            r#"{"prompt_token_ids":[1,]}"#,
            r#"{"prompt_token_ids":[1.5]}"#,
            r#"{"prompt_token_ids":[[1]]}"#,
            r#"{"prompt_token_ids":[1,2"#,
            r#"{"prompt_token_ids""#,
            r#"{"text":"\"prompt_token_ids\":[1,2]"}"#,
            r#"{"text":"prompt_token_ids","ids":[1,2]}"#,
        ] {
            assert_eq!(ExtractedPromptIds::of(event.as_bytes()), None, "{event}");
        }
    }

    #[test]
    fn field_name_inside_a_string_is_skipped() {
        let lifted = ExtractedPromptIds::of(br#"{"text":"prompt_token_ids","prompt_token_ids":[7]}"#).unwrap();
        assert_eq!(
            (lifted.ids, &lifted.event[..]),
            (vec![7], &br#"{"text":"prompt_token_ids","prompt_token_ids":null}"#[..])
        );
    }

    #[test]
    fn unclosed_lists_are_scanned_once() {
        // Scanning each of them to the end of the input would take 10^12 bytes.
        let open = r#""prompt_token_ids":[1,2,"#.repeat(1 << 18);
        assert_eq!(ExtractedPromptIds::of(open.as_bytes()), None);
        let last = format!("{open}3]");
        assert_eq!(ExtractedPromptIds::of(last.as_bytes()).unwrap().ids, [1, 2, 3]);
    }

    proptest! {
        #[test]
        fn extracted_ids_match_a_json_parser(ids in proptest::collection::vec(0..=u32::MAX, 1..100), text: String) {
            let event = json!({"text": text, "choices": [{"prompt_token_ids": ids, "text": text}]});
            let lifted = ExtractedPromptIds::of(event.to_string().as_bytes()).unwrap();
            let rest: Value = serde_json::from_slice(&lifted.event).unwrap();
            prop_assert_eq!(lifted.ids, ids);
            prop_assert_eq!(rest, json!({"text": text, "choices": [{"prompt_token_ids": null, "text": text}]}));
        }
    }
}
