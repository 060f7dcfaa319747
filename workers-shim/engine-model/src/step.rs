//! A step's end: what it computed, the tokens it drew, and what that did to the prefix cache.

use vocabulary::Micros;

use crate::engine::Engine;
use crate::{Ending, OutputKind, RequestId};

/// A step under way.
pub(crate) struct Step {
    pub(crate) ends: Micros,
    pub(crate) work: Vec<Work>,
}

/// One request's part of it.
pub(crate) struct Work {
    pub(crate) request: RequestId,
    pub(crate) tokens: usize,
}

impl Engine {
    /// The step under way is over.
    pub(crate) fn end_step(&mut self) {
        let Some(step) = self.batch.step.take() else { return };
        let mut ready = Vec::new();
        for work in step.work {
            // Gone if it was cancelled in the meantime.
            let Some(sequence) = self.sequences.get_mut(&work.request) else { continue };
            let stored = sequence.compute(work.tokens, &mut self.pool, &self.voice);
            self.news.extend(stored);
            if sequence.pending() == 0 {
                ready.push(work.request);
            }
        }
        self.tell_news(step.ends);
        for request in ready {
            self.draw(step.ends, request);
        }
    }

    /// One batch of events a step, before the tokens that it made.
    pub(crate) fn tell_news(&mut self, at: Micros) {
        if !self.news.is_empty() {
            let news = std::mem::take(&mut self.news);
            self.say(at, OutputKind::Events(news));
        }
    }

    fn draw(&mut self, at: Micros, request: RequestId) {
        let Some(sequence) = self.sequences.get_mut(&request) else { return };
        let state = sequence.state(&self.pool);
        let sampling = &sequence.sampling;
        let early = sequence.generated() < sampling.min_tokens as usize;
        let token = match early || sampling.ending == Ending::Ignored {
            true => self.voice.next_word(state, sampling.salt),
            false => self.voice.next(state, sampling.salt),
        };
        sequence.tokens.push(token);
        let ended = sequence.ended_by(token, self.voice.eos(), self.profile.context_tokens);
        if sequence.counts.first_token.is_none() {
            sequence.counts.first_token = Some(at);
            let counts = sequence.counts.clone();
            self.count_prompt(counts);
        }
        self.stats.generated += 1;
        self.say(at, OutputKind::Token { request, token });
        if let Some(reason) = ended {
            self.end(at, request, reason);
        }
    }

    fn count_prompt(&mut self, counts: crate::sequence::Counts) {
        let cached = counts.cached.unwrap_or(0);
        self.stats.prompt.cached += cached as u64;
        self.stats.prompt.external += counts.external as u64;
        self.stats.prompt.computed += counts.prompt.saturating_sub(cached + counts.external) as u64;
    }
}
