//! Memory budget of requests in progress: their bodies, what these inflate to, and what is derived from them. One
//! budget for all tenants, of which each gets half where there are several.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::{IntCounterVec, IntGauge};
use vocabulary::TenantId;
use workers_shim::engine_api::LegBody;

use crate::body_buffers::{BodyBuffer, BodyBuffers};
use crate::error::ApiError;
use crate::telemetry::metrics::RequestMemoryMetrics;

/// Limits of the budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryLimits {
    /// Bytes of all requests together.
    pub total: usize,
    /// Bytes of the requests of one tenant.
    pub tenant: usize,
}

/// Memory reserved by requests in progress, and the limits.
#[derive(Debug)]
pub struct MemoryBudget {
    limits: MemoryLimits,
    reserved: Mutex<ReservationTotals>,
    reserved_gauge: IntGauge,
    refused: IntCounterVec,
    buffers: Arc<BodyBuffers>,
}

#[derive(Debug, Default)]
struct ReservationTotals {
    total: usize,
    by_tenant: HashMap<TenantId, usize>,
}

impl MemoryBudget {
    /// Returns a budget without reservations.
    pub fn new(limits: MemoryLimits, metrics: &RequestMemoryMetrics) -> Arc<Self> {
        Self::with_gauge(limits, metrics.reserved.clone(), metrics)
    }

    /// Returns a budget whose size is not exported as a metric; only its refusals are.
    pub fn unshown(limits: MemoryLimits, metrics: &RequestMemoryMetrics) -> Arc<Self> {
        let shown = IntGauge::new("operator_memory", "not shown").expect("a valid name");
        Self::with_gauge(limits, shown, metrics)
    }

    fn with_gauge(limits: MemoryLimits, reserved_gauge: IntGauge, metrics: &RequestMemoryMetrics) -> Arc<Self> {
        let (refused, buffers) = (metrics.refused.clone(), Arc::default());
        Arc::new(Self { limits, reserved: Mutex::default(), reserved_gauge, refused, buffers })
    }

    /// Returns an empty reservation, which grows with its request.
    pub fn reservation(self: &Arc<Self>, tenant: &TenantId) -> MemoryReservation {
        MemoryReservation { budget: self.clone(), tenant: tenant.clone(), bytes: 0, beside: 0 }
    }

    /// Reserves bytes; `held` is what the same request holds already.
    fn reserve(&self, tenant: &TenantId, (bytes, held): (usize, usize)) -> Result<(), ApiError> {
        let mut reserved = self.reserved.lock();
        let total = reserved.total.saturating_add(bytes);
        let of_tenant = reserved.by_tenant.get(tenant).copied().unwrap_or(0).saturating_add(bytes);
        let refused = if of_tenant > self.limits.tenant {
            Some(("tenant", "your requests in work hold all the memory that one tenant may have"))
        } else if total > self.limits.total {
            Some(("total", "requests in work hold all the memory there is for them"))
        } else {
            None
        };
        if let Some((scope, what)) = refused {
            drop(reserved);
            self.refused.with_label_values(&[scope]).inc();
            let most = self.limits.tenant.min(self.limits.total);
            if held.saturating_add(bytes) > most {
                return Err(ApiError::TooMuchMemory { most });
            }
            return Err(ApiError::Overloaded { what });
        }
        reserved.total = total;
        match reserved.by_tenant.get_mut(tenant) {
            Some(known) => *known = of_tenant,
            None => _ = reserved.by_tenant.insert(tenant.clone(), of_tenant),
        }
        self.reserved_gauge.set(i64::try_from(total).unwrap_or(i64::MAX));
        Ok(())
    }

    fn release(&self, tenant: &TenantId, bytes: usize) {
        let mut reserved = self.reserved.lock();
        reserved.total -= bytes;
        if let Some(of_tenant) = reserved.by_tenant.get_mut(tenant) {
            *of_tenant -= bytes;
            if *of_tenant == 0 {
                reserved.by_tenant.remove(tenant);
            }
        }
        self.reserved_gauge.set(i64::try_from(reserved.total).unwrap_or(i64::MAX));
    }
}

/// Memory reserved for one request. Dropping it releases the memory.
#[derive(Debug)]
pub struct MemoryReservation {
    budget: Arc<MemoryBudget>,
    tenant: TenantId,
    bytes: usize,
    /// Bytes that the request held when this sibling reservation was created.
    beside: usize,
}

impl MemoryReservation {
    /// Reserves more bytes; fails if a limit would be exceeded.
    pub fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        if bytes > 0 {
            self.budget.reserve(&self.tenant, (bytes, self.beside + self.bytes))?;
            self.bytes += bytes;
        }
        Ok(())
    }

    /// Returns an empty buffer for a body of `length` bytes. What is stored in it is reserved apart.
    pub(crate) fn body_buffer(&self, length: usize) -> BodyBuffer {
        self.budget.buffers.buffer(length)
    }

    /// Releases what exceeds `bytes`.
    pub fn shrink_to(&mut self, bytes: usize) {
        if let Some(surplus) = self.bytes.checked_sub(bytes).filter(|surplus| *surplus > 0) {
            self.budget.release(&self.tenant, surplus);
            self.bytes = bytes;
        }
    }

    /// Returns the tenant.
    pub fn tenant(&self) -> &TenantId {
        &self.tenant
    }

    /// Returns another, empty reservation for the same request.
    pub fn sibling(&self) -> Self {
        Self { budget: self.budget.clone(), tenant: self.tenant.clone(), bytes: 0, beside: self.bytes }
    }

    /// Returns `derived` as a buffer whose last clone releases what is reserved for it here. A clone of `source`, for
    /// which this reservation was made, takes no more memory.
    pub fn charge_derived(&self, source: &Bytes, derived: Bytes) -> Result<Bytes, ApiError> {
        if derived.as_ptr() == source.as_ptr() {
            return Ok(derived);
        }
        let mut reservation = self.sibling();
        reservation.grow(derived.len())?;
        Ok(Bytes::from_owner(ChargedBuffer { bytes: derived, _reservation: reservation }))
    }

    /// Returns `leg` with a chunk whose last clone releases what is reserved for it here: the bytes that do not share the
    /// memory of the client's body, for which this reservation was made.
    pub fn charge_leg(&self, leg: LegBody) -> Result<LegBody, ApiError> {
        if leg.copied_bytes() == 0 {
            return Ok(leg);
        }
        let mut reservation = self.sibling();
        reservation.grow(leg.copied_bytes())?;
        Ok(leg.map_last(|bytes| Bytes::from_owner(ChargedBuffer { bytes, _reservation: reservation })))
    }
}

/// A buffer and the memory that is reserved for it.
struct ChargedBuffer {
    bytes: Bytes,
    _reservation: MemoryReservation,
}

impl AsRef<[u8]> for ChargedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::Metrics;

    fn tenant(name: &str) -> TenantId {
        TenantId(name.into())
    }

    #[test]
    fn the_budget_limits_each_tenant_and_the_total() {
        let metrics = Metrics::default();
        let budget = MemoryBudget::new(MemoryLimits { total: 100, tenant: 50 }, &metrics.memory);
        let (mut a, mut b) = (budget.reservation(&tenant("a")), budget.reservation(&tenant("b")));
        a.grow(50).unwrap();
        let over = budget.reservation(&tenant("a")).grow(1).unwrap_err();
        assert_eq!((over.status().as_u16(), over.retry_after().is_some()), (429, true));
        let never = a.sibling().grow(1).unwrap_err();
        assert_eq!((never.status().as_u16(), never.retry_after()), (413, None), "it would never fit");
        assert!(never.to_string().contains("proxy.request_memory_limit"), "{never}");
        b.grow(40).unwrap();
        let mut c = budget.reservation(&tenant("c"));
        c.grow(11).unwrap_err();
        c.grow(10).unwrap();
        let refused = |scope| metrics.memory.refused.with_label_values(&[scope]).get();
        assert_eq!((metrics.memory.reserved.get(), refused("tenant"), refused("total")), (100, 2, 1));
        a.shrink_to(20);
        assert_eq!(metrics.memory.reserved.get(), 70);
        drop((a, b, c));
        assert_eq!(metrics.memory.reserved.get(), 0);
        assert!(budget.reserved.lock().by_tenant.is_empty(), "no tenant is remembered for nothing");
    }

    #[test]
    fn a_derived_buffer_is_charged_until_its_last_clone_is_dropped() {
        let metrics = Metrics::default();
        let budget = MemoryBudget::new(MemoryLimits { total: 100, tenant: 100 }, &metrics.memory);
        let mut memory = budget.reservation(&tenant("a"));
        memory.grow(40).unwrap();
        let source = Bytes::from(vec![b'x'; 40]);
        let same = memory.charge_derived(&source, source.clone()).unwrap();
        assert_eq!((same.as_ptr(), metrics.memory.reserved.get()), (source.as_ptr(), 40), "no copy");
        let derived = memory.charge_derived(&source, vec![b'y'; 50].into()).unwrap();
        let tail = derived.slice(49..);
        assert_eq!((&derived[..], metrics.memory.reserved.get()), (&[b'y'; 50][..], 90));
        let error = memory.charge_derived(&source, vec![b'z'; 11].into()).unwrap_err();
        assert_eq!(error.status().as_u16(), 429);
        drop((memory, derived));
        assert_eq!(metrics.memory.reserved.get(), 50, "a part keeps all of it");
        drop(tail);
        assert_eq!(metrics.memory.reserved.get(), 0);
    }

    #[test]
    fn a_rejected_reservation_takes_nothing() {
        let metrics = Metrics::default();
        let budget = MemoryBudget::new(MemoryLimits { total: 10, tenant: 10 }, &metrics.memory);
        let mut one = budget.reservation(&tenant("a"));
        one.grow(8).unwrap();
        one.grow(usize::MAX).unwrap_err();
        one.grow(2).unwrap();
    }
}
