//! Reads a router's decision log as a trace, from the receipts of each session's steps.
//!
//! Receipts contain lengths but no block ids. The reused prefix of a step is assumed to be shared with the latest step
//! of its own session that was long enough, or else with the first such step of another session: a common agent prompt,
//! or the shared part of a fork.

mod prompt_tree;

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde::de::IgnoredAny;
use vocabulary::{Micros, Tokens};

use crate::trace::builder::TraceBuilder;
use crate::trace::error::{TraceError, TraceLocation};
use crate::trace::is_truncated;
use crate::trace::record::{MAX_REQUESTS, json, lines};
use prompt_tree::PromptTree;

/// Tokens per block, the default unit in which routers count reused tokens.
pub(in crate::trace) const BLOCK: u32 = 16;

const HEAD: &str = r#"{"version": 1, "release", "policy"} on the first line"#;
const LINE: &str = r#"{"receipt": {"at_unix_ms", "known": {"session", "prompt", "deepest_overlap"}, "seen": {"ending", "total", "answered"}, ...}, "case": {"facts": {"reused"}, ...}} on each line"#;

/// Largest accepted time: about the end of the year 2200, in milliseconds since 1970.
const MAX_UNIX_MS: u64 = 7_289_568_000_000;

#[derive(Deserialize)]
struct LoggedHeader {
    version: u32,
    #[serde(rename = "release")]
    _release: IgnoredAny,
    #[serde(rename = "policy")]
    _policy: IgnoredAny,
}

#[derive(Deserialize)]
struct DecisionLine {
    receipt: LoggedReceipt,
    case: Option<LoggedCase>,
}

#[derive(Deserialize)]
struct LoggedReceipt {
    at_unix_ms: u64,
    known: LoggedPrompt,
    seen: Option<LoggedOutcome>,
}

#[derive(Deserialize)]
struct LoggedPrompt {
    session: String,
    prompt: u64,
    deepest_overlap: u64,
}

#[derive(Deserialize)]
struct LoggedOutcome {
    ending: String,
    total: u64,
    cached: Option<u64>,
    answered: Option<u64>,
}

#[derive(Deserialize)]
struct LoggedCase {
    facts: LoggedFacts,
}

#[derive(Deserialize)]
struct LoggedFacts {
    reused: u64,
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
    if let Some((place, line)) = all.next() {
        let head: LoggedHeader = json(place, line, HEAD)?;
        if head.version != 1 {
            return Err(place.out_of_range("version", head.version, "1"));
        }
    }
    while let Some((place, line)) = all.next() {
        let read = match json::<DecisionLine>(place, line, LINE) {
            Err(_) if all.peek().is_none() && is_truncated(line) => {
                builder.truncated.push(format!("{}:{}", place.file, place.line));
                break;
            }
            read => read?,
        };
        match parse_step(place, &read)? {
            Some(served) => builder.decision_logs.add(place, read.receipt.known.session, served)?,
            None => builder.decision_logs.skip_unfinished(read.receipt.known.session),
        }
    }
    Ok(())
}

fn parse_step(place: TraceLocation<'_>, line: &DecisionLine) -> Result<Option<LoggedStep>, TraceError> {
    let LoggedReceipt { at_unix_ms, known, seen } = &line.receipt;
    let Some(seen) = seen.as_ref().filter(|seen| seen.ending == "complete") else { return Ok(None) };
    let prompt = place.check_prompt("known.prompt", known.prompt)?;
    let answer = place.check_answer("seen.answered", seen.answered.unwrap_or(1))?;
    if *at_unix_ms > MAX_UNIX_MS {
        return Err(place.out_of_range("at_unix_ms", at_unix_ms, "milliseconds since 1970, to the year 2200"));
    }
    let at = Micros(at_unix_ms * 1_000);
    let took = place.check_seconds("seen.total (in seconds)", seen.total as f64 / 1e6)?;
    let reused = line.case.as_ref().map_or(known.deepest_overlap, |case| case.facts.reused);
    let reused = reused.max(seen.cached.unwrap_or_default()).min(prompt.0);
    Ok(Some(LoggedStep { at, duration: took, prompt, answer, reused }))
}

impl DecisionLogSessions {
    fn add(&mut self, place: TraceLocation<'_>, session: String, served: LoggedStep) -> Result<(), TraceError> {
        self.count += 1;
        if self.count > MAX_REQUESTS {
            return Err(place.out_of_range("requests", self.count, "1 to 16777216 of them in a log"));
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
        let told = format!(
            "{} of the log's {steps} steps did not end in a whole answer and are left out, and with them {lost} of its \
             {sessions} sessions, which have no other",
            self.unfinished
        );
        (self.unfinished > 0).then_some(told)
    }
}
