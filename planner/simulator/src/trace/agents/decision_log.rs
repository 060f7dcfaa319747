//! Reads a router's decision log as a trace, from the receipts of each session's steps.
//!
//! Receipts contain lengths but no block ids. The reused prefix of a step is assumed to be shared with the latest step
//! of its own session that was long enough, or else with the first such step of another session: a common agent prompt,
//! or the shared part of a fork.

mod prompt_tree;
mod version_1;

use std::collections::{HashMap, HashSet};

use serde::de::{Error as _, IgnoredAny};
use serde::{Deserialize, Deserializer};
use vocabulary::{Micros, Tokens};

use crate::trace::TraceBuilder;
use crate::trace::error::{TraceError, TraceLocation};
use crate::trace::is_truncated;
use crate::trace::line_parsing::{MAX_REQUESTS, json, lines, parse_time};
use prompt_tree::PromptTree;

/// Tokens per block, the default unit in which routers count reused tokens.
pub(in crate::trace) const BLOCK: u32 = 16;

/// The version that routers write. Version 1 is read as well.
const VERSION: u32 = 2;

const HEAD: &str = r#"{"version": 2, "release", "planner"} on the first line"#;
const LINE: &str = r#"{"receipt": {"arrived_at", "lookup": {"session_id", "prompt_tokens", "max_overlap_tokens"}, "observed": {"outcome", "duration", "output_tokens"}, ...}, "planning_inputs": {"step": {"reused_tokens"}, ...}} on each line"#;

/// Largest accepted time: about the end of the year 2200.
const MAX_TIME: Micros = Micros(7_289_568_000_000_000);

#[derive(Deserialize)]
struct LoggedHeader {
    version: u32,
    #[serde(rename = "release")]
    _release: IgnoredAny,
    #[serde(rename = "planner", alias = "policy")]
    _planner: IgnoredAny,
}

#[derive(Deserialize)]
struct DecisionLine {
    receipt: LoggedReceipt,
    planning_inputs: Option<LoggedInputs>,
}

#[derive(Deserialize)]
struct LoggedReceipt {
    #[serde(deserialize_with = "read_time")]
    arrived_at: Micros,
    lookup: LoggedLookup,
    observed: Option<LoggedOutcome>,
}

#[derive(Deserialize)]
struct LoggedLookup {
    session_id: String,
    prompt_tokens: u64,
    max_overlap_tokens: u64,
}

#[derive(Deserialize)]
struct LoggedOutcome {
    outcome: String,
    #[serde(with = "vocabulary::micros_with_unit")]
    duration: Micros,
    cached_tokens: Option<u64>,
    output_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct LoggedInputs {
    step: LoggedStepFacts,
}

#[derive(Deserialize)]
struct LoggedStepFacts {
    reused_tokens: u64,
}

fn read_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Micros, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_time(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is no time in RFC 3339")))
}

#[derive(Clone, Copy)]
struct LoggedStep {
    at: Micros,
    duration: Micros,
    prompt: Tokens,
    answer: Tokens,
    /// Reused tokens of the prompt, by the router's own view or by the engine's count.
    reused: u64,
}

/// Sessions being read: a session may continue in a later file.
#[derive(Default)]
pub(crate) struct DecisionLogSessions {
    /// Session ids, in the order of their first records.
    order: Vec<String>,
    steps: HashMap<String, Vec<LoggedStep>>,
    count: usize,
    /// Number of unfinished steps, and the sessions that they belong to.
    unfinished: usize,
    unfinished_sessions: HashSet<String>,
}

/// Reads a file of the log. Unfinished steps are left out, and so is a truncated last line, which a killed router
/// leaves behind.
pub(crate) fn read(builder: &mut TraceBuilder, file: &str, text: &str) -> Result<(), TraceError> {
    let mut all = lines(file, text).peekable();
    let mut version = VERSION;
    if let Some((place, line)) = all.next() {
        let head: LoggedHeader = json(place, line, HEAD)?;
        if ![version_1::VERSION, VERSION].contains(&head.version) {
            return Err(place.out_of_range("version", head.version, "1 or 2"));
        }
        version = head.version;
    }
    while let Some((place, line)) = all.next() {
        let parsed = match version {
            version_1::VERSION => {
                json::<version_1::OldDecisionLine>(place, line, version_1::LINE).map(DecisionLine::from)
            }
            _ => json::<DecisionLine>(place, line, LINE),
        };
        let read = match parsed {
            Err(_) if all.peek().is_none() && is_truncated(line) => {
                builder.truncated.push(format!("{}:{}", place.file, place.line));
                break;
            }
            read => read?,
        };
        match parse_step(place, &read)? {
            Some(served) => builder.decision_logs.add(place, read.receipt.lookup.session_id, served)?,
            None => builder.decision_logs.skip_unfinished(read.receipt.lookup.session_id),
        }
    }
    Ok(())
}

fn parse_step(location: TraceLocation<'_>, line: &DecisionLine) -> Result<Option<LoggedStep>, TraceError> {
    let LoggedReceipt { arrived_at: at, lookup, observed } = &line.receipt;
    let Some(observed) = observed.as_ref().filter(|observed| observed.outcome == "complete") else { return Ok(None) };
    let prompt = location.check_prompt("lookup.prompt_tokens", lookup.prompt_tokens)?;
    let answer = location.check_answer("observed.output_tokens", observed.output_tokens.unwrap_or(1))?;
    if *at > MAX_TIME {
        return Err(location.out_of_range("arrived_at (in microseconds since 1970)", at.0, "times to the year 2200"));
    }
    let took = location.check_seconds("observed.duration (in seconds)", observed.duration.0 as f64 / 1e6)?;
    let reused = line.planning_inputs.as_ref().map_or(lookup.max_overlap_tokens, |inputs| inputs.step.reused_tokens);
    let reused = reused.max(observed.cached_tokens.unwrap_or_default()).min(prompt.0);
    Ok(Some(LoggedStep { at: *at, duration: took, prompt, answer, reused }))
}

impl DecisionLogSessions {
    fn add(&mut self, location: TraceLocation<'_>, session: String, served: LoggedStep) -> Result<(), TraceError> {
        self.count += 1;
        if self.count > MAX_REQUESTS {
            return Err(location.out_of_range("requests", self.count, "1 to 16777216 of them in a log"));
        }
        if !self.steps.contains_key(&session) {
            self.order.push(session.clone());
        }
        self.steps.entry(session).or_default().push(served);
        Ok(())
    }

    fn skip_unfinished(&mut self, session: String) {
        self.unfinished += 1;
        self.unfinished_sessions.insert(session);
    }

    /// Adds all sessions to the builder, and returns notes on them.
    pub(crate) fn finish(mut self, builder: &mut TraceBuilder) -> Result<Vec<String>, TraceError> {
        if self.count + self.unfinished == 0 {
            return Ok(Vec::new());
        }
        let mut notes: Vec<String> = self.unfinished_note().into_iter().collect();
        let mut sessions: Vec<(String, Vec<LoggedStep>)> = Vec::with_capacity(self.order.len());
        for session in self.order {
            let mut steps = self.steps.remove(&session).unwrap_or_default();
            steps.sort_by_key(|step| step.at);
            sessions.push((session, steps));
        }
        let shared = PromptTree::of(&sessions);
        notes.extend(shared.note());
        builder.sessions.extend(shared.into_sessions(sessions, (&mut builder.runs, &mut builder.budget))?);
        Ok(notes)
    }

    fn unfinished_note(&self) -> Option<String> {
        let lost = self.unfinished_sessions.iter().filter(|session| !self.steps.contains_key(*session)).count();
        let (steps, sessions) = (self.count + self.unfinished, self.order.len() + lost);
        let text = format!(
            "{} of the log's {steps} steps did not end in a whole answer and are left out, and with them {lost} of its \
             {sessions} sessions, which have no other",
            self.unfinished
        );
        (self.unfinished > 0).then_some(text)
    }
}
