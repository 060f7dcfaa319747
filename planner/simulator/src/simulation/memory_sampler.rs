//! Periodic samples of the fleet's memory.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use engine_model::runs::{RunEngine, RunId, RunTree};

use super::StepRef;
use crate::trace::TraceStep;

#[derive(Default)]
pub(super) struct MemorySampler {
    /// Latest prompt of each agent of the running sessions.
    latest_prompts: BTreeMap<usize, BTreeMap<u32, Arc<[RunId]>>>,
    copies: Vec<f64>,
    /// Samples of the mean tokens of a session in memory.
    tokens_per_session: Vec<f64>,
}

impl MemorySampler {
    /// Records a step's prompt as the latest one of its agent.
    pub(super) fn record_prompt(&mut self, at: StepRef, step: &TraceStep) {
        self.latest_prompts.entry(at.session).or_default().insert(step.agent, step.path.clone());
    }

    pub(super) fn session_finished(&mut self, session: usize) {
        self.latest_prompts.remove(&session);
    }

    /// Samples the copies per cached token, and the tokens of running sessions. A session's token that no worker holds
    /// counts once, since it would need memory once.
    pub(super) fn sample(&mut self, engines: &[&RunEngine], runs: &RunTree) {
        let needed: HashSet<RunId> =
            self.latest_prompts.values().flat_map(BTreeMap::values).flat_map(|path| path.iter().copied()).collect();
        let (mut all, mut distinct, mut taken) = (0, 0, 0);
        for run in (0..runs.len() as u32).map(RunId) {
            let copies = engines.iter().filter(|engine| engine.has(run)).count() as u64;
            let tokens = runs.device_size(run).0;
            all += copies * tokens;
            distinct += u64::from(copies > 0) * tokens;
            taken += if needed.contains(&run) { copies.max(1) * tokens } else { 0 };
        }
        if distinct > 0 {
            self.copies.push(all as f64 / distinct as f64);
        }
        if taken > 0 {
            self.tokens_per_session.push(taken as f64 / self.latest_prompts.len() as f64);
        }
    }

    /// Returns the number of samples, and the means of copies per token and of tokens per session.
    pub(super) fn summary(&self) -> (usize, f64, f64) {
        (self.copies.len(), mean(&self.copies), mean(&self.tokens_per_session))
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}
