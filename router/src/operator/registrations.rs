//! `/ownerserve/v1/registrations`: workers that register themselves for a limited time, and deregister.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vocabulary::{WorkerId, WorkerRole};

use super::consistency::{LedgerResponse, ReadView};
use super::extractors::{JsonBody, PathId};
use super::problem::{Problem, ProblemKind};
use super::schemas::{RoleSchema, WorkerIdSchema};
use super::writes::WriteResult;
use crate::app_state::AppState;
use crate::config::WorkerConfig;
use crate::discovery::RegistrationOutcome;

/// Maximum length of a URL and of an event address; maximum number of models.
const MAX_URL_BYTES: usize = 256;
const MAX_MODELS: usize = 64;
const MAX_NAME_CHARS: usize = 256;
/// Range of a registration's time to live in milliseconds, and its default.
const TTL_RANGE_MS: std::ops::RangeInclusive<u32> = 1_000..=3_600_000;
const DEFAULT_TTL_MS: u32 = 30_000;

/// A worker that is there.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RegistrationBody {
    /// Its base URL, with `#prefill`, `#decode` or `#hybrid` behind it or `role` beside it where it is not a hybrid.
    #[schema(max_length = 256, examples("http://10.0.0.7:8000"))]
    url: String,
    /// What it is for.
    #[schema(value_type = Option<RoleSchema>)]
    role: Option<WorkerRole>,
    /// The models it serves; asked from it when left out.
    #[serde(default)]
    #[schema(max_items = 64, schema_with = names)]
    models: Vec<String>,
    /// Where it tells its KV events, as `tcp://host:port`; asked from it when left out.
    #[schema(max_length = 256)]
    events: Option<String>,
    /// Where it replays them.
    #[schema(max_length = 256)]
    replay: Option<String>,
    /// How long it is listed unless it registers again; 30 s when left out.
    #[schema(minimum = 1000, maximum = 3_600_000)]
    ttl_ms: Option<u32>,
}

fn names() -> utoipa::openapi::schema::Array {
    use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, Type};
    let name = ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).max_length(Some(MAX_NAME_CHARS));
    ArrayBuilder::new().items(name).max_items(Some(MAX_MODELS)).build()
}

/// A worker that is listed for a time.
#[derive(Serialize, ToSchema)]
pub(super) struct RegisteredWorker {
    #[schema(value_type = WorkerIdSchema)]
    worker: WorkerId,
    endpoint: Arc<str>,
    /// Until it is not listed any more.
    left_ms: u64,
}

/// Workers that are listed for a time, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct RegistrationList {
    registrations: Vec<RegisteredWorker>,
}

/// What came of a registration.
#[derive(Serialize, ToSchema)]
pub(super) struct RegistrationResponse {
    #[schema(value_type = WorkerIdSchema)]
    worker: WorkerId,
    /// Within so many milliseconds it has to register again.
    ttl_ms: u32,
    /// In words.
    did: String,
}

impl RegistrationBody {
    fn validate(self) -> Result<(WorkerConfig, u32), Problem> {
        let ttl = self.ttl_ms.unwrap_or(DEFAULT_TTL_MS);
        if !TTL_RANGE_MS.contains(&ttl) {
            return Err(Problem::bad_body(format!(
                "ttl_ms: accepted is {} to {}",
                TTL_RANGE_MS.start(),
                TTL_RANGE_MS.end()
            )));
        }
        let too_long = |text: &Option<String>| text.as_ref().is_some_and(|text| text.len() > MAX_URL_BYTES);
        for (field, is_wrong) in [
            ("url", self.url.len() > MAX_URL_BYTES),
            ("events", too_long(&self.events)),
            ("replay", too_long(&self.replay)),
        ] {
            if is_wrong {
                return Err(Problem::bad_body(format!("{field}: accepted are at most {MAX_URL_BYTES} characters")));
            }
        }
        let is_name = |name: &String| !name.is_empty() && name.chars().count() <= MAX_NAME_CHARS;
        if self.models.len() > MAX_MODELS || !self.models.iter().all(is_name) {
            let accepted =
                format!("models: accepted are at most {MAX_MODELS} names of 1 to {MAX_NAME_CHARS} characters");
            return Err(Problem::bad_body(accepted));
        }
        let url = self.url.parse().map_err(|error| Problem::bad_body(format!("url: {error}")))?;
        let Self { role, models, events, replay, .. } = self;
        Ok((
            WorkerConfig {
                role,
                models,
                kv_events_endpoint: events,
                kv_events_replay_endpoint: replay,
                ..WorkerConfig::from_url(url)
            },
            ttl,
        ))
    }
}

/// Lists a worker for a time, at this router. Repeated within that time, it stays.
///
/// Every router that is to use the worker has to be told, and again after its restart.
#[utoipa::path(post, path = "/ownerserve/v1/registrations", tag = "workers", request_body = RegistrationBody,
    responses((status = 200, description = "It is listed, and gets work once it answers.", body = LedgerResponse<RegistrationResponse>)))]
pub(super) async fn register(
    State(gateway): State<Arc<AppState>>,
    JsonBody(body): JsonBody<RegistrationBody>,
) -> Result<LedgerResponse<RegistrationResponse>, Problem> {
    let (worker, ttl_ms) = body.validate()?;
    let id = WorkerId::of_endpoint(worker.endpoint());
    let came = gateway.discovery().register(worker, Duration::from_millis(ttl_ms.into()));
    let came = came.map_err(|full| {
        let detail = format!(
            "Nothing was changed: {} workers are registered, and no more are accepted (discovery.max_registrations).",
            full.max
        );
        Problem::new(ProblemKind::Conflict, detail).with_cause("registrations_full")
    })?;
    let other = gateway.workers.worker(id).map(|member| member.source).filter(|source| source.is_configured());
    let did = match (other, came) {
        (Some(source), _) => format!("it is listed by {} already, which goes first", source.as_ref()),
        (None, RegistrationOutcome::New) => "the worker is listed".into(),
        (None, RegistrationOutcome::Renewed) => "the worker stays listed".into(),
        (None, RegistrationOutcome::Changed) => "the worker is listed as it is described now, and begins anew".into(),
    };
    Ok(LedgerResponse::new(&gateway.directory().view(), RegistrationResponse { worker: id, ttl_ms, did }))
}

/// Workers that are registered at this router, by id.
#[utoipa::path(get, path = "/ownerserve/v1/registrations", tag = "workers",
    responses((status = 200, description = "All of them, with the time that they have left.", body = LedgerResponse<RegistrationList>)))]
pub(super) async fn registrations(
    State(gateway): State<Arc<AppState>>,
    ReadView(view): ReadView,
) -> Result<LedgerResponse<RegistrationList>, Problem> {
    let now = Instant::now();
    let line = |it: &crate::discovery::Registration| RegisteredWorker {
        worker: WorkerId::of_endpoint(it.worker.endpoint()),
        endpoint: it.worker.endpoint().clone(),
        left_ms: it.expires_at.saturating_duration_since(now).as_millis() as u64,
    };
    let registrations = gateway.discovery().registered(line);
    Ok(LedgerResponse::new(&view, RegistrationList { registrations }))
}

/// Ends a registration: the worker gets no new steps, and its streams go on to their end.
#[utoipa::path(delete, path = "/ownerserve/v1/registrations/{id}", tag = "workers",
    params(("id" = WorkerIdSchema, Path)),
    responses((status = 200, description = "It is not listed any more, unless another source lists it.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn deregister(
    State(gateway): State<Arc<AppState>>,
    PathId(id): PathId<WorkerId>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    if !gateway.discovery().withdraw(id) {
        return Err(Problem::not_found(format!("{id} is not registered at this router.")));
    }
    Ok(WriteResult::plain(&gateway, "the worker is not registered any more; what it began goes on"))
}
