//! Notes on a trace that was read despite flaws.

use serde::de::IgnoredAny;

/// Most positions listed in a note.
const MAX_NAMED_PLACES: usize = 5;

/// Returns whether the last line of a file is truncated: a whole line is always valid JSON.
pub fn is_truncated(line: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(line).is_err()
}

/// Returns a note on truncated last lines, with their positions; none if there are none.
pub fn truncation_note(places: &[String]) -> Option<String> {
    let named = places[..places.len().min(MAX_NAMED_PLACES)].join(", ");
    let more = places.len().saturating_sub(MAX_NAMED_PLACES);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    let note = "cut off, as a router that was killed leaves its last line; left out";
    (!places.is_empty()).then(|| format!("{named}{more}: {note}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_json_marks_a_line_as_truncated() {
        assert!(["{\"a\": ", "{\"a\"", "\0\0", "{} {"].iter().all(|line| is_truncated(line)));
        assert!(!is_truncated("{\"a\": 1}") && !is_truncated("7"));
    }

    #[test]
    fn truncation_note_names_the_first_places_and_counts_the_rest() {
        let places = |count: u32| (0..count).map(|n| format!("f{n}:9")).collect::<Vec<_>>();
        assert_eq!(truncation_note(&[]), None);
        assert!(truncation_note(&places(2)).unwrap().starts_with("f0:9, f1:9: cut off"));
        assert!(truncation_note(&places(7)).unwrap().starts_with("f0:9, f1:9, f2:9, f3:9, f4:9 and 2 more: cut off"));
    }
}
