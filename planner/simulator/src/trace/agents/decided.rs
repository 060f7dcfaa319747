//! A router's own decision log: what its receipts tell of each session's steps.
//!
//! Receipts have lengths and no block ids. A step is taken to share with the step before it what it found known, and the
//! first step of a session to share that with other sessions whose first step found as much: what a fleet's agents begin
//! with. A fork's shared part counts so, too.

use std::collections::HashMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use vocabulary::{Micros, Tokens};

use super::BLOCK;
use super::weave::{Agent, Told, Woven};
use crate::trace::Reader;
use crate::trace::block_ids::BlockIds;
use crate::trace::error::{Place, TraceError};
use crate::trace::is_torn;
use crate::trace::record::{MOST_REQUESTS, json, lines};

const HEAD: &str = r#"{"version": 1, "release", "policy"} on the first line"#;
const LINE: &str = r#"{"receipt": {"at_unix_ms", "known": {"session", "prompt", "deepest_overlap"}, "seen": {"ending", "total", "answered"}, ...}, "case": {"facts": {"reused"}, ...}} on each line"#;

/// Milliseconds since 1970 at the end of the year 2200, roughly.
const LATEST: u64 = 7_289_568_000_000;

#[derive(Deserialize)]
struct Head {
    version: u32,
    #[serde(rename = "release")]
    _release: IgnoredAny,
    #[serde(rename = "policy")]
    _policy: IgnoredAny,
}

#[derive(Deserialize)]
struct Line {
    receipt: Receipt,
    case: Option<Case>,
}

#[derive(Deserialize)]
struct Receipt {
    at_unix_ms: u64,
    known: Known,
    seen: Option<Seen>,
}

#[derive(Deserialize)]
struct Known {
    session: String,
    prompt: u64,
    deepest_overlap: u64,
}

#[derive(Deserialize)]
struct Seen {
    ending: String,
    total: u64,
    answered: Option<u64>,
}

#[derive(Deserialize)]
struct Case {
    facts: Facts,
}

#[derive(Deserialize)]
struct Facts {
    reused: u64,
}

/// One served step.
#[derive(Clone, Copy)]
struct Served {
    at: Micros,
    took: Micros,
    prompt: Tokens,
    answer: Tokens,
    reused: u64,
}

/// Sessions in the making: a session may go on in a later file.
#[derive(Default)]
pub(crate) struct Decided {
    /// In the order of their first records.
    order: Vec<String>,
    steps: HashMap<String, Vec<Served>>,
    count: usize,
}

/// Reads a file of the log. Steps that did not come to their end are left out; so is a last line that is cut off, as a router
/// that was killed leaves one.
pub(crate) fn read(reader: &mut Reader, file: &str, text: &str) -> Result<(), TraceError> {
    let mut all = lines(file, text).peekable();
    if let Some((place, line)) = all.next() {
        let head: Head = json(place, line, HEAD)?;
        if head.version != 1 {
            return Err(place.out_of_range("version", head.version, "1"));
        }
    }
    while let Some((place, line)) = all.next() {
        let read = match json::<Line>(place, line, LINE) {
            Err(_) if all.peek().is_none() && is_torn(line) => {
                reader.torn.push(format!("{}:{}", place.file, place.line));
                break;
            }
            read => read?,
        };
        if let Some((session, served)) = served(place, read)? {
            reader.decided.add(place, session, served)?;
        }
    }
    Ok(())
}

fn served(place: Place<'_>, line: Line) -> Result<Option<(String, Served)>, TraceError> {
    let Receipt { at_unix_ms, known, seen } = line.receipt;
    let Some(seen) = seen.filter(|seen| seen.ending == "complete") else { return Ok(None) };
    let prompt = place.prompt("known.prompt", known.prompt)?;
    let answer = place.answer("seen.answered", seen.answered.unwrap_or(1))?;
    if at_unix_ms > LATEST {
        return Err(place.out_of_range("at_unix_ms", at_unix_ms, "milliseconds since 1970, to the year 2200"));
    }
    let at = Micros(at_unix_ms * 1_000);
    let took = place.seconds("seen.total (in seconds)", seen.total as f64 / 1e6)?;
    let reused = line.case.map_or(known.deepest_overlap, |case| case.facts.reused).min(prompt.0);
    Ok(Some((known.session, Served { at, took, prompt, answer, reused })))
}

impl Decided {
    fn add(&mut self, place: Place<'_>, session: String, served: Served) -> Result<(), TraceError> {
        self.count += 1;
        if self.count > MOST_REQUESTS {
            return Err(place.out_of_range("requests", self.count, "1 to 16777216 of them in a log"));
        }
        if !self.steps.contains_key(&session) {
            self.order.push(session.clone());
        }
        self.steps.entry(session).or_default().push(served);
        Ok(())
    }

    /// All sessions that were read.
    pub(crate) fn finish(mut self, reader: &mut Reader) -> Result<(), TraceError> {
        for session in self.order {
            let mut steps = self.steps.remove(&session).unwrap_or_default();
            steps.sort_by_key(|step| step.at);
            let woven = woven(&steps);
            let place = Place { file: &session, line: 1 };
            let session = woven.session(place, session.as_str().into(), reader)?;
            reader.sessions.push(session);
        }
        Ok(())
    }
}

fn woven(steps: &[Served]) -> Woven {
    let mut woven = Woven::default();
    let begin = steps.first().map_or(Micros::ZERO, |step| step.at);
    let agent = woven.open(Agent::main(steps.first().map_or(0, |step| step.reused)));
    let blocks = |tokens: Tokens| (tokens.0 / u64::from(BLOCK)) as u32;
    let (mut history, mut next) = (BlockIds::default(), 0);
    let mut fresh = |ids: &mut BlockIds, end: u32| {
        let count = end.saturating_sub(ids.len());
        ids.push_run(next, count);
        next += u64::from(count);
    };
    for step in steps {
        let kept = blocks(Tokens(step.reused)).min(history.len()).min(blocks(step.prompt));
        let mut ids = history.first(kept);
        fresh(&mut ids, blocks(step.prompt));
        history = ids.clone();
        fresh(&mut history, blocks(step.prompt + step.answer));
        let Served { at, took, prompt, answer, .. } = *step;
        woven.add(agent, Told { at: at - begin, think: None, took, prompt, answer, ids });
    }
    woven
}
