//! Redis client: two connections, calls with a timeout, and the circuit breaker that they feed. It interprets no
//! values.
//!
//! Requests and background writes use separate connections, so that no large value delays a small lookup.

use std::time::Duration;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ErrorKind, FromRedisValue, Pipeline, RedisError, ServerError};
use tokio::sync::{Notify, Semaphore};

use super::breaker::{CallPurpose, CircuitBreaker, RedisFailure, SharedCacheHealth};
use super::config::{RedisUrl, SharedCacheConfig};
use crate::telemetry::shared_cache_metrics::SharedCacheMetrics;

/// Limit of requests that wait for Redis at once; further ones are served without it.
const MAX_WAITING_CALLS: usize = 256;
/// Timeout for connecting; no request waits for it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Factor by which background calls may take longer than requests.
const BACKGROUND_TIMEOUT_FACTOR: u32 = 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RedisCallError {
    /// Redis was not called: it is known not to answer, or too many calls are waiting.
    Skipped,
    /// The call failed.
    Failed(RedisFailure),
    /// The key holds something else than one of our values.
    Foreign,
}

impl RedisCallError {
    /// Returns the label for metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Skipped => "skipped",
            Self::Failed(RedisFailure::Timeout) => "timeout",
            Self::Failed(RedisFailure::Error) => "error",
            Self::Foreign => "corrupt",
        }
    }
}

pub(super) struct RedisClient {
    client: Client,
    address: String,
    timeout: Duration,
    connections: Mutex<Option<RedisConnections>>,
    breaker: Mutex<CircuitBreaker>,
    slots: Semaphore,
    /// Notified when the health changes, so that the next probe runs at once.
    pub(super) breaker_opened: Notify,
    metrics: SharedCacheMetrics,
}

#[derive(Clone)]
struct RedisConnections {
    foreground: MultiplexedConnection,
    background: MultiplexedConnection,
}

impl std::fmt::Debug for RedisClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisClient")
            .field("address", &self.address)
            .field("health", &self.health())
            .finish_non_exhaustive()
    }
}

/// Checks whether an address can be used; does not connect.
pub(super) fn check(url: &RedisUrl) -> Result<(), RedisError> {
    Client::open(url.connection()).map(drop)
}

impl RedisClient {
    /// Creates the client without connecting.
    pub(super) fn new(
        url: &RedisUrl,
        config: &SharedCacheConfig,
        metrics: SharedCacheMetrics,
    ) -> Result<Self, RedisError> {
        metrics.set_health(Some(SharedCacheHealth::Unreachable));
        Ok(Self {
            client: Client::open(url.connection())?,
            address: url.address().to_owned(),
            timeout: config.timeout.0,
            connections: Mutex::default(),
            breaker: Mutex::new(CircuitBreaker::new()),
            slots: Semaphore::new(MAX_WAITING_CALLS),
            breaker_opened: Notify::new(),
            metrics,
        })
    }

    pub(super) fn health(&self) -> SharedCacheHealth {
        self.breaker.lock().health()
    }

    /// Calls Redis while a request waits.
    pub(super) async fn call<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, RedisCallError> {
        let lanes = self.open_connections()?;
        let _room = self.slots.try_acquire().map_err(|_| RedisCallError::Skipped)?;
        let answer = run(lanes.foreground, pipeline, self.timeout).await;
        self.record_outcome(answer, CallPurpose::Request)
    }

    /// Calls Redis in the background.
    pub(super) async fn call_in_background<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, RedisCallError> {
        let lanes = self.open_connections()?;
        let answer = run(lanes.background, pipeline, self.timeout * BACKGROUND_TIMEOUT_FACTOR).await;
        self.record_outcome(answer, CallPurpose::Request)
    }

    /// Calls Redis in the background without feeding the breaker: a long scan may be slow just because it is long.
    pub(super) async fn browse<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, RedisCallError> {
        let lanes = self.open_connections()?;
        run(lanes.background, pipeline, self.timeout * BACKGROUND_TIMEOUT_FACTOR).await
    }

    /// Calls Redis whatever its health, over new connections where the old ones are suspect.
    pub(super) async fn probe<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, RedisCallError> {
        let lanes = self.connections.lock().clone();
        let lanes = match lanes {
            Some(lanes) => Ok(lanes),
            None => self.connect().await,
        };
        let answer = match lanes {
            Ok(lanes) => run(lanes.foreground, pipeline, self.timeout).await,
            Err(failure) => Err(RedisCallError::Failed(failure)),
        };
        self.record_outcome(answer, CallPurpose::Probe)
    }

    fn open_connections(&self) -> Result<RedisConnections, RedisCallError> {
        match self.health() {
            SharedCacheHealth::Up => self.connections.lock().clone().ok_or(RedisCallError::Skipped),
            SharedCacheHealth::Slow | SharedCacheHealth::Unreachable => Err(RedisCallError::Skipped),
        }
    }

    async fn connect(&self) -> Result<RedisConnections, RedisFailure> {
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_TIMEOUT)).set_response_timeout(None);
        let connect = async || {
            let connected = self.client.get_multiplexed_async_connection_with_config(&config);
            match tokio::time::timeout(CONNECT_TIMEOUT, connected).await {
                Ok(Ok(connection)) => Ok(connection),
                Ok(Err(error)) => Err(failure_of(&error)),
                Err(_) => Err(RedisFailure::Timeout),
            }
        };
        let lanes = RedisConnections { foreground: connect().await?, background: connect().await? };
        *self.connections.lock() = Some(lanes.clone());
        Ok(lanes)
    }

    fn record_outcome<T>(&self, answer: Result<T, RedisCallError>, purpose: CallPurpose) -> Result<T, RedisCallError> {
        let change = match &answer {
            Ok(_) | Err(RedisCallError::Foreign | RedisCallError::Skipped) => {
                self.breaker.lock().record_success(purpose)
            }
            Err(RedisCallError::Failed(failure)) => self.breaker.lock().record_failure(*failure, purpose),
        };
        if answer.is_err() && self.health() != SharedCacheHealth::Up {
            // Old answers may still arrive on these connections.
            *self.connections.lock() = None;
        }
        if let Some(health) = change {
            self.report_health(health);
            self.breaker_opened.notify_one();
        }
        answer
    }

    /// Logs the health of Redis and sets its metric.
    pub(super) fn report_health(&self, health: SharedCacheHealth) {
        self.metrics.set_health(Some(health));
        let (redis, health) = (&self.address, health.as_ref());
        match health {
            "up" => tracing::info!(redis, state = health, "Redis answers: the cache is shared between routers"),
            _ => tracing::warn!(
                redis,
                state = health,
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
) -> Result<T, RedisCallError> {
    match tokio::time::timeout(limit, pipeline.query_async(&mut connection)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) if is_foreign(&error) => Err(RedisCallError::Foreign),
        Ok(Err(error)) => Err(RedisCallError::Failed(failure_of(&error))),
        Err(_) => Err(RedisCallError::Failed(RedisFailure::Timeout)),
    }
}

/// Whether Redis answered properly, but the key holds something that is not ours.
fn is_foreign(error: &RedisError) -> bool {
    let of_type = |errors: &[(usize, ServerError)]| errors.iter().all(|(_, error)| error.code() == "WRONGTYPE");
    error.clone().into_server_errors().is_some_and(|errors| of_type(&errors))
        || error.kind() == ErrorKind::UnexpectedReturnType
}

fn failure_of(error: &RedisError) -> RedisFailure {
    tracing::debug!(%error, "Redis");
    if error.is_timeout() { RedisFailure::Timeout } else { RedisFailure::Error }
}
