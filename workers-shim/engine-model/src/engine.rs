//! The engine's face: requests in, time in, outputs out. It never acts by itself; `next_event` says when to call again.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use vocabulary::Micros;

use crate::pool::Pool;
use crate::sequence::Sequence;
use crate::step::Step;
use crate::transfer::{Hold, Pulling};
use crate::{
    FinishReason, KvEvent, ModelError, Output, OutputKind, Profile, Refused, Request, RequestId, Stats, Transfer, Voice,
};

/// A simulated engine.
pub struct Engine {
    pub(crate) profile: Arc<Profile>,
    pub(crate) voice: Voice,
    pub(crate) pool: Pool,
    pub(crate) sequences: HashMap<RequestId, Sequence>,
    pub(crate) batch: Batch,
    pub(crate) links: Links,
    pub(crate) outputs: Vec<Output>,
    /// Changes to the prefix cache that the next step's batch will tell.
    pub(crate) news: Vec<KvEvent>,
    pub(crate) stats: Stats,
    life: Life,
}

/// One life of an engine's process.
struct Life {
    /// Seeds the names of blocks.
    root: u64,
    /// The latest time that it was told.
    clock: Micros,
    requests: u64,
    dead: bool,
}

/// Who computes, who waits, and the step under way.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) running: Vec<RequestId>,
    pub(crate) waiting: VecDeque<RequestId>,
    pub(crate) step: Option<Step>,
}

/// KV that is promised, and KV that is on its way.
#[derive(Default)]
pub(crate) struct Links {
    pub(crate) holds: BTreeMap<Arc<str>, Hold>,
    pub(crate) pulling: BTreeMap<RequestId, Pulling>,
    /// When the link is free again.
    pub(crate) busy_until: Micros,
}

impl Engine {
    /// An engine at time zero. `root` seeds the names of its blocks.
    pub fn new(profile: Arc<Profile>, voice: Voice, root: u64) -> Result<Self, ModelError> {
        profile.check()?;
        Ok(Self {
            pool: Pool::new(profile.blocks),
            profile,
            voice,
            sequences: HashMap::new(),
            batch: Batch::default(),
            links: Links::default(),
            outputs: Vec::new(),
            news: Vec::new(),
            stats: Stats::default(),
            life: Life { root, clock: Micros(0), requests: 0, dead: false },
        })
    }

    /// Its speeds and sizes.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Take a request at `now`. An idle engine begins with it then, and says so with the next call of `advance`.
    pub fn submit(&mut self, now: Micros, request: Request) -> Result<RequestId, Refused> {
        let (prompt, context) = (request.prompt.len() as u32, self.profile.context_tokens);
        let waiting = (self.batch.waiting.len() + self.links.pulling.len()) as u32;
        match () {
            () if self.life.dead => return Err(Refused::Dead),
            () if prompt == 0 => return Err(Refused::EmptyPrompt),
            () if prompt >= context => return Err(Refused::TooLong { prompt, context }),
            () if waiting >= self.profile.max_waiting => return Err(Refused::QueueFull { waiting }),
            () => {}
        }
        self.life.clock = self.life.clock.max(now);
        self.life.requests += 1;
        let id = RequestId(self.life.requests);
        if request.transfer == Transfer::Hang {
            self.links.pulling.insert(id, Pulling::Never);
        } else {
            self.batch.waiting.push_back(id);
        }
        self.sequences.insert(id, Sequence::new(request, self.life.root, self.profile.block_tokens, now));
        Ok(id)
    }

    /// The client has left. What the request had computed stays in the prefix cache.
    pub fn cancel(&mut self, now: Micros, id: RequestId) {
        let hung = matches!(self.links.pulling.get(&id), Some(Pulling::Never));
        self.end(now, id, FinishReason::Abort);
        if hung {
            self.die(now);
        }
    }

    /// Everything that happens until `now`, in order.
    pub fn advance(&mut self, now: Micros) -> Vec<Output> {
        self.begin_step(self.life.clock.min(now));
        while let Some(at) = self.next_event().filter(|at| *at <= now) {
            self.happen(at);
            self.begin_step(at);
        }
        self.begin_step(now);
        self.life.clock = self.life.clock.max(now);
        std::mem::take(&mut self.outputs)
    }

    /// When something will happen next if nobody calls before; none when nothing will.
    pub fn next_event(&self) -> Option<Micros> {
        let step = self.batch.step.as_ref().map(|step| step.ends);
        let pulled = self.links.pulling.values().filter_map(Pulling::due).min();
        let expiry = self.links.holds.values().map(|hold| hold.expires).min();
        [step, pulled, expiry].into_iter().flatten().min()
    }

    fn happen(&mut self, at: Micros) {
        if self.batch.step.as_ref().is_some_and(|step| step.ends <= at) {
            self.end_step();
        }
        self.end_pulls(at);
        self.expire_holds(at);
    }

    /// Forget the prefix cache. Refused while blocks are in use. Told with the next step's events.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let cleared = self.pool.clear();
        if cleared {
            self.news.clear();
            self.news.push(KvEvent::Cleared);
        }
        cleared
    }

    /// Fail everything and take nothing more, as an engine core that crashed.
    pub fn die(&mut self, now: Micros) {
        self.life.dead = true;
        let mut ids: Vec<RequestId> = self.sequences.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            self.end(now, id, FinishReason::Error);
        }
        self.links.holds.clear();
        self.batch.step = None;
    }

    /// Whether it has died.
    pub fn is_dead(&self) -> bool {
        self.life.dead
    }

    /// Its counts now.
    pub fn stats(&self) -> Stats {
        Stats {
            running: self.batch.running.len() as u32,
            waiting: self.batch.waiting.len() as u32,
            pulling: self.links.pulling.len() as u32,
            blocks_used: self.pool.used() as u32,
            ..self.stats.clone()
        }
    }

    pub(crate) fn say(&mut self, at: Micros, kind: OutputKind) {
        self.outputs.push(Output { at, kind });
    }

    /// Take a request out, wherever it is, and say how it ended.
    pub(crate) fn end(&mut self, at: Micros, id: RequestId, reason: FinishReason) {
        let Some(mut sequence) = self.sequences.remove(&id) else { return };
        self.batch.running.retain(|other| *other != id);
        self.batch.waiting.retain(|other| *other != id);
        self.links.pulling.remove(&id);
        let mut finish = sequence.finish(reason, at);
        if let Some(taker) = self.taker(at, (&sequence.transfer, reason)) {
            finish.handoff = Some(self.hold(at, &mut sequence, taker));
        }
        sequence.drop_memory(&mut self.pool);
        let count = match reason {
            FinishReason::Stop => &mut self.stats.finishes.stop,
            FinishReason::Length => &mut self.stats.finishes.length,
            FinishReason::Abort => &mut self.stats.finishes.abort,
            FinishReason::Error => &mut self.stats.finishes.error,
        };
        *count += 1;
        self.say(at, OutputKind::Finished { request: id, finish });
    }
}
