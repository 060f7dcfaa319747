//! Parsing and range checks shared by all trace formats, and notes on a trace that was read despite flaws.

use chrono::NaiveDateTime;
use serde::Deserialize;
use serde::de::IgnoredAny;
use vocabulary::{Micros, Tokens};

use super::error::{TraceError, TraceFault, TraceLocation};

/// Longest accepted prompt or answer: far above any model's context.
const MAX_TOKENS: u64 = 1 << 24;
/// Longest accepted time, in seconds: ten years.
pub(crate) const MAX_SECONDS: f64 = 315_576_000.0;
pub(crate) const MAX_REQUESTS: usize = 1 << 24;

/// Returns the non-blank lines with their numbers.
pub(crate) fn lines<'a>(file: &'a str, text: &'a str) -> impl Iterator<Item = (TraceLocation<'a>, &'a str)> {
    let numbered = text.lines().zip(1..).map(move |(text, line)| (TraceLocation { file, line }, text));
    numbered.filter(|(_, text)| !text.trim().is_empty())
}

/// Parses one JSON record that starts at `location`.
pub(crate) fn json<'a, T: Deserialize<'a>>(
    location: TraceLocation<'_>,
    text: &'a str,
    accepted: &'static str,
) -> Result<T, TraceError> {
    serde_json::from_str(text).map_err(|error| {
        let line = location.line + error.line().saturating_sub(1);
        let full = error.to_string();
        let why = full.split(" at line ").next().unwrap_or_default();
        let cut = if error.is_eof() { "the text is cut off: " } else { "" };
        let why = format!("{cut}{why} (column {})", error.column());
        TraceLocation { line, ..location }.fault(TraceFault::Malformed { why, accepted })
    })
}

/// Finds the line numbers of parts of a text, asked for in order, so that every newline is counted once.
pub(crate) struct LineLocator<'a> {
    text: &'a str,
    location: TraceLocation<'a>,
    at: usize,
}

impl<'a> LineLocator<'a> {
    /// Starts at the beginning of `text`, which itself starts at `location`.
    pub(crate) fn new(location: TraceLocation<'a>, text: &'a str) -> Self {
        Self { text, location, at: 0 }
    }

    /// Returns the location of a part that starts at or after the previous one.
    pub(crate) fn location_of(&mut self, part: &str) -> TraceLocation<'a> {
        let begin = (part.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize).min(self.text.len());
        let passed = self.text.as_bytes().get(self.at..begin).unwrap_or_default();
        self.location.line += passed.iter().filter(|byte| **byte == b'\n').count();
        self.at = self.at.max(begin);
        self.location
    }
}

/// Range checks for the numbers of one record.
impl TraceLocation<'_> {
    pub(crate) fn check_prompt(&self, field: &'static str, tokens: u64) -> Result<Tokens, TraceError> {
        match tokens {
            1..=MAX_TOKENS => Ok(Tokens(tokens)),
            _ => Err(self.out_of_range(field, tokens, "1 to 16777216 tokens")),
        }
    }

    /// Checks an answer's length; zero tokens count as one.
    pub(crate) fn check_answer(&self, field: &'static str, tokens: u64) -> Result<Tokens, TraceError> {
        match tokens {
            0..=MAX_TOKENS => Ok(Tokens(tokens.max(1))),
            _ => Err(self.out_of_range(field, tokens, "0 to 16777216 tokens")),
        }
    }

    pub(crate) fn check_seconds(&self, field: &'static str, seconds: f64) -> Result<Micros, TraceError> {
        if (0.0..=MAX_SECONDS).contains(&seconds) {
            Ok(Micros((seconds * 1e6).round() as u64))
        } else {
            Err(self.out_of_range(field, seconds, "0 to 315576000 s (ten years)"))
        }
    }

    /// Checks ids from `first` on: below 2^63, so that counting on from any id cannot overflow.
    pub(crate) fn check_ids(&self, field: &'static str, first: u64, count: u32) -> Result<(), TraceError> {
        let beyond = first.saturating_add(u64::from(count));
        if beyond <= 1 << 63 { Ok(()) } else { Err(self.out_of_range(field, first, "ids below 9223372036854775808")) }
    }

    pub(crate) fn check_request_count(&self, requests: usize) -> Result<(), TraceError> {
        match requests {
            0 => Err(self.fault(TraceFault::Empty)),
            1..=MAX_REQUESTS => Ok(()),
            _ => Err(self.out_of_range("requests", requests, "1 to 16777216 of them in a file")),
        }
    }
}

/// Parses `YYYY-MM-DD HH:MM:SS.fraction` or RFC 3339 in UTC, not before 1970; none for anything else.
pub(crate) fn parse_time(text: &str) -> Option<Micros> {
    let text = text.strip_suffix('Z').unwrap_or(text);
    let parse = |format| NaiveDateTime::parse_from_str(text, format);
    let time = parse("%Y-%m-%d %H:%M:%S%.f").or_else(|_| parse("%Y-%m-%dT%H:%M:%S%.f")).ok()?;
    u64::try_from(time.and_utc().timestamp_micros()).ok().map(Micros)
}

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
    fn line_locator_finds_parts_by_their_first_line() {
        let text = "one\ntwo two\n\nfour";
        let mut cursor = LineLocator::new(TraceLocation { file: "a", line: 10 }, text);
        let lines: Vec<usize> = [0, 2, 4, 8, 13].map(|at| cursor.location_of(&text[at..]).line).into();
        assert_eq!(lines, [10, 10, 11, 11, 13]);
    }

    #[test]
    fn timestamps_parse_to_the_microsecond() {
        let at = |text| parse_time(text).unwrap().0;
        assert_eq!(at("2023-11-16 18:17:04.0319600") - at("2023-11-16 18:17:03.9799600"), 52_000);
        assert_eq!(at("2024-03-01 00:00:00") - at("2024-02-28 00:00:00"), 2 * 86_400_000_000);
        assert_eq!(at("2024-01-01 00:00:00") - at("2023-12-31 23:59:59.5"), 500_000);
        assert_eq!(parse_time("2026-02-05T09:32:59.551Z"), parse_time("2026-02-05 09:32:59.551"));
        for odd in ["", "2023-11-16", "2023-13-16 18:17:03", "2023-11-16 25:00:00", "2023-11-16 18:17:03.x", "a b"] {
            assert_eq!(parse_time(odd), None, "{odd}");
        }
    }

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
