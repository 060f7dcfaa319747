//! Offload pool: work that takes time proportional to the request runs on a blocking thread if the request is long, so
//! that it does not delay others.
//!
//! A few such threads run at once, at most half of them for one tenant; further work waits in a queue.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use vocabulary::{RequestId, TenantId};

use crate::client_request::ClientRequest;
use crate::error::ApiError;
use crate::memory_budget::MemoryReservation;

/// Bodies of at least this size are parsed, converted, rendered and tokenized on the pool.
pub(crate) const MIN_OFFLOAD_BYTES: usize = 64 << 10;
/// Memory of detached work, in multiples of what it reads: that itself, and two copies of all of it.
const DETACHED_COPIES: usize = 3;
/// Limit of queued requests per tenant.
const MAX_QUEUED_PER_TENANT: usize = 256;

/// Bounded pool of slots for long work.
#[derive(Debug)]
pub struct OffloadPool {
    permits: Arc<Semaphore>,
    slots_per_tenant: usize,
    tenants: Mutex<HashMap<TenantId, Weak<TenantOffloadQueue>>>,
}

/// The slots and the queue of one tenant.
#[derive(Debug)]
struct TenantOffloadQueue {
    permits: Arc<Semaphore>,
    queue_slots: Semaphore,
}

impl OffloadPool {
    /// Returns a pool that runs `permits` tasks at once, of which one tenant gets at most `of_tenant`; each is at least
    /// one.
    pub fn new(permits: usize, of_tenant: usize) -> Self {
        let permits = Arc::new(Semaphore::new(permits.max(1)));
        Self { permits, slots_per_tenant: of_tenant.max(1), tenants: Mutex::default() }
    }

    fn queue(&self, tenant: &TenantId) -> Arc<TenantOffloadQueue> {
        let mut tenants = self.tenants.lock();
        if let Some(queue) = tenants.get(tenant).and_then(Weak::upgrade) {
            return queue;
        }
        tenants.retain(|_, queue| queue.strong_count() > 0);
        let (permits, queue_slots) =
            (Arc::new(Semaphore::new(self.slots_per_tenant)), Semaphore::new(MAX_QUEUED_PER_TENANT));
        let queue = Arc::new(TenantOffloadQueue { permits, queue_slots });
        tenants.insert(tenant.clone(), Arc::downgrade(&queue));
        queue
    }

    /// Runs `work` once there is a slot for it, and returns its result.
    pub async fn run<T: Send + 'static>(
        &self,
        (tenant, request): (&TenantId, RequestId),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let internal = || ApiError::Internal { request: request.to_string() };
        let queue = self.queue(tenant);
        let Ok(queue_permit) = queue.queue_slots.try_acquire() else {
            return Err(ApiError::Overloaded { what: "too many long requests of yours wait to be read" });
        };
        let tenant_permit = queue.permits.clone().acquire_owned().await.map_err(|_| internal())?;
        let permit = self.permits.clone().acquire_owned().await.map_err(|_| internal())?;
        drop(queue_permit);
        // A client that leaves does not stop running work. The tenant's queue stays known while its slots are taken.
        let queue = queue.clone();
        let task = move || (work(), (permit, tenant_permit, queue)).0;
        spawn_blocking(task).await.map_err(|_| internal())
    }
}

/// Which request and tenant a piece of work is for, and its size.
#[derive(Clone, Debug)]
pub struct OffloadSpec {
    request: RequestId,
    tenant: TenantId,
    bytes: usize,
}

impl OffloadSpec {
    /// Describes work on this request's body.
    pub fn of(incoming: &ClientRequest) -> Self {
        Self { request: incoming.id, tenant: incoming.tenant.clone(), bytes: incoming.body.len() }
    }

    /// Describes work for a request that no client sent.
    pub fn unasked(request: RequestId) -> Self {
        Self { request, tenant: TenantId("".into()), bytes: 0 }
    }

    /// Describes work on `bytes` bytes for the same request.
    pub fn on(&self, bytes: usize) -> Self {
        Self { bytes, ..self.clone() }
    }

    /// Runs `work` and returns its result: inline if it is small, else on the pool.
    pub async fn run<T: Send + 'static>(
        self,
        pool: &OffloadPool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        if self.bytes < MIN_OFFLOAD_BYTES {
            return Ok(work());
        }
        pool.run((&self.tenant, self.request), work).await
    }

    /// Runs `work` for a request that has ended, and passes its result to `then`: at once if it is small, else on the
    /// pool, from a task of its own. For `Drop`, which cannot wait. `memory` is grown by what long work holds; where
    /// the budget or the pool refuses it, `then` gets `None`.
    pub fn run_detached<T: Send + 'static>(
        self,
        (pool, memory): (&Arc<OffloadPool>, Option<MemoryReservation>),
        work: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(Option<T>) + Send + 'static,
    ) {
        // Outside of a runtime there is none of its threads to be held up.
        let runtime = Handle::try_current().ok().filter(|_| self.bytes >= MIN_OFFLOAD_BYTES);
        let Some(runtime) = runtime else { return then(Some(work())) };
        let mut memory = memory;
        if memory.as_mut().is_some_and(|memory| memory.grow(DETACHED_COPIES * self.bytes).is_err()) {
            return then(None);
        }
        let pool = pool.clone();
        let task = move || (work(), memory).0;
        runtime.spawn(async move { then(self.run(&pool, task).await.ok()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_budget::{MemoryBudget, MemoryLimits};
    use crate::telemetry::metrics::Metrics;

    fn offload_spec(bytes: usize) -> OffloadSpec {
        OffloadSpec { request: RequestId(1), tenant: TenantId::default(), bytes }
    }

    #[tokio::test]
    async fn only_long_bodies_are_offloaded_to_the_pool() {
        let pool = OffloadPool::new(2, 1);
        let here = std::thread::current().id();
        assert_eq!(offload_spec(MIN_OFFLOAD_BYTES - 1).run(&pool, || std::thread::current().id()).await, Ok(here));
        assert_ne!(offload_spec(MIN_OFFLOAD_BYTES).run(&pool, || std::thread::current().id()).await, Ok(here));
        let broken = offload_spec(MIN_OFFLOAD_BYTES).run(&pool, || panic!("a bug")).await;
        assert_eq!(broken, Err::<(), _>(ApiError::Internal { request: RequestId(1).to_string() }));
        assert_eq!(offload_spec(MIN_OFFLOAD_BYTES).run(&pool, || 1).await, Ok(1), "its permit was returned");
    }

    #[tokio::test]
    async fn long_detached_work_runs_on_the_pool_within_the_memory_budget() {
        let metrics = Metrics::default().memory;
        let room = DETACHED_COPIES * MIN_OFFLOAD_BYTES;
        let budget = MemoryBudget::new(MemoryLimits { total: room, tenant: room }, &metrics);
        let pool = Arc::new(OffloadPool::new(1, 1));
        let here = std::thread::current().id();
        let (told, mut heard) = tokio::sync::mpsc::unbounded_channel();
        let run = |bytes: usize| {
            let (memory, told) = (budget.reservation(&TenantId::default()), told.clone());
            let then = move |ran| told.send(ran).unwrap();
            offload_spec(bytes).run_detached((&pool, Some(memory)), || std::thread::current().id(), then);
        };
        run(MIN_OFFLOAD_BYTES - 1);
        assert_eq!(heard.try_recv(), Ok(Some(here)), "small work runs at once");
        let permit = pool.permits.clone().acquire_owned().await.unwrap();
        run(MIN_OFFLOAD_BYTES);
        tokio::task::yield_now().await;
        assert!(heard.try_recv().is_err(), "it waits for a permit");
        assert_eq!(metrics.reserved.get(), room as i64);
        run(MIN_OFFLOAD_BYTES);
        assert_eq!(heard.try_recv(), Ok(None), "there is no memory for it");
        drop(permit);
        let ran = heard.recv().await.unwrap();
        assert!(ran.is_some_and(|ran| ran != here));
        assert_eq!(metrics.reserved.get(), 0);
    }

    #[tokio::test]
    async fn a_tenant_with_slow_work_leaves_slots_to_others() {
        let pool = Arc::new(OffloadPool::new(2, 1));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let begun = Arc::new(tokio::sync::Notify::new());
        let (of, at) = (pool.clone(), begun.clone());
        let long = tokio::spawn(async move {
            let work = move || {
                at.notify_one();
                held.recv().unwrap();
            };
            of.run((&TenantId("a".into()), RequestId(1)), work).await
        });
        begun.notified().await;
        let same = TenantId("a".into());
        let mine = pool.run((&same, RequestId(2)), || ());
        tokio::pin!(mine);
        assert!(futures::poll!(&mut mine).is_pending(), "its half is taken");
        pool.run((&TenantId("b".into()), RequestId(3)), || ()).await.unwrap();
        release.send(()).unwrap();
        mine.await.unwrap();
        long.await.unwrap().unwrap();
        pool.queue(&TenantId("c".into()));
        pool.queue(&TenantId("d".into()));
        assert!(pool.tenants.lock().len() <= 1, "who has nothing to do is forgotten");
    }

    #[tokio::test]
    async fn work_whose_client_left_keeps_its_place_until_it_is_done() {
        let pool = Arc::new(OffloadPool::new(2, 1));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let begun = Arc::new(tokio::sync::Notify::new());
        let (of, at) = (pool.clone(), begun.clone());
        let tenant = TenantId("a".into());
        let left = tokio::spawn(async move {
            let work = move || {
                at.notify_one();
                held.recv().unwrap();
            };
            of.run((&TenantId("a".into()), RequestId(1)), work).await
        });
        begun.notified().await;
        left.abort();
        assert!(left.await.unwrap_err().is_cancelled());
        let next = pool.run((&tenant, RequestId(2)), || ());
        tokio::pin!(next);
        assert!(futures::poll!(&mut next).is_pending(), "the work goes on");
        release.send(()).unwrap();
        next.await.unwrap();
    }

    #[tokio::test]
    async fn tasks_beyond_the_queue_limit_are_rejected() {
        let pool = OffloadPool::new(1, 1);
        let tenant = TenantId::default();
        let _permit = pool.permits.acquire().await.unwrap();
        let mut waiting: Vec<_> =
            (0..MAX_QUEUED_PER_TENANT).map(|_| Box::pin(pool.run((&tenant, RequestId(1)), || ()))).collect();
        for one in &mut waiting {
            assert!(futures::poll!(one).is_pending());
        }
        let error = pool.run((&tenant, RequestId(1)), || ()).await.unwrap_err();
        assert!(matches!(error, ApiError::Overloaded { .. }), "{error}");
    }
}
