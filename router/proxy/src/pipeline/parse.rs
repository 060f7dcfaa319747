//! Parse: reads the request's fields, of a session's next body only what is new, and reserves its answer from the
//! tenant's quota. What takes long runs on the offload pool.

use std::sync::Arc;

use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::error::ApiError;
use crate::identified_request::{ParsedRequest, leg_options};
use crate::offload_pool::{OffloadPool, OffloadSpec};
use crate::request_body_cache::{BodyKeys, BodyLineage, MAX_INLINE_COMPARISON, RequestBodyCache};
use crate::request_parser::parse_grown;
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
    pub(super) bodies: Arc<RequestBodyCache>,
}

/// Parses the request, and reserves the answer from the tenant's quota.
pub async fn parse_request(
    stage: &ParseStage,
    endpoint: GenerationEndpoint,
    incoming: ClientRequest,
) -> Result<ParsedRequest, ApiError> {
    stage.retries.earn(&incoming.tenant);
    let salt = stage.isolation.salt_of(&incoming.tenant);
    let keys = BodyKeys::of(&incoming, endpoint);
    let known = stage.bodies.lookup(&incoming.tenant, &keys);
    let size = incoming.body.len();
    let is_long = size > MAX_INLINE_COMPARISON;
    let compared = known.as_ref().filter(|_| !is_long).and_then(|known| known.growth_to(&incoming.body));
    let new = compared.as_ref().map_or(size, |growth| size - growth.end());
    let (load, bodies) = (OffloadSpec::of(&incoming).on(new), stage.bodies.clone());
    let work = move || {
        let compared_here = known.as_ref().filter(|_| is_long).and_then(|known| known.growth_to(&incoming.body));
        let growth = compared.or(compared_here);
        let mut request = parse_grown(incoming, endpoint, (salt, growth.as_ref()))?;
        let fields = request.body.scanned_json();
        let kept = bodies.insert(&request.incoming.tenant, &keys, (fields, growth.is_some()));
        request.lineage = BodyLineage::new(known.zip(growth.map(|growth| growth.end())), kept);
        Ok::<_, ApiError>(request)
    };
    let request = load.run(&stage.offload_pool, work).await??;
    stage.requests.count_stripped(request.body.stripped(&leg_options(&request)));
    if let Some(reserved) = &request.incoming.token_reservation {
        reserved.take_answer(request.max_answer).await?;
    }
    Ok(request)
}
