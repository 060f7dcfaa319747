//! Reads Mooncake's request traces: JSON lines with arrival times, lengths and ids of 512-token blocks.

use serde::Deserialize;
use vocabulary::Micros;

use super::TraceBuilder;
use super::block_ids::PromptBlockIds;
use super::error::{TraceError, TraceLocation};
use super::line_parsing::{json, lines};
use super::run_builder::RadixBuilder;
use super::{TraceSession, TraceStep};

pub(super) const BLOCK: u32 = 512;

const ACCEPTED: &str = r#"{"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS, "hash_ids": [ID, ...]} on each line"#;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MooncakeRow {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads a file as one session of independent requests, in chronological order.
pub(super) fn read(builder: &mut TraceBuilder, file: &str, text: &str) -> Result<(), TraceError> {
    let mut rows = Vec::new();
    for (place, line) in lines(file, text) {
        let row: MooncakeRow = json(place, line, ACCEPTED)?;
        rows.push(parse_row(place, &row)?);
    }
    TraceLocation { file, line: 1 }.check_request_count(rows.len())?;
    rows.sort_by_key(|(step, _)| step.at);
    let begin = rows[0].0.at;
    let mut radix = RadixBuilder::default();
    let mut steps = Vec::with_capacity(rows.len());
    for (step, ids) in rows {
        steps.push((step, radix.insert(ids)));
    }
    radix.freeze(BLOCK, &mut builder.runs, None);
    let steps = steps.into_iter().map(|(step, list)| {
        let path = radix.path(list, u32::MAX);
        builder.budget.take(TraceLocation { file, line: 1 }, path.len())?;
        Ok(TraceStep { at: step.at - begin, path: path.into(), ..step })
    });
    let steps = steps.collect::<Result<_, TraceError>>()?;
    builder.sessions.push(TraceSession { id: file.into(), steps });
    Ok(())
}

fn parse_row(location: TraceLocation<'_>, row: &MooncakeRow) -> Result<(TraceStep, PromptBlockIds), TraceError> {
    let prompt = location.check_prompt("input_length", row.input_length)?;
    let answer = location.check_answer("output_length", row.output_length)?;
    let at = location.check_seconds("timestamp (in seconds)", row.timestamp / 1e3)?;
    let (blocks, whole) = (row.hash_ids.len() as u64, prompt.0 / u64::from(BLOCK));
    if blocks < whole || blocks > whole + 1 {
        let accepted = "one for each 512 tokens of input_length, the last one perhaps partial";
        return Err(location.out_of_range("hash_ids", format!("{blocks} ids for {prompt} tokens"), accepted));
    }
    row.hash_ids.iter().try_for_each(|id| location.check_ids("hash_ids", *id, 1))?;
    let mut ids: PromptBlockIds = row.hash_ids.iter().copied().collect();
    // Only whole blocks can be reused.
    ids.truncate(whole as u32);
    let (after, think) = (Vec::new(), Micros::ZERO);
    Ok((TraceStep { agent: 0, after, pause: think, at, prompt, answer, path: [].into(), resent_path: None }, ids))
}
