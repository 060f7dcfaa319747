//! Follows one worker's events, life after life.
//!
//! The live socket is read as fast as its messages are applied and no faster: what piles up does so in the socket and
//! at the engine, which drops at its own mark; a drop is a gap, and a gap is replayed. So there is no queue here.

mod connection;
mod ingest;
mod rank;
mod snapshot_transfer;

use std::sync::Arc;
use std::time::Duration;

use residency::{RoutedBlockLimits, SourceRules};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use vocabulary::{Incarnation, Tokens};

use super::discovery::EventSource;
use super::shared_index::SharedIndex;
use super::snapshots::SnapshotProvider;
use super::sources::InexactReason;
use crate::fleet::probe::get;
use crate::fleet::worker_handle::WorkerHandle;
use crate::fleet::{EventSourceSetting, SourceRulesResolver};
use rank::{FollowEnd, RankFollower};

/// What all followers of a fleet share.
#[derive(Clone)]
pub(crate) struct FollowerEnvironment {
    /// For questions to the workers.
    pub(crate) client: reqwest::Client,
    /// Where events go.
    pub(crate) index: SharedIndex,
    pub(crate) rules: SourceRulesResolver,
    /// How much is remembered of what was routed to workers without events.
    pub(crate) routed_limits: RoutedBlockLimits,
    /// The other routers, where there are any.
    pub(crate) snapshots: Option<Arc<dyn SnapshotProvider>>,
    /// Between two looks for a worker's sources when it had none.
    pub(crate) rediscover_after: Duration,
}

/// Follows a worker until it has left, and forgets then what it holds.
pub(crate) async fn follow(member: Arc<WorkerHandle>, with: FollowerEnvironment) {
    with.index.admit(member.id, with.routed_limits);
    let mut life = member.watch_incarnation();
    // The life without events of which something may have been guessed.
    let mut guessed = None;
    while !member.has_left() {
        let Some(incarnation) = *life.borrow_and_update() else {
            // Without an identity whoever answers next may be another one.
            guessed = guessed.filter(|life| *life != Incarnation(0));
            member.events.sources.set_no_sources(InexactReason::Unreachable);
            tokio::select! {
                // The sender is the member's.
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

/// Waits for the end of a life, or until the worker has left. A worker that is only unreachable may still be the same; one
/// without an identity is never the same again.
async fn wait_incarnation_end(member: &WorkerHandle, incarnation: Incarnation) {
    let over = |now: &Option<Incarnation>| now.map_or(incarnation == Incarnation(0), |now| now != incarnation);
    let mut life = member.watch_incarnation();
    tokio::select! {
        // The sender lives as long as the worker does.
        _ = life.wait_for(over) => {}
        () = member.wait_left() => {}
    }
}

/// Blocks of so many tokens cannot be placed.
fn misfit_reason(rules: &SourceRules, block: Tokens) -> InexactReason {
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

    fn rules(&self) -> Option<SourceRules> {
        self.member.probed_state().models.iter().find_map(|model| (self.environment.rules)(model))
    }

    fn approximation_reason(&self, sources: &[EventSource]) -> InexactReason {
        if sources.is_empty() {
            return InexactReason::NoEvents;
        }
        InexactReason::NoTextModel(self.member.probed_state().models.first().cloned())
    }

    /// Follows all ranks until this life ends.
    async fn follow_ranks(&self, sources: Vec<EventSource>, rules: SourceRules) {
        self.environment.index.use_events(self.member.id);
        self.member.events.sources.set_sources(&sources);
        // Ranks of one engine have one block size: what one of them cannot go on with, the others would find as they speak.
        let (misfit, _) = watch::channel(None);
        let mut ranks = JoinSet::new();
        for source in sources {
            let rank = RankFollower::new(self.clone(), source, rules.clone());
            let misfit = misfit.clone();
            ranks.spawn(async move {
                let mut told = misfit.subscribe();
                let end = rank.run(&mut told).await;
                if let FollowEnd::Misfit(block) = end {
                    misfit.send_replace(Some(block));
                }
            });
        }
        loop {
            match timeout(self.environment.rediscover_after, ranks.join_next()).await {
                // Whoever keeps this task tells of it, and begins it anew.
                Ok(Some(Err(error))) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Ok(Some(_)) => {}
                Ok(None) => break,
                // What is guessed beside the events grows old.
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

    /// Nothing can be made of the worker's events.
    fn fall_back_to_approximation(&self, rules: SourceRules, block: Tokens) {
        let doubt = misfit_reason(&rules, block);
        tracing::warn!(worker = %self.member.spec.endpoint, %doubt, "its events are ignored");
        self.environment.index.use_approximation(self.member.id);
        self.member.events.sources.set_no_sources(doubt);
    }
}
