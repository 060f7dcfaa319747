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
use super::request_units::DurationInput;
use super::schemas::{WorkerIdSchema, WorkerRoleSchema};
use super::sources::FleetSources;
use super::writes::WriteResult;
use proxy::discovery::RegistrationOutcome;
use proxy::discovery::WorkerConfig;
use proxy::ledger_access::LedgerAccess;
use vocabulary::TimeSpan;

/// Maximum length of a URL and of an event address; maximum number of models.
const MAX_URL_BYTES: usize = 256;
const MAX_MODELS: usize = 64;
const MAX_NAME_CHARS: usize = 256;
/// Accepted range of a registration's time to live, and its default.
const TTL_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3_600);
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// A worker that registers.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Registration)]
pub(super) struct RegistrationBody {
    /// Its base URL, with `#prefill`, `#decode` or `#hybrid` behind it or `role` beside it where it is not a hybrid.
    #[schema(max_length = 256, examples("http://10.0.0.7:8000"))]
    url: String,
    /// What it is for.
    #[schema(value_type = Option<WorkerRoleSchema>)]
    role: Option<WorkerRole>,
    /// The models it serves; asked from it when left out.
    #[serde(default)]
    #[schema(max_items = 64, schema_with = names)]
    models: Vec<String>,
    /// Where it publishes its KV events, as `tcp://host:port`; asked from it when left out.
    #[schema(max_length = 256)]
    kv_events_endpoint: Option<String>,
    /// Where it replays them.
    #[schema(max_length = 256)]
    kv_events_replay_endpoint: Option<String>,
    /// How long it is listed unless it registers again, from `1s` to `1h`; `30s` when left out.
    #[schema(value_type = Option<TimeSpan>)]
    ttl: Option<DurationInput>,
}

fn names() -> utoipa::openapi::schema::Array {
    use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, Type};
    let name = ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).max_length(Some(MAX_NAME_CHARS));
    ArrayBuilder::new().items(name).max_items(Some(MAX_MODELS)).build()
}

/// A registered worker.
#[derive(Serialize, ToSchema)]
pub(super) struct RegisteredWorker {
    #[schema(value_type = WorkerIdSchema)]
    worker: WorkerId,
    endpoint: Arc<str>,
    /// Time until it is not listed any more.
    expires_in: TimeSpan,
}

/// Registered workers, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct RegistrationList {
    registrations: Vec<RegisteredWorker>,
}

/// Result of a registration.
#[derive(Serialize, ToSchema)]
pub(super) struct RegistrationResponse {
    #[schema(value_type = WorkerIdSchema)]
    worker: WorkerId,
    /// It has to register again within this time.
    ttl: TimeSpan,
    /// What was done, in words.
    result: String,
}

impl RegistrationBody {
    fn validate(self) -> Result<(WorkerConfig, Duration), Problem> {
        let ttl = self.ttl.map_or(DEFAULT_TTL, |ttl| ttl.0);
        if !TTL_RANGE.contains(&ttl) {
            return Err(Problem::bad_body("ttl: accepted is 1s to 1h"));
        }
        let too_long = |text: &Option<String>| text.as_ref().is_some_and(|text| text.len() > MAX_URL_BYTES);
        for (field, is_wrong) in [
            ("url", self.url.len() > MAX_URL_BYTES),
            ("kv_events_endpoint", too_long(&self.kv_events_endpoint)),
            ("kv_events_replay_endpoint", too_long(&self.kv_events_replay_endpoint)),
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
        let Self { role, models, kv_events_endpoint: events, kv_events_replay_endpoint: replay, .. } = self;
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

/// Registers a worker at this router for a time, and renews a registration.
///
/// Each router that shall use the worker needs a registration, and another one after its restart.
#[utoipa::path(post, path = "/ownerserve/v1/registrations", tag = "workers", request_body = RegistrationBody,
    responses((status = 200, description = "The worker is listed, and gets work once it answers.", body = LedgerResponse<RegistrationResponse>)))]
pub(super) async fn register(
    State(ledger): State<LedgerAccess>,
    State(fleet): State<FleetSources>,
    JsonBody(body): JsonBody<RegistrationBody>,
) -> Result<LedgerResponse<RegistrationResponse>, Problem> {
    let (worker, ttl) = body.validate()?;
    let id = WorkerId::of_endpoint(worker.endpoint());
    let came = fleet.discovery.register(worker, ttl);
    let came = came.map_err(|full| {
        let detail = format!(
            "Nothing was changed: {} workers are registered, and no more are accepted (discovery.max_registrations).",
            full.max
        );
        Problem::new(ProblemKind::Conflict, detail).with_reason("registrations_full")
    })?;
    let other = fleet.workers.worker(id).map(|member| member.source).filter(|source| source.is_configured());
    let result = match (other, came) {
        (Some(source), _) => format!("it is listed by {} already, which goes first", source.as_ref()),
        (None, RegistrationOutcome::New) => "the worker is listed".into(),
        (None, RegistrationOutcome::Renewed) => "the worker stays listed".into(),
        (None, RegistrationOutcome::Changed) => "the worker is listed as it is described now, and begins anew".into(),
    };
    Ok(LedgerResponse::new(&ledger.directory().view(), RegistrationResponse { worker: id, ttl: TimeSpan(ttl), result }))
}

/// Workers that are registered at this router, by id.
#[utoipa::path(get, path = "/ownerserve/v1/registrations", tag = "workers",
    responses((status = 200, description = "All registrations, with the time until they expire.", body = LedgerResponse<RegistrationList>)))]
pub(super) async fn registrations(
    State(fleet): State<FleetSources>,
    ReadView(view): ReadView,
) -> Result<LedgerResponse<RegistrationList>, Problem> {
    let now = Instant::now();
    let line = |it: &proxy::discovery::WorkerRegistration| RegisteredWorker {
        worker: WorkerId::of_endpoint(it.worker.endpoint()),
        endpoint: it.worker.endpoint().clone(),
        expires_in: TimeSpan::whole_millis(it.expires_at.saturating_duration_since(now)),
    };
    let registrations = fleet.discovery.registered(line);
    Ok(LedgerResponse::new(&view, RegistrationList { registrations }))
}

/// Ends a registration: the worker gets no new steps, and its streams run to their end.
#[utoipa::path(delete, path = "/ownerserve/v1/registrations/{id}", tag = "workers",
    params(("id" = WorkerIdSchema, Path)),
    responses((status = 200, description = "The worker is not listed any more, unless another source lists it.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn deregister(
    State(ledger): State<LedgerAccess>,
    State(fleet): State<FleetSources>,
    PathId(id): PathId<WorkerId>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    if !fleet.discovery.withdraw(id) {
        return Err(Problem::not_found(format!("{id} is not registered at this router.")));
    }
    Ok(WriteResult::plain(&ledger, "the worker is not registered any more; what it began goes on"))
}
