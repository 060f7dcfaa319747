//! A simulated engine: its interface, the scheduler (running requests first, then waiting ones, within the token budget)
//! and the end of a step. Requests and time go in, outputs come out; it never acts by itself, and `next_event` returns
//! when to call again.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use vocabulary::Micros;

use crate::pool::BlockPool;
use crate::sequence::Sequence;
use crate::transfer::{HeldBlocks, PullState};
use crate::{
    EngineBuildError, EngineOutput, EngineOutputKind, EngineProfile, EngineRequest, EngineRequestId, EngineStats,
    EosPolicy, FinishReason, PrefixCacheChange, RequestRejection, TokenGenerator, TransferRole,
};

/// A simulated engine.
pub struct Engine {
    pub(crate) profile: Arc<EngineProfile>,
    pub(crate) voice: TokenGenerator,
    pub(crate) pool: BlockPool,
    pub(crate) sequences: HashMap<EngineRequestId, Sequence>,
    pub(crate) batch: SchedulerState,
    pub(crate) links: PendingTransfers,
    pub(crate) outputs: Vec<EngineOutput>,
    /// Changes to the prefix cache to report with the next step.
    pub(crate) kv_events: Vec<PrefixCacheChange>,
    pub(crate) stats: EngineStats,
    incarnation: EngineIncarnation,
}

/// One incarnation of an engine process.
struct EngineIncarnation {
    /// Seed of the block hashes.
    root: u64,
    /// The latest time passed in.
    clock: Micros,
    requests: u64,
    dead: bool,
}

/// Running and waiting requests, and the current step.
#[derive(Default)]
pub(crate) struct SchedulerState {
    pub(crate) running: Vec<EngineRequestId>,
    pub(crate) waiting: VecDeque<EngineRequestId>,
    pub(crate) step: Option<EngineStep>,
}

/// Blocks held for consumers, and transfers in progress.
#[derive(Default)]
pub(crate) struct PendingTransfers {
    pub(crate) holds: BTreeMap<Arc<str>, HeldBlocks>,
    pub(crate) pulling: BTreeMap<EngineRequestId, PullState>,
    /// When the link is free again.
    pub(crate) busy_until: Micros,
}

impl Engine {
    /// Creates an engine at time zero. `root` seeds its block hashes.
    pub fn new(profile: Arc<EngineProfile>, generator: TokenGenerator, root: u64) -> Result<Self, EngineBuildError> {
        profile.check()?;
        Ok(Self {
            pool: BlockPool::new(profile.num_gpu_blocks),
            profile,
            voice: generator,
            sequences: HashMap::new(),
            batch: SchedulerState::default(),
            links: PendingTransfers::default(),
            outputs: Vec::new(),
            kv_events: Vec::new(),
            stats: EngineStats::default(),
            incarnation: EngineIncarnation { root, clock: Micros(0), requests: 0, dead: false },
        })
    }

    /// Returns its speeds and sizes.
    pub fn profile(&self) -> &EngineProfile {
        &self.profile
    }

    /// Submits a request at `now`. An idle engine starts it at once and reports that with the next call of `advance`.
    pub fn submit(&mut self, now: Micros, request: EngineRequest) -> Result<EngineRequestId, RequestRejection> {
        let (prompt, context) = (request.prompt.len() as u32, self.profile.max_model_len);
        let waiting = (self.batch.waiting.len() + self.links.pulling.len()) as u32;
        match () {
            () if self.incarnation.dead => return Err(RequestRejection::Dead),
            () if prompt == 0 => return Err(RequestRejection::EmptyPrompt),
            () if prompt >= context => return Err(RequestRejection::TooLong { prompt, context }),
            () if waiting >= self.profile.max_queue => return Err(RequestRejection::QueueFull { waiting }),
            () => {}
        }
        self.incarnation.clock = self.incarnation.clock.max(now);
        self.incarnation.requests += 1;
        let id = EngineRequestId(self.incarnation.requests);
        if request.transfer == TransferRole::Hang {
            self.links.pulling.insert(id, PullState::Hung);
        } else {
            self.batch.waiting.push_back(id);
        }
        self.sequences.insert(id, Sequence::new(request, self.incarnation.root, self.profile.block_size, now));
        Ok(id)
    }

    /// Cancels a request whose client has disconnected. Its computed blocks stay in the prefix cache.
    pub fn cancel(&mut self, now: Micros, id: EngineRequestId) {
        let hung = matches!(self.links.pulling.get(&id), Some(PullState::Hung));
        self.finish_request(now, id, FinishReason::Abort);
        if hung {
            self.crash(now);
        }
    }

    /// Advances to `now` and returns everything that happened until then, in order.
    pub fn advance(&mut self, now: Micros) -> Vec<EngineOutput> {
        self.begin_step(self.incarnation.clock.min(now));
        while let Some(at) = self.next_event().filter(|at| *at <= now) {
            self.handle_due_work(at);
            self.begin_step(at);
        }
        self.begin_step(now);
        self.incarnation.clock = self.incarnation.clock.max(now);
        std::mem::take(&mut self.outputs)
    }

    /// Returns when something will happen next without further calls; None if nothing will.
    pub fn next_event(&self) -> Option<Micros> {
        let step = self.batch.step.as_ref().map(|step| step.ends);
        let pulled = self.links.pulling.values().filter_map(PullState::due).min();
        let expiry = self.links.holds.values().map(|hold| hold.expires).min();
        [step, pulled, expiry].into_iter().flatten().min()
    }

    fn handle_due_work(&mut self, at: Micros) {
        if self.batch.step.as_ref().is_some_and(|step| step.ends <= at) {
            self.end_step();
        }
        self.finish_due_pulls(at);
        self.expire_holds(at);
    }

    /// Clears the prefix cache; returns false while blocks are in use. The change is reported with the next step's
    /// events.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let cleared = self.pool.clear();
        if cleared {
            self.kv_events.clear();
            self.kv_events.push(PrefixCacheChange::Cleared);
        }
        cleared
    }

    /// Fails all requests and accepts no more, like an engine core that crashed.
    pub fn crash(&mut self, now: Micros) {
        self.incarnation.dead = true;
        let mut ids: Vec<EngineRequestId> = self.sequences.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            self.finish_request(now, id, FinishReason::Error);
        }
        self.links.holds.clear();
        self.batch.step = None;
    }

    /// Returns whether it has died.
    pub fn is_dead(&self) -> bool {
        self.incarnation.dead
    }

    /// Returns its current counters.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.batch.running.len() as u32,
            waiting: self.batch.waiting.len() as u32,
            pulling: self.links.pulling.len() as u32,
            blocks_used: self.pool.used() as u32,
            ..self.stats.clone()
        }
    }

    pub(crate) fn emit(&mut self, at: Micros, kind: EngineOutputKind) {
        self.outputs.push(EngineOutput { at, kind });
    }

    /// Removes a request in any state and reports how it ended.
    pub(crate) fn finish_request(&mut self, at: Micros, id: EngineRequestId, reason: FinishReason) {
        let Some(mut sequence) = self.sequences.remove(&id) else { return };
        self.batch.running.retain(|other| *other != id);
        self.batch.waiting.retain(|other| *other != id);
        self.links.pulling.remove(&id);
        let mut finish = sequence.finish(reason, at);
        if let Some(taker) = self.handoff_target(at, (&sequence.transfer, reason)) {
            finish.handoff = Some(self.hold_blocks(at, &mut sequence, taker));
        }
        sequence.reset_kv(&mut self.pool);
        let count = match reason {
            FinishReason::Stop => &mut self.stats.finishes.stop,
            FinishReason::Length => &mut self.stats.finishes.length,
            FinishReason::Abort => &mut self.stats.finishes.abort,
            FinishReason::Error => &mut self.stats.finishes.error,
        };
        *count += 1;
        self.emit(at, EngineOutputKind::Finished { request: id, finish });
    }
}

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
        self.kv_events.extend(self.pool.drain_evicted().into_iter().map(PrefixCacheChange::Removed));
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
        self.links.pulling.insert(id, PullState::Requested);
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
