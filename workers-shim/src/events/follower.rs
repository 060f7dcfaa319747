//! Follows the KV events of one worker through all its incarnations.
//!
//! The live socket is read only as fast as messages are applied. A backlog builds up in the socket and at the engine,
//! which drops messages beyond its high-water mark. A drop shows as a gap, and gaps are replayed, so no queue is needed
//! here.

mod connection;
mod rank;

use std::sync::Arc;
use std::time::Duration;

use residency::{BlockMappingRules, RoutedBlockLimits};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use vocabulary::{Incarnation, ModelId, Tokens};

use super::discovery::EventSource;
use super::shared_index::SharedIndex;
use super::snapshot_provider::SnapshotProvider;
use super::sources::InexactReason;
use crate::fleet::EventSourceSetting;
use crate::fleet::probe::get;
use crate::fleet::worker_handle::WorkerHandle;
use rank::{FollowEnd, RankFollower};

/// Returns how the events of a worker that serves this model are mapped to chain blocks. None for models whose prompts
/// are identified by bytes only, because no engine event can match their chains.
pub type BlockMappingResolver = Arc<dyn Fn(&ModelId) -> Option<BlockMappingRules> + Send + Sync>;

/// What all followers of a fleet share.
#[derive(Clone)]
pub(crate) struct FollowerEnvironment {
    /// Client for requests to the workers.
    pub(crate) client: reqwest::Client,
    /// The index that events are applied to.
    pub(crate) index: SharedIndex,
    pub(crate) rules: BlockMappingResolver,
    /// Limits of what is recorded for workers without events.
    pub(crate) routed_limits: RoutedBlockLimits,
    /// The other routers, if there are any.
    pub(crate) snapshots: Option<Arc<dyn SnapshotProvider>>,
    /// Interval for discovering the sources of a worker that had none.
    pub(crate) rediscover_after: Duration,
    /// Connections to the ranks of all workers beyond the first of each: an engine may name any number of ranks.
    pub(crate) extra_ranks: Arc<Semaphore>,
}

/// Follows a worker until it has left, and then removes it from the index.
pub(crate) async fn follow(member: Arc<WorkerHandle>, with: FollowerEnvironment) {
    with.index.admit(member.id, with.routed_limits);
    let mut life = member.watch_incarnation();
    // The incarnation without events for which routed blocks may be recorded.
    let mut guessed = None;
    while !member.has_left() {
        let Some(incarnation) = *life.borrow_and_update() else {
            // Without a process identity, whatever answers next may be another process.
            guessed = guessed.filter(|life| *life != Incarnation(0));
            member.events.sources.set_no_sources(InexactReason::Unreachable);
            tokio::select! {
                // The handle owns the sender.
                _ = life.changed() => {}
                () = member.wait_left() => {}
            }
            continue;
        };
        let worker = FollowedWorker { member: member.clone(), environment: with.clone(), incarnation };
        if guessed == Some(incarnation) {
            with.index.expire(member.id);
        } else {
            with.index.use_approximation(member.id);
        }
        let (sources, rules) = (worker.discover_sources().await, worker.rules());
        guessed = match rules.filter(|_| !sources.is_empty()) {
            Some(rules) => {
                worker.follow_ranks(sources, rules).await;
                None
            }
            None => {
                member.events.sources.set_no_sources(worker.approximation_reason(&sources));
                timeout(with.rediscover_after, wait_incarnation_end(&member, incarnation))
                    .await
                    .is_err()
                    .then_some(incarnation)
            }
        };
    }
    with.index.remove_worker(member.id);
    member.mark_forgotten();
}

/// Waits until the incarnation has ended or the worker has left. An unreachable worker may still be the same process;
/// one without a process identity never counts as the same.
async fn wait_incarnation_end(worker: &WorkerHandle, incarnation: Incarnation) {
    let over = |now: &Option<Incarnation>| now.map_or(incarnation == Incarnation(0), |now| now != incarnation);
    let mut life = worker.watch_incarnation();
    tokio::select! {
        // The handle owns the sender.
        _ = life.wait_for(over) => {}
        () = worker.wait_left() => {}
    }
}

/// Returns the reason that blocks of `block` tokens cannot be mapped to chain blocks.
fn misfit_reason(rules: &BlockMappingRules, block: Tokens) -> InexactReason {
    InexactReason::Misfit { model: rules.namespace.model.clone(), block, chain: rules.block }
}

#[derive(Clone)]
struct FollowedWorker {
    member: Arc<WorkerHandle>,
    environment: FollowerEnvironment,
    incarnation: Incarnation,
}

impl FollowedWorker {
    async fn discover_sources(&self) -> Vec<EventSource> {
        if let Some(configured) = EventSource::configured(&self.member.spec.events) {
            return vec![configured];
        }
        match (&self.member.spec.events, get(&self.environment.client, &self.member, "/kv_event_sources").await) {
            (EventSourceSetting::Discovered, Ok(text)) => EventSource::read_all(&text, &self.member.spec.endpoint),
            _ => Vec::new(),
        }
    }

    fn rules(&self) -> Option<BlockMappingRules> {
        self.member.probed_state().models.iter().find_map(|model| (self.environment.rules)(model))
    }

    fn approximation_reason(&self, sources: &[EventSource]) -> InexactReason {
        if sources.is_empty() {
            return InexactReason::NoEvents;
        }
        InexactReason::NoTextModel(self.member.probed_state().models.first().cloned())
    }

    /// Follows all ranks until this incarnation ends.
    async fn follow_ranks(&self, sources: Vec<EventSource>, rules: BlockMappingRules) {
        self.environment.index.use_events(self.member.id);
        self.member.events.sources.set_sources(&sources);
        // All ranks of an engine have one block size, so a misfit found by one rank ends all of them.
        let (misfit, _) = watch::channel(None);
        let mut ranks = JoinSet::new();
        let rank_rules = rules.clone().among_ranks(sources.len());
        for (at, source) in sources.into_iter().enumerate() {
            let rank = RankFollower::new(self.clone(), source, rank_rules.clone(), at > 0);
            let misfit = misfit.clone();
            ranks.spawn(async move {
                let mut misfits = misfit.subscribe();
                let end = rank.run(&mut misfits).await;
                if let FollowEnd::Misfit(block) = end {
                    misfit.send_replace(Some(block));
                }
            });
        }
        loop {
            match timeout(self.environment.rediscover_after, ranks.join_next()).await {
                // The supervisor of this task logs the panic and restarts the task.
                Ok(Some(Err(error))) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Ok(Some(_)) => {}
                Ok(None) => break,
                // Blocks recorded from routing expire also while events are followed.
                Err(_) => self.environment.index.expire(self.member.id),
            }
        }
        let block = *misfit.borrow();
        if let Some(block) = block {
            self.fall_back_to_approximation(rules, block);
        }
        self.member.invalidate_views();
        if block.is_some() {
            wait_incarnation_end(&self.member, self.incarnation).await;
        }
    }

    /// Ignores the worker's events and records routed blocks instead.
    fn fall_back_to_approximation(&self, rules: BlockMappingRules, block: Tokens) {
        let doubt = misfit_reason(&rules, block);
        tracing::warn!(worker = %self.member.spec.endpoint, reason = %doubt, "its events are ignored");
        self.environment.index.use_approximation(self.member.id);
        self.member.events.sources.set_no_sources(doubt);
    }
}
