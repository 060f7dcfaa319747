//! Dependencies between the steps of a session: each agent's steps are sequential, and an agent waits for those it
//! started.

use std::collections::HashMap;
use std::sync::Arc;

use engine_model::runs::RunId;
use vocabulary::{Micros, Tokens};

use super::BLOCK;
use crate::trace::TraceBuilder;
use crate::trace::block_ids::PromptBlockIds;
use crate::trace::error::{TraceError, TraceLocation};
use crate::trace::run_builder::{RadixBuilder, ToolPrefix};
use crate::trace::{TraceSession, TraceStep};

/// One request as recorded.
pub(super) struct RecordedRequest {
    pub(super) at: Micros,
    /// Pause before the request, if recorded.
    pub(super) pause: Option<Micros>,
    /// Duration of the answer.
    pub(super) duration: Micros,
    pub(super) prompt: Tokens,
    pub(super) answer: Tokens,
    pub(super) ids: PromptBlockIds,
}

pub(super) struct RecordedAgent {
    parent: Option<usize>,
    /// Tokens of the tools at the start of its prompts.
    tools: u64,
    duration: Micros,
    last: Option<usize>,
    /// Sub-agents started since its last request.
    children: Vec<usize>,
}

impl RecordedAgent {
    pub(super) fn main(tools: u64) -> Self {
        Self { parent: None, tools, duration: Micros::ZERO, last: None, children: Vec::new() }
    }

    pub(super) fn sub(parent: usize, tools: u64, duration: Micros) -> Self {
        Self { parent: Some(parent), tools, duration, last: None, children: Vec::new() }
    }
}

/// Builder of a session.
#[derive(Default)]
pub(super) struct SessionBuilder {
    agents: Vec<RecordedAgent>,
    steps: Vec<TraceStep>,
    durations: Vec<Micros>,
    radix: RadixBuilder,
    /// First requests of agents: prompt list, and blocks and tokens of the tools.
    first_requests: Vec<(usize, u32, u64)>,
}

impl SessionBuilder {
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    pub(super) fn agents(&self) -> usize {
        self.agents.len()
    }

    pub(super) fn add_agent(&mut self, agent: RecordedAgent) -> usize {
        let number = self.agents.len();
        if let Some(parent) = agent.parent {
            self.agents[parent].children.push(number);
        }
        self.agents.push(agent);
        number
    }

    /// Adds the next request of an agent.
    pub(super) fn add(&mut self, agent: usize, request: RecordedRequest) {
        let number = self.steps.len();
        let own = &self.agents[agent];
        let children: Vec<&RecordedAgent> = own.children.iter().map(|child| &self.agents[*child]).collect();
        let waited: Vec<usize> = children.iter().filter_map(|child| child.last).collect();
        let before = own.last.or_else(|| own.parent.and_then(|parent| self.agents[parent].last));
        let after = if waited.is_empty() { before.into_iter().collect() } else { waited };
        let since = |last: usize| request.at - (self.steps[last].at + self.durations[last]);
        let pause = request.pause.unwrap_or_else(|| match own.parent {
            None => own.last.map_or(Micros::ZERO, since),
            Some(_) => Micros::ZERO,
        });
        // The recorded pause includes the time of the sub-agents.
        let ran = children.iter().filter(|child| child.last.is_some()).map(|child| child.duration).max();
        let think = pause - ran.unwrap_or_default();
        let list = self.radix.insert(request.ids);
        if own.last.is_none() {
            self.first_requests.push((list, (own.tools / u64::from(BLOCK)) as u32, own.tools));
        }
        let own = &mut self.agents[agent];
        own.last = Some(number);
        own.children.clear();
        self.durations.push(request.duration);
        let RecordedRequest { at, prompt, answer, .. } = request;
        let path: Arc<[RunId]> = [].into();
        self.steps.push(TraceStep {
            agent: agent as u32,
            after,
            pause: think,
            at,
            prompt,
            answer,
            path,
            resent_path: None,
        });
    }

    /// Builds the session, with prompts cut into runs.
    pub(super) fn build(
        mut self,
        location: TraceLocation<'_>,
        id: Arc<str>,
        builder: &mut TraceBuilder,
    ) -> Result<TraceSession, TraceError> {
        for (list, blocks, _) in &self.first_requests {
            self.radix.cut(*list, *blocks);
        }
        let resent = self.find_resent_answers();
        for (list, blocks) in resent.iter().flatten() {
            self.radix.cut(*list, *blocks);
        }
        let TraceBuilder { runs, tool_prefixes: known, budget, .. } = builder;
        let preamble = self.first_requests.first().map(|(list, blocks, key)| ToolPrefix {
            key: *key,
            blocks: *blocks,
            list: *list,
            known,
        });
        self.radix.freeze(BLOCK, runs, preamble);
        for (list, step) in self.steps.iter_mut().enumerate() {
            let path = self.radix.path(list, u32::MAX);
            let resent = resent[list].map(|(list, blocks)| self.radix.path(list, blocks));
            budget.take(location, path.len() + resent.as_ref().map_or(0, Vec::len))?;
            (step.path, step.resent_path) = (path.into(), resent.map(Arc::from));
        }
        Ok(TraceSession { id, steps: self.steps })
    }

    /// For each step, returns where its prompt and answer end in the agent's next prompt, if that continues them.
    fn find_resent_answers(&self) -> Vec<Option<(usize, u32)>> {
        let mut all = vec![None; self.steps.len()];
        let mut before: HashMap<u32, usize> = HashMap::new();
        for (next, step) in self.steps.iter().enumerate() {
            if let Some(last) = before.insert(step.agent, next) {
                let (old, new) = (self.radix.list(last), self.radix.list(next));
                let (known, whole) = (&self.steps[last], old.len().saturating_sub(1));
                let grows = new.len() >= old.len() && old.common_prefix_len(0, new, 0) >= whole;
                let end = ((known.prompt + known.answer).0 / u64::from(BLOCK)) as u32;
                if grows && step.prompt >= known.prompt + known.answer && end > whole {
                    all[last] = Some((next, end.min(new.len())));
                }
            }
        }
        all
    }
}
