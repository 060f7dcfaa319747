//! Quotas: requests and tokens that a tenant may use per minute, counted across all routers that share a cache.
//!
//! Each router leases a little ahead from the common count, so that requests do not wait for it. Where leasing fails,
//! it enforces its own share of the quota and reports that.
//!
//! A request that is sent again under its `Idempotency-Key` because it did not complete counts once
//! (`router/decisions/0008`).

mod allowance;
mod idempotency;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use prometheus::IntCounter;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use vocabulary::{TenantId, Tokens};

use crate::error::ApiError;
use crate::shared_cache::{CacheEntryKind, CacheKey, CounterLease, SharedCache};
use crate::telemetry::shared_cache_metrics::SharedCacheMetrics;
use allowance::{Allowance, QuotaShortfall, RefillSource};
use idempotency::{IdempotencyKey, QuotaCharge, body_digest};
use strum::{AsRefStr, IntoStaticStr};

/// Section `[tenants.NAME]`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantConfig {
    /// Maximum number of requests per minute.
    pub requests_per_minute: Option<u64>,
    /// Maximum number of tokens per minute, of prompts and answers together.
    pub tokens_per_minute: Option<u64>,
    /// Maximum number of concurrent requests at each router.
    pub concurrent_requests: Option<u32>,
}

impl TenantConfig {
    /// Returns the name of a field that is out of range.
    pub fn problem(&self) -> Option<&'static str> {
        let wrong = |quota: Option<u64>| quota.is_some_and(|quota| quota == 0 || quota > 1_000_000_000_000);
        if wrong(self.requests_per_minute) {
            return Some("requests_per_minute");
        }
        if wrong(self.tokens_per_minute) {
            return Some("tokens_per_minute");
        }
        wrong(self.concurrent_requests.map(u64::from)).then_some("concurrent_requests")
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
enum Unit {
    Requests,
    Tokens,
}

impl Unit {
    fn headers(self) -> [HeaderName; 3] {
        match self {
            Self::Requests => ["limit", "remaining", "reset"].map(|what| name(what, "requests")),
            Self::Tokens => ["limit", "remaining", "reset"].map(|what| name(what, "tokens")),
        }
    }
}

fn name(what: &str, unit: &str) -> HeaderName {
    HeaderName::try_from(format!("x-ratelimit-{what}-{unit}")).expect("made of letters and hyphens")
}

/// The quotas of all tenants that have any.
#[derive(Clone, Debug)]
pub struct Quotas {
    tenants: BTreeMap<TenantId, Arc<TenantQuotas>>,
}

impl Quotas {
    /// Builds the quotas from the configuration.
    pub fn new(
        tenants: &BTreeMap<String, TenantConfig>,
        state: &Arc<SharedCache>,
        metrics: &SharedCacheMetrics,
    ) -> Self {
        let quotas = |(name, config): (&String, &TenantConfig)| {
            let tenant = TenantId(name.as_str().into());
            let meter = |unit: Unit, quota: Option<u64>| {
                let key = CacheKey::new(CacheEntryKind::Quota, &tenant, unit.as_ref());
                // The shared quota may be used up already, so a leased allowance starts empty.
                let supply =
                    if state.max_propagation_delay().is_some() { RefillSource::Leased } else { RefillSource::Share(1) };
                let allowance = Mutex::new(Allowance::new(quota?, supply, Instant::now()));
                let (fetching, unanswered) = (AtomicBool::new(false), AtomicBool::new(false));
                let (state, metrics) = (state.clone(), metrics.clone());
                Some(Arc::new(Meter {
                    unit,
                    key,
                    allowance,
                    leasing: fetching,
                    lease_unanswered: unanswered,
                    shared_cache: state,
                    metrics,
                }))
            };
            let requests = meter(Unit::Requests, config.requests_per_minute);
            let tokens = meter(Unit::Tokens, config.tokens_per_minute);
            let used = metrics.tenant_tokens.with_label_values(&[&tenant.0]);
            let (state, repeated) = (state.clone(), metrics.quota_repeats.clone());
            let running = config.concurrent_requests.map(|most| (most, Arc::new(Semaphore::new(most as usize))));
            (
                tenant.clone(),
                Arc::new(TenantQuotas {
                    tenant,
                    requests,
                    tokens,
                    concurrency: running,
                    used,
                    repeated,
                    shared_cache: state,
                }),
            )
        };
        Self { tenants: tenants.iter().map(quotas).collect() }
    }

    /// Returns the quotas of one tenant; `None` when it is unlimited.
    pub fn of(&self, tenant: &TenantId) -> Option<Arc<TenantQuotas>> {
        self.tenants.get(tenant).cloned()
    }
}

/// The quotas of one tenant.
#[derive(Debug)]
pub struct TenantQuotas {
    tenant: TenantId,
    requests: Option<Arc<Meter>>,
    tokens: Option<Arc<Meter>>,
    /// Limit of concurrent requests, and their slots.
    concurrency: Option<(u32, Arc<Semaphore>)>,
    /// Counter of used tokens; each request counts once.
    used: IntCounter,
    /// Counter of requests that were sent again without a charge.
    repeated: IntCounter,
    shared_cache: Arc<SharedCache>,
}

/// A request that was counted, now or when it was first sent.
#[derive(Debug)]
pub struct CountedRequest {
    idempotency_key: Option<IdempotencyKey>,
    /// What was charged for it before, if it is the same request.
    previous_charge: Option<QuotaCharge>,
}

impl TenantQuotas {
    /// Counts one request, or refuses it. One that was charged before is not counted again, provided that its body is
    /// the same.
    pub async fn take_request(&self, headers: &HeaderMap) -> Result<CountedRequest, ApiError> {
        let named = IdempotencyKey::of(headers, &self.tenant, &self.shared_cache);
        let before = match &named {
            Some(named) => named.previous_charge().await,
            None => None,
        };
        if before.is_none() {
            self.take_one_request().await?;
        }
        Ok(CountedRequest { idempotency_key: named, previous_charge: before })
    }

    /// Acquires a slot among the tenant's concurrent requests, held until it is dropped; `None` where these are not
    /// limited.
    pub fn acquire_slot(&self) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        let Some((limit, places)) = &self.concurrency else { return Ok(None) };
        places.clone().try_acquire_owned().map(Some).map_err(|_| ApiError::TooManyAtOnce { limit: *limit })
    }

    async fn take_one_request(&self) -> Result<(), ApiError> {
        match &self.requests {
            Some(meter) => meter.take(1).await,
            None => Ok(()),
        }
    }

    /// Counts a request whose body did not arrive: without the body, a known key does not make it a repeat.
    pub async fn count_unread_body(&self, counted: CountedRequest) {
        if counted.previous_charge.is_some() {
            // The request is refused already, so the result does not matter.
            let _ = self.take_one_request().await;
        }
    }

    /// Takes the tokens that a request with this body is expected to use, or refuses it.
    pub async fn take_tokens(
        self: &Arc<Self>,
        body: &[u8],
        counted: CountedRequest,
    ) -> Result<TokenReservation, ApiError> {
        let CountedRequest { idempotency_key: named, previous_charge: before } = counted;
        let body_id = named.as_ref().map_or(0, |_| body_digest(body));
        if let (Some(named), Some(before)) = (&named, before) {
            if before.body_digest == body_id && named.may_repeat(before).await {
                self.repeated.inc();
                let charge = QuotaCharge { repeats: before.repeats + 1, ..before };
                named.record(charge);
                // If its tokens were given back, they are taken again.
                if before.tokens > Tokens::ZERO {
                    return Ok(TokenReservation::new(self, (charge, ResendStatus::Resent), Some(named.clone())));
                }
            } else {
                // Another request under the same key, or one repeat too many.
                self.take_one_request().await?;
            }
        }
        let estimate = Tokens((body.len() as u64 / BYTES_PER_TOKEN).max(1));
        if let Some(meter) = &self.tokens {
            meter.take(estimate.0).await?;
        }
        let charge = QuotaCharge { body_digest: body_id, tokens: estimate, used: Tokens::ZERO, repeats: 0 };
        if let Some(named) = &named {
            named.record(charge);
        }
        Ok(TokenReservation::new(self, (charge, ResendStatus::First), named))
    }

    /// Sets OpenAI's response headers for what is left of the quotas.
    pub fn set_headers(&self, headers: &mut HeaderMap) {
        for meter in [&self.requests, &self.tokens].into_iter().flatten() {
            meter.set_headers(headers);
        }
    }
}

/// Bytes of a request's body that are estimated as one token until its tokens are counted.
pub(crate) const BYTES_PER_TOKEN: u64 = 4;

/// Maximum number of tokens reserved for an answer in advance.
const MAX_RESERVED_ANSWER: u64 = 4_096;
/// Tokens reserved for an answer whose request sets no limit.
const DEFAULT_RESERVED_ANSWER: Tokens = Tokens(256);
/// Number of fully reserved answers that use up a minute's quota.
const FULL_ANSWERS_PER_MINUTE: u64 = 16;

/// Whether a request was sent before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ResendStatus {
    First,
    Resent,
}

impl QuotaCharge {
    /// Settles one attempt of a request; `used` includes earlier attempts. Returns the tokens that were taken and that
    /// are kept of them, and the charge for the next attempt.
    fn settle(self, sent: ResendStatus, used: Tokens) -> ((Tokens, Tokens), Self) {
        match sent {
            ResendStatus::First => ((self.tokens, used), Self { tokens: used, used, ..self }),
            // It took nothing, and so gives nothing back: the earlier attempt may still do that itself.
            ResendStatus::Resent => {
                ((Tokens::ZERO, used - self.tokens), Self { tokens: self.tokens.max(used), used, ..self })
            }
        }
    }
}

/// Whether a request completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestCompletion {
    /// It completed.
    Complete,
    /// It did not: the client may send it again.
    Interrupted,
}

/// Tokens taken for a request before its usage is known. Clones share one reservation; when the last of them is dropped
/// without a settlement, the tokens are given back.
#[derive(Clone, Debug)]
pub struct TokenReservation(Arc<Reservation>);

#[derive(Debug)]
struct Reservation {
    quotas: Arc<TenantQuotas>,
    charge: Mutex<QuotaCharge>,
    resend_status: ResendStatus,
    idempotency_key: Option<IdempotencyKey>,
    settled: AtomicBool,
    /// Whether a worker is processing it and no one else will settle it.
    begun: AtomicBool,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let used = if self.begun.load(Ordering::Relaxed) { self.charge.lock().tokens } else { Tokens::ZERO };
        self.settle(used, RequestCompletion::Interrupted);
    }
}

impl TokenReservation {
    fn new(
        quotas: &Arc<TenantQuotas>,
        (charge, sent): (QuotaCharge, ResendStatus),
        named: Option<IdempotencyKey>,
    ) -> Self {
        let (settled, begun) = (AtomicBool::new(false), AtomicBool::new(false));
        Self(Arc::new(Reservation {
            quotas: quotas.clone(),
            charge: Mutex::new(charge),
            resend_status: sent,
            idempotency_key: named,
            settled,
            begun,
        }))
    }

    /// Marks that a worker is processing it: a client that leaves from now on has used what was taken.
    pub fn begin(&self) {
        self.0.begun.store(true, Ordering::Relaxed);
    }

    /// Marks that the worker did nothing for it: unless another one does, its tokens are given back.
    pub fn came_to_nothing(&self) {
        self.0.begun.store(false, Ordering::Relaxed);
    }

    /// Whether it was sent before and is not charged again.
    pub fn is_repeated(&self) -> bool {
        self.0.resend_status == ResendStatus::Resent
    }

    /// Takes the tokens that the answer is expected to use as well; if refused, gives back what was taken. Prompt and
    /// answer are taken as one amount, so that a client that waits for the announced time finds all of it.
    pub async fn take_answer(&self, bound: Option<Tokens>) -> Result<(), ApiError> {
        let Reservation { quotas, charge, resend_status: sent, .. } = &*self.0;
        let Some(meter) = quotas.tokens.clone().filter(|_| *sent == ResendStatus::First) else { return Ok(()) };
        let most = (meter.allowance.lock().per_minute() / FULL_ANSWERS_PER_MINUTE).min(MAX_RESERVED_ANSWER);
        let answer = bound.unwrap_or(DEFAULT_RESERVED_ANSWER).min(Tokens(most));
        let prompt = std::mem::take(&mut charge.lock().tokens);
        meter.allowance.lock().settle(prompt.0, 0);
        let both = prompt + answer;
        meter.take(both.0).await?;
        charge.lock().tokens = both;
        Ok(())
    }

    /// Whether the tenant's tokens are limited.
    pub fn is_metered(&self) -> bool {
        self.0.quotas.tokens.is_some()
    }

    /// Returns the tokens that were taken for it.
    pub fn reserved_tokens(&self) -> Tokens {
        self.0.charge.lock().tokens
    }

    /// Settles the tokens that the request has used, including its earlier attempts. Only the first call counts.
    pub fn settle(&self, used: Tokens, came: RequestCompletion) {
        self.0.settle(used, came);
    }
}

impl Reservation {
    fn settle(&self, used: Tokens, came: RequestCompletion) {
        if self.settled.swap(true, Ordering::Relaxed) {
            return;
        }
        let before = *self.charge.lock();
        // An attempt that got less far than an earlier one takes nothing back.
        let used = used.max(before.used);
        self.quotas.used.inc_by((used - before.used).0);
        let (moved, charge) = before.settle(self.resend_status, used);
        if let Some(meter) = &self.quotas.tokens {
            meter.allowance.lock().settle(moved.0.0, moved.1.0);
            meter.rebalance_lease();
        }
        match (&self.idempotency_key, came) {
            (None, _) => {}
            (Some(named), RequestCompletion::Complete) => named.close(),
            (Some(named), RequestCompletion::Interrupted) => named.record(charge),
        }
    }
}

/// One tenant's meter for one unit.
#[derive(Debug)]
struct Meter {
    unit: Unit,
    key: CacheKey,
    allowance: Mutex<Allowance>,
    leasing: AtomicBool,
    /// Whether the last lease got no answer: until one does, this router uses its share of the quota.
    lease_unanswered: AtomicBool,
    shared_cache: Arc<SharedCache>,
    metrics: SharedCacheMetrics,
}

impl Meter {
    fn supply(&self) -> RefillSource {
        match self.shared_cache.isolated_router_count() {
            None if self.lease_unanswered.load(Ordering::Relaxed) => {
                RefillSource::Share(self.shared_cache.router_count())
            }
            None => RefillSource::Leased,
            Some(routers) => RefillSource::Share(routers),
        }
    }

    async fn take(self: &Arc<Self>, cost: u64) -> Result<(), ApiError> {
        // Only another lease shows whether leasing works again.
        if self.lease_unanswered.load(Ordering::Relaxed) && self.shared_cache.isolated_router_count().is_none() {
            self.lease(i64::try_from(cost).unwrap_or(i64::MAX)).await;
        }
        let charge = match self.try_take(cost) {
            Err(short) if self.shared_cache.isolated_router_count().is_none() => {
                let want = self.allowance.lock().lease_for(short);
                self.lease(want).await;
                self.try_take(cost)
            }
            taken => taken,
        };
        let result = charge.map_err(|short| self.refusal(short, cost));
        self.rebalance_lease();
        result
    }

    fn try_take(&self, cost: u64) -> Result<(), QuotaShortfall> {
        let mut allowance = self.allowance.lock();
        allowance.advance(Instant::now(), self.supply());
        allowance.take(cost)
    }

    async fn lease(&self, want: i64) {
        let per_minute = self.allowance.lock().per_minute();
        match self.shared_cache.lease(&self.key, per_minute, want).await {
            CounterLease::Granted { units, left } => {
                self.lease_unanswered.store(false, Ordering::Relaxed);
                let mut allowance = self.allowance.lock();
                // Give up what accumulated locally before more is added.
                allowance.advance(Instant::now(), RefillSource::Leased);
                allowance.apply_lease(units, left);
            }
            CounterLease::Unavailable => self.lease_unanswered.store(true, Ordering::Relaxed),
        }
    }

    /// Adjusts the stock of leased units in the background.
    fn rebalance_lease(self: &Arc<Self>) {
        let want = self.allowance.lock().lease_change();
        if want == 0 || self.leasing.swap(true, Ordering::Relaxed) {
            return;
        }
        let meter = self.clone();
        tokio::spawn(async move {
            if want < 0 {
                // Subtracted here before it is returned to the shared count, so that nobody uses it twice.
                meter.allowance.lock().settle(0, want.unsigned_abs());
                let per_minute = meter.allowance.lock().per_minute();
                meter.shared_cache.lease(&meter.key, per_minute, want).await;
            } else {
                meter.lease(want).await;
            }
            meter.leasing.store(false, Ordering::Relaxed);
        });
    }

    fn refusal(&self, short: QuotaShortfall, asked: u64) -> ApiError {
        self.metrics.quota_refusals.with_label_values(&[&self.key.tenant.0, self.unit.as_ref()]).inc();
        let limit = self.allowance.lock().per_minute();
        let after = short.retry_after.max(Duration::from_millis(1));
        ApiError::RateLimited { unit: self.unit.into(), limit, asked, after }
    }

    fn set_headers(&self, headers: &mut HeaderMap) {
        let allowance = self.allowance.lock();
        let (remaining, reset) = allowance.remaining();
        let [limit_name, remaining_name, reset_name] = self.unit.headers();
        headers.insert(limit_name, HeaderValue::from(allowance.per_minute()));
        headers.insert(remaining_name, HeaderValue::from(remaining));
        if let Ok(reset) = HeaderValue::try_from(format!("{:.3}s", reset.as_secs_f64())) {
            headers.insert(reset_name, reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::Metrics;

    fn quotas(tokens_per_minute: u64) -> Arc<TenantQuotas> {
        let metrics = Metrics::default().shared_cache;
        let state = SharedCache::start(&Default::default(), ("c", &Arc::default()), metrics.clone()).unwrap();
        let limits = TenantConfig { tokens_per_minute: Some(tokens_per_minute), ..TenantConfig::default() };
        let all = Quotas::new(&BTreeMap::from([("a".to_owned(), limits)]), &Arc::new(state), &metrics);
        all.of(&TenantId("a".into())).unwrap()
    }

    fn remaining(quotas: &TenantQuotas) -> u64 {
        quotas.tokens.as_ref().unwrap().allowance.lock().remaining().0
    }

    /// Takes tokens like an arriving request. Returns its reservation, or how long it must wait.
    async fn asked(quotas: &Arc<TenantQuotas>, bytes: usize) -> Result<TokenReservation, Duration> {
        let counted = CountedRequest { idempotency_key: None, previous_charge: None };
        let wait = |error: ApiError| match error {
            ApiError::RateLimited { after, .. } => after,
            other => panic!("{other}"),
        };
        let reserved = quotas.take_tokens(&vec![b'x'; bytes], counted).await.map_err(wait)?;
        reserved.take_answer(Some(Tokens(60))).await.map_err(wait)?;
        Ok(reserved)
    }

    #[tokio::test]
    async fn a_request_that_waits_as_long_as_it_is_told_is_served_and_a_refused_one_costs_nothing() {
        let quotas = quotas(960);
        let meter = quotas.tokens.as_ref().unwrap();
        let pass = |time| {
            let mut allowance = meter.allowance.lock();
            allowance.advance(Instant::now(), RefillSource::Share(1));
            allowance.advance(Instant::now() + time + Duration::from_millis(1), RefillSource::Share(1));
        };
        // The second one needs more than a minute's quota, of which its prompt alone is only a part.
        for (bytes, taken) in [(2_000, 560), (3_800, 1_010)] {
            pass(Duration::from_secs(600));
            meter.try_take(500).unwrap();
            let mut served = None;
            // The client is told to wait for its prompt first, then for all of it.
            for _ in 0..3 {
                let left = remaining(&quotas);
                match asked(&quotas, bytes).await {
                    Ok(reserved) => served = Some(reserved.reserved_tokens()),
                    Err(wait) => {
                        assert!(remaining(&quotas) >= left, "refused, and yet charged");
                        pass(wait);
                    }
                }
                if served.is_some() {
                    break;
                }
            }
            assert_eq!(served, Some(Tokens(taken)));
        }
    }

    #[tokio::test]
    async fn what_nobody_settles_is_given_back_unless_a_worker_began_with_it() {
        let quotas = quotas(1_000);
        let clone = asked(&quotas, 400).await.unwrap();
        drop(clone.clone());
        assert_eq!(remaining(&quotas), 840, "its clone is there");
        drop(clone);
        assert!(remaining(&quotas) >= 999);
        let begun = asked(&quotas, 400).await.unwrap();
        begun.begin();
        drop(begun);
        assert!(remaining(&quotas) < 850);
    }

    #[test]
    fn a_request_resent_after_a_failure_is_charged_once() {
        let first = QuotaCharge { body_digest: 1, tokens: Tokens(100), used: Tokens::ZERO, repeats: 0 };
        // The first router died before it could settle: what it took stays taken.
        let (moved, second) = first.settle(ResendStatus::Resent, Tokens(30));
        assert_eq!((moved, second.tokens), ((Tokens::ZERO, Tokens::ZERO), Tokens(100)));
        let (moved, third) = second.settle(ResendStatus::Resent, Tokens(80));
        assert_eq!((moved, third.tokens), ((Tokens::ZERO, Tokens::ZERO), Tokens(100)));
        let (moved, fourth) = third.settle(ResendStatus::Resent, Tokens(130));
        assert_eq!((moved, fourth.tokens), ((Tokens::ZERO, Tokens(30)), Tokens(130)), "only what is more");
        // A router that could settle: it gave back what was not used.
        let (moved, second) = first.settle(ResendStatus::First, Tokens(30));
        assert_eq!((moved, second.tokens), ((Tokens(100), Tokens(30)), Tokens(30)));
    }
}
