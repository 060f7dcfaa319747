//! `strftime_now` for chat templates: formats a given UTC time as C and Python do.

use chrono::format::StrftimeItems;
use chrono::{DateTime, Utc};

/// Wall-clock time in seconds since 1970 (UTC), for templates that print a date.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WallTime {
    /// Seconds since the epoch.
    pub unix_seconds: i64,
}

/// Directives with the same result in C, Python and chrono, in any locale.
const DIRECTIVES: &str = "YymdHIMSjwuBbhAapFTDRnt%";

impl WallTime {
    /// Formats this time. Returns `None` for an unsupported directive.
    pub fn format(self, format: &str) -> Option<String> {
        let mut chars = format.chars();
        while chars.by_ref().any(|c| c == '%') {
            let letter = chars.next().and_then(|c| if c == '-' { chars.next() } else { Some(c) });
            letter.filter(|letter| DIRECTIVES.contains(*letter))?;
        }
        let items = StrftimeItems::new(format).parse().ok()?;
        let (first, last) = (DateTime::<Utc>::MIN_UTC.timestamp(), DateTime::<Utc>::MAX_UTC.timestamp());
        let time = DateTime::from_timestamp(self.unix_seconds.clamp(first, last), 0)?;
        Some(time.format_with_items(items.iter()).to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(unix_seconds: i64, format: &str, expected: &str) {
        assert_eq!(WallTime { unix_seconds }.format(format).as_deref(), Some(expected), "{unix_seconds} {format}");
    }

    #[test]
    fn dates_match_the_c_library() {
        check(0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001");
        check(1_709_210_096, "%d %b %Y, %a %j", "29 Feb 2024, Thu 060");
        check(1_735_603_200, "%-d %B %y day %j", "31 December 24 day 366");
        check(1_740_787_200, "%F %j", "2025-03-01 060");
        check(951_868_799, "%F %T %j", "2000-02-29 23:59:59 060");
        check(-1, "%F %T %A", "1969-12-31 23:59:59 Wednesday");
        check(1_763_697_600 + 13 * 3_600 + 5 * 60, "%I:%M %p %D %R %u %w", "05:05 PM 11/21/25 17:05 5 5");
    }

    #[test]
    fn midnight_and_noon_are_twelve_on_the_12_hour_clock() {
        check(0, "%I %p", "12 AM");
        check(12 * 3_600, "%-I %p", "12 PM");
    }

    #[test]
    fn text_around_directives_is_kept() {
        check(0, "100%% é%n%t", "100% é\n\t");
    }

    #[test]
    fn unknown_or_incomplete_directive_is_rejected() {
        for format in ["%Q", "%", "%-", "%-B", "%é"] {
            assert_eq!(WallTime::default().format(format), None, "{format}");
        }
    }

    #[test]
    fn arbitrary_times_do_not_panic() {
        for unix_seconds in [i64::MIN, i64::MAX, -62_135_596_800, 253_402_300_799] {
            assert!(WallTime { unix_seconds }.format("%F %T %A %j").is_some());
        }
    }
}
