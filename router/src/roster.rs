//! Who could serve a request when nothing but its model is known: the least loaded worker that is up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::{HeaderMap, Method};
use http_body_util::{BodyExt as _, Limited};
use planner::Rule;
use serde::Deserialize;
use vocabulary::{Health, ModelId, Role, SessionId, WorkerId};

use crate::config::WorkerConfig;
use crate::error::{ApiError, shortened};
use crate::upstream::{Outgoing, Upstream};

/// The configured workers, whether they answer, and what we sent them.
#[derive(Debug)]
pub struct Roster {
    members: Vec<Arc<Member>>,
    turn: AtomicUsize,
}

/// One worker.
#[derive(Debug)]
pub struct Member {
    /// Its id.
    pub id: WorkerId,
    /// As configured.
    pub config: WorkerConfig,
    state: ArcSwap<State>,
    in_flight: AtomicU32,
}

#[derive(Debug, Default)]
struct State {
    health: Health,
    models: Vec<ModelId>,
}

/// Which of several equal workers comes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Fewest requests of ours; equals take turns.
    LeastLoaded,
    /// By turns.
    RoundRobin,
    /// By rendezvous hash, so that a session stays where it is while its worker is up.
    Pinned(SessionId),
}

impl Order {
    /// What the bypass policy means for a request of this session.
    pub fn of(bypass: Rule, session: Option<SessionId>) -> Self {
        match (bypass, session) {
            (Rule::RoundRobin, _) => Self::RoundRobin,
            (Rule::SessionPinning, Some(session)) => Self::Pinned(session),
            _ => Self::LeastLoaded,
        }
    }

    /// Lower is better.
    fn rank(self, member: &Member, turns: usize) -> (u64, u64) {
        match self {
            Self::LeastLoaded => (member.in_flight.load(Ordering::Relaxed).into(), turns as u64),
            Self::RoundRobin => (turns as u64, 0),
            Self::Pinned(session) => {
                let mut pair = [0; 24];
                pair[..16].copy_from_slice(&session.0.to_le_bytes());
                pair[16..].copy_from_slice(&member.id.0.to_le_bytes());
                (xxhash_rust::xxh3::xxh3_64(&pair), 0)
            }
        }
    }
}

/// A request at a worker; dropping it is its end.
#[derive(Debug)]
pub struct Sent(Arc<Member>);

impl Sent {
    /// At whom.
    pub fn member(&self) -> &Member {
        &self.0
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Member {
    /// Whether it answers.
    pub fn health(&self) -> Health {
        self.state.load().health
    }

    /// The models it serves.
    pub fn models(&self) -> Vec<ModelId> {
        self.state.load().models.clone()
    }

    /// As a worker looks that died after its last probe.
    #[cfg(test)]
    pub(crate) fn pretend_ready(&self, model: &str) {
        self.state.store(Arc::new(State { health: Health::Ready, models: vec![ModelId::from(model)] }));
    }

    fn serves(&self, model: &str) -> bool {
        self.state.load().models.iter().any(|name| *name.0 == *model)
    }
}

impl Roster {
    /// Of the configured workers; nothing is known of them until they were asked.
    pub fn new(workers: &[WorkerConfig]) -> Self {
        let member = |config: &WorkerConfig| {
            Arc::new(Member {
                id: WorkerId::of_endpoint(config.endpoint()),
                state: ArcSwap::from_pointee(State {
                    health: Health::Unreachable,
                    models: config.models.iter().map(|name| ModelId::from(name.as_str())).collect(),
                }),
                config: config.clone(),
                in_flight: AtomicU32::new(0),
            })
        };
        Self { members: workers.iter().map(member).collect(), turn: AtomicUsize::new(0) }
    }

    /// Everybody.
    pub fn members(&self) -> &[Arc<Member>] {
        &self.members
    }

    /// Those that take work.
    pub fn ready(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.iter().filter(|member| member.health() == Health::Ready)
    }

    /// The first in `order` that is up, serves `model` (any when none was named) and is not in `tried`. Prefill workers
    /// only where there is nobody else.
    pub fn pick(&self, order: Order, model: Option<&str>, tried: &[WorkerId]) -> Result<Sent, ApiError> {
        let known = |member: &&Arc<Member>| model.is_none_or(|model| member.serves(model));
        if let Some(model) = model
            && !self.members.is_empty()
            && !self.members.iter().any(|member| member.serves(model))
            && self.members.iter().all(|member| !member.models().is_empty())
        {
            return Err(ApiError::UnknownModel { model: shortened(model) });
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let count = self.members.len().max(1);
        let chosen = self
            .members
            .iter()
            .enumerate()
            .filter(|(_, member)| member.health() == Health::Ready && !tried.contains(&member.id) && known(member))
            .min_by_key(|(index, member)| {
                let turns = (index + count - turn % count) % count;
                (member.config.role() == Role::Prefill, order.rank(member, turns))
            });
        match chosen {
            Some((_, member)) => Ok(self.send_to(member)),
            None => Err(ApiError::NoWorker { model: shortened(model.unwrap_or("any")) }),
        }
    }

    /// A request for this worker.
    pub fn send_to(&self, member: &Arc<Member>) -> Sent {
        member.in_flight.fetch_add(1, Ordering::Relaxed);
        Sent(member.clone())
    }

    /// The worker of this id.
    pub fn member(&self, id: WorkerId) -> Option<&Arc<Member>> {
        self.members.iter().find(|member| member.id == id)
    }

    /// Asks every worker for its models, again and again, until the future is dropped.
    pub async fn probe(self: Arc<Self>, upstream: Upstream, every: Duration) {
        loop {
            futures::future::join_all(self.members.iter().map(|member| refresh(member, &upstream))).await;
            tokio::time::sleep(every).await;
        }
    }
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
}

async fn refresh(member: &Member, upstream: &Upstream) {
    let answer = tokio::time::timeout(Duration::from_secs(2), models_of(member, upstream)).await.ok().flatten();
    let state = match answer {
        Some(models) if member.config.models.is_empty() => State { health: Health::Ready, models },
        Some(_) => State { health: Health::Ready, models: member.models() },
        None => State { health: Health::Unreachable, models: member.models() },
    };
    if state.health != member.health() {
        tracing::info!(worker = %member.config.endpoint(), health = state.health.as_str(), "worker");
    }
    member.state.store(Arc::new(state));
}

async fn models_of(member: &Member, upstream: &Upstream) -> Option<Vec<ModelId>> {
    let mut headers = HeaderMap::new();
    if let Some(value) = crate::gateway::bearer(member.config.api_key.as_ref()) {
        headers.insert(http::header::AUTHORIZATION, value);
    }
    let request = Outgoing { method: Method::GET, path: "/v1/models".into(), headers, body: bytes::Bytes::new() };
    let answer = upstream.send(member.config.endpoint(), request).await.ok()?;
    if !answer.status().is_success() {
        return None;
    }
    let body = Limited::new(answer.into_body(), 1 << 20).collect().await.ok()?.to_bytes();
    let list: ModelList = serde_json::from_slice(&body).ok()?;
    Some(list.data.into_iter().map(|entry| ModelId::from(entry.id.as_str())).collect())
}
