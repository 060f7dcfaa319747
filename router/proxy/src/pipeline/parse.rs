//! Parse: reads the request's fields on the offload pool, and reserves its answer from the tenant's quota.

use std::sync::Arc;

use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::error::ApiError;
use crate::identified_request::{ParsedRequest, leg_options};
use crate::offload_pool::{OffloadPool, OffloadSpec};
use crate::request_parser::parse;
use crate::retries::RetryBudget;
use crate::telemetry::metrics::RequestMetrics;
use crate::tenant_isolation::TenantIsolation;

/// What parsing a request uses.
#[derive(Debug)]
pub struct ParseStage {
    pub(super) isolation: TenantIsolation,
    pub(super) offload_pool: Arc<OffloadPool>,
    pub(super) retries: Arc<RetryBudget>,
    pub(super) requests: RequestMetrics,
}

/// Parses the request, and reserves the answer from the tenant's quota.
pub async fn parse_request(
    stage: &ParseStage,
    endpoint: GenerationEndpoint,
    incoming: ClientRequest,
) -> Result<ParsedRequest, ApiError> {
    stage.retries.earn(&incoming.tenant);
    let salt = stage.isolation.salt_of(&incoming.tenant);
    let load = OffloadSpec::of(&incoming);
    let request = load.run(&stage.offload_pool, move || parse(incoming, endpoint, salt)).await??;
    stage.requests.count_stripped(request.body.stripped(&leg_options(&request)));
    if let Some(reserved) = &request.incoming.token_reservation {
        reserved.take_answer(request.max_answer).await?;
    }
    Ok(request)
}
