//! `strftime_now` for chat templates: the time is handed in, in UTC, and formatted as C and Python do.

use std::fmt::Write;

/// Wall-clock time, for templates that print a date. Seconds since 1970 in UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WallTime {
    /// Seconds since the epoch.
    pub unix_seconds: i64,
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A calendar date and time of day.
struct Civil {
    year: i64,
    month: usize,
    day: i64,
    weekday: usize,
    day_of_year: i64,
    hour: i64,
    minute: i64,
    second: i64,
}

impl WallTime {
    /// This time in the given format. `None` for a directive that is not supported.
    pub fn format(self, format: &str) -> Option<String> {
        let civil = self.civil();
        let mut out = String::with_capacity(format.len() * 2);
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            match c {
                '%' => civil.directive(&mut chars, &mut out)?,
                _ => out.push(c),
            }
        }
        Some(out)
    }

    /// Days to civil date: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".
    fn civil(self) -> Civil {
        let days = self.unix_seconds.div_euclid(86_400);
        let of_day = self.unix_seconds.rem_euclid(86_400);
        let z = days.saturating_add(719_468);
        let era = z.div_euclid(146_097);
        let doe = z.rem_euclid(146_097);
        let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
        let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
        let mp = (5 * doy + 2) / 153;
        let month = if mp < 10 { mp + 3 } else { mp - 9 };
        let year = yoe + era * 400 + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let day_of_year = if month > 2 { doy + 60 + i64::from(leap) } else { doy - 305 };
        Civil {
            year,
            month: month as usize,
            day: doy - (153 * mp + 2) / 5 + 1,
            weekday: (days.rem_euclid(7) + 4) as usize % 7,
            day_of_year,
            hour: of_day / 3_600,
            minute: of_day / 60 % 60,
            second: of_day % 60,
        }
    }
}

impl Civil {
    fn directive(&self, chars: &mut std::str::Chars<'_>, out: &mut String) -> Option<()> {
        let mut letter = chars.next()?;
        let padded = letter != '-';
        if !padded {
            letter = chars.next()?;
        }
        if let Some((value, width)) = self.number(letter) {
            let width = if padded { width } else { 0 };
            return write!(out, "{value:0width$}").ok();
        }
        let month = MONTHS[self.month - 1];
        let day = DAYS[self.weekday];
        match letter {
            _ if !padded => return None,
            'B' => out.push_str(month),
            'b' | 'h' => out.push_str(&month[..3]),
            'A' => out.push_str(day),
            'a' => out.push_str(&day[..3]),
            'p' => out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
            'F' => write!(out, "{:04}-{:02}-{:02}", self.year, self.month, self.day).ok()?,
            'T' => write!(out, "{:02}:{:02}:{:02}", self.hour, self.minute, self.second).ok()?,
            'D' => write!(out, "{:02}/{:02}/{:02}", self.month, self.day, self.year.rem_euclid(100)).ok()?,
            'R' => write!(out, "{:02}:{:02}", self.hour, self.minute).ok()?,
            '%' => out.push('%'),
            'n' => out.push('\n'),
            't' => out.push('\t'),
            _ => return None,
        }
        Some(())
    }

    fn number(&self, letter: char) -> Option<(i64, usize)> {
        Some(match letter {
            'Y' => (self.year, 4),
            'y' => (self.year.rem_euclid(100), 2),
            'm' => (self.month as i64, 2),
            'd' => (self.day, 2),
            'H' => (self.hour, 2),
            'I' => ((self.hour + 11) % 12 + 1, 2),
            'M' => (self.minute, 2),
            'S' => (self.second, 2),
            'j' => (self.day_of_year, 3),
            'w' => (self.weekday as i64, 1),
            'u' => ((self.weekday as i64 + 6) % 7 + 1, 1),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(unix_seconds: i64, format: &str, expected: &str) {
        assert_eq!(WallTime { unix_seconds }.format(format).as_deref(), Some(expected), "{unix_seconds} {format}");
    }

    #[test]
    fn dates_are_those_of_the_c_library() {
        check(0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001");
        check(1_709_210_096, "%d %b %Y, %a %j", "29 Feb 2024, Thu 060");
        check(1_735_603_200, "%-d %B %y day %j", "31 December 24 day 366");
        check(1_740_787_200, "%F %j", "2025-03-01 060");
        check(951_868_799, "%F %T %j", "2000-02-29 23:59:59 060");
        check(-1, "%F %T %A", "1969-12-31 23:59:59 Wednesday");
        check(1_763_697_600 + 13 * 3_600 + 5 * 60, "%I:%M %p %D %R %u %w", "05:05 PM 11/21/25 17:05 5 5");
    }

    #[test]
    fn midnight_and_noon_are_twelve_in_the_short_clock() {
        check(0, "%I %p", "12 AM");
        check(12 * 3_600, "%-I %p", "12 PM");
    }

    #[test]
    fn text_around_directives_is_kept() {
        check(0, "100%% é%n%t", "100% é\n\t");
    }

    #[test]
    fn an_unknown_or_unfinished_directive_is_refused() {
        for format in ["%Q", "%", "%-", "%-B", "%é"] {
            assert_eq!(WallTime::default().format(format), None, "{format}");
        }
    }

    #[test]
    fn no_time_panics() {
        for unix_seconds in [i64::MIN, i64::MAX, -62_135_596_800, 253_402_300_799] {
            assert!(WallTime { unix_seconds }.format("%F %T %A %j").is_some());
        }
    }
}
