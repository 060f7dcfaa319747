//! The way to Redis: two connections, calls that end in time, and the breaker that they feed. It interprets nothing.
//!
//! What a request asks and what is written behind its back go over connections of their own, so that no large value
//! stands in front of a small question.

use std::time::Duration;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ErrorKind, FromRedisValue, Pipeline, RedisError, ServerError};
use tokio::sync::{Notify, Semaphore};

use super::breaker::{Asked, Breaker, Failure, Standing};
use super::config::{RedisUrl, SoftStateConfig};
use crate::telemetry::soft_state::SoftStateMetrics;

/// Most requests that wait for Redis at once; more are served without it.
const WAITING: usize = 256;
/// Longest time to connect; no request waits for it.
const CONNECT: Duration = Duration::from_secs(1);
/// How much longer than a request those may wait for whom nobody waits.
const PATIENCE: u32 = 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoAnswer {
    /// It was not asked: it is known not to answer, or too many wait for it.
    NotAsked,
    /// It was asked in vain.
    Failed(Failure),
    /// It holds something else under this key.
    Foreign,
}

impl NoAnswer {
    /// The word for metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::NotAsked => "not_asked",
            Self::Failed(Failure::Timeout) => "timeout",
            Self::Failed(Failure::Error) => "error",
            Self::Foreign => "corrupt",
        }
    }
}

pub(super) struct Link {
    client: Client,
    place: String,
    timeout: Duration,
    lanes: Mutex<Option<Lanes>>,
    breaker: Mutex<Breaker>,
    room: Semaphore,
    /// Somebody found it wanting.
    pub(super) opened: Notify,
    metrics: SoftStateMetrics,
}

#[derive(Clone)]
struct Lanes {
    asks: MultiplexedConnection,
    tells: MultiplexedConnection,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("place", &self.place).field("standing", &self.standing()).finish_non_exhaustive()
    }
}

/// Whether an address can be used; connects to nobody.
pub(super) fn check(url: &RedisUrl) -> Result<(), RedisError> {
    Client::open(url.connection()).map(drop)
}

impl Link {
    /// Connects to nobody yet.
    pub(super) fn new(url: &RedisUrl, config: &SoftStateConfig, metrics: SoftStateMetrics) -> Result<Self, RedisError> {
        metrics.standing(Some(Standing::Gone));
        Ok(Self {
            client: Client::open(url.connection())?,
            place: url.place().to_owned(),
            timeout: config.timeout.0,
            lanes: Mutex::default(),
            breaker: Mutex::new(Breaker::new()),
            room: Semaphore::new(WAITING),
            opened: Notify::new(),
            metrics,
        })
    }

    pub(super) fn standing(&self) -> Standing {
        self.breaker.lock().standing()
    }

    /// Asks while a request waits.
    pub(super) async fn ask<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, NoAnswer> {
        let lanes = self.open_lanes()?;
        let _room = self.room.try_acquire().map_err(|_| NoAnswer::NotAsked)?;
        let answer = run(lanes.asks, pipeline, self.timeout).await;
        self.heard(answer, Asked::Request)
    }

    /// Tells while nobody waits.
    pub(super) async fn tell<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, NoAnswer> {
        let lanes = self.open_lanes()?;
        let answer = run(lanes.tells, pipeline, self.timeout * PATIENCE).await;
        self.heard(answer, Asked::Request)
    }

    /// Tells, and learns nothing of Redis from it: whoever looks through much may be late for that alone.
    pub(super) async fn browse<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, NoAnswer> {
        let lanes = self.open_lanes()?;
        run(lanes.tells, pipeline, self.timeout * PATIENCE).await
    }

    /// Asks however Redis stands, over new connections where the old ones are suspect.
    pub(super) async fn probe<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, NoAnswer> {
        let lanes = self.lanes.lock().clone();
        let lanes = match lanes {
            Some(lanes) => Ok(lanes),
            None => self.connect().await,
        };
        let answer = match lanes {
            Ok(lanes) => run(lanes.asks, pipeline, self.timeout).await,
            Err(failure) => Err(NoAnswer::Failed(failure)),
        };
        self.heard(answer, Asked::Probe)
    }

    fn open_lanes(&self) -> Result<Lanes, NoAnswer> {
        match self.standing() {
            Standing::Up => self.lanes.lock().clone().ok_or(NoAnswer::NotAsked),
            Standing::Slow | Standing::Gone => Err(NoAnswer::NotAsked),
        }
    }

    async fn connect(&self) -> Result<Lanes, Failure> {
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT)).set_response_timeout(None);
        let connect = async || {
            let connected = self.client.get_multiplexed_async_connection_with_config(&config);
            match tokio::time::timeout(CONNECT, connected).await {
                Ok(Ok(connection)) => Ok(connection),
                Ok(Err(error)) => Err(failure_of(&error)),
                Err(_) => Err(Failure::Timeout),
            }
        };
        let lanes = Lanes { asks: connect().await?, tells: connect().await? };
        *self.lanes.lock() = Some(lanes.clone());
        Ok(lanes)
    }

    fn heard<T>(&self, answer: Result<T, NoAnswer>, asked: Asked) -> Result<T, NoAnswer> {
        let change = match &answer {
            Ok(_) | Err(NoAnswer::Foreign | NoAnswer::NotAsked) => self.breaker.lock().succeeded(asked),
            Err(NoAnswer::Failed(failure)) => self.breaker.lock().failed(*failure, asked),
        };
        if answer.is_err() && self.standing() != Standing::Up {
            // Old answers may still be on their way over these.
            *self.lanes.lock() = None;
        }
        if let Some(standing) = change {
            self.say(standing);
            self.opened.notify_one();
        }
        answer
    }

    /// Says how Redis stands, to the operator and to the metrics.
    pub(super) fn say(&self, standing: Standing) {
        self.metrics.standing(Some(standing));
        let (redis, standing) = (&self.place, standing.as_ref());
        match standing {
            "up" => tracing::info!(redis, standing, "Redis answers: soft state is shared between routers"),
            _ => tracing::warn!(
                redis,
                standing,
                "Redis does not answer as it should: every request is served without it. Until it does, responses that \
                 other routers made are not known here, and quotas are enforced by this router's share"
            ),
        }
    }
}

async fn run<T: FromRedisValue>(
    mut connection: MultiplexedConnection,
    pipeline: &Pipeline,
    limit: Duration,
) -> Result<T, NoAnswer> {
    match tokio::time::timeout(limit, pipeline.query_async(&mut connection)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) if is_foreign(&error) => Err(NoAnswer::Foreign),
        Ok(Err(error)) => Err(NoAnswer::Failed(failure_of(&error))),
        Err(_) => Err(NoAnswer::Failed(Failure::Timeout)),
    }
}

/// Whether it answered well, but what lies there is not ours.
fn is_foreign(error: &RedisError) -> bool {
    let of_type = |errors: &[(usize, ServerError)]| errors.iter().all(|(_, error)| error.code() == "WRONGTYPE");
    error.clone().into_server_errors().is_some_and(|errors| of_type(&errors))
        || error.kind() == ErrorKind::UnexpectedReturnType
}

fn failure_of(error: &RedisError) -> Failure {
    tracing::debug!(%error, "Redis");
    if error.is_timeout() { Failure::Timeout } else { Failure::Error }
}
