//! Work that takes as long as its request is long: of a long one on a thread that may block, so that others need not wait.
//!
//! A few such threads work at once, for one tenant at most half of them; the rest waits for its turn.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use vocabulary::{RequestId, TenantId};

use crate::error::ApiError;
use crate::incoming::Incoming;

/// Bodies from this on are read, converted, rendered and tokenized aside.
pub(crate) const LONG_BODY: usize = 64 << 10;
/// Most requests of one tenant that wait for a place.
const WAITING: usize = 256;

/// Places for long work.
#[derive(Debug)]
pub struct Aside {
    places: Arc<Semaphore>,
    of_tenant: usize,
    tenants: Mutex<HashMap<TenantId, Weak<Queue>>>,
}

/// The places of one tenant.
#[derive(Debug)]
struct Queue {
    places: Arc<Semaphore>,
    waiting: Semaphore,
}

impl Aside {
    /// `places` at once, of which one tenant gets `of_tenant`; at least one.
    pub fn new(places: usize, of_tenant: usize) -> Self {
        let places = Arc::new(Semaphore::new(places.max(1)));
        Self { places, of_tenant: of_tenant.max(1), tenants: Mutex::default() }
    }

    fn queue(&self, tenant: &TenantId) -> Arc<Queue> {
        let mut tenants = self.tenants.lock();
        if let Some(queue) = tenants.get(tenant).and_then(Weak::upgrade) {
            return queue;
        }
        tenants.retain(|_, queue| queue.strong_count() > 0);
        let (places, waiting) = (Arc::new(Semaphore::new(self.of_tenant)), Semaphore::new(WAITING));
        let queue = Arc::new(Queue { places, waiting });
        tenants.insert(tenant.clone(), Arc::downgrade(&queue));
        queue
    }

    /// What `work` gives, once there is a place for it.
    pub async fn done<T: Send + 'static>(
        &self,
        (tenant, request): (&TenantId, RequestId),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let internal = || ApiError::Internal { request: request.to_string() };
        let queue = self.queue(tenant);
        let Ok(waits) = queue.waiting.try_acquire() else {
            return Err(ApiError::Overloaded { what: "too many long requests of yours wait to be read" });
        };
        let of_tenant = queue.places.clone().acquire_owned().await.map_err(|_| internal())?;
        let place = self.places.clone().acquire_owned().await.map_err(|_| internal())?;
        drop(waits);
        // A client that leaves does not end what runs. The queue is known for as long as its places are taken.
        let at = queue.clone();
        let held = move || (work(), (place, of_tenant, at)).0;
        spawn_blocking(held).await.map_err(|_| internal())
    }
}

/// Whose work, and how much.
#[derive(Clone, Debug)]
pub struct Load {
    request: RequestId,
    tenant: TenantId,
    bytes: usize,
}

impl Load {
    /// Of this request.
    pub fn of(incoming: &Incoming) -> Self {
        Self { request: incoming.id, tenant: incoming.tenant.clone(), bytes: incoming.body.len() }
    }

    /// Of a request that no client sent.
    pub fn unasked(request: RequestId) -> Self {
        Self { request, tenant: TenantId("".into()), bytes: 0 }
    }

    /// As much of the same request.
    pub fn on(&self, bytes: usize) -> Self {
        Self { bytes, ..self.clone() }
    }

    /// What `work` gives.
    pub async fn done<T: Send + 'static>(
        self,
        aside: &Aside,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        if self.bytes < LONG_BODY {
            return Ok(work());
        }
        aside.done((&self.tenant, self.request), work).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(bytes: usize) -> Load {
        Load { request: RequestId(1), tenant: TenantId::default(), bytes }
    }

    #[tokio::test]
    async fn work_of_a_long_body_is_done_on_another_thread_and_that_of_a_short_one_here() {
        let aside = Aside::new(2, 1);
        let here = std::thread::current().id();
        assert_eq!(load(LONG_BODY - 1).done(&aside, || std::thread::current().id()).await, Ok(here));
        assert_ne!(load(LONG_BODY).done(&aside, || std::thread::current().id()).await, Ok(here));
        let broken = load(LONG_BODY).done(&aside, || panic!("a bug")).await;
        assert_eq!(broken, Err::<(), _>(ApiError::Internal { request: RequestId(1).to_string() }));
        assert_eq!(load(LONG_BODY).done(&aside, || 1).await, Ok(1), "its place was given back");
    }

    #[tokio::test]
    async fn a_tenant_whose_work_takes_long_leaves_places_to_others() {
        let aside = Arc::new(Aside::new(2, 1));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let begun = Arc::new(tokio::sync::Notify::new());
        let (of, at) = (aside.clone(), begun.clone());
        let long = tokio::spawn(async move {
            let work = move || {
                at.notify_one();
                held.recv().unwrap();
            };
            of.done((&TenantId("a".into()), RequestId(1)), work).await
        });
        begun.notified().await;
        let same = TenantId("a".into());
        let mine = aside.done((&same, RequestId(2)), || ());
        tokio::pin!(mine);
        assert!(futures::poll!(&mut mine).is_pending(), "its half is taken");
        aside.done((&TenantId("b".into()), RequestId(3)), || ()).await.unwrap();
        release.send(()).unwrap();
        mine.await.unwrap();
        long.await.unwrap().unwrap();
        aside.queue(&TenantId("c".into()));
        aside.queue(&TenantId("d".into()));
        assert!(aside.tenants.lock().len() <= 1, "who has nothing to do is forgotten");
    }

    #[tokio::test]
    async fn work_whose_client_left_keeps_its_place_until_it_is_done() {
        let aside = Arc::new(Aside::new(2, 1));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let begun = Arc::new(tokio::sync::Notify::new());
        let (of, at) = (aside.clone(), begun.clone());
        let tenant = TenantId("a".into());
        let left = tokio::spawn(async move {
            let work = move || {
                at.notify_one();
                held.recv().unwrap();
            };
            of.done((&TenantId("a".into()), RequestId(1)), work).await
        });
        begun.notified().await;
        left.abort();
        assert!(left.await.unwrap_err().is_cancelled());
        let next = aside.done((&tenant, RequestId(2)), || ());
        tokio::pin!(next);
        assert!(futures::poll!(&mut next).is_pending(), "the work goes on");
        release.send(()).unwrap();
        next.await.unwrap();
    }

    #[tokio::test]
    async fn more_than_may_wait_are_refused() {
        let aside = Aside::new(1, 1);
        let tenant = TenantId::default();
        let _place = aside.places.acquire().await.unwrap();
        let mut waiting: Vec<_> = (0..WAITING).map(|_| Box::pin(aside.done((&tenant, RequestId(1)), || ()))).collect();
        for one in &mut waiting {
            assert!(futures::poll!(one).is_pending());
        }
        let refused = aside.done((&tenant, RequestId(1)), || ()).await.unwrap_err();
        assert!(matches!(refused, ApiError::Overloaded { .. }), "{refused}");
    }
}
