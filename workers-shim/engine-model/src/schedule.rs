//! Schedules the next step: running requests first, then waiting ones, within the token budget.

use vocabulary::Micros;

use crate::engine::Engine;
use crate::engine_step::{EngineStep, ScheduledTokens};
use crate::{EngineOutputKind, EngineRequestId, TransferRole};

impl Engine {
    /// Starts a step at `at`, if none is running and there is something to compute.
    pub(crate) fn begin_step(&mut self, at: Micros) {
        if self.batch.step.is_some() || self.is_dead() {
            return;
        }
        let mut plan = StepDraft { budget: self.profile.max_num_batched_tokens as usize, ..StepDraft::default() };
        self.schedule_running(&mut plan);
        if !plan.preempted {
            self.schedule_waiting(at, &mut plan);
        }
        if plan.work.is_empty() {
            return;
        }
        let time = self.profile.step_time(plan.prefill, plan.decodes);
        self.stats.steps += 1;
        self.batch.step = Some(EngineStep { ends: at + time, work: plan.work });
    }

    fn schedule_running(&mut self, draft: &mut StepDraft) {
        let mut next = 0;
        while let Some(id) = self.batch.running.get(next).copied() {
            let tokens = self.sequences[&id].pending_tokens().min(draft.budget);
            if tokens == 0 {
                break;
            }
            if !self.make_room(id, tokens, draft) {
                continue;
            }
            self.add_to_step(id, tokens, draft);
            next += 1;
        }
    }

    /// Allocates blocks for `tokens` more tokens, if needed by preempting the latest requests. Returns false if that
    /// was `id` itself.
    fn make_room(&mut self, id: EngineRequestId, tokens: usize, draft: &mut StepDraft) -> bool {
        while self.sequences[&id].missing_blocks(tokens) > self.pool.free() {
            draft.preempted = true;
            let Some(last) = self.batch.running.pop() else { return false };
            if let Some(sequence) = self.sequences.get_mut(&last) {
                sequence.reset_kv(&mut self.pool);
            }
            self.batch.waiting.push_front(last);
            self.stats.preemptions += 1;
            if last == id {
                return false;
            }
        }
        self.allocate_blocks(id, tokens);
        true
    }

    fn schedule_waiting(&mut self, at: Micros, draft: &mut StepDraft) {
        while draft.budget > 0 && self.batch.running.len() < self.profile.max_num_seqs as usize {
            let Some(id) = self.batch.waiting.front().copied() else { return };
            if self.sequences[&id].counts.arrived > at || !self.admit(id) {
                return;
            }
            self.batch.waiting.pop_front();
            let sequence = &self.sequences[&id];
            if self.tokens_to_pull(id).is_some() {
                self.begin_pull(at, id);
                continue;
            }
            let tokens = sequence.pending_tokens().min(draft.budget);
            if let (TransferRole::ReversePull(source, _), 0) = (&sequence.transfer, sequence.counts.external) {
                // The holder of the blocks for this turn is told that it may free them.
                let source = source.clone();
                self.emit(at, EngineOutputKind::Pulled { request: id, source });
            }
            self.batch.running.push(id);
            self.add_to_step(id, tokens, draft);
        }
    }

    /// Takes cached blocks and allocates all others. Returns false, with nothing taken, if they do not fit now.
    fn admit(&mut self, id: EngineRequestId) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        if sequence.memory.blocks.is_empty() {
            self.kv_events.extend(sequence.adopt_prefix(&mut self.pool));
        }
        let rest = sequence.pending_tokens();
        if sequence.missing_blocks(rest) > self.pool.free() {
            sequence.reset_kv(&mut self.pool);
            return false;
        }
        self.allocate_blocks(id, rest);
        true
    }

    fn allocate_blocks(&mut self, id: EngineRequestId, tokens: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        for _ in 0..sequence.missing_blocks(tokens) {
            sequence.memory.blocks.extend(self.pool.allocate());
        }
        self.kv_events.extend(self.pool.drain_evicted().into_iter().map(crate::PrefixCacheChange::Removed));
    }

    fn add_to_step(&mut self, id: EngineRequestId, tokens: usize, draft: &mut StepDraft) {
        if self.sequences[&id].is_decoding() {
            draft.decodes += 1;
        } else {
            draft.prefill += tokens as u32;
        }
        draft.budget -= tokens;
        draft.work.push(ScheduledTokens { request: id, tokens });
    }

    fn begin_pull(&mut self, at: Micros, id: EngineRequestId) {
        let request = id;
        let Some(source) = self.missing_source_blocks(id) else { return };
        self.links.pulling.insert(id, crate::transfer::PullState::Requested);
        self.emit(at, EngineOutputKind::Pull { request, source });
    }
}

/// A step that is being scheduled.
#[derive(Default)]
struct StepDraft {
    work: Vec<ScheduledTokens>,
    budget: usize,
    prefill: u32,
    decodes: u32,
    preempted: bool,
}
