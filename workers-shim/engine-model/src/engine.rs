//! The engine's interface: requests and time go in, outputs come out. It never acts by itself; `next_event` returns
//! when to call again.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use vocabulary::Micros;

use crate::engine_step::EngineStep;
use crate::pool::BlockPool;
use crate::sequence::Sequence;
use crate::transfer::{HeldBlocks, PullState};
use crate::{
    EngineBuildError, EngineOutput, EngineOutputKind, EngineProfile, EngineRequest, EngineRequestId, EngineStats,
    FinishReason, PrefixCacheChange, RequestRejection, TokenGenerator, TransferRole,
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
