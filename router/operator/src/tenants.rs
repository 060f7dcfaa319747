//! `/ownerserve/v1/tenants`: what each tenant has in the ledger, and its quota.

use std::sync::Arc;

use axum::extract::State;
use ownership::LedgerView;
use ownership::ledger::{Command, SetQuota};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::TenantId;

use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::extractors::{JsonBody, PathId, QueryParams, TenantName};
use super::paging::{PageMeta, PageQuery};
use super::problem::Problem;
use super::schemas::TenantIdSchema;
use super::writes::{WriteResult, commit};
use proxy::ledger_access::LedgerAccess;

/// A tenant's entries and quota.
#[derive(Serialize, ToSchema)]
#[schema(as = Tenant)]
pub(super) struct TenantResource {
    #[schema(value_type = TenantIdSchema)]
    tenant: TenantId,
    /// Most artifacts, and most sessions, that it may have; null without a quota.
    max_entries: Option<u64>,
    /// Artifacts that it has.
    artifacts: u64,
    /// Sessions that it has.
    sessions: u64,
}

impl TenantResource {
    fn new(view: &LedgerView, tenant: TenantId) -> Self {
        let usage = view.usage(&tenant);
        Self { max_entries: view.quota(&tenant), artifacts: usage.artifacts, sessions: usage.sessions, tenant }
    }
}

/// Tenants, by name.
#[derive(Serialize, ToSchema)]
pub(super) struct TenantPage {
    tenants: Vec<TenantResource>,
    #[serde(flatten)]
    listed: PageMeta,
}

/// Filter of tenants.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct TenantFilter {
    /// Only tenants that have a quota (`true`) or have none (`false`).
    has_quota: Option<bool>,
}

/// Tenants that have entries or a quota, by name.
#[utoipa::path(get, path = "/ownerserve/v1/tenants", tag = "tenants", params(TenantFilter, PageQuery, ConsistencyQuery),
    responses((
        status = 200, description = "A page of tenants, and where the next one begins.",
        body = LedgerResponse<TenantPage>)))]
pub(super) async fn tenants(
    ReadView(view): ReadView,
    QueryParams(filter): QueryParams<TenantFilter>,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<TenantPage>, Problem> {
    let page = page.page::<TenantCursorKey>("tenants", &filter, view.applied())?;
    let line = |tenant: TenantId| {
        let line = TenantResource::new(&view, tenant.clone());
        let accepted = filter.has_quota.is_none_or(|has_quota| has_quota == line.max_entries.is_some());
        (TenantCursorKey(tenant), accepted.then_some(line).into_iter().collect())
    };
    let after = page.after.as_ref().map(|key| key.0.clone());
    let (tenants, listed) = page.fill(view.tenants_after(after).map(line));
    Ok(LedgerResponse::new(&view, TenantPage { tenants, listed }))
}

/// Tenant name in a cursor, in hexadecimal because it may contain anything.
struct TenantCursorKey(TenantId);

impl std::fmt::Display for TenantCursorKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.0.bytes().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::str::FromStr for TenantCursorKey {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let pairs = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
        let bytes: Option<Vec<u8>> = pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect();
        let name = String::from_utf8(bytes.ok_or(())?).map_err(drop)?;
        Ok(Self(TenantId(Arc::from(name))))
    }
}

/// One tenant.
#[derive(Serialize, ToSchema)]
pub(super) struct TenantResponse {
    tenant: TenantResource,
}

/// One tenant. An unknown tenant has no entries and no quota.
#[utoipa::path(get, path = "/ownerserve/v1/tenants/{tenant}", tag = "tenants",
    params(("tenant" = TenantIdSchema, Path), ConsistencyQuery),
    responses((status = 200, description = "Its entries and its quota.", body = LedgerResponse<TenantResponse>)))]
pub(super) async fn tenant(
    ReadView(view): ReadView,
    PathId(name): PathId<TenantName>,
) -> LedgerResponse<TenantResponse> {
    LedgerResponse::new(&view, TenantResponse { tenant: TenantResource::new(&view, name.0) })
}

/// A tenant's quota.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct TenantQuota {
    /// Most artifacts, and most sessions, that the tenant may have; null lifts the quota. What is there already stays.
    #[schema(required = true)]
    #[serde(deserialize_with = "super::extractors::required_nullable")]
    max_entries: Option<u64>,
}

/// Sets or lifts a tenant's quota.
///
/// The ledger refuses new entries beyond it; their steps are served without ownership.
#[utoipa::path(put, path = "/ownerserve/v1/tenants/{tenant}/quota", tag = "tenants",
    params(("tenant" = TenantIdSchema, Path)), request_body = TenantQuota,
    responses((status = 200, description = "The quota holds for new entries.", body = LedgerResponse<WriteResult>)))]
pub(super) async fn set_quota(
    State(ledger): State<LedgerAccess>,
    PathId(name): PathId<TenantName>,
    JsonBody(quota): JsonBody<TenantQuota>,
) -> Result<LedgerResponse<WriteResult>, Problem> {
    let result = match quota.max_entries {
        Some(most) => format!("{} may have {most} artifacts and as many sessions", name.0),
        None => format!("{} has no quota", name.0),
    };
    commit(&ledger, Command::SetQuota(SetQuota { tenant: name.0, artifacts: quota.max_entries })).await?;
    Ok(WriteResult::plain(&ledger, result))
}
