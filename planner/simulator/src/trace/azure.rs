//! Azure's inference traces: CSV with arrival time and lengths; nothing is known of what prompts share.

use vocabulary::Micros;

use super::error::{Fault, Place, TraceError};
use super::record::lines;
use super::{Reader, Session, Step};

const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";
const ACCEPTED: &str =
    "TIMESTAMP,ContextTokens,GeneratedTokens first, then lines such as 2023-11-16 18:17:03.979,4808,10";

/// Reads a file as one session of independent requests.
pub(super) fn read(reader: &mut Reader, file: &str, text: &str) -> Result<(), TraceError> {
    let mut steps = Vec::new();
    let mut rows = lines(file, text);
    let header = rows.next().filter(|(_, line)| line.trim_end() == HEADER);
    if header.is_none() {
        let why = "the first line names other columns".to_owned();
        return Err(Place { file, line: 1 }.fault(Fault::Malformed { why, accepted: ACCEPTED }));
    }
    for (place, line) in rows {
        steps.push((step(place, line.trim_end())?, place));
    }
    Place { file, line: 1 }.count(steps.len())?;
    steps.sort_by_key(|(step, _)| step.at);
    let begin = steps[0].0.at;
    let since = |(step, place): (Step, Place<'_>)| {
        let at = place.seconds("TIMESTAMP (seconds after the first)", (step.at - begin).0 as f64 / 1e6)?;
        Ok(Step { at, ..step })
    };
    let steps = steps.into_iter().map(since).collect::<Result<_, TraceError>>()?;
    reader.sessions.push(Session { id: file.into(), steps });
    Ok(())
}

fn step(place: Place<'_>, line: &str) -> Result<Step, TraceError> {
    let malformed = |why: String| place.fault(Fault::Malformed { why, accepted: ACCEPTED });
    let fields: Vec<&str> = line.split(',').collect();
    let [time, prompt, answer] = fields[..] else {
        return Err(malformed(format!("{} columns where 3 belong", fields.len())));
    };
    let number = |field: &str, text: &str| {
        text.trim().parse::<u64>().map_err(|_| malformed(format!("{field} `{text}` is not a whole number from 0 on")))
    };
    let at = time_of(time.trim()).ok_or_else(|| malformed(format!("`{time}` is not a time")))?;
    let prompt = place.prompt("ContextTokens", number("ContextTokens", prompt)?)?;
    let answer = place.answer("GeneratedTokens", number("GeneratedTokens", answer)?)?;
    let (after, think) = (Vec::new(), Micros::ZERO);
    Ok(Step { agent: 0, after, think, at, prompt, answer, path: [].into(), resent: None })
}

/// `YYYY-MM-DD HH:MM:SS.fraction` since the year 0, in microseconds; none when it is something else.
fn time_of(text: &str) -> Option<Micros> {
    let (date, clock) = text.split_once(' ')?;
    let [year, month, day] = numbers::<3>(date, '-')?;
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let [hour, minute, second] = numbers::<3>(clock, ':')?;
    let sane = (1970..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !sane || hour > 23 || minute > 59 || second > 60 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // Days of the civil calendar, counted from March so that the leap day comes last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day;
    let micros: u64 = format!("{fraction:0<6}").get(..6)?.parse().ok()?;
    Some(Micros((((days * 24 + hour) * 60 + minute) * 60 + second) * 1_000_000 + micros))
}

fn numbers<const N: usize>(text: &str, between: char) -> Option<[u64; N]> {
    let all: Option<Vec<u64>> = text.split(between).map(|part| part.parse().ok()).collect();
    all?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_apart_to_the_microsecond_and_over_days() {
        let at = |text| time_of(text).unwrap().0;
        assert_eq!(at("2023-11-16 18:17:04.0319600") - at("2023-11-16 18:17:03.9799600"), 52_000);
        assert_eq!(at("2024-03-01 00:00:00") - at("2024-02-28 00:00:00"), 2 * 86_400_000_000);
        assert_eq!(at("2024-01-01 00:00:00") - at("2023-12-31 23:59:59.5"), 500_000);
        for odd in ["", "2023-11-16", "2023-13-16 18:17:03", "2023-11-16 25:00:00", "2023-11-16 18:17:03.x", "a b"] {
            assert_eq!(time_of(odd), None, "{odd}");
        }
    }
}
