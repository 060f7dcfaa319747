//! Reads Claude Code's transcripts: one message per line, in trees by `parentUuid`. Tokens are estimated from
//! characters; the length of the system prompt, which transcripts do not contain, is inferred from the usage of the
//! first call.

use std::collections::HashMap;

use engine_model::runs::RunId;
use serde::Deserialize;
use serde_json::Value;
use vocabulary::Micros;
use xxhash_rust::xxh3::xxh3_64;

use super::TraceBuilder;
use super::error::{TraceError, TraceFault, TraceLocation};
use super::line_parsing::{json, lines, parse_time};
use super::text::{estimate_tokens, run_of};
use super::{TraceSession, TraceStep};

const ACCEPTED: &str = r#"{"type": "user" or "assistant", "uuid", "parentUuid", "timestamp", "message": {"id", "model", "content", "usage"}} on each line, and lines of other types, which are passed over"#;
/// Smallest assumed length of a system prompt with its tools.
const MIN_SYSTEM_TOKENS: u64 = 500;
/// System prompts are rounded down to a multiple of this, so that equal ones with slightly different estimates are
/// shared.
const SYSTEM_ROUNDING: u64 = 256;
/// Model name of messages that no engine wrote.
const SYNTHETIC: &str = "<synthetic>";

/// The fields of a line that are used.
#[derive(Deserialize)]
struct TranscriptLine {
    #[serde(rename = "type")]
    kind: Option<String>,
    uuid: Option<String>,
    #[serde(rename = "parentUuid")]
    parent: Option<String>,
    #[serde(rename = "isSidechain")]
    side: Option<bool>,
    timestamp: Option<String>,
    message: Option<TranscriptMessage>,
}

#[derive(Deserialize)]
struct TranscriptMessage {
    id: Option<String>,
    model: Option<String>,
    #[serde(default)]
    content: Value,
    usage: Option<TranscriptUsage>,
}

#[derive(Deserialize)]
struct TranscriptUsage {
    input_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

impl TranscriptUsage {
    fn prompt(&self) -> u64 {
        let parts = [self.input_tokens, self.cache_read_input_tokens, self.cache_creation_input_tokens];
        parts.into_iter().flatten().fold(0, u64::saturating_add)
    }
}

/// A message; its parent is an earlier one.
struct MessageNode {
    at: Micros,
    parent: Option<usize>,
    hash: u64,
    tokens: u64,
}

/// One answer of an engine, which may be recorded as several messages.
struct ModelCall<'a> {
    location: TraceLocation<'a>,
    is_sidechain: bool,
    model: String,
    prompt: u64,
    messages: Vec<usize>,
}

/// Messages and calls of one file.
#[derive(Default)]
struct Transcript<'a> {
    records: Vec<MessageNode>,
    calls: Vec<ModelCall<'a>>,
    by_uuid: HashMap<String, usize>,
    by_message: HashMap<(String, bool), usize>,
}

pub(super) fn read(builder: &mut TraceBuilder, file: &str, text: &str) -> Result<(), TraceError> {
    let mut transcript = Transcript::default();
    for (place, line) in lines(file, text) {
        transcript.add(place, json(place, line, ACCEPTED)?)?;
    }
    let steps = transcript.steps(builder)?;
    TraceLocation { file, line: 1 }.check_request_count(steps.len())?;
    builder.sessions.push(TraceSession { id: file.into(), steps });
    Ok(())
}

impl<'a> Transcript<'a> {
    fn add(&mut self, location: TraceLocation<'a>, line: TranscriptLine) -> Result<(), TraceError> {
        let TranscriptLine { kind: Some(kind), uuid: Some(uuid), parent, side, timestamp, message: Some(message) } =
            line
        else {
            return Ok(());
        };
        let is_answer = kind == "assistant";
        if !is_answer && kind != "user" {
            return Ok(());
        }
        let written = timestamp.unwrap_or_default();
        let at = parse_time(&written).ok_or_else(|| {
            location.fault(TraceFault::Malformed {
                why: format!("the timestamp `{written}` is not a time"),
                accepted: ACCEPTED,
            })
        })?;
        let content = message.content.as_str().map_or_else(|| message.content.to_string(), str::to_owned);
        let record = self.records.len();
        let parent = parent.and_then(|parent| self.by_uuid.get(&parent).copied());
        self.records.push(MessageNode {
            at,
            parent,
            hash: xxh3_64(content.as_bytes()),
            tokens: estimate_tokens(&content).max(1),
        });
        self.by_uuid.insert(uuid, record);
        if is_answer {
            let side = side.unwrap_or_default();
            let fresh = self.calls.len();
            let known = message.id.map(|id| *self.by_message.entry((id, side)).or_insert(fresh));
            match known.and_then(|call| self.calls.get_mut(call)) {
                Some(call) => call.messages.push(record),
                None => self.calls.push(ModelCall {
                    location,
                    is_sidechain: side,
                    model: message.model.unwrap_or_default(),
                    prompt: message.usage.map_or(0, |usage| usage.prompt()),
                    messages: vec![record],
                }),
            }
        }
        Ok(())
    }

    /// Returns the messages of a call's prompt, oldest first.
    fn ancestors(&self, call: &ModelCall<'_>) -> Vec<usize> {
        let parent = |record: &usize| self.records[*record].parent;
        let mut chain: Vec<_> = std::iter::successors(parent(&call.messages[0]), parent).collect();
        chain.reverse();
        chain
    }

    fn steps(&self, builder: &mut TraceBuilder) -> Result<Vec<TraceStep>, TraceError> {
        let (mut steps, mut ends): (Vec<TraceStep>, Vec<Micros>) = (Vec::new(), Vec::new());
        let (mut systems, mut agents, mut step_of) = (HashMap::new(), HashMap::new(), HashMap::new());
        let begin = self.records.first().map_or(Micros::ZERO, |record| record.at);
        for call in &self.calls {
            let chain = self.ancestors(call);
            let (Some(root), Some(asked)) = (chain.first(), chain.last()) else { continue };
            if call.model == SYNTHETIC {
                continue;
            }
            let fresh = agents.len() as u32;
            let agent = *agents.entry((call.is_sidechain, *root)).or_insert(fresh);
            let model = call.model.split(':').next().unwrap_or_default();
            let system =
                *systems.entry((call.is_sidechain, model)).or_insert_with(|| self.system_prompt_tokens(call, &chain));
            let mut path = vec![run_of(builder, None, (system_key(call, system), system))];
            self.extend(builder, &mut path, &chain);
            let mut resent = path.clone();
            self.extend(builder, &mut resent, &call.messages);
            builder.budget.take(call.location, path.len() + resent.len())?;
            let at = call.location.check_seconds("timestamp", seconds(self.records[*asked].at - begin))?;
            let answered = call.messages.iter().map(|record| self.records[*record].at).max().unwrap_or_default();
            let own = chain.iter().filter_map(|record| step_of.get(record).copied());
            let before = own.filter(|step: &usize| steps[*step].agent == agent).max().or(steps.len().checked_sub(1));
            let (prompt, all) = (builder.runs.end_depth(&path), builder.runs.end_depth(&resent));
            step_of.extend(call.messages.iter().map(|record| (*record, steps.len())));
            steps.push(TraceStep {
                agent,
                after: before.into_iter().collect(),
                pause: before.map_or(Micros::ZERO, |before| at - ends[before]),
                at,
                prompt: call.location.check_prompt("content", prompt.0)?,
                answer: call.location.check_answer("content", (all - prompt).0)?,
                path: path.into(),
                resent_path: Some(resent.into()),
            });
            ends.push(at.max(answered - begin));
        }
        Ok(steps)
    }

    fn extend(&self, builder: &mut TraceBuilder, path: &mut Vec<RunId>, messages: &[usize]) {
        for record in messages.iter().map(|record| &self.records[*record]) {
            path.push(run_of(builder, path.last().copied(), (record.hash, record.tokens)));
        }
    }

    /// Returns the tokens of the first call's prompt besides its messages: the system prompt.
    fn system_prompt_tokens(&self, call: &ModelCall<'_>, chain: &[usize]) -> u64 {
        let messages: u64 = chain.iter().map(|record| self.records[*record].tokens).sum();
        call.prompt.saturating_sub(messages).max(MIN_SYSTEM_TOKENS) / SYSTEM_ROUNDING * SYSTEM_ROUNDING
    }
}

fn system_key(call: &ModelCall<'_>, system: u64) -> u64 {
    xxh3_64(format!("system {} {} {system}", call.is_sidechain, call.model).as_bytes())
}

fn seconds(span: Micros) -> f64 {
    span.0 as f64 / 1e6
}

/// Returns whether a file starts like a transcript: with messages, or with summaries that refer to them.
pub(super) fn is_transcript(has: impl Fn(&str) -> bool) -> bool {
    has("parentUuid") || has("leafUuid")
}

#[cfg(test)]
mod tests;
