//! Parses the two file formats of agent sessions into the same plain requests.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use vocabulary::Micros;

use super::BLOCK;
use super::session_builder::{RecordedAgent, RecordedRequest, SessionBuilder};
use crate::trace::TraceBuilder;
use crate::trace::TraceEntryBudget;
use crate::trace::block_ids::PromptBlockIds;
use crate::trace::error::{TraceError, TraceLocation};
use crate::trace::line_parsing::{self, LineLocator, json};

/// Deepest nesting of sub-agents.
const MAX_AGENT_DEPTH: usize = 16;

const DOCUMENT: &str = r#"{"id", "block_size": 64, "tool_tokens", "system_tokens", "models", "requests": [...]}"#;
const REQUEST: &str = r#"{"t", "type": "s" or "n", "in", "out", "hash_ids", "think_time", "api_time", "ttft", "model", "stop", "input_types", "output_types"}, or {"t", "type": "subagent", "requests", "tool_tokens", "duration_ms", ...}"#;
const LINE: &str = r#"{"id", "block_size": 64, "tool_tokens", "system_tokens", "models", "reqs": [...]} on each line"#;
const DELTA: &str = r#"{"t", "agent", "in", "out", "think", "api", "par", "keep", "runs": [[FIRST, COUNT], ...], "it", "stop", "model", "sub"}"#;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "fields of the form that the simulation has no use for")]
struct SessionDocument<'a> {
    id: String,
    block_size: u32,
    tool_tokens: u64,
    #[serde(borrow)]
    requests: Vec<&'a RawValue>,
    models: Option<IgnoredAny>,
    system_tokens: Option<IgnoredAny>,
    hash_id_scope: Option<IgnoredAny>,
    totals: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct TypeTag {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "fields of the form that the simulation has no use for")]
struct RequestRecord {
    t: f64,
    #[serde(rename = "in")]
    prompt: u64,
    #[serde(rename = "out")]
    answer: u64,
    hash_ids: Vec<u64>,
    think_time: Option<f64>,
    api_time: Option<f64>,
    ttft: Option<f64>,
    r#type: Option<IgnoredAny>,
    model: Option<IgnoredAny>,
    stop: Option<IgnoredAny>,
    input_types: Option<IgnoredAny>,
    output_types: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "fields of the form that the simulation has no use for")]
struct SubAgentRecord<'a> {
    t: f64,
    #[serde(borrow)]
    requests: Vec<&'a RawValue>,
    tool_tokens: Option<u64>,
    duration_ms: Option<f64>,
    r#type: Option<IgnoredAny>,
    agent_id: Option<IgnoredAny>,
    subagent_type: Option<IgnoredAny>,
    total_tokens: Option<IgnoredAny>,
    tool_use_count: Option<IgnoredAny>,
    status: Option<IgnoredAny>,
    models: Option<IgnoredAny>,
    system_tokens: Option<IgnoredAny>,
}

pub(in crate::trace) fn document(builder: &mut TraceBuilder, file: &str, text: &str) -> Result<(), TraceError> {
    let place = TraceLocation { file, line: 1 };
    let document: SessionDocument<'_> = json(place, text, DOCUMENT)?;
    block_size(place, document.block_size)?;
    let mut woven = SessionBuilder::default();
    woven.add_agent(RecordedAgent::main(document.tool_tokens));
    read_agent(&mut woven, &mut LineLocator::new(place, text), &document.requests, (0, Micros::ZERO, 0))?;
    place.check_request_count(woven.len())?;
    let session = woven.build(place, document.id.into(), builder)?;
    builder.sessions.push(session);
    Ok(())
}

/// Reads the requests of one agent, with those of its sub-agents in between.
fn read_agent(
    builder: &mut SessionBuilder,
    cursor: &mut LineLocator<'_>,
    requests: &[&RawValue],
    (agent, begin, depth): (usize, Micros, usize),
) -> Result<(), TraceError> {
    for raw in requests {
        let place = cursor.location_of(raw.get());
        let tagged: TypeTag = json(place, raw.get(), REQUEST)?;
        if tagged.kind != "subagent" {
            let request: RequestRecord = json(place, raw.get(), REQUEST)?;
            builder.add(agent, recorded_request(place, &request, begin)?);
            continue;
        }
        if depth == MAX_AGENT_DEPTH {
            return Err(place.out_of_range("requests", "a sub-agent 17 deep", "sub-agents within each other, 16 deep"));
        }
        let sub: SubAgentRecord<'_> = json(place, raw.get(), REQUEST)?;
        let lasted = place.check_seconds("duration_ms", sub.duration_ms.unwrap_or_default() / 1e3)?;
        let child = builder.add_agent(RecordedAgent::sub(agent, sub.tool_tokens.unwrap_or_default(), lasted));
        let begin = begin + place.check_seconds("t", sub.t)?;
        read_agent(builder, cursor, &sub.requests, (child, begin, depth + 1))?;
    }
    Ok(())
}

fn recorded_request(
    location: TraceLocation<'_>,
    request: &RequestRecord,
    begin: Micros,
) -> Result<RecordedRequest, TraceError> {
    let prompt = location.check_prompt("in", request.prompt)?;
    request.hash_ids.iter().try_for_each(|id| location.check_ids("hash_ids", *id, 1))?;
    let ids: PromptBlockIds = request.hash_ids.iter().copied().collect();
    check_block_count(location, &ids, request.prompt)?;
    Ok(RecordedRequest {
        at: begin + location.check_seconds("t", request.t)?,
        pause: request.think_time.map(|think| location.check_seconds("think_time", think)).transpose()?,
        duration: location.check_seconds("api_time", request.api_time.or(request.ttft).unwrap_or_default())?,
        prompt,
        answer: location.check_answer("out", request.answer)?,
        ids,
    })
}

fn block_size(location: TraceLocation<'_>, size: u32) -> Result<(), TraceError> {
    if size == BLOCK { Ok(()) } else { Err(location.out_of_range("block_size", size, "64")) }
}

fn check_block_count(location: TraceLocation<'_>, ids: &PromptBlockIds, prompt: u64) -> Result<(), TraceError> {
    if u64::from(ids.len()) * u64::from(BLOCK) <= prompt {
        return Ok(());
    }
    let value = format!("{} whole blocks in a prompt of {prompt} tokens", ids.len());
    Err(location.out_of_range("hash_ids", value, "ids of whole blocks of 64 tokens"))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "fields of the form that the simulation has no use for")]
struct DeltaSessionLine<'a> {
    id: String,
    block_size: u32,
    tool_tokens: u64,
    #[serde(borrow)]
    reqs: Vec<&'a RawValue>,
    models: Option<IgnoredAny>,
    system_tokens: Option<IgnoredAny>,
}

/// Delta of a request: the first `keep` ids of request `par`, then ranges of new ids.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "fields of the form that the simulation has no use for")]
struct RequestDelta {
    t: f64,
    agent: usize,
    #[serde(rename = "in")]
    prompt: u64,
    #[serde(rename = "out")]
    answer: u64,
    think: Option<f64>,
    api: Option<f64>,
    par: i64,
    keep: u32,
    runs: Vec<(u64, u32)>,
    sub: Option<SubAgentStart>,
    it: Option<IgnoredAny>,
    stop: Option<IgnoredAny>,
    model: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "fields of the form that the simulation has no use for")]
struct SubAgentStart {
    tool_tokens: Option<u64>,
    duration_ms: Option<f64>,
    r#type: Option<IgnoredAny>,
    system_tokens: Option<IgnoredAny>,
}

/// Reads one session per line, with each request as the delta to an earlier one.
pub(in crate::trace) fn read_delta_lines(builder: &mut TraceBuilder, file: &str, text: &str) -> Result<(), TraceError> {
    for (place, line) in line_parsing::lines(file, text) {
        let session: DeltaSessionLine<'_> = json(place, line, LINE)?;
        block_size(place, session.block_size)?;
        place.check_request_count(session.reqs.len())?;
        let mut woven = SessionBuilder::default();
        woven.add_agent(RecordedAgent::main(session.tool_tokens));
        let mut prompts: Vec<PromptBlockIds> = Vec::with_capacity(session.reqs.len());
        for raw in session.reqs {
            let delta: RequestDelta = json(place, raw.get(), DELTA)?;
            let agent = resolve_agent(place, &mut woven, &delta)?;
            let delta_result = apply_delta(place, &prompts, &delta, &mut builder.budget)?;
            prompts.push(delta_result.ids.clone());
            woven.add(agent, delta_result);
        }
        let session = woven.build(place, session.id.into(), builder)?;
        builder.sessions.push(session);
    }
    Ok(())
}

/// Returns the agent. Agents are numbered in the order in which they appear; all are sub-agents of the main one.
fn resolve_agent(
    location: TraceLocation<'_>,
    builder: &mut SessionBuilder,
    delta: &RequestDelta,
) -> Result<usize, TraceError> {
    if delta.agent < builder.agents() {
        return Ok(delta.agent);
    }
    if delta.agent > builder.agents() {
        return Err(location.out_of_range("agent", delta.agent, "0, or the next sub-agent's number"));
    }
    let (tools, lasted) = delta.sub.as_ref().map_or((None, None), |sub| (sub.tool_tokens, sub.duration_ms));
    let lasted = location.check_seconds("duration_ms", lasted.unwrap_or_default() / 1e3)?;
    Ok(builder.add_agent(RecordedAgent::sub(0, tools.unwrap_or_default(), lasted)))
}

fn apply_delta(
    location: TraceLocation<'_>,
    prompts: &[PromptBlockIds],
    delta: &RequestDelta,
    budget: &mut TraceEntryBudget,
) -> Result<RecordedRequest, TraceError> {
    let prompt = location.check_prompt("in", delta.prompt)?;
    let earlier = "-1, or the index of an earlier request";
    let none = PromptBlockIds::default();
    let parent = match usize::try_from(delta.par) {
        Ok(parent) => prompts.get(parent).ok_or_else(|| location.out_of_range("par", delta.par, earlier))?,
        Err(_) if delta.par == -1 => &none,
        Err(_) => return Err(location.out_of_range("par", delta.par, earlier)),
    };
    if delta.keep > parent.len() {
        return Err(location.out_of_range("keep", delta.keep, "at most the blocks of the request `par`"));
    }
    let blocks = delta.runs.iter().fold(u64::from(delta.keep), |sum, (_, count)| sum + u64::from(*count));
    if blocks * u64::from(BLOCK) > delta.prompt {
        let value = format!("{blocks} whole blocks with those kept in a prompt of {prompt} tokens");
        return Err(location.out_of_range("runs", value, "counts of blocks that fit into the prompt"));
    }
    // Counted twice: the prompt for comparison with later ones, and its path in the tree.
    budget.take(location, 2 * (parent.runs(delta.keep) + delta.runs.len()))?;
    let mut ids = parent.first(delta.keep);
    for (first, count) in &delta.runs {
        location.check_ids("runs", *first, *count)?;
        ids.push_run(*first, *count);
    }
    Ok(RecordedRequest {
        at: location.check_seconds("t", delta.t)?,
        pause: delta.think.map(|think| location.check_seconds("think", think)).transpose()?,
        duration: location.check_seconds("api", delta.api.unwrap_or_default())?,
        prompt,
        answer: location.check_answer("out", delta.answer)?,
        ids,
    })
}
