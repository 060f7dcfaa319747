//! Recorded agent sessions for replay. Reads files and the embedded default; no network.
//!
//! Two formats: `tau_bench` (gzipped JSON list of dialogues with `traj`) and `lmcache` (gzipped JSON lines with
//! `timestamp`, `session_id`, `input`, `output`). Both become [`RecordedDialogue`]s: the messages added to the
//! history before each step, and the recorded model's response.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::trace_command::files::{self, TraceFilesError};

/// Embedded corpus: tau_bench, MIT license, see `configs/traces/tau_bench`.
const TAU_BENCH: &[u8] = include_bytes!("../../../../configs/traces/tau_bench/airline.json.gz");

/// Maximum size of a corpus file after decompression.
const MAX_FILE_BYTES: u64 = 256 << 20;
/// Approximate bytes per token of English and JSON; converts a recorded response to a requested length.
const BYTES_PER_TOKEN: usize = 4;
/// Range of requested response lengths, in tokens.
const ANSWER_TOKEN_RANGE: std::ops::RangeInclusive<u32> = 8..=96;

/// A corpus cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CorpusError {
    /// A file or folder cannot be read.
    #[error("cannot read the corpus: {0}")]
    Unreadable(#[from] TraceFilesError),
    /// A file has neither of the two formats.
    #[error("{path} is neither tau_bench (JSON list) nor lmcache (JSON lines): {source}")]
    Unknown { path: PathBuf, source: serde_json::Error },
    /// There is nothing to replay.
    #[error("the corpus {0} holds no dialogue with an assistant turn")]
    Empty(PathBuf),
}

/// Who the agent waits for before a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PauseCause {
    /// Nobody: the first step.
    None,
    Tool,
    /// A person reading and typing.
    Human,
}

/// One step of a session: a request with the whole history, and its response.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct RecordedStep {
    /// Messages added to the history before the request.
    pub new_messages: Vec<Value>,
    /// Whether the history restarts before `new_messages` (the recorded prompt does not extend the previous one).
    pub history: HistoryChange,
    /// Cause of the pause between the previous response and this request.
    pub pause: PauseCause,
    /// Response of the recorded model, used if no response was served.
    pub recorded_answer: Value,
    /// Number of tokens to request.
    pub answer_tokens: u32,
}

/// Effect of a turn on the history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HistoryChange {
    Extends,
    Restarts,
}

/// One recorded session.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct RecordedDialogue {
    /// Origin, for messages.
    pub name: String,
    /// Steps, in order.
    pub turns: Vec<RecordedStep>,
}

/// Loads `path` (a file or a folder of files), or the embedded corpus.
pub(super) fn load(path: Option<&Path>) -> Result<Vec<RecordedDialogue>, CorpusError> {
    let Some(path) = path else {
        let mut plain = Vec::new();
        GzDecoder::new(TAU_BENCH).read_to_end(&mut plain).expect("the corpus that is compiled in was tested");
        return parse(Path::new("tau_bench (embedded)"), &plain);
    };
    let files = if path.is_dir() { files::list_files(path)? } else { vec![path.to_owned()] };
    let mut dialogues = Vec::new();
    for file in &files {
        dialogues.extend(parse(file, &files::read_decompressed(file, MAX_FILE_BYTES)?)?);
    }
    if dialogues.is_empty() { Err(CorpusError::Empty(path.to_owned())) } else { Ok(dialogues) }
}

/// Parses one decompressed file of either format.
pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<RecordedDialogue>, CorpusError> {
    let unknown = |source| CorpusError::Unknown { path: path.to_owned(), source };
    let dialogues = if bytes.trim_ascii_start().starts_with(b"[") {
        let recorded: Vec<TauDialogue> = serde_json::from_slice(bytes).map_err(unknown)?;
        recorded.into_iter().map(TauDialogue::replayable).collect::<Vec<_>>()
    } else {
        let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
        let rows: Result<Vec<LmcacheRow>, _> = lines.map(serde_json::from_slice).collect();
        parse_lmcache(rows.map_err(unknown)?)
    };
    let dialogues: Vec<_> = dialogues.into_iter().filter(|dialogue| !dialogue.turns.is_empty()).collect();
    if dialogues.is_empty() { Err(CorpusError::Empty(path.to_owned())) } else { Ok(dialogues) }
}

#[derive(Deserialize)]
struct TauDialogue {
    task_id: u64,
    #[serde(default)]
    trial: u64,
    traj: Vec<Value>,
}

impl TauDialogue {
    /// Turns every recorded assistant message into a step; all others join the history.
    fn replayable(self) -> RecordedDialogue {
        let mut turns: Vec<RecordedStep> = Vec::new();
        let mut adds = Vec::new();
        for message in self.traj {
            if message["role"] != "assistant" {
                adds.push(message);
                continue;
            }
            let pause = match adds.last() {
                _ if turns.is_empty() => PauseCause::None,
                Some(last) if last["role"] == "tool" => PauseCause::Tool,
                _ => PauseCause::Human,
            };
            let answer_tokens = answer_tokens(&message);
            let adds = std::mem::take(&mut adds);
            turns.push(RecordedStep {
                new_messages: adds,
                history: HistoryChange::Extends,
                pause,
                recorded_answer: message,
                answer_tokens,
            });
        }
        RecordedDialogue { name: format!("task {} trial {}", self.task_id, self.trial), turns }
    }
}

/// Length of a recorded assistant message in tokens, tool calls included.
fn answer_tokens(message: &Value) -> u32 {
    let text = message["content"].as_str().map_or(0, str::len);
    let calls = message["tool_calls"]
        .as_array()
        .map_or(0, |calls| calls.iter().map(|call| call["function"].to_string().len()).sum());
    length_in_tokens(text + calls)
}

fn length_in_tokens(bytes: usize) -> u32 {
    let tokens = u32::try_from(bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX);
    tokens.clamp(*ANSWER_TOKEN_RANGE.start(), *ANSWER_TOKEN_RANGE.end())
}

#[derive(Deserialize)]
struct LmcacheRow {
    timestamp: u64,
    session_id: String,
    input: String,
    #[serde(default)]
    output: String,
}

/// Groups rows by session and sorts them by time: the published files are in neither order.
fn parse_lmcache(mut rows: Vec<LmcacheRow>) -> Vec<RecordedDialogue> {
    rows.retain(|row| !row.input.is_empty());
    rows.sort_by(|a, b| (&a.session_id, a.timestamp).cmp(&(&b.session_id, b.timestamp)));
    let sessions = rows.chunk_by(|a, b| a.session_id == b.session_id);
    sessions.map(|rows| RecordedDialogue { name: rows[0].session_id.clone(), turns: lmcache_turns(rows) }).collect()
}

/// A prompt that extends the previous one adds its new part; any other restarts the history.
fn lmcache_turns(rows: &[LmcacheRow]) -> Vec<RecordedStep> {
    let before = std::iter::once(None).chain(rows.iter().map(|row| Some(row.input.as_str())));
    let turn = |(row, before): (&LmcacheRow, Option<&str>)| {
        let new = before.and_then(|before| row.input.strip_prefix(before)).filter(|new| !new.is_empty());
        let (text, history) = match new {
            Some(new) => (new, HistoryChange::Extends),
            None => (row.input.as_str(), HistoryChange::Restarts),
        };
        RecordedStep {
            new_messages: vec![json!({"role": "user", "content": text})],
            history,
            pause: if before.is_some() { PauseCause::Tool } else { PauseCause::None },
            recorded_answer: json!({"role": "assistant", "content": row.output}),
            answer_tokens: length_in_tokens(row.output.len()),
        }
    };
    rows.iter().zip(before).map(turn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Vec<RecordedDialogue> {
        parse(Path::new("test"), text.as_bytes()).unwrap()
    }

    #[test]
    fn the_embedded_corpus_has_48_dialogues_with_a_shared_system_prompt() {
        let dialogues = load(None).unwrap();
        assert_eq!(dialogues.len(), 48);
        assert_eq!(dialogues.iter().map(|dialogue| dialogue.turns.len()).sum::<usize>(), 598);
        let system = &dialogues[0].turns[0].new_messages[0];
        assert_eq!(system["role"], "system");
        assert!(dialogues.iter().all(|dialogue| &dialogue.turns[0].new_messages[0] == system));
    }

    #[test]
    fn each_recorded_assistant_message_becomes_one_step() {
        let dialogues = check(
            r#"[{"task_id":3,"trial":1,"traj":[{"role":"system","content":"s"},{"role":"user","content":"u"},
                {"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]},
                {"role":"tool","content":"t","tool_call_id":"c","name":"f"},
                {"role":"assistant","content":"a"},{"role":"user","content":"bye"}]}]"#,
        );
        let [dialogue] = &dialogues[..] else { panic!("one dialogue") };
        assert_eq!(dialogue.name, "task 3 trial 1");
        let added: Vec<usize> = dialogue.turns.iter().map(|turn| turn.new_messages.len()).collect();
        assert_eq!(added, [2, 1], "what follows the last answer is no step");
        assert_eq!(dialogue.turns[0].pause, PauseCause::None);
        assert_eq!(dialogue.turns[1].pause, PauseCause::Tool);
        assert_eq!(dialogue.turns[1].recorded_answer["content"], "a");
    }

    #[test]
    fn user_message_before_a_step_counts_as_human_think_time() {
        let dialogues = check(
            r#"[{"task_id":0,"traj":[{"role":"user","content":"u"},{"role":"assistant","content":"a"},
                {"role":"user","content":"v"},{"role":"assistant","content":"b"}]}]"#,
        );
        assert_eq!(dialogues[0].turns[1].pause, PauseCause::Human);
    }

    #[test]
    fn lmcache_rows_are_grouped_and_sorted_by_time() {
        let dialogues = check(concat!(
            r#"{"timestamp":9,"session_id":"b","input":"hello there","output":"x"}"#,
            "\n",
            r#"{"timestamp":5,"session_id":"a","input":"one","output":"y"}"#,
            "\n",
            r#"{"timestamp":3,"session_id":"b","input":"hello","output":"z"}"#,
            "\n",
            r#"{"timestamp":4,"session_id":"b","input":"","output":"dropped"}"#,
            "\n"
        ));
        assert_eq!(dialogues.iter().map(|dialogue| dialogue.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let turns = &dialogues[1].turns;
        assert_eq!(turns.len(), 2);
        assert_eq!(turns[0].new_messages[0]["content"], "hello");
        assert_eq!(
            (turns[1].new_messages[0]["content"].as_str(), turns[1].history),
            (Some(" there"), HistoryChange::Extends)
        );
    }

    #[test]
    fn lmcache_prompt_that_does_not_extend_its_predecessor_resets_history() {
        let dialogues = check(concat!(
            r#"{"timestamp":1,"session_id":"a","input":"one","output":"y"}"#,
            "\n",
            r#"{"timestamp":2,"session_id":"a","input":"two","output":"z"}"#
        ));
        let second = &dialogues[0].turns[1];
        assert_eq!(
            (second.history, second.new_messages[0]["content"].as_str()),
            (HistoryChange::Restarts, Some("two"))
        );
    }

    #[test]
    fn answer_token_requests_are_bounded() {
        assert_eq!(length_in_tokens(0), 8);
        assert_eq!(length_in_tokens(100), 25);
        assert_eq!(length_in_tokens(1 << 40), 96);
    }

    #[test]
    fn invalid_corpus_is_rejected() {
        let refuse = |text: &str| parse(Path::new("x"), text.as_bytes()).unwrap_err();
        assert!(matches!(refuse("{\"a\":1}"), CorpusError::Unknown { .. }));
        assert!(matches!(refuse("[1]"), CorpusError::Unknown { .. }));
        assert!(matches!(refuse("[]"), CorpusError::Empty(_)));
        assert!(matches!(load(Some(Path::new("/nonexistent/x"))).unwrap_err(), CorpusError::Unreadable(_)));
    }
}
