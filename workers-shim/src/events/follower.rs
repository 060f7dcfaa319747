//! Follows one worker's events, life after life.
//!
//! The live socket is read as fast as its messages are applied and no faster: what piles up does so in the socket and
//! at the engine, which drops at its own mark; a drop is a gap, and a gap is replayed. So there is no queue here.

mod connection;
mod exchange;
mod rank;
mod taking;

use std::sync::Arc;
use std::time::Duration;

use residency::{RoutedLimits, SourceRules};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use vocabulary::{Incarnation, Tokens};

use super::discovery::EventSource;
use super::imprints::Imprints;
use super::shared::SharedIndex;
use super::sources::Doubt;
use crate::fleet::member::Member;
use crate::fleet::probe::get;
use crate::fleet::{EventsAt, RulesOf};
use rank::{End, Rank};

/// What all followers of a fleet share.
#[derive(Clone)]
pub(crate) struct Following {
    /// For questions to the workers.
    pub(crate) client: reqwest::Client,
    /// Where events go.
    pub(crate) index: SharedIndex,
    pub(crate) rules: RulesOf,
    /// How much is remembered of what was routed to workers without events.
    pub(crate) routed: RoutedLimits,
    /// The other routers, where there are any.
    pub(crate) imprints: Option<Arc<dyn Imprints>>,
    /// Between two looks for a worker's sources when it had none.
    pub(crate) look_again: Duration,
}

/// Follows a worker until it has left, and forgets then what it holds.
pub(crate) async fn follow(member: Arc<Member>, with: Following) {
    with.index.admit(member.id, with.routed);
    let mut life = member.life();
    // The life without events of which something may have been guessed.
    let mut guessed = None;
    while !member.has_left() {
        let Some(incarnation) = *life.borrow_and_update() else {
            // Without an identity whoever answers next may be another one.
            guessed = guessed.filter(|life| *life != Incarnation(0));
            member.events.sources.follow_none(Doubt::Unreached);
            tokio::select! {
                // The sender is the member's.
                _ = life.changed() => {}
                () = member.left() => {}
            }
            continue;
        };
        let worker = Worker { member: member.clone(), with: with.clone(), incarnation };
        if guessed == Some(incarnation) {
            with.index.age(member.id);
        } else {
            with.index.guessed(member.id);
        }
        let (sources, rules) = (worker.sources().await, worker.rules());
        guessed = match rules.filter(|_| !sources.is_empty()) {
            Some(rules) => {
                worker.observe(sources, rules).await;
                None
            }
            None => {
                member.events.sources.follow_none(worker.why_guessed(&sources));
                timeout(with.look_again, ended(&member, incarnation)).await.is_err().then_some(incarnation)
            }
        };
    }
    with.index.dismiss(member.id);
    member.forget();
}

/// Waits for the end of a life, or until the worker has left. A worker that is only unreachable may still be the same; one
/// without an identity is never the same again.
async fn ended(member: &Member, incarnation: Incarnation) {
    let over = |now: &Option<Incarnation>| now.map_or(incarnation == Incarnation(0), |now| now != incarnation);
    let mut life = member.life();
    tokio::select! {
        // The sender lives as long as the worker does.
        _ = life.wait_for(over) => {}
        () = member.left() => {}
    }
}

/// Blocks of so many tokens cannot be placed.
fn misfit(rules: &SourceRules, block: Tokens) -> Doubt {
    Doubt::Misfit { model: rules.namespace.model.clone(), block, chain: rules.block }
}

#[derive(Clone)]
struct Worker {
    member: Arc<Member>,
    with: Following,
    incarnation: Incarnation,
}

impl Worker {
    async fn sources(&self) -> Vec<EventSource> {
        if let Some(configured) = EventSource::configured(&self.member.spec.events) {
            return vec![configured];
        }
        match (&self.member.spec.events, get(&self.with.client, &self.member, "/kv_event_sources").await) {
            (EventsAt::Discovered, Ok(text)) => EventSource::read_all(&text, &self.member.spec.endpoint),
            _ => Vec::new(),
        }
    }

    fn rules(&self) -> Option<SourceRules> {
        self.member.seen().models.iter().find_map(|model| (self.with.rules)(model))
    }

    fn why_guessed(&self, sources: &[EventSource]) -> Doubt {
        if sources.is_empty() {
            return Doubt::Silent;
        }
        Doubt::Wordless(self.member.seen().models.first().cloned())
    }

    /// Follows all ranks until this life ends.
    async fn observe(&self, sources: Vec<EventSource>, rules: SourceRules) {
        self.with.index.observed(self.member.id);
        self.member.events.sources.follow(&sources);
        // Ranks of one engine have one block size: what one of them cannot go on with, the others would find as they speak.
        let (misfit, _) = watch::channel(None);
        let mut ranks = JoinSet::new();
        for source in sources {
            let rank = Rank::new(self.clone(), source, rules.clone());
            let misfit = misfit.clone();
            ranks.spawn(async move {
                let mut told = misfit.subscribe();
                let end = rank.run(&mut told).await;
                if let End::Misfit(block) = end {
                    misfit.send_replace(Some(block));
                }
            });
        }
        loop {
            match timeout(self.with.look_again, ranks.join_next()).await {
                // Whoever keeps this task tells of it, and begins it anew.
                Ok(Some(Err(error))) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Ok(Some(_)) => {}
                Ok(None) => break,
                // What is guessed beside the events grows old.
                Err(_) => self.with.index.age(self.member.id),
            }
        }
        let block = *misfit.borrow();
        if let Some(block) = block {
            self.guess(rules, block);
        }
        self.member.changed();
        if block.is_some() {
            ended(&self.member, self.incarnation).await;
        }
    }

    /// Nothing can be made of the worker's events.
    fn guess(&self, rules: SourceRules, block: Tokens) {
        let doubt = misfit(&rules, block);
        tracing::warn!(worker = %self.member.spec.endpoint, %doubt, "its events are ignored");
        self.with.index.guessed(self.member.id);
        self.member.events.sources.follow_none(doubt);
    }
}
