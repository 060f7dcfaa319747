//! Consistency levels of reads, and how they are ensured.
//!
//! A linearizable read asks the leader for a read index, after a quorum has confirmed that it still leads. Leader
//! leases are never trusted, because they do not survive a restart.

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use derive_where::derive_where;
use openraft::async_runtime::instant::Instant;
use openraft::errors::{LinearizableReadError, RaftError};
use openraft::raft::ReadPolicy;
use openraft::storage::RaftStateMachine;
use openraft::{AsyncRuntime, Raft};

use crate::types::TypeConfig;

/// How fresh a view must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Consistency {
    /// The view that this node applied last. Never waits.
    Local,
    /// Contains everything that was acknowledged on any node this long before the read began.
    Bounded(Duration),
    /// Contains everything that was acknowledged on any node before the read began.
    Linearizable,
}

/// Time up to which a node's view is known to contain everything that was acknowledged.
#[derive(Debug)]
#[derive_where(Default)]
pub struct FreshnessClock<I>(Mutex<Option<I>>);

impl<I: Instant> FreshnessClock<I> {
    /// Returns the maximum age of the view; `None` if it was never confirmed.
    pub fn age(&self) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|at| at.elapsed())
    }

    /// Makes the view as fresh as requested. `catch_up` must wait until the view contains everything that was
    /// acknowledged before it was first polled.
    pub async fn ensure_fresh<E>(
        &self,
        consistency: Consistency,
        catch_up: impl Future<Output = Result<(), E>>,
    ) -> Result<(), E> {
        let is_met = match consistency {
            Consistency::Local => true,
            Consistency::Bounded(bound) => self.age().is_some_and(|age| age <= bound),
            Consistency::Linearizable => false,
        };
        if is_met {
            return Ok(());
        }
        // Taken before `catch_up`, because the view may miss what is acknowledged during it.
        let began = I::now();
        catch_up.await?;
        self.confirmed(began);
        Ok(())
    }

    fn confirmed(&self, at: I) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *known = (*known).max(Some(at));
    }
}

/// Returns an index up to which a node must apply to have everything that was acknowledged before the call.
///
/// Only a leader can answer: a quorum confirms, in a round that begins after the call, that this node still leads.
pub async fn read_index<R, M>(raft: &Raft<TypeConfig<R>, M>) -> Result<u64, ReadIndexError<R>>
where
    R: AsyncRuntime,
    M: RaftStateMachine<TypeConfig<R>>,
{
    let (read, _) = raft.get_read_log_id(ReadPolicy::ReadIndex).await?;
    Ok(read.index())
}

/// Error of [`read_index`]: this node does not lead, or no quorum confirms that it does.
pub type ReadIndexError<R> = RaftError<TypeConfig<R>, LinearizableReadError<TypeConfig<R>>>;

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Instant;

    use futures::FutureExt;

    use super::*;

    /// Runs one read whose `catch_up` is ready at once.
    fn read(freshness: &FreshnessClock<Instant>, consistency: Consistency, answer: Result<(), u8>) -> Result<bool, u8> {
        let mut asked = false;
        let catch_up = async {
            asked = true;
            answer
        };
        freshness.ensure_fresh(consistency, catch_up).now_or_never().unwrap()?;
        Ok(asked)
    }

    #[test]
    fn a_read_asks_the_quorum_only_when_the_view_is_too_old() {
        let (freshness, hour) = (FreshnessClock::default(), Duration::from_secs(3_600));
        assert_eq!(read(&freshness, Consistency::Local, Ok(())), Ok(false));
        assert_eq!(freshness.age(), None);
        assert_eq!(read(&freshness, Consistency::Bounded(hour), Err(7)), Err(7));
        assert_eq!(freshness.age(), None, "nothing was confirmed");
        assert_eq!(read(&freshness, Consistency::Bounded(hour), Ok(())), Ok(true));
        assert_eq!(read(&freshness, Consistency::Bounded(hour), Err(7)), Ok(false));
        assert_eq!(read(&freshness, Consistency::Bounded(Duration::ZERO), Ok(())), Ok(true));
        assert_eq!(read(&freshness, Consistency::Linearizable, Ok(())), Ok(true));
    }

    #[test]
    fn view_age_counts_from_the_start_of_the_confirming_read() {
        let freshness = FreshnessClock::<Instant>::default();
        let mut asked = None;
        let catch_up = async {
            let now = *asked.insert(Instant::now());
            while Instant::now() == now {}
            Ok::<_, Infallible>(())
        };
        freshness.ensure_fresh(Consistency::Linearizable, catch_up).now_or_never().unwrap().unwrap();
        assert!(*freshness.0.lock().unwrap() <= asked);
    }
}
