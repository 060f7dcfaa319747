//! Reads recordings of text: lmcache's agent traces and tau_bench's dialogues. Tokens are estimated from characters.

use engine_model::runs::RunId;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use vocabulary::{Micros, Tokens};
use xxhash_rust::xxh3::xxh3_64;

use super::TraceBuilder;
use super::block_ids::PromptBlockIds;
use super::error::{TraceError, TraceLocation};
use super::line_parsing::{json, lines};
use super::run_builder::RadixBuilder;
use super::{TraceSession, TraceStep};

pub(super) const BLOCK: u32 = 16;
/// Characters per token, according to the usage counters of recorded transcripts.
const CHARS_PER_TOKEN: f64 = 4.1;
/// Assumed decode rate: lmcache records when a request starts but not when it ends.
const TOKENS_PER_SECOND: f64 = 60.0;
const MAX_PAUSE: Micros = Micros(60_000_000);
/// Largest accepted time: about the end of the year 2200, in microseconds since 1970.
const MAX_UNIX_MICROS: u64 = 7_289_568_000_000_000;
/// Assumed pauses for a tool and a person: tau_bench records no times.
const TOOL_PAUSE: Micros = Micros(1_000_000);
const USER_PAUSE: Micros = Micros(8_000_000);

const LMCACHE: &str = r#"{"timestamp": MICROSECONDS, "session_id", "input", "output"} on each line"#;
const TAU_BENCH: &str = r#"[{"task_id", "trial", "traj": [{"role", "content", ...}], "reward", "info"}, ...]"#;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LmcacheRequest {
    timestamp: u64,
    #[serde(rename = "session_id")]
    _session_id: IgnoredAny,
    input: String,
    #[serde(default)]
    output: String,
}

/// Reads one session per file; rows without a prompt are left out.
pub(super) fn lmcache(builder: &mut TraceBuilder, file: &str, text: &str) -> Result<(), TraceError> {
    let (mut radix, mut rows) = (RadixBuilder::default(), Vec::new());
    for (place, line) in lines(file, text) {
        let row: LmcacheRequest = json(place, line, LMCACHE)?;
        if row.timestamp > MAX_UNIX_MICROS {
            return Err(place.out_of_range("timestamp", row.timestamp, "microseconds since 1970, to the year 2200"));
        }
        let at = Micros(row.timestamp);
        if !row.input.is_empty() {
            let sizes = (
                place.check_prompt("input", estimate_tokens(&row.input) + 1)?,
                place.check_answer("output", estimate_tokens(&row.output) + 1)?,
            );
            rows.push((at, sizes, row.input));
        }
    }
    TraceLocation { file, line: 1 }.check_request_count(rows.len())?;
    rows.sort_by_key(|(at, ..)| *at);
    rows.iter().for_each(|(.., input)| _ = radix.insert(blocks(input)));
    radix.freeze(BLOCK, &mut builder.runs, None);
    let begin = rows[0].0;
    let mut steps: Vec<TraceStep> = Vec::with_capacity(rows.len());
    for (index, (at, (prompt, answer), _)) in rows.into_iter().enumerate() {
        let think = steps.last().map_or(Micros::ZERO, |last| {
            let answering = Micros((last.answer.0 as f64 / TOKENS_PER_SECOND * 1e6) as u64);
            (at - begin - last.at - answering).min(MAX_PAUSE)
        });
        let (after, path) = (index.checked_sub(1).into_iter().collect(), radix.path(index, u32::MAX));
        builder.budget.take(TraceLocation { file, line: 1 }, path.len())?;
        // A block has a whole number of characters, so the blocks of a long text can exceed its estimated tokens.
        let prompt = prompt.max(builder.runs.end_depth(&path) + Tokens(1));
        let path = path.into();
        steps.push(TraceStep {
            agent: 0,
            after,
            pause: think,
            at: at - begin,
            prompt,
            answer,
            path,
            resent_path: None,
        });
    }
    builder.sessions.push(TraceSession { id: file.into(), steps });
    Ok(())
}

/// Estimates the tokens of a text from its characters.
pub(super) fn estimate_tokens(text: &str) -> u64 {
    (text.chars().count() as f64 / CHARS_PER_TOKEN) as u64
}

/// Returns the whole blocks of a text, by the hash of each.
fn blocks(text: &str) -> PromptBlockIds {
    let characters = (f64::from(BLOCK) * CHARS_PER_TOKEN) as usize;
    let mut ends: Vec<usize> = text.char_indices().map(|(at, _)| at).step_by(characters).collect();
    if text.chars().count().is_multiple_of(characters) {
        ends.push(text.len());
    }
    ends.windows(2).map(|ends| xxh3_64(&text.as_bytes()[ends[0]..ends[1]]) >> 1).collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "fields of the form that the simulation has no use for")]
struct TauBenchDialogue {
    task_id: u64,
    #[serde(default)]
    trial: u64,
    traj: Vec<Value>,
    reward: Option<IgnoredAny>,
    info: Option<IgnoredAny>,
}

/// Reads one session per dialogue and one step per assistant message; every message is a run.
pub(super) fn tau_bench(builder: &mut TraceBuilder, file: &str, text: &str) -> Result<(), TraceError> {
    let place = TraceLocation { file, line: 1 };
    let dialogues: Vec<TauBenchDialogue> = json(place, text, TAU_BENCH)?;
    for dialogue in dialogues {
        let id = format!("task {} trial {}", dialogue.task_id, dialogue.trial);
        let steps = dialogue_steps(builder, place, &dialogue.traj)?;
        if !steps.is_empty() {
            builder.sessions.push(TraceSession { id: id.into(), steps });
        }
    }
    place.check_request_count(builder.sessions.len())
}

fn dialogue_steps(
    builder: &mut TraceBuilder,
    location: TraceLocation<'_>,
    messages: &[Value],
) -> Result<Vec<TraceStep>, TraceError> {
    let (mut path, mut steps, mut before): (Vec<RunId>, Vec<TraceStep>, _) = (Vec::new(), Vec::new(), None);
    for message in messages {
        let (text, role) = (message.to_string(), message["role"].as_str());
        let run = message_run(builder, path.last().copied(), &text);
        if role == Some("assistant") && !path.is_empty() {
            let index = steps.len();
            let think = match (index, before) {
                (0, _) => Micros::ZERO,
                (_, Some("tool")) => TOOL_PAUSE,
                _ => USER_PAUSE,
            };
            builder.budget.take(location, 2 * path.len() + 1)?;
            let resent = [&path[..], &[run]].concat().into();
            steps.push(TraceStep {
                agent: 0,
                after: index.checked_sub(1).into_iter().collect(),
                pause: think,
                at: Micros::ZERO,
                prompt: location.check_prompt("traj", builder.runs.end_depth(&path).0)?,
                answer: location.check_answer("traj", builder.runs.tokens(run).0)?,
                path: path.as_slice().into(),
                resent_path: Some(resent),
            });
        }
        path.push(run);
        before = role;
    }
    Ok(steps)
}

fn message_run(builder: &mut TraceBuilder, parent: Option<RunId>, text: &str) -> RunId {
    run_of(builder, parent, (xxh3_64(text.as_bytes()), estimate_tokens(text).max(1)))
}

/// Returns the run of a text after a parent run, by the text's hash and tokens.
pub(super) fn run_of(builder: &mut TraceBuilder, parent: Option<RunId>, (hash, tokens): (u64, u64)) -> RunId {
    let runs = &mut builder.runs;
    *builder.texts.entry((parent, hash)).or_insert_with(|| runs.add(parent, u32::try_from(tokens).unwrap_or(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_text_blocks_have_ids_and_equal_text_has_equal_ids() {
        let text = "x".repeat(65) + &"\u{e9}".repeat(65);
        assert_eq!(blocks(&text).len(), 2);
        assert_eq!(blocks(&text[..64]).len(), 0);
        assert_eq!(blocks(&text).common_prefix_len(0, &blocks(&(text.clone() + "tail")), 0), 2);
        assert_ne!(blocks(&text).id(0), blocks(&text).id(1));
        assert_eq!(blocks("").len(), 0);
    }
}
