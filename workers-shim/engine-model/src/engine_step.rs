//! The end of a step: what was computed, the sampled tokens, and the changes to the prefix cache.

use vocabulary::Micros;

use crate::engine::Engine;
use crate::{EngineOutputKind, EngineRequestId, EosPolicy};

/// A running step.
pub(crate) struct EngineStep {
    pub(crate) ends: Micros,
    pub(crate) work: Vec<ScheduledTokens>,
}

/// One request's share of it.
pub(crate) struct ScheduledTokens {
    pub(crate) request: EngineRequestId,
    pub(crate) tokens: usize,
}

impl Engine {
    /// Ends the running step.
    pub(crate) fn end_step(&mut self) {
        let Some(step) = self.batch.step.take() else { return };
        let mut ready = Vec::new();
        for work in step.work {
            // The request may have been cancelled in the meantime.
            let Some(sequence) = self.sequences.get_mut(&work.request) else { continue };
            let stored = sequence.compute(work.tokens, &mut self.pool, &self.voice);
            self.kv_events.extend(stored);
            if sequence.pending_tokens() == 0 {
                ready.push(work.request);
            }
        }
        self.emit_kv_events(step.ends);
        for request in ready {
            self.sample_token(step.ends, request);
        }
    }

    /// Emits one batch of events per step, before the tokens of the step.
    pub(crate) fn emit_kv_events(&mut self, at: Micros) {
        if !self.kv_events.is_empty() {
            let news = std::mem::take(&mut self.kv_events);
            self.emit(at, EngineOutputKind::Events(news));
        }
    }

    fn sample_token(&mut self, at: Micros, request: EngineRequestId) {
        let Some(sequence) = self.sequences.get_mut(&request) else { return };
        let state = sequence.state(&self.pool);
        let sampling = &sequence.sampling;
        let early = sequence.generated() < sampling.min_tokens as usize;
        let token = match early || sampling.eos_policy == EosPolicy::Ignored {
            true => self.voice.next_non_eos_token(state, sampling.salt),
            false => self.voice.next_token(state, sampling.salt),
        };
        sequence.tokens.push(token);
        let ended = sequence.ends_with(token, self.voice.eos(), self.profile.max_model_len);
        if sequence.counts.first_token.is_none() {
            sequence.counts.first_token = Some(at);
            let counts = sequence.counts.clone();
            self.count_prompt_sources(counts);
        }
        self.stats.generated += 1;
        self.emit(at, EngineOutputKind::Token { request, token });
        if let Some(reason) = ended {
            self.finish_request(at, request, reason);
        }
    }

    fn count_prompt_sources(&mut self, counts: crate::sequence::SequenceStats) {
        let cached = counts.cached.unwrap_or(0);
        self.stats.prompt.cached += cached as u64;
        self.stats.prompt.external += counts.external as u64;
        self.stats.prompt.computed += counts.prompt.saturating_sub(cached + counts.external) as u64;
    }
}
