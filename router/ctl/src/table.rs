//! Tables for people: aligned columns.

use std::time::Duration;

use comfy_table::presets::NOTHING;
use comfy_table::{Row, Table};
use serde_json::Value;

/// Column specification: for each column its title, a JSON pointer to its value, and for a duration that is a number
/// its unit: `ms` or `us`. Durations are shown with their units.
pub(crate) type TableColumns = &'static str;

/// Maximum width of a value in a column, and in the last column.
const MAX_CELL_CHARS: usize = 80;
const MAX_LAST_CELL_CHARS: usize = 1_000;

pub(crate) fn table(columns: TableColumns, lines: &[Value]) -> String {
    let columns: Vec<_> = columns.split(", ").filter_map(|column| column.split_once(" /")).collect();
    let widest = |at: usize| if at + 1 == columns.len() { MAX_LAST_CELL_CHARS } else { MAX_CELL_CHARS };
    let cell = |line: &Value, at: usize, path: &str| {
        let (path, unit) = path.split_once(' ').unwrap_or((path, ""));
        let value = line.pointer(&format!("/{path}"));
        let duration = value.and_then(Value::as_u64).and_then(|count| duration_of(count, unit));
        duration.map_or_else(|| cell_text_within(value, widest(at)), duration_text)
    };
    let cells = |line: &Value| columns.iter().enumerate().map(|(at, (_, path))| cell(line, at, path)).collect();
    let titles = columns.iter().map(|(title, _)| (*title).to_owned()).collect();
    aligned(std::iter::once(titles).chain(lines.iter().map(cells)).collect::<Vec<Vec<String>>>())
}

/// Aligns the columns of these rows, without trailing spaces.
pub fn aligned<R: Into<Row>>(rows: impl IntoIterator<Item = R>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).add_rows(rows);
    table.column_iter_mut().for_each(|column| _ = column.set_padding((0, 2)));
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Formats names and values in two columns.
pub fn field_list(facts: impl IntoIterator<Item = (&'static str, String)>) -> String {
    aligned(facts.into_iter().map(|(name, value)| [name.to_owned(), value]))
}

/// Returns a row of these cells.
pub fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).into()
}

/// Returns the items of a list; empty if it is not a list.
pub(crate) fn lines(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn duration_of(count: u64, unit: &str) -> Option<Duration> {
    match unit {
        "ms" => Some(Duration::from_millis(count)),
        "us" => Some(Duration::from_micros(count)),
        _ => None,
    }
}

/// Formats a duration for people: `150us`, `15ms`, `1.5s`, and from one minute on `2m5s` or `1h2m`.
pub(crate) fn duration_text(duration: Duration) -> String {
    match duration.as_secs() {
        0 if duration.is_zero() => "0s".into(),
        0 => format!("{duration:.1?}").replace('\u{b5}', "u").replace(".0", ""),
        1..60 => format!("{}s", (duration.as_secs_f64() * 10.0).round() / 10.0),
        seconds => {
            let seconds = if seconds < 3600 { seconds } else { seconds - seconds % 60 };
            humantime::format_duration(Duration::from_secs(seconds)).to_string().replace(' ', "")
        }
    }
}

/// Formats a value for a sentence or the last column.
pub(crate) fn cell_text(value: Option<&Value>) -> String {
    cell_text_within(value, MAX_LAST_CELL_CHARS)
}

/// Formats a value for a cell of at most `widest` characters.
fn cell_text_within(value: Option<&Value>, widest: usize) -> String {
    let text = match value {
        None | Some(Value::Null) => "-".into(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Bool(true)) => "yes".into(),
        Some(Value::Bool(false)) => "no".into(),
        Some(Value::Array(all)) if all.iter().all(Value::is_string) && !all.is_empty() => {
            all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(",")
        }
        Some(Value::Array(all)) => all.len().to_string(),
        Some(epoch @ Value::Object(_)) if epoch["generation"].is_u64() => {
            format!("{}.{}.{}", epoch["generation"], epoch["index"], epoch["position"])
        }
        Some(other) => other.to_string(),
    };
    // Names chosen by workers and tenants must not control the terminal or reverse the text direction.
    let plain: String = text.chars().map(|c| if c.is_control() || is_bidi_or_invisible(c) { '?' } else { c }).collect();
    if plain.is_empty() { "-".into() } else { truncate(plain, widest) }
}

/// Returns whether the character is a bidirectional control, a line separator or invisible.
fn is_bidi_or_invisible(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// Truncates to `widest` characters, at a word boundary if possible, with a visible mark.
fn truncate(text: String, widest: usize) -> String {
    let Some((end, _)) = text.char_indices().nth(widest) else { return text };
    let shortened: String = text[..end].chars().take(widest - 1).collect();
    let whole = shortened.rfind(' ').filter(|at| *at > shortened.len() / 2).unwrap_or(shortened.len());
    format!("{}…", shortened[..whole].trim_end_matches([' ', ',', ';', ':']))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_align_and_values_are_human_readable() {
        let lines = [
            json!({"id": "s-1", "owner": {"endpoint": "http://a:1", "live": true}, "epoch": {"generation": 0, "index": 7, "position": 1}}),
            json!({"id": "s-22222", "owner": null, "epoch": {"generation": 1, "index": 8, "position": 0}}),
        ];
        let columns = "SESSION /id, OWNER /owner/endpoint, LIVE /owner/live, EPOCH /epoch";
        let wanted =
            "SESSION  OWNER       LIVE  EPOCH\ns-1      http://a:1  yes   0.7.1\ns-22222  -           -     1.8.0\n";
        assert_eq!(table(columns, &lines), wanted);
    }

    #[test]
    fn durations_are_shown_with_their_units() {
        let lines = [json!({"left_ms": 15_000, "idle_us": 150}), json!({"left_ms": null, "idle_us": 1_500_000})];
        let wanted = "EXPIRES IN  IDLE\n15s         150us\n-           1.5s\n";
        assert_eq!(table("EXPIRES IN /left_ms ms, IDLE /idle_us us", &lines), wanted);
        let shown = |millis| duration_text(Duration::from_millis(millis));
        assert_eq!([0, 20, 1_000, 59_940].map(shown), ["0s", "20ms", "1s", "59.9s"]);
        assert_eq!([125_000, 3_725_000, 90_000_000].map(shown), ["2m5s", "1h2m", "1day1h"]);
        assert_eq!(duration_text(Duration::from_micros(1_540)), "1.5ms");
    }

    #[test]
    fn control_characters_are_replaced_and_values_truncated() {
        assert_eq!(cell_text(Some(&json!("a\u{1b}[2Jb\n"))), "a?[2Jb?");
        assert_eq!(cell_text(Some(&json!("owner\u{202e}live\u{2066}x\u{200f}\u{61c}é"))), "owner?live?x??é");
        assert_eq!(cell_text(Some(&json!("x".repeat(5_000)))).chars().count(), MAX_LAST_CELL_CHARS);
        assert_eq!(
            (cell_text(Some(&json!(["a", "b"]))), cell_text(Some(&json!([{}, {}]))), cell_text(Some(&json!("")))),
            ("a,b".into(), "2".into(), "-".into())
        );
    }

    #[test]
    fn long_values_are_cut_at_a_word_boundary_except_in_the_last_column() {
        let long = "it does not answer the leader: its certificate does not name `router-3.internal`, under which it was called";
        let lines = [json!({"what": long, "then": long})];
        let shown = table("WHAT /what, THEN /then", &lines);
        let (first, last) = shown.lines().nth(1).unwrap().split_once('…').unwrap();
        assert!(long.starts_with(first) && long[first.len()..].starts_with([' ', ',']), "{first}");
        assert!(first.len() > 50 && first.chars().count() < MAX_CELL_CHARS, "{first}");
        assert_eq!(last.trim(), long);
        assert_eq!(truncate("é".repeat(90), 80), format!("{}…", "é".repeat(79)));
    }
}
