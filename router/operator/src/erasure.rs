//! Erases stored conversation content: transcripts of stored responses and token checkpoints.

use std::sync::Arc;

use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;
use vocabulary::{SessionId, TenantId};

use super::consistency::LedgerResponse;
use super::extractors::{PathId, QueryParams, TenantName};
use super::problem::{Problem, ProblemKind};
use super::schemas::{SessionIdSchema, TenantIdSchema};
use super::sessions;
use super::settings::OperatorSettings;
use super::sources::OperatorParts;
use super::writes::WriteResult;
use proxy::erasure::{ErasureScope, erase};
use proxy::shared_cache::PurgeCount;

async fn erase_and_report(
    (parts, settings): (&OperatorParts, &OperatorSettings),
    tenant: &TenantId,
    whose: ErasureScope,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    // Bodies are found by the client's name of a session, which an id does not tell: all of the tenant's go.
    parts.prefix_cache.bodies.erase(tenant);
    let PurgeCount { forgotten, unread } = erase(&parts.shared_cache, tenant, whose).await.map_err(|error| {
        let detail = format!(
            "This router has forgotten its own; {error}, so that others may still find what was kept. Ask again once \
             Redis is up."
        );
        Problem::new(ProblemKind::NotReady, detail).with_reason("shared_cache_unavailable")
    })?;
    let mut report = told((parts, settings), tenant, forgotten);
    if unread > 0 {
        report += &format!(
            "; {unread} transcripts of the tenant in Redis could not be read (they were written with another \
             shared_cache.encryption_secret, or without one), and may be of this session: `ownerserve ctl tenant purge` erases all of the tenant's"
        );
    }
    Ok(WriteResult::plain(&parts.ledger, report))
}

fn told((parts, settings): (&OperatorParts, &OperatorSettings), tenant: &TenantId, count: usize) -> String {
    let is_known = settings.tenants.contains(&*tenant.0)
        || parts.fleet.isolation.keys().tenants_without_key(std::iter::once(&*tenant.0)).is_empty();
    if count == 0 && !is_known {
        return "no tenant of this name is configured and nothing was kept".into();
    }
    let stores = if parts.shared_cache.health().is_some() { "here and in Redis" } else { "here" };
    match count {
        1 => format!("1 value was forgotten {stores}"),
        count => format!("{count} values were forgotten {stores}"),
    }
}

/// Erases the retained data of a tenant.
///
/// That is transcripts and workers of its stored responses, and its token checkpoints, in this router's memory and in Redis,
/// and the last bodies of its sessions in this router's memory, which are not counted. Other routers erase theirs when they
/// are asked. What engines store stays there.
#[utoipa::path(delete, path = "/ownerserve/v1/tenants/{tenant}/retained-data", tag = "tenants",
    params(("tenant" = TenantIdSchema, Path)),
    responses((status = 200, description = "Nothing is left in this router and in Redis.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn erase_tenant(
    State(parts): State<Arc<OperatorParts>>,
    State(settings): State<Arc<OperatorSettings>>,
    PathId(name): PathId<TenantName>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    erase_and_report((&parts, &settings), &name.0, ErasureScope::Tenant).await
}

/// Tenant of a session.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ErasureQuery {
    /// The tenant, where the ledger does not know the session any more.
    tenant: Option<String>,
}

/// Erases the retained data of a session.
///
/// That is transcripts and workers of its stored responses and of those that follow them, and its token checkpoint, in this
/// router's memory and in Redis. The last bodies of all of the tenant's sessions in this router's memory are erased, too, and
/// not counted.
#[utoipa::path(delete, path = "/ownerserve/v1/sessions/{id}/retained-data", tag = "sessions",
    params(("id" = SessionIdSchema, Path), ErasureQuery),
    responses((status = 200, description = "Nothing is left in this router and in Redis.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn erase_session(
    State(parts): State<Arc<OperatorParts>>,
    State(settings): State<Arc<OperatorSettings>>,
    PathId(id): PathId<SessionId>,
    QueryParams(query): QueryParams<ErasureQuery>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let tenant = match query.tenant {
        Some(tenant) => tenant.parse::<TenantName>().map_err(|error| Problem::bad_query(error.to_owned()))?.0,
        None => sessions::find_session(&parts.ledger.directory().view(), id)?.tenant,
    };
    erase_and_report((&parts, &settings), &tenant, ErasureScope::Session(id)).await
}
