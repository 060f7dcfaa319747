//! Who waits for whom in a session: each agent's steps follow each other, and an agent waits for those it started.

use std::collections::HashMap;
use std::sync::Arc;

use engine_model::runs::RunId;
use vocabulary::{Micros, Tokens};

use super::BLOCK;
use crate::trace::block_ids::BlockIds;
use crate::trace::error::{Place, TraceError};
use crate::trace::radix::{Preamble, Radix};
use crate::trace::{Reader, Session, Step};

/// One request as a recording tells it.
pub(super) struct Told {
    pub(super) at: Micros,
    /// The pause before it, where the recording says.
    pub(super) think: Option<Micros>,
    /// How long its answer took.
    pub(super) took: Micros,
    pub(super) prompt: Tokens,
    pub(super) answer: Tokens,
    pub(super) ids: BlockIds,
}

pub(super) struct Agent {
    parent: Option<usize>,
    /// Tokens of the tools that its prompts begin with.
    tools: u64,
    lasted: Micros,
    last: Option<usize>,
    /// Sub-agents that it has started since its last request.
    children: Vec<usize>,
}

impl Agent {
    pub(super) fn main(tools: u64) -> Self {
        Self { parent: None, tools, lasted: Micros::ZERO, last: None, children: Vec::new() }
    }

    pub(super) fn sub(parent: usize, tools: u64, lasted: Micros) -> Self {
        Self { parent: Some(parent), tools, lasted, last: None, children: Vec::new() }
    }
}

/// A session in the making.
#[derive(Default)]
pub(super) struct Woven {
    agents: Vec<Agent>,
    steps: Vec<Step>,
    took: Vec<Micros>,
    radix: Radix,
    /// First requests of agents: their list, and the blocks of their tools.
    firsts: Vec<(usize, u32, u64)>,
}

impl Woven {
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    pub(super) fn agents(&self) -> usize {
        self.agents.len()
    }

    pub(super) fn open(&mut self, agent: Agent) -> usize {
        let number = self.agents.len();
        if let Some(parent) = agent.parent {
            self.agents[parent].children.push(number);
        }
        self.agents.push(agent);
        number
    }

    /// The next request of an agent.
    pub(super) fn add(&mut self, agent: usize, told: Told) {
        let number = self.steps.len();
        let own = &self.agents[agent];
        let children: Vec<&Agent> = own.children.iter().map(|child| &self.agents[*child]).collect();
        let waited: Vec<usize> = children.iter().filter_map(|child| child.last).collect();
        let before = own.last.or_else(|| own.parent.and_then(|parent| self.agents[parent].last));
        let after = if waited.is_empty() { before.into_iter().collect() } else { waited };
        let since = |last: usize| told.at - (self.steps[last].at + self.took[last]);
        let pause = told.think.unwrap_or_else(|| match own.parent {
            None => own.last.map_or(Micros::ZERO, since),
            Some(_) => Micros::ZERO,
        });
        // The recorded pause holds the sub-agents' time too.
        let ran = children.iter().filter(|child| child.last.is_some()).map(|child| child.lasted).max();
        let think = pause - ran.unwrap_or_default();
        let list = self.radix.insert(told.ids);
        if own.last.is_none() {
            self.firsts.push((list, (own.tools / u64::from(BLOCK)) as u32, own.tools));
        }
        let own = &mut self.agents[agent];
        own.last = Some(number);
        own.children.clear();
        self.took.push(told.took);
        let Told { at, prompt, answer, .. } = told;
        let path: Arc<[RunId]> = [].into();
        self.steps.push(Step { agent: agent as u32, after, think, at, prompt, answer, path, resent: None });
    }

    /// All of it, with prompts cut into runs.
    pub(super) fn session(
        mut self,
        place: Place<'_>,
        id: Arc<str>,
        reader: &mut Reader,
    ) -> Result<Session, TraceError> {
        for (list, blocks, _) in &self.firsts {
            self.radix.cut(*list, *blocks);
        }
        let resent = self.resent();
        for (list, blocks) in resent.iter().flatten() {
            self.radix.cut(*list, *blocks);
        }
        let Reader { runs, preambles: known, budget, .. } = reader;
        let preamble =
            self.firsts.first().map(|(list, blocks, key)| Preamble { key: *key, blocks: *blocks, list: *list, known });
        self.radix.freeze(BLOCK, runs, preamble);
        for (list, step) in self.steps.iter_mut().enumerate() {
            let path = self.radix.path(list, u32::MAX);
            let resent = resent[list].map(|(list, blocks)| self.radix.path(list, blocks));
            budget.take(place, path.len() + resent.as_ref().map_or(0, Vec::len))?;
            (step.path, step.resent) = (path.into(), resent.map(Arc::from));
        }
        Ok(Session { id, steps: self.steps })
    }

    /// For each step, where its prompt and answer end in the agent's next prompt, if that goes on from them.
    fn resent(&self) -> Vec<Option<(usize, u32)>> {
        let mut all = vec![None; self.steps.len()];
        let mut before: HashMap<u32, usize> = HashMap::new();
        for (next, step) in self.steps.iter().enumerate() {
            if let Some(last) = before.insert(step.agent, next) {
                let (old, new) = (self.radix.list(last), self.radix.list(next));
                let (known, whole) = (&self.steps[last], old.len().saturating_sub(1));
                let grows = new.len() >= old.len() && old.common(0, new, 0) >= whole;
                let end = ((known.prompt + known.answer).0 / u64::from(BLOCK)) as u32;
                if grows && step.prompt >= known.prompt + known.answer && end > whole {
                    all[last] = Some((next, end.min(new.len())));
                }
            }
        }
        all
    }
}
