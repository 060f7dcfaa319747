//! Reads Azure's inference traces: CSV with arrival times and lengths, without information on shared prefixes.

use vocabulary::Micros;

use super::TraceBuilder;
use super::error::{TraceError, TraceFault, TraceLocation};
use super::line_parsing::{lines, parse_time};
use super::{TraceSession, TraceStep};

const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";
const ACCEPTED: &str =
    "TIMESTAMP,ContextTokens,GeneratedTokens first, then lines such as 2023-11-16 18:17:03.979,4808,10";

/// Reads a file as one session of independent requests.
pub(super) fn read(builder: &mut TraceBuilder, file: &str, text: &str) -> Result<(), TraceError> {
    let mut steps = Vec::new();
    let mut rows = lines(file, text);
    let header = rows.next().filter(|(_, line)| line.trim_end() == HEADER);
    if header.is_none() {
        let why = "the first line names other columns".to_owned();
        return Err(TraceLocation { file, line: 1 }.fault(TraceFault::Malformed { why, accepted: ACCEPTED }));
    }
    for (place, line) in rows {
        steps.push((step(place, line.trim_end())?, place));
    }
    TraceLocation { file, line: 1 }.check_request_count(steps.len())?;
    steps.sort_by_key(|(step, _)| step.at);
    let begin = steps[0].0.at;
    let since = |(step, place): (TraceStep, TraceLocation<'_>)| {
        let at = place.check_seconds("TIMESTAMP (seconds after the first)", (step.at - begin).0 as f64 / 1e6)?;
        Ok(TraceStep { at, ..step })
    };
    let steps = steps.into_iter().map(since).collect::<Result<_, TraceError>>()?;
    builder.sessions.push(TraceSession { id: file.into(), steps });
    Ok(())
}

fn step(location: TraceLocation<'_>, line: &str) -> Result<TraceStep, TraceError> {
    let malformed = |why: String| location.fault(TraceFault::Malformed { why, accepted: ACCEPTED });
    let fields: Vec<&str> = line.split(',').collect();
    let [time, prompt, answer] = fields[..] else {
        return Err(malformed(format!("{} columns where 3 belong", fields.len())));
    };
    let number = |field: &str, text: &str| {
        text.trim().parse::<u64>().map_err(|_| malformed(format!("{field} `{text}` is not a whole number from 0 on")))
    };
    let at = parse_time(time.trim()).ok_or_else(|| malformed(format!("`{time}` is not a time")))?;
    let prompt = location.check_prompt("ContextTokens", number("ContextTokens", prompt)?)?;
    let answer = location.check_answer("GeneratedTokens", number("GeneratedTokens", answer)?)?;
    let (after, think) = (Vec::new(), Micros::ZERO);
    Ok(TraceStep { agent: 0, after, pause: think, at, prompt, answer, path: [].into(), resent_path: None })
}
