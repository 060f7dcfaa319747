//! `/ownerserve/v1/tenants`: what each tenant has in the ledger, and how much it may have.

use std::sync::Arc;

use axum::extract::State;
use ownership::View;
use ownership::ledger::{Command, SetQuota};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::TenantId;

use super::fresh::{Fresh, FreshQuery, Seen};
use super::input::{Asked, Named, TenantName, Told};
use super::paging::{Listed, PageQuery};
use super::problem::Problem;
use super::words::TenantWord;
use super::writes::{Done, write};
use crate::gateway::Gateway;

/// A tenant's entries.
#[derive(Serialize, ToSchema)]
pub(super) struct TenantLine {
    #[schema(value_type = TenantWord)]
    tenant: TenantId,
    /// How many artifacts, and how many sessions, it may have; none when that is not bounded.
    quota: Option<u64>,
    /// Artifacts that it has.
    artifacts: u64,
    /// Sessions that it has.
    sessions: u64,
}

impl TenantLine {
    fn new(view: &View, tenant: TenantId) -> Self {
        let usage = view.usage(&tenant);
        Self { quota: view.quota(&tenant), artifacts: usage.artifacts, sessions: usage.sessions, tenant }
    }
}

/// Tenants, by name.
#[derive(Serialize, ToSchema)]
pub(super) struct Tenants {
    tenants: Vec<TenantLine>,
    #[serde(flatten)]
    listed: Listed,
}

/// Nothing to filter by; takes part in a cursor's name.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct TenantFilter {
    /// Only tenants that have a quota (`true`) or have none (`false`).
    bounded: Option<bool>,
}

/// Tenants that have entries or a quota, by name.
#[utoipa::path(get, path = "/ownerserve/v1/tenants", tag = "tenants", params(TenantFilter, PageQuery, FreshQuery),
    responses((
        status = 200, description = "A page of tenants, and where the next one begins.",
        body = Fresh<Tenants>)))]
pub(super) async fn tenants(
    Seen(view): Seen,
    Asked(filter): Asked<TenantFilter>,
    Asked(page): Asked<PageQuery>,
) -> Result<Fresh<Tenants>, Problem> {
    let page = page.page::<TenantKey>("tenants", &filter, view.applied())?;
    let line = |tenant: TenantId| {
        let line = TenantLine::new(&view, tenant.clone());
        let accepted = filter.bounded.is_none_or(|bounded| bounded == line.quota.is_some());
        (TenantKey(tenant), accepted.then_some(line).into_iter().collect())
    };
    let after = page.after.as_ref().map(|key| key.0.clone());
    let (tenants, listed) = page.fill(view.tenants_after(after).map(line));
    Ok(Fresh::new(&view, Tenants { tenants, listed }))
}

/// A tenant's name inside a cursor, as hexadecimal digits: it may hold anything.
struct TenantKey(TenantId);

impl std::fmt::Display for TenantKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.0.bytes().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::str::FromStr for TenantKey {
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
pub(super) struct OneTenant {
    tenant: TenantLine,
}

/// One tenant; one that is not known has nothing and no quota.
#[utoipa::path(get, path = "/ownerserve/v1/tenants/{tenant}", tag = "tenants",
    params(("tenant" = TenantWord, Path), FreshQuery),
    responses((status = 200, description = "What it has, and may have.", body = Fresh<OneTenant>)))]
pub(super) async fn tenant(Seen(view): Seen, Named(name): Named<TenantName>) -> Fresh<OneTenant> {
    Fresh::new(&view, OneTenant { tenant: TenantLine::new(&view, name.0) })
}

/// A tenant's bound.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Quota {
    /// How many artifacts, and how many sessions, the tenant may have; null lifts the bound. What is there already stays.
    #[schema(required = true)]
    #[serde(deserialize_with = "super::input::must_be_there")]
    artifacts: Option<u64>,
}

/// Sets or lifts a tenant's quota.
///
/// Claims of new entries beyond it are refused, and the steps served all the same, without ownership.
#[utoipa::path(put, path = "/ownerserve/v1/tenants/{tenant}/quota", tag = "tenants",
    params(("tenant" = TenantWord, Path)), request_body = Quota,
    responses((status = 200, description = "The quota holds for new entries.", body = Fresh<Done>)))]
pub(super) async fn set_quota(
    State(gateway): State<Arc<Gateway>>,
    Named(name): Named<TenantName>,
    Told(quota): Told<Quota>,
) -> Result<Fresh<Done>, Problem> {
    let did = match quota.artifacts {
        Some(most) => format!("{} may have {most} artifacts and as many sessions", name.0),
        None => format!("{} has no quota", name.0),
    };
    write(&gateway, Command::SetQuota(SetQuota { tenant: name.0, artifacts: quota.artifacts })).await?;
    Ok(Done::plain(&gateway, did))
}
